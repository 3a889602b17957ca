"""What the benchmarks ask of an engine, this one or a peer: the same prompts, and one figure from each run."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Stamps = list[list[float]]
"""For each prompt the seconds after the start at which its tokens came."""

Generate = Callable[[Sequence[list[int]], Sequence[int]], Stamps]
"""Answers prompts, all at once: (prompts, tokens of each one's answer), greedy and past the model's end tokens."""

UNSTEADY = 0.1
"""A spread above which a figure is measured more often."""

BATCH_CONTEXT = 128
AGAIN_TOKENS = 2048
MIXED_PROMPT = (30, 1500)
MIXED_ANSWER = (20, 200)
_LOWEST_ID, _HIGHEST_ID = 100, 30_000  # special tokens are at the ends of a vocabulary


@dataclass(frozen=True, slots=True)
class Workload:
    """One figure. `measure` takes the engine and the number of the round; a new round has new prompts where a
    reused one would spare the engine what is measured."""

    name: str
    unit: str
    measure: Callable[[Generate, int], float]
    warms_up: bool = True

    @property
    def more_is_better(self) -> bool:
        return self.unit == "tok/s"


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of a workload's rounds; `spread` is the middle half's width over the median."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        ordered = sorted(self.values)
        quarter = len(ordered) // 4
        return (ordered[-1 - quarter] - ordered[quarter]) / self.median

    @property
    def steady(self) -> bool:
        return self.spread <= UNSTEADY

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "spread": self.spread,
            "values": list(self.values),
        }


Found = dict[str, list[Figure]]
"""By engine its figures."""


def workloads(
    prefill: Iterable[int],
    decode: Iterable[int],
    sequences: Iterable[int],
    *,
    tokens: int,
    vocab_size: int = _HIGHEST_ID,
    again: int = AGAIN_TOKENS,
    mixed: Iterable[int] = (),
) -> list[Workload]:
    """The figures of an engine: prefill of these lengths, decoding at these contexts and with that many sequences
    at once, `tokens` a sequence, that many requests of mixed lengths, and the first token of a prompt that was
    answered just before."""
    prompts = _Prompts(min(vocab_size, _HIGHEST_ID))
    lengths = sorted(prefill)
    found = [_prefill(prompts, length, warms_up=length == lengths[0]) for length in lengths]
    found += [_decode(prompts, context, tokens) for context in decode]
    found += [_batch(prompts, number, tokens) for number in sequences]
    found += [_mixed(prompts, number) for number in mixed]
    if again:
        found.append(_again(prompts, again))
    return found


def take_turns(
    engines: dict[str, Generate],
    workloads: Sequence[Workload],
    repeats: int,
    progress: Callable[[str], None] = lambda _: None,
    skips: Callable[[str, Workload], bool] = lambda *_: False,
    after_round: Callable[[Found], None] = lambda _: None,
) -> Found:
    """Measures every workload `repeats` times, the engines one after the other within each round.

    What `skips` is left out for an engine, and `after_round` gets what is there so far. Figures that are still
    unsteady then get as many rounds again.
    """
    values: dict[tuple[str, str], list[float]] = {}

    def found() -> Found:
        return {
            name: [
                Figure(work.name, work.unit, tuple(values[name, work.name]))
                for work in workloads
                if (name, work.name) in values
            ]
            for name in engines
        }

    for number in range(2 * repeats + 1):
        steady = {(name, figure.name) for name, all_ in found().items() for figure in all_ if figure.steady}
        if number > repeats and len(steady) == len(values):
            break
        for work, (name, generate) in itertools.product(workloads, engines.items()):
            if skips(name, work) or (number == 0 and not work.warms_up):
                continue
            if number > repeats and (name, work.name) in steady:
                continue
            value = work.measure(generate, number)
            if number:  # round 0 warms up
                values.setdefault((name, work.name), []).append(value)
            progress(f"round {number}: {name}, {work.name}: {value:,.1f} {work.unit}")
        if number:
            after_round(found())
    return found()


class _Prompts:
    """Random token ids; the same key gives the same prompt in every process."""

    def __init__(self, highest: int) -> None:
        self._ids = range(min(_LOWEST_ID, highest - 2), highest)

    def __call__(self, length: int, *key: object) -> list[int]:
        return random.Random(f"{length} {key}").choices(self._ids, k=length)


def _prefill(prompts: _Prompts, length: int, *, warms_up: bool) -> Workload:
    def measure(generate: Generate, number: int) -> float:
        ((first, *_),) = generate([prompts(length, "prefill", number)], [1])
        return length / first

    return Workload(f"prefill {length:,}", "tok/s", measure, warms_up)


def _decode(prompts: _Prompts, context: int, tokens: int) -> Workload:
    def measure(generate: Generate, _: int) -> float:
        (stamps,) = generate([prompts(max(1, context), "decode")], [tokens + 1])
        return tokens / (stamps[-1] - stamps[0])

    return Workload(f"decode at {context:,}", "tok/s", measure)


def _batch(prompts: _Prompts, number_of_sequences: int, tokens: int) -> Workload:
    batch = [prompts(BATCH_CONTEXT, "batch", index) for index in range(number_of_sequences)]

    def measure(generate: Generate, _: int) -> float:
        stamps = generate(batch, [tokens + 1] * number_of_sequences)
        # While all of them decode: from the first token of the last one to the end of the first one.
        begin, end = max(answer[0] for answer in stamps), min(answer[-1] for answer in stamps)
        return sum(begin < stamp <= end for answer in stamps for stamp in answer) / (end - begin)

    return Workload(f"{number_of_sequences} sequences at {BATCH_CONTEXT}", "tok/s", measure)


def _mixed(prompts: _Prompts, number_of_requests: int) -> Workload:
    """Tokens of all answers a second, from the moment when all requests come to the end of the last."""

    def measure(generate: Generate, number: int) -> float:
        rng = random.Random(f"mixed {number_of_requests} {number}")
        lengths = [
            (rng.randint(*MIXED_PROMPT), rng.randint(*MIXED_ANSWER)) for _ in range(number_of_requests)
        ]
        batch = [prompts(length, "mixed", number, index) for index, (length, _) in enumerate(lengths)]
        answers = [length for _, length in lengths]
        return sum(answers) / max(stamps[-1] for stamps in generate(batch, answers))

    return Workload(f"{number_of_requests} mixed requests", "tok/s", measure)


def _again(prompts: _Prompts, length: int) -> Workload:
    def measure(generate: Generate, _: int) -> float:
        prompt = prompts(length, "again")
        generate([prompt], [1])
        return generate([prompt], [1])[0][0] * 1e3

    return Workload(f"{length:,} tokens again, first token", "ms", measure)
