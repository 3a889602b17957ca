"""What a cache of limited size has to compute again, by eviction policy, on a generated trace of conversations.

    python bench/eviction.py            the trace of the project's plan (seed 0) at 5, 10 and 20 % of its footprint
    python bench/eviction.py --other    one with other parameters

It replays the trace through the cache's own bookkeeping: no model, no bytes. Belady's bound knows the future: it
evicts what is needed again last, and no policy can do better. "Told" is the policy by value with the trace's own
probabilities in place of what it learns: what is left to gain by learning better.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from octavo.kv import LRU, ByValue, EvictionPolicy, KVCacheManager
from octavo.kv.prefix import PrefixIndex
from octavo.spec import BLOCK_SIZE

NAMESPACE = b"bench"


@dataclass(frozen=True)
class Traffic:
    """Parameters of a trace. `goes_on[i]` is the probability of a turn after turn i + 1; the last one repeats."""

    seed: int = 0
    num_conversations: int = 2000
    arrivals_per_s: float = 0.5
    goes_on: tuple[float, ...] = (0.34, 0.45, 0.57, 0.66, 0.72, 0.78)
    gap_median_s: float = 114.0
    gap_p90_s: float = 519.0
    num_system_prompts: int = 20
    system_tokens: tuple[int, int] = (200, 3000)
    user_tokens: tuple[int, int] = (20, 2000)
    answer_tokens: tuple[int, int] = (20, 1000)

    @property
    def gap(self) -> statistics.NormalDist:
        """Of the logarithm of the seconds between turns."""
        middle = math.log(self.gap_median_s)
        return statistics.NormalDist(middle, (math.log(self.gap_p90_s) - middle) / 1.2816)


OTHER = Traffic(
    seed=1,
    num_conversations=1500,
    arrivals_per_s=1.0,
    goes_on=(0.8, 0.8),
    gap_median_s=30.0,
    gap_p90_s=90.0,
    num_system_prompts=4,
    system_tokens=(1000, 6000),
)


@dataclass
class Turn:
    """A request: when it comes, its prompt, and the tokens of its answer."""

    when_s: float
    prompt: list[int]
    answer: list[int]


def trace(traffic: Traffic) -> list[Turn]:
    """The turns of all conversations, in the order in which they come."""
    rng = random.Random(traffic.seed)
    fresh = iter(range(1, 1 << 32))

    def tokens(number: int) -> list[int]:
        return [next(fresh) for _ in range(number)]

    def length(bounds: tuple[int, int]) -> int:
        """Lognormal, with all but 1 % between the bounds, and cut there."""
        low, high = (math.log(bound) for bound in bounds)
        drawn = rng.lognormvariate((low + high) / 2, (high - low) / 2 / 2.576)
        return min(bounds[1], max(bounds[0], round(drawn)))

    systems = [tokens(rng.randint(*traffic.system_tokens)) for _ in range(traffic.num_system_prompts)]
    weights = [1 / rank for rank in range(1, len(systems) + 1)]
    turns = []
    arrival = 0.0
    for _ in range(traffic.num_conversations):
        arrival += rng.expovariate(traffic.arrivals_per_s)
        history = list(rng.choices(systems, weights)[0])
        when = arrival
        for number in range(10_000):
            prompt = history + tokens(length(traffic.user_tokens))
            answer = tokens(length(traffic.answer_tokens))
            turns.append(Turn(when, prompt, answer))
            history = prompt + answer
            if rng.random() >= traffic.goes_on[min(number, len(traffic.goes_on) - 1)]:
                break
            when += rng.lognormvariate(traffic.gap.mean, traffic.gap.stdev)
    return sorted(turns, key=lambda turn: turn.when_s)


class Oracle:
    """Belady's policy: of the blocks that nothing continues, the one that is needed again last goes."""

    def __init__(
        self, index: PrefixIndex, uses: dict[tuple[int, ...], list[float]], now: Callable[[], float]
    ):
        self._index, self._uses, self._now = index, uses, now
        self._next: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def touch(self, id_: int) -> None:
        uses = self._uses[self._index[id_].token_ids]
        after = bisect.bisect_right(uses, self._now())
        self._next[id_] = uses[after] if after < len(uses) else math.inf
        self._queue(id_)

    def remove(self, id_: int) -> None:
        del self._next[id_]

    def pop(self) -> int:
        while True:
            when, victim = heapq.heappop(self._heap)
            if self._next.get(victim) == -when and not self._index.children(victim):
                break
        del self._next[victim]
        parent = self._index[victim].parent
        if isinstance(parent, int) and parent in self._next and len(self._index.children(parent)) == 1:
            heapq.heappush(self._heap, (-self._next[parent], parent))
        return victim

    def drop(self, id_: int) -> None:
        self._next.pop(id_, None)

    def clear(self) -> list[int]:
        ids = list(self)
        self._next.clear()
        return ids

    def _queue(self, id_: int) -> None:
        if not self._index.children(id_):
            heapq.heappush(self._heap, (-self._next[id_], id_))

    def __len__(self) -> int:
        return len(self._next)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._next, key=lambda id_: -self._index[id_].depth))


