"""Computes what the scheduler chose, and picks the logits that somebody wants."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

from octavo.engine.runner import Runner
from octavo.engine.sampler import logprob_of
from octavo.engine.scheduler import Scheduled


def run_step(runner: Runner, scheduled: SequenceOf[Scheduled]) -> list[torch.Tensor | None]:
    """Computes the chunks.

    Returns:
        For each that completes its sequence, the logits `[1 + drafted tokens, vocabulary]` of its last rows.
    """
    chunks = [item.chunk for item in scheduled]
    counts = [len(chunk.token_ids) for chunk in chunks]
    lasts = [  # how many rows
        1 + chunk.num_drafted if count - chunk.num_drafted == item.sequence.num_remaining_tokens else 0
        for count, chunk, item in zip(counts, chunks, scheduled, strict=True)
    ]
    if all(item.sequence.state.request.prompt_logprobs is None for item in scheduled):
        ends = itertools.accumulate(counts)
        wanted = [row for end, last in zip(ends, lasts, strict=True) for row in range(end - last, end)]
        parts = torch.split(runner.run(chunks, torch.tensor(wanted, dtype=torch.int64)), lasts)
        return [part if last else None for part, last in zip(parts, lasts, strict=True)]
    parts = torch.split(runner.run(chunks, torch.arange(sum(counts))), counts)
    for item, part in zip(scheduled, parts, strict=True):
        _score(item, part.numpy())
    return [part[-last:] if last else None for part, last in zip(parts, lasts, strict=True)]


def _score(item: Scheduled, rows: npt.NDArray[np.float32]) -> None:
    """Notes what the model thought of the prompt's tokens, from the logits of all rows of a chunk."""
    state = item.sequence.state
    count = state.request.prompt_logprobs
    if count is None:
        return
    for position, row in enumerate(rows, item.chunk.table.num_tokens + 1):
        if position < state.num_prompt_tokens:
            state.prompt_logprobs[position] = logprob_of(row, state.request.token_ids[position], count)
