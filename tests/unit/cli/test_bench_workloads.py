"""What the benchmarks ask of an engine, and the figures they make of its times."""

from __future__ import annotations

import statistics

import pytest

from octavo.cli.bench_workloads import UNSTEADY, Figure, take_turns, workloads


class Engine:
    """Computes 100 prompt tokens a second and then a token a second; remembers what it was asked."""

    def __init__(self, lead: float = 0.0) -> None:
        self.asked: list[tuple[list[list[int]], list[int]]] = []
        self._lead = lead

    def __call__(self, prompts: list[list[int]], tokens: list[int]) -> list[list[float]]:
        self.asked.append((prompts, tokens))
        firsts = [len(prompt) / 100 + index * self._lead for index, prompt in enumerate(prompts)]
        return [
            [first + token for token in range(number)] for first, number in zip(firsts, tokens, strict=True)
        ]


def figures(engine: Engine, **settings: object) -> dict[str, Figure]:
    given = {"prefill": (), "decode": (), "sequences": (), "tokens": 4, "again": 0} | settings
    given["prefill"] = given["prefill"] or (7,)
    works = workloads(**given)  # type: ignore[arg-type]
    return {figure.name: figure for figure in take_turns({"it": engine}, works, 2)["it"]}


def test_rates_and_times_come_from_the_stamps() -> None:
    found = figures(Engine(), prefill=(50, 200), decode=(0, 32), sequences=(3,), again=20)
    assert {name: (round(figure.median, 6), figure.unit) for name, figure in found.items()} == {
        "prefill 50": (100.0, "tok/s"),
        "prefill 200": (100.0, "tok/s"),
        "decode at 0": (1.0, "tok/s"),
        "decode at 32": (1.0, "tok/s"),
        "3 sequences at 128": (3.0, "tok/s"),
        "20 tokens again, first token": (200.0, "ms"),
    }


def test_a_batch_counts_only_while_all_of_it_decodes() -> None:
    # The third sequence starts 1.5 s after the first: of 5 tokens each, [1.5, 4] s is common to all.
    rate = figures(Engine(lead=0.75), sequences=(3,))["3 sequences at 128"].median
    assert rate == pytest.approx((3 + 3 + 2) / 2.5)


def test_mixed_requests_count_all_tokens_until_the_last_has_come() -> None:
    engine = Engine()
    rate = figures(engine, mixed=(8,))["8 mixed requests"].median
    rounds = [(prompts, tokens) for prompts, tokens in engine.asked if len(prompts) == 8]
    assert len({tuple(tokens) for _, tokens in rounds}) == len(rounds) >= 3
    ends = [
        max(len(prompt) / 100 + number - 1 for prompt, number in zip(prompts, tokens, strict=True))
        for prompts, tokens in rounds
    ]
    rates = [sum(tokens) / end for (_, tokens), end in zip(rounds[1:], ends[1:], strict=True)]
    assert rate == pytest.approx(statistics.median(rates))
    assert all(30 <= len(prompt) <= 1500 for prompts, _ in rounds for prompt in prompts)
    assert all(20 <= number <= 200 for _, tokens in rounds for number in tokens)


def test_computed_prompts_are_new_each_round_and_reused_ones_are_not() -> None:
    engine = Engine()
    figures(engine, prefill=(10,), decode=(20,), again=30)
    prompts = {length: [p for (p, *_), _ in engine.asked if len(p) == length] for length in (10, 20, 30)}
    assert [len(asked) for asked in prompts.values()] == [3, 3, 6]
    assert len({tuple(prompt) for prompt in prompts[10]}) == 3
    assert len({tuple(prompt) for prompt in prompts[20]}) == 1
    assert len({tuple(prompt) for prompt in prompts[30]}) == 1


def test_engines_take_turns_within_a_round_and_a_skipped_workload_is_never_asked() -> None:
    said: list[str] = []
    works = workloads((10, 20), (), (), tokens=2, again=0)
    one, two = Engine(), Engine()
    found = take_turns(
        {"one": one, "two": two},
        works,
        1,
        said.append,
        lambda name, w: (name, w.name) == ("two", "prefill 20"),
    )
    assert [line.partition(" tok")[0] for line in said] == [
        "round 0: one, prefill 10: 100.0",
        "round 0: two, prefill 10: 100.0",
        "round 1: one, prefill 10: 100.0",
        "round 1: two, prefill 10: 100.0",
        "round 1: one, prefill 20: 100.0",
    ]
    assert [figure.name for figure in found["two"]] == ["prefill 10"]
    assert all(len(prompt) == 10 for (prompt,), _ in two.asked)


def test_after_each_round_there_is_what_was_measured_so_far() -> None:
    rounds: list[list[int]] = []
    works = workloads((10, 20), (), (), tokens=2, again=0)
    take_turns(
        {"it": Engine()},
        works,
        3,
        after_round=lambda found: rounds.append([len(f.values) for f in found["it"]]),
    )
    assert rounds == [[1, 1], [2, 2], [3, 3]]


def test_an_unsteady_figure_is_measured_twice_as_often() -> None:
    class Unsteady(Engine):
        def __call__(self, prompts: list[list[int]], tokens: list[int]) -> list[list[float]]:
            super().__call__(prompts, tokens)
            return [[1.0 if len(self.asked) % 2 else 2.0]]

    works = workloads((10,), (), (), tokens=2, again=0)
    steady = take_turns({"it": Engine()}, works, 4)["it"][0]
    unsteady = take_turns({"it": Unsteady()}, works, 4)["it"][0]
    assert (len(steady.values), len(unsteady.values)) == (4, 8)
    assert steady.spread == 0 < UNSTEADY < unsteady.spread


def test_the_spread_is_the_middle_half() -> None:
    assert Figure("", "ms", (1.0, 9.0, 10.0, 11.0, 99.0)).spread == pytest.approx(0.2)
