"""Memory arithmetic: how a budget is divided into sealed blocks and open slots."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import InvalidRequest
from octavo.formats import PageFormat
from octavo.kv.storage.arena import HUGE_PAGE_BYTES
from octavo.spec import BLOCK_SIZE, CacheSpec, cdiv

_MIN_SLABS = 8  # below this many slabs a layer, smaller slabs waste less than huge pages gain
_MIN_BLOCKS = 4
_MAX_TAILS = 64


@dataclass(frozen=True, slots=True)
class CachePlan:
    """A budget, divided.

    Attributes:
        bytes_per_token: of sealed keys and values, all layers, the format's scales included.
        page_bytes, open_page_bytes: one layer's sealed and raw page of a block.
        num_blocks, num_slots, max_tails: the most there can be of each.
        slab_bytes: unit of one layer's sealed memory.
    """

    bytes_per_token: int
    page_bytes: int
    open_page_bytes: int
    num_blocks: int
    num_slots: int
    max_tails: int
    slab_bytes: int


def default_budget_bytes(available_bytes: int) -> int:
    """A share of the memory that is free once the model is loaded."""
    return max(available_bytes * 2 // 5, 64 << 20)


def plan_cache(spec: CacheSpec, page_format: PageFormat, budget_bytes: int, max_running: int) -> CachePlan:
    """Divides `budget_bytes` between open slots and sealed blocks.

    Raises:
        InvalidRequest: the budget does not hold one running sequence; the message has both numbers.
    """
    group = spec.group
    page_bytes = page_format.page_bytes(group.page)
    open_page_bytes = group.page.raw_bytes(spec.dtype)
    slot_bytes = cdiv(cdiv(open_page_bytes, 64) * 64 * group.num_layers, 4096) * 4096
    max_tails = min(_MAX_TAILS, max(2, budget_bytes // 8 // slot_bytes))
    num_slots = max_running + max_tails + 1
    for_blocks = budget_bytes - num_slots * slot_bytes
    slab_bytes = HUGE_PAGE_BYTES
    while slab_bytes > 65536 and for_blocks < _MIN_SLABS * slab_bytes * group.num_layers:
        slab_bytes //= 2
    slab_bytes = cdiv(page_bytes, slab_bytes) * slab_bytes
    num_slabs = max(0, for_blocks) // (slab_bytes * group.num_layers)
    min_slabs = cdiv(_MIN_BLOCKS, slab_bytes // page_bytes)
    if num_slabs < min_slabs:
        blocks_bytes = min_slabs * slab_bytes * group.num_layers
        need = num_slots * slot_bytes + blocks_bytes
        fits_one = (1 + max_tails + 1) * slot_bytes + blocks_bytes <= budget_bytes
        raise InvalidRequest(
            f"A cache of {budget_bytes:,} bytes is too small for {max_running} running sequences; "
            f"this model needs at least {need:,} bytes. Raise the cache budget (kv_memory, --kv-memory)"
            f"{' or lower max_running' if fits_one else ''}."
        )
    return CachePlan(
        bytes_per_token=page_bytes * group.num_layers // BLOCK_SIZE,
        page_bytes=page_bytes,
        open_page_bytes=open_page_bytes,
        num_blocks=num_slabs * (slab_bytes // page_bytes),
        num_slots=num_slots,
        max_tails=max_tails,
        slab_bytes=slab_bytes,
    )
