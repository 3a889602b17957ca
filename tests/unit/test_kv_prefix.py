from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.kv import block_hash

from .kv_steps import NAMESPACE, append, manager, num_cached, run, tokens


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 0), (32, 0), (33, 32), (64, 32), (65, 64), (200, 64)]
)
def test_a_match_covers_whole_blocks_and_never_the_last_token(num_tokens: int, expected: int) -> None:
    kv = manager()
    kv.free(run(kv, tokens(0, 90)))
    assert num_cached(kv, tokens(0, num_tokens)) == expected


def test_a_match_changes_nothing_and_starting_it_takes_its_blocks() -> None:
    kv = manager()
    kv.free(run(kv, tokens(0, 64)))
    match = kv.match_prefix(tokens(0, 65), namespace=NAMESPACE)
    assert kv.num_reusable_blocks == 2
    table = kv.start(match, tokens(0, 65))
    assert (table.num_tokens, table.block_ids, table.slot) == (64, [0, 1], None)
    assert (kv.num_reusable_blocks, kv.num_used_blocks) == (0, 2)


def test_a_block_is_published_by_commit_and_not_before() -> None:
    kv = manager()
    table = run(kv, tokens(0, 31))
    assert kv.allocate(table, 1) is not None
    assert num_cached(kv, tokens(0, 33)) == 0
    kv.commit(table, [31])
    assert num_cached(kv, tokens(0, 33)) == 32


def test_a_failed_step_leaves_nothing_behind() -> None:
    kv = manager()
    table = run(kv, tokens(0, 40))
    assert kv.allocate(table, 60) is not None
    kv.free(table)
    kv.check_integrity()
    assert num_cached(kv, tokens(0, 100)) == 32
    assert (kv.num_used_blocks, kv.allocated_blocks(), kv.allocated_slots()) == (0, [0], [])


def test_an_out_of_date_match_is_refused() -> None:
    kv = manager(num_blocks=2)
    kv.free(run(kv, tokens(0, 64)))
    match = kv.match_prefix(tokens(0, 65), namespace=NAMESPACE)
    with pytest.raises(ValueError, match="64 tokens is out of date or of another prompt"):
        kv.start(match, tokens(1, 65))
    with pytest.raises(ValueError, match="out of date"):
        kv.start(match, tokens(0, 63))
    kv.free(run(kv, tokens(100, 32)))
    with pytest.raises(ValueError, match="Call match_prefix again"):
        kv.start(match, tokens(0, 65))


def test_an_out_of_date_tail_is_refused() -> None:
    kv = manager(max_tails=1)
    table = run(kv, tokens(0, 5))
    kv.keep_tail(table)
    match = kv.match_prefix(tokens(0, 6), namespace=NAMESPACE)
    kv.keep_tail(run(kv, tokens(100, 5)))
    with pytest.raises(ValueError, match="out of date"):
        kv.start(match, tokens(0, 6))


def test_a_match_with_a_tail_is_of_one_prompt_only() -> None:
    kv = manager()
    kv.keep_tail(run(kv, tokens(0, 50)))
    match = kv.match_prefix(tokens(0, 51), namespace=NAMESPACE)
    for other in (tokens(0, 32), [*tokens(0, 49), 999, 50]):
        with pytest.raises(ValueError, match="another prompt"):
            kv.start(match, other)


def test_a_tail_with_the_same_tokens_elsewhere_is_another_one() -> None:
    kv = manager(num_slots=1)
    first = run(kv, tokens(0, 5))
    kv.keep_tail(first)
    kv.free(first)
    match = kv.match_prefix(tokens(0, 6), namespace=NAMESPACE)
    second = run(kv, tokens(100, 32) + tokens(0, 5))
    kv.keep_tail(second)
    assert match.tail_slot == second.slot
    with pytest.raises(ValueError, match="out of date"):
        kv.start(match, tokens(0, 6))


def test_a_sequence_that_does_not_publish_reuses_and_keeps_its_own_to_itself() -> None:
    kv = manager()
    kv.free(run(kv, tokens(0, 32)))
    table = kv.start(kv.match_prefix(tokens(0, 80), namespace=NAMESPACE), tokens(0, 80), publish=False)
    assert table.num_tokens == 32
    append(kv, table, tokens(32, 48))
    kv.keep_tail(table)
    kv.keep_tail(kv.fork(table))
    assert (num_cached(kv, tokens(0, 90)), kv.num_tails) == (32, 0)


def test_sequences_that_compute_the_same_at_the_same_time_share_the_first_ones_blocks() -> None:
    kv = manager()
    first, second = (kv.start(kv.match_prefix([], namespace=NAMESPACE), []) for _ in range(2))
    for table in (first, second):
        assert kv.allocate(table, 70) is not None
    assert second.block_ids == [2, 3]
    for table in (first, second):
        kv.commit(table, tokens(0, 70))
    assert first.block_ids == second.block_ids == [0, 1]
    assert kv.num_free_blocks == 10
    kv.check_integrity()
    kv.free(first)
    append(kv, second, tokens(70, 30))
    assert kv.num_used_blocks == 3


def test_a_reusable_block_is_taken_over_too() -> None:
    kv = manager()
    first = kv.start(kv.match_prefix([], namespace=NAMESPACE), [])
    second = run(kv, tokens(0, 32))
    assert kv.allocate(first, 32) is not None
    kv.free(second)
    kv.commit(first, tokens(0, 32))
    kv.check_integrity()
    assert (first.block_ids, kv.num_reusable_blocks, kv.num_used_blocks) == ([0], 0, 1)


