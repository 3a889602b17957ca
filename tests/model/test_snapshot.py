"""What people who look on are told: blocks, memory and conversations, each tenant's own, and acting on them."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
from families import tiny_loaded

from octavo.engine.messages import Delta
from octavo.engine.snapshot import Snapshot
from octavo.errors import InvalidRequest
from octavo.sessions.engine import Engine


def prompt(number: int, num_tokens: int = 100) -> list[int]:
    return [(number * 31 + 7 * i) % 300 + 10 for i in range(num_tokens)]


@pytest.fixture
def engine():
    with Engine(tiny_loaded("llama"), kv_memory="480KiB", max_running=4, kv_format="int8") as engine:
        yield engine
        engine.check_integrity()


def names(snapshot: Snapshot) -> dict[str, int]:
    return {one.name: one.num_blocks for one in snapshot.conversations}


def test_blocks_are_cells_and_their_bytes_are_the_reports(engine) -> None:
    assert engine.snapshot().cells == ()
    engine.generate(prompt(0), max_tokens=8, ignore_eos=True)
    seen = engine.snapshot()
    sealed = [cell for cell in seen.cells if cell.kind == "sealed"]
    opened = [cell for cell in seen.cells if cell.kind == "open"]
    assert [cell.position for cell in sealed] == [0, 32, 64]
    assert [(cell.position, cell.num_tokens) for cell in opened] == [(96, 11)]
    assert {cell.state for cell in seen.cells} == {"reusable"}
    assert {cell.conversations for cell in seen.cells} == {("c1",)}
    assert all(cell.num_holders == 0 for cell in seen.cells)
    assert all(0 <= seen.at_s - cell.used_s < 60 for cell in seen.cells)
    assert seen.memory == engine.memory()
    held = len(sealed) * seen.block_bytes + len(opened) * seen.slot_bytes
    assert held == seen.memory.kv_reusable_bytes == seen.conversations[0].num_bytes


def test_a_running_answer_uses_its_blocks_and_shares_what_another_has(engine) -> None:
    engine.generate([*prompt(0, 64), *prompt(1, 20)], max_tokens=2)
    events = engine.stream([*prompt(0, 64), *prompt(2, 40)], max_tokens=300, ignore_eos=True)
    while not isinstance(next(events), Delta):
        pass
    seen = engine.snapshot()
    assert (seen.num_running, seen.num_waiting) == (1, 0)
    by_position = {cell.position: cell for cell in seen.cells if cell.kind == "sealed"}
    assert by_position[0].conversations == by_position[32].conversations == ("c1", "c2")
    assert by_position[0].state == by_position[64].state == "used"
    assert by_position[64].conversations == ("c2",)
    assert by_position[0].num_holders == 1
    assert by_position[0].used_s is None
    assert seen.num_generated > 2
    shared = {one.name: one.num_shared_blocks for one in seen.conversations}
    assert shared == {"c1": 2, "c2": 2}
    used = sum(
        seen.block_bytes if c.kind == "sealed" else seen.slot_bytes for c in seen.cells if c.state == "used"
    )
    assert used == pytest.approx(seen.memory.kv_used_bytes)
    events.close()


def test_turns_of_a_conversation_are_told_from_the_tokens(engine) -> None:
    first = engine.generate(prompt(0), max_tokens=5, ignore_eos=True)
    longer = [*prompt(0), *first.token_ids, *prompt(3, 40)]
    second = engine.generate(longer, max_tokens=5, ignore_eos=True)
    other = engine.generate([*prompt(0, 90), *prompt(4, 30)], max_tokens=5)
    assert (first.conversation, second.conversation, other.conversation) == ("c1", "c1", "c2")
    seen = engine.snapshot()
    assert [one.name for one in seen.conversations] == ["c2", "c1"]
    turns = seen.conversations[1].turns
    assert [turn.usage.cached_tokens for turn in turns] == [0, second.usage.cached_tokens]
    assert second.usage.cached_tokens == 104
    assert seen.conversations[0].turns[0].why.cause == "changed_token"
    assert seen.totals.num_requests == 3
    assert seen.totals.prompt_tokens == 100 + 145 + 120
    assert seen.totals.cached_tokens == 104 + other.usage.cached_tokens
    assert engine.generate(prompt(9), max_tokens=2, ephemeral=True).conversation is None
    assert len(engine.snapshot().conversations) == 2


def test_a_tenant_is_told_nothing_of_another(engine) -> None:
    engine.generate(prompt(1), max_tokens=4, cache_namespace="ada")
    alone = engine.snapshot("ada")
    engine.generate(prompt(1), max_tokens=4, cache_namespace="bob")
    events = engine.stream(prompt(2, 300), max_tokens=100, cache_namespace="bob", ignore_eos=True)
    while not isinstance(next(events), Delta):
        pass
    beside = engine.snapshot("ada")
    events.close()
    kept = {"at_s"}
    assert {k: v for k, v in asdict(beside).items() if k not in kept} == {
        k: v for k, v in asdict(alone).items() if k not in kept
    }
    assert not beside.whole
    assert [cell.id for cell in beside.cells] == list(range(len(beside.cells)))
    assert engine.snapshot("bob").conversations[0].name == "c2"
    assert engine.snapshot("eve").cells == engine.snapshot("eve").conversations == ()
    everything = engine.snapshot()
    assert len(everything.cells) == len(beside.cells) + len(engine.snapshot("bob").cells)
    nameless = engine.snapshot(names=False)
    assert nameless.conversations == ()
    assert {cell.conversations for cell in nameless.cells} == {()}


def test_who_sees_all_tenants_sees_none_of_their_text(engine) -> None:
    def differences(snapshot: Snapshot) -> list[bool]:
        turns = [turn for one in snapshot.conversations for turn in one.turns]
        return [
            turn.why.difference is not None
            for turn in turns
            if turn.why is not None and turn.why.cause == "changed_token"
        ]

    for number in (1, 2):
        engine.generate([*prompt(0, 50), *prompt(number, 50)], max_tokens=1, cache_namespace="ada")
    assert differences(engine.snapshot()) == [True]
    engine.generate(prompt(3), max_tokens=1, cache_namespace="bob")
    assert differences(engine.snapshot()) == [False]
    assert differences(engine.snapshot("ada")) == [True]
    assert {one.tenant for one in engine.snapshot().conversations} == {"ada", "bob"}


def test_dropping_a_conversation_leaves_what_others_share(engine) -> None:
    for number in (1, 2):
        engine.generate([*prompt(0, 64), *prompt(number, 60)], max_tokens=4, ignore_eos=True)
    before = names(engine.snapshot())
    assert before == {"c2": 5 - 1 + 0, "c1": 4}
    engine.drop_conversation("c1")
    assert names(engine.snapshot()) == {"c2": 4}
    assert len(engine.snapshot().cells) == 4
    again = [*prompt(0, 64), *prompt(1, 60)]
    reply = engine.generate(again, max_tokens=1)
    assert (reply.usage.cached_tokens, reply.why.cause) == (64, "cleared")
    with pytest.raises(InvalidRequest, match="no conversation 'c1'"):
        engine.drop_conversation("c1")
    with pytest.raises(InvalidRequest, match="no conversation 'c2'"):
        engine.drop_conversation("c2", cache_namespace="ada")


def test_a_short_conversation_leaves_nothing_when_it_is_dropped(engine) -> None:
    engine.generate(prompt(1, 10), max_tokens=5, ignore_eos=True)
    assert [cell.kind for cell in engine.snapshot().cells] == ["open"]
    engine.drop_conversation("c1")
    assert engine.snapshot().cells == ()


def test_drops_in_any_order_empty_the_cache(engine) -> None:
    draw = random.Random(7)
    for _ in range(12):
        start, end = draw.randrange(3), draw.randrange(5)
        engine.generate(
            [*prompt(start, 40), *prompt(10 + end, draw.randrange(1, 90))], max_tokens=draw.randrange(1, 9)
        )
    while found := engine.snapshot().conversations:
        engine.drop_conversation(draw.choice(found).name)
        engine.check_integrity()
    left = engine.snapshot()
    assert left.cells == ()
    assert left.memory.kv_allocated_bytes == 0


def test_a_pinned_conversation_stays_and_its_next_turn_is_pinned_too(engine) -> None:
    first = engine.generate(prompt(1), max_tokens=4, ignore_eos=True)
    assert engine.pin_conversation("c1") == 96
    assert {cell.state for cell in engine.snapshot().cells if cell.kind == "sealed"} == {"pinned"}
    longer = [*prompt(1), *first.token_ids, *prompt(2, 40)]
    engine.generate(longer, max_tokens=2)
    for number in range(20, 60):
        engine.generate(prompt(number), max_tokens=1)
    seen = engine.snapshot()
    assert seen.num_evicted > 0
    pinned = [cell for cell in seen.cells if cell.state == "pinned"]
    assert [cell.position for cell in pinned] == [0, 32, 64, 96]
    assert next(one for one in seen.conversations if one.name == "c1").is_pinned
    engine.unpin_conversation("c1")
    assert not [cell for cell in engine.snapshot().cells if cell.state == "pinned"]
    short = engine.generate([5, 6, 7], max_tokens=2).conversation
    with pytest.raises(InvalidRequest, match="no full block"):
        engine.pin_conversation(short)


def test_clearing_forgets_the_conversations(engine) -> None:
    engine.generate(prompt(1), max_tokens=4, cache_namespace="ada")
    engine.generate(prompt(1), max_tokens=4)
    engine.forget("ada")
    assert engine.snapshot("ada").conversations == ()
    assert names(engine.snapshot()) == {"c1": 4}
    engine.clear()
    seen = engine.snapshot()
    assert seen.cells == seen.conversations == ()
    assert seen.totals.num_requests == 2


def test_a_request_that_is_aborted_or_refused_does_not_run_on(engine) -> None:
    events = engine.stream(prompt(2), max_tokens=300, ignore_eos=True)
    next(events)
    events.close()
    engine.generate(prompt(3), max_tokens=1)
    with pytest.raises(InvalidRequest):
        engine.generate([9999], max_tokens=1)
    assert [one.num_turns for one in engine.snapshot().conversations if one.name == "c2"] == [1]
    assert [one.num_running for one in engine.snapshot().conversations] == [0] * len(
        engine.snapshot().conversations
    )


@pytest.mark.parametrize("dropped", [False, True])
def test_a_dropped_conversation_is_gone_from_the_disk_too(tmp_path, monkeypatch, dropped: bool) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))

    def started() -> Engine:
        return Engine(tiny_loaded("llama"), kv_memory="480KiB", kv_disk="64MiB")

    with started() as engine:
        engine.generate(prompt(1), max_tokens=8, ignore_eos=True)
        assert engine.flush()
        if dropped:
            engine.drop_conversation("c1")
            assert engine.flush()
    with started() as engine:
        usage = engine.generate([*prompt(1), 5, 6, 7], max_tokens=1).usage
        assert usage.cached_tokens == (0 if dropped else 100)
        assert engine.snapshot().num_restored == (0 if dropped else 3)


@pytest.mark.parametrize("turns", [0, 1])
def test_a_conversation_that_is_dropped_while_it_is_answered_is_gone_when_it_ends(
    tmp_path, monkeypatch, turns: int
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    settings = {"kv_memory": "480KiB", "kv_disk": "64MiB", "max_running": 2, "max_step_tokens": 64}
    with Engine(tiny_loaded("llama"), **settings) as engine:
        other = [*prompt(1, 64), *prompt(2, 40)]
        engine.generate(other, max_tokens=1, ignore_eos=True)
        for _ in range(turns):
            engine.generate(prompt(1), max_tokens=1, ignore_eos=True)
        events = engine.stream(prompt(1), max_tokens=70, ignore_eos=True)
        next(events)
        engine.drop_conversation("c2")
        engine.check_integrity()
        whole = [*prompt(1), *[id_ for event in events for id_ in event.token_ids]]
        assert engine.flush()
        assert names(engine.snapshot()) == {"c1": 4}
        assert engine.snapshot().memory.kv_used_bytes == 0
        assert engine.generate(other, max_tokens=1).usage.cached_tokens == len(other) - 1
        reply = engine.generate(whole, max_tokens=1, ephemeral=True)
        assert (reply.usage.cached_tokens, reply.usage.loaded_tokens) == (64, 0)
        engine.check_integrity()
    with Engine(tiny_loaded("llama"), **settings) as engine:
        assert engine.generate(whole, max_tokens=1).usage.loaded_tokens == 64


def test_what_waits_of_a_dropped_conversation_leaves_nothing(engine) -> None:
    first = engine.stream(prompt(0), max_tokens=40, ignore_eos=True, n=4)  # all places
    next(first)
    second = engine.stream(prompt(1), max_tokens=2)
    engine.drop_conversation("c2")
    list(first)
    list(second)
    assert names(engine.snapshot()).keys() == {"c1"}
    assert engine.generate(prompt(1), max_tokens=1).usage.cached_tokens == 0


def test_cells_over_the_limit_are_counted_and_the_newest_are_shown(engine, monkeypatch) -> None:
    engine.generate(prompt(1), max_tokens=1)
    engine.generate(prompt(2), max_tokens=1)
    monkeypatch.setattr("octavo.engine.snapshot.MAX_CELLS", 5)
    seen = engine.snapshot()
    assert (len(seen.cells), seen.num_more_cells) == (5, 3)
    assert sum(cell.conversations == ("c2",) for cell in seen.cells) == 4
    assert [one.num_blocks for one in seen.conversations] == [4, 4]
