"""How much of a prompt is read beside decodes, on a machine whose times are made up."""

from __future__ import annotations

import pytest

from octavo.engine.pace import STRETCH, Pace
from octavo.spec import BLOCK_SIZE

DECODE_S = 0.005


def run(pace: Pace, steps: int, *, num_prompts: int = 1, token_s: float = 0.0005) -> list[tuple[int, float]]:
    """The tokens that each step read, and how long it took."""
    done = []
    for _ in range(steps):
        count = pace.allowed(8, num_prompts)
        seconds = DECODE_S + token_s * count
        pace.computed(8, count, seconds)
        done.append((count, seconds))
    return done


def test_without_decodes_a_step_is_full():
    assert Pace(512).allowed(0, 3) == 512
    assert Pace(5).allowed(5, 1) == 0


def test_the_first_steps_and_now_and_then_others_show_how_long_decoding_takes():
    done = run(Pace(512), 200)
    alone = [number for number, (count, _) in enumerate(done) if not count]
    assert alone == [0, 1, 66, 67, 132, 133, 198, 199]


def test_a_step_between_others_does_not_show_how_long_decoding_takes():
    pace = Pace(512)
    before = run(pace, 30)[-1][0]
    for _ in range(20):
        pace.computed(8, 0, 3 * DECODE_S)
        pace.computed(8, before, DECODE_S + 0.0005 * before)
    assert run(pace, 1)[-1][0] == before


@pytest.mark.parametrize("token_s", [0.00005, 0.0002, 0.0005])
def test_a_step_takes_no_longer_than_it_may(token_s):
    last = run(Pace(512), 60, token_s=token_s)[-1]
    assert last[1] <= STRETCH * DECODE_S * 1.001
    assert last[0] >= 0.5 * (STRETCH - 1) * DECODE_S / token_s, "nor much shorter"


def test_pieces_are_blocks_or_equal_parts_of_one():
    for token_s in (0.00003, 0.0001, 0.0003, 0.0007, 0.002):
        count = run(Pace(512), 60, token_s=token_s)[-1][0]
        assert count % BLOCK_SIZE == 0 or count in (4, 5, 6, 7, 8, 11, 16)


def test_several_prompts_are_read_faster_than_one():
    counts = [run(Pace(512), 60, num_prompts=k)[-1][0] for k in (1, 2, 4, 16)]
    assert counts == sorted(counts)
    assert counts[1] >= 2.5 * counts[0]
    assert counts[-1] == 512 - 8


def test_one_slow_step_does_not_change_the_pace():
    pace = Pace(512)
    before = run(pace, 60)[-1][0]
    pace.computed(8, 0, 1.0)
    pace.computed(8, 0, 1.0)
    assert run(pace, 20)[-1][0] == before


def test_steps_do_not_become_longer_with_the_answers():
    pace = Pace(512)
    longest = 0.0
    for number in range(900):
        alone_s = DECODE_S * (1 + number / 1000)
        count = pace.allowed(8, 1)
        seconds = alone_s + 0.0005 * count
        pace.computed(8, count, seconds)
        if number > 60:
            longest = max(longest, seconds)
    assert longest <= STRETCH * DECODE_S * 1.05


def after_alone(*steps: tuple[int, int, float]) -> Pace:
    """A pace that has seen so many steps of so many sequences that only decode, each of so many seconds."""
    pace = Pace(512)
    for number, num_decodes, seconds in steps:
        for _ in range(number):
            pace.computed(num_decodes, 0, seconds)
    return pace


def test_how_long_fewer_took_does_not_count():
    pace = after_alone((20, 1, DECODE_S / 10), (3, 8, DECODE_S))
    assert run(pace, 60)[-1][0] == run(Pace(512), 60)[-1][0]


def test_answers_that_have_grown_long_do_not_stop_prompts():
    pace = after_alone((3, 8, DECODE_S / 10), (3, 8, DECODE_S))
    assert run(pace, 10, num_prompts=16)[-1][0] == 512 - 8
