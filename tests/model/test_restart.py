"""The cache outlives the engine: what comes back from disk changes no bit, and what must not come back does not."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from families import answers_at_once, tiny_loaded

from octavo.engine import tiers
from octavo.engine.engine import TokenEngine
from octavo.engine.shared import SHARED
from octavo.kv.storage.disk import DiskStore

PROMPT = [(7 * i) % 300 + 10 for i in range(200)]


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """A folder of this test's own."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(
        tiers, "_MIN_PATIENCE_S", 10.0
    )  # these models compute faster than a busy machine loads
    monkeypatch.setattr(tiers.Tiers, "_is_slow", lambda _: False)
    return tmp_path / "kv"


def life(family: str = "llama", dtype: torch.dtype = torch.float32, **settings) -> TokenEngine:
    """An engine, as if in a new process."""
    # Without drafts, whose rows of logits would come among those of the answer.
    settings = {"kv_memory": "64MiB", "kv_disk": "1GiB", "debug_fill": True, "speculate": "off", **settings}
    return TokenEngine(tiny_loaded(family, dtype), **settings)


def answer(engine: TokenEngine, prompt: list[int], num_tokens: int = 12, **options):
    """The reply, and the logits `[num_tokens, vocabulary]` that its tokens were chosen from."""
    rows = []
    run = engine._core._cache.runner.run

    def recorded(*args, **options):
        logits = run(*args, **options)
        rows.append(torch.as_tensor(logits).clone())
        return logits

    engine._core._cache.runner.run = recorded
    reply = engine.generate(prompt, max_tokens=num_tokens, ignore_eos=True, **options)
    engine._core._cache.runner.run = run
    return reply, torch.cat(rows)[-num_tokens:]


