"""From a GGUF file and its record to a transformers model, without a dense copy on the way."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.config import WeightsChoice
from octavo.errors import InvalidModelFile
from octavo.kernels.linear import PackedMatrix
from octavo.models.dequant import dequantize_into
from octavo.models.gguf import Record
from octavo.models.gguf_arch import ROPE_FACTORS, Weight
from octavo.models.gguf_header import TENSOR_TYPES
from octavo.models.gguf_header import Tensor as StoredTensor
from octavo.models.loaded import Progress
from octavo.models.packed import PACKED_TYPES, PackedEmbedding, PackedLinear, is_linear, quantise, quantised
from octavo.spec import DTYPE_BYTES, ComputeDtype

_DENSE_TYPES = frozenset({"F32", "F16", "BF16"})
_building = threading.Lock()


def build_model(
    path: Path, record: Record, dtype: torch.dtype, weights: WeightsChoice, progress: Progress | None = None
) -> Any:
    """The model of a GGUF file: its matrices packed, or dense in `dtype` where `weights` is a dense dtype.

    Raises:
        InvalidModelFile: the file changed since it was hashed.
        InvalidRequest: a dense matrix cannot be quantised to `weights`.
    """
    model = _without_weights(record, dtype)
    data = _map(path, record)
    total = sum(weight.tensor.num_bytes for weight in record.weights)
    done = 0
    for weight in sorted(record.weights, key=_is_matrix):  # a linear layer is packed together with its bias
        tensor = weight.tensor
        packed = data[tensor.offset : tensor.offset + tensor.num_bytes]
        if weight.name == ROPE_FACTORS:
            _apply_rope_factors(model, _dense(weight, packed, torch.float32))
        else:
            _fill(model, weight, packed, dtype, weights, path)
        done += tensor.num_bytes
        if progress is not None:
            progress("load", done, total)
    if not isinstance(model.get_input_embeddings(), PackedEmbedding):
        model.tie_weights()
    if weights in ("int8", "int4"):
        quantise(model, weights)
    return model


def stays_packed(weight: Weight, weights: WeightsChoice) -> bool:
    """Whether a matrix is used as the file has it."""
    return _is_matrix(weight) and weights not in DTYPE_BYTES and type_name(weight) in PACKED_TYPES


def needed_bytes(record: Record, dtype: ComputeDtype, weights: WeightsChoice) -> int:
    """Memory that the weights take while they are loaded, at most."""
    return sum(
        weight.tensor.num_bytes if stays_packed(weight, weights) else prod(weight.shape) * DTYPE_BYTES[dtype]
        for weight in record.weights
    )


def unpacked_notice(
    name: str, record: Record, dtype: ComputeDtype, weights: WeightsChoice
) -> tuple[str, ...]:
    """A sentence when `auto` cannot leave all packed matrices packed."""
    matrices = [weight for weight in record.weights if _is_matrix(weight)]
    unpacked = [weight for weight in matrices if type_name(weight) not in PACKED_TYPES | _DENSE_TYPES]
    if weights != "auto" or not unpacked:
        return ()
    types = ", ".join(sorted({type_name(weight) for weight in unpacked}))
    return (
        f"{len(unpacked)} of {len(matrices)} weight matrices of {name} are of type {types}, which cannot be multiplied "
        f"packed: they are unpacked to {dtype}. To quantise them again: weights, --weights int8 or int4.",
    )


def type_name(weight: Weight) -> str:
    """GGUF's name for how the tensor is packed."""
    return TENSOR_TYPES[weight.tensor.type_id].name


def _is_matrix(weight: Weight) -> bool:
    return len(weight.tensor.shape) > 1


def _fill(
    model: Any, weight: Weight, packed: Tensor, dtype: torch.dtype, weights: WeightsChoice, path: Path
) -> None:
    """Puts one weight of the file, whose bytes are `packed`, into its place in the model."""
    place, _, name = weight.name.rpartition(".")
    module = model.get_submodule(place)
    if not stays_packed(weight, weights):
        values = _dense(weight, packed, dtype)
        if weights in ("int8", "int4") and _is_matrix(weight) and is_linear(module):
            rows = values.T if weight.transposed else values
            model.set_submodule(place, quantised(rows, weights, module.bias))
        else:
            setattr(module, name, nn.Parameter(values, requires_grad=False))
    elif is_linear(module):
        model.set_submodule(place, _packed_linear(weight, packed, module.bias))
    else:
        output = model.get_output_embeddings()
        if getattr(output, "weight", None) is module.weight:
            model.set_output_embeddings(_packed_linear(weight, packed, output.bias))
        table = _map_tensor(path, weight.tensor)
        scale = float(getattr(module, "embed_scale", 1.0))
        embedding = PackedEmbedding(
            table, weight.tensor.type_id, *weight.tensor.shape, dtype=dtype, scale=scale
        )
        model.set_submodule(place, embedding)


def _packed_linear(weight: Weight, packed: Tensor, bias: Tensor | None) -> PackedLinear:
    num_outputs, num_inputs = weight.tensor.shape
    matrix = PackedMatrix.from_gguf(
        weight.tensor.type_id, packed, num_outputs, num_inputs, order=_row_order(weight)
    )
    return PackedLinear(matrix, type_name(weight), bias)


def _without_weights(record: Record, dtype: torch.dtype) -> Any:
    """The model with parameters that take no memory. Its buffers, which no file holds, are computed."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(record.folder, local_files_only=True)
    with _parameters_on_meta(), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.tie_weights()
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that this thread makes inside the block are on the meta device."""
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == thread:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    with _building:
        nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _map(path: Path, record: Record) -> Tensor:
    """The file's bytes, mapped.

    Raises:
        InvalidModelFile: it is shorter than the record says.
    """
    size = path.stat().st_size
    if any(weight.tensor.offset + weight.tensor.num_bytes > size for weight in record.weights):
        raise InvalidModelFile(
            f"{path} changed while it was read. Wait until its download or copy is complete."
        )
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _map_tensor(path: Path, tensor: StoredTensor) -> Tensor:
    """The bytes of one tensor, mapped by themselves, so that they outlive the loading."""
    start = tensor.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    end = tensor.offset + tensor.num_bytes
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), end - start, access=mmap.ACCESS_COPY, offset=start)
    return torch.frombuffer(mapped, dtype=torch.uint8)[tensor.offset - start :]


def _dense(weight: Weight, packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameter's values, unpacked from the file's bytes."""
    values = torch.empty(weight.shape, dtype=torch.float32 if weight.offset else dtype)
    rows = values.T if weight.transposed else values
    if values.ndim == 1:
        rows = values[:, None] if weight.interleaved_heads else values[None]
    dequantize_into(rows, packed, weight.tensor.type_id, _row_order(weight))
    return values.add_(weight.offset).to(dtype) if weight.offset else values


def _row_order(weight: Weight) -> Tensor | None:
    """For each row of the parameter the tensor's row; `None` where they are the same."""
    if not weight.interleaved_heads:
        return None
    return (
        torch.arange(weight.tensor.shape[0]).view(weight.interleaved_heads, -1, 2).transpose(1, 2).reshape(-1)
    )


def _apply_rope_factors(model: nn.Module, factors: Tensor) -> None:
    """Divide the model's rotary frequencies by the file's factors, which no config can express."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name.endswith("inv_freq"):
                buffer.div_(factors.view(buffer.shape))
