"""Who computes what in the next step: decodes first, then prefills in chunks, then who waits.

First come, first served. When memory runs short the youngest running sequence gives its place up; what it
had computed stays reusable until it is evicted.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from octavo.engine.runner import Chunk
from octavo.engine.sequence import Sequence
from octavo.engine.tiers import Tiers
from octavo.kv.manager import KVCacheManager
from octavo.kv.table import PrefixMatch
from octavo.spec import BLOCK_SIZE


@dataclass(slots=True)
class Scheduled:
    """A sequence and the chunk of it that the step computes."""

    sequence: Sequence
    chunk: Chunk


class Scheduler:
    """Queues of sequences over one cache.

    Args:
        max_running: sequences that hold a place in the cache at once.
        max_step_tokens: tokens of one step.
    """

    def __init__(
        self, manager: KVCacheManager, tiers: Tiers, *, max_running: int, max_step_tokens: int
    ) -> None:
        self._manager = manager
        self._tiers = tiers
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Scheduled]:
        """The next step's chunks; sequences move between waiting and running as room allows.

        Empty with sequences left means that those that run wait for a lower tier, or else that the oldest one
        cannot go on even with the cache to itself.
        """
        budget = self._max_step_tokens
        scheduled: list[Scheduled] = []
        by_phase = sorted(self.running, key=lambda sequence: sequence.num_remaining_tokens > 1)
        for sequence in by_phase:
            if budget == 0:
                break
            if sequence not in self.running or sequence.waits_for_tier:
                continue  # preempted for an older one just now, or it has no bytes to go on with
            chunk = self._chunk(sequence, budget)
            while chunk is None and self._preempt(sequence, {s.sequence for s in scheduled}):
                chunk = self._chunk(sequence, budget)
            if chunk is not None:
                scheduled.append(Scheduled(sequence, chunk))
                budget -= len(chunk.token_ids)
        while self.waiting and budget and self._places + self.waiting[0].num_places <= self._max_running:
            sequence = self.waiting[0]
            chunk = self._admit(sequence, budget)
            if chunk is None and not sequence.waits_for_tier:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            if sequence.state.started_s is None:
                sequence.state.started_s = time.perf_counter()
            if chunk is not None:
                scheduled.append(Scheduled(sequence, chunk))
                budget -= len(chunk.token_ids)
        return scheduled

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence out of every queue and gives its blocks back, what is reusable kept."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.forget_blocks(sequence)

    def forget_blocks(self, sequence: Sequence) -> None:
        """Gives a sequence's blocks back; its last block stays as a raw tail, unless a step of it has failed."""
        self._tiers.cancel(sequence)
        table = sequence.table
        if table is not None:
            if table.num_tokens and not table.num_pending:
                self._manager.keep_tail(table)
            self._manager.free(table)
            sequence.table = None

    @property
    def _places(self) -> int:
        return sum(sequence.num_places for sequence in self.running)

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk | None:
        """Room for the sequence's next tokens, or None when there is none."""
        if sequence.table is None:
            self._start(sequence)
        table = sequence.table
        assert table is not None
        if sequence.waits_for_tier:
            return None
        count = min(budget, sequence.num_remaining_tokens)
        plan = self._manager.allocate(table, count)
        if plan is None:
            return None
        return Chunk(sequence.token_ids[table.num_tokens : table.num_tokens + count], table, plan)

    def _admit(self, sequence: Sequence, budget: int) -> Chunk | None:
        chunk = self._chunk(sequence, budget)
        if chunk is None and sequence.table is not None and not sequence.waits_for_tier:
            self._manager.free(sequence.table)
            sequence.table = None
        return chunk

    def _start(self, sequence: Sequence) -> None:
        """Gives the sequence a table with all that the cache has of it; the rest may come from a lower tier."""
        state = sequence.state
        caches = state.request.cache
        looks = caches and state.is_scored  # what is scored is computed, and can be reused by the next
        ids = sequence.token_ids if looks else []
        match = self._manager.match_prefix(ids, namespace=state.namespace)
        if state.started_s is None:
            state.num_cached_tokens = match.num_tokens
            state.miss = self._manager.explain(match, ids) if looks else None
        sequence.table = self._manager.start(match, ids, publish=caches and not state.request.ephemeral)
        if looks:
            self._tiers.begin(sequence, self._loaded)

    def _loaded(self, sequence: Sequence) -> None:
        """A lower tier has given what it had."""
        state, table = sequence.state, sequence.table
        assert table is not None
        if not state.num_computed_tokens and table.num_tokens > state.num_cached_tokens:
            state.num_cached_tokens = table.num_tokens
            num_blocks, num_rows = divmod(table.num_tokens, BLOCK_SIZE)
            match = PrefixMatch(
                table.namespace,
                tuple(table.block_ids[:num_blocks]),
                table.slot if num_rows else None,
                num_rows,
            )
            if table.publishes:
                state.miss = self._manager.explain(match, sequence.token_ids)

    def _preempt(self, needy: Sequence, scheduled: set[Sequence]) -> bool:
        """Takes the place of the youngest running sequence; False when that helps nobody."""
        victims = [sequence for sequence in self.running if sequence not in scheduled]
        if not victims or len(self.running) == 1:
            return False
        victim = victims[-1]
        self.running.remove(victim)
        self.forget_blocks(victim)
        self.waiting.appendleft(victim)
        return victim is not needy
