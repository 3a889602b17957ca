"""What is remembered of conversations has bounds, and forgetting leaves nothing but sums."""

from __future__ import annotations

import pytest
from families import tiny_loaded

from octavo.engine import lineage
from octavo.sessions.engine import Engine


def prompt(number: int, num_tokens: int = 100) -> list[int]:
    return [(number * 31 + 7 * i) % 300 + 10 for i in range(num_tokens)]


@pytest.fixture
def engine():
    with Engine(tiny_loaded("llama"), kv_memory="480KiB", max_running=4, kv_disk=0) as engine:
        yield engine
        engine.check_integrity()


def test_a_prompt_that_is_asked_for_ever_keeps_the_hashes_of_its_last_answers() -> None:
    lineages = lineage.Lineages()
    one = lineages.begin(b"n", "", range(64))
    for number in range(200):
        lineages.reached(one, range(96), [b"first", b"second", b"%d" % number])
    assert 3 <= len(one.block_hashes) <= 32
    assert {b"first", b"second", b"199", b"198"} <= one.block_hashes.keys()
    assert one.num_bytes >= len(one.block_hashes) * 100
    lineages.reached(one, range(9600), [b"long %d" % number for number in range(300)])
    assert len(one.block_hashes) > 300


def test_hashes_count_towards_what_all_conversations_may_take(monkeypatch) -> None:
    monkeypatch.setattr(lineage, "MAX_BYTES", 100_000)
    lineages = lineage.Lineages()
    for number in range(20):
        one = lineages.begin(b"n", "", [number])
        lineages.reached(one, [number], [b"%d %d" % (number, block) for block in range(100)])
        one.num_turns = 1
        lineages.end(one, None)
    assert len(list(lineages)) < 10


def test_closed_conversations_that_were_ephemeral_leave_sums_alone(engine) -> None:
    for number in range(6):
        chat = engine.conversation(ephemeral=True, max_tokens=40, ignore_eos=True)
        chat.ask("x" * 300)
        answer = chat.say(f"{number}")
        next(answer)
        chat.close()
        answer.close()
    engine.generate(prompt(1, 300), max_tokens=9)
    seen = engine.snapshot()
    assert seen.totals.num_requests == 13
    assert seen.num_evicted == engine.counters().num_evicted
    core = engine._core
    lineages, own = core.onlooker.lineages, core.namespace("")
    assert lineages.totals.keys() == {b"", own}
    assert core._cache.manager.num_evicted.keys() <= {b"", own}
    assert [one.namespace for one in lineages] == [own]


def test_a_name_is_not_given_twice(monkeypatch) -> None:
    monkeypatch.setattr(lineage, "_MAX_NAMESPACES", 3)
    lineages = lineage.Lineages()
    assert [lineages.begin(b"n", "", [number]).name for number in range(2)] == ["c1", "c2"]
    lineages.forget(b"n")
    assert lineages.begin(b"n", "", [5]).name == "c3"
    for number in range(10):
        lineages.begin(b"other %d" % number, "", [1])
    assert len(lineages._numbers) == 3


def test_what_a_turn_under_way_goes_on_from_stays_when_it_is_to_be_forgotten(engine) -> None:
    first = engine.generate(prompt(0), max_tokens=33, ignore_eos=True)
    ids = [*prompt(0), *first.choices[0].token_ids]
    turn = engine.stream([*ids, 11, 12], max_tokens=9, ignore_eos=True)
    next(turn)
    engine.forget_sequence(ids)
    list(turn)
    assert engine.generate([*ids, 11, 12, 13], max_tokens=1).usage.cached_tokens >= len(ids)
    assert [one.name for one in engine.snapshot().conversations] == ["c1"]


def test_what_was_preempted_when_it_was_forgotten_leaves_nothing(engine) -> None:
    first = engine.stream(prompt(0), max_tokens=40, ignore_eos=True, cache_namespace="ada")
    next(first)
    urgent = engine.stream(prompt(1, 400), max_tokens=40, n=4, urgency=1, ignore_eos=True)
    next(urgent)  # in the place of the first
    engine.forget("ada")
    list(urgent)
    list(first)
    assert engine.generate(prompt(0), max_tokens=1, cache_namespace="ada").usage.cached_tokens == 0
