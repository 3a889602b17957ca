"""Open slots: raw rows of one block each, shared by sequences and tails, written only at the end."""

from __future__ import annotations

from collections.abc import Callable

from octavo.kv.block_pool import IdPool
from octavo.kv.table import StepPlan
from octavo.kv.tails import RawTails, Tail
from octavo.spec import BLOCK_SIZE


class OpenSlots:
    """Reference counts and high-water marks of the slots, and the raw tails that live in them.

    A holder owns the first rows of a slot, as many as it has tokens in that block. `_filled` is the number
    of rows that somebody has written or is about to write; rows below it change only if a sole holder cuts
    it back to its own rows. It may stay too high (a holder of more rows left), which costs a copy.

    `on_drop(tail)` is called for each tail that leaves for lack of room.
    """

    def __init__(self, num_slots: int, max_tails: int, on_drop: Callable[[Tail], None]) -> None:
        self.ids = IdPool(num_slots)
        self.tails = RawTails()
        self.max_tails = max_tails
        self._filled = [0] * num_slots
        self._on_drop = on_drop

    def filled(self, slot: int) -> int:
        """The slot's high-water mark, in rows."""
        return self._filled[slot]

    def release(self, slot: int) -> None:
        """A holder lets go."""
        if self.ids.release(slot) == 0:
            self.ids.put_back(slot)

    def plan_step(self, slot: int | None, num_tokens: int, num_new_tokens: int) -> StepPlan | None:
        """Move a holder of `slot`, with `num_tokens` tokens in all, to a slot where its next rows may go.

        None, with nothing changed, if no slot is free and no tail can make room. This never happens while
        there are as many slots as sequences: a sequence without a slot, or sharing one with another
        sequence, leaves a slot over, and from one shared with a tail only the tail can go.
        """
        num_rows = num_tokens % BLOCK_SIZE
        stays = num_rows + num_new_tokens <= BLOCK_SIZE
        copy_from = None
        if slot is None or not self._may_write(slot, num_rows, stays):
            fresh = self._take()
            if fresh is not None:
                if slot is not None:
                    copy_from = slot if num_rows else None
                    self.release(slot)
                slot = fresh
            elif slot is not None and slot in self.tails and self.ids.ref_count(slot) == 2:
                self.drop_tail(slot)
            else:
                return None
        self._filled[slot] = (num_tokens + num_new_tokens - 1) % BLOCK_SIZE + 1
        return StepPlan(slot, copy_from)

    def _may_write(self, slot: int, num_rows: int, stays: bool) -> bool:
        """Whether a holder of `num_rows` rows may go on in the slot.

        A shared slot is never left for the next block within a step, though the rows up to the block's
        end could be appended: the other holders would then believe that they may write there.
        """
        return self.ids.ref_count(slot) == 1 or (stays and self._filled[slot] == num_rows)

    def _take(self) -> int | None:
        """A slot with one holder; the tail used longest ago that has a slot to itself makes room."""
        if not self.ids.num_free:
            victim = next((slot for slot in self.tails if self.ids.ref_count(slot) == 1), None)
            if victim is None:
                return None
            self.drop_tail(victim)
        return self.ids.take()

    def keep_tail(self, slot: int, tail: Tail) -> None:
        """Keep the slot's first rows as a tail, unless a tail that is here has them all."""
        if not self.max_tails:
            return
        longest, num_rows = self.tails.longest(tail.parent, tail.token_ids)
        if longest is not None and num_rows == len(tail.token_ids):
            self.tails.touch(longest)
            return
        for other in self.tails.continuing(tail.parent):
            if tail.token_ids[: len(self.tails[other].token_ids)] == self.tails[other].token_ids:
                self._remove_tail(other)
        if len(self.tails) == self.max_tails:
            self.drop_tail(next(iter(self.tails)))
        self.ids.share(slot)
        self.tails.add(slot, tail)

    def drop_tail(self, slot: int) -> None:
        """Give up a tail for lack of room."""
        self._on_drop(self._remove_tail(slot))

    def forget_tail(self, slot: int) -> Tail:
        """Give up a tail that nobody wants any more, and return it."""
        return self._remove_tail(slot)

    def clear_tails(self, namespace: bytes | None = None) -> list[Tail]:
        """Give up all tails, or those of a namespace, and return them."""
        slots = [slot for slot in self.tails if namespace in (None, self.tails[slot].namespace)]
        return [self._remove_tail(slot) for slot in slots]

    def _remove_tail(self, slot: int) -> Tail:
        self.release(slot)
        return self.tails.remove(slot)
