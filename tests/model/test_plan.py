"""The plan's numbers are those of the engine that then runs."""

from __future__ import annotations

import pytest

from octavo.engine.engine import TokenEngine
from octavo.errors import RequestTooLarge
from octavo.formats.page_format import FORMATS
from octavo.kv.planner import block_bytes_of, longest_context, plan_cache, sequence_bytes
from octavo.models.outline import outline


@pytest.mark.bundled
@pytest.mark.parametrize(("kv_format", "weights"), [("int8", "auto"), ("int4", "fp32")])
def test_smollm2_is_planned_to_the_byte(kv_format: str, weights: str) -> None:
    budget, page_format = 48 << 20, FORMATS[kv_format]
    with TokenEngine(
        "smollm2", kv_memory=budget, kv_disk=0, kv_format=kv_format, weights=weights, max_running=2
    ) as engine:
        found = outline("smollm2")
        spec = found.spec(engine._core.prepared.spec.dtype)
        assert spec == engine._core.prepared.spec
        assert plan_cache(spec, page_format, budget, 2) == engine._core._cache.plan
        memory = engine.memory()
        assert memory.kv_bytes_per_token == block_bytes_of(spec, page_format) // 32
        planned = found.weights_bytes(weights, spec.dtype)
        assert abs(planned - memory.weights_bytes) <= 0.01 * memory.weights_bytes
        for num_tokens in (100, 300):
            engine.clear()
            engine.generate([7 + i % 90 for i in range(num_tokens)], max_tokens=1)
            assert engine.memory().kv_reusable_bytes == sequence_bytes(spec, page_format, num_tokens)
        longest = longest_context(spec, page_format, budget, 1, 2)
        with pytest.raises(RequestTooLarge):
            engine.generate([5] * (longest + 1), max_tokens=1)
        engine._core._cache.check_room(range(longest))
