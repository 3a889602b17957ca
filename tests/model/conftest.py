"""One engine on a tiny random model for each file that has none of its own."""

from __future__ import annotations

import pytest
from tiny_engine import FIRST, SECOND, make_engine


@pytest.fixture(scope="module")
def engine():
    with make_engine() as engine:
        yield engine
        engine.check_integrity()
        assert engine.memory().kv_used_bytes == 0


@pytest.fixture(scope="module")
def expected(engine):
    """Each prompt's greedy answer, computed alone and without cache."""
    return {
        tuple(prompt): engine.generate(prompt, max_tokens=40, ignore_eos=True, cache=False).token_ids
        for prompt in (FIRST, SECOND)
    }
