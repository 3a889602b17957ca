"""Which token is chosen: compared with a naive reference and with the distribution that is wanted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import SamplingParams
from octavo.engine import sampler as sampler_module
from octavo.engine.sampler import Sample, draw_seed, uniform

from .sampler_reference import (
    make,
    naive_adjusted,
    naive_choices,
    naive_kept,
    naive_logprobs,
    random_row,
    row,
)

pytestmark = pytest.mark.filterwarnings("error")

LARGEST_NOISE = 1 - 2.0**-53


@pytest.fixture
def set_noise(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda noise: monkeypatch.setattr(sampler_module, "uniform", lambda *_: noise)


logit = st.one_of(st.integers(-24, 24).map(lambda n: n / 4), st.floats(-20, 20, width=32), st.just(-math.inf))
rows = st.lists(logit, min_size=1, max_size=40).filter(lambda values: max(values) > -math.inf)
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 1.5, 4.0]),
        "top_k": st.one_of(st.just(0), st.integers(1, 45)),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    }
)
noises = st.one_of(st.just(0.0), st.just(LARGEST_NOISE), st.floats(0, LARGEST_NOISE))


@settings(max_examples=500)
@given(values=rows, filters=filters, noise=noises)
def test_filters_and_draw_agree_with_the_reference(
    values: list[float], filters: dict[str, float], noise: float
) -> None:
    (expected,) = naive_choices(values, SamplingParams(**filters), [noise])  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "uniform", lambda *_: noise)
        assert make(len(values), **filters).sample(row(values), 0).token_id in expected


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 1000},
        {"top_p": 0.2},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"min_p": 0.3},
        {"min_p": 0.001},
        {"top_k": 3000, "top_p": 0.8, "min_p": 0.05},
        {"top_p": 0.8, "min_p": 0.5},
    ],
)
def test_large_vocabularies_agree_with_the_reference(
    filters: dict[str, float], spread: float, set_noise: Callable[[float], None]
) -> None:
    logits = random_row(5, 6000, spread)  # more than one growth of the ordered head
    logits[::10] = -math.inf
    sampler = make(6000, temperature=1.0, **filters)
    params = SamplingParams(temperature=1.0, **filters)  # type: ignore[arg-type]
    noises = (0.0, 0.0317, 0.7373, 0.9999, LARGEST_NOISE)
    for noise, expected in zip(noises, naive_choices(logits.tolist(), params, noises), strict=True):
        set_noise(noise)
        assert sampler.sample(logits, 0).token_id in expected


# --- greedy


@settings(max_examples=200)
@given(values=rows)
def test_temperature_zero_takes_the_first_largest(values: list[float]) -> None:
    expected = min(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    sampler = make(len(values), top_k=3, top_p=0.1, min_p=0.5, seed=4)
    assert sampler.sample(row(values), 17) == Sample(expected)


def test_greedy_follows_bias_and_penalties() -> None:
    logits = row([1.0, 3.0, 2.0, 3.0])
    assert make(4).sample(logits, 0).token_id == 1
    assert make(4, logit_bias={3: 0.5}).sample(logits, 0).token_id == 3
    assert make(4, logit_bias={1: -math.inf}).sample(logits, 0).token_id == 3
    assert make(4, repetition_penalty=2.0, prompt=[1, 3]).sample(logits, 0).token_id == 2


def test_equal_tokens_go_by_their_id(set_noise: Callable[[float], None]) -> None:
    logits = row([0.0, -0.0, 5.0, 0.0, 5.0])
    for noise, token_id in ((0.0, 2), (0.5, 4)):
        set_noise(noise)
        assert make(5, temperature=1.0, top_k=2).sample(logits, 0).token_id == token_id
    drawn = []
    for k in range(1, 6):
        set_noise(LARGEST_NOISE)
        drawn.append(make(5, temperature=1e9, top_k=k).sample(logits, 0).token_id)
    assert drawn == [2, 4, 0, 1, 3]


def test_noise_on_a_border_takes_the_next_token(set_noise: Callable[[float], None]) -> None:
    for noise, token_id in ((0.0, 0), (0.25, 1), (0.5, 2), (0.75, 3), (LARGEST_NOISE, 3)):
        set_noise(noise)
        assert make(4, temperature=1.0).sample(row([1.0] * 4), 0).token_id == token_id


def test_top_p_keeps_exactly_what_reaches_it_and_at_least_one_token(
    set_noise: Callable[[float], None],
) -> None:
    set_noise(LARGEST_NOISE)
    for top_p, last in ((1e-9, 0), (0.25, 0), (0.26, 1), (0.5, 1), (0.75, 2), (0.76, 3)):
        assert make(4, temperature=1.0, top_p=top_p).sample(row([1.0] * 4), 0).token_id == last


def test_top_p_is_a_share_of_what_top_k_left(set_noise: Callable[[float], None]) -> None:
    set_noise(LARGEST_NOISE)
    logits = row([math.log(0.4), math.log(0.3), math.log(0.2), math.log(0.1)])
    # 0.4 is 57 % of the two left by top_k, and less than half of all.
    assert make(4, temperature=1.0, top_p=0.5, top_k=2).sample(logits, 0).token_id == 0
    assert make(4, temperature=1.0, top_p=0.5).sample(logits, 0).token_id == 1


def test_extreme_temperatures() -> None:
    logits = row([-3e38, 3e38, 1.0, 3e38])
    assert {make(4, temperature=5e-324).sample(logits, i).token_id for i in range(50)} == {1, 3}
    logits = row([-100.0, 100.0, -math.inf])
    assert {make(3, temperature=1e300).sample(logits, i).token_id for i in range(50)} == {0, 1}


# --- distribution


def chi_square_bound(degrees: int) -> float:
    """About one in a million samples of the right distribution lies above (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.75 * math.sqrt(spread)) ** 3


