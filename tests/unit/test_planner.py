"""What is advised when the cache's budget is too small."""

from __future__ import annotations

import pytest

from octavo.errors import InvalidRequest
from octavo.formats import get_format
from octavo.kv.planner import plan_cache
from octavo.spec import CacheGroup, CacheSpec, PageShape

SPEC = CacheSpec((CacheGroup("full_attention", 2, 4, PageShape(2, 64, 64)),), "fp32")


def smallest_budget(max_running: int) -> int:
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high) // 2
        try:
            plan_cache(SPEC, get_format("int8", SPEC), middle, max_running)
            high = middle
        except InvalidRequest:
            low = middle + 1
    return low


def refusal(budget_bytes: int, max_running: int) -> str:
    with pytest.raises(InvalidRequest) as caught:
        plan_cache(SPEC, get_format("int8", SPEC), budget_bytes, max_running)
    return str(caught.value)


def test_fewer_running_sequences_are_advised_where_that_helps() -> None:
    one, many = smallest_budget(1), smallest_budget(16)
    assert one < many
    assert refusal(one, 16).endswith("Raise the cache budget (kv_memory, --kv-memory) or lower max_running.")
    assert refusal(many - 1, 16).endswith("or lower max_running.")
    for budget, max_running in ((one - 1, 16), (one - 1, 1)):
        said = refusal(budget, max_running)
        assert f"A cache of {budget:,} bytes is too small for {max_running} running sequences" in said
        assert said.endswith("Raise the cache budget (kv_memory, --kv-memory).")
