"""The native linear layers against torch's, on the layers of SmolLM2-135M with weights of their own, from memory.

    python bench/linear.py [--kinds Q4_1,int8,bf16] [--rows 1,8,16,32,512] [--no-peers]

Prints milliseconds for all 120 layers and for the output layer alone, the best of some repeats; GB/s are the packed
bytes of the weights, GOP/s two operations for each weight and row. `OCTAVO_ISA` names an instruction set.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from octavo import _native
from octavo.kernels.linear import PackedMatrix
from octavo.kernels.native import select_isa
from octavo.models.gguf_header import TENSOR_TYPES

_LAYERS, _HIDDEN, _FFN, _KV, _VOCABULARY = 30, 576, 1536, 192, 49152
_SHAPES = [(_HIDDEN, _HIDDEN)] * 2 + [(_KV, _HIDDEN)] * 2 + [(_FFN, _HIDDEN)] * 2 + [(_HIDDEN, _FFN)]
_HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def random_matrix(kind: str, num_outputs: int, num_inputs: int) -> PackedMatrix:
    if kind in ("fp32", "bf16", "int8", "int4"):
        return PackedMatrix.from_dense(torch.randn(num_outputs, num_inputs) * 0.05, kind)
    (type_id,) = (i for i, t in TENSOR_TYPES.items() if t.name == kind)
    block = TENSOR_TYPES[type_id]
    blocks = np.random.randint(
        0, 256, (num_outputs * num_inputs // block.block_size, block.block_bytes), dtype=np.uint8
    )
    for at in _HALVES[kind]:
        blocks[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    return PackedMatrix.from_gguf(type_id, torch.from_numpy(blocks).view(-1), num_outputs, num_inputs)


class Ours:
    """All layers of the same width in one native call, so that calls from Python cost nothing."""

    def __init__(self, kind: str, shapes: list[tuple[int, int]]) -> None:
        step = 256 if kind.endswith("_K") else 1
        self.groups: dict[int, list[PackedMatrix]] = {}
        for n, k in shapes:
            k = -(-k // step) * step
            self.groups.setdefault(k, []).append(random_matrix(kind, n, k))
        self.num_bytes = sum(m.num_bytes for group in self.groups.values() for m in group)
        self.weights = sum(m.num_outputs * m.num_inputs for group in self.groups.values() for m in group)

    def prepare(self, rows: int) -> Callable[[], None]:
        calls = []
        for k, group in self.groups.items():
            # Some layers at a time while calls count; all outputs of many rows at once would leave the caches.
            together = 6 if rows <= 32 else 1
            for start in range(0, len(group), together):
                part = [m.native for m in group[start : start + together]]
                width = sum(m.num_outputs for m in part)
                x, out = torch.randn(rows, k), torch.empty(rows, width)
                room = torch.empty(_native.activation_bytes(part[0].packing, rows, k), dtype=torch.uint8)
                calls.append((part, x, out, room))
        threads = torch.get_num_threads()

        def run() -> None:
            for part, x, out, room in calls:
                _native.multiply_rows(
                    part,
                    x.data_ptr(),
                    x.stride(0),
                    rows,
                    0,
                    out.data_ptr(),
                    out.stride(0),
                    room.data_ptr(),
                    threads,
                )

        return run


class OneDnn:
    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        self.layers = [torch.randn(n, k).bfloat16() for n, k in shapes]
        self.num_bytes = sum(2 * w.numel() for w in self.layers)
        self.weights = self.num_bytes // 2
        self.packed = [torch.ops.mkldnn._reorder_linear_weight(w, 512) for w in self.layers]

    def prepare(self, rows: int) -> Callable[[], None]:
        xs = {w.shape[1]: torch.randn(max(rows, 2), w.shape[1]).bfloat16() for w in self.layers}

        def run() -> None:
            for w, packed in zip(self.layers, self.packed, strict=True):
                torch.ops.mkldnn._linear_pointwise(xs[w.shape[1]], packed, None, "none", [], "")

        return run


class IntMm:
    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        self.layers = [torch.randint(-128, 128, (n, k), dtype=torch.int8) for n, k in shapes]
        self.num_bytes = self.weights = sum(w.numel() for w in self.layers)

    def prepare(self, rows: int) -> Callable[[], None]:
        xs = {w.shape[1]: torch.randint(-128, 128, (rows, w.shape[1]), dtype=torch.int8) for w in self.layers}

        def run() -> None:
            for w in self.layers:
                torch._int_mm(xs[w.shape[1]], w.t())

        return run


def best(run: Callable[[], None], seconds: float) -> float:
    run()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def read_speed() -> float:
    """Bytes a second of reading 128 MiB with all threads."""
    data = torch.ones(128 << 20, dtype=torch.uint8)
    offsets = np.arange(0, data.numel(), 1 << 16, dtype=np.int64)
    threads = torch.get_num_threads()
    return data.numel() / best(lambda: _native.read_pages(data.data_ptr(), offsets, 1 << 16, threads), 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="Q4_1,int8,bf16")
    parser.add_argument("--rows", default="1,8,16,32,512")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.4, help="for each figure")
    arguments = parser.parse_args()
    print(f"{select_isa()}, {torch.get_num_threads()} threads, memory read {read_speed() / 1e9:.1f} GB/s")
    print(f"{'':10} {'rows':>5} {'layers ms':>10} {'GB/s':>6} {'GOP/s':>7} {'output ms':>10} {'GB/s':>6}")
    kinds: dict[str, Callable[[list[tuple[int, int]]], Ours | OneDnn | IntMm]] = {
        kind: (lambda shapes, kind=kind: Ours(kind, shapes)) for kind in arguments.kinds.split(",") if kind
    }
    if not arguments.no_peers:
        kinds |= {"torch bf16": OneDnn, "torch int8": IntMm}
    for name, make in kinds.items():
        layers, output = make(_SHAPES * _LAYERS), make([(_VOCABULARY, _HIDDEN)])
        for rows in map(int, arguments.rows.split(",")):
            seconds = best(layers.prepare(rows), arguments.seconds)
            line = f"{name:10} {rows:5} {seconds * 1e3:10.2f} {layers.num_bytes / seconds / 1e9:6.1f} "
            line += f"{2 * rows * layers.weights / seconds / 1e9:7.0f}"
            if rows <= 32:
                seconds = best(output.prepare(rows), arguments.seconds)
                line += f" {seconds * 1e3:10.2f} {output.num_bytes / seconds / 1e9:6.1f}"
            print(line, flush=True)
        del layers, output


if __name__ == "__main__":
    main()