def chi_square(counts: Sequence[float], expected: Sequence[float]) -> float:
    return sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution(filters: dict[str, float]) -> None:
    logits = random_row(3, 30, 1.2)
    num_draws = 20_000
    sampler = make(30, seed=77, **filters)
    counts = Counter(sampler.sample(logits, position).token_id for position in range(num_draws))
    kept = naive_kept(logits.tolist(), SamplingParams(**filters))  # type: ignore[arg-type]
    assert set(counts) <= {token_id for token_id, _ in kept}
    total = sum(weight for _, weight in kept)
    observed = [counts[token_id] for token_id, _ in kept]
    expected = [num_draws * weight / total for _, weight in kept]
    while expected[-2] < 20:  # the rarest together
        observed[-2:] = [sum(observed[-2:])]
        expected[-2:] = [sum(expected[-2:])]
    assert len(expected) > 3
    assert chi_square(observed, expected) < chi_square_bound(len(expected) - 1)


@pytest.mark.parametrize("varied", ["seed", "sample_index", "position"])
def test_noise_is_uniform_and_independent_along_each_argument(varied: str) -> None:
    fixed = {"seed": 5, "sample_index": 2, "position": 9}
    noise = np.array([uniform(**{**fixed, varied: i}) for i in range(20_000)])
    assert 0 <= noise.min() < 0.001
    assert 0.999 < noise.max() < 1
    bins = np.histogram(noise, 50, (0, 1))[0]
    assert chi_square(bins, [400] * 50) < chi_square_bound(49)
    pairs = np.histogram2d(noise[:-1], noise[1:], 8, ((0, 1), (0, 1)))[0].ravel()
    assert chi_square(pairs, [19_999 / 64] * 64) < chi_square_bound(63)


def test_noise_is_the_same_in_every_release() -> None:
    assert uniform(0, 0, 0) == 0.7530616218932944
    assert uniform(2**70, 3, 4096) == 0.7444442457322836
    assert uniform(-1, 0, 12) != uniform(1, 0, 12)
    assert len({uniform(a, b, c) for a in range(12) for b in range(12) for c in range(12)}) == 12**3


def test_drawn_seeds_differ() -> None:
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**32 for seed in seeds)


# --- bias and penalties


