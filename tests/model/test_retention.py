"""What a request has computed is kept for as long as it says: pins, priorities, times, and nothing at all."""

from __future__ import annotations

import time

import pytest
from families import tiny_loaded

from octavo.errors import InvalidConversation, InvalidRequest, RequestTooLarge
from octavo.sessions.engine import Engine


def prompt(number: int, num_tokens: int = 128) -> list[int]:
    return [(number * 31 + 7 * i) % 300 + 10 for i in range(num_tokens)]


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """With room for 25 blocks, no tails to speak of, and no disk."""
    with Engine(
        tiny_loaded("llama"), kv_memory="480KiB", max_running=2, kv_format="raw", kv_disk=0
    ) as engine:
        yield engine
        engine.check_integrity()


def cached(engine: Engine, ids: list[int], **options) -> int:
    return engine.generate(ids, max_tokens=1, **options).usage.cached_tokens


def crowd(engine: Engine, first: int = 100) -> None:
    """Asks for more than the cache holds."""
    for number in range(first, first + 8):
        engine.generate(prompt(number), max_tokens=1)


def test_a_pin_keeps_its_blocks_until_it_is_let_go(engine) -> None:
    engine.generate(prompt(0), max_tokens=1, pin="mine")
    crowd(engine)
    assert cached(engine, prompt(0)) >= 96
    assert engine.memory().kv_used_bytes == 0
    assert not engine.unpin("mine", cache_namespace="other")
    assert engine.unpin("mine")
    assert not engine.unpin("mine")
    crowd(engine, 200)
    assert cached(engine, prompt(0)) == 0


def test_a_name_holds_one_pin_and_a_time_ends_it(engine) -> None:
    engine.generate(prompt(0), max_tokens=1, pin="mine", ttl_s=60)
    engine.generate(prompt(1), max_tokens=1, pin="mine", ttl_s=0.01)
    time.sleep(0.02)
    crowd(engine)
    assert (cached(engine, prompt(0)), cached(engine, prompt(1))) == (0, 0)