def test_namespaces_never_share() -> None:
    kv = manager()
    table = run(kv, tokens(0, 40), namespace=b"a")
    kv.keep_tail(table)
    assert num_cached(kv, tokens(0, 41), namespace=b"a") == 40
    assert num_cached(kv, tokens(0, 41), namespace=b"b") == 0
    other = run(kv, tokens(0, 5), namespace=b"b")
    kv.keep_tail(other)
    assert num_cached(kv, tokens(0, 6), namespace=b"c") == 0
    assert not set(table.block_ids) & set(run(kv, tokens(0, 40), namespace=b"b").block_ids)


def test_a_namespace_can_be_forgotten() -> None:
    kv = manager()
    ended, running, other = (
        run(kv, tokens(start, 70), namespace=name) for start, name in ((0, b"a"), (200, b"a"), (0, b"b"))
    )
    for table in (ended, running, other):
        kv.keep_tail(table)
    kv.free(ended)
    kv.free(other)
    kv.forget(b"a")
    kv.check_integrity()
    assert num_cached(kv, tokens(0, 71), namespace=b"a") == 0
    assert num_cached(kv, tokens(0, 71), namespace=b"b") == 70
    assert num_cached(kv, tokens(200, 71), namespace=b"a") == 0
    append(kv, running, tokens(270, 40))  # goes on undisturbed, and keeps what it has to itself
    kv.keep_tail(running)
    kv.free(running)
    assert (kv.num_used_blocks, kv.num_reusable_blocks) == (0, 2), "only the other namespace's are left"
    assert num_cached(kv, tokens(200, 111), namespace=b"a") == 0
    kv.check_integrity()


def test_a_hash_collision_is_a_miss() -> None:
    def same(namespace: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return b"same"

    kv = manager(hash_function=same)
    first = run(kv, tokens(0, 40))
    second = run(kv, tokens(100, 70))
    assert num_cached(kv, tokens(0, 40)) == 32
    assert num_cached(kv, tokens(100, 70)) == 0
    assert not second.publishes
    assert num_cached(kv, tokens(0, 40), namespace=b"other") == 0
    for table in (first, second):
        kv.keep_tail(table)
        append(kv, table, tokens(0, 32))
        kv.free(table)
    kv.check_integrity()
    assert num_cached(kv, tokens(100, 70)) == 0
    assert (kv.num_tails, kv.num_free_blocks) == (1, 11)


def test_a_block_is_not_found_behind_another_parent_with_the_same_hash() -> None:
    def last_block_only(namespace: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return block_hash(namespace, b"", token_ids)

    kv = manager(hash_function=last_block_only)
    run(kv, tokens(0, 64))
    assert num_cached(kv, tokens(0, 65)) == 64
    other = run(kv, tokens(100, 32) + tokens(32, 32))
    assert other.block_ids == [2, 3]
    assert num_cached(kv, tokens(100, 32) + tokens(32, 33)) == 32
    assert num_cached(kv, tokens(32, 33)) == 0


def test_after_clear_nothing_older_is_matched_and_running_sequences_go_on() -> None:
    kv = manager()
    finished, running, short = run(kv, tokens(0, 70)), run(kv, tokens(100, 70)), run(kv, tokens(200, 5))
    kv.keep_tail(finished)
    kv.free(finished)
    kv.clear()
    kv.check_integrity()
    assert (kv.num_tails, kv.num_reusable_blocks, kv.num_used_blocks) == (0, 0, 2)
    for first in (0, 100, 200):
        assert num_cached(kv, tokens(first, 80)) == 0

    # What was computed before must not come back with what they compute now.
    append(kv, running, tokens(170, 30))
    append(kv, short, tokens(205, 30))
    for table in (running, short):
        kv.keep_tail(table)
    assert num_cached(kv, tokens(100, 120)) == num_cached(kv, tokens(200, 60)) == 0

    again = run(kv, tokens(100, 70))
    assert num_cached(kv, tokens(100, 120)) == 64
    assert not set(again.block_ids) & set(running.block_ids)
    for table in (again, running, short):
        kv.free(table)
    kv.check_integrity()
    assert (kv.num_used_blocks, kv.num_reusable_blocks) == (0, 2)


def test_wrong_use_is_refused() -> None:
    kv = manager()
    table = run(kv, tokens(0, 5))
    with pytest.raises(ValueError, match="at least one token, not 0"):
        kv.allocate(table, 0)
    with pytest.raises(ValueError, match="allocated for 0 tokens and committed with 1"):
        kv.commit(table, [1])
    assert kv.allocate(table, 3) is not None
    for change in (kv.fork, kv.keep_tail, lambda table: kv.truncate(table, 1), lambda t: kv.allocate(t, 1)):
        with pytest.raises(ValueError, match="step of 3 tokens under way"):
            change(table)
    with pytest.raises(ValueError, match="allocated for 3 tokens and committed with 2"):
        kv.commit(table, [1, 2])
    kv.free(table)
    for change in (kv.free, kv.fork, lambda table: kv.commit(table, [1, 2, 3])):
        with pytest.raises(ValueError, match="not running"):
            change(table)
