"""Runs a step: packs sequences into one forward pass over the pages of the cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels import AttentionBatch
from octavo.kv.planner import CachePlan
from octavo.kv.storage.arena import OpenArena, SealedArena
from octavo.kv.table import BlockTable, StepPlan
from octavo.models.adapter import StepContext
from octavo.models.prepare import PreparedModel
from octavo.spec import BLOCK_SIZE

_KEPT_LOGITS_BYTES = 32 << 20
_CHOICE_BYTES = 24
"""For a token of the vocabulary: weights, their order and their sums, while one token is chosen."""


@dataclass(slots=True)
class Chunk:
    """New tokens of one sequence for one step, with the room that was allocated for them.

    The last `num_drafted` of them are guesses.
    """

    token_ids: SequenceOf[int]
    table: BlockTable
    plan: StepPlan
    num_drafted: int = 0

    @property
    def sealed_block_ids(self) -> list[int]:
        """The blocks that are full after the step."""
        return self.table.block_ids[: (self.table.num_tokens + len(self.token_ids)) // BLOCK_SIZE]


class Runner:
    """A prepared model and the memory of its pages."""

    def __init__(self, prepared: PreparedModel, plan: CachePlan, *, device: str, debug_fill: bool) -> None:
        self._prepared = prepared
        self._device = device
        num_layers = prepared.spec.num_layers
        self.sealed = SealedArena(
            num_layers=num_layers,
            page_bytes=plan.page_bytes,
            num_blocks=plan.num_blocks,
            slab_bytes=plan.slab_bytes,
            device=device,
            debug_fill=debug_fill,
        )
        self.opened = OpenArena(
            num_layers=num_layers,
            page_bytes=plan.open_page_bytes,
            num_slots=plan.num_slots,
            device=device,
            debug_fill=debug_fill,
        )
        fused = prepared.fused
        self._logits = None if fused is None else torch.empty(0, fused.vocab_size, dtype=torch.float32)
        self.num_bytes_read = 0
        """Bytes of sealed pages that attention has read so far."""

    @property
    def workspace_bytes(self) -> int:
        width = int(self._prepared.model.config.vocab_size)
        kept = 0 if self._logits is None else self._logits.nbytes
        return self._prepared.workspace_bytes + kept + _CHOICE_BYTES * width

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the cache held from the system."""
        return self.sealed.allocated_bytes + self.opened.allocated_bytes

    def run(self, chunks: SequenceOf[Chunk], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the chunks' tokens.

        Args:
            rows: int64 `[R]`, the tokens of the step whose logits are wanted; without it, each chunk's last one.

        Returns:
            float32 logits `[R, vocabulary]`, on the CPU. They are there until the next run.
        """
        for chunk in chunks:
            self._make_room(chunk)
        ids: list[int] = []
        positions: list[int] = []
        for chunk in chunks:
            start = chunk.table.num_tokens
            ids += chunk.token_ids
            positions += range(start, start + len(chunk.token_ids))
        batch = self._batch(chunks)
        kernels = self._prepared.kernels
        step = kernels.begin(batch)
        context = StepContext(
            step=step,
            sealed=self.sealed.layers,
            opened=self.opened.layers,
            num_rows=len(ids),
        )
        if rows is None:
            rows = torch.from_numpy(batch.query_starts[1:] - 1)
        logits = self._prepared.forward(
            torch.tensor(ids, device=self._device),
            torch.tensor(positions, device=self._device),
            rows.to(self._device),
            context,
            self._room_for(len(rows)),
        )
        self.num_bytes_read += step.bytes_read
        return logits.float().cpu()

    def _room_for(self, num_rows: int) -> torch.Tensor | None:
        """Where that many rows of logits may go: megabytes, which the system would have to clear anew for each step."""
        if self._logits is None:
            return None
        if len(self._logits) < num_rows:
            shape = num_rows, self._logits.shape[1]
            if 4 * math.prod(shape) > _KEPT_LOGITS_BYTES:
                return None
            self._logits = torch.empty(shape, dtype=torch.float32)
        return self._logits[:num_rows]

    def _make_room(self, chunk: Chunk) -> None:
        first_new = chunk.table.num_tokens // BLOCK_SIZE
        self.sealed.touch(chunk.sealed_block_ids[first_new:])
        self.opened.touch([chunk.plan.slot])
        if chunk.plan.copy_from is not None:
            self.opened.copy(chunk.plan.copy_from, chunk.plan.slot)

    def _batch(self, chunks: SequenceOf[Chunk]) -> AttentionBatch:
        tables = [chunk.sealed_block_ids for chunk in chunks]
        per_slab, slab_bytes = self.sealed.blocks_per_slab, self.sealed.slab_bytes
        block_ids = np.array(list(itertools.chain.from_iterable(tables)), dtype=np.int64)
        return AttentionBatch(
            query_starts=_starts([len(chunk.token_ids) for chunk in chunks]),
            context_lens=np.array([chunk.table.num_tokens for chunk in chunks], dtype=np.int64),
            table_starts=_starts([len(table) for table in tables]),
            block_offsets=block_ids // per_slab * slab_bytes + block_ids % per_slab * self.sealed.page_bytes,
            slots=np.array([self.opened.offset(chunk.plan.slot) for chunk in chunks], dtype=np.int64),
        )


def _starts(lengths: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([0, *itertools.accumulate(lengths)], dtype=np.int64)
