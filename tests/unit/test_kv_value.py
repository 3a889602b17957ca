"""Eviction by value: dead branches before shared beginnings, what goes on often before what rarely does."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kv import ByValue, KVCacheManager
from octavo.kv.value import _EDGES, Returns, _best_rates, _Life

from .kv_steps import NAMESPACE, manager, num_cached, run, tokens

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from eviction import OTHER, Traffic, compare


def test_a_shared_beginning_stays_when_its_branches_go() -> None:
    kv = manager(num_blocks=12, policy=ByValue)
    system = tokens(0, 64)
    for branch in range(5):
        kv.free(run(kv, [*system, *tokens(1000 * (branch + 1), 64)]))
    kv.free(run(kv, tokens(9000, 32 * 8)))
    assert num_cached(kv, [*system, 1]) == 64
    kv.check_integrity()


def test_a_block_never_goes_before_those_that_continue_it() -> None:
    kv = manager(num_blocks=6, policy=ByValue)
    kv.free(run(kv, tokens(0, 128)))
    for first in range(5):
        kv.free(run(kv, tokens(1000 * (first + 1), 32)))
        kv.check_integrity()
        assert num_cached(kv, tokens(0, 129)) % 32 == 0


def test_what_came_back_before_is_kept_rather_than_what_never_did() -> None:
    now = [0.0]
    kv = manager(num_blocks=40, policy=lambda index: ByValue(index, lambda: now[0]))
    for chat in range(
        300
    ):  # each chat has a second turn, and a prompt that is never asked again comes between
        first = 10_000 * (chat + 1)
        for turn in (32, 64, 96):
            now[0] += 10
            kv.free(run(kv, tokens(first, turn)))
        now[0] += 10
        kv.free(run(kv, tokens(first + 5000, 32)))
    kept = tokens(5, 64)
    kv.free(run(kv, kept[:32]))
    now[0] += 10
    kv.free(run(kv, kept))  # its second turn: it will most likely go on
    for other in range(30):
        now[0] += 0.1
        kv.free(run(kv, tokens(50_000_000 + 100 * other, 64)))
    assert num_cached(kv, [*kept, 1]) == 64


def test_with_nothing_learned_the_least_recently_used_goes_first() -> None:
    now = [0.0]
    kv = manager(num_blocks=4, policy=lambda index: ByValue(index, lambda: now[0]))
    for first in range(5):
        now[0] += 100
        kv.free(run(kv, tokens(1000 * first, 32)))
    assert [num_cached(kv, tokens(1000 * first, 33)) for first in range(5)] == [0, 32, 32, 32, 32]


@pytest.mark.parametrize("step_s", [0.0001, 0.01, 0.3, 1, 30, 3000])
def test_with_little_learned_it_does_so_at_every_pace(step_s: float) -> None:
    now = [0.0]
    kv = manager(num_blocks=10, policy=lambda index: ByValue(index, lambda: now[0]))
    for first in range(30):
        now[0] += step_s
        kv.free(run(kv, tokens(1000 * first, 32)))
    assert [num_cached(kv, tokens(1000 * first, 33)) for first in range(30)] == [0] * 20 + [32] * 10


def ask(kv: KVCacheManager, token_ids: list[int], priority: int = 0, expires_s: float | None = None) -> None:
    """A request that says how much it is worth, until when."""
    table = run(kv, token_ids)
    kv.retain(table, priority, expires_s)
    kv.free(table)


def test_priority_and_expiry_count() -> None:
    now = [0.0]
    kv = manager(num_blocks=3, policy=lambda index: ByValue(index, lambda: now[0]))
    for first, priority, expires_s in ((0, 2, None), (1000, 0, None), (2000, 4, 50.0)):
        ask(kv, tokens(first, 32), priority, expires_s)
        now[0] += 10
    now[0] = 60.0
    left = []
    for new in range(2):
        kv.free(run(kv, tokens(90_000 + 1000 * new, 32)))
        left.append([bool(num_cached(kv, tokens(first, 33))) for first in (0, 1000, 2000)])
    assert left == [[True, True, False], [True, False, False]], (
        "first what has expired, then what has no priority"
    )


def test_a_conversation_that_was_evicted_has_not_begun_anew() -> None:
    now = [0.0]
    kv = manager(num_blocks=60, num_slots=1, policy=lambda index: ByValue(index, lambda: now[0]))

    def turn(first: int, number: int) -> None:
        now[0] += 1
        kv.free(run(kv, tokens(first, 32 * number)))

    for chat in range(100):  # of four chats that begin one goes on, to its sixth turn
        first = 10_000 * (chat + 1)
        for number in range(1, 7):
            turn(first, number)
        for number in range(1, 4):
            turn(first + 1000 * number, 1)
    for number in range(1, 4):
        turn(5, number)
    turn(50_000_000, 60)
    assert num_cached(kv, tokens(5, 33)) == 0, "all was evicted"
    turn(5, 4)
    for other in range(58):
        turn(60_000_000 + 1000 * other, 1)
    assert num_cached(kv, tokens(5, 129)) == 128


def test_what_was_just_left_goes_before_what_is_about_to_come_back() -> None:
    now = [0.0]
    kv = manager(num_blocks=100, policy=lambda index: ByValue(index, lambda: now[0]))
    for chat in range(400):  # every other one comes back, after 100 seconds
        first = 1000 * (chat + 1)
        now[0] = 2.0 * chat
        kv.free(run(kv, tokens(first, 32)))
        if chat >= 50 and chat % 2:
            now[0] = 2.0 * chat + 0.1
            kv.free(run(kv, tokens(1000 * (chat - 50 + 1), 64)))
    now[0] += 1000
    for other in range(100):
        kv.free(run(kv, tokens(5_000_000 + 1000 * other, 32)))
    now[0] += 80
    kv.free(run(kv, tokens(7_000_000, 32)))
    now[0] += 1
    kv.free(run(kv, tokens(8_000_000, 32)))
    left = [num_cached(kv, tokens(5_000_000 + 1000 * other, 33)) for other in range(100)]
    assert left.count(0) == 1
    assert num_cached(kv, tokens(7_000_000, 33)) == 0


def learned(going_on: list[float], seconds: int, seed: int = 0) -> Returns:
    """A hundred conversations a second wait after each of these turns; so many of them come back after 100 s or so."""
    rng = random.Random(seed)
    now = [0.0]
    returns = Returns(lambda: now[0])
    due: list[tuple[float, int, float]] = []
    for step in range(seconds * 2):
        when = step / 2
        for turn, share in enumerate(going_on, 1):
            now[0] = when
            returns.left(turn)
            if rng.random() < share:
                gap_s = rng.lognormvariate(4.6, 0.5)
                due.append((when + gap_s, turn, gap_s))
    for when, turn, gap_s in sorted(due):
        if when < seconds:
            returns.came_back(turn, gap_s)
    now[0] = float(seconds)
    return returns


def test_those_that_had_no_time_to_come_back_do_not_count_as_gone() -> None:
    early, late = learned([0.5], 200), learned([0.5], 3000)
    for age_s in (1, 30, 100):
        assert early.value(1, age_s) == pytest.approx(late.value(1, age_s), rel=0.25)


def test_turns_differ_by_more_than_chance_or_not_at_all() -> None:
    same = learned([0.6] * 8, 1500)
    values = [same.value(turn, 50) for turn in range(1, 9)]
    assert max(values) / min(values) < 1.01
    rising = learned([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], 1500)
    values = [rising.value(turn, 50) for turn in range(1, 9)]
    assert values == sorted(values)
    assert values[-1] / values[0] > 3


def test_a_turn_that_is_rare_is_like_the_one_before_it() -> None:
    returns = learned([0.2, 0.5, 0.8], 1500)
    assert returns.value(4, 50) == pytest.approx(returns.value(3, 50), rel=0.05)


@given(st.lists(st.integers(0, 1000), min_size=len(_EDGES), max_size=len(_EDGES)))
def test_the_best_rate_is_the_best_of_all(steps: list[int]) -> None:
    total = sum(steps) or 1
    returned = [0.0]
    for step in steps[1:]:
        returned.append(returned[-1] + 0.9 * step / total)
    waited = [0.0]
    for i in range(1, len(_EDGES)):
        waited.append(waited[-1] + (_EDGES[i] - _EDGES[i - 1]) * (1 - (returned[i] + returned[i - 1]) / 2))
    naive = [
        max((returned[j] - returned[i]) / (waited[j] - waited[i]) for j in range(i + 1, len(_EDGES)))
        for i in range(len(_EDGES) - 1)
    ]
    assert _best_rates(returned)[:-1] == pytest.approx(naive, abs=1e-12)


def test_what_is_shared_is_judged_by_its_own_uses() -> None:
    def value(intervals: list[float], idle_s: float) -> float:
        life, now = _Life(turn=1, uses=1, left_s=0.0, shared=True), 0.0
        for interval in intervals:
            now += interval
            life.used(now)
            life.uses += 1
            life.left_s = now
        return life.shared_value(now + idle_s)

    assert value([100] * 8, 0) == pytest.approx(0.95 / 100)
    assert value([100] * 8, 300) > value([1000] * 8, 300)
    assert value([1000] * 8, 3000) > value([100] * 8, 3000), (
        "a pause that is long for the one is not for the other"
    )
    assert value([10_000, 100, 100, 100, 100, 100, 100], 50) > 2 * value([10_000] * 7, 50), "lately more"
    assert value([0.1] * 8, 60) > value([600] * 8, 60), "requests come in bursts"
    assert value([], 60) > 0, "two sequences that held it at the same time"


def test_what_is_shared_keeps_the_most_that_was_asked_for() -> None:
    now = [0.0]
    kv = manager(num_blocks=6, policy=lambda index: ByValue(index, lambda: now[0]))
    system = tokens(0, 32)
    ask(kv, [*system, *tokens(1000, 32)])
    now[0] = 1.0
    ask(kv, [*system, *tokens(2000, 32)], -4, 5.0)
    now[0] = 2.0
    ask(kv, tokens(3000, 64), 0, 8.0)
    now[0] = 3.0
    ask(kv, tokens(3000, 64))  # the same conversation again, without an end
    now[0] = 100.0
    ask(kv, tokens(5000, 32))
    now[0] = 101.0
    ask(kv, tokens(6000, 32))
    assert num_cached(kv, [*system, *tokens(2000, 33)]) == 32, (
        "what had ended went first, without what it shared"
    )
    assert num_cached(kv, tokens(3000, 65)) == 64
    now[0] = 102.0
    ask(kv, tokens(7000, 32))
    assert num_cached(kv, [*system, *tokens(1000, 33)]) == 32, "and then the oldest"


@pytest.mark.parametrize("traffic", [Traffic(), OTHER], ids=["trace", "other"])
def test_less_is_computed_again_than_by_least_recently_used(traffic: Traffic) -> None:
    (row,) = compare(replace(traffic, num_conversations=400), (0.1,), bound=False)
    assert row["lru"] > 0
    assert row["ratio"] < 1


def test_a_namespace_is_where_it_begins() -> None:
    kv = manager(policy=ByValue)
    kv.free(run(kv, tokens(0, 64)))
    kv.free(run(kv, tokens(0, 64), b"other"))
    assert num_cached(kv, tokens(0, 65), NAMESPACE) == num_cached(kv, tokens(0, 65), b"other") == 64