@pytest.mark.parametrize("kv_format", ["raw", "int8", "k8v4", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_after_a_restart_the_next_turn_computes_only_what_is_new(family, dtype, kv_format) -> None:
    settings = {"kv_format": kv_format}
    with life(family, dtype, kv_disk=0, **settings) as engine:
        first, _ = answer(engine, PROMPT, 25)
        turn = [*PROMPT, *first.token_ids, 11, 12, 13]
        expected, logits = answer(engine, turn)
    with life(family, dtype, **settings) as engine:
        assert answer(engine, PROMPT, 25)[0].token_ids == first.token_ids
    with life(family, dtype, **settings) as engine:
        reply, warm = answer(engine, turn)
        engine.check_integrity()
    assert reply.token_ids == expected.token_ids
    assert torch.equal(warm, logits)
    assert (reply.usage.cached_tokens, reply.usage.computed_tokens) == (224, 4)
    assert reply.usage.loaded_tokens == 224
    assert reply.why is None


@pytest.mark.parametrize("num_tokens", [33, 64, 65, 70, 95, 96, 97])
def test_wherever_the_first_answer_ended(num_tokens: int) -> None:
    with life(kv_disk=0) as engine:
        _, logits = answer(engine, PROMPT[:128])
    with life() as engine:
        answer(engine, PROMPT[:num_tokens], 1)
    with life() as engine:
        reply, warm = answer(engine, PROMPT[:128])
    assert reply.usage.cached_tokens == num_tokens
    assert torch.equal(warm, logits)


@pytest.mark.parametrize(
    "other",
    [
        {"kv_format": "k8v4"},
        {"family": "qwen2"},
        {"dtype": torch.bfloat16},
        {"kernels": "reference"},
        {"namespace": "other"},
        {"isa": "AVX2"},
        {"torch": "9.9.9"},
        {"rope": "other"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_was_computed_under_other_conditions_is_not_used(monkeypatch, other) -> None:
    other = dict(other)
    with life() as engine:
        answer(engine, PROMPT)
    if "isa" in other:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other")
        del other["isa"]
    if "torch" in other:
        monkeypatch.setattr(torch, "__version__", other.pop("torch"))
    if "rope" in other:
        from octavo.engine import core

        prepare = core.prepare_model

        def turned(*args, **options):
            prepared = prepare(*args, **options)
            prepared.identity["rope"] = "other"
            return prepared

        monkeypatch.setattr(core, "prepare_model", turned)
        del other["rope"]
    options = {"cache_namespace": other.pop("namespace")} if "namespace" in other else {}
    family, dtype = other.pop("family", "llama"), other.pop("dtype", torch.float32)
    with life(family, dtype, kv_disk=0, **other) as engine:
        _, logits = answer(engine, PROMPT)
    with life(family, dtype, **other) as engine:
        reply, warm = answer(engine, PROMPT, **options)
        assert reply.usage.cached_tokens == 0
        assert torch.equal(warm, logits)


def test_a_working_set_larger_than_memory_is_computed_once() -> None:
    prompts = [[(i + 3 * j) % 300 + 10 for j in range(150)] for i in range(12)]
    with life(kv_disk=0, kv_format="raw") as engine:
        expected = [answer(engine, prompt) for prompt in prompts]
    with life(kv_memory="260KiB", max_running=2, kv_format="raw") as engine:
        assert engine._core._cache.plan.num_blocks < 12 * 4 / 3
        for _ in range(2):
            computed = []
            for i, prompt in enumerate(prompts):
                reply, logits = answer(engine, prompt)
                assert torch.equal(logits, expected[i][1])
                memory = engine.memory()
                assert memory.kv_allocated_bytes <= memory.kv_budget_bytes
                computed.append(reply.usage.computed_tokens)
            assert engine.flush()
        assert max(computed) <= 32
        assert memory.disk.num_loaded > 30
        engine.check_integrity()


def test_many_at_once_with_too_little_memory_answer_as_if_alone() -> None:
    """Loading sequences are preempted, find no room, and share what others load."""
    prompts = [[(i + 3 * j) % 300 + 10 for j in range(150)] for i in range(6)] * 2
    with life(kv_disk=0, kv_format="raw") as engine:
        expected = [engine.generate(p, max_tokens=60, ignore_eos=True).token_ids for p in prompts]
    with life(kv_memory="420KiB", max_running=6, kv_format="raw") as engine:
        for _ in range(3):
            replies = answers_at_once(engine, prompts, max_tokens=60)
            assert [reply.token_ids for reply in replies] == expected
            assert engine.memory().kv_used_bytes == 0
            engine.check_integrity()
        assert engine.memory().disk.num_loaded


def test_two_engines_share_one_store() -> None:
    with life(kv_disk=0) as engine:
        expected = answer(engine, PROMPT)[1]
    with life() as first, life() as second:
        answer(first, PROMPT)
        assert first.flush()
        reply, logits = answer(second, PROMPT)
        assert torch.equal(logits, expected)
        assert reply.usage.loaded_tokens >= 192
        assert first._core._cache.tiers.tier.take_complaint() is None


def test_what_is_ephemeral_is_nowhere_when_it_has_ended() -> None:
    with life() as engine:
        answer(engine, PROMPT, ephemeral=True)
        engine.flush()
        memory = engine.memory()
        assert (memory.kv_reusable_bytes, memory.disk.num_written) == (0, 0)
        assert answer(engine, PROMPT)[0].usage.cached_tokens == 0
        assert answer(engine, PROMPT, ephemeral=True)[0].usage.cached_tokens == len(PROMPT) - 1


def test_what_is_ephemeral_does_not_wait_for_the_disk(monkeypatch) -> None:
    monkeypatch.setattr(tiers, "_MIN_PATIENCE_S", 60.0)
    with life() as engine:
        answer(engine, PROMPT)
    with life() as engine:
        answer(engine, PROMPT[::-1], 1)  # its namespace is known to the disk
        engine.generate(PROMPT[:70], max_tokens=1, cache_namespace=SHARED, disk=False)
        engine.flush()
        store = engine._core._cache.tiers.tier._store
        store.get = lambda _: time.sleep(60)
        reply, _ = answer(engine, PROMPT, ephemeral=True)
        assert (reply.usage.cached_tokens, reply.usage.loaded_tokens) == (64, 0)
        engine.check_integrity()


def test_clearing_reaches_the_disk_and_nothing_is_served_afterwards() -> None:
    with life() as engine:
        answer(engine, PROMPT)
        engine.flush()
        engine.clear()
        assert answer(engine, PROMPT)[0].usage.cached_tokens == 0
        answer(engine, PROMPT)
        engine.flush()
        other = DiskStore(engine._core._cache.tiers.tier._store.path)
        other.mark_cleared()  # what `octavo cache clear` does first, in another process
        other.clear()
        other.close()
        assert answer(engine, PROMPT)[0].usage.cached_tokens == 0
    with life() as engine:
        reply, _ = answer(engine, PROMPT)
        assert reply.usage.loaded_tokens, "what was computed after the clearing is kept"


def test_a_slow_disk_is_not_waited_for_longer_than_computing_takes(monkeypatch) -> None:
    monkeypatch.setattr(tiers, "_MIN_PATIENCE_S", 0.25)
    with life(kv_disk=0) as engine:
        expected = answer(engine, PROMPT)[1]
    with life() as engine:
        answer(engine, PROMPT)
    with life() as engine:
        store = engine._core._cache.tiers.tier._store
        get = store.get
        store.get = lambda name: time.sleep(0.4) or get(name)
        began = time.monotonic()
        reply, logits = answer(engine, PROMPT)
        assert torch.equal(logits, expected)
        assert reply.usage.loaded_tokens < 192
        assert time.monotonic() - began < 5  # seven blocks in 0.4 s each, and then some
        engine.check_integrity()


def test_a_store_that_fails_is_told_once_and_answers_go_on(store) -> None:
    with life() as engine:
        answer(engine, PROMPT)
        engine.flush()
        (store / "store-1.sqlite").unlink()
        replies = [answer(engine, PROMPT[::-1])[0]]
        assert not engine.flush()
        replies += [answer(engine, PROMPT[i:])[0] for i in range(3)]
    notes = [note for reply in replies for note in reply.notes]
    assert len(notes) == 1
    assert "was deleted" in notes[0]


def test_aborting_while_loading_leaves_nothing_behind() -> None:
    with life() as engine:
        answer(engine, PROMPT)
    with life() as engine:
        store = engine._core._cache.tiers.tier._store
        get, entered = store.get, threading.Event()
        store.get = lambda name: entered.set() or time.sleep(0.02) or get(name)
        events = engine.stream(PROMPT, max_tokens=5)
        assert entered.wait(10)
        events.close()
        store.get = get
        reply, _ = answer(engine, PROMPT)
        assert reply.usage.cached_tokens > 0
        assert engine.memory().kv_used_bytes == 0
        engine.check_integrity()


def test_a_forgotten_sequence_is_gone_in_memory_and_on_disk_but_for_what_others_have() -> None:
    with life() as engine:
        first, _ = answer(engine, PROMPT)
        longer = [*PROMPT, *first.token_ids, 11, 12, 13]
        second, _ = answer(engine, longer)
        other = [*PROMPT[:70], *range(20, 80)]  # two blocks that both have
        kept, _ = answer(engine, other)
        assert engine.forget_sequence([*PROMPT, *first.token_ids][:-1]) == 0, "a longer one goes on from it"
        assert engine.generate(PROMPT, max_tokens=1).usage.cached_tokens == len(PROMPT) - 1
        whole = [*longer, *second.token_ids]
        assert engine.flush()
        engine.forget_sequence(whole[:-1], cache_namespace="nobody")
        engine.forget_sequence(whole[:-1])
        assert engine.flush()
        again = engine.generate(whole, max_tokens=1)
        assert (again.usage.cached_tokens, again.usage.loaded_tokens) == (64, 0)
        assert again.why.cause == "cleared"
        engine.forget_sequence(whole)
        engine.check_integrity()
        assert engine.flush()
    with life() as engine:
        assert engine.generate(whole, max_tokens=1).usage.cached_tokens == 64
        engine.clear()
    with life() as engine:
        known = [*PROMPT, *answer(engine, PROMPT)[0].token_ids]
    with life() as engine:  # which knows of no conversations
        engine.forget_sequence(known[:-1])
    with life() as engine:
        assert engine.generate(known, max_tokens=1).usage.cached_tokens == 0
    assert kept.usage.cached_tokens == 64
