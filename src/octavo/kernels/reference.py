"""The oracle: the same rules as the native kernels in plain torch, on any device.

Slow, written to be read. It keeps the absolute grids of blocks and partitions, but torch's own matrix
products may round a row differently in another batch, so only the native kernels promise equal bits.
"""

from __future__ import annotations

import math

import torch

from octavo.kernels.batch import AttentionBatch, Scoring, SealedFormat
from octavo.spec import BLOCK_SIZE, PARTITION_BLOCKS, PageShape

_FLOOR = -1e30  # below every score, and finite: a difference to it is never NaN


def activate(kind: str, x: torch.Tensor) -> torch.Tensor:
    """`silu`, `gelu_tanh`, `gelu` or `quick_gelu` of each element, computed in float32."""
    y = x.float()
    if kind == "silu":
        y = y * torch.sigmoid(y)
    elif kind == "quick_gelu":
        y = y * torch.sigmoid(1.702 * y)
    else:
        y = torch.nn.functional.gelu(y, approximate="tanh" if kind == "gelu_tanh" else "none")
    return y.to(x.dtype)


class ReferenceStep:
    """See `AttentionStep`."""

    def __init__(self, kernels: ReferenceKernels, batch: AttentionBatch) -> None:
        self._page = kernels.page
        self._dtype = kernels.dtype
        self._format = kernels.sealed_format
        self._page_bytes = self._format.page_bytes(self._page)
        self._batch = batch
        self.bytes_read = 0

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sealed: torch.Tensor,
        opened: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        out = torch.empty((*q.shape[:2], self._page.v_head_dim), dtype=q.dtype, device=q.device)
        batch = self._batch
        for s in range(batch.num_seqs):
            rows = slice(int(batch.query_starts[s]), int(batch.query_starts[s + 1]))
            table = batch.block_offsets[int(batch.table_starts[s]) : int(batch.table_starts[s + 1])].tolist()
            slot = int(batch.slots[s])
            context = int(batch.context_lens[s])
            out[rows] = self._sequence(
                q[rows], k[rows], v[rows], context, table, slot, sealed, opened, scoring
            )
        return out

    def _sequence(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: int,
        table: list[int],
        slot: int,
        sealed: torch.Tensor,
        opened: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        length = context + len(q)
        outs = []
        raw_page = opened[slot:]
        earlier = [self._decode(sealed, at) for at in table[: context // BLOCK_SIZE]]
        for block in range(context // BLOCK_SIZE, (length - 1) // BLOCK_SIZE + 1):
            start = block * BLOCK_SIZE
            first, last = max(context, start), min(length, start + BLOCK_SIZE)
            rows = slice(first - context, last - context)
            if block > context // BLOCK_SIZE:
                raw_page = torch.zeros(self._open_bytes, dtype=torch.uint8, device=q.device)
            raw_keys, raw_values = self._raw_views(raw_page)
            raw_keys[:, :, first - start : last - start] = k[rows].permute(1, 2, 0)
            raw_values[:, first - start : last - start] = v[rows].transpose(0, 1)
            own = raw_keys[:, :, : last - start].float(), raw_values[:, : last - start].float()
            outs.append(self._block(q[rows], first, [*earlier, own], scoring))
            if last == start + BLOCK_SIZE:
                sealed[table[block] : table[block] + self._page_bytes] = self._format.encode(
                    raw_keys, raw_values
                )
                earlier.append(self._decode(sealed, table[block]))
        if (length - 1) // BLOCK_SIZE > context // BLOCK_SIZE:
            opened[slot : slot + self._open_bytes] = raw_page
        return torch.cat(outs)

    @property
    def _open_bytes(self) -> int:
        return self._page.raw_bytes("bf16" if self._dtype == torch.bfloat16 else "fp32")

    def _decode(self, sealed: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.bytes_read += self._page_bytes
        return self._format.decode(sealed[offset : offset + self._page_bytes], self._page)

    def _raw_views(self, page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """An open page's keys `[num_kv_heads, head_dim, 32]` and values `[num_kv_heads, 32, v_head_dim]`."""
        shape = self._page
        heads = page[: self._open_bytes].view(self._dtype).view(shape.num_kv_heads, -1)
        split = shape.head_dim * BLOCK_SIZE
        keys = heads[:, :split].view(shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
        values = heads[:, split:].view(shape.num_kv_heads, BLOCK_SIZE, -1)
        return keys, values[..., : shape.v_head_dim]

    def _block(
        self, q: torch.Tensor, position: int, pages: list[tuple[torch.Tensor, torch.Tensor]], scoring: Scoring
    ) -> torch.Tensor:
        """The rows of one block, first at `position`, over all blocks up to their own."""
        rows, heads, dim = q.shape
        group = heads // self._page.num_kv_heads
        # [num_kv_heads, rows * group, dim], the heads of a group beside each other
        queries = (
            q.float().view(rows, -1, group, dim).permute(1, 0, 2, 3).reshape(-1, rows * group, dim)
            * scoring.scale
        )
        limits = position + torch.arange(rows, device=q.device).repeat_interleave(group)
        peak = torch.full(queries.shape[:2], _FLOOR, device=q.device)
        total = torch.zeros_like(peak)
        out = torch.zeros((*queries.shape[:2], self._page.v_head_dim), device=q.device)
        for begin in range(0, len(pages), PARTITION_BLOCKS):
            part = pages[begin : begin + PARTITION_BLOCKS]
            keys = torch.cat([page[0] for page in part], dim=2)
            values = torch.cat([page[1] for page in part], dim=1)
            scores = queries @ keys
            if scoring.softcap:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            positions = begin * BLOCK_SIZE + torch.arange(scores.shape[2], device=q.device)
            hidden = positions > limits[:, None]
            if scoring.window:
                hidden |= positions <= limits[:, None] - scoring.window
            scores = scores.masked_fill(hidden, -math.inf)
            part_peak = scores.amax(dim=2).clamp(min=_FLOOR)
            weights = torch.exp(scores - part_peak[..., None])
            part_out = weights @ values
            merged = torch.maximum(peak, part_peak)
            keep, add = torch.exp(peak - merged), torch.exp(part_peak - merged)
            total = total * keep + weights.sum(dim=2) * add
            out = out * keep[..., None] + part_out * add[..., None]
            peak = merged
        if scoring.sinks is not None:
            sinks = scoring.sinks.to(q.device).view(-1, 1, group).expand(-1, rows, group).flatten(1)
            merged = torch.maximum(peak, sinks)
            keep = torch.exp(peak - merged)
            total = total * keep + torch.exp(sinks - merged)
            out = out * keep[..., None]
        out = (out / total[..., None]).view(-1, rows, group, self._page.v_head_dim)
        return out.permute(1, 0, 2, 3).reshape(rows, heads, -1).to(q.dtype)


class ReferenceKernels:
    """Plain torch attention for one page shape; see `AttentionKernels`."""

    name = "reference"
    workspace_bytes = 0

    def __init__(
        self, page: PageShape, num_heads: int, dtype: torch.dtype, sealed_format: SealedFormat
    ) -> None:
        self.page = page
        self.sealed_format = sealed_format
        self.num_heads = num_heads
        self.dtype = dtype

    def begin(self, batch: AttentionBatch) -> ReferenceStep:
        return ReferenceStep(self, batch)
