"""Memory arithmetic, for the engine and for `octavo plan`: what tokens take, and how a budget is divided into sealed
blocks and open slots."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import InvalidRequest
from octavo.formats import PageFormat
from octavo.spec import BLOCK_SIZE, STATE_BYTES, CacheSpec, cdiv

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


def slot_bytes_of(spec: CacheSpec) -> int:
    """Bytes of an open block, raw in all layers."""
    pages = sum(cdiv(group.page.raw_bytes(spec.dtype), 64) * 64 * group.num_layers for group in spec.groups)
    return _whole_pages(pages)


def block_bytes_of(spec: CacheSpec, page_format: PageFormat) -> int:
    """Bytes of a sealed block in all layers."""
    return sum(page_format.page_bytes(group.page) * group.num_layers for group in spec.groups)


def sequence_bytes(
    spec: CacheSpec, page_format: PageFormat, num_tokens: int, *, windowed: bool = False
) -> int:
    """What one sequence of so many tokens holds: its sealed blocks, an open one, and recurrent states.

    With `windowed`, as if layers with a window let go of the blocks behind it, which Octavo does not do.
    """
    total = slot_bytes_of(spec)
    for group in spec.groups:
        num_blocks = num_tokens // BLOCK_SIZE
        if windowed and group.window:
            num_blocks = min(num_blocks, cdiv(group.window, BLOCK_SIZE) + 1)
        page_bytes = page_format.page_bytes(group.page)
        total += group.num_layers * (num_blocks * page_bytes + group.state_elements * STATE_BYTES)
    return total


def longest_context(
    spec: CacheSpec, page_format: PageFormat, budget_bytes: int, users: int, max_running: int
) -> int:
    """Tokens that each of so many sequences may have at the same time within a budget; 0 if not one block."""
    if _is_run(spec):
        try:
            plan = plan_cache(spec, page_format, budget_bytes, max(users, max_running))
        except InvalidRequest:
            return 0
        return max(plan.num_blocks // users * BLOCK_SIZE - 1, 0)
    state = sequence_bytes(spec, page_format, 0)
    block_bytes = block_bytes_of(spec, page_format)
    left = budget_bytes // users - state
    return 0 if left < 0 else left // block_bytes * BLOCK_SIZE if block_bytes else 1 << 62


def most_users(
    spec: CacheSpec, page_format: PageFormat, budget_bytes: int, num_tokens: int, max_running: int
) -> int:
    """Sequences of so many tokens that fit into a budget at the same time."""
    low, high = 0, budget_bytes // max(sequence_bytes(spec, page_format, num_tokens), 1) + 1
    while low < high:
        users = (low + high + 1) // 2
        if longest_context(spec, page_format, budget_bytes, users, max_running) >= num_tokens:
            low = users
        else:
            high = users - 1
    return low


def _is_run(spec: CacheSpec) -> bool:
    return len(spec.groups) == 1 and spec.groups[0].kind == "full_attention"


def plan_cache(spec: CacheSpec, page_format: PageFormat, budget_bytes: int, max_running: int) -> CachePlan:
    """Divides `budget_bytes` between open slots and sealed blocks.

    Raises:
        InvalidRequest: the budget does not hold one running sequence; the message has both numbers.
    """
    group = spec.group
    page_bytes = page_format.page_bytes(group.page)
    open_page_bytes = group.page.raw_bytes(spec.dtype)
    slot_bytes = slot_bytes_of(spec)
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