class Told:
    """Stands for `octavo.kv.value.Returns`, and knows what it would learn."""

    _AGES = (0.0, *(2 ** (i / 8) for i in range(-8, 130)))

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._values: dict[int, list[float]] = {}

    def left(self, kind: int) -> None: ...

    def came_back(self, kind: int, age_s: float) -> None: ...

    def value(self, kind: int, age_s: float) -> float:
        if kind not in self._values:
            self._values[kind] = self._rates(kind)
        return self._values[kind][bisect.bisect_right(self._AGES, age_s) - 1]

    def _rates(self, turn: int) -> list[float]:
        goes_on, gap = self._traffic.goes_on, self._traffic.gap
        returned = [
            goes_on[min(turn, len(goes_on)) - 1] * gap.cdf(math.log(age or 1e-9)) for age in self._AGES
        ]
        waited = [0.0]
        for (a, b), (before, after) in zip(pairwise(self._AGES), pairwise(returned), strict=True):
            waited.append(waited[-1] + (b - a) * (1 - (before + after) / 2))
        return [
            max(
                (returned[end] - returned[start]) / (waited[end] - waited[start])
                for end in range(start + 1, len(waited))
            )
            for start in range(len(waited) - 1)
        ]


def least_recently_used(_index: PrefixIndex, _now: Callable[[], float]) -> LRU:
    return LRU()


@dataclass
class Replay:
    """A trace, and what it needs at least."""

    turns: list[Turn]
    footprint: int = 0
    uses: dict[tuple[int, ...], list[float]] = field(default_factory=dict)
    compulsory: int = 0

    def __post_init__(self) -> None:
        for turn in self.turns:
            ids = turn.prompt + turn.answer
            for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
                self.uses.setdefault(tuple(ids[start : start + BLOCK_SIZE]), []).append(turn.when_s)
        self.footprint = len(self.uses)
        self.compulsory = self.run(self.footprint + 1, least_recently_used)

    def run(
        self, num_blocks: int, policy: Callable[[PrefixIndex, Callable[[], float]], EvictionPolicy]
    ) -> int:
        """Tokens of prompts that were computed with so many blocks."""
        clock = [0.0]
        kv = KVCacheManager(
            num_blocks=num_blocks,
            num_slots=1,
            max_tails=0,
            policy=lambda index: policy(index, lambda: clock[0]),
        )
        computed = 0
        for turn in self.turns:
            clock[0] = turn.when_s
            match = kv.match_prefix(turn.prompt, namespace=NAMESPACE)
            computed += len(turn.prompt) - match.num_tokens
            table = kv.start(match, turn.prompt)
            rest = turn.prompt[table.num_tokens :] + turn.answer
            if kv.allocate(table, len(rest)) is None:
                raise SystemExit(f"A turn of {len(turn.prompt)} tokens does not fit {num_blocks} blocks.")
            kv.commit(table, rest)
            kv.free(table)
        return computed


def compare(traffic: Traffic, shares: tuple[float, ...], *, bound: bool = True) -> list[dict[str, float]]:
    """Tokens computed again at each share of the footprint, by policy."""
    replay = Replay(trace(traffic))
    rows = []

    def told(index: PrefixIndex, now: Callable[[], float]) -> ByValue:
        policy = ByValue(index, now)
        policy._returns = Told(traffic)
        return policy

    for share in shares:
        num_blocks = round(replay.footprint * share)
        lru = replay.run(num_blocks, least_recently_used) - replay.compulsory
        ours = replay.run(num_blocks, ByValue) - replay.compulsory
        row = {"share": share, "blocks": num_blocks, "lru": lru, "ours": ours, "ratio": ours / max(lru, 1)}
        if bound:
            row["told"] = replay.run(num_blocks, told) - replay.compulsory
            oracle = replay.run(num_blocks, lambda index, now: Oracle(index, replay.uses, now))
            row["belady"] = oracle - replay.compulsory
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", action="store_true", help="the second trace")
    parser.add_argument(
        "--no-bound", action="store_true", help="leave out what no policy can know, which takes longest"
    )
    parser.add_argument("--seed", type=int, help="another trace of the same kind")
    parser.add_argument("--rate", type=float, help="conversations that begin in a second")
    arguments = parser.parse_args()
    traffic = OTHER if arguments.other else Traffic()
    if arguments.rate:
        traffic = replace(traffic, arrivals_per_s=arguments.rate)
    if arguments.seed is not None:
        traffic = replace(traffic, seed=arguments.seed)
    print(f"{traffic}")
    print(
        f"{'of the footprint':>16} {'LRU':>12} {'by value':>12} {'ratio':>6} {'told':>12} {'Belady':>12}   tokens again"
    )
    for row in compare(traffic, (0.05, 0.1, 0.2), bound=not arguments.no_bound):
        print(
            f"{row['share']:16.0%} {row['lru']:12,.0f} {row['ours']:12,.0f} {row['ratio']:6.2f} "
            f"{row.get('told', math.nan):12,.0f} {row.get('belady', math.nan):12,.0f}"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
