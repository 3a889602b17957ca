"""Eviction by value: what is least likely to be asked for again soon leaves first.

A block's value is the rate of returns that waiting for it can have at best from now on: the most returns for the time
that its room is taken (Gittins' index; R. Weber, On the Gittins index for multiarmed bandits, 1992). For the end of a
conversation it is learned from what happened to others that had gone on as often: one that has gone on four times goes
on more often than one that has begun just now. What several conversations share is judged by its own last uses. With
nothing learned yet all conversations are alike and lose value with age, which is "least recently used first".
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from octavo.kv.prefix import PrefixIndex

_BOUNDS = [2 ** (i / 4) for i in range(-4, 68)]
"""Ages in seconds, from half a second to a day and a half, that part the buckets of a histogram."""

_EDGES = [0.0, *_BOUNDS, 2 * _BOUNDS[-1]]
_MIDDLES = [math.sqrt(max(a, 0.1) * b) for a, b in pairwise(_EDGES)]
_PRIOR_AGES = [36 / (36 + len(_BOUNDS)), *[1 / (36 + len(_BOUNDS))] * len(_BOUNDS)]
"""As many come back in each quarter of an octave, from a millisecond on: ever fewer in a second."""

_MAX_TURN = 8
_PRIOR = 16.0
"""What is known beforehand counts as much as so many cases."""

_ALIKE = 1e6
_MAX_WEIGHT = 8.0
_MAX_LEFT = 8192
_LEARN_EVERY = 64
_MAX_GHOSTS = 65_536
_LAST_USES = 4
_SHORTEST_S = 60.0
"""Uses that follow each other faster say no more than that: requests come in bursts."""

_SHARED_AGAIN = 0.95
"""How many of the blocks that several sequences share are used again, as far as nothing else is known."""

_PRIORITY_FACTOR = 4.0
"""One step of priority counts as this many times the chance to be used again."""

Kind = tuple[str, int, int]


class Returns:
    """How many conversations go on after each of their turns, and after how long.

    All turns share one histogram of ages, as a few returns say little about a turn's own. Those that left lately had
    no time yet to come back after long: a return counts for more the fewer had the time, and of those that left only
    the part counts that should be back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hits = [0.0] * len(_MIDDLES)
        self._left: list[list[float]] = [[] for _ in range(_MAX_TURN)]  # by turn: when, in order
        self._back = [0.0] * _MAX_TURN
        self._values: list[list[float]] = []
        self._num_new = 0

    def left(self, turn: int) -> None:
        """A conversation waits after this turn, from 1 to `_MAX_TURN`."""
        times = self._left[turn - 1]
        times.append(self._clock())
        if len(times) > _MAX_LEFT:  # so that what is new counts more
            del times[: _MAX_LEFT // 2]
            self._back[turn - 1] /= 2
            self._hits = [hits / 2 for hits in self._hits]
        self._num_new += 1

    def came_back(self, turn: int, age_s: float) -> None:
        self._back[turn - 1] += 1
        self._hits[_bucket(age_s)] += 1
        self._num_new += 1

    def value(self, turn: int, age_s: float) -> float:
        """Returns a second that waiting from this age on brings at best."""
        if not self._values or self._num_new >= _LEARN_EVERY:
            self._learn()
        values, bucket = self._values[turn - 1], _bucket(age_s)
        low, high = _EDGES[bucket], _EDGES[bucket + 1]
        part = min((age_s - low) / (high - low), 1.0)
        return values[bucket] * (1 - part) + values[bucket + 1] * part

    def _learn(self) -> None:
        self._num_new = 0
        now = self._clock()
        away = [[bisect_right(times, now - age) for age in _MIDDLES] for times in self._left]
        num_left = sum(map(len, self._left))
        hits = [
            hits * min((num_left + 1) / (sum(longer) + 1), _MAX_WEIGHT)
            for hits, longer in zip(self._hits, zip(*away, strict=True), strict=True)
        ]
        for _ in range(4):
            padded = [hits[0], *hits, hits[-1]]
            hits = [(a + 2 * b + c) / 4 for a, b, c in zip(padded, padded[1:], padded[2:], strict=False)]
        hits = [hit + _PRIOR * part for hit, part in zip(hits, _PRIOR_AGES, strict=True)]
        ages = [hit / sum(hits) for hit in hits]
        due = [sum(share * longer for share, longer in zip(ages, turn, strict=True)) for turn in away]
        share = min((sum(self._back) + _PRIOR / 2) / (sum(due) + _PRIOR), 0.99)
        alike = _likeness(self._back, due, share)
        self._values = []
        for back, number in zip(self._back, due, strict=True):
            share = min((back + alike * share) / (number + alike), 0.99)
            self._values.append(_best_rates([0.0, *accumulate(share * age for age in ages)]))


def _likeness(back: list[float], due: list[float], share: float) -> float:
    """For how many cases of a turn it counts that it should be like the one before it.

    The more turns differ beyond what chance would do, the fewer (R. DerSimonian and N. Laird, Meta-analysis in
    clinical trials, 1986). `share` is what came back of all that was due.
    """
    number = sum(due)
    spread = sum((b - share * d) ** 2 / d for b, d in zip(back, due, strict=True) if d) / (
        share * (1 - share)
    )
    beyond_chance = spread - 2 * (_MAX_TURN - 1)  # chance alone reaches this once in twenty times
    if beyond_chance <= 0:
        return _ALIKE
    return min(_ALIKE, max(_PRIOR / 2, (number - sum(d * d for d in due) / number) / beyond_chance))


def _best_rates(returned: list[float]) -> list[float]:
    """By the share that has come back at each of `_EDGES`: the most returns a second from there to any later one."""
    waits = (
        (1 - (a + b) / 2) * (end - start)
        for (a, b), (start, end) in zip(pairwise(returned), pairwise(_EDGES), strict=True)
    )
    waited = [0.0, *accumulate(waits)]

    def rate(start: int, end: int) -> float:
        return (returned[end] - returned[start]) / (waited[end] - waited[start])

    best = len(returned) - 1
    hull, rates = [best], [0.0]  # the ends that are best for some earlier start, the nearest last
    for start in range(best - 1, -1, -1):
        while len(hull) > 1 and rate(start, hull[-1]) <= rate(start, hull[-2]):
            hull.pop()
        rates.append(rate(start, hull[-1]))
        hull.append(start)
    rates[0] = rates[1]
    return rates[::-1]


def _bucket(age_s: float) -> int:
    return bisect_right(_BOUNDS, age_s)


@dataclass(eq=False, slots=True)
class _Life:
    """What a block has been through.

    `turn` is the turn of its conversation in which it was made; it was let go of `uses` times, the last time at
    `left_s`, and lay unused between them for `interval_s`, a mean of the last ones. Several sequences go on from it,
    or from a block behind it, if it is `shared`.
    """

    turn: int
    uses: int
    left_s: float
    interval_s: float = 0.0
    shared: bool = False
    is_end: bool = False
    """Nothing went on from it when it was let go of last: it stands for its sequence in what is learned."""

    @property
    def reached(self) -> int:
        """The turn that its conversation has reached."""
        return min(_MAX_TURN, self.turn + self.uses - 1)

    @property
    def kind(self) -> Kind:
        """Blocks of one kind have the same value at the same age, or nearly."""
        if self.shared:
            return "shared", self._num_intervals, round(math.log2(self._usual_s))
        return "turn", self.reached, 0

    def used(self, now: float) -> None:
        """It is used again."""
        idle_s = now - self.left_s
        self.interval_s += (idle_s - self.interval_s) / min(self.uses, _LAST_USES)

    def shared_value(self, now: float) -> float:
        """Uses a second that can be expected of what several sequences share.

        Its uses come at random, at a rate that its last intervals tell, and end at some time: the longer it lies
        unused, the lower the rate and the likelier the end (D. Schmittlein and others, Counting Your Customers,
        1987).
        """
        number, age_s = self._num_intervals, now - self.left_s
        known_s = number * self._usual_s
        odds_of_end = (1 - _SHARED_AGAIN) / _SHARED_AGAIN * (1 + age_s / known_s) ** number
        return number / (known_s + age_s) / (1 + odds_of_end)

    @property
    def _num_intervals(self) -> int:
        return max(1, min(self.uses - 1, _LAST_USES))

    @property
    def _usual_s(self) -> float:
        return max(self.interval_s, _SHORTEST_S)


class ByValue:
    """An `EvictionPolicy` for blocks; see the module.

    Only a block without published blocks behind it can be evicted. Of each kind those that were left longest and
    shortest ago are looked at, so that an eviction takes the same time however many blocks there are: a value may
    rise up to the age at which most come back, and falls from there.
    """

    def __init__(self, index: PrefixIndex, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._clock = clock
        self._lives: dict[int, _Life] = {}  # of published blocks that were let go of
        self._reusable: dict[int, int] = {}  # and when, as a count: equal times are common
        self._count = 0
        self._queues: dict[tuple[Kind, int], list[tuple[int, int]]] = {}  # of those that can go, by count
        self._places: dict[int, tuple[Kind, int]] = {}
        self._returns = Returns(clock)
        self._ghosts: OrderedDict[bytes, _Life] = OrderedDict()  # of evicted blocks, which may come back
        self._priorities: dict[int, int] = {}
        self._expiries: dict[int, float] = {}
        self.last_had_expired = False
        """Whether the block that `pop` gave last was worth nothing any more."""

    def touch(self, id_: int) -> None:
        now = self._clock()
        if id_ not in self._lives:
            self._begin(id_, now)
        self._unqueue(id_)
        life = self._lives[id_]
        is_end = not self._index.children(id_)
        life.uses += 1
        life.left_s, life.is_end = now, is_end
        if is_end and not life.shared:
            self._returns.left(life.reached)
        self._count += 1
        self._reusable[id_] = self._count
        if is_end:
            self._queue(id_)

    def remove(self, id_: int) -> None:
        self._unqueue(id_)
        del self._reusable[id_]
        self._learn(self._lives[id_])

    def pop(self) -> int:
        now = self._clock()
        ends = [queue[end][1] for queue in self._queues.values() for end in (0, -1)]
        if not ends:
            raise KeyError("no block may be evicted")
        victim = min(ends, key=lambda id_: (self._value(id_, now), self._reusable[id_]))
        self.last_had_expired = self._expiries.get(victim, now + 1) <= now
        self._leave(victim)
        return victim

    def drop(self, id_: int) -> None:
        self._unqueue(id_)
        self._reusable.pop(id_, None)
        self._lives.pop(id_, None)
        self._priorities.pop(id_, None)
        self._expiries.pop(id_, None)
        self._uncover(id_)

    def clear(self) -> list[int]:
        ids = list(self)
        tables = (self._lives, self._reusable, self._queues, self._places, self._priorities, self._expiries)
        for known in tables:
            known.clear()
        return ids

    def retain(self, ids: Sequence[int], priority: int, expires_s: float | None) -> None:
        """How much held blocks that follow each other are worth from now on, and until when (on the clock).

        What several sequences share keeps the most that one of them has asked for.
        """
        if not (priority or expires_s or self._priorities or self._expiries):
            return
        is_shared = False
        for id_ in reversed(ids):
            life = self._lives.get(id_)
            is_shared = is_shared or len(self._index.children(id_)) > 1 or (life is not None and life.shared)
            given, until = priority, expires_s
            if is_shared:
                given = max(given, self._priorities.get(id_, 0))
                known = self._expiries.get(id_)
                until = None if until is None or known is None else max(until, known)
            self._priorities.pop(id_, None)
            self._expiries.pop(id_, None)
            if given:
                self._priorities[id_] = given
            if until is not None:
                self._expiries[id_] = until

    def left(self) -> dict[int, float]:
        """When each reusable block was let go of last, on the clock."""
        return {id_: self._lives[id_].left_s for id_ in self._reusable}

    def _leave(self, victim: int) -> None:
        self._unqueue(victim)
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
        if life.shared:
            value = life.shared_value(now)
        else:
            value = self._returns.value(life.reached, now - life.left_s)
        return value * _PRIORITY_FACTOR ** self._priorities.get(id_, 0)

    def _queue(self, id_: int) -> None:
        expires = self._expiries.get(id_)
        kind: Kind = self._lives[id_].kind if expires is None else ("expires", int(expires) // 60, 0)
        self._places[id_] = key = kind, self._priorities.get(id_, 0)
        insort(self._queues.setdefault(key, []), (self._reusable[id_], id_))

    def _unqueue(self, id_: int) -> None:
        key = self._places.pop(id_, None)
        if key is not None:
            queue = self._queues[key]
            del queue[bisect_left(queue, (self._reusable[id_], id_))]
            if not queue:
                del self._queues[key]

    def _learn(self, life: _Life) -> None:
        now = self._clock()
        if life.is_end and not life.shared:
            self._returns.came_back(life.reached, now - life.left_s)
        life.used(now)

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
                turn = self._next_turn(self._lives[parent])
        for block_id in reversed(run):
            life = self._ghosts.pop(self._index[block_id].block_hash, None)
            if life is None:
                life = _Life(turn, 0, now)
            else:  # it came back after it had been evicted
                self._learn(life)
                turn = self._next_turn(life)
            self._lives[block_id] = life

    def _next_turn(self, life: _Life) -> int:
        """The turn of what goes on from a block, before the block is let go of again."""
        return 1 if life.shared else min(_MAX_TURN, life.reached + 1)

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
