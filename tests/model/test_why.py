"""Planted causes: each time less is reused than could have been, the reply or the journal names the right one."""

from __future__ import annotations

import time

import pytest
from families import answers_at_once, tiny_loaded

from octavo.engine import tiers
from octavo.engine.engine import TokenEngine
from octavo.engine.journal import Journal

TEXT = "The history of the book is long. " * 12
CHANGED = TEXT[:150] + "#" + TEXT[151:]
"""One token a byte: the prompt of a text has as many tokens."""


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(tiers, "_MIN_PATIENCE_S", 10.0)
    monkeypatch.setattr(tiers.Tiers, "_is_slow", lambda _: False)


def life(**settings) -> TokenEngine:
    return TokenEngine(tiny_loaded("llama"), **{"kv_memory": "64MiB", "kv_disk": 0, **settings})


def small() -> TokenEngine:
    """With room for 25 blocks."""
    return life(kv_memory="480KiB", max_running=2, kv_format="raw")


def ask(engine: TokenEngine, text: str, **options):
    reply = engine.generate(text, max_tokens=1, **options)
    assert engine.recent(1)[0].usage == reply.usage
    return reply


def fill(engine: TokenEngine) -> None:
    for number in range(8):
        engine.generate([(number * 31 + 7 * i) % 300 + 10 for i in range(128)], max_tokens=1)


def new():
    with life() as engine:
        return ask(engine, TEXT).why


def changed_token():
    with life() as engine:
        ask(engine, TEXT)
        return ask(engine, CHANGED).why


def dropped_text():
    with life() as engine:
        ask(engine, TEXT[:150] + "<think>What might he mean? I had better say it.</think>" + TEXT[150:])
        return ask(engine, TEXT).why


def below_one_block():
    with life() as engine:
        ask(engine, TEXT)
        return ask(engine, TEXT[:200]).why


def evicted():
    with small() as engine:
        ask(engine, TEXT)
        fill(engine)
        return ask(engine, TEXT).why


def expired():
    with small() as engine:
        ask(engine, TEXT, ttl_s=0.01)
        time.sleep(0.02)
        fill(engine)
        return ask(engine, TEXT).why


def expired_on_disk():
    with life(kv_disk="1GiB") as engine:
        ask(engine, TEXT, ttl_s=2.0)
        engine.flush()
        time.sleep(2.0)
        engine._core._cache.forget_all()
        engine._core._cache.manager._departed._causes.clear()  # as after a restart
        return ask(engine, TEXT).why


def cleared():
    with life() as engine:
        ask(engine, TEXT)
        engine.clear()
        return ask(engine, TEXT).why


def no_cache():
    with life() as engine:
        return engine.generate(TEXT, max_tokens=3, ignore_eos=True, cache=False).why


def other_settings():
    with life(kv_disk="1GiB", kv_format="int4") as engine:
        ask(engine, TEXT)
    with life(kv_disk="1GiB") as engine:
        return ask(engine, TEXT).why


def other_model():
    with life(kv_disk="1GiB") as engine:
        ask(engine, TEXT)
    with TokenEngine(tiny_loaded("qwen2"), kv_memory="64MiB", kv_disk="1GiB") as engine:
        return ask(engine, TEXT).why


def other_tenant():
    with life(kv_disk="1GiB") as engine:
        ask(engine, TEXT, cache_namespace="ada")
        engine.flush()
        reply = ask(engine, TEXT, cache_namespace="bob")
        assert reply.why.cause == "new", "a tenant is not told what others have asked"
        assert [record.why.cause for record in engine.recent(tenant="bob")] == ["new"]
        return engine.recent()[0].why


def preempted():
    prompts = [[(i * 31 + 7 * j) % 300 + 10 for j in range(100)] for i in range(4)]
    with life(kv_memory="420KiB", max_running=4, kv_format="raw", speculate="off") as engine:
        replies = answers_at_once(engine, prompts, max_tokens=150)
        assert engine._core._scheduler.num_preempted
        whys = [reply.why for reply in replies if reply.why.cause == "preempted"]
        assert whys
        assert all(0 <= why.position < 250 for why in whys)
        return whys[0]


def test_a_preempted_request_says_what_was_computed_once_more() -> None:
    why = preempted()
    assert why.num_recomputed_tokens > 0
    assert why.cost_s > 0
    assert f"{why.num_recomputed_tokens:,} token" in why.message


