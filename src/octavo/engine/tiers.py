"""Between the cache and the tier below it: what goes down, what comes up, and when. Runs on the engine's thread.

Loading is a step whose result is copied instead of computed: room is taken, the bytes go in, and the blocks are
published. A sequence that waits for bytes has its place among the running ones and computes nothing; it can be
preempted like any other. If they take longer than computing would, it stops waiting.

Saving takes what a step has published to the tier's queue, little by little while there is work and all of it
when there is none, so that what is evicted is mostly saved already.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from octavo.engine.sequence import Sequence
from octavo.engine.shared import SharedPrefixes
from octavo.kv.hashing import FORGOTTEN, Name
from octavo.kv.manager import KVCacheManager
from octavo.kv.prefix import common_prefix
from octavo.kv.storage.arena import OpenArena, SealedArena
from octavo.kv.storage.records import Payload, Record, Space
from octavo.kv.storage.tier import Load, Tier
from octavo.kv.table import BlockTable
from octavo.spec import BLOCK_SIZE, DTYPE_BYTES, LANES, CacheSpec, cdiv

_PER_PREFILL_STEP, _PER_DECODE_STEP = 1, 4
"""Blocks copied for the tier after a step: about 50 us each."""

_MIN_PATIENCE_S = 0.25
_RETRY = 16
"""Every so many prompts a tier that seemed slower than computing is tried again."""


class Running:
    """A running estimate: recent values count more."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else 0.7 * self.value + 0.3 * value


