"""Raw tails: the last blocks of finished prompts and answers, kept raw so that a retry computes one token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.kv.eviction import LRU
from octavo.kv.prefix import Parent, common_prefix


@dataclass(frozen=True, slots=True)
class Tail:
    """Raw rows of 1..`BLOCK_SIZE` tokens that continue `parent`."""

    namespace: bytes
    parent: Parent
    token_ids: tuple[int, ...]


class RawTails:
    """Tails by the slot that holds their rows, and the order in which they were last used.

    No tail is the beginning of another of the same parent: the longer one serves for both. All holders of
    a slot agree on its rows, so a slot has one tail at most.
    """

    def __init__(self) -> None:
        self._tails: dict[int, Tail] = {}
        self._by_parent: dict[Parent, set[int]] = {}
        self._order = LRU()

    def longest(self, parent: Parent, token_ids: Sequence[int]) -> tuple[int | None, int]:
        """The slot whose rows agree with the most leading `token_ids`, and how many; (None, 0) if none."""
        best: tuple[int | None, int] = (None, 0)
        for slot in self.continuing(parent):
            num_rows = common_prefix(self._tails[slot].token_ids, token_ids)
            if num_rows > best[1]:
                best = (slot, num_rows)
        return best

    def holds(self, slot: int, parent: Parent, token_ids: tuple[int, ...]) -> bool:
        """Whether the tail in `slot` continues `parent` with these tokens first."""
        tail = self._tails.get(slot)
        return tail is not None and tail.parent == parent and tail.token_ids[: len(token_ids)] == token_ids

    def continuing(self, parent: Parent) -> list[int]:
        """The slots of the tails that continue `parent`."""
        return list(self._by_parent.get(parent, ()))

    def add(self, slot: int, tail: Tail) -> None:
        """Keep a tail, as the one used last."""
        self._tails[slot] = tail
        self._by_parent.setdefault(tail.parent, set()).add(slot)
        self._order.touch(slot)

    def touch(self, slot: int) -> None:
        """The tail in `slot` was used just now."""
        self._order.touch(slot)

    def remove(self, slot: int) -> Tail:
        """Take out the tail in `slot`. Raises KeyError if it has none."""
        tail = self._tails.pop(slot)
        siblings = self._by_parent[tail.parent]
        siblings.remove(slot)
        if not siblings:
            del self._by_parent[tail.parent]
        self._order.remove(slot)
        return tail

    def __getitem__(self, slot: int) -> Tail:
        return self._tails[slot]

    def __contains__(self, slot: int) -> bool:
        return slot in self._tails

    def __iter__(self) -> Iterator[int]:
        """The slots, the tail used longest ago first."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._tails)
