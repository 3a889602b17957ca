"""Samplers and rows of logits for tests, and a naive reference: plain Python over the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from octavo.config import SamplingParams
from octavo.engine.sampler import TokenSampler

VOCAB = 49_152


def make(
    vocab_size: int, *, seed: int = 1, sample_index: int = 0, prompt: Sequence[int] = (), **params: object
) -> TokenSampler:
    return TokenSampler(
        SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
        sample_index=sample_index,
        prompt_token_ids=prompt,
        vocab_size=vocab_size,
    )


def row(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def random_row(seed: int, vocab_size: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, spread, vocab_size).astype(np.float32))


def naive_adjusted(
    values: Sequence[float], params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> list[float]:
    adjusted = [float(np.float32(value)) for value in values]
    for token_id, bias in params.logit_bias.items():
        adjusted[token_id] += bias
    for token_id in range(len(adjusted)):
        if token_id in prompt or token_id in answer:
            if adjusted[token_id] > 0:
                adjusted[token_id] /= params.repetition_penalty
            else:
                adjusted[token_id] *= params.repetition_penalty
        if token_id in answer:
            adjusted[token_id] -= params.frequency_penalty * answer.count(token_id) + params.presence_penalty
    return [float(np.float32(value)) for value in adjusted]


def naive_kept(
    values: Sequence[float], params: SamplingParams, factor: float = 1.0
) -> list[tuple[int, float]]:
    """The tokens that are left and their weights, most likely first; `factor` moves the limits."""
    order = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    top = values[order[0]]
    kept = [(token_id, math.exp((values[token_id] - top) / params.temperature)) for token_id in order]
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        total = sum(weight for _, weight in kept)
        reached, count = kept[0][1], 1
        while count < len(kept) and reached < params.top_p * factor * total:
            reached += kept[count][1]
            count += 1
        kept = kept[:count]
    return [(token_id, weight) for token_id, weight in kept if weight == 1 or weight >= params.min_p * factor]


def naive_pick(kept: list[tuple[int, float]], noise: float) -> int:
    """The place, in `kept`, of the token that `noise` picks."""
    total = sum(weight for _, weight in kept)
    reached, last = 0.0, 0
    for place, (_, weight) in enumerate(kept):
        reached += weight
        if reached > noise * total:
            return place
        last = place if weight > 0 else last
    return last


FACTORS = (1.0, 1 - 1e-12, 1 + 1e-12)


def naive_choices(values: Sequence[float], params: SamplingParams, noises: Sequence[float]) -> list[set[int]]:
    """For each noise the token, and others only where a limit is within rounding of a border."""
    filtered = [naive_kept(values, params, factor) for factor in FACTORS]
    longest = [token_id for token_id, _ in max(filtered, key=len)]
    choices = []
    for noise in noises:
        places = [naive_pick(kept, noise * factor) for kept in filtered for factor in FACTORS]
        choices.append(set(longest[min(places) : max(places) + 1]))
    return choices


def naive_logprobs(values: Sequence[float]) -> list[float]:
    norm = math.log(math.fsum(math.exp(value - max(values)) for value in values)) + max(values)
    return [value - norm for value in values]
