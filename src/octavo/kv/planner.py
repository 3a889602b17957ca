"""Memory arithmetic: how a budget is divided into sealed blocks and open slots."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import InvalidRequest
from octavo.formats import PageFormat
from octavo.spec import BLOCK_SIZE, CacheSpec, cdiv

_SLAB_BYTES = 256 << 10
_MIN_SLABS = 8  # below this many slabs a layer, a budget is divided more finely
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


def slab_bytes_for(page_bytes: int) -> int:
    """The usual unit of one layer's sealed memory: about 256 KiB, whole pages of blocks and of the system."""
    return _whole_pages(max(1, _SLAB_BYTES // page_bytes) * page_bytes)


def _whole_pages(num_bytes: int) -> int:
    return cdiv(num_bytes, 4096) * 4096


def plan_cache(spec: CacheSpec, page_format: PageFormat, budget_bytes: int, max_running: int) -> CachePlan:
    """Divides `budget_bytes` between open slots and sealed blocks.

    Raises:
        InvalidRequest: the budget does not hold one running sequence; the message has both numbers.
    """
    group = spec.group
    page_bytes = page_format.page_bytes(group.page)
    open_page_bytes = group.page.raw_bytes(spec.dtype)
    slot_bytes = _whole_pages(cdiv(open_page_bytes, 64) * 64 * group.num_layers)
    max_tails = min(_MAX_TAILS, max(2, budget_bytes // 8 // slot_bytes))
    num_slots = max_running + max_tails + 1
    for_blocks = budget_bytes - num_slots * slot_bytes
    blocks_per_slab = slab_bytes_for(page_bytes) // page_bytes
    while blocks_per_slab > 1 and for_blocks < _MIN_SLABS * blocks_per_slab * page_bytes * group.num_layers:
        blocks_per_slab //= 2
    slab_bytes = _whole_pages(blocks_per_slab * page_bytes)
    num_slabs = max(0, for_blocks) // (slab_bytes * group.num_layers)
    min_slabs = cdiv(_MIN_BLOCKS, blocks_per_slab)
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
