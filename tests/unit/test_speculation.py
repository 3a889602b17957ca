"""Where drafts come from, and how long they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.speculation import (
    _MAX_MATCH,
    _POOL_TOKENS,
    MIN_MATCH,
    POOL_MATCH,
    Costs,
    Drafter,
    Pool,
    Text,
)

IDS = st.lists(st.integers(0, 3), max_size=60)


def longest(text: list[int], last: list[int], end: int) -> tuple[int, int]:
    """The latest place in `text[:end]` behind the longest match of the end of `last`, and its length."""
    best = (0, 0)
    for at in range(1, end + 1):
        match = 0
        while match < min(at, len(last), _MAX_MATCH) and text[at - 1 - match] == last[-1 - match]:
            match += 1
        if match and match >= best[1]:
            best = (at, match)
    return best


def naive(text: list[int], pool: list[int], limit: int) -> list[int]:
    """What follows the longest match in the text itself, or the latest in the pool if that is longer."""
    at, match = longest(text, text, len(text) - 1)
    source = text if match >= MIN_MATCH else []
    ends = [end for end in range(POOL_MATCH, len(pool)) if pool[end - POOL_MATCH : end] == text[-POOL_MATCH:]]
    if ends and pool[ends[-1]] != -1:
        others = longest(pool[: ends[-1]], text, ends[-1])
        agree = next(
            (
                n
                for n in range(_MAX_MATCH)
                if n >= min(ends[-1], len(text)) or pool[ends[-1] - 1 - n] != text[-1 - n]
            ),
            _MAX_MATCH,
        )
        assert agree <= others[1]
        if agree > match:
            source, at = pool, ends[-1]
    found = source[at : at + limit]
    return found[: found.index(-1)] if -1 in found else found


@given(IDS, st.lists(IDS, max_size=4), st.integers(0, 12))
def test_a_draft_is_what_follows_the_longest_match(
    text: list[int], earlier: list[list[int]], limit: int
) -> None:
    pool, flat = Pool(), []
    for ids in earlier:
        pool.add(ids)
        flat += [*ids, -1]
    assert Drafter(text, pool).predicted(limit) == naive(text, flat, limit)


@given(IDS, st.lists(st.integers(0, 3), max_size=40))
def test_following_token_by_token_and_all_at_once_is_the_same_text(text: list[int], more: list[int]) -> None:
    one, other = Drafter(text, Pool()), Drafter(text, Pool())
    for token_id in more:
        one.follow([token_id])
    other.follow(more)
    assert one.num_tokens == other.num_tokens == len(text) + len(more)
    assert (
        one._text.ids[: one.num_tokens].tolist()
        == other._text.ids[: other.num_tokens].tolist()
        == text + more
    )


def test_a_place_is_followed_for_as_long_as_it_comes_true() -> None:
    drafter = Drafter([*range(20), 0, 1, 2], Pool())
    assert drafter.predicted(4) == [3, 4, 5, 6]
    before = drafter.probability
    drafter.follow([3, 4])
    assert drafter.predicted(3) == [5, 6, 7]
    assert drafter.predicted(9, stops={7}) == [5, 6]
    assert drafter.probability > before
    drafter.follow([99])
    assert drafter.predicted(4) == []


def test_predictions_that_do_not_come_true_are_believed_less_and_then_not_drafted() -> None:
    costs = Costs()
    assert costs.best(1, 0.99, 8) == 0  # what a step takes is not known yet
    costs.stepped(1, 0, 0.010)
    drafter = Drafter([1, 2, 3, 9] * 3 + [1, 2, 3], Pool())
    lengths = []
    for number in range(30):
        lengths.append(costs.best(1, drafter.probability, 8))
        drafter.follow([100 + number, 1, 2, 3])
    assert lengths[0] > 0
    assert lengths[-1] == 0
    for _ in range(40):
        drafter.follow([9, 1, 2, 3])
    assert costs.best(1, drafter.probability, 8) == 8


def test_a_draft_is_as_long_as_pays() -> None:
    costs = Costs()
    costs.stepped(1, 0, 0.010)
    for _ in range(50):
        costs.stepped(1, 4, 0.050)  # a row costs as much as a step
    assert costs.best(1, 0.9, 8) == 0
    for _ in range(50):
        costs.stepped(1, 4, 0.0101)
    assert costs.best(1, 0.9, 8) == 8
    assert 0 < costs.best(1, 0.1, 8) < 8
    costs.stepped(4, 0, 0.020)
    assert costs.best(4, 0.0, 8) == 0


def test_a_pool_keeps_the_latest_texts() -> None:
    pool = Pool()
    pool.add([7] * 10)
    for number in range(40):
        pool.add([number] * 1000)
    assert pool.text.num_tokens <= _POOL_TOKENS
    kept = pool.text.ids[: pool.text.num_tokens].tolist()
    assert kept[-1001:] == [39] * 1000 + [-1]
    assert 7 not in kept[:10]
    pool.add(range(1000, 1020))
    assert Drafter([1, *range(1003, 1010)], pool).predicted(3) == [1010, 1011, 1012]
    assert Drafter([1, *range(1003, 1010)], Pool()).predicted(3) == []
    pool.add(range(2 * _POOL_TOKENS))
    # a place may be lost to a later one with the same hash
    starts = range(50_000, 60_000, 100)
    found = [Drafter([500, *range(at, at + 9)], pool).predicted(1) == [at + 9] for at in starts]
    assert sum(found) > 0.7 * len(found)
    assert pool.text.num_tokens <= _POOL_TOKENS


@given(st.lists(st.lists(st.integers(0, 9), max_size=700), max_size=6))
def test_a_text_is_what_was_appended(parts: list[list[int]]) -> None:
    text, expected, seen = Text(), [], []
    for part in parts:
        text.append(part)
        expected += part
        seen.append((text.ids, list(expected)))
    assert text.num_tokens == len(expected)
    assert all(ids[: len(then)].tolist() == then for ids, then in seen)
