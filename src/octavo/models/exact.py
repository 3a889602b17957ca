"""Modules whose rows do not depend on the batch: what promise 1 needs below attention.

torch's plain linear rounds a row differently with other row counts or threads, and its vectorised
activations treat the tail of a thread's share differently. The replacements here were measured exact
(`docs/design.md`, "Numbers that make a hit exact") and are installed in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import nn

from octavo.kernels import native

_ROTARY_CHUNK = 64  # small enough that torch computes a chunk on one thread


class ExactLinear(nn.Module):
    """`x @ weight.T + bias` on oneDNN's prepacked weight, never with a single row.

    Args:
        weight: `[out_features, in_features]`, bf16 or fp32.
        bias: `[out_features]` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = sum(t.numel() * t.element_size() for t in (weight, bias) if t is not None)
        self.dtype = weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._bias = None if bias is None else bias.detach().contiguous()

    @property
    def has_bias(self) -> bool:
        return self._bias is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        single = rows.shape[0] == 1
        if single:  # one row takes another code path in oneDNN, with other bits
            rows = rows.expand(2, -1)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.contiguous(), self._packed, self._bias, "none", [], ""
        )
        if single:
            out = out[:1]
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, prepacked {self.dtype}"


class ExactActivation(nn.Module):
    """An element-wise activation by the native kernel."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return native.activate(self.kind, x)

    def extra_repr(self) -> str:
        return self.kind


class RotaryTable(nn.Module):
    """Cosines and sines of a rotary embedding, computed once per position in fixed chunks, then looked up."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self._tables: dict[tuple[object, ...], tuple[torch.Tensor, ...]] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: object, **kwargs: object) -> object:
        tables = self.tables(x, int(position_ids.max()) + 1, *args, **kwargs)
        return tuple(table[position_ids] for table in tables)

    def tables(
        self, x: torch.Tensor, length: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, ...]:
        """Cosines and sines `[length or more, channels]` in the dtype of `x` `[batch, tokens, width]`."""
        key = (x.dtype, x.device, args, tuple(sorted(kwargs.items())))
        tables = self._tables.get(key)
        if tables is None or tables[0].shape[0] < length:
            tables = self._tables[key] = self._extend(x, tables, length, args, kwargs)
        return tables

    def _extend(
        self,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, ...] | None,
        length: int,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[torch.Tensor, ...]:
        start = 0 if tables is None else tables[0].shape[0]
        parts: list[tuple[torch.Tensor, ...]] = [] if tables is None else [tables]
        for first in range(start, max(length, 2 * start), _ROTARY_CHUNK):
            positions = torch.arange(first, first + _ROTARY_CHUNK, device=x.device)[None]
            cos, sin = self.rotary(x[:, :1], positions, *args, **kwargs)
            parts.append((cos[0], sin[0]))
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def activation_kind(module: nn.Module) -> str | None:
    """The native activation that computes what `module` does; None if there is none."""
    name = type(module).__name__
    if name in ("SiLU", "SiLUActivation"):
        return "silu"
    if name in ("NewGELUActivation", "GELUTanh", "FastGELUActivation", "AccurateGELUActivation"):
        return "gelu_tanh"
    if name == "GELUActivation":
        return "gelu"
    if name == "GELU":
        return "gelu_tanh" if getattr(module, "approximate", "none") == "tanh" else "gelu"
    if name == "QuickGELUActivation":
        return "quick_gelu"
    return None


def _replacement(module: nn.Module) -> nn.Module | None:
    name = type(module).__name__
    if type(module) is nn.Linear and isinstance(module, nn.Linear):
        return ExactLinear(module.weight, module.bias)
    if name == "Conv1D":  # GPT-2's linear layer, stored transposed
        weight, bias = module.weight, module.bias
        assert isinstance(weight, torch.Tensor)
        assert isinstance(bias, torch.Tensor)
        return ExactLinear(weight.T, bias)
    if name.endswith("RotaryEmbedding"):
        return RotaryTable(module)
    kind = activation_kind(module)
    return None if kind is None else ExactActivation(kind)


def replace_modules(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Puts in place of each module of `model` what `replacement` makes of it; where that is None, it stays."""
    # Containers and names are listed: a reference to a layer would keep its dense weights.
    for parent in [module for module in model.modules() if next(module.children(), None) is not None]:
        for name in [name for name, _ in parent.named_children()]:
            new = replacement(getattr(parent, name))
            if new is not None:
                setattr(parent, name, new)


def make_exact(model: nn.Module) -> None:
    """Replaces dense linear layers, activations and rotary embeddings of `model` in place.

    The dense weights of a replaced linear layer are let go at once, except those that an embedding shares.
    """
    replace_modules(model, _replacement)
    give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Gives memory that was freed back to the system, where the C library is glibc, which would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
