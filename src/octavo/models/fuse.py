"""Finds a decoder's parts by their structure, so that its layers can run as one native call.

Recognised are layers of RMS norms before, after or around attention and a gated MLP, with rotary positions turned
half by half: Llama, Mistral, Qwen2, Qwen3, Granite, OLMo-2, Phi-3, Gemma 1 to 3 and what is built like them.
Anything else runs module by module, and says why.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from octavo.errors import OctavoError
from octavo.models.adapter import window_of
from octavo.models.exact import activation_kind
from octavo.models.packed import PackedLinear

_SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_NORM_NAMES = {
    frozenset(_SANDWICH[:2]): (_SANDWICH[0], None, _SANDWICH[1], None),
    frozenset((_SANDWICH[1], _SANDWICH[3])): (None, _SANDWICH[1], None, _SANDWICH[3]),
    frozenset(_SANDWICH): _SANDWICH,
}
"""Names of a layer's norms -> those before and after attention, before and after the MLP."""


class NotFusable(OctavoError):
    """The model is not built in a way that is known here; the message says what is different."""


@dataclass(frozen=True, slots=True)
class NormPart:
    """An RMS norm: float32 weight `[width]`."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What one decoder layer is made of; see `DecoderLayer` in native/decoder.h.

    Attributes:
        norms: before and after attention, before and after the MLP.
        whole_rows: the norms of queries and keys go over all heads of a row.
        qkv, out, gate_up, down: linear modules, dense or packed.
        rotary: key of its table of cosines and sines.
    """

    norms: tuple[NormPart | None, NormPart | None, NormPart | None, NormPart | None]
    query_norm: NormPart | None
    key_norm: NormPart | None
    whole_rows: bool
    qkv: tuple[nn.Module, ...]
    out: nn.Module
    gate_up: tuple[nn.Module, ...]
    down: nn.Module
    rotary: tuple[str, ...]
    scale: float
    softcap: float
    window: int
    residual_factor: float


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """A whole decoder."""

    layers: list[LayerParts]
    rotary: nn.Module
    activation: str
    final_norm: NormPart
    head: nn.Module
    embedding: nn.Module
    embedding_factor: float
    logit_factor: float
    logit_softcap: float


def take_apart(model: Any) -> DecoderParts:
    """The parts of a transformers model.

    Raises:
        NotFusable: it is built differently; the message says where.
    """
    if not isinstance(getattr(model, "model", None), nn.Module):
        raise NotFusable(f"{type(model).__name__} keeps its decoder elsewhere than in `model`")
    core: Any = model.model
    _only(core, {"embed_tokens", "layers", "norm", "rotary_emb"})
    _only(model, {"model", "lm_head"})
    config = model.config
    layers = [_layer(core, config, index) for index in range(len(core.layers))]
    if len({(layer.down.in_features, layer.residual_factor) for layer in layers}) != 1:
        raise NotFusable("its layers differ in width")
    kinds = {activation_kind(_activation(layer.mlp)) for layer in core.layers}
    if len(kinds) != 1 or (kind := kinds.pop()) is None:
        raise NotFusable(f"its activation is {type(_activation(core.layers[0].mlp)).__name__}")
    return DecoderParts(
        layers=layers,
        rotary=core.rotary_emb,
        activation=kind,
        final_norm=_norm(core.norm),
        head=model.lm_head,
        embedding=core.embed_tokens,
        embedding_factor=float(getattr(core, "embedding_multiplier", 1.0)),
        logit_factor=1.0 / float(getattr(config, "logits_scaling", None) or 1.0),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


def _layer(core: Any, config: Any, index: int) -> LayerParts:
    layer = core.layers[index]
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None:
        raise NotFusable(f"{type(layer).__name__} has no `self_attn` or no `mlp`")
    names = {name for name, child in layer.named_children() if not isinstance(child, nn.Dropout)}
    order = _NORM_NAMES.get(frozenset(names - {"self_attn", "mlp"}))
    if order is None:
        raise NotFusable(f"{type(layer).__name__} is made of {', '.join(sorted(names))}")
    qkv = _linears(attention, ("qkv_proj",), ("q_proj", "k_proj", "v_proj"))
    gate_up = _linears(mlp, ("gate_up_proj",), ("gate_proj", "up_proj"))
    norms = {"q_norm", "k_norm"} if hasattr(attention, "q_norm") else set()
    _only(attention, {"qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj"} | norms)
    _only(mlp, {"gate_up_proj", "gate_proj", "up_proj", "down_proj", "act_fn", "activation_fn"})
    query = _norm(attention.q_norm) if norms else None
    head_dim = int(attention.head_dim)
    kinds: list[str] = getattr(config, "layer_types", None) or []
    rope = getattr(config, "rope_parameters", None) or {}
    varied = bool(kinds) and all(isinstance(rope.get(kind), dict) for kind in kinds)
    return LayerParts(
        norms=tuple(None if name is None else _norm(getattr(layer, name)) for name in order),  # type: ignore[arg-type]
        query_norm=query,
        key_norm=_norm(attention.k_norm) if norms else None,
        whole_rows=query is not None and len(query.weight) != head_dim,
        qkv=qkv,
        out=_linears(attention, ("o_proj",))[0],
        gate_up=gate_up,
        down=_linears(mlp, ("down_proj",))[0],
        rotary=(kinds[index],) if varied else (),
        scale=float(attention.scaling),
        softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
        window=window_of(config, index),
        residual_factor=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _only(module: nn.Module, known: Collection[str]) -> None:
    """Refuses a module with children, parameters or buffers beyond those that are known."""
    extra = [
        name
        for name, child in module.named_children()
        if name not in known and not isinstance(child, nn.Dropout)
    ]
    extra += [name for name, _ in module.named_parameters(recurse=False)]
    if extra:
        raise NotFusable(f"{type(module).__name__} also has {', '.join(extra)}")


def _linears(module: nn.Module, *choices: tuple[str, ...]) -> tuple[nn.Module, ...]:
    for names in choices:
        found = [getattr(module, name, None) for name in names]
        if all(type(child) in (nn.Linear, PackedLinear) for child in found):
            return tuple(child for child in found if child is not None)
    raise NotFusable(f"{type(module).__name__} has no linear {' or '.join('/'.join(c) for c in choices)}")


def _activation(mlp: Any) -> nn.Module:
    found = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    if not isinstance(found, nn.Module):
        raise NotFusable(f"{type(mlp).__name__} has no activation")
    return found


def _norm(module: nn.Module) -> NormPart:
    """An RMS norm, told by what it computes: some scale by their weight, some by one more than it."""
    kind = type(module).__name__
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not kind.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        raise NotFusable(f"its norm is {kind}")
    x = torch.linspace(-3, 2, 2 * len(weight), dtype=torch.float32).view(2, -1)
    told = module(x.to(weight.dtype)).float()
    x = x.to(weight.dtype).float()
    plain = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        scale = weight.detach().float() + offset
        if torch.allclose(told, plain * scale, rtol=0.02, atol=0.02):
            return NormPart(scale.contiguous(), eps)
    raise NotFusable(f"{kind} does not compute a plain RMS norm")
