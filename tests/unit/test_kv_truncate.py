from __future__ import annotations

import pytest

from octavo.kv import StepPlan

from .kv_steps import NAMESPACE, append, manager, num_cached, run, tokens


@pytest.mark.parametrize(
    ("num_tokens", "left"),
    [(70, 70), (69, 69), (65, 65), (64, 64), (63, 32), (33, 32), (32, 32), (31, 0), (0, 0)],
)
def test_raw_rows_are_exact_and_a_sealed_block_goes_as_a_whole(num_tokens: int, left: int) -> None:
    kv = manager()
    table = run(kv, tokens(0, 70))
    assert kv.truncate(table, num_tokens) == left
    kv.check_integrity()
    assert table.token_ids == tokens(0, left)
    assert (len(table.block_ids), table.slot) == (left // 32, 0 if left > 64 else None)
    append(kv, table, tokens(200, 40))
    assert table.token_ids == tokens(0, left) + tokens(200, 40)


def test_back_into_the_last_full_block_which_is_sealed_and_published() -> None:
    kv = manager()
    table = run(kv, tokens(0, 64))
    assert kv.truncate(table, 50) == 50
    assert (table.block_ids, table.slot, kv.num_reusable_blocks) == ([0], 0, 1)
    assert num_cached(kv, tokens(0, 65)) == 64

    other = kv.fork(table)
    assert append(kv, other, tokens(200, 14)) == StepPlan(slot=1, copy_from=0)
    assert other.block_ids == [0, 2]
    append(kv, table, tokens(50, 14))
    assert (table.block_ids, kv.num_reusable_blocks) == ([0, 1], 0)


@pytest.mark.parametrize(("kept", "num_tokens", "left"), [(50, 45, 45), (50, 55, 50), (64, 63, 63)])
def test_a_raw_tail_gives_rows_of_a_sealed_block_back(kept: int, num_tokens: int, left: int) -> None:
    kv = manager()
    table = run(kv, tokens(0, kept))
    kv.keep_tail(table)
    append(kv, table, tokens(kept, 100 - kept))
    assert kv.truncate(table, num_tokens) == left
    kv.check_integrity()
    assert (table.token_ids, table.block_ids) == (tokens(0, left), [0])
    append(kv, table, [999])
    assert num_cached(kv, tokens(0, left + 1)) == left


def test_a_tail_that_gave_rows_back_counts_as_used() -> None:
    kv = manager(max_tails=2)
    table, other = run(kv, tokens(0, 40)), run(kv, tokens(100, 5))
    for sequence in (table, other):
        kv.keep_tail(sequence)
    append(kv, table, tokens(40, 60))
    assert kv.truncate(table, 38) == 38
    kv.keep_tail(run(kv, tokens(200, 5)))
    assert [num_cached(kv, tokens(first, 41)) for first in (0, 100)] == [40, 0]


def test_a_sequence_that_started_from_sealed_blocks_can_be_truncated() -> None:
    kv = manager()
    kv.free(run(kv, tokens(0, 64)))
    table = kv.start(kv.match_prefix(tokens(0, 65), namespace=NAMESPACE), tokens(0, 65))
    assert kv.truncate(table, 64) == 64
    assert kv.truncate(table, 40) == 32
    assert (table.slot, kv.num_reusable_blocks) == (None, 1)


def test_a_fork_keeps_what_the_other_gives_up() -> None:
    kv = manager()
    table = run(kv, tokens(0, 70))
    other = kv.fork(table)
    assert kv.truncate(table, 10) == 0
    assert (other.num_tokens, other.block_ids, other.slot) == (70, [0, 1], 0)
    assert (kv.num_used_blocks, kv.num_reusable_blocks) == (2, 0)
    assert append(kv, other, [70]) == StepPlan(slot=0, copy_from=None)


@pytest.mark.parametrize("num_tokens", [-1, 6])
def test_an_impossible_length_is_refused(num_tokens: int) -> None:
    kv = manager()
    table = run(kv, tokens(0, 5))
    with pytest.raises(ValueError, match=f"Cannot truncate 5 tokens to {num_tokens}"):
        kv.truncate(table, num_tokens)
