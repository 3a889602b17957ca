from __future__ import annotations

from collections.abc import Sequence

from octavo.kv import KVCacheManager, Miss, block_hash
from octavo.kv.explain import Departed

from .kv_steps import NAMESPACE, manager, run, tokens


def explain(kv: KVCacheManager, token_ids: Sequence[int]) -> Miss | None:
    return kv.explain(kv.match_prefix(token_ids, namespace=NAMESPACE), token_ids)


def finish(kv: KVCacheManager, token_ids: Sequence[int], *, keep: bool = True) -> None:
    table = run(kv, token_ids)
    if keep:
        kv.keep_tail(table)
    kv.free(table)


def test_nothing_to_explain_if_only_the_last_token_is_left() -> None:
    kv = manager()
    finish(kv, tokens(0, 70))
    for prompt in (tokens(0, 70), tokens(0, 71), tokens(0, 65), [5], []):
        assert explain(kv, prompt) is None


def test_new() -> None:
    kv = manager()
    assert explain(kv, tokens(0, 70)) == Miss("new", 0, 0)
    finish(kv, tokens(0, 70))
    assert explain(kv, tokens(0, 100)) == Miss("new", 70, 0)
    assert explain(kv, tokens(500, 70)) == Miss("new", 0, 0)
    assert kv.explain(kv.match_prefix(tokens(0, 70), namespace=b"other"), tokens(0, 70)) == Miss("new", 0, 0)


def test_below_one_block() -> None:
    kv = manager()
    finish(kv, tokens(0, 70), keep=False)
    assert explain(kv, tokens(0, 50)) == Miss("below_one_block", 32, 17)
    assert explain(kv, tokens(0, 64)) == Miss("below_one_block", 32, 31)


def test_below_one_block_with_a_tail_that_had_to_go() -> None:
    kv = manager(max_tails=1)
    finish(kv, tokens(0, 45))
    finish(kv, tokens(100, 5))
    assert explain(kv, tokens(0, 60)) == Miss("below_one_block", 32, 13)
    assert explain(kv, tokens(0, 40)) == Miss("below_one_block", 32, 7)


def test_changed_token() -> None:
    kv = manager()
    finish(kv, tokens(0, 70))
    changed = tokens(0, 80)
    changed[50] = 999
    assert explain(kv, changed) == Miss("changed_token", 32, 18, tuple(tokens(50, 20)), 0, 19)
    changed = tokens(0, 80)
    changed[32] = 999
    assert explain(kv, changed) == Miss("changed_token", 32, 0, tuple(tokens(32, 38)), 0, 37)
    changed = tokens(0, 80)
    changed[67] = 999
    assert explain(kv, changed) == Miss("changed_token", 67, 0, (67, 68, 69))
    changed = tokens(0, 80)
    changed[0] = 999
    assert explain(kv, changed) == Miss("new", 0, 0)


def test_text_that_was_dropped() -> None:
    kv = manager()
    finish(kv, tokens(0, 150))
    dropped = [*tokens(0, 40), *tokens(100, 60)]
    assert explain(kv, dropped) == Miss("dropped_text", 32, 8, tuple(tokens(40, 110)), 60, 50)
    short = [*tokens(0, 40), *tokens(145, 5)]  # nothing more to compare, and that agrees
    assert explain(kv, short) == Miss("dropped_text", 32, 8, tuple(tokens(40, 110)), 105, 5)
    too_short = [*tokens(0, 40), *tokens(100, 3)]
    assert explain(kv, too_short) == Miss("changed_token", 32, 8, tuple(tokens(40, 110)))
    elsewhere = [*tokens(0, 40), 999, *tokens(100, 60)]
    assert explain(kv, elsewhere) == Miss("changed_token", 32, 8, tuple(tokens(40, 110)), 0, 50)


def test_what_the_most_similar_of_several_went_on_with() -> None:
    kv = manager()
    finish(kv, tokens(0, 70))
    finish(kv, [*tokens(0, 50), *tokens(300, 50)])
    changed = [*tokens(0, 52), 999, *tokens(400, 20)]
    assert explain(kv, changed) == Miss("changed_token", 32, 20, tuple(tokens(52, 18)))
    changed = [*tokens(0, 50), *tokens(300, 5), 999, *tokens(400, 20)]
    assert explain(kv, changed) == Miss("changed_token", 32, 23, tuple(tokens(305, 45)))


def test_of_what_is_here_and_what_has_left_the_longer_part_counts() -> None:
    kv = manager(max_tails=1)
    finish(kv, tokens(0, 37))
    finish(kv, tokens(100, 5))
    finish(kv, tokens(0, 70), keep=False)
    changed = tokens(0, 80)
    changed[50] = 999
    assert explain(kv, changed) == Miss("changed_token", 32, 18, tuple(tokens(50, 14)), 0, 13)


def test_what_came_back_is_not_missed() -> None:
    kv = manager(max_tails=1)
    for token_ids in (tokens(0, 45), tokens(100, 5), tokens(0, 45)):
        finish(kv, token_ids)
    assert explain(kv, tokens(0, 60)) == Miss("new", 45, 0)


def test_evicted() -> None:
    kv = manager(num_blocks=3)
    finish(kv, tokens(0, 101))
    finish(kv, tokens(200, 64))
    assert explain(kv, tokens(0, 150)) == Miss("evicted", 32, 69)
    assert explain(kv, tokens(0, 96)) == Miss("evicted", 32, 63)
    assert explain(kv, tokens(0, 40)) == Miss("new", 32, 0)  # inside a block that nothing tells of any more
    finish(kv, tokens(0, 96))
    assert explain(kv, tokens(0, 96)) is None


def test_cleared() -> None:
    kv = manager()
    finish(kv, tokens(0, 70))
    finish(kv, tokens(100, 20))
    kv.clear()
    assert explain(kv, tokens(0, 100)) == Miss("cleared", 0, 70)
    assert explain(kv, tokens(0, 68)) == Miss("cleared", 0, 67)
    assert explain(kv, tokens(100, 10)) == Miss("cleared", 0, 9)
    finish(kv, tokens(0, 32))
    assert explain(kv, tokens(0, 100)) == Miss("cleared", 32, 38)


def test_the_latest_cause_counts_and_the_oldest_is_forgotten() -> None:
    departed = Departed(block_hash, max_hashes=2)
    block = block_hash(NAMESPACE, b"root", tokens(0, 32))
    departed.add_block(block, "cleared")
    departed.add_block(b"other", "cleared")
    departed.add_block(block, "evicted")
    departed.add_block(b"third", "cleared")
    assert departed.follow(NAMESPACE, b"root", tokens(0, 33)) == (32, "evicted")
    departed.add_block(b"fourth", "cleared")
    assert departed.follow(NAMESPACE, b"root", tokens(0, 33)) == (0, None)


def test_the_first_of_several_causes_is_told() -> None:
    departed = Departed(block_hash)
    first = block_hash(NAMESPACE, b"root", tokens(0, 32))
    departed.add_block(first, "evicted")
    departed.add_block(block_hash(NAMESPACE, first, tokens(32, 32)), "cleared")
    assert departed.follow(NAMESPACE, b"root", tokens(0, 70)) == (64, "evicted")
