from __future__ import annotations

from octavo.kv import StepPlan

from .kv_steps import append, manager, num_cached, run, tokens


def test_a_sequence_keeps_its_slot_from_block_to_block() -> None:
    kv = manager()
    table = run(kv, tokens(0, 20))
    assert append(kv, table, tokens(20, 12)) == StepPlan(slot=0, copy_from=None)
    assert append(kv, table, [32]) == StepPlan(slot=0, copy_from=None)
    assert append(kv, table, tokens(33, 70)) == StepPlan(slot=0, copy_from=None)
    assert kv.allocated_slots() == [0]


def test_a_full_last_block_keeps_its_raw_rows_until_the_next_token() -> None:
    kv = manager()
    table = run(kv, tokens(0, 64))
    assert (table.slot, table.last_block_start) == (0, 32)
    kv.keep_tail(table)
    assert num_cached(kv, tokens(0, 64)) == 63
    # The tail keeps the slot, so the next block needs another one, with nothing to copy.
    assert append(kv, table, [64]) == StepPlan(slot=1, copy_from=None)
    assert num_cached(kv, tokens(0, 64)) == 63


def test_the_first_of_a_fork_appends_in_place_and_the_others_copy() -> None:
    kv = manager()
    first = run(kv, tokens(0, 40))
    second, third = kv.fork(first), kv.fork(first)
    assert append(kv, first, [1]) == StepPlan(slot=0, copy_from=None)
    assert append(kv, second, [2]) == StepPlan(slot=1, copy_from=0)
    assert append(kv, third, [3]) == StepPlan(slot=2, copy_from=0)
    assert append(kv, first, [4]) == StepPlan(slot=0, copy_from=None)
    assert (first.block_ids, kv.num_used_blocks) == (second.block_ids, 1)


def test_within_one_step_a_place_in_a_shared_slot_is_given_away_once() -> None:
    kv = manager()
    first = run(kv, tokens(0, 8))
    second = kv.fork(first)
    assert kv.allocate(first, 1) == StepPlan(slot=0, copy_from=None)
    assert kv.allocate(second, 1) == StepPlan(slot=1, copy_from=0)
    for table in (first, second):
        kv.commit(table, [9])
    kv.check_integrity()


def test_a_shared_slot_is_not_left_in_the_middle_of_a_step() -> None:
    # If the first one wrote rows 8..31 and then left, the second one, now alone, would write there too.
    kv = manager()
    first = run(kv, tokens(0, 8))
    second = kv.fork(first)
    assert kv.allocate(first, 40) == StepPlan(slot=1, copy_from=0)
    assert kv.allocate(second, 40) == StepPlan(slot=0, copy_from=None)


def test_a_failed_step_in_a_shared_slot_does_not_hinder_the_others() -> None:
    kv = manager()
    first = run(kv, tokens(0, 8))
    second, third = kv.fork(first), kv.fork(first)
    assert kv.allocate(first, 4) == StepPlan(slot=0, copy_from=None)
    kv.free(first)
    assert append(kv, second, [1]) == StepPlan(slot=1, copy_from=0)
    assert append(kv, third, [2]) == StepPlan(slot=0, copy_from=None)


def test_a_sequence_goes_on_in_the_slot_of_its_own_tail_and_a_retry_copies() -> None:
    kv = manager()
    table = run(kv, tokens(0, 40))
    kv.keep_tail(table)
    assert append(kv, table, [40]) == StepPlan(slot=0, copy_from=None)
    retry = kv.start(kv.match_prefix(tokens(0, 40), namespace=b"tests"), tokens(0, 40))
    assert (retry.num_tokens, retry.slot) == (39, 0)
    assert append(kv, retry, [99]) == StepPlan(slot=1, copy_from=0)


def test_a_sole_holder_cuts_the_slot_back_to_its_rows() -> None:
    kv = manager()
    table = run(kv, tokens(0, 40))
    assert kv.truncate(table, 34) == 34
    assert append(kv, table, [7]) == StepPlan(slot=0, copy_from=None)
    fork = kv.fork(table)
    assert append(kv, fork, [8]) == StepPlan(slot=0, copy_from=None)


def test_a_shorter_holder_of_a_shared_slot_copies() -> None:
    kv = manager()
    table = run(kv, tokens(0, 40))
    kv.keep_tail(table)
    assert kv.truncate(table, 34) == 34
    assert append(kv, table, [7]) == StepPlan(slot=1, copy_from=0)
    assert num_cached(kv, tokens(0, 41)) == 40


def test_the_tail_used_longest_ago_makes_room_for_a_slot() -> None:
    kv = manager(num_slots=3)
    for first in (0, 100):
        table = run(kv, tokens(first, 5))
        kv.keep_tail(table)
        kv.free(table)
    kv.free(kv.start(kv.match_prefix(tokens(0, 6), namespace=b"tests"), tokens(0, 6)))
    running = run(kv, tokens(200, 5))
    run(kv, tokens(300, 5))
    assert (num_cached(kv, tokens(0, 6)), num_cached(kv, tokens(100, 6))) == (5, 0)
    kv.keep_tail(running)
    run(kv, tokens(400, 5))
    assert (num_cached(kv, tokens(0, 6)), num_cached(kv, tokens(200, 6))) == (0, 5)


def test_a_sequence_gives_up_the_tail_in_its_own_slot_if_there_is_no_other() -> None:
    kv = manager(num_slots=1)
    table = run(kv, tokens(0, 40))
    kv.keep_tail(table)
    assert kv.truncate(table, 34) == 34
    assert append(kv, table, [7]) == StepPlan(slot=0, copy_from=None)
    assert (kv.num_tails, num_cached(kv, tokens(0, 41))) == (0, 32)


def test_as_many_slots_as_sequences_are_always_enough() -> None:
    kv = manager(num_slots=3)
    first = run(kv, tokens(0, 40))
    kv.keep_tail(first)
    tables = [first, kv.fork(first), kv.fork(first)]
    for table in tables:
        assert kv.allocate(table, 40) is not None
    for table in tables:
        kv.commit(table, tokens(40, 40))
    kv.check_integrity()
    assert kv.num_used_slots == 3
