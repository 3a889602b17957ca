from __future__ import annotations

import pytest

from .kv_steps import NAMESPACE, append, manager, num_cached, run, tokens


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 50, 64])
def test_a_retry_computes_one_token(num_tokens: int) -> None:
    kv = manager()
    table = run(kv, tokens(0, num_tokens))
    kv.keep_tail(table)
    kv.free(table)
    assert num_cached(kv, tokens(0, num_tokens)) == num_tokens - 1
    assert num_cached(kv, tokens(0, num_tokens + 40)) == num_tokens


def test_a_tail_is_used_up_to_the_first_other_token() -> None:
    kv = manager()
    kv.keep_tail(run(kv, tokens(0, 50)))
    prompt = [*tokens(0, 40), 99, *tokens(41, 20)]
    match = kv.match_prefix(prompt, namespace=NAMESPACE)
    assert (match.num_tokens, match.num_tail_rows, match.tail_slot) == (40, 8, 0)
    table = kv.start(match, prompt)
    append(kv, table, prompt[40:])
    kv.keep_tail(table)
    assert num_cached(kv, prompt) == 60
    assert num_cached(kv, tokens(0, 51)) == 50


def test_of_several_tails_the_one_that_agrees_longest_is_used() -> None:
    kv = manager()
    for token_ids in (tokens(0, 10), [*tokens(0, 5), 99], [*tokens(0, 7), 98]):
        kv.keep_tail(run(kv, token_ids))
    assert num_cached(kv, [*tokens(0, 9), 1, 2]) == 9
    assert num_cached(kv, [*tokens(0, 7), 98, 2]) == 8
    assert num_cached(kv, [*tokens(0, 5), 99, 2]) == 6


def test_a_full_tail_without_its_sealed_block_serves_all_rows_but_the_last() -> None:
    # The block has to be computed to its end in a step, as its sealed pages are gone.
    kv = manager(num_blocks=2)
    table = run(kv, tokens(0, 64))
    kv.keep_tail(table)
    kv.free(table)
    kv.free(run(kv, tokens(100, 32)))
    assert num_cached(kv, tokens(0, 80)) == 63
    again = run(kv, tokens(0, 64))
    assert (again.num_tokens, len(again.block_ids)) == (64, 2)


def test_a_tail_that_another_one_covers_is_not_kept_twice() -> None:
    kv = manager()
    table = run(kv, tokens(0, 40))
    kv.keep_tail(table)
    kv.keep_tail(table)
    assert kv.num_tails == 1
    append(kv, table, tokens(40, 4))
    kv.keep_tail(table)
    assert kv.num_tails == 1
    assert num_cached(kv, tokens(0, 50)) == 44
    other = kv.fork(table)
    kv.truncate(other, 38)
    kv.keep_tail(other)
    assert kv.num_tails == 1
    kv.check_integrity()


def test_the_tail_used_longest_ago_leaves_when_there_are_too_many() -> None:
    kv = manager(max_tails=2)
    tables = [run(kv, tokens(first, 5)) for first in (0, 100, 200)]
    for table in (tables[0], tables[1], tables[0], tables[2]):
        kv.keep_tail(table)
    assert [num_cached(kv, tokens(first, 6)) for first in (0, 100, 200)] == [5, 0, 5]


def test_no_tails_are_kept_if_none_are_allowed() -> None:
    kv = manager(max_tails=0)
    table = run(kv, tokens(0, 5))
    kv.keep_tail(table)
    kv.check_integrity()
    assert (kv.num_tails, num_cached(kv, tokens(0, 6))) == (0, 0)


def test_a_sequence_without_raw_rows_keeps_no_tail() -> None:
    kv = manager()
    kv.free(run(kv, tokens(0, 32)))
    table = kv.start(kv.match_prefix(tokens(0, 33), namespace=NAMESPACE), tokens(0, 33))
    kv.keep_tail(table)
    assert (table.slot, kv.num_tails) == (None, 0)


def test_tails_leave_with_the_block_that_they_continue() -> None:
    kv = manager(num_blocks=1)
    table = run(kv, tokens(0, 40))
    kv.keep_tail(table)
    kv.free(table)
    kv.free(run(kv, tokens(100, 32)))
    kv.check_integrity()
    assert (kv.num_tails, kv.allocated_slots()) == (0, [])
