"""What a model is like, from its config alone: what its layers keep, how many weights it has, whether it runs here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from octavo.config import WeightsChoice
from octavo.errors import InvalidModelFile, UnsupportedModel
from octavo.models import catalog, folder, gguf, gguf_arch, gguf_header, hub
from octavo.models.layers import cache_groups
from octavo.spec import DTYPE_BYTES, CacheGroup, CacheSpec, ComputeDtype


@dataclass(frozen=True, slots=True)
class Outline:
    """A model that is not loaded.

    Attributes:
        groups: its layers by what they keep.
        context: tokens that it was made for; None if the config does not say.
        refusal: why it does not run here; empty if it does.
        model: of transformers, without memory; None where transformers does not know the type.
        stored: how the tensors of a GGUF file are packed, by parameter.
        file_bytes: of all tensors of a GGUF file whose architecture is not known.
    """

    name: str
    model_type: str
    groups: tuple[CacheGroup, ...]
    context: int | None
    refusal: str
    model: Any
    stored: Mapping[str, int]
    file_bytes: int | None = None

    def spec(self, dtype: ComputeDtype) -> CacheSpec:
        """What its cache looks like: to the engine, if it runs here, layers with a window are as others."""
        if self.refusal:
            return CacheSpec(self.groups, dtype)
        whole = replace(self.groups[0], kind="full_attention", window=0)
        return CacheSpec((replace(whole, num_layers=sum(group.num_layers for group in self.groups)),), dtype)

    @property
    def num_parameters(self) -> int | None:
        """Weights, those that are used twice counted once."""
        if self.model is None:
            return None
        total = sum(int(parameter.numel()) for parameter in self.model.parameters())
        head = self.model.get_output_embeddings()
        tied = head is not None and self.model.config.tie_word_embeddings
        return total - int(head.weight.numel()) if tied else total

    def step_flops(self, num_known: int, num_new: int) -> float:
        """Floating-point operations of computing `num_new` tokens behind `num_known`, and the logits of the last one.

        Two for each weight of a matrix and each number of a key or value that is attended to; norms and activations,
        which are few, are left out. 0 if the model is not known.
        """
        if self.model is None:
            return 0.0
        body, head = self._matrices
        attended = num_new * num_known + num_new * (num_new + 1) / 2
        per_pair = sum(
            group.num_layers * group.num_heads * (group.page.head_dim + group.page.v_head_dim)
            for group in self.groups
        )
        return 2.0 * (body * num_new + head + per_pair * attended)

    @property
    def _matrices(self) -> tuple[int, int]:
        """Weights that a token is multiplied with, in layers and head; of experts those that it is sent to."""
        from octavo.models.packed import is_linear

        config, head = self.model.config, self.model.get_output_embeddings()
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        experts = next((n for name in names if (n := getattr(config, name, None))), 1)
        active = getattr(config, "num_experts_per_tok", None) or 1
        body = 0
        for module in self.model.modules():
            if module is head:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if is_linear(module) and name == "weight":
                    body += parameter.numel()
                elif parameter.ndim == 3:
                    body += parameter.numel() * active // experts
        return body, head.weight.numel()

    def weights_bytes(self, weights: WeightsChoice, dtype: ComputeDtype) -> int | None:
        """Bytes of the weights as they would be held; see `EngineConfig` for the choices. None if not known.

        Raises:
            InvalidRequest: they cannot be held so.
        """
        if self.model is None:
            return self.file_bytes
        from octavo.models.packed import is_linear, is_transposed

        entrance, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        place = next((name for name, module in self.model.named_modules() if module is entrance), "")
        total = 0
        for path, module in self.model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                at = f"{path}.{name}"
                if module is head and at not in self.stored:
                    at = f"{place}.{name}"  # the same matrix, used twice
                is_matrix = is_linear(module) and name == "weight"
                if is_matrix and is_transposed(module):
                    parameter = parameter.T
                total += self._held(parameter, at, is_matrix, module is entrance, weights, dtype)
        return total

    def _held(
        self,
        parameter: Any,
        at: str,
        is_matrix: bool,
        is_embedding: bool,
        weights: WeightsChoice,
        dtype: ComputeDtype,
    ) -> int:
        from octavo.models.packed import PACKED_TYPES, check_groups

        type_id = self.stored.get(at)
        packed = type_id is not None and gguf_header.TENSOR_TYPES[type_id].name in PACKED_TYPES
        if type_id is not None and packed and parameter.ndim > 1 and weights not in DTYPE_BYTES:
            return 0 if is_embedding else _packed_bytes(type_id, parameter.shape)
        if is_matrix and weights in ("int8", "int4"):
            check_groups(parameter.shape[1], weights)
            return _packed_bytes({"int8": 8, "int4": 3}[weights], parameter.shape)
        return int(parameter.numel()) * DTYPE_BYTES[dtype]


def outline(name: str | os.PathLike[str]) -> Outline:
    """Reads what a name stands for as far as a plan needs it: a `config.json`, or the header of a GGUF file.

    Args:
        name: as for `catalog.resolve`, or the path of a `config.json`; a folder needs no weights.

    Raises:
        OctavoError: there is no such model, its file is damaged, or its layers are of a kind that is not known.
    """
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return outline_of(folder.read_json(path), str(name))
    if path.is_dir() and (path / folder.CONFIG).is_file():
        return outline_of(folder.read_json(path / folder.CONFIG), path.resolve().name)
    source = catalog.resolve(name)
    if source.kind == "hub":
        config = hub.config_file(source.name) if source.path is None else source.path / folder.CONFIG
        return outline_of(folder.read_json(config), source.name)
    file = catalog.local_path(source)
    with gguf.refused_if_broken(file):
        header = gguf_header.read_header(file)
        try:
            stored = {weight.name: weight.tensor.type_id for weight in gguf_arch.weights_of(header)}
            return outline_of(gguf_arch.config_fields(header), source.name, stored)
        except UnsupportedModel as error:
            fields = _header_fields(header)
            found = outline_of(fields, source.name)
            file_bytes = sum(tensor.num_bytes for tensor in header.tensors.values())
            return replace(found, refusal=str(error).rstrip("."), model=None, file_bytes=file_bytes)


def _header_fields(header: gguf_header.Header) -> dict[str, Any]:
    """What a GGUF file of any architecture says of its layers, in the names of configs."""
    name = header.metadata.get("general.architecture")
    names = {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "context_length": "max_position_embeddings",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "v_head_dim",
        "attention.sliding_window": "sliding_window",
        "attention.kv_lora_rank": "kv_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
    }
    found = {field: header.metadata.get(f"{name}.{key}") for key, field in names.items()}
    if any(f"{name}.{key}" in header.metadata for key in ("ssm.state_size", "wkv.head_size")):
        raise UnsupportedModel(
            f"{header.path} has layers with a recurrent state, which a GGUF file does not describe fully. Plan it "
            "from its "
            "config.json."
        )
    return {
        "model_type": f"gguf-{name}",
        **{field: value for field, value in found.items() if isinstance(value, int)},
    }


def outline_of(fields: Mapping[str, Any], name: str, stored: Mapping[str, int] | None = None) -> Outline:
    """The outline of a config's fields.

    Raises:
        InvalidModelFile: they do not describe a language model.
        UnsupportedModel: its layers are of a kind that is not known.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise InvalidModelFile(f"{name} has no model_type, so it is no config of a model.")
    model, config = _build(fields)
    config = _Raw(fields) if config is None else config
    try:
        groups = tuple(cache_groups(config))
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InvalidModelFile(
            f"The config of {name} ({model_type}) does not say how wide its layers are: {error}."
        ) from error
    context = getattr(config, "max_position_embeddings", None)
    wraps = any(name in fields for name in ("vision_config", "audio_config", "text_config"))
    refusal = "it takes more than text (or wraps a text model)" if wraps else _refusal(model, model_type)
    return Outline(
        name, model_type, groups, context if isinstance(context, int) else None, refusal, model, stored or {}
    )


