"""The cache's one door: which blocks and slots a sequence has, shares, gives back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from octavo.kv.block_pool import BlockPool
from octavo.kv.eviction import LRU, EvictionPolicy
from octavo.kv.explain import Departed, Miss, MissCause, explain
from octavo.kv.hashing import FORGOTTEN, BlockHash, Kind, Name, block_hash
from octavo.kv.integrity import check_integrity
from octavo.kv.prefix import Parent, PrefixIndex, PublishedBlock
from octavo.kv.slots import OpenSlots
from octavo.kv.table import BlockTable, PrefixMatch, StepPlan
from octavo.kv.tails import Tail
from octavo.kv.value import ByValue
from octavo.kv.view import CacheView, view_of
from octavo.spec import BLOCK_SIZE


class KVCacheManager:
    """Bookkeeping of the cache: token ids in, block and slot ids out. It moves no bytes.

    A sequence's life is `match_prefix`, `start`, then for each step `allocate`, the engine's own work, and
    `commit`; at the end `free`. If the step fails, `free` alone gives back what it was to fill.

    A sealed block is free, held by sequences, or *reusable*: published, held by nobody, and evicted when
    room is needed. Sequences let go of their deepest block first, so a block always becomes reusable, and
    is evicted, before the one it continues.

    Args:
        num_blocks: sealed blocks that the budget allows, ids 0..num_blocks-1.
        num_slots: open slots, ids 0..num_slots-1; as many as sequences may run at the same time are enough.
        max_tails: raw tails kept at most; they live in slots that no sequence needs.
        policy: makes the order in which reusable blocks are evicted; least recently used first by default.
        hash_function: names blocks; tests replace it.
        on_evict: called with a reusable block just before its room is taken; its bytes are still there.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_slots: int,
        max_tails: int,
        policy: Callable[[PrefixIndex], EvictionPolicy] = lambda _: LRU(),
        hash_function: BlockHash = block_hash,
        on_evict: Callable[[int], None] = lambda _: None,
    ) -> None:
        if num_blocks < 1 or num_slots < 1 or max_tails < 0:
            raise ValueError(
                f"The cache needs at least one block and one slot, and tails cannot be negative; "
                f"got num_blocks={num_blocks}, num_slots={num_slots}, max_tails={max_tails}."
            )
        self._hash = hash_function
        self._index = PrefixIndex(hash_function)
        self._blocks = BlockPool(num_blocks, self._index, policy(self._index), self._on_evict)
        self._slots = OpenSlots(num_slots, max_tails, self._on_drop_tail)
        self._departed = Departed(hash_function)
        self._demote = on_evict
        self._tables: set[BlockTable] = set()
        self.num_evicted: Counter[bytes] = Counter()
        """Blocks that left for lack of room, by namespace."""

    # Reuse

    def match_prefix(self, token_ids: Sequence[int], *, namespace: bytes) -> PrefixMatch:
        """The longest prefix of a prompt that need not be computed; at least its last token is left.

        Changes nothing: a match that is not started leaves no trace.
        """
        reusable = len(token_ids) - 1
        block_ids: list[int] = []
        parent: Parent = namespace
        start = 0
        while start + BLOCK_SIZE <= reusable:
            block_id = self._index.find(namespace, parent, token_ids[start : start + BLOCK_SIZE])
            if block_id is None:
                break
            block_ids.append(block_id)
            parent = block_id
            start += BLOCK_SIZE
        # Not a whole block: it would have to be sealed, and its pages are not here.
        wanted = token_ids[start : min(start + BLOCK_SIZE - 1, reusable)]
        slot, num_rows = self._slots.tails.longest(parent, wanted)
        return PrefixMatch(namespace, tuple(block_ids), slot, num_rows)

    def explain(self, match: PrefixMatch, token_ids: Sequence[int]) -> Miss | None:
        """Why the prompt's match is not longer; None if only its last token is left to compute.

        Ask before the manager is changed: afterwards the prompt's own blocks would be taken for older ones.
        """
        return explain(match, token_ids, self._index, self._slots.tails, self._departed)

    def start(self, match: PrefixMatch, token_ids: Sequence[int], *, publish: bool = True) -> BlockTable:
        """A table for a new sequence that holds what was matched. It needs no room.

        With `publish` False what the sequence computes is its own and is never matched.

        Raises:
            ValueError: the match is of another prompt, or the manager was changed since.
        """
        table = BlockTable(
            match.namespace,
            list(token_ids[: match.num_tokens]),
            list(match.block_ids),
            match.tail_slot,
            publishes=publish,
        )
        if not self._is_current(match, table):
            raise ValueError(
                f"This match of {match.num_tokens} tokens is out of date or of another prompt. "
                "Call match_prefix again, and start before anything else is changed."
            )
        self._register(table)
        if table.slot is not None:
            self._slots.tails.touch(table.slot)
        return table

    # Steps

    def allocate(self, table: BlockTable, num_tokens: int) -> StepPlan | None:
        """Make room for the next `num_tokens` tokens; reusable blocks and tails are evicted as needed.

        The blocks that the step fills are appended to `table.block_ids`: the engine seals them in the step.
        None if there is no room; then nothing has changed.

        Raises:
            ValueError: `num_tokens` is not positive, or the table is not running or has a step under way.
        """
        self._require_idle(table)
        if num_tokens < 1:
            raise ValueError(f"A step has at least one token, not {num_tokens}.")
        num_full = (table.num_tokens + num_tokens) // BLOCK_SIZE - len(table.block_ids)
        if num_full > self._blocks.num_available:
            return None
        plan = self._slots.plan_step(table.slot, table.num_tokens, num_tokens)
        if plan is None:
            return None
        table.slot = plan.slot
        table.block_ids += [self._blocks.take() for _ in range(num_full)]
        table.num_pending = num_tokens
        return plan

    def commit(self, table: BlockTable, token_ids: Sequence[int]) -> None:
        """The allocated step succeeded with these tokens: publish the blocks that it filled.

        Where an equal block is already published, the table takes that one over and frees its own: the
        bytes are the same. So `block_ids` may change for blocks that this step filled.

        Raises:
            ValueError: these are not as many tokens as were allocated.
        """
        self._require_running(table)
        if len(token_ids) != table.num_pending or not token_ids:
            raise ValueError(
                f"The step was allocated for {table.num_pending} tokens and committed with {len(token_ids)}."
            )
        num_sealed = table.num_tokens // BLOCK_SIZE
        table.token_ids += token_ids
        table.num_pending = 0
        for block in range(num_sealed, len(table.block_ids)):
            if table.publishes:
                block_id = self._blocks.publish(
                    table.block_ids[block], table.namespace, table.parent(block), table.block_token_ids(block)
                )
                if block_id is None:
                    table.publishes = False
                else:
                    table.block_ids[block] = block_id

    def adopt(self, table: BlockTable, num_blocks: int) -> list[int] | None:
        """Make room for the next `num_blocks` blocks, whose pages come from a lower tier, sealed.

        The engine copies the pages into the blocks that are returned, and then commits. The sequence must end
        on a block's end. None if there is no room; then nothing has changed.

        Raises:
            ValueError: as for `allocate`, or the sequence ends inside a block.
        """
        self._require_idle(table)
        if num_blocks < 1 or table.num_tokens % BLOCK_SIZE:
            raise ValueError(
                f"Whole blocks can be adopted behind whole blocks, not {num_blocks} behind {table.num_tokens} tokens."
            )
        if num_blocks > self._blocks.num_available:
            return None
        if table.slot is not None:
            self._slots.release(table.slot)
            table.slot = None
        block_ids = [self._blocks.take() for _ in range(num_blocks)]
        table.block_ids += block_ids
        table.num_pending = num_blocks * BLOCK_SIZE
        return block_ids

    def published(self, block_id: int) -> PublishedBlock | None:
        """What a shareable block holds; None if it is not published."""
        return self._index.get(block_id)

    def block_token_ids(self, block_id: int) -> tuple[int, ...]:
        """The tokens of a published block."""
        return self._index[block_id].token_ids

    def chains(self, parent: Parent, limit: int) -> list[list[int]]:
        """See `PrefixIndex.chains`."""
        return self._index.chains(parent, limit)

    def name(self, kind: Kind, namespace: bytes, parent: Parent, token_ids: Sequence[int]) -> Name:
        """What the tokens behind `parent`, a published block or the namespace, are called in a lower tier."""
        return Name.of(kind, namespace, self._index.chain_hash(parent), token_ids, self._hash)

    def chain_hash(self, parent: Parent) -> bytes:
        """The hash of everything up to and including `parent`: a published block, or a namespace."""
        return self._index.chain_hash(parent)

    # Changes of a sequence

    def keep_tail(self, table: BlockTable) -> None:
        """Keep the raw rows of the last block, so that a prompt that ends here computes one token only."""
        self._require_idle(table)
        if table.slot is not None and table.publishes:
            block = table.last_block_start // BLOCK_SIZE
            tail = Tail(table.namespace, table.parent(block), table.block_token_ids(block))
            self._slots.keep_tail(table.slot, tail)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second sequence with the same tokens. Both go on on their own; what is written is shared."""
        self._require_idle(table)
        copy = replace(table, token_ids=list(table.token_ids), block_ids=list(table.block_ids))
        self._register(copy)
        return copy

    def truncate(self, table: BlockTable, num_tokens: int) -> int:
        """Roll the sequence back to `num_tokens` tokens, or fewer; returns how many are left.

        Inside a sealed block the raw rows are gone, so all of the block's tokens go, except those that a
        raw tail has.

        Raises:
            ValueError: `num_tokens` is not in 0..table.num_tokens, or the table is not running or has a
                step under way.
        """
        self._require_idle(table)
        if not 0 <= num_tokens <= table.num_tokens:
            raise ValueError(f"Cannot truncate {table.num_tokens} tokens to {num_tokens}.")
        if table.slot is None or num_tokens <= table.last_block_start:
            block, num_rows = divmod(num_tokens, BLOCK_SIZE)
            wanted = table.block_token_ids(block)[:num_rows]
            slot, num_rows = self._slots.tails.longest(table.parent(block), wanted)
            num_tokens = block * BLOCK_SIZE + num_rows
            if slot is not None:
                self._slots.ids.share(slot)
                self._slots.tails.touch(slot)
            if table.slot is not None:
                self._slots.release(table.slot)
            table.slot = slot
        num_full = num_tokens // BLOCK_SIZE
        self._blocks.release(table.block_ids[num_full:])
        del table.block_ids[num_full:], table.token_ids[num_tokens:]
        return num_tokens

    def free(self, table: BlockTable) -> None:
        """The sequence has ended, or its step failed. What it published stays until room is needed.

        Raises:
            ValueError: the table was freed before.
        """
        self._require_running(table)
        self._tables.remove(table)
        self._blocks.release(table.block_ids)
        if table.slot is not None:
            self._slots.release(table.slot)

    def forget(self, namespace: bytes) -> None:
        """Forget what could be reused of a namespace.

        Nothing of it computed up to now is ever matched again; its running sequences go on undisturbed, and keep
        what they compute to themselves.
        """
        for tail in self._slots.clear_tails(namespace):
            self._depart(tail, "cleared")
        for block in self._blocks.forget(namespace):
            self._departed.add_block(block.block_hash, "cleared")
        for table in self._tables:
            if table.namespace == namespace:
                table.publishes = False
        self.num_evicted[FORGOTTEN] += self.num_evicted.pop(namespace, 0)

    def forget_blocks(
        self,
        namespace: bytes,
        block_hashes: Collection[bytes],
        token_ids: Sequence[int],
        tables: Collection[BlockTable] = (),
    ) -> list[int]:
        """Forget blocks and the tails behind them, but those that are gone on from; returns their ids.

        Those that are held stay too, unless it is by `tables` alone: these are of what is forgotten, and keep to
        themselves what they have and compute. What a tail has of `token_ids`, the sequence that the blocks are of,
        is forgotten as well.
        """
        own = Counter(block_id for table in tables for block_id in table.block_ids)
        for table in tables:
            table.publishes = False
        found = [id_ for id_ in map(self._index.with_hash, block_hashes) if id_ is not None]
        forgotten = []
        for block_id in sorted(found, key=lambda id_: self._index[id_].depth, reverse=True):
            for slot in self._slots.tails.continuing(block_id):
                self._forget_tail(slot)
            if self._blocks.ids.ref_count(block_id) == own[block_id] and not self._index.children(block_id):
                self._departed.add_block(self._blocks.drop(block_id).block_hash, "cleared")
                forgotten.append(block_id)
        rest = self.match_prefix([*token_ids, 0], namespace=namespace)
        start = BLOCK_SIZE * len(rest.block_ids)
        if rest.tail_slot is not None and self._slots.tails[rest.tail_slot].token_ids == tuple(
            token_ids[start:]
        ):
            self._forget_tail(rest.tail_slot)
        return forgotten

    def _forget_tail(self, slot: int) -> None:
        self._depart(self._slots.forget_tail(slot), "cleared")

    def pin(self, table: BlockTable, max_blocks: int) -> BlockTable:
        """A holder of a sequence's sealed blocks, the first `max_blocks` at most, which keeps them from eviction.

        Let go of it with `free`.
        """
        self._require_idle(table)
        num_blocks = min(table.num_tokens // BLOCK_SIZE, max_blocks)
        pin = BlockTable(
            table.namespace,
            table.token_ids[: num_blocks * BLOCK_SIZE],
            table.block_ids[:num_blocks],
            publishes=table.publishes,
        )
        self._register(pin)
        return pin

    def retain(self, table: BlockTable, priority: int, expires_s: float | None) -> None:
        """Say how much a sequence's published blocks are worth, for a policy that asks; see `ByValue.retain`."""
        if isinstance(self._blocks.reusable, ByValue):
            published = [id_ for id_ in table.block_ids if id_ in self._index]
            self._blocks.reusable.retain(published, priority, expires_s)

    def clear(self) -> None:
        """Forget all that could be reused.

        Nothing computed up to now is ever matched again; running sequences go on undisturbed, and keep
        what they compute to themselves.
        """
        for tail in self._slots.clear_tails():
            self._depart(tail, "cleared")
        for block in self._blocks.clear():
            self._departed.add_block(block.block_hash, "cleared")
        for table in self._tables:
            table.publishes = False

    # Figures, all derived

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self._blocks.ids.num_free

    @property
    def num_reusable_blocks(self) -> int:
        """Published blocks that no sequence holds."""
        return len(self._blocks.reusable)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that running sequences hold."""
        return self._blocks.ids.size - self.num_free_blocks - self.num_reusable_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be taken: those that hold nothing, and those that can be evicted."""
        return self._blocks.num_available

    def num_unheld(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(self._blocks.ids.ref_count(block_id) == 0 for block_id in block_ids)

    def num_held_alone(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks have one holder."""
        return sum(self._blocks.ids.ref_count(block_id) == 1 for block_id in block_ids)

    @property
    def num_tails(self) -> int:
        return len(self._slots.tails)

    @property
    def num_used_slots(self) -> int:
        """Slots that running sequences hold."""
        return len({table.slot for table in self._tables if table.slot is not None})

    @property
    def num_reusable_slots(self) -> int:
        """Slots that only raw tails hold."""
        return self._slots.ids.size - self._slots.ids.num_free - self.num_used_slots

    def allocated_blocks(self) -> list[int]:
        """Ids of the blocks that hold data, or will when the step under way has ended; ascending."""
        return self._blocks.ids.allocated_ids()

    def allocated_slots(self) -> list[int]:
        """Ids of the slots that hold data, or will when the step under way has ended; ascending."""
        return self._slots.ids.allocated_ids()

    def view(self) -> CacheView:
        """What is held at this moment, for somebody who looks on."""
        return view_of(self._blocks, self._slots)

    def check_integrity(self) -> None:
        """Derive everything anew from the running tables. Raises IntegrityError at a contradiction."""
        check_integrity(self._tables, self._blocks, self._slots)

    # Inside

    def _require_running(self, table: BlockTable) -> None:
        if table not in self._tables:
            raise ValueError("This table is not running: it was freed, or belongs to another manager.")

    def _require_idle(self, table: BlockTable) -> None:
        self._require_running(table)
        if table.num_pending:
            raise ValueError(
                f"This table has a step of {table.num_pending} tokens under way. "
                "Commit it, or free the table."
            )

    def _is_current(self, match: PrefixMatch, table: BlockTable) -> bool:
        num_blocks = len(table.block_ids)
        return (
            table.num_tokens == match.num_tokens
            and all(
                self._index.holds(block_id, table.parent(block), table.block_token_ids(block))
                for block, block_id in enumerate(table.block_ids)
            )
            and (
                table.slot is None
                or self._slots.tails.holds(
                    table.slot, table.parent(num_blocks), table.block_token_ids(num_blocks)
                )
            )
        )

    def _register(self, table: BlockTable) -> None:
        """Add a table as one more holder of its blocks and its slot."""
        for block_id in table.block_ids:
            self._blocks.hold(block_id)
        if table.slot is not None:
            self._slots.ids.share(table.slot)
        self._tables.add(table)

    def _on_evict(self, block_id: int) -> None:
        self._demote(block_id)
        for slot in self._slots.tails.continuing(block_id):
            self._slots.drop_tail(slot)  # no match could lead to it any more
        policy, block = self._blocks.reusable, self._index[block_id]
        expired = isinstance(policy, ByValue) and policy.last_had_expired
        self._departed.add_block(block.block_hash, "expired" if expired else "evicted")
        self.num_evicted[block.namespace] += 1

    def _on_drop_tail(self, tail: Tail) -> None:
        self._depart(tail, "below_one_block")

    def _depart(self, tail: Tail, cause: MissCause) -> None:
        self._departed.add_tail(tail, self._index.chain_hash(tail.parent), cause)
