"""Linear layers on packed weights: sizes and types are checked here, then addresses are handed down.

A result depends on its own row of inputs and its own row of weights alone, not on the number of rows or threads.
Coded weights are multiplied as integers: each group of 32 inputs is quantised to 8 bits first.
"""

from __future__ import annotations

import mmap
import threading

import torch  # first: the native module then shares torch's OpenMP runtime
from torch import Tensor

from octavo import _native
from octavo.kernels.native import KernelArgumentError

PACKINGS = {"fp32": 0, "bf16": 1, "int8": 2, "int6": 3, "int4": 4, "int5": 5}
"""Names of the packings, with their native numbers."""
_NAMES = {number: name for name, number in PACKINGS.items()}
_DENSE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_HUGE_PAGE = 1 << 21
_REGION_BYTES = 16 * _HUGE_PAGE
_QUANTISED_TYPES = {"int8": 8, "int4": 3}  # Q8_0 and Q4_1
_local = threading.local()


def packed_row_bytes(type_id: int, num_inputs: int) -> int:
    """Bytes of a row of a GGUF type; 0 where `PackedMatrix` cannot keep the type without loss."""
    return int(_native.packed_row_bytes(type_id, num_inputs))


def quantise_rows(weights: Tensor, packing: str) -> tuple[int, Tensor]:
    """Rows as blocks of a GGUF type: Q8_0 for `int8`, Q4_1 for `int4`, for `PackedMatrix.from_gguf`.

    Args:
        weights: [rows, columns] floats, columns a multiple of 32. What is not finite makes its block NaN.

    Returns:
        The type's id and [rows, bytes of a row] uint8.
    """
    if packing not in _QUANTISED_TYPES:
        raise KernelArgumentError(f"Weights are quantised to int8 or int4, not {packing!r}.")
    _check_matrix(weights)
    rows, columns = weights.shape
    if columns % 32:
        raise KernelArgumentError(f"Weights of {columns} inputs cannot be quantised: take a multiple of 32.")
    type_id = _QUANTISED_TYPES[packing]
    weights = weights.float().contiguous()
    out = torch.empty(rows, packed_row_bytes(type_id, columns), dtype=torch.uint8)
    _native.quantise_rows(type_id, weights.data_ptr(), rows, columns, out.data_ptr(), torch.get_num_threads())
    return type_id, out


def unpack_rows(type_id: int, packed: Tensor, row_ids: Tensor, num_inputs: int) -> Tensor:
    """[ids, num_inputs] float32: rows of a GGUF tensor, the values of the gguf package bit by bit.

    Args:
        packed: the tensor's bytes.
        row_ids: [ids] int64.
    """
    num_rows = _num_rows(type_id, packed, num_inputs)
    row_ids = _check_ids(row_ids, num_rows)
    out = torch.empty(len(row_ids), num_inputs)
    _native.unpack_rows(
        type_id, packed.data_ptr(), row_ids.data_ptr(), len(row_ids), num_inputs, out.data_ptr()
    )
    return out


class _Region(threading.local):
    """Memory in huge pages that the next matrices of this thread take: reading them is faster by an eighth."""

    def __init__(self) -> None:
        self.free = torch.empty(0, dtype=torch.uint8)


_region = _Region()


