"""Beginnings that every namespace may take, and nothing behind them."""

from __future__ import annotations

import pytest
from families import tiny_loaded

from octavo.engine.engine import TokenEngine
from octavo.engine.shared import SHARED

PUBLIC = list(range(10, 110))  # three blocks and four tokens
ASK = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def engine():
    with TokenEngine(tiny_loaded("llama"), kv_memory="64MiB", debug_fill=True) as engine:
        yield engine
        engine.check_integrity()


def share(engine: TokenEngine) -> None:
    engine.generate(PUBLIC, max_tokens=1, cache_namespace=SHARED, pin="public")


def test_every_namespace_goes_on_from_it_to_the_same_bits(engine):
    prompt = [*PUBLIC, *range(200, 250)]
    bare = engine.generate(prompt, cache=False, logprobs=3, **ASK)
    share(engine)
    for tenant in ("ada", "bob", ""):
        first = engine.generate(prompt, cache_namespace=tenant, logprobs=3, **ASK)
        again = engine.generate(prompt, cache_namespace=tenant, logprobs=3, **ASK)
        assert first.choices == again.choices == bare.choices
        assert (first.usage.cached_tokens, first.usage.computed_tokens) == (96, len(prompt) - 96)
        assert again.usage.cached_tokens == len(prompt) - 1


def test_nothing_behind_it_is_told_to_another(engine):
    share(engine)
    secret = [*PUBLIC, *range(200, 250)]
    engine.generate(secret, cache_namespace="ada", **ASK)
    for prompt in (secret, [*PUBLIC, *range(200, 210)], [*PUBLIC[:96], *range(200, 210)]):
        other = engine.generate(prompt, cache_namespace="bob", **ASK)
        cold = engine.generate(prompt, cache_namespace=f"cold {prompt[96]} {len(prompt)}", **ASK)
        assert other.usage.cached_tokens == cold.usage.cached_tokens == 96
        assert other.why == cold.why
        engine.forget("bob")


def test_it_takes_the_place_of_a_tail_and_of_nothing_else(engine):
    engine.generate(PUBLIC[:40], cache_namespace="ada", max_tokens=1)  # a block and a tail of its own
    share(engine)
    assert engine.generate(PUBLIC[:41], cache_namespace="ada", max_tokens=1).usage.cached_tokens == 40
    assert engine.generate([*PUBLIC, 5], cache_namespace="ada", max_tokens=1).usage.cached_tokens == 96
    own = engine.generate([*PUBLIC, 5, 6], cache_namespace="ada", max_tokens=1)
    assert own.usage.cached_tokens == 101
    differs = engine.generate([*PUBLIC[:70], 7, 8], cache_namespace="ada", max_tokens=1)
    assert differs.usage.cached_tokens == 64


def test_forgetting_a_tenant_leaves_it_and_clearing_does_not(engine):
    share(engine)
    prompt = [*PUBLIC, *range(200, 250)]
    engine.generate(prompt, cache_namespace="ada", **ASK)
    engine.forget("ada")
    assert engine.generate(prompt, cache_namespace="ada", **ASK).usage.cached_tokens == 96
    engine.clear()
    assert engine.generate(prompt, cache_namespace="bob", **ASK).usage.cached_tokens == 0


def test_copies_are_evicted_like_others_and_the_shared_blocks_are_not():
    with TokenEngine(tiny_loaded("llama"), kv_memory="192KiB", max_running=2) as engine:
        share(engine)
        num_tokens = engine._core._cache.plan.num_blocks * 32
        prompt = [*PUBLIC, *(index % 200 + 10 for index in range(num_tokens - 96 - len(PUBLIC) - 20))]
        bare = engine.generate(prompt, cache=False, max_tokens=2, ignore_eos=True)
        for tenant in ("ada", "bob", "cyd"):
            reply = engine.generate(prompt, cache_namespace=tenant, max_tokens=2, ignore_eos=True)
            assert reply.token_ids == bare.token_ids
            assert reply.usage.cached_tokens == 96
            engine.check_integrity()