def _build(fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model without memory and its config, each None if transformers does not know it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from octavo.models.quiet import quiet_transformers

    known = {name: value for name, value in fields.items() if name not in ("auto_map", "quantization_config")}
    config = None
    with quiet_transformers():
        try:
            config = AutoConfig.for_model(**known).get_text_config()
            with torch.device("meta"), no_init_weights():
                return AutoModelForCausalLM.from_config(config).eval(), config
        except Exception:  # whatever a library says of a config that it does not know
            return None, config


def _refusal(model: Any, model_type: str) -> str:
    if model is None:
        return f"the installed transformers cannot build {model_type} models"
    from octavo.models.support import refuse_unsupported

    try:
        refuse_unsupported(model)
    except UnsupportedModel as error:
        return str(error).partition(": ")[2].rstrip(".") or str(error)
    return ""


class _Raw(SimpleNamespace):
    """Fields of a config as they are written, under the names that most configs have."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        inner = fields.get("text_config")
        names = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size"}
        super().__init__(
            **{names.get(name, name): value for name, value in {**fields, **(inner or {})}.items()}
        )


def _packed_bytes(type_id: int, shape: Any) -> int:
    from octavo import _native

    num_outputs, num_inputs = shape[0], shape[1:].numel()
    return int(_native.Matrix.of_type(type_id, 0, num_outputs, num_inputs).num_bytes)
