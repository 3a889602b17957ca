"""Who waits for a place, and who is next.

In this order: who was overtaken too often; the more urgent; who was preempted and has a reader waiting; the tenant
that the engine has computed least for; the conversation with the fewest answers running; the longest beginning
that the cache has; who came first.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from octavo.engine.lineage import Lineage
from octavo.engine.sequence import Sequence
from octavo.kv.manager import KVCacheManager
from octavo.spec import BLOCK_SIZE

_MAX_COMPARED = 16  # of equal standing, whose beginnings are looked up
_MAX_TENANTS = 4096


class WaitingQueue:
    """Sequences that hold nothing of the cache."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._sequences: list[Sequence] = []
        self._arrivals = itertools.count(1)
        self._shares = Shares()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    def add(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """A new sequence, or one that was preempted."""
        state = sequence.state
        if not state.arrival:
            state.arrival = next(self._arrivals)
            self._shares.arrives(state.namespace, {s.state.namespace for s in (*self._sequences, *running)})
        self._sequences.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It does not wait any more."""
        self._sequences.remove(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """It got a place; those that came before it were overtaken."""
        self._sequences.remove(sequence)
        for other in self._sequences:
            if other.state.arrival < sequence.state.arrival:
                other.state.num_overtaken += 1

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """A step has computed so many tokens of a sequence: its tenant has had more."""
        self._shares.charge(sequence.state.namespace, num_tokens)

    def next(self, running: SequenceOf[Sequence]) -> Sequence | None:
        """Who is to get the next place; None if nobody can use one now. Suspects get theirs alone, not in this way."""
        ready = [
            s
            for s in self._sequences
            if not s.parked and not s.suspect and not self._is_being_computed(s, running)
        ]
        if not ready:
            return None
        standings = [self._standing(sequence) for sequence in ready]
        best = min(standings)
        peers = [s for s, standing in zip(ready, standings, strict=True) if standing == best]
        peers.sort(key=lambda s: s.rank)
        if len(peers) == 1 or peers[0].state.is_due:
            return peers[0]
        busy: Counter[Lineage | None] = Counter(s.state.lineage for s in running)
        busy[None] = 0  # of no conversation
        return min(
            peers[:_MAX_COMPARED],
            key=lambda s: (busy[s.state.lineage], -self._num_known(s), s.rank),
        )

    def _standing(self, sequence: Sequence) -> tuple[int, int, int]:
        state = sequence.state
        if state.is_due:
            return -state.urgency, 0, 0
        return -state.urgency, not sequence.num_preempted, self._shares.served(state.namespace)

    def _num_known(self, sequence: Sequence) -> int:
        state = sequence.state
        if not state.looks_up:
            return 0
        return self._manager.match_prefix(sequence.token_ids, namespace=state.namespace).num_tokens

    def _is_being_computed(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a running sequence computes just now what this one needs: then it is shared and not done twice."""
        if sequence.follows is not None:
            leader, num_tokens = sequence.follows
            if leader in running and leader.table is not None and leader.table.num_tokens < num_tokens:
                return True
            sequence.follows = None
        if not sequence.state.looks_up:
            return False
        for leader in running:
            num_tokens = _num_to_share(sequence, leader)
            if num_tokens:
                sequence.follows = leader, num_tokens
                return True
        return False


def _num_to_share(sequence: Sequence, leader: Sequence) -> int:
    """Up to where it is worth waiting for what `leader` is about to compute; 0 if it is not."""
    table, state = leader.table, leader.state
    if table is None or not table.publishes or leader.parked or state.namespace != sequence.state.namespace:
        return 0
    ids, others = sequence.token_ids, leader.token_ids
    have, end = table.num_tokens, state.num_prompt_tokens
    begin = have // BLOCK_SIZE * BLOCK_SIZE
    if have >= end or ids[begin : begin + 1] != others[begin : begin + 1]:
        return 0
    common = min(_common_prefix(ids, others), end, len(ids) - 1)
    if common < (end - 1) // BLOCK_SIZE * BLOCK_SIZE + 1:  # else the raw rows of its last block are kept, too
        common -= common % BLOCK_SIZE
    gain = common - have
    return common if gain >= BLOCK_SIZE or (gain > 0 and common == len(ids) - 1) else 0


def _common_prefix(first: list[int], second: list[int]) -> int:
    """The number of leading token ids that both have, by halving: lists compare at the speed of C."""
    low, high = 0, min(len(first), len(second))
    if first[:BLOCK_SIZE] != second[:BLOCK_SIZE]:
        high = min(high, BLOCK_SIZE)
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Shares:
    """Tokens that were computed for each tenant, so that the one that had least is next.

    A tenant that comes back begins where the least served of those is that are here: it has not saved up a claim.
    """

    def __init__(self) -> None:
        self._served: OrderedDict[bytes, int] = OrderedDict()

    def served(self, tenant: bytes) -> int:
        """Its tokens."""
        return self._served.get(tenant, 0)

    def charge(self, tenant: bytes, num_tokens: int) -> None:
        """So many were computed for it."""
        self._served[tenant] = self.served(tenant) + num_tokens

    def arrives(self, tenant: bytes, present: set[bytes]) -> None:
        """It asks for something while the tenants in `present` wait or run."""
        if tenant not in present:
            least = min((self.served(other) for other in present), default=0)
            self._served[tenant] = max(self.served(tenant), least)
            self._served.move_to_end(tenant)
            while len(self._served) > _MAX_TENANTS:
                self._served.popitem(last=False)