def test_pins_have_a_share_and_what_is_over_it_is_refused(engine) -> None:
    share = engine._core._cache.pins.max_blocks
    assert share == engine._core._cache.plan.num_blocks // 2
    with pytest.raises(InvalidRequest, match=rf"cannot be pinned: pins may hold {share * 32} tokens"):
        engine.generate(prompt(0, share * 32 + 32), max_tokens=1, pin="large")
    for number in range(share // 4):
        engine.generate(prompt(number), max_tokens=1, pin=f"pin {number}")
    with pytest.raises(InvalidRequest, match=r"cannot be pinned"):
        engine.generate(prompt(50), max_tokens=1, pin="one more")
    engine.generate(prompt(0), max_tokens=1, pin="pin 0")  # in place of itself
    with pytest.raises(RequestTooLarge, match="beside what is pinned"):
        engine.generate(prompt(60, 480), max_tokens=1)
    crowd(engine)
    engine.clear()
    engine.generate(prompt(60, 480), max_tokens=1)


def test_an_answer_that_grows_over_the_share_is_pinned_in_part_and_says_so(engine) -> None:
    share = engine._core._cache.pins.max_blocks
    reply = engine.generate(prompt(0, share * 32 - 10), max_tokens=60, ignore_eos=True, pin="mine")
    assert f"Only the first {share * 32:,} tokens are pinned" in reply.notes[0]


def test_pins_that_grow_while_a_request_waits_do_not_hang_it() -> None:
    with Engine(
        tiny_loaded("llama"), kv_memory="480KiB", max_running=1, kv_format="raw", kv_disk=0
    ) as engine:
        share = engine._core._cache.pins.max_blocks
        first = engine.stream(prompt(0, share * 32 - 40), max_tokens=30, ignore_eos=True, pin="mine")
        next(first)
        second = engine.stream(prompt(60, (share + 3) * 32), max_tokens=1)
        list(first)
        with pytest.raises(RequestTooLarge, match="beside what is pinned"):
            list(second)


def test_a_prompt_that_begins_with_what_is_pinned_needs_no_second_room_for_it(engine) -> None:
    cache = engine._core._cache
    share, have = cache.pins.max_blocks, cache.plan.num_blocks
    engine.generate(prompt(0, share * 32), max_tokens=1, ignore_eos=True, pin="mine")
    longest = prompt(0, min(have * 32, 512) - 2)
    assert len(longest) // 32 > have - share
    assert engine.generate(longest, max_tokens=1).usage.cached_tokens == share * 32
    for options in ({"cache": False}, {"cache_namespace": "other"}, {"prompt_logprobs": 0}):
        with pytest.raises(RequestTooLarge, match="beside what is pinned"):
            engine.generate(longest, max_tokens=1, **options)


def test_pins_that_grow_end_the_request_that_is_next_and_not_the_first_that_came(engine) -> None:
    share = engine._core._cache.pins.max_blocks
    first = engine.stream(prompt(0, share * 32 - 40), max_tokens=30, ignore_eos=True, pin="mine", n=2)
    next(first)  # both places
    short = engine.stream(prompt(50, 40), max_tokens=1, urgency=-1)
    long = engine.stream(prompt(60, (share + 3) * 32), max_tokens=1, urgency=-1)
    urgent = engine.stream(prompt(70, (share + 3) * 32), max_tokens=1)
    list(first)
    for refused in (urgent, long):
        with pytest.raises(RequestTooLarge, match="beside what is pinned"):
            list(refused)
    list(short)


def test_priority_leaves_last(engine) -> None:
    engine.generate(prompt(0), max_tokens=1, priority=3)
    for number in range(1, 4):
        engine.generate(prompt(number), max_tokens=1)
    for number in range(310, 314):
        engine.generate(prompt(number), max_tokens=1)
    assert cached(engine, prompt(0)) >= 96
    assert cached(engine, prompt(1)) == 0


@pytest.mark.parametrize(
    ("option", "said"), [({"priority": 9}, "-4 to 4"), ({"ttl_s": 0}, "above 0"), ({"pin": 5}, "a string")]
)
def test_mistakes_are_refused(engine, option, said) -> None:
    with pytest.raises(InvalidRequest, match=said):
        engine.generate(prompt(0), max_tokens=1, **option)


def test_an_ephemeral_conversation_leaves_nothing_when_it_is_closed(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    with Engine(tiny_loaded("llama"), kv_memory="8MiB", kv_disk="1GiB") as engine:
        chat = engine.conversation(ephemeral=True, max_tokens=20, ignore_eos=True)
        chat.ask("x" * 100)
        second = chat.ask("y" * 40)
        assert second.usage.cached_tokens >= 115, "its turns are reused while it is open"
        with pytest.raises(InvalidConversation, match="ephemeral"):
            engine.keep(chat)
        other = engine.conversation(max_tokens=1)
        assert other.ask("x" * 100).usage.cached_tokens == 0
        written = engine.memory().disk.num_written
        held = engine.memory().kv_reusable_bytes
        chat.close()
        assert engine.memory().kv_reusable_bytes < held
        other.close()
        engine.forget("")
        assert engine.memory().kv_reusable_bytes == 0
        engine.flush()
        engine.check_integrity()
        assert engine.memory().disk.num_written - written <= 6, "what the other one has computed, and no more"


def test_what_is_forgotten_while_it_is_answered_is_not_reused(engine) -> None:
    answer = engine.stream(prompt(0), max_tokens=40, ignore_eos=True, cache_namespace="ada", pin="mine")
    next(answer)
    engine.forget("ada")
    engine.check_integrity()
    assert cached(engine, prompt(0), cache_namespace="ada", ephemeral=True) == 0
    list(answer)
    memory = engine.memory()
    assert (memory.kv_used_bytes, memory.kv_reusable_bytes) == (0, 0)
    assert cached(engine, prompt(0), cache_namespace="ada") == 0


def test_an_ephemeral_conversation_that_is_closed_while_it_is_answered_leaves_nothing(engine) -> None:
    chat = engine.conversation(ephemeral=True, max_tokens=60, ignore_eos=True)
    chat.ask("x" * 100)
    answer = chat.say("y" * 40)
    next(answer)
    chat.close()
    engine.check_integrity()
    answer.close()
    memory = engine.memory()
    assert (memory.kv_used_bytes, memory.kv_reusable_bytes) == (0, 0)


def test_what_has_a_time_is_not_loaded_after_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    for ttl_s, expected in ((600, 96), (0.01, 0)):
        with Engine(tiny_loaded("llama"), kv_disk="1GiB") as engine:
            engine.generate(prompt(ttl_s > 1), max_tokens=1, ttl_s=ttl_s)
        with Engine(tiny_loaded("llama"), kv_disk="1GiB") as engine:
            assert engine.generate(prompt(ttl_s > 1), max_tokens=1).usage.loaded_tokens >= expected
            if not expected:
                assert engine.memory().disk.num_loaded == 0


def test_a_pinned_conversation_stays_until_it_is_closed(engine) -> None:
    chat = engine.conversation(pin=True, max_tokens=8, ignore_eos=True)
    chat.ask("z" * 60)
    fork = chat.fork()
    fork.ask("w" * 20)
    crowd(engine)
    known = len(chat.token_ids)
    assert chat.ask("and?").usage.cached_tokens >= known // 32 * 32
    chat.close()
    fork.close()
    assert engine._core._cache.pins.num_blocks == 0


@pytest.mark.parametrize("options", [{"pin": True}, {"ephemeral": True}], ids=["pin", "ephemeral"])
@pytest.mark.parametrize("how", ["read to its end", "closed"])
def test_nothing_is_held_of_an_answer_that_ends_after_its_conversation_was_closed(
    engine, options, how
) -> None:
    engine.clear()
    chat = engine.conversation(max_tokens=300, ignore_eos=True, **options)
    answer = chat.say("z" * 60)
    next(answer)
    chat.close()
    if how == "closed":
        answer.close()
    else:
        assert list(answer)[-1].reply is not None
    left_bytes = engine.memory().kv_reusable_bytes
    assert engine._core._cache.pins.num_blocks == 0
    if chat.is_ephemeral:
        assert left_bytes == 0
