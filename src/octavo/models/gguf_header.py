"""Reading the header of a GGUF file: metadata and tensor table, every number checked against the file.

Layout, all little-endian: `GGUF`, version, number of tensors, number of metadata entries; then per entry a
key, a type and a value; then per tensor a name, its dimensions, its type and its offset; then, at the next
multiple of the alignment, the data.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import InvalidModelFile, UnsupportedModel

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_COUNT = 1 << 24
"""Far above any vocabulary; a damaged count must not fill the memory."""
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class TensorType(NamedTuple):
    """How values are packed: `block_bytes` bytes hold `block_size` neighbours of a row."""

    name: str
    block_size: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        return columns // self.block_size * self.block_bytes


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies in its file.

    Attributes:
        shape: slowest dimension first, as torch has it.
        type_id: key of `TENSOR_TYPES`.
        offset: bytes from the start of the file.
        num_bytes: bytes of the packed values.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensors of a GGUF file of `size` bytes."""

    path: Path
    size: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_header(path: Path) -> Header:
    """The header of a GGUF file.

    Raises:
        InvalidModelFile: not a GGUF file, cut short, or with a header that contradicts itself or the file.
        UnsupportedModel: a version or tensor type that cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
        if start != MAGIC:
            raise InvalidModelFile(
                f"{path} is not a GGUF file: it starts with {start!r} instead of {MAGIC!r}. Check that the "
                "download is the model itself and not a web page or a pointer to it."
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data, size).header()


class _Parser:
    """A position in the mapped file that never passes its end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._position = len(MAGIC)

    def header(self) -> Header:
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            order = (
                " (a big-endian file)" if int.from_bytes(version.to_bytes(4), "little") in _VERSIONS else ""
            )
            raise UnsupportedModel(
                f"{self._path} has version {version}{order} of GGUF; versions 2 and 3, little-endian, can be "
                "read. Convert the model again with a current llama.cpp."
            )
        num_tensors, num_entries = self._unpack("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(self._bounded(num_entries, 13, "metadata entries")):
            key = self._string()
            metadata[key] = self._value(*self._unpack("I"))
        entries = [self._entry() for _ in range(self._bounded(num_tensors, 24, "tensors"))]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise self._broken(f"its alignment is {alignment!r}, which is not a multiple of 8")
        data_start = -(-self._position // alignment) * alignment
        tensors = {entry[0]: self._tensor(*entry, alignment, data_start) for entry in entries}
        if len(tensors) != num_tensors:
            raise self._broken("two tensors have the same name")
        return Header(self._path, self._size, metadata, tensors)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset from the start of the data."""
        name = self._string()
        (rank,) = self._unpack("I")
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise self._broken(f"tensor {name!r} has {rank} dimensions")
        dimensions = self._unpack(f"{rank}Q")
        type_id, offset = self._unpack("IQ")
        return name, tuple(reversed(dimensions)), type_id, offset

    def _tensor(
        self, name: str, shape: tuple[int, ...], type_id: int, offset: int, alignment: int, data_start: int
    ) -> Tensor:
        kind = TENSOR_TYPES.get(type_id)
        if kind is None:
            raise UnsupportedModel(
                f"Tensor {name!r} of {self._path} is of type {type_id}, which cannot be read. Take a file "
                "quantised with another type, such as Q8_0, Q4_1 or Q4_K_M."
            )
        if prod(shape) == 0 or shape[-1] % kind.block_size or offset % alignment:
            raise self._broken(
                f"tensor {name!r} of shape {shape} at offset {offset} cannot be of type {kind.name}"
            )
        num_bytes = kind.row_bytes(shape[-1]) * prod(shape[:-1])
        end = data_start + offset + num_bytes
        if end > self._size:
            raise InvalidModelFile(
                f"{self._path} is cut short: it has {self._size:,} bytes and its tensor {name!r} would end "
                f"at byte {end:,}. Download or copy the file again."
            )
        return Tensor(name, shape, type_id, data_start + offset, num_bytes)

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id != _ARRAY:
            return self._unpack(self._scalar(type_id))[0]
        element_type, count = self._unpack("IQ")
        if element_type == _STRING:
            return [self._string() for _ in range(self._bounded(count, 8, "strings"))]
        code = self._scalar(element_type)
        self._bounded(count, struct.calcsize(f"<{code}"), "values")
        return list(self._unpack(f"{count}{code}"))

    def _scalar(self, type_id: int) -> str:
        if type_id not in _SCALARS:
            raise self._broken(f"a metadata value has type {type_id}")
        return _SCALARS[type_id]

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        start = self._position
        self._position += self._bounded(length, 1, "characters")
        try:
            return self._data[start : self._position].decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"the text at byte {start} is not UTF-8") from error

    def _unpack(self, codes: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{codes}")
        self._bounded(layout.size, 1, "bytes")
        values = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return values

    def _bounded(self, count: int, least_bytes: int, what: str) -> int:
        """`count`, if that many things of `least_bytes` bytes or more fit in the rest of the file."""
        left = self._size - self._position
        if count * least_bytes > left or count > _MAX_COUNT:
            raise InvalidModelFile(
                f"{self._path} is cut short or damaged: its header asks for {count:,} {what} at byte "
                f"{self._position:,}, and the file has {self._size:,} bytes. Download or copy the file again."
            )
        return count

    def _broken(self, what: str) -> InvalidModelFile:
        return InvalidModelFile(
            f"{self._path} has a damaged header: {what}. Download or copy the file again."
        )
