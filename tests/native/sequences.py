"""Random sequences for the attention kernels, shared by the tests."""

from __future__ import annotations

import numpy as np
import torch

from octavo.formats import FORMATS
from octavo.kernels.batch import AttentionBatch, Scoring
from octavo.spec import BLOCK_SIZE, PageShape

PLAIN = Scoring(0.125)


class Sequences:
    """Random sequences whose rows are fed to a kernel in any chunks, with pages of their own."""

    def __init__(self, kernels, lengths, num_blocks=None, seed=0):
        page, dtype = kernels.page, kernels.dtype
        torch.manual_seed(seed)
        self.kernels, self.lengths = kernels, lengths
        self.q = [torch.randn(n, kernels.num_heads, page.head_dim).to(dtype) * 2 for n in lengths]
        self.k = [torch.randn(n, page.num_kv_heads, page.head_dim).to(dtype) * 2 for n in lengths]
        self.v = [torch.randn(n, page.num_kv_heads, page.v_head_dim).to(dtype) for n in lengths]
        self.page_bytes = kernels.sealed_format.page_bytes(page)
        self.open_bytes = page.raw_bytes("bf16" if dtype == torch.bfloat16 else "fp32")
        counts = [n // BLOCK_SIZE for n in lengths]
        total = num_blocks or max(1, sum(counts))
        ids = torch.randperm(total)[: sum(counts)].numpy()
        self.tables = np.split(ids, np.cumsum(counts)[:-1])
        # 0xFF is NaN in every float type, the scales' included.
        self.sealed = torch.full((total * self.page_bytes,), 0xFF, dtype=torch.uint8)
        self.opened = torch.full((len(lengths) * self.open_bytes,), 0xFF, dtype=torch.uint8)
        self.done = [0] * len(lengths)
        self.out = [torch.empty(n, kernels.num_heads, page.v_head_dim, dtype=dtype) for n in lengths]

    def step(self, chunks, scoring=PLAIN):
        """Computes `chunks[i]` more rows of sequence i; 0 leaves it out."""
        running = [i for i, c in enumerate(chunks) if c]
        tables = [self.tables[i][: (self.done[i] + chunks[i]) // BLOCK_SIZE] for i in running]
        batch = AttentionBatch(
            query_starts=np.cumsum([0] + [chunks[i] for i in running]),
            context_lens=np.array([self.done[i] for i in running]),
            table_starts=np.cumsum([0] + [len(t) for t in tables]),
            block_offsets=np.concatenate(tables).astype(np.int64) * self.page_bytes,
            slots=np.array(running) * self.open_bytes,
        )
        rows = [slice(self.done[i], self.done[i] + chunks[i]) for i in running]
        q, k, v = (
            torch.cat([x[i][r] for i, r in zip(running, rows, strict=True)]) for x in (self.q, self.k, self.v)
        )
        out = self.kernels.begin(batch).attend(q, k, v, self.sealed, self.opened, scoring)
        for i, r, part in zip(running, rows, out.split([chunks[i] for i in running]), strict=True):
            self.out[i][r] = part
            self.done[i] = r.stop
        return self

    def run(self, chunk, scoring=PLAIN):
        while any(d < n for d, n in zip(self.done, self.lengths, strict=True)):
            self.step([min(chunk, n - d) for d, n in zip(self.done, self.lengths, strict=True)], scoring)
        return self


def make(cls, dtype, heads=6, kv_heads=2, dim=32, v_dim=None, kv_format="fp32"):
    return cls(PageShape(kv_heads, dim, v_dim or dim), heads, dtype, FORMATS[kv_format])


SHAPES = [
    (6, 2, 32, 32),
    (3, 3, 64, 64),
    (4, 1, 24, 40),
    (9, 3, 64, 64),
    (2, 2, 128, 128),
    (2, 1, 256, 256),
    (1, 1, 7, 5),
]
