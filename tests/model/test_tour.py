"""The tour shows what really happens: its numbers are compared with the cache and with arithmetic done anew."""

from __future__ import annotations

import pytest
import torch
from families import tiny_loaded

from octavo.engine.tour import take_tour
from octavo.errors import InvalidRequest

PROMPT = list(range(10, 22))


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt_oss"])
def tour(request):
    """Of grouped queries, of soft caps and windows, and of sinks."""
    return take_tour(tiny_loaded(request.param), PROMPT, 40)


def test_what_is_kept_is_what_the_layers_gave(tour) -> None:
    assert tour.is_stored
    first = tour.steps[0]
    assert (first.token_ids, len(first.layers)) == (PROMPT, tour.spec.num_layers)
    assert torch.equal(tour.first_key, first.layers[0].key[0, 0])


def test_a_head_worked_out_from_the_cache_is_the_kernels_own(tour) -> None:
    assert tour.attention.error < 1e-5
    weights = tour.attention.weights
    assert len(weights) == len(tour.attention.scores) == len(PROMPT) + 1
    assert float(weights.sum()) <= 1 + 1e-5


def test_blocks_fill_and_are_sealed(tour) -> None:
    assert [len(step.token_ids) for step in tour.steps] == [12] + [1] * (len(tour.steps) - 1)
    for step in tour.steps:
        assert step.num_sealed * 32 + step.num_open_rows == step.num_tokens
    assert tour.steps[-1].num_sealed == 1
    assert 0 < tour.sealing.error < 0.05 * tour.sealing.largest
    assert tour.sealing.sealed_bytes < tour.sealing.raw_bytes


def test_the_same_again_computes_one_token(tour) -> None:
    assert tour.again.usage.computed_tokens == 1
    assert tour.memory.kv_reusable_bytes > 0


@pytest.mark.parametrize("length", [1, 32])
def test_texts_that_do_not_suit_are_refused(length: int) -> None:
    with pytest.raises(InvalidRequest, match="2 to 31 tokens"):
        take_tour(tiny_loaded("llama"), list(range(10, 10 + length)), 40)
