"""Advice on the layout of prompts: text that changes is to stand behind text that does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.why import _resumed, tell_why
from octavo.kv.explain import Miss

STABLE = [1000 + number for number in range(500)]


def why(earlier: list[int], prompt: list[int], place: int):
    miss = Miss("changed_token", place // 32 * 32, place % 32, tuple(earlier[place:]))
    return tell_why(miss, prompt, token_s=0.001, decode=str)


def test_a_date_before_the_instructions_is_told_to_go_behind_them() -> None:
    head = list(range(10))
    reason = why([*head, 50, 51, 52, *STABLE, 7], [*head, 60, 61, *STABLE, 8, 9], 10)
    assert reason is not None
    assert reason.advice is not None
    assert reason.advice.num_tokens == 500
    assert reason.advice.saved_s == 0.5
    assert "(2 tokens) stands before 500" in reason.advice.message


def test_a_prompt_that_ends_otherwise_is_laid_out_well() -> None:
    reason = why([*STABLE, *range(100)], [*STABLE, *range(200, 300)], 500)
    assert reason is not None
    assert reason.advice is None
    few = why([50, *STABLE[:63]], [60, *STABLE[:63]], 0)
    assert few is not None
    assert few.advice is None


def test_what_changed_is_not_moved_behind_less_than_itself() -> None:
    reason = why([1, *STABLE[:100]], [*range(2000, 2200), *STABLE[:100]], 0)
    assert reason is not None
    assert reason.advice is None


@given(
    st.lists(st.integers(0, 99), max_size=30),
    st.lists(st.integers(0, 99), max_size=30),
    st.integers(31, 400),
    st.lists(st.integers(0, 99), max_size=30),
)
def test_the_longest_stretch_is_found_from_its_first_token(
    earlier: list[int], now: list[int], length: int, behind: list[int]
) -> None:
    start, found = _resumed([*earlier, *STABLE[:length]], [*now, *STABLE[:length], *behind])
    same = 0
    while same < min(len(earlier), len(now)) and earlier[-1 - same] == now[-1 - same]:
        same += 1
    assert (start, found) == (len(now) - same, length + same)
