"""Short forms for tests of the cache: a manager, and sequences that are computed at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.kv import BlockTable, KVCacheManager, StepPlan

NAMESPACE = b"tests"


def manager(**changes: Any) -> KVCacheManager:
    return KVCacheManager(**{"num_blocks": 12, "num_slots": 6, "max_tails": 3, **changes})


def tokens(first: int, num_tokens: int) -> list[int]:
    return list(range(first, first + num_tokens))


def append(kv: KVCacheManager, table: BlockTable, token_ids: Sequence[int]) -> StepPlan:
    """One step that succeeds."""
    plan = kv.allocate(table, len(token_ids))
    assert plan is not None
    kv.commit(table, token_ids)
    kv.check_integrity()
    return plan


def run(kv: KVCacheManager, token_ids: Sequence[int], namespace: bytes = NAMESPACE) -> BlockTable:
    """A sequence that has computed what it could not reuse, in one step."""
    table = kv.start(kv.match_prefix(token_ids, namespace=namespace), token_ids)
    append(kv, table, token_ids[table.num_tokens :])
    return table


def num_cached(kv: KVCacheManager, token_ids: Sequence[int], namespace: bytes = NAMESPACE) -> int:
    return kv.match_prefix(token_ids, namespace=namespace).num_tokens
