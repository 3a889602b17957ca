"""Eviction by value: dead branches before shared beginnings, what goes on often before what rarely does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from octavo.kv import ByValue

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


def test_priority_and_expiry_count() -> None:
    now = [0.0]
    policies = []

    def policy(index):
        policies.append(ByValue(index, lambda: now[0]))
        return policies[0]

    kv = manager(num_blocks=3, policy=policy)
    for first, priority, expires_s in ((0, 2, None), (1000, 0, None), (2000, 4, 50.0)):
        table = run(kv, tokens(first, 32))
        policies[0].retain(table.block_ids[0], priority, expires_s)
        kv.free(table)
        now[0] += 10
    now[0] = 60.0
    left = []
    for new in range(2):
        kv.free(run(kv, tokens(90_000 + 1000 * new, 32)))
        left.append([bool(num_cached(kv, tokens(first, 33))) for first in (0, 1000, 2000)])
    assert left == [[True, True, False], [True, False, False]], (
        "first what has expired, then what has no priority"
    )


@pytest.mark.parametrize("traffic", [Traffic(num_conversations=400), OTHER], ids=["trace", "other"])
def test_less_is_computed_again_than_by_least_recently_used(traffic: Traffic) -> None:
    smaller = Traffic(**{**vars(traffic), "num_conversations": 400})
    (row,) = compare(smaller, (0.1,), bound=False)
    assert row["ratio"] < 1
    assert row["lru"] > 0


def test_a_namespace_is_where_it_begins() -> None:
    kv = manager(policy=ByValue)
    kv.free(run(kv, tokens(0, 64)))
    kv.free(run(kv, tokens(0, 64), b"other"))
    assert num_cached(kv, tokens(0, 65), NAMESPACE) == num_cached(kv, tokens(0, 65), b"other") == 64
