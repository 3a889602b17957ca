"""What one step's attention needs to know, and what a kernel set must offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.spec import PageShape

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one packed step, in the order of their rows. All arrays are int64.

    Attributes:
        query_starts: `[num_seqs + 1]` first row of each sequence, and the number of rows.
        context_lens: `[num_seqs]` tokens computed before this step.
        table_starts: `[num_seqs + 1]` first entry of each sequence in `block_offsets`.
        block_offsets: bytes from a layer's first sealed page to the sealed page of each block, those that
            this step fills included.
        slots: `[num_seqs]` bytes from a layer's first open page to the sequence's own: the rows of the block
            in which the step starts, and afterwards those of the block in which it ends.
    """

    query_starts: Ints
    context_lens: Ints
    table_starts: Ints
    block_offsets: Ints
    slots: Ints

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    @property
    def num_rows(self) -> int:
        return int(self.query_starts[-1])


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer's scores are made.

    Attributes:
        scale: factor of the products.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 leaves them.
        window: a token sees itself and the `window - 1` tokens before it; 0 for all.
        sinks: float32 `[num_heads]`: a score that takes probability and gives no value.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: torch.Tensor | None = None


class SealedFormat(Protocol):
    """What kernels need to know of a sealed page's format; see `octavo.formats`."""

    @property
    def native_id(self) -> int: ...

    def page_bytes(self, page: PageShape) -> int: ...
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor: ...
    def decode(self, data: torch.Tensor, page: PageShape) -> tuple[torch.Tensor, torch.Tensor]: ...


class AttentionStep(Protocol):
    """One step's attention, asked once per layer."""

    @property
    def bytes_read(self) -> int:
        """Bytes of sealed pages that were read so far, all layers. What sequences share may be read once for all."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sealed: torch.Tensor,
        opened: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Stores the rows' keys and values, seals the blocks that they fill, and attends.

        Args:
            q: `[rows, num_heads, head_dim]`, rotated, in the compute dtype.
            k, v: `[rows, num_kv_heads, head_dim]`, not repeated.
            sealed, opened: uint8, this layer's sealed and open pages.
            scoring: how scores are made of products.

        Returns:
            `[rows, num_heads, v_head_dim]` in the compute dtype.
        """
        ...


class AttentionKernels(Protocol):
    """A kernel set for one page shape and compute dtype."""

    @property
    def name(self) -> str: ...

    @property
    def workspace_bytes(self) -> int: ...

    def begin(self, batch: AttentionBatch) -> AttentionStep:
        """Prepares a step; the earlier step's object is no longer valid."""
        ...
