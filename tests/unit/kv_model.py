"""A naive model of the cache and of an engine that uses it: it simulates the bytes.

A row, what a token's keys and values are computed from, is here a number that stands for all tokens up to
and including this one. The simulated engine computes a row from the row before it *as the cache serves
it*, so a wrong byte anywhere makes all later rows wrong.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from octavo.kv import ROOT_HASH, BlockTable, ByValue, KVCacheManager, PrefixMatch, StepPlan, block_hash
from octavo.kv.hashing import sequence_hash
from octavo.spec import BLOCK_SIZE as B

NUM_BLOCKS, NUM_SLOTS, MAX_TAILS = 12, 6, 3
POISON = -1
NAMESPACES = (b"tenant a", b"tenant b")

_rows: dict[tuple[int | bytes, int], int] = {}


def next_row(row: int | bytes, token_id: int) -> int:
    """The row of a token that follows `row`, or begins a sequence of a namespace."""
    return POISON if row == POISON else _rows.setdefault((row, token_id), len(_rows))


def rows_of(namespace: bytes, token_ids: list[int]) -> list[int]:
    return list(_rows_of(namespace, tuple(token_ids)))


@lru_cache(maxsize=10_000)
def _rows_of(namespace: bytes, token_ids: tuple[int, ...]) -> list[int]:
    rows: list[int] = []
    for token_id in token_ids:
        rows.append(next_row(rows[-1] if rows else namespace, token_id))
    return rows


def colliding_hash(namespace: bytes, parent: bytes, token_ids: abc.Sequence[int]) -> bytes:
    """One of eight hashes."""
    return bytes([block_hash(namespace, parent, token_ids)[0] % 8])


@dataclass(eq=False)
class Sequence:
    """What a running sequence should be; `rows` is what it should see."""

    table: BlockTable
    namespace: bytes
    token_ids: list[int]
    private: bool = False

    @property
    def rows(self) -> list[int]:
        return rows_of(self.namespace, self.token_ids)

    @property
    def block_ends(self) -> list[int]:
        """A sealed block is known by its last row."""
        return self.rows[B - 1 :: B]

    def shared(self, ids: dict[int, int]) -> list[int]:
        """The ends of those of its blocks that are published, if at all: one of its own may have an equal one."""
        ends = zip(self.block_ends, self.table.block_ids, strict=False)
        return [end for end, block_id in ends if ids.get(end) == block_id]


class Model:
    """A cache and an engine: the bytes of blocks and slots, and what the cache should find.

    `reusable` holds the last row of each published block and when it was last released. It is exact only
    if hashes do not collide.
    """

    def __init__(self, *, collide: bool = False, num_slots: int = NUM_SLOTS, by_value: bool = False) -> None:
        self.exact = not collide
        self.by_value = by_value
        self.kv = KVCacheManager(
            num_blocks=NUM_BLOCKS,
            num_slots=num_slots,
            max_tails=MAX_TAILS,
            hash_function=colliding_hash if collide else block_hash,
            **({"policy": ByValue} if by_value else {}),
        )
        self.ids: dict[int, int] = {}  # of published blocks, by their last row
        self.parents: dict[int, int] = {}  # the block before a block, by their last rows
        self.namespaces: dict[int, bytes] = {}  # of published blocks, by their last row
        self.num_slots = num_slots
        self.blocks = [[POISON] * B for _ in range(NUM_BLOCKS)]
        self.slots = [[POISON] * B for _ in range(num_slots)]
        self.running: list[Sequence] = []
        self.seen: list[tuple[bytes, list[int]]] = []
        self.published: dict[int, int] = {}
        self.clock = 0

    # What the cache should know

    def held(self) -> set[int]:
        return {end for seq in self.running for end in seq.shared(self.ids)}

    def released(self, ends: list[int]) -> None:
        for end in reversed(ends):
            if end in self.published and end not in self.held():
                self.clock += 1
                self.published[end] = self.clock

    def expected_blocks(self, namespace: bytes, token_ids: list[int]) -> int:
        num_blocks = 0
        for end in rows_of(namespace, token_ids[:-1])[B - 1 :: B]:
            if end not in self.published:
                break
            num_blocks += 1
        return num_blocks

    def victims(self, num_blocks: int) -> list[int]:
        """The published blocks that must go to make room: no more than needed, longest unused first."""
        if self.by_value:  # any that nobody holds may have gone, as many as were needed
            return [end for end in self.published if self.kv.published(self.ids[end]) is None]
        reusable = sorted(self.published.keys() - self.held(), key=self.published.__getitem__)
        used = {block_id for seq in self.running for block_id in seq.table.block_ids}
        return reusable[: max(0, num_blocks - (NUM_BLOCKS - len(used) - len(reusable)))]

    # Operations

    def match(self, namespace: bytes, token_ids: list[int]) -> PrefixMatch:
        """Whatever is matched must be right, and must be all that is there."""
        match = self.kv.match_prefix(token_ids, namespace=namespace)
        served = [row for block_id in match.block_ids for row in self.blocks[block_id]]
        if match.tail_slot is not None:
            served += self.slots[match.tail_slot][: match.num_tail_rows]
        assert match.num_tokens <= max(0, len(token_ids) - 1)
        assert served == rows_of(namespace, token_ids)[: match.num_tokens]
        if self.exact:
            assert len(match.block_ids) == self.expected_blocks(namespace, token_ids)
        miss = self.kv.explain(match, token_ids)
        assert (miss is None) == (match.num_tokens >= len(token_ids) - 1)
        if miss is not None:
            assert miss.position == match.num_tokens
            assert 0 <= miss.num_known_tokens <= len(token_ids) - 1 - miss.position
            assert miss.cause != "new" or miss.num_known_tokens == 0
        return match

    def start(self, namespace: bytes, prompt: list[int]) -> Sequence:
        match = self.match(namespace, prompt)
        seq = Sequence(self.kv.start(match, prompt), namespace, prompt[: match.num_tokens])
        self.running.append(seq)
        return seq

    def step(self, batch: list[tuple[Sequence, list[int], bool]]) -> None:
        """One step of an engine: (sequence, its next tokens, whether it fails) for each in the batch."""
        planned = []
        for seq, token_ids, fails in batch:
            before = self.observable(seq.table)
            num_full = (len(seq.token_ids) + len(token_ids)) // B - len(seq.token_ids) // B
            available = self.kv.num_free_blocks + self.kv.num_reusable_blocks
            victims = self.victims(num_full)
            reusable = self.published.keys() - self.held()
            num_free = self.kv.num_free_blocks
            plan = self.kv.allocate(seq.table, len(token_ids))
            if self.by_value and plan is not None:
                victims = self.victims(num_full)
                assert set(victims) <= reusable
                assert len(victims) == max(0, num_full - num_free)
            if plan is None:
                assert num_full > available or len(self.running) > self.num_slots
                assert self.observable(seq.table) == before
                continue
            planned.append((seq, token_ids, fails, plan))
            for end in victims:
                del self.published[end]
        for seq, _, _, plan in planned:
            if plan.copy_from is not None:
                num_rows = len(seq.token_ids) % B
                copied = self.slots[plan.copy_from][:num_rows]
                self.slots[plan.slot] = copied + [POISON] * (B - num_rows)
        self.check_no_conflict([(seq, len(token_ids), plan) for seq, token_ids, _, plan in planned])
        for seq, token_ids, fails, plan in reversed(planned):
            self.compute(seq, token_ids, plan, fails)
        for seq, token_ids, fails, _ in planned:
            if fails:
                self.free(seq)
            else:
                self.kv.commit(seq.table, token_ids)
                seq.token_ids += token_ids
                if not seq.private:
                    for end, block_id in zip(seq.block_ends, seq.table.block_ids, strict=True):
                        self.published.setdefault(end, 0)
                        self.ids[end], self.namespaces[end] = block_id, seq.namespace
                    self.parents.update((end, before) for before, end in pairwise(seq.block_ends))

    def compute(self, seq: Sequence, token_ids: list[int], plan: StepPlan, fails: bool) -> None:
        """Append rows to the open block, seal it when it is full, leave the last block in the slot."""
        num_rows = len(seq.token_ids) % B
        block = len(seq.token_ids) // B
        rows = self.slots[plan.slot][:num_rows]
        row: int | bytes = rows[-1] if rows else seq.namespace
        if not rows and block:
            row = self.blocks[seq.table.block_ids[block - 1]][-1]
        for token_id in token_ids:
            if len(rows) == B:
                rows, num_rows = [], 0
            row = POISON if fails else next_row(row, token_id)
            rows.append(row)
            if len(rows) == B:
                self.blocks[seq.table.block_ids[block]] = list(rows)
                block += 1
        rest = self.slots[plan.slot][len(rows) :] if num_rows else [POISON] * (B - len(rows))
        self.slots[plan.slot] = rows + rest

    @staticmethod
    def check_no_conflict(batch: list[tuple[Sequence, int, StepPlan]]) -> None:
        """No sequence of a step writes rows that another one reads or writes in the same step."""
        reads, writes = [], []
        for seq, num_tokens, plan in batch:
            num_rows = len(seq.token_ids) % B
            end = num_rows + num_tokens
            reads.append({(plan.slot, row) for row in range(num_rows)})
            written = range(num_rows, end) if end <= B else range(B)
            writes.append({(plan.slot, row) for row in written})
        for a, written in enumerate(writes):
            for b in range(len(batch)):
                assert a == b or not written & (reads[b] | writes[b])

    def fork(self, seq: Sequence) -> None:
        table = self.kv.fork(seq.table)
        self.running.append(Sequence(table, seq.namespace, list(seq.token_ids), seq.private))

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        self.seen.append((seq.namespace, list(seq.token_ids)))
        ends, raw_from = seq.shared(self.ids), seq.table.last_block_start
        had_slot = seq.table.slot is not None
        left = self.kv.truncate(seq.table, num_tokens)
        assert num_tokens // B * B <= left <= num_tokens
        if had_slot and num_tokens > raw_from:
            assert left == num_tokens
        del seq.token_ids[left:]
        self.released([end for end in ends if end not in seq.block_ends])

    def keep_tail(self, seq: Sequence) -> None:
        self.kv.keep_tail(seq.table)
        if seq.table.slot is not None and not seq.private and self.exact:
            assert self.match(seq.namespace, seq.token_ids).num_tokens == len(seq.token_ids) - 1
            assert self.match(seq.namespace, [*seq.token_ids, 0]).num_tokens == len(seq.token_ids)

    def free(self, seq: Sequence) -> None:
        self.seen.append((seq.namespace, list(seq.token_ids)))
        ends = seq.shared(self.ids)
        self.kv.free(seq.table)
        self.running.remove(seq)
        self.released(ends)

    def forget_blocks(self, namespace: bytes, token_ids: list[int], first: int, own: list[Sequence]) -> None:
        """Forget a sequence's blocks from number `first` on: those go that `own` alone hold and none goes on from."""
        for seq in own:
            seq.private = True
        held = {end for seq in self.running if seq not in own for end in seq.shared(self.ids)}
        ends = rows_of(namespace, token_ids)[B - 1 :: B]
        gone = []
        for end in reversed(ends[first:]):
            goes_on = any(self.parents.get(other) == end for other in self.published)
            if end in self.published and end not in held and not goes_on:
                gone.append(self.ids[end])
                del self.published[end]
        hashes, parent = [], ROOT_HASH
        for start in range(0, len(ends) * B, B):
            parent = block_hash(namespace, parent, token_ids[start : start + B])
            hashes.append(parent)
        tables = [seq.table for seq in own]
        forgotten = self.kv.forget_blocks(namespace, hashes[first:], token_ids, tables)
        assert len(forgotten) == len(gone)
        assert sequence_hash(namespace, token_ids[: len(ends) * B]) == parent

    def forget(self, namespace: bytes) -> None:
        self.kv.forget(namespace)
        for end in self.published.keys() & self.ends_of(namespace):
            del self.published[end]
        for seq in self.running:
            seq.private = seq.private or seq.namespace == namespace
        for other, token_ids in self.seen:
            assert other != namespace or self.match(other, token_ids).num_tokens == 0

    def ends_of(self, namespace: bytes) -> set[int]:
        """All blocks of a namespace that ever were."""
        return {end for end, of in self.namespaces.items() if of == namespace}

    def clear(self) -> None:
        self.kv.clear()
        self.published.clear()
        for seq in self.running:
            seq.private = True
        assert self.kv.num_tails == self.kv.num_reusable_blocks == self.kv.num_reusable_slots == 0
        for namespace, token_ids in self.seen:
            assert self.match(namespace, token_ids).num_tokens == 0

    # Checks

    def observable(self, table: BlockTable) -> object:
        kv = self.kv
        state = (table.slot, list(table.block_ids), table.num_tokens, table.num_pending)
        return state, kv.num_free_blocks, kv.num_reusable_blocks, kv.num_tails, kv.allocated_slots()

    def check(self) -> None:
        """Overwrite what is free, then look at everything through the tables and through matches."""
        self.kv.check_integrity()
        for block_id in set(range(NUM_BLOCKS)).difference(self.kv.allocated_blocks()):
            self.blocks[block_id] = [POISON] * B
        for slot in set(range(self.num_slots)).difference(self.kv.allocated_slots()):
            self.slots[slot] = [POISON] * B
        for seq in self.running:
            table, rows = seq.table, seq.rows
            assert table.token_ids == seq.token_ids
            assert [row for id_ in table.block_ids for row in self.blocks[id_]] == rows[: len(rows) // B * B]
            if table.slot is not None:
                open_rows = rows[table.last_block_start :]
                assert self.slots[table.slot][: len(open_rows)] == open_rows
            self.match(seq.namespace, [*seq.token_ids, 0])
        for namespace, token_ids in self.seen[-20:]:
            self.match(namespace, token_ids)
