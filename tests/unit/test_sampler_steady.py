"""What must not move the choice of a token, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from octavo.errors import InvalidRequest, NumericalError

from .sampler_reference import VOCAB, make, random_row, row

pytestmark = pytest.mark.filterwarnings("error")

# --- nothing else moves the choice

SETTINGS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "logprobs": 5},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.95, "logprobs": 3},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.2, "prompt": range(500)},
]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_number_of_threads_moves_nothing(threads: Callable[[int], None]) -> None:
    logits = [random_row(seed, VOCAB, spread) for seed in range(2) for spread in (0.5, 3.0)]
    results = []
    for num_threads in (1, 2, 3, 5):
        threads(num_threads)
        results.append([make(VOCAB, **kw).sample(one, i) for kw in SETTINGS for i, one in enumerate(logits)])
    assert results[0] == results[1] == results[2] == results[3]


def test_neighbours_in_the_batch_move_nothing() -> None:
    one = random_row(1)
    expected = [make(VOCAB, **kw).sample(one, 40) for kw in SETTINGS]
    batch = torch.full((7, VOCAB), math.nan)
    batch[3] = one
    unaligned = torch.full((VOCAB + 1,), math.nan)
    unaligned[1:] = one
    strided = torch.full((VOCAB, 2), math.nan)
    strided[:, 1] = one
    for same in (batch[3], unaligned[1:], strided[:, 1]):
        assert [make(VOCAB, **kw).sample(same, 40) for kw in SETTINGS] == expected


def test_sampling_changes_nothing() -> None:
    logits = random_row(2, 100)
    before = logits.clone()
    sampler = make(
        100, temperature=1.0, repetition_penalty=1.3, presence_penalty=1.0, logit_bias={3: 2.0}, prompt=[1, 2]
    )
    sampler.accept(5)
    first = [sampler.sample(logits, position) for position in range(30)]
    assert [sampler.sample(logits, position) for position in reversed(range(30))] == first[::-1]
    assert torch.equal(logits, before)


def test_the_same_history_gives_the_same_answer_after_a_restart() -> None:
    def answer(given: Sequence[int]) -> list[int]:
        sampler = make(
            200, temperature=1.2, frequency_penalty=0.7, repetition_penalty=1.1, prompt=[3, 4], seed=9
        )
        ids = list(given)
        for token_id in ids:
            sampler.accept(token_id)
        while len(ids) < 60:
            ids.append(sampler.sample(random_row(len(ids), 200), 2 + len(ids)).token_id)
            sampler.accept(ids[-1])
        return ids

    whole = answer([])
    assert answer(whole[:23]) == whole
    assert len(set(whole)) > 20


def test_seed_sample_index_and_position_each_give_other_tokens() -> None:
    logits = random_row(6, 1000, 0.1)

    def tokens(seed: int, sample_index: int, start: int) -> list[int]:
        sampler = make(1000, temperature=1.0, seed=seed, sample_index=sample_index)
        return [sampler.sample(logits, start + i).token_id for i in range(8)]

    first = tokens(1, 0, 0)
    assert first == tokens(1, 0, 0)
    assert tokens(1, 0, 3)[:5] == first[3:]
    assert first not in (tokens(2, 0, 0), tokens(1, 1, 0), tokens(1, 0, 8))


# --- what is refused


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 48, 49])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.1, "logit_bias": {0: -math.inf}}]
)
def test_nan_and_infinity_are_refused(bad: float, place: int, params: dict[str, object]) -> None:
    logits = random_row(1, 50)
    logits[place] = bad
    with pytest.raises(NumericalError, match=r"position 12 is (nan|inf), .* fp32"):
        make(50, **params).sample(logits, 12)


def test_nan_among_the_ruled_out_is_refused() -> None:
    with pytest.raises(NumericalError):
        make(3).sample(row([-math.inf, math.nan, -math.inf]), 0)


def test_no_possible_token_is_refused() -> None:
    with pytest.raises(NumericalError, match="is -inf"):
        make(3, temperature=1.0).sample(row([-math.inf] * 3), 0)
    ruled_out = make(3, logit_bias={0: -math.inf, 1: -math.inf})
    assert ruled_out.sample(row([1.0, 2.0, 3.0]), 0).token_id == 2
    with pytest.raises(InvalidRequest, match="no token to choose at position 4"):
        ruled_out.sample(row([1.0, 2.0, -math.inf]), 4)


def test_penalties_beyond_the_number_range_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="smaller numbers"):
        make(2, repetition_penalty=1e-300, prompt=[1]).sample(row([1.0, 2.0]), 0)
    opposed = make(2, presence_penalty=1e308, frequency_penalty=-1e308)
    for _ in range(5):
        opposed.accept(0)
    with pytest.raises(InvalidRequest):
        opposed.sample(row([1.0, 2.0]), 0)
    with pytest.raises(InvalidRequest):
        opposed.sample(row([-math.inf, 2.0]), 0)


def test_tokens_ruled_out_are_never_drawn() -> None:
    values = [-math.inf if i % 3 else 0.1 * i for i in range(30)]
    sampler = make(30, temperature=50.0)
    assert {sampler.sample(row(values), position).token_id for position in range(500)} == set(range(0, 30, 3))


def test_bias_is_checked_when_the_sampler_is_made() -> None:
    for token_id in (-1, 10):
        with pytest.raises(InvalidRequest, match=f"the token {token_id}; the model has tokens from 0 to 9"):
            make(10, logit_bias={token_id: 1.0})
    with pytest.raises(InvalidRequest, match="token 2 is infinite"):
        make(10, logit_bias={2: math.inf})


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 4 is wanted"):
        make(4).sample(row([1.0, 2.0]), 0)
