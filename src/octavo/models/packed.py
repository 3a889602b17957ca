"""Weights that stay packed: linear layers and embeddings of a file's own types, or quantised when loaded.

A packed linear layer multiplies integers in native code, so a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from octavo.errors import InvalidRequest
from octavo.kernels.linear import PackedMatrix, unpack_rows
from octavo.models.exact import ExactLinear, replace_modules
from octavo.spec import ComputeDtype

PACKED_TYPES = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})
"""GGUF types that are multiplied as they are; `octavo.models.gguf_header` knows how they are laid out."""

GROUP = 32
"""Inputs that share a scale in weights quantised here."""


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` on a packed weight, computed in float32 and rounded to the compute dtype.

    Args:
        matrix: the weight, `[out_features, in_features]`.
        kind: how its values are packed: a GGUF type, or `int8` or `int4`.
        bias: `[out_features]` of any dtype, or None.

    Attributes:
        bias: float32 `[out_features]`, or None.
    """

    bias: Tensor | None

    def __init__(self, matrix: PackedMatrix, kind: str, bias: Tensor | None) -> None:
        super().__init__()
        self.matrix = matrix
        self.kind = kind
        self.out_features, self.in_features = matrix.num_outputs, matrix.num_inputs
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    @property
    def weight_bytes(self) -> int:
        return self.matrix.num_bytes

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        return self.matrix.multiply(rows, self.bias).to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.kind}"


class PackedEmbedding(nn.Module):
    """Rows looked up in a table of packed ones, which may be a mapped file and then takes no memory of its own.

    Args:
        table: the packed rows' bytes.
        type_id: of GGUF.
        num_embeddings, embedding_dim: rows and their width.
        dtype: of what `forward` returns.
        scale: by which every row is multiplied.
    """

    def __init__(
        self,
        table: Tensor,
        type_id: int,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._table, self._type_id, self._dtype, self._scale = table, type_id, dtype, scale

    def rows(self, ids: Tensor) -> Tensor:
        """float32 `[n, embedding_dim]` of int64 `[n]`."""
        rows = unpack_rows(self._type_id, self._table, ids, self.embedding_dim)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids.reshape(-1)).to(self._dtype).view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a dense linear layer as transformers has them."""
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is GPT-2's linear layer, whose weight is `[in_features, out_features]`."""
    return type(module).__name__ == "Conv1D"


def quantise(model: nn.Module, kind: str) -> None:
    """Quantises the dense linear layers of `model` to `int8` or `int4`, in place; all else stays as it is.

    Raises:
        InvalidRequest: a layer's inputs are no whole groups.
    """

    def replacement(module: nn.Module) -> nn.Module | None:
        if not is_linear(module):
            return None
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        return quantised(weight.T if is_transposed(module) else weight, kind, bias)  # type: ignore[arg-type]

    replace_modules(model, replacement)


def quantised(weight: Tensor, kind: str, bias: Tensor | None) -> PackedLinear:
    """A linear layer with the dense `weight` `[out_features, in_features]` quantised to `int8` or `int4`.

    Raises:
        InvalidRequest: its inputs are no whole groups.
    """
    check_groups(weight.shape[1], kind)
    return PackedLinear(PackedMatrix.from_dense(weight.detach().contiguous(), kind), kind, bias)


def check_groups(num_inputs: int, kind: str) -> None:
    """Raises InvalidRequest unless the inputs of a layer are whole groups, as `int8` and `int4` weights need."""
    if num_inputs % GROUP:
        raise InvalidRequest(
            f"A linear layer of this model has {num_inputs:,} inputs, and {kind} weights need a multiple of "
            f"{GROUP}. Load it with dense weights (weights, --weights bf16 or fp32)."
        )


def kinds_of(model: nn.Module, dtype: ComputeDtype) -> str:
    """How the weights of a model's linear layers are held, those with the most bytes first: `Q4_1, Q8_0`."""
    sizes: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            sizes[module.kind] += module.weight_bytes
        elif is_linear(module) or isinstance(module, ExactLinear):
            sizes[dtype] += 1
    return ", ".join(kind for kind, _ in sizes.most_common()) or dtype


def weights_bytes(model: nn.Module) -> int:
    """Bytes of all weights of a model as they are held, shared ones once; not of rows that stay in their file."""
    tensors = (*model.parameters(), *model.buffers())
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    kept = sum(m.weight_bytes for m in model.modules() if isinstance(m, (PackedLinear, ExactLinear)))
    return kept + sum(storages.values())
