"""Looking at an engine, and acting on its conversations. Runs on the engine's thread."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from octavo.engine.cache import EngineCache
from octavo.engine.lineage import Lineage, Lineages
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence import Sequence
from octavo.engine.snapshot import Holding, Known, Observation
from octavo.errors import InvalidRequest
from octavo.kv.hashing import chain_hashes
from octavo.kv.storage.records import pack_ids, unpack_ids
from octavo.spec import BLOCK_SIZE


class Onlooker:
    """An engine's cache and queues, seen from outside."""

    def __init__(self, cache: EngineCache, scheduler: Scheduler, name: str, context: int) -> None:
        self._cache, self._scheduler = cache, scheduler
        self._name, self._context = name, context
        self.lineages = Lineages()

    def observe(self) -> Observation:
        """Everything that a snapshot is made of, copied."""
        cache, running = self._cache, self._scheduler.running
        return Observation(
            clock_s=time.monotonic(),
            at_s=time.time(),
            model=self._name,
            context=self._context,
            memory=cache.memory(running),
            dtype=cache.dtype,
            block_bytes=cache.block_bytes,
            slot_bytes=cache.runner.opened.slot_bytes,
            num_blocks=cache.plan.num_blocks,
            cache=cache.manager.view(),
            pinned=frozenset(cache.pins.block_ids()),
            holdings=tuple(_holding(sequence) for sequence in running),
            known=tuple(_known(lineage) for lineage in self.lineages),
            totals=dict(self.lineages.totals),
            num_running=Counter(sequence.state.namespace for sequence in running),
            num_waiting=Counter(sequence.state.namespace for sequence in self._scheduler.waiting),
            num_evicted=Counter(cache.manager.num_evicted),
            num_restored=Counter(cache.tiers.num_restored),
        )

    def pin(self, name: str, tenant: str) -> int:
        """Holds in memory what a conversation has there, its later turns too; returns how many tokens that is.

        Raises:
            InvalidRequest: there is no such conversation, it has nothing in memory, or pins hold too much already.
        """
        lineage = self._find(name, tenant)
        ids = [*unpack_ids(lineage.sequence), 0]
        match = self._cache.manager.match_prefix(ids, namespace=lineage.namespace)
        if not match.block_ids:
            raise InvalidRequest(
                f"The conversation {name} has no full block in memory, so there is nothing to pin. A block has "
                f"{BLOCK_SIZE} tokens; go on with the conversation, and pin it then."
            )
        self._cache.pins.check(_pin_name(lineage), len(match.block_ids) * BLOCK_SIZE)
        table = self._cache.manager.start(match, ids)
        try:
            num_tokens = self._cache.pins.hold(_pin_name(lineage), table, None)
        finally:
            self._cache.manager.free(table)
        lineage.is_pinned = True
        return num_tokens

    def unpin(self, name: str, tenant: str) -> None:
        """Lets go of what `pin` holds.

        Raises:
            InvalidRequest: there is no such conversation.
        """
        lineage = self._find(name, tenant)
        self._cache.pins.release(_pin_name(lineage))
        lineage.is_pinned = False

    def drop(self, name: str, tenant: str) -> int:
        """Forgets what only this conversation has, in memory and below; what it shares with others stays.

        What its running requests have of it is theirs alone from now on, and goes with them.

        Returns:
            The bytes of memory given back to the system.

        Raises:
            InvalidRequest: there is no such conversation.
        """
        lineage = self._find(name, tenant)
        self.unpin(name, tenant)
        return self._drop(lineage.namespace, [lineage], lineage.block_hashes, unpack_ids(lineage.sequence))

    def forget_sequence(self, token_ids: SequenceOf[int], tenant: str) -> int:
        """Forgets what was computed of a sequence, in memory and below, but what other conversations have too.

        Nothing, if a longer sequence goes on from it.

        Returns:
            The bytes of memory given back to the system.
        """
        namespace, packed = self._cache.namespace(tenant), pack_ids(token_ids)
        all_ = [one for one in self.lineages if one.namespace == namespace]
        own = [one for one in all_ if one.sequence and packed.startswith(one.sequence)]
        others = [one for one in all_ if one not in own]
        if any(one.sequence.startswith(packed) or one.prompt.startswith(packed) for one in others):
            return 0
        if any(
            one.num_running and one.prompt.startswith(packed) for one in own
        ):  # its next turn is under way
            return 0
        for lineage in own:
            self._cache.pins.release(_pin_name(lineage))
        return self._drop(namespace, own, chain_hashes(namespace, token_ids), token_ids)

    def _drop(
        self, namespace: bytes, own: SequenceOf[Lineage], hashes: Iterable[bytes], token_ids: SequenceOf[int]
    ) -> int:
        """Forgets conversations, and of these blocks and those of their answers what no other conversation has."""
        answers = [
            sequence
            for sequence in (*self._scheduler.running, *self._scheduler.waiting)
            if sequence.state.lineage in own
        ]
        names = set(hashes).union(*(chain_hashes(namespace, sequence.token_ids) for sequence in answers))
        for lineage in own:
            self.lineages.drop(lineage)
        names.difference_update(*(one.block_hashes for one in self.lineages if one.namespace == namespace))
        tables = [sequence.table for sequence in answers if sequence.table is not None]
        tables += [sequence.edit.source for sequence in answers if sequence.edit is not None]
        return self._cache.drop(namespace, names, token_ids, tables)

    def ended(self, sequence: Sequence) -> None:
        """A sequence ends whole, and what it has in its table can be shared."""
        state, table = sequence.state, sequence.table
        if state.lineage is None or table is None:
            return
        blocks = map(self._cache.manager.published, table.block_ids)
        self.lineages.reached(
            state.lineage, table.token_ids, [block.block_hash for block in blocks if block is not None]
        )
        if state.lineage.is_pinned:
            self._cache.pins.hold(_pin_name(state.lineage), table, None)

    def _find(self, name: str, tenant: str) -> Lineage:
        lineage = self.lineages.find(self._cache.namespace(tenant), name)
        if lineage is None:
            raise InvalidRequest(
                f"There is no conversation {name!r}; it may have been forgotten. The dashboard lists those that are."
            )
        return lineage


def _pin_name(lineage: Lineage) -> tuple[bytes, str]:
    return lineage.namespace, f"conversation {lineage.name}"


def _holding(sequence: Sequence) -> Holding:
    lineage, table = sequence.state.lineage, sequence.table
    return Holding(
        namespace=sequence.state.namespace,
        conversation="" if lineage is None or lineage.is_dropped else lineage.name,
        block_ids=() if table is None else tuple(table.block_ids),
        slot=None if table is None else table.slot,
        num_tokens=0 if table is None else table.num_tokens,
        num_generated=len(sequence.generated_ids),
    )


def _known(lineage: Lineage) -> Known:
    return Known(
        namespace=lineage.namespace,
        name=lineage.name,
        tenant=lineage.tenant,
        sequence=lineage.sequence,
        block_hashes=frozenset(lineage.block_hashes),
        turns=tuple(lineage.turns),
        num_turns=lineage.num_turns,
        num_running=lineage.num_running,
        is_pinned=lineage.is_pinned,
        used_s=lineage.used_s,
    )
