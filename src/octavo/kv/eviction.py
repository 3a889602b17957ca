"""Which of the things that nobody holds leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """The ids that may be evicted.

    An id is in here exactly while it may be evicted. A sequence is released from its end, so a block is
    always touched after the blocks that continue it; a policy must keep that order between them.
    """

    def touch(self, id_: int) -> None:
        """`id_` was used just now; it is added if it is not in here."""

    def remove(self, id_: int) -> None:
        """`id_` may not be evicted any more. Raises KeyError if it is not in here."""

    def pop(self) -> int:
        """Remove and return the id to evict. Raises KeyError if there is none."""

    def drop(self, id_: int) -> None:
        """`id_` is not evicted and not used again: it is discarded, in here or while somebody holds it."""

    def clear(self) -> list[int]:
        """Remove and return all ids, and forget what was learned of the blocks that are held."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """The ids in an order in which they could go: a block behind those that continue it."""


class LRU:
    """Least recently used first. Every operation takes constant time, also in the middle."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def touch(self, id_: int) -> None:
        self._order[id_] = None
        self._order.move_to_end(id_)

    def remove(self, id_: int) -> None:
        del self._order[id_]

    def pop(self) -> int:
        return self._order.popitem(last=False)[0]

    def drop(self, id_: int) -> None:
        self._order.pop(id_, None)

    def clear(self) -> list[int]:
        ids = list(self._order)
        self._order.clear()
        return ids

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
