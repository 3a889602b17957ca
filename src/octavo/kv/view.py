"""What the cache holds, copied so that another thread may look at it."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kv.block_pool import BlockPool
from octavo.kv.prefix import PublishedBlock
from octavo.kv.slots import OpenSlots
from octavo.kv.tails import Tail
from octavo.kv.value import ByValue


@dataclass(frozen=True, slots=True)
class CacheView:
    """The cache at one moment. The containers are copies; what is in them is never changed by anybody.

    Attributes:
        published: the sealed blocks that can be shared, by id.
        block_holders: sequences and pins that hold each block, by id; 0 where it is free or reusable.
        left_s: when a reusable block was let go of last, on the monotonic clock.
        tails: raw tails by slot.
        slot_holders: sequences and tails that hold each slot.
    """

    published: dict[int, PublishedBlock]
    block_holders: list[int]
    left_s: dict[int, float]
    tails: dict[int, Tail]
    slot_holders: list[int]


def view_of(blocks: BlockPool, slots: OpenSlots) -> CacheView:
    """The view of these; it takes time in proportion to what they hold, about 0.5 us a block."""
    return CacheView(
        published=blocks.index.blocks(),
        block_holders=blocks.ids.ref_counts(),
        left_s=blocks.reusable.left() if isinstance(blocks.reusable, ByValue) else {},
        tails={slot: slots.tails[slot] for slot in slots.tails},
        slot_holders=slots.ids.ref_counts(),
    )
