"""The start-up check: does each row-wise part of a model give a row the same bits in any batch?

Attention is exact by construction and covered by tests. The other parts lean on libraries that choose another
path, which may round otherwise, by row count, instruction set and threads. So each distinct part is given the
same rows one by one, as in decoding, and in batches of many sizes. A result is remembered on disk for the
machine, the versions and the settings it holds for.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from octavo.errors import EngineError
from octavo.kernels.linear import PackedMatrix
from octavo.kernels.native import select_isa
from octavo.models.exact import ExactActivation, ExactLinear, give_back_freed_memory
from octavo.models.fused import FusedDecoder
from octavo.models.loaded import Progress
from octavo.models.packed import PackedLinear
from octavo.models.prepare import KERNEL_VERSION, PreparedModel
from octavo.models.store import model_cache, write_atomically
from octavo.spec import ComputeDtype

NUM_ROWS = 256
BATCH_SIZES = (2, 3, 5, 7, 16, 17, 33, 65, 129)
"""Besides these, as many rows as a step may have."""

_ACTIVATION_WIDTH = 1003  # no multiple of any vector's length: its end is in every path that there is


@dataclass(frozen=True, slots=True)
class PartCheck:
    """What one part showed.

    Attributes:
        name: kind, size and dtype, for example `linear 576 -> 1536 bf16`.
        num_compared: elements compared, those of all batch sizes together.
        num_differing: elements whose bytes differed from those of the row alone.
        batch_size: the smallest number of rows at which some differed; 0 if none did.
    """

    name: str
    num_compared: int
    num_differing: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether promise 1 holds for a model on this machine; `reason` is a sentence when it does not."""

    exact: bool
    reason: str = ""
    parts: tuple[PartCheck, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What each reply has to say about it."""
        return () if self.exact else (self.reason,)


@dataclass(frozen=True, slots=True)
class _Part:
    """A row-wise function: `compute` takes `[1, rows, width]` in `dtype`."""

    name: str
    width: int
    dtype: torch.dtype
    num_bytes: int
    compute: Callable[[torch.Tensor], torch.Tensor]


def check_exactness(
    prepared: PreparedModel, *, max_rows: int, progress: Progress | None = None, fresh: bool = False
) -> Exactness:
    """Checks the model's parts at the present number of threads.

    Args:
        max_rows: rows of the largest step.
        progress: called with `check` and the bytes of weights read; not when everything is remembered.
        fresh: measure anew, also what is remembered.
    """
    if prepared.identity["device"] != "cpu" or prepared.kernels.name == "reference":
        return Exactness(
            False,
            f"Exactness is not promised here: this engine computes with the {prepared.kernels.name} kernels on "
            f"{prepared.identity['device']}, and the promise is for the native kernels on the CPU.",
        )
    record = _Record(environment(max_rows))
    parts = (
        _parts(prepared.model, prepared.spec.dtype)
        if prepared.fused is None
        else _fused_parts(prepared.fused)
    )
    known = {} if fresh else record.read()
    new = {name: part for name, part in parts.items() if name not in known}
    if new:
        measured = _measure(list(new.values()), max_rows, progress)
        record.add(measured)
        known = {**known, **measured}
        give_back_freed_memory()
    return judge(tuple(known[name] for name in parts))


def judge(parts: tuple[PartCheck, ...]) -> Exactness:
    """What the parts' checks say together."""
    bad = [part for part in parts if part.num_differing]
    if not bad:
        return Exactness(True, parts=parts)
    first = bad[0]
    others = f" {len(bad) - 1} more of {len(parts)} parts differed too." if len(bad) > 1 else ""
    reason = (
        f"Exactness is not promised on this machine: {first.name} differed in {first.num_differing:,} of "
        f"{first.num_compared:,} elements, with {first.batch_size} rows at once or more.{others} Answers are as "
        "good as ever, but a reused prefix may change their last bits."
    )
    return Exactness(False, reason, parts)


def remembered(max_rows: int) -> tuple[PartCheck, ...]:
    """What is remembered for the present machine, versions and settings."""
    return tuple(_Record(environment(max_rows)).read().values())


def environment(max_rows: int) -> dict[str, str | int]:
    """Everything that a result depends on, besides the part itself."""
    name, features = cpu()
    return {
        "octavo": version("octavo"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "kernels": f"{select_isa()}-{KERNEL_VERSION}",
        "cpu": name,
        "features": " ".join(features),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "float32_precision": torch.get_float32_matmul_precision(),
        "settings": " ".join(
            f"{key}={value}"
            for key, value in sorted(os.environ.items())
            if key.startswith(("ONEDNN_", "DNNL_"))
        ),
        "max_rows": max_rows,
    }


def cpu() -> tuple[str, tuple[str, ...]]:
    """The CPU's name, and its features that matter for arithmetic, as Linux calls them."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features", "")).split()
    wanted = ("avx", "amx", "fma", "f16c", "asimd", "bf16", "i8mm", "sve")
    features = sorted(flag for flag in flags if flag.startswith(wanted))
    return fields.get("model name") or platform.processor() or platform.machine(), tuple(features)


def _parts(model: nn.Module, dtype_name: ComputeDtype) -> dict[str, _Part]:
    """The distinct row-wise parts by name."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype_name]
    parts: dict[str, _Part] = {}
    for module in model.modules():
        kind = type(module).__name__
        size = dtype.itemsize
        if isinstance(module, PackedLinear):
            width, out = module.in_features, module.out_features
            name = f"{module.kind} linear {width} -> {out}{'' if module.bias is None else ' with bias'}"
            size = module.weight_bytes
        elif isinstance(module, (ExactLinear, nn.Linear)):
            width, out = module.in_features, module.out_features
            bias = module.has_bias if isinstance(module, ExactLinear) else module.bias is not None
            name = f"linear {width} -> {out}{' with bias' if bias else ''}"
            if not isinstance(module, ExactLinear):
                name = f"{kind} {name}"
            size *= width * out
        elif isinstance(module, ExactActivation):
            width = _ACTIVATION_WIDTH
            name = f"activation {module.kind}"
        elif kind.endswith(("RMSNorm", "LayerNorm")):
            weight = getattr(module, "weight", None)
            shape: Sequence[int] = getattr(module, "normalized_shape", ()) if weight is None else weight.shape
            if len(shape) != 1:  # a norm of each head; those that there are share its arithmetic
                continue
            width = int(shape[0])
            name = f"{kind} {width}"
        elif kind.endswith("Router") and getattr(getattr(module, "weight", None), "ndim", 0) == 2:
            out, width = module.weight.shape  # type: ignore[misc]
            name = f"{kind} {width} -> {out}"
            size *= width * out
        else:
            continue
        name = f"{name} {dtype_name}"
        compute = partial(_route, module) if kind.endswith("Router") else module
        parts.setdefault(name, _Part(name, width, dtype, size, compute))
    return parts


def _fused_parts(fused: FusedDecoder) -> dict[str, _Part]:
    """The distinct linear layers of a fused decoder; the rest of it is ours and covered by tests."""
    return {
        f"native linear {name}": _Part(
            f"native linear {name}",
            matrix.num_inputs,
            torch.float32,
            matrix.num_bytes,
            partial(_multiply, matrix),
        )
        for name, matrix in fused.matrices.items()
    }


def _multiply(matrix: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
    return matrix.multiply(x[0])[None]


def _route(router: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The scores `[1, rows, experts]` of a router of experts; a model that has one is never given a single row."""
    rows = x[0] if x.shape[1] > 1 else x[0].expand(2, -1)
    out = router(rows)
    scores: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return scores[None, : x.shape[1]]


@torch.inference_mode()
def _measure(parts: list[_Part], max_rows: int, progress: Progress | None) -> dict[str, PartCheck]:
    sizes = sorted({*BATCH_SIZES, max_rows} - {1})
    total = sum(_num_bytes(part, [1, *sizes]) for part in parts)
    done = 0
    results = {}
    for part in parts:
        generator = torch.Generator().manual_seed(part.width)
        rows = torch.randn(NUM_ROWS, part.width, generator=generator).to(part.dtype)
        alone: torch.Tensor | None = None
        compared, differing, batch_size = 0, 0, 0
        for size in [1, *sizes]:
            if progress is not None:
                progress("check", done, total)
            if size == 1:
                alone = torch.cat([part.compute(row[None, None])[0] for row in rows])
            else:
                assert alone is not None
                count = _differing(part, rows, alone, size)
                compared += max(size, NUM_ROWS) * alone.shape[1]
                differing += count
                batch_size = batch_size or (size if count else 0)
            done += _num_bytes(part, [size])
        results[part.name] = PartCheck(part.name, compared, differing, batch_size)
    if progress is not None:
        progress("check", total, total)
    return results


def _num_bytes(part: _Part, sizes: list[int]) -> int:
    """Bytes of weights read for batches of these sizes."""
    return part.num_bytes * sum(-(-NUM_ROWS // size) for size in sizes)


def _differing(part: _Part, rows: torch.Tensor, alone: torch.Tensor, size: int) -> int:
    """Elements that are other bytes when `size` rows are computed at once than alone."""
    integers = torch.int16 if alone.dtype.itemsize == 2 else torch.int32
    if size > NUM_ROWS:
        rows = rows.repeat(-(-size // NUM_ROWS), 1)[:size]
    count = 0
    for first in range(0, NUM_ROWS, size):
        out = part.compute(rows[None, first : first + size])[0]
        for start in range(0, len(out), NUM_ROWS):
            piece = out[start : start + NUM_ROWS].view(integers)
            expected = alone[first:][: len(piece)].view(integers)
            if not torch.equal(piece, expected):
                count += int((piece != expected).sum())
    return count


class _Record:
    """The remembered results of one environment, a file in the model cache."""

    def __init__(self, environment: Mapping[str, str | int]) -> None:
        self._environment = dict(environment)
        text = json.dumps(self._environment, sort_keys=True)
        self._name = f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"

    def read(self) -> dict[str, PartCheck]:
        """Results by part; none where the file cannot be read."""
        try:
            fields = json.loads((model_cache("checks") / self._name).read_bytes())
            if fields["environment"] != self._environment:
                return {}
            return {
                str(name): PartCheck(str(name), int(compared), int(differing), int(batch_size))
                for name, (compared, differing, batch_size) in fields["parts"].items()
            }
        except (EngineError, OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def add(self, parts: Mapping[str, PartCheck]) -> None:
        """Remembers results, where the model cache can be written."""
        kept = {**self.read(), **parts}
        values = {
            part.name: (part.num_compared, part.num_differing, part.batch_size) for part in kept.values()
        }
        data = json.dumps({"environment": self._environment, "parts": values}).encode()
        with suppress(EngineError, OSError):
            write_atomically(model_cache("checks") / self._name, data)
