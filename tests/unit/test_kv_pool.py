from __future__ import annotations

import pytest

from octavo.kv import LRU, EvictionPolicy, KVCacheManager
from octavo.kv.block_pool import IdPool

from .kv_steps import append, manager, num_cached, run, tokens


def test_the_lowest_free_id_is_taken_first() -> None:
    pool = IdPool(4)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, 2]
    assert pool.share(1) == 2
    assert pool.release(1) == 1
    for id_ in (2, 0):
        assert pool.release(id_) == 0
        pool.put_back(id_)
    assert (pool.num_free, pool.free_ids(), pool.allocated_ids()) == (3, [0, 2, 3], [1])
    assert [pool.take(), pool.take(), pool.take()] == [0, 2, 3]
    with pytest.raises(IndexError):
        pool.take()


def test_lru_gives_up_what_was_touched_longest_ago() -> None:
    policy: EvictionPolicy = LRU()
    for id_ in (1, 2, 3, 4, 1):
        policy.touch(id_)
    policy.remove(3)
    assert list(policy) == [2, 4, 1]
    assert [policy.pop(), policy.pop(), policy.pop()] == [2, 4, 1]
    assert len(policy) == 0
    with pytest.raises(KeyError):
        policy.pop()
    with pytest.raises(KeyError):
        policy.remove(2)


@pytest.mark.parametrize("changes", [{"num_blocks": 0}, {"num_slots": 0}, {"max_tails": -1}])
def test_impossible_sizes_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs at least one block"):
        manager(**changes)


def test_figures_add_up_over_a_life() -> None:
    kv = manager()

    def figures(kv: KVCacheManager) -> tuple[int, ...]:
        return kv.num_free_blocks, kv.num_used_blocks, kv.num_reusable_blocks

    assert figures(kv) == (12, 0, 0)
    table = run(kv, tokens(0, 70))
    assert figures(kv) == (10, 2, 0)
    assert (kv.num_used_slots, kv.num_reusable_slots, kv.num_tails) == (1, 0, 0)
    kv.keep_tail(table)
    kv.free(table)
    assert figures(kv) == (10, 0, 2)
    assert (kv.num_used_slots, kv.num_reusable_slots, kv.num_tails) == (0, 1, 1)
    assert (kv.allocated_blocks(), kv.allocated_slots()) == ([0, 1], [0])
    kv.clear()
    assert figures(kv) == (12, 0, 0)
    assert (kv.allocated_blocks(), kv.allocated_slots()) == ([], [])


def test_free_blocks_are_used_before_reusable_ones() -> None:
    kv = manager(num_blocks=4)
    kv.free(run(kv, tokens(0, 64)))
    table = run(kv, tokens(100, 64))
    assert table.block_ids == [2, 3]
    assert num_cached(kv, tokens(0, 65)) == 64


def test_the_deepest_block_of_the_least_recently_used_sequence_is_evicted_first() -> None:
    kv = manager(num_blocks=4)
    for first in (0, 100):
        kv.free(run(kv, tokens(first, 64)))
    kv.free(kv.start(kv.match_prefix(tokens(0, 65), namespace=b"tests"), tokens(0, 65)))
    table = run(kv, tokens(200, 32))
    assert (num_cached(kv, tokens(0, 65)), num_cached(kv, tokens(100, 65))) == (64, 32)
    append(kv, table, tokens(232, 32))
    assert (num_cached(kv, tokens(0, 65)), num_cached(kv, tokens(100, 65))) == (64, 0)
    append(kv, table, tokens(264, 32))
    assert num_cached(kv, tokens(0, 65)) == 32


def test_a_policy_of_ones_own_decides_what_is_evicted() -> None:
    class MostRecentlyUsed(LRU):
        """Fit for single blocks only, as it would evict a parent before its children."""

        def pop(self) -> int:
            victim = list(self)[-1]
            self.remove(victim)
            return victim

    kv = manager(num_blocks=2, policy=lambda _: MostRecentlyUsed())
    for first in (0, 100):
        kv.free(run(kv, tokens(first, 32)))
    run(kv, tokens(200, 32))
    assert (num_cached(kv, tokens(0, 33)), num_cached(kv, tokens(100, 33))) == (32, 0)


def test_without_room_nothing_changes() -> None:
    kv = manager(num_blocks=3)
    kv.free(run(kv, tokens(100, 33)))
    table = run(kv, tokens(0, 60))
    before = (table.slot, list(table.block_ids), kv.num_free_blocks, kv.num_reusable_blocks)
    assert kv.allocate(table, 68) is None
    assert (table.slot, table.block_ids, kv.num_free_blocks, kv.num_reusable_blocks) == before
    assert table.num_pending == 0
    assert num_cached(kv, tokens(100, 33)) == 32
    kv.check_integrity()
    append(kv, table, tokens(60, 36))
    assert num_cached(kv, tokens(100, 33)) == 0


def test_without_a_slot_nothing_changes() -> None:
    kv = manager(num_slots=1)
    kv.free(run(kv, tokens(100, 32)))
    table = run(kv, tokens(0, 5))
    second = kv.start(kv.match_prefix(tokens(100, 33), namespace=b"tests"), tokens(100, 33))
    assert kv.allocate(second, 32) is None
    assert (second.slot, second.num_pending, kv.num_free_blocks) == (None, 0, 11)
    kv.check_integrity()
    kv.free(table)
    append(kv, second, [7])
