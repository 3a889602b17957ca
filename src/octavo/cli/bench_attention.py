"""`octavo bench attention`: decode attention alone, beside the speed at which memory can be read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from octavo import _native
from octavo.formats import FORMATS, PageFormat
from octavo.kernels import AttentionBatch, Scoring
from octavo.kernels.native import NativeKernels
from octavo.kv.planner import slab_bytes_for
from octavo.kv.storage.arena import OpenArena, SealedArena
from octavo.spec import BLOCK_SIZE, PageShape

SMOLLM2 = PageShape(num_kv_heads=3, head_dim=64, v_head_dim=64)
SMOLLM2_HEADS, SMOLLM2_LAYERS = 9, 30


@dataclass(frozen=True, slots=True)
class AttentionFigure:
    """One format at one context: medians of `repeats` runs over all layers, and their spread.

    `read_gbps` is the speed at which the same pages can be read with as many threads; `of_read` is the share of
    it that attention reached.
    """

    name: str
    context: int
    ms: float
    spread_ms: float
    gbps: float
    read_gbps: float
    of_read: float

    def as_dict(self) -> dict[str, float | str]:
        return asdict(self)


def run(formats: list[str], context: int, repeats: int, threads: int) -> list[AttentionFigure]:
    """Measures each format, and torch's own attention on gathered bf16 keys and values, interleaved.

    Every layer has pages of its own, so that they come from memory and not from a cache of the processor. All layers
    are one native call, as in a fused decoder; torch's are a call each.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    cases = [_Paged(FORMATS[name], context, threads) for name in formats]
    gathered = _Gathered(context)
    times: dict[str, list[float]] = {}
    reads: dict[str, list[float]] = {}
    for _ in range(repeats + 1):  # the first round warms up
        for case in cases:
            times.setdefault(case.page_format.name, []).append(_timed(case.attend))
            reads.setdefault(case.page_format.name, []).append(_timed(case.read))
        times.setdefault("torch sdpa bf16", []).append(_timed(gathered.attend))
    sizes = {case.page_format.name: case.num_bytes for case in cases} | {
        "torch sdpa bf16": gathered.num_bytes
    }
    figures = []
    for name, seconds in times.items():
        seconds = sorted(seconds[1:])
        median = statistics.median(seconds)
        gbps = sizes[name] / median / 1e9
        read = sizes[name] / statistics.median(reads[name][1:]) / 1e9 if name in reads else float("nan")
        spread = seconds[-1 - len(seconds) // 4] - seconds[len(seconds) // 4]
        figures.append(AttentionFigure(name, context, median * 1e3, spread * 1e3, gbps, read, gbps / read))
    return figures


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class _Paged:
    """One sequence of `context` tokens in the pages of one format, all layers."""

    def __init__(self, page_format: PageFormat, context: int, threads: int) -> None:
        self.page_format = page_format
        self._threads = threads
        self._kernels = NativeKernels(SMOLLM2, SMOLLM2_HEADS, torch.bfloat16, page_format)
        num_blocks = context // BLOCK_SIZE
        self._page_bytes = self._kernels.page_bytes
        self.num_bytes = num_blocks * self._page_bytes * SMOLLM2_LAYERS
        self._sealed = SealedArena(
            num_layers=SMOLLM2_LAYERS,
            page_bytes=self._page_bytes,
            num_blocks=num_blocks + 1,
            slab_bytes=slab_bytes_for(self._page_bytes),
        )
        self._opened = OpenArena(
            num_layers=SMOLLM2_LAYERS, page_bytes=self._kernels.open_page_bytes, num_slots=1
        )
        self._sealed.touch(range(num_blocks + 1))
        self._offsets = np.array([self._sealed.offset(block) for block in range(num_blocks)], dtype=np.int64)
        page = page_format.encode(torch.randn(3, 64, BLOCK_SIZE), torch.randn(3, BLOCK_SIZE, 64))
        for layer in self._sealed.layers:
            for offset in self._offsets.tolist():
                layer[offset : offset + self._page_bytes] = page
        self._q, self._k, self._v = (
            torch.randn(1, heads, 64).to(torch.bfloat16) for heads in (SMOLLM2_HEADS, 3, 3)
        )
        self._batch = AttentionBatch(
            query_starts=np.array([0, 1]),
            context_lens=np.array([context]),
            table_starts=np.array([0, num_blocks]),
            block_offsets=self._offsets,
            slots=np.array([0]),
        )

    def attend(self) -> None:
        step = self._kernels.begin(self._batch)
        layers = list(zip(self._sealed.layers, self._opened.layers, strict=True))
        step.attend_layers(self._q, self._k, self._v, layers, Scoring(0.125))

    def read(self) -> None:
        for sealed in self._sealed.layers:
            _native.read_pages(sealed.data_ptr(), self._offsets, self._page_bytes, self._threads)


class _Gathered:
    """The same sequence as plain tensors, for `scaled_dot_product_attention`."""

    def __init__(self, context: int) -> None:
        shape = (SMOLLM2_LAYERS, 1, 3, context, 64)
        self._keys, self._values = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
        self._q = torch.randn(1, SMOLLM2_HEADS, 1, 64, dtype=torch.bfloat16)
        self.num_bytes = 2 * self._keys.numel() * self._keys.element_size()

    def attend(self) -> None:
        for keys, values in zip(self._keys, self._values, strict=True):
            torch.nn.functional.scaled_dot_product_attention(self._q, keys, values, enable_gqa=True)