class Tiers:
    """The cache's memory and one tier below it.

    Args:
        shared: what a sequence may take in memory before it asks the tier.
        post: runs a function on the engine's thread; may be called from any thread.
    """

    def __init__(
        self,
        tier: Tier,
        manager: KVCacheManager,
        sealed: SealedArena,
        opened: OpenArena,
        spec: CacheSpec,
        shared: SharedPrefixes,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.tier = tier
        self._shared = shared
        self._manager, self._sealed, self._opened, self._spec = manager, sealed, opened, spec
        self._post = post
        self._unsaved: dict[int, float | None] = {}
        """Published blocks that are not below yet, the oldest first, and when they expire."""
        self._known: set[bytes] = set()  # namespaces that the tier was told of
        self._loading: dict[Sequence, _Waiting] = {}
        self._compute_s, self._load_s = Running(), Running()  # for a token, and for a block
        self._num_shunned = 0
        self.num_restored: Counter[bytes] = Counter()
        """Blocks that came up from the tier, by namespace."""

    # Down

    def introduce(self, space: Space) -> None:
        """A namespace whose blocks may go down; those of others never do."""
        if space.namespace not in self._known:
            self._known.add(space.namespace)
            self.tier.introduce(space)

    def committed(self, table: BlockTable, first_block: int, ttl_s: float | None = None) -> None:
        """A step has published a table's blocks from `first_block` on, to be kept for `ttl_s` at most."""
        if table.namespace in self._known and table.publishes:
            for block_id in table.block_ids[first_block:]:
                self._unsaved.setdefault(block_id, _expiry(ttl_s))

    def evicted(self, block_id: int) -> None:
        """A block's room is about to be taken: last chance to demote it."""
        if block_id in self._unsaved:
            self._wait_for_room()
            self._save(block_id)

    def finished(self, table: BlockTable, ttl_s: float | None = None) -> None:
        """A sequence ends: its open block goes down raw, so that going on is exact and computes new tokens only."""
        num_rows = table.num_tokens % BLOCK_SIZE
        if table.slot is None or not num_rows or table.num_pending or not table.publishes:
            return
        if table.namespace in self._known:
            block = table.num_tokens // BLOCK_SIZE
            ids = table.block_token_ids(block)
            name = self._manager.name("tail", table.namespace, table.parent(block), ids)
            payload = self._blanked(self._opened.read(table.slot), num_rows)
            self.tier.put(Record(name, payload, block * BLOCK_SIZE, _expiry(ttl_s)))

    def save_some(self, *, num_computed: int | None) -> None:
        """Take published blocks down: some after a step that computed so many tokens, all if there was none."""
        limit = len(self._unsaved)
        if num_computed is not None:
            limit = _PER_PREFILL_STEP if num_computed > 2 * BLOCK_SIZE else _PER_DECODE_STEP
        for block_id in list(self._unsaved)[:limit]:
            if not self.tier.has_room():
                break
            self._save(block_id)
        if num_computed is None:
            self.tier.rest()
        else:
            self.tier.give_turn()

    def save_all(self, timeout_s: float) -> bool:
        """Take everything down that is not there yet, and wait for it; False if that took too long."""
        end = time.monotonic() + timeout_s
        while self._unsaved and self.tier.report().state == "on" and time.monotonic() < end:
            self.save_some(num_computed=None)
            if self._unsaved:
                time.sleep(0.005)
        return self.tier.flush(max(0.0, end - time.monotonic())) and not self._unsaved

    def forget(self, namespace: bytes | None = None) -> None:
        """The cache, or a namespace of it, is cleared: what was to be saved of it is not."""
        for block_id in list(self._unsaved):
            block = self._manager.published(block_id)
            if namespace is None or block is None or block.namespace == namespace:
                del self._unsaved[block_id]
        if namespace is not None:
            self.num_restored[FORGOTTEN] += self.num_restored.pop(namespace, 0)

    def discard(self, block_ids: Iterable[int]) -> None:
        """These blocks are forgotten: if they were to be saved, they are not."""
        for block_id in block_ids:
            self._unsaved.pop(block_id, None)

    def _wait_for_room(self) -> None:
        """A queue that is full is waited for, as long as computing a block anew would take."""
        until_s = time.perf_counter() + BLOCK_SIZE * (self._compute_s.value or 0.0)
        while not self.tier.has_room() and time.perf_counter() < until_s and self.tier.report().state == "on":
            time.sleep(0.0005)

    def _save(self, block_id: int) -> None:
        expires_s = self._unsaved.pop(block_id)
        block = self._manager.published(block_id)
        if block is not None:
            parent = self._manager.chain_hash(block.parent)
            name = Name("block", block.namespace, parent, block.block_hash, block.token_ids)
            payload = self._sealed.read(block_id)
            self.tier.put(Record(name, payload, block.depth * BLOCK_SIZE, expires_s))

    def _blanked(self, pages: memoryview, num_rows: int) -> memoryview:
        """Raw pages with zeros behind their rows: what is there is stale, and may be somebody else's."""
        page = self._spec.group.page
        element = np.uint16 if DTYPE_BYTES[self._spec.dtype] == 2 else np.uint32
        heads = np.frombuffer(pages, dtype=element).reshape(
            -1, page.raw_elements_per_token // page.num_kv_heads * BLOCK_SIZE
        )
        num_keys = page.head_dim * BLOCK_SIZE
        heads[:, :num_keys].reshape(-1, page.head_dim, BLOCK_SIZE)[:, :, num_rows:] = 0
        width = cdiv(page.v_head_dim, LANES) * LANES
        heads[:, num_keys:].reshape(-1, BLOCK_SIZE, width)[:, num_rows:] = 0
        return pages

    # Up

    def begin(self, sequence: Sequence, done: Callable[[Sequence], None]) -> bool:
        """Start to load what a sequence, just started from memory, still lacks; True if it has to wait for that.

        `done` is called on the engine's thread when it has more, and when it has all that will come.
        """
        table = sequence.table
        assert table is not None
        if self._shared.give(table, sequence.token_ids):
            done(sequence)
        if not table.publishes:
            return False  # what is loaded is published; and what it continues may not be
        num_missing = len(sequence.token_ids) - 1 - table.num_tokens
        if num_missing < BLOCK_SIZE or table.namespace not in self._known or self._is_slow():
            return False
        num_blocks = table.num_tokens // BLOCK_SIZE
        parent = self._manager.chain_hash(table.parent(num_blocks))
        wanted = tuple(sequence.token_ids[num_blocks * BLOCK_SIZE :])
        load = Load(table.namespace, parent, wanted, self._deliver)
        patience_s = max(_MIN_PATIENCE_S, num_missing * (self._compute_s.value or 1e-3))
        if not self.tier.load(load):
            return False
        self._loading[sequence] = _Waiting(load, done, time.perf_counter() + patience_s)
        sequence.waits_for_tier = True
        return True

    def cancel(self, sequence: Sequence) -> None:
        """The sequence gives its place up, or does not want to wait any longer."""
        waiting = self._loading.pop(sequence, None)
        if waiting is not None:
            waiting.load.cancelled = True
            sequence.waits_for_tier = False

    @property
    def patience_s(self) -> float | None:
        """How long the engine may sleep until a sequence has waited long enough; None if none waits."""
        ends = [waiting.until_s for waiting in self._loading.values()]
        return max(0.0, min(ends) - time.perf_counter()) if ends else None

    def lose_patience(self) -> None:
        """Sequences that have waited for as long as computing takes go on with what they have."""
        now = time.perf_counter()
        for sequence, waiting in list(self._loading.items()):
            if waiting.until_s <= now:
                self._load_s.add(now - waiting.load.started_s)  # for the next block, which did not come
                self._end(sequence, waiting)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in this time."""
        if num_tokens >= BLOCK_SIZE:
            self._compute_s.add(seconds / num_tokens)

    def _is_slow(self) -> bool:
        """Whether computing a block seems quicker than loading it."""
        load_s, compute_s = self._load_s.value, self._compute_s.value
        if load_s is None or compute_s is None or load_s <= compute_s * BLOCK_SIZE:
            return False
        self._num_shunned += 1
        return self._num_shunned % _RETRY != 0

    def _deliver(self, load: Load, batch: list[tuple[Name, Payload]], last: bool) -> None:
        # On the reader's thread: that the engine is busy when it comes is not the tier's fault.
        read_s = time.perf_counter()
        self._post(lambda: self._arrived(load, batch, last, read_s))

    def _arrived(self, load: Load, batch: list[tuple[Name, Payload]], last: bool, read_s: float) -> None:
        found = next((item for item in self._loading.items() if item[1].load is load), None)
        if found is None:
            return
        sequence, waiting = found
        table = sequence.table
        assert table is not None
        if batch:
            self._load_s.add((read_s - waiting.since_s) / len(batch))
            waiting.since_s = read_s
        fits = all(self._take(table, name, payload, sequence) for name, payload in batch)
        if last or not fits:
            self._end(sequence, waiting)

    def _end(self, sequence: Sequence, waiting: _Waiting) -> None:
        self.cancel(sequence)
        sequence.state.elsewhere = waiting.load.elsewhere
        sequence.state.num_expired_tokens = waiting.load.num_expired_tokens
        waiting.done(sequence)

    def _take(self, table: BlockTable, name: Name, payload: Payload, sequence: Sequence) -> bool:
        """Add a loaded block or tail to a table. False if there is no room, or the cache was cleared meanwhile."""
        start = table.num_tokens // BLOCK_SIZE * BLOCK_SIZE
        if not table.publishes:
            return False
        if name.kind == "tail":
            return self._take_tail(table, name, payload, sequence)
        if len(payload) != self._sealed.block_bytes:
            return False
        if table.num_tokens > start:  # rows of a tail in memory, which the block has too
            self._manager.truncate(table, start)
        block_ids = self._manager.adopt(table, 1)
        if block_ids is None:
            return False
        self._sealed.touch(block_ids)
        self._sealed.write(block_ids[0], payload)
        self._manager.commit(table, name.token_ids)
        self.num_restored[table.namespace] += 1
        self._count(sequence, BLOCK_SIZE)
        return True

    def _take_tail(self, table: BlockTable, name: Name, payload: Payload, sequence: Sequence) -> bool:
        start = table.num_tokens // BLOCK_SIZE * BLOCK_SIZE
        wanted = sequence.token_ids[start:-1][: BLOCK_SIZE - 1]
        num_rows = common_prefix(name.token_ids, wanted)
        if num_rows <= table.num_tokens - start:
            return True
        if table.num_tokens > start:
            self._manager.truncate(table, start)
        plan = self._manager.allocate(table, num_rows)
        if plan is None:
            return False
        self._opened.touch([plan.slot])
        self._opened.write(plan.slot, payload)
        self._manager.commit(table, name.token_ids[:num_rows])
        self._count(sequence, num_rows)
        return True

    @staticmethod
    def _count(sequence: Sequence, num_tokens: int) -> None:
        state = sequence.state
        if not state.num_computed_tokens:
            state.num_loaded_tokens += num_tokens
        elif (
            state.again is not None
        ):  # it comes back after a preemption, and this need not be computed once more
            state.again = state.again[0], max(state.again[1] - num_tokens, 0)


class _Waiting:
    """A load that is under way, and until when it is worth waiting for."""

    def __init__(self, load: Load, done: Callable[[Sequence], None], until_s: float) -> None:
        self.load = load
        self.done = done
        self.until_s = until_s
        self.since_s = load.started_s


def _expiry(ttl_s: float | None) -> float | None:
    return None if ttl_s is None else time.time() + ttl_s
