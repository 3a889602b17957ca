"""The integrity check sees what it is there to see."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.errors import EngineError
from octavo.kv import IntegrityError, KVCacheManager

from .kv_steps import manager, run, tokens


def _evict_parent_first(kv: KVCacheManager) -> None:
    kv._blocks.reusable.touch(kv._blocks.reusable.pop())


def _unpublish_parent(kv: KVCacheManager) -> None:
    kv._blocks.reusable.remove(4)
    kv._index.unpublish(4)
    kv._blocks.ids.put_back(4)


def _share_block(kv: KVCacheManager) -> None:
    kv._blocks.ids.share(0)


def _share_slot(kv: KVCacheManager) -> None:
    kv._slots.ids.share(0)


def _free_twice(kv: KVCacheManager) -> None:
    kv._blocks.ids.put_back(11)


def _lose_free_block(kv: KVCacheManager) -> None:
    kv._blocks.ids.take()
    kv._blocks.ids.release(6)


def _forget_reusable(kv: KVCacheManager) -> None:
    kv._blocks.reusable.pop()


def _change_token(kv: KVCacheManager) -> None:
    next(table for table in kv._tables if table.num_tokens == 72).token_ids[40] = 9


def _change_open_token(kv: KVCacheManager) -> None:
    next(table for table in kv._tables if table.num_tokens == 72).token_ids[66] = 9


def _cut_slot(kv: KVCacheManager) -> None:
    kv._slots._filled[0] = 2


def _lose_slot(kv: KVCacheManager) -> None:
    table = next(table for table in kv._tables if table.num_tokens == 5)
    kv._slots.release(table.slot)
    table.slot = None


def _lose_child(kv: KVCacheManager) -> None:
    del kv._index._children[4]


def _lose_tail(kv: KVCacheManager) -> None:
    kv._slots.tails._by_parent.clear()


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (_evict_parent_first, "block 2 would be evicted before block 3, which continues it"),
        (_unpublish_parent, "block 5 is published and its parent is not"),
        (_share_block, "block 0 has a ref_count of 3 and 2 holders"),
        (_share_slot, "slot 0 has a ref_count of 4 and 3 holders"),
        (_free_twice, "free blocks"),
        (_lose_free_block, "free blocks"),
        (_forget_reusable, "reusable blocks"),
        (_change_token, "block 1 is not published with the tokens"),
        (_change_open_token, "holders of slot 0 do not agree"),
        (_cut_slot, "slot 0 has"),
        (_lose_slot, "a table of 5 tokens has no slot"),
        (_lose_child, "block 5 is lost to its parent"),
        (_lose_tail, "tail in slot 0 is lost"),
    ],
)
def test_damage_is_found(damage: Callable[[KVCacheManager], None], rule: str) -> None:
    kv = manager()
    table = run(kv, tokens(0, 72))
    kv.keep_tail(table)
    kv.truncate(kv.fork(table), 70)
    run(kv, tokens(300, 5))
    for first in (100, 200):
        kv.free(run(kv, tokens(first, 64)))
    kv.check_integrity()
    damage(kv)
    with pytest.raises(IntegrityError, match=rule) as caught:
        kv.check_integrity()
    assert isinstance(caught.value, EngineError)
