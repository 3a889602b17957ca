"""Loading from the tier below beside other work: what is slow is told from who is busy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from core_driver import CoreDriver, prompt_of
from families import tiny_loaded

from octavo.engine.engine import TokenEngine
from octavo.engine.runner import Runner
from octavo.engine.tiers import Tiers
from octavo.kv.storage.store_tier import StoreTier

PROMPT = [5 + index % 250 for index in range(330)]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is on disk."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    with TokenEngine(tiny_loaded("llama"), kv_memory="64MiB", kv_disk="64MiB") as engine:
        engine.generate(PROMPT, max_tokens=1)
        assert engine.flush()


def test_a_tier_is_not_slow_because_the_engine_is_busy(stored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Runner.run

    def slow(self: Runner, *arguments: Any) -> Any:
        time.sleep(0.2)
        return run(self, *arguments)

    with TokenEngine(tiny_loaded("llama"), kv_memory="64MiB", kv_disk="64MiB") as engine:
        other = engine.stream(PROMPT[:3], max_tokens=20, ignore_eos=True, cache_namespace="bob")
        next(other)
        monkeypatch.setattr(Runner, "run", slow)
        reply = engine.generate(PROMPT, max_tokens=1)
        monkeypatch.setattr(Runner, "run", run)
        other.close()
        assert reply.usage.loaded_tokens == 329  # the open block too
        tiers = engine._core._cache.tiers
        assert tiers._load_s.value is not None
        assert tiers._load_s.value < 0.1  # of a block, ten of which came while a step of 0.2 s was under way


def test_a_stalled_tier_is_not_waited_for_any_longer_because_others_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = CoreDriver()
    driver.add("other", prompt_of(1, 5), max_tokens=100)
    driver.step()
    tiers = driver.core._cache.tiers
    monkeypatch.setattr(tiers.tier, "load", lambda _: True)  # and nothing ever comes
    driver.add("a", prompt_of(2, 100))
    while not tiers._loading:
        driver.step()
    (waiting,) = tiers._loading.values()
    waiting.until_s = time.perf_counter()
    driver.run()
    assert [*driver.replies] == ["a", "other"]
    assert driver.is_clean()


def test_a_full_queue_is_waited_for_as_long_as_computing_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    waits: list[float] = []
    wait = Tiers._wait_for_room

    def timed(self: Tiers) -> None:
        began_s = time.perf_counter()
        wait(self)
        waits.append(time.perf_counter() - began_s)

    monkeypatch.setattr(Tiers, "_wait_for_room", timed)
    monkeypatch.setattr(StoreTier, "has_room", lambda _: False)
    with TokenEngine(tiny_loaded("llama"), kv_memory="2MiB", kv_disk="64MiB") as engine:
        for number in range(40):
            prompt = [5 + (number * 7 + index) % 250 for index in range(330)]
            assert engine.generate(prompt, max_tokens=1).finish_reason == "length"
        per_block_s = 32 * (engine._core._cache.tiers._compute_s.value or 0)
    assert waits
    assert sorted(waits)[len(waits) // 2] < 20 * per_block_s + 0.05


def test_a_prompt_that_is_read_ahead_is_there_when_it_is_asked_for(stored: None) -> None:
    with TokenEngine(tiny_loaded("llama"), kv_memory="64MiB", kv_disk="64MiB") as engine:
        ahead = engine.prefetch(PROMPT).result(60)
        assert ahead.usage.loaded_tokens == 329  # the open block too
        reply = engine.generate([*PROMPT, 9, 10], max_tokens=1)
        assert (reply.usage.loaded_tokens, reply.usage.computed_tokens) == (0, 2)
        assert engine.prefetch([1000]).exception(60) is not None  # there is no such token
