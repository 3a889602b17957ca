"""Sealed blocks: reference counts, the free list, and what happens when the last holder lets go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from octavo.kv.eviction import EvictionPolicy
from octavo.kv.prefix import Parent, PrefixIndex, PublishedBlock


class IdPool:
    """Ids 0..size-1 of blocks or of slots, each with the number of its holders.

    The lowest free id is taken first, so that what is in use stays together and the storage's upper
    slabs can be given back. An id whose last holder has let go is not free until it is put back.
    """

    def __init__(self, size: int) -> None:
        self._ref_counts = [0] * size
        self._free = list(range(size))  # sorted, hence a heap

    @property
    def size(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, id_: int) -> int:
        """The number of holders."""
        return self._ref_counts[id_]

    def ref_counts(self) -> list[int]:
        """The number of holders of every id."""
        return list(self._ref_counts)

    def take(self) -> int:
        """The lowest free id, now with one holder. Raises IndexError if none is free."""
        id_ = heappop(self._free)
        self._ref_counts[id_] = 1
        return id_

    def share(self, id_: int) -> int:
        """Add a holder; returns the number of holders."""
        self._ref_counts[id_] += 1
        return self._ref_counts[id_]

    def release(self, id_: int) -> int:
        """Remove a holder; returns the number of those left."""
        self._ref_counts[id_] -= 1
        return self._ref_counts[id_]

    def put_back(self, id_: int) -> None:
        """Make an id without holders free."""
        heappush(self._free, id_)

    def free_ids(self) -> list[int]:
        """The free ids, ascending."""
        return sorted(self._free)

    def allocated_ids(self) -> list[int]:
        """The ids that are not free, ascending."""
        return sorted(set(range(self.size)).difference(self._free))


class BlockPool:
    """The sealed blocks: each is free, held by sequences, or *reusable*: published and held by nobody.

    A reusable block is evicted when there is no free one; `on_evict(block_id)` is called just before.
    """

    def __init__(
        self, num_blocks: int, index: PrefixIndex, policy: EvictionPolicy, on_evict: Callable[[int], None]
    ) -> None:
        self.ids = IdPool(num_blocks)
        self.index = index
        self.reusable = policy
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Blocks that can be taken."""
        return self.ids.num_free + len(self.reusable)

    def take(self) -> int:
        """A block with one holder. Raises KeyError if none is available."""
        if not self.ids.num_free:
            victim = self.reusable.pop()
            self._on_evict(victim)
            self.index.unpublish(victim)
            self.ids.put_back(victim)
        return self.ids.take()

    def hold(self, block_id: int) -> None:
        """Add a holder to a block that is held or reusable."""
        if self.ids.share(block_id) == 1:
            self.reusable.remove(block_id)

    def release(self, block_ids: Iterable[int]) -> None:
        """A holder lets go of blocks that follow each other: the deepest goes first.

        So a block becomes reusable, and is evicted, before the one that it continues.
        """
        for block_id in reversed(list(block_ids)):
            if self.ids.release(block_id) == 0:
                if block_id in self.index:
                    self.reusable.touch(block_id)
                else:
                    self.ids.put_back(block_id)

    def publish(
        self, block_id: int, namespace: bytes, parent: Parent, token_ids: Sequence[int]
    ) -> int | None:
        """Make a held block shareable; returns the block that the holder has from now on.

        That is an equal block if one is published already: it is held instead, and `block_id` released.
        None if a block of other content has the same hash: nothing is done.
        """
        published = self.index.find(namespace, parent, token_ids)
        if published is not None:
            self.hold(published)
            self.release([block_id])
            return published
        return block_id if self.index.publish(block_id, namespace, parent, token_ids) else None

    def forget(self, namespace: bytes) -> list[PublishedBlock]:
        """Unpublish the blocks of a namespace, and return what they held. Reusable ones become free."""
        ids = [id_ for id_ in self.index if self.index[id_].namespace == namespace]
        return [self.drop(id_) for id_ in sorted(ids, key=lambda id_: self.index[id_].depth, reverse=True)]

    def drop(self, block_id: int) -> PublishedBlock:
        """Unpublish a block that no other continues, and return what it held. A reusable one becomes free."""
        self.reusable.drop(block_id)
        if not self.ids.ref_count(block_id):
            self.ids.put_back(block_id)
        return self.index.unpublish(block_id)

    def clear(self) -> list[PublishedBlock]:
        """Unpublish all blocks, and return what they held. Reusable ones become free."""
        for block_id in self.reusable.clear():
            self.ids.put_back(block_id)
        return self.index.clear()
