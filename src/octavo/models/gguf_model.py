"""From a GGUF file and its record to a transformers model, without a dense copy on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import InvalidModelFile
from octavo.models.dequant import dequantize_into
from octavo.models.gguf import Record
from octavo.models.gguf_arch import ROPE_FACTORS, Weight
from octavo.models.loaded import Progress

_building = threading.Lock()


def build_model(path: Path, record: Record, dtype: torch.dtype, progress: Progress | None = None) -> Any:
    """The model of a GGUF file, dense in `dtype`.

    Raises:
        InvalidModelFile: the file changed since it was hashed.
    """
    model = _without_weights(record, dtype)
    data = _map(path, record)
    total = sum(weight.tensor.num_bytes for weight in record.weights)
    done = 0
    for weight in record.weights:
        tensor = weight.tensor
        packed = data[tensor.offset : tensor.offset + tensor.num_bytes]
        if weight.name == ROPE_FACTORS:
            _apply_rope_factors(model, _dense(weight, packed, torch.float32))
        else:
            module, _, name = weight.name.rpartition(".")
            values = nn.Parameter(_dense(weight, packed, dtype), requires_grad=False)
            setattr(model.get_submodule(module), name, values)
        done += tensor.num_bytes
        if progress is not None:
            progress("load", done, total)
    model.tie_weights()
    return model


def _without_weights(record: Record, dtype: torch.dtype) -> Any:
    """The model with parameters that take no memory. Its buffers, which no file holds, are computed."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(record.folder, local_files_only=True)
    with _parameters_on_meta(), no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


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


def _dense(weight: Weight, packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameter's values, unpacked from the file's bytes."""
    values = torch.empty(weight.shape, dtype=dtype)
    rows = values.T if weight.transposed else values
    if values.ndim == 1:
        rows = values[:, None] if weight.interleaved_heads else values[None]
    dequantize_into(rows, packed, weight.tensor.type_id, _row_order(weight))
    return values


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