@pytest.mark.parametrize(
    ("plant", "cause", "position", "num_recomputed"),
    [
        (new, "new", 0, 0),
        (changed_token, "changed_token", 128, 22),
        (dropped_text, "dropped_text", 128, 22),
        (below_one_block, "below_one_block", 192, 7),
        (evicted, "evicted", 0, 395),
        (expired, "expired", 0, 395),
        (expired_on_disk, "expired", 0, 384),
        (cleared, "cleared", 0, 395),
        (no_cache, "no_cache", 0, 0),
        (other_settings, "other_settings", 0, 0),
        (other_model, "other_settings", 0, 0),
        (other_tenant, "other_tenant", 0, 395),
    ],
)
def test_planted_causes(plant, cause, position, num_recomputed) -> None:
    why = plant()
    assert (why.cause, why.position, why.num_recomputed_tokens) == (cause, position, num_recomputed)
    assert (why.cost_s > 0) == (cause != "new")
    assert why.message.endswith(".")


def test_a_difference_is_shown_as_text() -> None:
    difference = changed_token().difference
    assert difference.position == 150
    assert TEXT[:150].endswith(difference.before)
    assert len(difference.before) == len(difference.now) == 12
    assert CHANGED[150:].startswith(difference.now)
    assert TEXT[150:].startswith(difference.earlier)
    assert dropped_text().difference.earlier == "<think>What "


def test_only_its_tenant_sees_the_text() -> None:
    with life() as engine:
        ask(engine, TEXT, cache_namespace="ada")
        ask(engine, CHANGED, cache_namespace="ada")
        assert engine.recent(1, tenant="ada")[0].why.difference is not None
        assert engine.recent(1)[0].why.difference is None
        assert engine.recent(1)[0].why.cause == "changed_token"


def test_what_differs_is_named() -> None:
    assert "with cache format int4 (now int8);" in other_settings().message
    assert "Another model (tiny-llama) has computed this prompt" in other_model().message


def test_the_cost_is_a_share_of_the_time_in_which_the_prompt_was_read() -> None:
    with life() as engine:
        ask(engine, TEXT)
        reply = ask(engine, CHANGED)
        share = (22 + 396 - 151) / (396 - 128)  # what is in the block before it, and all behind it
        assert reply.why.cost_s == pytest.approx(reply.timings.prefill_s * share)
        assert " 245 tokens behind it are as before" in reply.why.message
        engine.clear()
        reply = ask(engine, TEXT[:200] + CHANGED[:200])
        assert reply.why.cause == "cleared"
        assert reply.why.cost_s == pytest.approx(reply.timings.prefill_s * 192 / 400)


def test_nothing_to_tell_where_all_that_was_known_was_reused() -> None:
    with life() as engine:
        ask(engine, TEXT)
        for text in (TEXT, TEXT + "And on."):
            assert ask(engine, text).why is None


def test_what_is_ephemeral_leaves_no_text() -> None:
    with life() as engine:
        ask(engine, TEXT)
        why = ask(engine, CHANGED, ephemeral=True).why
        assert (why.cause, why.difference) == ("changed_token", None)


def test_the_journal_has_the_last_requests_of_each() -> None:
    with life() as engine:
        for i in range(3):
            engine.generate(TEXT[i:], max_tokens=1, cache_namespace="ada")
        engine.generate(TEXT, max_tokens=4, cache_namespace="bob", ignore_eos=True)
        engine.generate(TEXT, max_tokens=4, cache_namespace="ada", ignore_eos=True)
        latest, second, *others = engine.recent()
        assert (latest.tenant, second.tenant, len(others)) == ("ada", "bob", 3)
        assert (latest.model, latest.finish_reason) == ("tiny-llama", "length")
        assert (latest.usage.prompt_tokens, latest.memory_tokens, latest.usage.computed_tokens) == (
            396,
            395,
            1,
        )
        assert 0 < latest.timings.ttft_s <= latest.timings.total_s
        assert latest.finished_s == pytest.approx(time.time(), abs=60)
        assert engine.recent(2) == [latest, second]
        assert [record.usage.prompt_tokens for record in engine.recent(tenant="ada")] == [396, 394, 395, 396]
        engine.forget("ada")
        assert engine.recent(tenant="ada") == []
        assert engine.recent() == [second]


def test_loaded_tokens_are_told_apart() -> None:
    with life(kv_disk="1GiB") as engine:
        ask(engine, TEXT)
    with life(kv_disk="1GiB") as engine:
        ask(engine, TEXT)
        record = engine.recent()[0]
        assert (record.memory_tokens, record.usage.loaded_tokens) == (0, 395)


def test_the_oldest_is_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(Journal.__init__, "__defaults__", (4,))
    with life() as engine:
        prompts = [list(range(10 + i, 60 + i)) for i in range(6)]
        for i, prompt in enumerate(prompts):
            engine.generate(prompt, max_tokens=1, cache_namespace=str(i % 2))
        assert [record.tenant for record in engine.recent()] == ["1", "0", "1", "0"]
        answers_at_once(engine, prompts, max_tokens=5)
        assert len(engine.recent()) == 4
        assert len(engine._core.journal._for_operator) <= 4
        assert not engine._core.journal._doubts