def _take(num_bytes: int) -> Tensor:
    """Bytes at a multiple of 64. Their region is given back when all matrices in it are gone."""
    rounded = -(-num_bytes // 64) * 64
    if _region.free.numel() < rounded:
        size = max(_REGION_BYTES, -(-rounded // _HUGE_PAGE) * _HUGE_PAGE)
        pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        region = torch.frombuffer(pages, dtype=torch.uint8)
        start = -region.data_ptr() % _HUGE_PAGE
        region = region[start : start + size]
        if region.numel() - rounded < _region.free.numel():
            return region[:num_bytes]  # the region before has more room left
        _region.free = region
    taken, _region.free = _region.free[:num_bytes], _region.free[rounded:]
    return taken


class PackedMatrix:
    """Weights [num_outputs, num_inputs], packed for the kernels.

    Attributes:
        native: what native callers take; it is valid as long as this object lives.
    """

    def __init__(self, native: _native.Matrix) -> None:
        self.native = native
        self._data = _take(native.num_bytes)
        native.data = self._data.data_ptr()

    @classmethod
    def from_gguf(
        cls,
        type_id: int,
        packed: Tensor,
        num_outputs: int,
        num_inputs: int,
        order: Tensor | None = None,
        dense: str = "bf16",
    ) -> PackedMatrix:
        """From a GGUF tensor, without loss where its type has codes.

        Args:
            packed: its bytes.
            order: [num_outputs] int64, the file's row of each output; `None` keeps the file's order.
            dense: `bf16` or `fp32`, for types without codes (F32, F16, BF16).

        Raises:
            KernelArgumentError: a type that no packing keeps, or bytes of another size.
        """
        if dense not in ("fp32", "bf16"):
            raise KernelArgumentError(f"Dense weights are kept in fp32 or bf16, not {dense!r}.")
        num_rows = _num_rows(type_id, packed, num_inputs)
        if order is not None:
            order = _check_ids(order, num_rows)
        if num_outputs < 1 or (num_rows if order is None else len(order)) != num_outputs:
            raise KernelArgumentError(f"{num_rows} rows, in their order, do not make {num_outputs} outputs.")
        try:
            native = _native.Matrix.of_type(type_id, PACKINGS[dense], num_outputs, num_inputs)
        except ValueError as error:
            raise KernelArgumentError(
                f"A tensor of GGUF type {type_id} and {num_inputs} inputs cannot be packed: {error}."
            ) from None
        self = cls(native)
        native.pack(
            type_id, packed.data_ptr(), 0 if order is None else order.data_ptr(), torch.get_num_threads()
        )
        return self

    @classmethod
    def from_dense(cls, weights: Tensor, packing: str) -> PackedMatrix:
        """From [num_outputs, num_inputs] floats; `int8` and `int4` quantise them first.

        Raises:
            KernelArgumentError: not such a tensor, or a packing that dense weights cannot take.
        """
        if packing in _QUANTISED_TYPES:
            type_id, packed = quantise_rows(weights, packing)
            return cls.from_gguf(type_id, packed, weights.shape[0], weights.shape[1])
        _check_matrix(weights)
        weights = weights.contiguous()
        type_id, (num_outputs, num_inputs) = _DENSE_TYPES[weights.dtype], weights.shape
        return cls.from_gguf(type_id, weights.view(torch.uint8), num_outputs, num_inputs, dense=packing)

    @property
    def packing(self) -> str:
        return _NAMES[self.native.packing]

    @property
    def num_outputs(self) -> int:
        return int(self.native.num_outputs)

    @property
    def num_inputs(self) -> int:
        return int(self.native.num_inputs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._data.numel()

    def rows(self, row_ids: Tensor) -> Tensor:
        """[ids, num_inputs] float32: the weights of some outputs, as an embedding looks them up."""
        row_ids = _check_ids(row_ids, self.num_outputs)
        out = torch.empty(len(row_ids), self.num_inputs)
        self.native.unpack(row_ids.data_ptr(), len(row_ids), out.data_ptr())
        return out

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[rows, num_outputs] float32: `x` [rows, num_inputs] times the weights, plus `bias` [num_outputs].

        Raises:
            KernelArgumentError: a tensor of another shape, kind or device.
        """
        if (
            x.ndim != 2
            or x.shape[1] != self.num_inputs
            or x.device.type != "cpu"
            or not x.is_floating_point()
        ):
            raise KernelArgumentError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}; the layer wants floats [rows, {self.num_inputs}] "
                "on the CPU."
            )
        if bias is not None and (bias.shape != (self.num_outputs,) or bias.device.type != "cpu"):
            raise KernelArgumentError(
                f"bias is {tuple(bias.shape)} on {bias.device}; the layer wants ({self.num_outputs},) on the CPU."
            )
        x = x.float()
        if x.stride(1) != 1:
            x = x.contiguous()
        bias = None if bias is None else bias.float().contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self.num_outputs)
        num_bytes = _native.activation_bytes(self.native.packing, rows, self.num_inputs)
        _native.multiply_rows(
            [self.native],
            x.data_ptr(),
            x.stride(0),
            rows,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            self.num_outputs,
            _scratch(num_bytes).data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _scratch(num_bytes: int) -> Tensor:
    """A workspace that all layers of a thread share, kept between calls."""
    if getattr(_local, "scratch", None) is None or _local.scratch.numel() < num_bytes:
        _local.scratch = torch.empty(num_bytes, dtype=torch.uint8)
    scratch: Tensor = _local.scratch
    return scratch


def _check_matrix(weights: Tensor) -> None:
    if (
        weights.ndim != 2
        or weights.dtype not in _DENSE_TYPES
        or weights.device.type != "cpu"
        or not weights.numel()
    ):
        raise KernelArgumentError(
            f"Weights are {weights.dtype} {tuple(weights.shape)} on {weights.device}; packing wants a matrix of "
            "float32, float16 or bfloat16 on the CPU."
        )


def _num_rows(type_id: int, packed: Tensor, num_inputs: int) -> int:
    row_bytes = packed_row_bytes(type_id, num_inputs)
    if row_bytes == 0:
        raise KernelArgumentError(f"No packing keeps GGUF type {type_id} with {num_inputs} inputs.")
    if packed.dtype != torch.uint8 or not packed.is_contiguous() or packed.numel() % row_bytes:
        raise KernelArgumentError(
            f"packed is {packed.dtype} with {packed.numel():,} elements; rows of {row_bytes:,} contiguous bytes "
            "(uint8) are wanted."
        )
    return packed.numel() // row_bytes


def _check_ids(row_ids: Tensor, num_rows: int) -> Tensor:
    row_ids = row_ids.to(torch.int64).contiguous()
    if row_ids.ndim != 1 or (len(row_ids) and not 0 <= int(row_ids.min()) <= int(row_ids.max()) < num_rows):
        raise KernelArgumentError(f"Row ids of shape {tuple(row_ids.shape)} must be within {num_rows} rows.")
    return row_ids
