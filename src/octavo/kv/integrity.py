"""The integrity check: everything the cache knows, derived anew from the running tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from octavo.errors import EngineError
from octavo.kv.block_pool import BlockPool, IdPool
from octavo.kv.prefix import Parent, common_prefix
from octavo.kv.slots import OpenSlots
from octavo.kv.table import BlockTable
from octavo.spec import BLOCK_SIZE


class IntegrityError(EngineError, AssertionError):
    """The cache contradicts itself, which is a fault of Octavo; the message names the broken rule."""


def check_integrity(tables: Iterable[BlockTable], blocks: BlockPool, slots: OpenSlots) -> None:
    """Raises IntegrityError at the first rule that does not hold."""
    tables = list(tables)
    _check_blocks(tables, blocks)
    _check_index(blocks)
    for table in tables:
        _check_table(table, blocks)
    _check_slots(tables, slots)
    _check_tails(blocks, slots)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise IntegrityError(f"The cache is inconsistent: {rule}. Please report this.")


def _check_holders(name: str, ids: IdPool, holders: Counter[int]) -> None:
    for id_ in range(ids.size):
        _require(
            ids.ref_count(id_) == holders[id_],
            f"{name} {id_} has a ref_count of {ids.ref_count(id_)} and {holders[id_]} holders",
        )


def _check_blocks(tables: list[BlockTable], blocks: BlockPool) -> None:
    """Each block is free, held, or reusable, and only published blocks are reusable."""
    holders = Counter(block_id for table in tables for block_id in table.block_ids)
    _check_holders("block", blocks.ids, holders)
    published = set(blocks.index)
    _require(
        sorted(blocks.reusable) == sorted(published - holders.keys()),
        "the reusable blocks are not the published blocks that nobody holds",
    )
    _require(
        blocks.ids.allocated_ids() == sorted(published | holders.keys())
        and len(blocks.ids.free_ids()) == len(set(blocks.ids.free_ids())),
        "the free blocks are not those that are neither published nor held",
    )


def _check_index(blocks: BlockPool) -> None:
    """A published block's parent is published, and leaves after it."""
    index = blocks.index
    leaves_at = {block_id: when for when, block_id in enumerate(blocks.reusable)}
    children: Counter[Parent] = Counter()
    for block_id in index:
        block = index[block_id]
        children[block.parent] += 1
        _require(len(block.token_ids) == BLOCK_SIZE, f"published block {block_id} is not full")
        _require(block_id in index.children(block.parent), f"block {block_id} is lost to its parent")
        _require(index.with_hash(block.block_hash) == block_id, f"block {block_id} is lost to its hash")
        if isinstance(block.parent, int):
            _require(block.parent in index, f"block {block_id} is published and its parent is not")
            if block.parent in leaves_at:
                _require(
                    leaves_at.get(block_id, len(leaves_at)) < leaves_at[block.parent],
                    f"block {block.parent} would be evicted before block {block_id}, which continues it",
                )
    for parent, num_children in children.items():
        _require(
            len(index.children(parent)) == num_children, f"{parent!r} has children that are not published"
        )


def _check_table(table: BlockTable, blocks: BlockPool) -> None:
    """A table has a block for each full one of its tokens, and its content is what is published."""
    num_sealed = table.num_tokens // BLOCK_SIZE
    num_full = (table.num_tokens + table.num_pending) // BLOCK_SIZE
    _require(len(table.block_ids) == num_full, f"a table of {num_full} full blocks has {table.block_ids}")
    _require(len(set(table.block_ids)) == num_full, f"a table has a block twice: {table.block_ids}")
    _require(
        table.slot is not None or table.num_tokens % BLOCK_SIZE == 0,
        f"a table of {table.num_tokens} tokens has no slot for its last ones",
    )
    for block, block_id in enumerate(table.block_ids):
        if block >= num_sealed:
            _require(block_id not in blocks.index, f"block {block_id} was published before it was computed")
        elif table.publishes or block_id in blocks.index:
            _require(
                blocks.index.holds(block_id, table.parent(block), table.block_token_ids(block)),
                f"block {block_id} is not published with the tokens that its table has",
            )


def _check_slots(tables: list[BlockTable], slots: OpenSlots) -> None:
    """Each slot is free or held, and its holders' rows are written and agree."""
    holders = Counter(table.slot for table in tables if table.slot is not None)
    holders.update(slots.tails)
    _check_holders("slot", slots.ids, holders)
    _require(
        slots.ids.allocated_ids() == sorted(holders)
        and len(slots.ids.free_ids()) == len(set(slots.ids.free_ids())),
        "the free slots are not those that nobody holds",
    )
    rows: dict[int, tuple[Parent, tuple[int, ...]]] = {
        slot: (slots.tails[slot].parent, slots.tails[slot].token_ids) for slot in slots.tails
    }
    for table in tables:
        if table.slot is None or table.num_pending:
            continue
        block = table.last_block_start // BLOCK_SIZE
        parent, ids = table.parent(block), table.block_token_ids(block)
        _require(
            1 <= len(ids) <= slots.filled(table.slot), f"slot {table.slot} has not the rows of its table"
        )
        other_parent, other_ids = rows.setdefault(table.slot, (parent, ids))
        _require(
            parent == other_parent and common_prefix(ids, other_ids) == min(len(ids), len(other_ids)),
            f"the holders of slot {table.slot} do not agree on its rows",
        )
        rows[table.slot] = (parent, max(ids, other_ids, key=len))


def _check_tails(blocks: BlockPool, slots: OpenSlots) -> None:
    """Tails can be found, and none is the beginning of another."""
    tails = slots.tails
    _require(len(tails) <= slots.max_tails, f"{len(tails)} tails are kept and {slots.max_tails} allowed")
    _require(len(list(tails)) == len(tails), "the tails in use order are not the tails that are kept")
    for slot in tails:
        tail = tails[slot]
        _require(
            1 <= len(tail.token_ids) <= min(BLOCK_SIZE, slots.filled(slot)),
            f"the tail in slot {slot} has {len(tail.token_ids)} tokens and {slots.filled(slot)} rows",
        )
        _require(
            tail.parent in blocks.index if isinstance(tail.parent, int) else tail.parent == tail.namespace,
            f"the tail in slot {slot} continues a block that is not published",
        )
        siblings = tails.continuing(tail.parent)
        _require(slot in siblings, f"the tail in slot {slot} is lost to its parent")
        for other in siblings:
            _require(
                other == slot or tails[other].token_ids[: len(tail.token_ids)] != tail.token_ids,
                f"the tail in slot {slot} is the beginning of the one in slot {other}",
            )
