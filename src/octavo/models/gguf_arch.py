"""From a GGUF header to a transformers config and parameter names, undoing what llama.cpp's converter did."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from typing import Any

from octavo.errors import InvalidModelFile, UnsupportedModel
from octavo.models.gguf_families import ARCHITECTURES, Architecture
from octavo.models.gguf_header import Header, Tensor

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: how a GGUF says what Llama 3.1 and later call `rope_type: llama3`."""


_LAYER_NAME = re.compile(r"blk\.([0-9]{1,6})\.(.+)")


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of the model, and the tensor it is read from.

    Attributes:
        name: of the parameter, or `ROPE_FACTORS`.
        interleaved_heads: 0, or the heads whose halves are interleaved in the tensor's rows.
        offset: what is added to the tensor's values.
        transposed: the tensor's rows are the parameter's columns.
    """

    name: str
    tensor: Tensor
    interleaved_heads: int = 0
    offset: float = 0.0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return self.tensor.shape[::-1] if self.transposed else self.tensor.shape


def architecture_of(header: Header) -> Architecture:
    """How the file's model maps to transformers.

    Raises:
        InvalidModelFile: the header names no architecture, or the file is one part of several.
        UnsupportedModel: it cannot be read from a GGUF file.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise InvalidModelFile(f"{header.path} names no architecture, so it does not hold a language model.")
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise InvalidModelFile(
            f"{header.path} is one of {parts} parts of a model. Merge them with `llama-gguf-split --merge` "
            "first."
        )
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{header.path} holds a model of architecture {name!r}; from GGUF files "
            f"{', '.join(ARCHITECTURES)} can be read. Take the model's safetensors folder or hub id instead."
        )
    return ARCHITECTURES[name]


