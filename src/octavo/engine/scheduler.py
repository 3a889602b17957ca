"""Who computes what in the next step: decodes first, then prompts in chunks, then who waits.

A waiting sequence is taken in when the blocks are there that it, and all prompts that are half read, still need,
and one more for each sequence that runs. So prompts do not wait for each other's blocks. When answers have grown
and memory is short all the same, somebody gives the place up: never the first in rank, so that one always
goes on; else who is least urgent, then who has least to compute again. What it had computed stays reusable until
it is evicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from octavo.engine.edits import Edits
from octavo.engine.pace import Pace
from octavo.engine.runner import Chunk
from octavo.engine.sequence import Sequence
from octavo.engine.tiers import Tiers
from octavo.engine.waiting import WaitingQueue
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
        draft: guesses for a sequence that decodes: at most so many, in a step of so many sequences.
        edits: what requests may take over from behind an edit.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        tiers: Tiers,
        *,
        max_running: int,
        max_step_tokens: int,
        draft: Callable[[Sequence, int, int], list[int]],
        edits: Edits,
    ) -> None:
        self._manager = manager
        self._tiers = tiers
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._draft = draft
        self._edits = edits
        self._pace = Pace(max_step_tokens)
        self._is_paced = False  # prompts are read beside decodes
        self._suspects: list[Sequence] = []
        self._crowded: tuple[int, ...] | None = None  # how things stood when nobody could be taken in
        self.waiting = WaitingQueue(manager)
        self.running: list[Sequence] = []
        self.num_preempted = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """A new sequence: it waits for a place."""
        self.waiting.add(sequence, self.running)

    def add_forks(self, forks: Iterable[Sequence]) -> None:
        """Sequences that were forked from one that had kept places for them."""
        for fork in forks:
            if fork.table is None:
                self.waiting.add(fork, self.running)
            else:
                self.running.append(fork)

    def schedule(self) -> list[Scheduled]:
        """The next step's chunks; sequences move between waiting and running as room allows.

        Empty with sequences left means that those that run wait for a lower tier, or else that the only one
        that runs cannot go on even with the cache to itself.
        """
        while (suspect := next((s for s in self._suspects if not s.waits_for_tier), None)) is not None:
            if scheduled := self._alone(suspect):
                return scheduled
            if not suspect.waits_for_tier:
                break  # not even the cache to itself is enough for it
        self._make_way()
        num_decodes = sum(sequence.num_remaining_tokens == 1 for sequence in self._active)
        self._is_paced = num_decodes > 0
        num_prompts = len(self._active) - num_decodes
        num_prompts += min(len(self.waiting), max(0, self._max_running - self._places))
        scheduled = self._go_on(self._pace.allowed(num_decodes, num_prompts))
        while not scheduled:
            before = list(self.running)
            scheduled = self._go_on(self._max_step_tokens)
            if self.running == before:
                break
        if not scheduled and self._tiers.patience_s is None:
            while parked := [sequence for sequence in self.running if sequence.parked]:
                self._give_up(self._cheapest(parked))  # they hold what those need that they wait for
                if scheduled := self._go_on(self._max_step_tokens):
                    break
        return scheduled

    def computed(self, scheduled: SequenceOf[Scheduled], seconds: float) -> int:
        """The step is done, in this time; returns how many of its sequences decoded."""
        num_decodes = sum(len(item.chunk.token_ids) - item.chunk.num_drafted == 1 for item in scheduled)
        num_tokens = sum(len(item.chunk.token_ids) for item in scheduled)
        if not any(item.chunk.num_drafted for item in scheduled):
            self._pace.computed(num_decodes, num_tokens - num_decodes, seconds)
        for item in scheduled:
            self.waiting.computed(item.sequence, len(item.chunk.token_ids))
        return num_decodes

    def suspect(self, scheduled: SequenceOf[Scheduled]) -> None:
        """The step failed: each of its sequences starts again from what is published, alone until it has caught up.

        Rows of a step that failed half-way may be gone, so nothing of it is used.
        """
        for item in scheduled:
            self._give_up(item.sequence)
            if not item.sequence.suspect:
                item.sequence.suspect = True
                self._suspects.append(item.sequence)

    def clear_suspicion(self, sequence: Sequence) -> None:
        """It has computed alone all that it had to."""
        if sequence.suspect:
            sequence.suspect = False
            self._suspects.remove(sequence)

    def release(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        """Takes a sequence out of every queue and gives its blocks back, what is reusable kept."""
        self.clear_suspicion(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.forget_blocks(sequence, keep_tail=keep_tail)

    def forget_blocks(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        """Gives a sequence's blocks back; its last block stays as a raw tail, unless a step of it has failed."""
        self._tiers.cancel(sequence)
        self._end_edit(sequence)
        table = sequence.table
        if table is not None:
            if keep_tail and table.num_tokens and not table.num_pending:
                self._manager.keep_tail(table)
            self._manager.free(table)
            sequence.table = None

    # A step

    @property
    def _active(self) -> list[Sequence]:
        """Those that run and can go on."""
        return [sequence for sequence in self.running if not sequence.parked and not sequence.waits_for_tier]

    def _go_on(self, to_read: int) -> list[Scheduled]:
        """Chunks of those that run and of those that can be taken in, with `to_read` tokens of prompts at most."""
        first = min(self.running, key=lambda sequence: sequence.rank, default=None)
        active = self._active
        budget = self._max_step_tokens
        scheduled: list[Scheduled] = []
        chosen: set[Sequence] = set()
        # The first in rank takes its blocks before the others, also for a prompt.
        for sequence in sorted(active, key=lambda s: (s.num_remaining_tokens > 1 and s is not first, s.rank)):
            reads = sequence.num_remaining_tokens > 1
            count = min(to_read, budget, sequence.num_remaining_tokens) if reads else min(budget, 1)
            if not count or sequence not in self.running:
                continue  # no tokens left in this step, or it was preempted just now
            spare = 0 if reads else budget - len(active)  # for drafts, after one token for everybody
            chunk = self._chunk(sequence, count, spare)
            while chunk is None and self._preempt(sequence, chosen, first):
                chunk = self._chunk(sequence, count, spare)
            if chunk is not None:
                scheduled.append(Scheduled(sequence, chunk))
                chosen.add(sequence)
                budget -= len(chunk.token_ids)
                to_read -= len(chunk.token_ids) if reads else 0
        return scheduled + self._take_in(min(to_read, budget))

    def _take_in(self, to_read: int) -> list[Scheduled]:
        """Gives places to those that wait, in their order, as long as there is room."""
        scheduled: list[Scheduled] = []
        while self.waiting and to_read and self._places < self._max_running:
            state = self._manager.num_available_blocks, len(self.running), len(self.waiting)
            if state == self._crowded and self.running:
                break  # nothing has changed since nobody could be taken in
            sequence = self.waiting.next(self.running)
            if sequence is None or not self._has_place(sequence):
                break
            match = self._match(sequence)
            if not self._has_room(sequence, match):
                self._crowded = state
                break
            chunk = self._admit(sequence, match, to_read)
            if chunk is not None:
                scheduled.append(Scheduled(sequence, chunk))
                to_read -= len(chunk.token_ids)
        return scheduled

    def _alone(self, sequence: Sequence) -> list[Scheduled]:
        """A step for one sequence, whoever has to give way; empty if even that is not enough."""
        if sequence in self.waiting:
            chunk = self._admit(sequence, self._match(sequence), self._max_step_tokens)
        else:
            chunk = self._chunk(sequence, min(self._max_step_tokens, sequence.num_remaining_tokens))
        while chunk is None and not sequence.waits_for_tier and self._preempt(sequence, {sequence}, None):
            chunk = self._chunk(sequence, min(self._max_step_tokens, sequence.num_remaining_tokens))
        return [] if chunk is None else [Scheduled(sequence, chunk)]

    def _chunk(self, sequence: Sequence, count: int, spare: int = 0) -> Chunk | None:
        """Room for the sequence's next `count` tokens, or fewer, and `spare` drafted ones; None when there is none."""
        if sequence.table is None:
            self._start(sequence, self._match(sequence))
        table = sequence.table
        assert table is not None
        if sequence.waits_for_tier:
            return None
        if sequence.edit is not None:
            before = table.num_tokens
            count = self._edits.advance(sequence.edit, table, sequence.token_ids, count)
            sequence.state.num_approximate_tokens += table.num_tokens - before
            if not sequence.edit.splices:
                self._end_edit(sequence)
            if not count:
                return None
        if self._is_paced and count < sequence.num_remaining_tokens:
            beyond = (table.num_tokens + count) % BLOCK_SIZE
            count -= beyond if beyond < count else 0
        count = min(count, sequence.num_remaining_tokens)
        drafted = self._draft(sequence, spare, len(self.running)) if spare > 0 else []
        plan = self._manager.allocate(table, count + len(drafted))
        if plan is None:
            return None
        known = sequence.token_ids[table.num_tokens : table.num_tokens + count]
        return Chunk([*known, *drafted], table, plan, num_drafted=len(drafted))

    # Who is taken in

    @property
    def _places(self) -> int:
        return sum(sequence.num_places for sequence in self.running)

    def _has_place(self, sequence: Sequence) -> bool:
        return self._places + sequence.num_places <= self._max_running

    def _has_room(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether there are blocks for all of it, for what half-read prompts lack, and one for each that runs."""
        lacking = sum(_num_lacking(other, len(other.held_block_ids)) for other in self.running)
        spare = len(self.running) + 1 if self.running else 0
        matched = self._manager.num_unheld(match.block_ids)  # available now, and not when it has started
        needed = _num_lacking(sequence, len(match.block_ids)) + matched + lacking + spare
        return needed <= self._manager.num_available_blocks

    def _admit(self, sequence: Sequence, match: PrefixMatch, count: int) -> Chunk | None:
        self.waiting.admitted(sequence)
        self.running.append(sequence)
        self._start(sequence, match)
        if sequence.state.started_s is None:
            sequence.state.started_s = time.perf_counter()
        return self._chunk(sequence, count)

    def _match(self, sequence: Sequence) -> PrefixMatch:
        state = sequence.state
        ids = sequence.token_ids if state.looks_up else []
        return self._manager.match_prefix(ids, namespace=state.namespace)

    def _start(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Gives the sequence a table with all that the cache has of it; the rest may come from a lower tier."""
        state = sequence.state
        caches, looks = state.request.cache, state.looks_up
        ids = sequence.token_ids if looks else []
        if state.started_s is None:
            state.num_cached_tokens = match.num_tokens
            state.miss = self._manager.explain(match, ids) if looks else None
        elif sequence.num_given_up > match.num_tokens:
            state.again = state.again or (match.num_tokens, 0)
            state.again = state.again[0], state.again[1] + sequence.num_given_up - match.num_tokens
        sequence.num_given_up = 0
        exact = state.request.reuse == "exact"
        dropped = state.lineage is not None and state.lineage.is_dropped
        publish = caches and exact and not (state.request.ephemeral or dropped)
        sequence.table = self._manager.start(match, ids, publish=publish)
        if looks and exact:
            self._tiers.begin(sequence, self._loaded)
        elif looks:
            sequence.edit = self._edits.plan(sequence.table, ids)

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

    # Who gives way

    def _make_way(self) -> None:
        """If who is next is more urgent than some that run, and finds no room, these give their places up."""
        if not self.waiting or not self.running:
            return
        least = min(sequence.state.urgency for sequence in self.running)
        if max(sequence.state.urgency for sequence in self.waiting) <= least:
            return
        sequence = self.waiting.next(self.running)
        if sequence is None:
            return
        match = self._match(sequence)
        while not (self._has_place(sequence) and self._has_room(sequence, match)):
            less_urgent = [s for s in self.running if s.state.urgency < sequence.state.urgency]
            if not less_urgent:
                return
            self._give_up(self._cheapest(less_urgent))

    def _preempt(self, needy: Sequence, chosen: Collection[Sequence], first: Sequence | None) -> bool:
        """Takes a running sequence's place for `needy`; False when it has to be that of `needy` itself.

        Nobody does who is in the step already, nor the first in rank, nor who would free nothing. Before that, texts
        that are held to be taken over go: they can be computed.
        """
        edited = next((other for other in self.running if other.edit is not None), None)
        if edited is not None:
            self._end_edit(edited)
            return True
        if len(self.running) == 1:
            return False
        victims = [
            other
            for other in self.running
            if other is needy or (other is not first and self._num_own_blocks(other))
        ]
        victims = [
            other for other in victims if other not in chosen and (other is not needy or needy is not first)
        ]
        if not victims:
            return False
        victim = self._cheapest(victims)
        self._give_up(victim)
        return victim is not needy

    def _end_edit(self, sequence: Sequence) -> None:
        """Lets go of the earlier text that the sequence takes over from; what is not taken over yet is computed."""
        if sequence.edit is not None:
            self._edits.drop(sequence.edit)
            sequence.edit = None

    def _give_up(self, sequence: Sequence) -> None:
        """A running sequence waits again."""
        self.running.remove(sequence)
        sequence.num_given_up = 0 if sequence.table is None else sequence.table.num_tokens
        self.forget_blocks(sequence)
        sequence.num_preempted += 1
        self.num_preempted += 1
        self.waiting.add(sequence, self.running)

    def _cheapest(self, victims: Iterable[Sequence]) -> Sequence:
        """The least urgent, then the one with the fewest tokens that may have to be computed again, then the last."""
        return min(victims, key=lambda s: (s.state.urgency, self._cost(s), [-n for n in s.rank]))

    def _cost(self, sequence: Sequence) -> int:
        """Tokens that are lost if all blocks of its own are evicted while it waits."""
        table = sequence.table
        if table is None:
            return 0
        if not table.publishes:
            return table.num_tokens
        return self._num_own_blocks(sequence) * BLOCK_SIZE + table.num_tokens % BLOCK_SIZE

    def _num_own_blocks(self, sequence: Sequence) -> int:
        """Blocks that nobody else holds, so that they are free to take when it gives up."""
        return self._manager.num_held_alone(sequence.held_block_ids)


def _num_lacking(sequence: Sequence, num_blocks: int) -> int:
    """Blocks that a sequence with `num_blocks` of them needs for the tokens that it has."""
    return max(0, len(sequence.token_ids) // BLOCK_SIZE - num_blocks)
