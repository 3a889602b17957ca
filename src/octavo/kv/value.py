"""Eviction by value: what is least likely to be asked for again soon leaves first.

How likely that is, is learned from what happened to blocks before: after how long blocks of the same kind came back,
if they did. The kinds are the turns of a conversation (one that has gone on four times goes on more often than one
that has begun just now) and, for what several conversations share, how often it was used. A block's value is the
best rate of returns that waiting for it can have from its age on: the most returns for the time that its room is
taken (a Gittins index). With nothing learned yet all kinds are alike and lose value with age, which is "least
recently used first".
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from octavo.kv.prefix import PrefixIndex

_BOUNDS = [2 ** (i / 2) for i in range(-2, 34)]
"""Ages in seconds, from half a second to a day and a half, that part the buckets of a histogram."""

_WIDTHS = [_BOUNDS[0], *(b - a for a, b in pairwise(_BOUNDS)), _BOUNDS[-1]]
_MAX_TURN = 8
_MAX_USES_LOG2 = 8
_PRIOR = 8.0
_HALVE_AT = 20_000.0
_LEARN_EVERY = 64
_MAX_GHOSTS = 65_536
_DEPTH_COST = 1 / 512
"""A token costs more to compute the more tokens it attends to: twice as much behind 512 blocks as at the start."""

_PRIORITY_FACTOR = 4.0
"""One step of priority counts as this many times the chance to be used again."""

Kind = tuple[str, int]


class Returns:
    """After how long the ends of sequences came back, in kinds that differ in how many of them do.

    All kinds share one histogram of ages, as a few returns say little about a kind's own.
    """

    def __init__(self) -> None:
        self._ages = [_PRIOR / len(_WIDTHS)] * len(_WIDTHS)
        self._left: dict[int, float] = {}
        self._back: dict[int, float] = {}
        self._values: dict[int, list[float]] = {}
        self._num_new = 0

    def left(self, kind: int) -> None:
        """One is waiting to be used again."""
        self._left[kind] = self._left.get(kind, _PRIOR) + 1
        self._changed()

    def came_back(self, kind: int, age_s: float) -> None:
        self._back[kind] = self._back.get(kind, _PRIOR / 2) + 1
        self._ages[_bucket(age_s)] += 1
        self._changed()

    def value(self, kind: int, age_s: float) -> float:
        """Returns a second that waiting from this age on brings at best."""
        if kind not in self._values:
            self._values[kind] = self._rates(kind)
        return self._values[kind][_bucket(age_s)]

    def _changed(self) -> None:
        self._num_new += 1
        if self._num_new >= _LEARN_EVERY:
            self._num_new, self._values = 0, {}
            if sum(self._ages) > _HALVE_AT:  # so that what is new counts more
                self._ages = [hits / 2 for hits in self._ages]
                self._left = {kind: number / 2 for kind, number in self._left.items()}
                self._back = {kind: number / 2 for kind, number in self._back.items()}

    def _rates(self, kind: int) -> list[float]:
        left = self._left.get(kind, _PRIOR)
        share = min(self._back.get(kind, _PRIOR / 2) / left, 0.99) / sum(self._ages)
        padded = [self._ages[0], *self._ages, self._ages[-1]]
        smooth = [(a + 2 * b + c) / 4 for a, b, c in zip(padded, padded[1:], padded[2:], strict=False)]
        returned = [0.0, *accumulate(hits * share for hits in smooth)]
        gone = ((a + b) / 2 for a, b in pairwise(returned))
        waited = [0.0, *accumulate((1 - g) * width for g, width in zip(gone, _WIDTHS, strict=True))]
        return [
            max(
                (returned[end] - returned[start]) / (waited[end] - waited[start])
                for end in range(start + 1, len(returned))
            )
            for start in range(len(_WIDTHS))
        ]


def _bucket(age_s: float) -> int:
    return bisect_right(_BOUNDS, age_s)


@dataclass(eq=False, slots=True)
class _Life:
    """What a block has been through.

    `turn` is the turn of its conversation in which it was made; it was let go of `uses` times, the last time at
    `left_s`. Several sequences go on from it, or from a block behind it, if it is `shared`.
    """

    turn: int
    uses: int
    left_s: float
    shared: bool = False
    is_end: bool = False
    """Nothing went on from it when it was let go of last: it stands for its sequence in what is learned."""

    @property
    def kind(self) -> Kind:
        if self.shared:
            return "shared", min(_MAX_USES_LOG2, self.uses.bit_length())
        return "turn", min(_MAX_TURN, self.turn + self.uses - 1)


class ByValue:
    """An `EvictionPolicy` for blocks; see the module.

    Only a block without published blocks behind it can be evicted. Of each kind the one that was left longest ago
    is looked at, so that an eviction takes the same time however many blocks there are.
    """

    def __init__(self, index: PrefixIndex, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._clock = clock
        self._lives: dict[int, _Life] = {}  # of published blocks that were let go of
        self._reusable: dict[int, int] = {}  # and when, as a count: equal times are common
        self._count = 0
        self._queues: dict[tuple[Kind, int], list[tuple[int, int]]] = {}
        self._returns = {"turn": Returns(), "shared": Returns()}
        self._ghosts: OrderedDict[bytes, _Life] = (
            OrderedDict()
        )  # lives of evicted blocks, which may come back
        self._priorities: dict[int, int] = {}
        self._expiries: dict[int, float] = {}
        self.last_had_expired = False
        """Whether the block that `pop` gave last was worth nothing any more."""

    def touch(self, id_: int) -> None:
        now = self._clock()
        if id_ not in self._lives:
            self._begin(id_, now)
        life = self._lives[id_]
        is_end = not self._index.children(id_)
        life.uses += 1
        life.left_s, life.is_end = now, is_end or life.shared
        if life.is_end:
            self._returns[life.kind[0]].left(life.kind[1])
        self._count += 1
        self._reusable[id_] = self._count
        if is_end:
            self._queue(id_)

    def remove(self, id_: int) -> None:
        del self._reusable[id_]
        self._learn(self._lives[id_])

    def pop(self) -> int:
        now = self._clock()
        best: tuple[float, tuple[Kind, int]] | None = None
        for key, queue in self._queues.items():
            while queue and not self._is_candidate(*queue[0]):
                heapq.heappop(queue)
            if queue:
                value = self._value(queue[0][1], now)
                if best is None or value < best[0]:
                    best = value, key
        if best is None:
            raise KeyError("no block may be evicted")
        _, victim = heapq.heappop(self._queues[best[1]])
        self.last_had_expired = self._expiries.get(victim, now + 1) <= now
        self._leave(victim)
        return victim

    def drop(self, id_: int) -> None:
        del self._reusable[id_], self._lives[id_]
        self._priorities.pop(id_, None)
        self._expiries.pop(id_, None)
        self._uncover(id_)

    def clear(self) -> list[int]:
        ids = list(self)
        for known in (self._lives, self._reusable, self._queues, self._priorities, self._expiries):
            known.clear()
        return ids

    def retain(self, id_: int, priority: int, expires_s: float | None) -> None:
        """How much a held block is worth from now on, and until when (on the clock) it is worth anything."""
        self._priorities[id_] = priority
        self._expiries.pop(id_, None)
        if expires_s is not None:
            self._expiries[id_] = expires_s

    def left(self) -> dict[int, float]:
        """When each reusable block was let go of last, on the clock."""
        return {id_: self._lives[id_].left_s for id_ in self._reusable}

    def _leave(self, victim: int) -> None:
        del self._reusable[victim]
        block, life = self._index[victim], self._lives.pop(victim)
        self._priorities.pop(victim, None)
        self._expiries.pop(victim, None)
        self._ghosts[block.block_hash] = life
        if len(self._ghosts) > _MAX_GHOSTS:
            self._ghosts.popitem(last=False)
        self._uncover(victim)

    def _uncover(self, gone: int) -> None:
        """The block before one that leaves can go from now on, if nothing else continues it."""
        parent = self._index[gone].parent
        if isinstance(parent, int) and parent in self._reusable and len(self._index.children(parent)) == 1:
            self._queue(parent)

    def _value(self, id_: int, now: float) -> float:
        if self._expiries.get(id_, now + 1) <= now:
            return 0.0
        life = self._lives[id_]
        kind, number = life.kind
        value = self._returns[kind].value(number, now - life.left_s) * (
            1 + _DEPTH_COST * self._index[id_].depth
        )
        return value * _PRIORITY_FACTOR ** self._priorities.get(id_, 0)

    def _is_candidate(self, count: int, id_: int) -> bool:
        return self._reusable.get(id_) == count and not self._index.children(id_)

    def _queue(self, id_: int) -> None:
        expires = self._expiries.get(id_)
        kind: Kind = self._lives[id_].kind if expires is None else ("expires", int(expires) // 60)
        queue = self._queues.setdefault((kind, self._priorities.get(id_, 0)), [])
        heapq.heappush(queue, (self._reusable[id_], id_))

    def _learn(self, life: _Life) -> None:
        if life.is_end:
            self._returns[life.kind[0]].came_back(life.kind[1], self._clock() - life.left_s)

    def _begin(self, id_: int, now: float) -> None:
        """A block is let go of for the first time, and with it those before it that are new as well."""
        run = [id_]
        while (parent := self._index[run[-1]].parent) not in self._lives and isinstance(parent, int):
            run.append(parent)
        turn = 1
        if isinstance(parent, int):
            if len(self._index.children(parent)) > 1:
                self._share(parent)
            else:
                turn = min(_MAX_TURN, self._kind_turn(parent) + 1)
        for block_id in run:
            ghost = self._ghosts.pop(self._index[block_id].block_hash, None)
            if ghost is not None:  # it came back after it had been evicted
                self._learn(ghost)
            self._lives[block_id] = ghost or _Life(turn, 0, now)

    def _kind_turn(self, id_: int) -> int:
        """The turn that a block's conversation has reached."""
        life = self._lives[id_]
        return 0 if life.shared else life.turn + life.uses - 1

    def _share(self, id_: int) -> None:
        """Several sequences go on from a block, and so from all those before it."""
        parent: int | bytes = id_
        while isinstance(parent, int) and parent in self._lives and not self._lives[parent].shared:
            self._lives[parent].shared = True
            parent = self._index[parent].parent

    def __len__(self) -> int:
        return len(self._reusable)

    def __iter__(self) -> Iterator[int]:
        """The ids in an order in which they could go: each behind those that continue it."""
        return iter(sorted(self._reusable, key=lambda id_: -self._index[id_].depth))