@settings(max_examples=200)
@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    data=st.data(),
    repetition=st.sampled_from([1.0, 0.8, 1.3]),
    presence=st.sampled_from([0.0, -0.5, 1.5]),
    frequency=st.sampled_from([0.0, -0.25, 0.75]),
)
def test_bias_and_penalties_agree_with_the_formulas(
    values: list[float], data: st.DataObject, repetition: float, presence: float, frequency: float
) -> None:
    token = st.integers(0, len(values) - 1)
    prompt = data.draw(st.lists(token, max_size=6))
    answer = data.draw(st.lists(token, max_size=6))
    params = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "logit_bias": data.draw(st.dictionaries(token, st.floats(-5, 5), max_size=3)),
        "logprobs": len(values),
    }
    sampler = make(len(values), prompt=prompt, **params)
    for token_id in answer:
        sampler.accept(token_id)
    result = sampler.sample(row(values), 0)
    adjusted = naive_adjusted(values, SamplingParams(**params), prompt, answer)  # type: ignore[arg-type]
    expected = naive_logprobs(adjusted)
    assert result.logprob is not None
    reported = dict(result.logprob.top)
    assert sorted(reported) == list(range(len(values)))
    assert [reported[i] for i in range(len(values))] == pytest.approx(expected, abs=1e-5)
    assert adjusted[result.token_id] == pytest.approx(max(adjusted), abs=1e-5)


def test_the_order_is_bias_then_repetition_then_presence_and_frequency() -> None:
    sampler = make(
        2,
        prompt=[0],
        logit_bias={0: 4.0},
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logprobs=0,
    )
    for _ in range(3):
        sampler.accept(0)
    result = sampler.sample(row([6.0, 0.0]), 0)  # (6 + 4) / 2 - 1 - 3 * 0.5 = 2.5
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(-math.log1p(math.exp(-2.5)))


def test_presence_and_frequency_leave_the_prompt_alone() -> None:
    sampler = make(3, prompt=[1, 1], presence_penalty=9.0, frequency_penalty=9.0, repetition_penalty=1.01)
    logits = row([0.0, 5.0, 1.0])
    assert sampler.sample(logits, 0).token_id == 1
    sampler.accept(1)
    assert sampler.sample(logits, 0).token_id == 2


def test_a_long_history() -> None:
    sampler = make(1000, prompt=range(0, 300, 3), frequency_penalty=1.0, repetition_penalty=1.5, logprobs=128)
    answer = [(11 * i) % 700 for i in range(1500)]
    for token_id in answer:
        sampler.accept(token_id)
    logits = random_row(8, 1000, 1.0)
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5)
    expected = naive_logprobs(naive_adjusted(logits.tolist(), params, range(0, 300, 3), answer))
    result = sampler.sample(logits, 0)
    assert result.logprob is not None
    assert len(result.logprob.top) == 128
    for token_id, logprob in result.logprob.top:
        assert logprob == pytest.approx(expected[token_id], abs=1e-5)


# --- log-probabilities


def test_logprobs_are_of_the_model_and_not_of_the_filters() -> None:
    logits = random_row(4, 50, 1.0)
    expected = naive_logprobs(logits.tolist())
    order = sorted(range(50), key=lambda token_id: -expected[token_id])
    for filters in ({}, {"temperature": 3.0, "top_k": 2, "min_p": 0.2}):
        result = make(50, logprobs=5, **filters).sample(logits, 3)
        assert result.logprob is not None
        assert result.logprob.token_id == result.token_id
        assert result.logprob.logprob == pytest.approx(expected[result.token_id])
        assert [token_id for token_id, _ in result.logprob.top] == order[:5]
        assert [value for _, value in result.logprob.top] == pytest.approx([expected[i] for i in order[:5]])


def test_logprobs_are_reported_only_if_asked_for() -> None:
    logits = row([0.0, 1.0, -math.inf])
    assert make(3).sample(logits, 0).logprob is None
    alone = make(3, logprobs=0).sample(logits, 0).logprob
    assert alone is not None
    assert alone.top == ()
    more = make(3, logprobs=10).sample(logits, 0).logprob
    assert more is not None
    assert [token_id for token_id, _ in more.top] == [1, 0]  # what cannot come is left out
