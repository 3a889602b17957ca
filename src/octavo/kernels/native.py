"""The native kernels: shapes, dtypes and sizes are checked here, once, then addresses are handed down."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch  # first: the native module then shares torch's OpenMP runtime

from octavo import _native
from octavo.errors import InvalidRequest, OctavoError
from octavo.kernels.batch import AttentionBatch, Scoring, SealedFormat
from octavo.spec import BLOCK_SIZE, PageShape

_DTYPES = {torch.bfloat16: 0, torch.float32: 1}
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "quick_gelu": 3}


class KernelArgumentError(OctavoError, ValueError):
    """A tensor does not have the shape, dtype or layout that the kernel was told."""


def select_isa() -> str:
    """Chooses the instruction set named by `OCTAVO_ISA`, or the best; returns its name.

    Raises:
        InvalidRequest: this CPU has no such instruction set.
    """
    wanted = os.environ.get("OCTAVO_ISA", "")
    try:
        _native.set_isa(wanted)
    except ValueError:
        raise InvalidRequest(
            f"OCTAVO_ISA is {wanted!r}; this CPU runs none of that name. Use avx512bf16, avx512, avx2 or generic, "
            "or unset it."
        ) from None
    return str(_native.isa())


def release_threads() -> None:
    """Ends the threads that wait for the calling thread's next parallel work, which would start new ones.

    Where a process has more such threads than processors, OpenMP lets them sleep at each barrier instead of spin, and
    a decode step has some two hundred barriers: beside a second set of threads it took twice as long.
    """
    _native.release_threads()


def activate(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Applies `silu`, `gelu_tanh`, `gelu` or `quick_gelu` to each element of `x` (bf16 or fp32, on the CPU).

    Computed in float32; an element's result does not depend on the tensor's size or on the threads.
    """
    if x.dtype not in _DTYPES or x.device.type != "cpu":
        raise KernelArgumentError(
            f"An activation takes bf16 or fp32 on the CPU, not {x.dtype} on {x.device}."
        )
    x = x.contiguous()
    out = torch.empty_like(x)
    _native.activate(
        ACTIVATIONS[kind], _DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads()
    )
    return out


class NativeStep:
    """See `AttentionStep`."""

    def __init__(self, kernels: NativeKernels, batch: AttentionBatch) -> None:
        page = kernels.page
        self._kernels = kernels
        self._num_rows = batch.num_rows
        self.native = _native.Step(
            _DTYPES[kernels.dtype],
            kernels.sealed_format.native_id,
            kernels.num_heads,
            page.num_kv_heads,
            page.head_dim,
            page.v_head_dim,
            batch.query_starts,
            batch.context_lens,
            batch.table_starts,
            batch.block_offsets,
            batch.slots,
            torch.get_num_threads(),
        )
        self._max_sealed = int(batch.block_offsets.max(initial=0))
        self._max_open = int(batch.slots.max())
        if min(batch.block_offsets.min(initial=0), batch.slots.min()) < 0:
            raise KernelArgumentError("A page offset is negative: a block id in the step's tables is wrong.")
        self.scratch = kernels.reserve(self.native.workspace_bytes)

    @property
    def bytes_read(self) -> int:
        return int(self.native.bytes_read)

    def check_pages(self, sealed_bytes: int, open_bytes: int) -> None:
        """Checks that a layer's pages hold what the step's tables point to.

        Raises:
            KernelArgumentError: they do not.
        """
        kernels = self._kernels
        if self._max_sealed and self._max_sealed + kernels.page_bytes > sealed_bytes:
            raise KernelArgumentError(
                f"A block table points {self._max_sealed:,} bytes into {sealed_bytes:,} bytes of sealed pages."
            )
        if self._max_open + kernels.open_page_bytes > open_bytes:
            raise KernelArgumentError(
                f"A slot points {self._max_open:,} bytes into {open_bytes:,} bytes of open pages."
            )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sealed: torch.Tensor,
        opened: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        return self.attend_layers(q, k, v, [(sealed, opened)], scoring)

    def attend_layers(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        scoring: Scoring,
    ) -> torch.Tensor:
        """`attend` with the sealed and open pages of each layer in turn, by one team of threads, as a fused decoder
        does it. Every layer gets the same rows; returns what the last one gives."""
        kernels, page = self._kernels, self._kernels.page
        rows = self._num_rows
        out = torch.empty((rows, kernels.num_heads, page.v_head_dim), dtype=kernels.dtype)
        for name, tensor, heads, dim in (
            ("q", q, kernels.num_heads, page.head_dim),
            ("k", k, page.num_kv_heads, page.head_dim),
            ("v", v, page.num_kv_heads, page.v_head_dim),
        ):
            if tensor.shape != (rows, heads, dim) or tensor.dtype != kernels.dtype or tensor.stride(2) != 1:
                raise KernelArgumentError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; the step wants "
                    f"{kernels.dtype} ({rows}, {heads}, {dim}) with contiguous channels."
                )
        sinks = scoring.sinks
        if sinks is not None and (sinks.shape != (kernels.num_heads,) or sinks.dtype != torch.float32):
            raise KernelArgumentError(
                f"sinks is {sinks.dtype} {tuple(sinks.shape)}; the step wants float32 ({kernels.num_heads},)."
            )
        for sealed, opened in layers:
            self.check_pages(sealed.numel(), opened.numel())
        self.native.attend(
            *(q.data_ptr(), q.stride(0), q.stride(1)),
            *(k.data_ptr(), k.stride(0), k.stride(1)),
            *(v.data_ptr(), v.stride(0), v.stride(1)),
            *(out.data_ptr(), out.stride(0), out.stride(1)),
            np.array([sealed.data_ptr() for sealed, _ in layers], dtype=np.int64),
            np.array([opened.data_ptr() for _, opened in layers], dtype=np.int64),
            self.scratch.data_ptr(),
            scoring.scale,
            scoring.softcap,
            scoring.window,
            0 if sinks is None else sinks.data_ptr(),
        )
        return out


class NativeKernels:
    """Exact attention on the CPU for one page shape; see `AttentionKernels`."""

    def __init__(
        self, page: PageShape, num_heads: int, dtype: torch.dtype, sealed_format: SealedFormat
    ) -> None:
        if dtype not in _DTYPES:
            raise KernelArgumentError(f"The native kernels compute in bf16 or fp32, not {dtype}.")
        assert _native.BLOCK_SIZE == BLOCK_SIZE
        self.page = page
        self.num_heads = num_heads
        self.dtype = dtype
        self.sealed_format = sealed_format
        self.page_bytes = sealed_format.page_bytes(page)
        self.open_page_bytes = page.raw_bytes("bf16" if dtype == torch.bfloat16 else "fp32")
        self._isa = select_isa()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @property
    def name(self) -> str:
        return f"native-{self._isa}"

    @property
    def workspace_bytes(self) -> int:
        return self._scratch.numel()

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """A workspace of at least `num_bytes`, kept between steps; torch aligns it to 64 bytes."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8)
        return self._scratch

    def begin(self, batch: AttentionBatch) -> NativeStep:
        return NativeStep(self, batch)
