"""Packed GGUF values to dense ones, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.models.gguf_header import TENSOR_TYPES

_CHUNK_ELEMENTS = 1 << 15
"""Stays in a core's cache, and below the size from which torch splits an operation over threads: thousands of
short parallel regions take seconds when another program has a core, and on one core this takes 0.2 s."""


def dequantize_into(out: Tensor, packed: Tensor, type_id: int, order: Tensor | None = None) -> None:
    """Fill `out` with the values of a tensor, rounded to its dtype.

    Args:
        out: [rows, columns], of any strides and floating dtype.
        packed: [rows * bytes of a row] bytes as the file has them.
        type_id: key of `TENSOR_TYPES`.
        order: [rows] row of the file for each row of `out`; `None` keeps the file's order.
    """
    rows, columns = out.shape
    packed = packed.view(rows, TENSOR_TYPES[type_id].row_bytes(columns))
    unpack = _UNPACK.get(TENSOR_TYPES[type_id].name)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        chunk = packed[start : start + step]
        if order is not None:
            # numpy's, because torch's own gathering of rows always takes several threads.
            chunk = torch.from_numpy(packed.numpy()[order[start : start + step].numpy()])
        values = unpack(chunk) if unpack is not None else _unpack_with_gguf(chunk, type_id)
        out[start : start + step].copy_(values.view(-1, columns))


def _blocks(packed: Tensor, block_bytes: int) -> Tensor:
    return packed.reshape(-1, block_bytes)


def _half(blocks: Tensor, start: int) -> Tensor:
    """[blocks, 1] float32: the half-precision number at byte `start` of each block."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor, start: int) -> Tensor:
    """[blocks, 32] float32 of the 16 bytes from `start` on: all low halves, then all high ones."""
    pairs = blocks[:, start : start + 16]
    values = torch.empty(blocks.shape[0], 2, 16, dtype=torch.float32)
    values[:, 0] = pairs & 15
    values[:, 1] = pairs >> 4
    return values.view(-1, 32)


def _unpack_q4_0(packed: Tensor) -> Tensor:
    blocks = _blocks(packed, 18)
    return _nibbles(blocks, 2).sub_(8).mul_(_half(blocks, 0))


def _unpack_q4_1(packed: Tensor) -> Tensor:
    blocks = _blocks(packed, 20)
    return _nibbles(blocks, 4).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _unpack_q8_0(packed: Tensor) -> Tensor:
    blocks = _blocks(packed, 34)
    return blocks[:, 2:].view(torch.int8) * _half(blocks, 0)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def unpack(packed: Tensor) -> Tensor:
        return packed.view(dtype)

    return unpack


_UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q8_0": _unpack_q8_0,
}


def _unpack_with_gguf(packed: Tensor, type_id: int) -> Tensor:
    """Any other type, through the gguf package: right, but on one thread and slow to import."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(packed.numpy(), GGMLQuantizationType(type_id)))