def config_fields(header: Header) -> dict[str, Any]:
    """Fields of the transformers config, `model_type` among them.

    Raises:
        InvalidModelFile: something needed is missing or contradicts the tensors.
        UnsupportedModel: the model is not causal, or its layers or positions cannot be read from a GGUF file.
    """
    architecture = architecture_of(header)
    prefix = header.metadata["general.architecture"]

    if header.metadata.get(f"{prefix}.attention.causal") is False:
        raise UnsupportedModel(
            f"{header.path} attends to later tokens too (it is not causal), as models of embeddings and of diffusion "
            "do. Take a model that generates text."
        )

    def get(key: str, kind: type[int] | type[float] = int, default: Any = None) -> Any:
        value = header.metadata.get(f"{prefix}.{key}", default)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < inf:
            what = "is missing" if value is None else f"is {str(value)[:40]}"
            raise InvalidModelFile(f"{header.path} cannot be read: {prefix}.{key} {what} in its header.")
        return value

    fields: dict[str, Any] = {
        config_field: get(key, float if key.endswith("epsilon") else int)
        for key, config_field in architecture.keys.items()
    }
    fields |= {
        config_field: get(key, float)
        for key, config_field in architecture.optional.items()
        if f"{prefix}.{key}" in header.metadata
    }
    layers = {int(match[1]) for match in map(_LAYER_NAME.fullmatch, header.tensors) if match}
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or embedding.shape[1:] != (get("embedding_length"),):
        raise InvalidModelFile(
            f"{header.path} cannot be read: its token embedding is missing or has another width."
        )
    # Counted: one tensor of a far layer would have a model built with all that are said to be before it.
    if len(layers) != get("block_count") or max(layers) + 1 != len(layers):
        raise InvalidModelFile(
            f"{header.path} cannot be read: its header says {get('block_count'):,} layers, and its tensors are of "
            f"{len(layers):,}, or not of the first {get('block_count'):,}."
        )
    fields |= {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for token in ("bos", "eos", "padding"):
        token_id = header.metadata.get(f"tokenizer.ggml.{token}_token_id")
        known = isinstance(token_id, int) and 0 <= token_id < embedding.shape[0]
        fields[f"{token}_token_id"] = token_id if known else None
    fields["pad_token_id"] = fields.pop("padding_token_id")
    if architecture.model_type == "gpt2":
        return fields

    num_heads = get("attention.head_count")
    head_dim = get("attention.key_length", default=get("embedding_length") // num_heads)
    rotated = get("rope.dimension_count", default=head_dim)
    if rotated > head_dim or rotated % 2:
        raise InvalidModelFile(
            f"{header.path} cannot be read: its header rotates {rotated:,} of the {head_dim:,} dimensions of a head."
        )
    fields |= {
        "num_key_value_heads": get("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "rope_parameters": {"rope_theta": get("rope.freq_base", float, 10_000.0)}
        | _rope_scaling(header, prefix),
        "sliding_window": header.metadata.get(f"{prefix}.attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }
    _complete(fields, header, prefix)
    if architecture.model_type == "phi3":
        fields["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise UnsupportedModel(
            f"{header.path} rotates {rotated} of the {head_dim} dimensions of a head, which {prefix} models "
            "in transformers do not. Take the model's safetensors folder or hub id instead."
        )
    return fields


def _complete(fields: dict[str, Any], header: Header, prefix: str) -> None:
    """What llama.cpp knows of a family, or of a size in it, and writes into no file.

    Raises:
        UnsupportedModel: the file's layers are not alike in a way that cannot be read.
    """
    kind, head_dim = fields["model_type"], fields["head_dim"]
    if kind == "granite":
        fields.setdefault("attention_multiplier", head_dim**-0.5)
    if kind == "olmo2" and fields["sliding_window"]:
        raise UnsupportedModel(
            f"{header.path} slides its attention over {fields['sliding_window']} tokens in some layers (OLMo 3), which "
            "cannot be read from a GGUF file. Take the model's safetensors folder or hub id instead."
        )
    if kind not in ("gemma2", "gemma3_text"):
        return
    # The largest of both families scale their scores by the width of a head as if heads shared the model's.
    largest = fields["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[kind]
    width = fields["hidden_size"] // fields["num_attention_heads"]
    fields["query_pre_attn_scalar"] = width if largest else head_dim
    if kind == "gemma3_text":
        period = header.metadata.get(f"{prefix}.attention.sliding_window_pattern", 6)
        if not isinstance(period, int) or period < 1:
            raise UnsupportedModel(
                f"{header.path} does not say by a number which layers slide over a window, but with "
                f"{str(period)[:40]}. Take the model's safetensors folder or hub id instead."
            )
        fields["layer_types"] = [
            "sliding_attention" if (layer + 1) % period else "full_attention"
            for layer in range(fields["num_hidden_layers"])
        ]
        local = header.metadata.get(f"{prefix}.rope.freq_base_swa", 10_000.0)
        fields["rope_parameters"] = {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }


def _rope_scaling(header: Header, prefix: str) -> dict[str, Any]:
    """The scaling of rotary positions, as fields of `rope_parameters`."""
    kind = header.metadata.get(f"{prefix}.rope.scaling.type", "linear")
    factor = header.metadata.get(f"{prefix}.rope.scaling.factor") or header.metadata.get(
        f"{prefix}.rope.scale_linear"
    )
    stretched = any(name.startswith("rope_factors") for name in header.tensors)
    if not stretched and (kind == "none" or (kind == "linear" and factor in (None, 0, 1))):
        return {"rope_type": "default"}
    if not stretched and kind == "linear" and isinstance(factor, float) and 0 < factor < inf:
        return {"rope_type": "linear", "factor": factor}
    raise UnsupportedModel(
        f"{header.path} scales its rotary positions with {'longrope' if stretched else kind!r}, which cannot "
        "be read from a GGUF file. Take the model's safetensors folder or hub id instead."
    )


def weights_of(header: Header) -> list[Weight]:
    """Every tensor of a file that `config_fields` accepts, with the parameter it fills.

    Raises:
        UnsupportedModel: the file holds a tensor that this architecture has no place for.
    """
    architecture = architecture_of(header)
    prefix = header.metadata["general.architecture"]
    num_heads: int = header.metadata[f"{prefix}.attention.head_count"]
    heads = {
        "attn_q": num_heads,
        "attn_k": header.metadata.get(f"{prefix}.attention.head_count_kv", num_heads),
    }
    weights = []
    for tensor in header.tensors.values():
        if tensor.name == ROPE_FACTORS:
            weights.append(Weight(ROPE_FACTORS, tensor))
            continue
        layer = _LAYER_NAME.fullmatch(tensor.name)
        stem, _, suffix = (layer[2] if layer else tensor.name).rpartition(".")
        if stem not in architecture.names or suffix not in ("weight", "bias"):
            raise UnsupportedModel(
                f"{header.path} holds a tensor {tensor.name!r}, which {prefix} models in transformers do not "
                "have. Take the model's safetensors folder or hub id instead."
            )
        name = f"{architecture.names[stem]}.{suffix}"
        weights.append(
            Weight(
                name=f"{architecture.layers}.{layer[1]}.{name}" if layer else name,
                tensor=tensor,
                interleaved_heads=heads.get(stem, 0) if architecture.interleaved_heads else 0,
                offset=-1.0 if architecture.shifted_norms and stem.endswith("norm") else 0.0,
                transposed=suffix == "weight" and stem in architecture.transposed,
            )
        )
    return weights
