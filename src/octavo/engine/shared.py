"""What is public by choice: beginnings of prompts that every namespace may take.

A namespace gets copies of its own. So nothing of one namespace ever continues a block of another, and what a prompt
goes on with behind a public beginning is seen by its own namespace alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.spec import BLOCK_SIZE

if TYPE_CHECKING:
    from octavo.kv.manager import KVCacheManager
    from octavo.kv.storage.arena import SealedArena
    from octavo.kv.table import BlockTable

SHARED = "octavo:shared"
"""The `cache_namespace` of what all may take. Whatever is computed in it is public; pin it, or it may be evicted."""


class SharedPrefixes:
    """The blocks of the shared namespace, given out as copies."""

    def __init__(self, manager: KVCacheManager, sealed: SealedArena, namespace: bytes) -> None:
        """`namespace` is the key of `SHARED`."""
        self._manager, self._sealed, self._namespace = manager, sealed, namespace

    def give(self, table: BlockTable, token_ids: Sequence[int]) -> bool:
        """Adds to a table, just started, the blocks of its prompt that are shared and that its namespace has not.

        Whether there were any. They are published in the table's namespace.
        """
        if table.namespace == self._namespace:
            return False
        match = self._manager.match_prefix(token_ids, namespace=self._namespace)
        num_own, num_shared = table.num_tokens // BLOCK_SIZE, len(match.block_ids)
        if num_shared <= num_own:
            return False
        source = self._manager.start(match, token_ids)  # so that making room does not evict it
        try:
            start = num_own * BLOCK_SIZE
            if table.num_tokens > start:  # rows of a tail, which the next block has too
                self._manager.truncate(table, start)
            block_ids = self._manager.adopt(table, num_shared - num_own)
            if block_ids is None:
                return False
            self._sealed.touch(block_ids)
            for shared, own in zip(match.block_ids[num_own:], block_ids, strict=True):
                self._sealed.write(own, self._sealed.read(shared))
            self._manager.commit(table, token_ids[start : num_shared * BLOCK_SIZE])
        finally:
            self._manager.free(source)
        return True
