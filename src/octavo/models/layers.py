"""What the layers of a config keep of a text: keys and values, latents, or states."""

from __future__ import annotations

from collections import Counter
from typing import Any

from octavo.errors import UnsupportedModel
from octavo.spec import CacheGroup, PageShape

_STATES = {"linear_attention", "mamba", "mamba2", "conv", "recurrent"}


def cache_groups(config: Any) -> list[CacheGroup]:
    """The layers of a config by what they keep; attention over everything first.

    Raises:
        UnsupportedModel: a layer is of a kind that is not known.
        AttributeError, TypeError, ValueError, ZeroDivisionError: the config does not say what it has to.
    """
    num_heads = int(config.num_attention_heads)
    page = _page(config, num_heads)
    kinds = Counter(_kinds(config))
    window = int(
        getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None) or 0
    )
    groups = []
    for kind in sorted(kinds, key=lambda kind: (kind in _STATES, kind)):
        count = kinds[kind]
        if kind in ("full_attention", "attention"):
            whole = "latent" if getattr(config, "kv_lora_rank", None) else "full_attention"
            groups.append(CacheGroup(whole, count, num_heads, page))  # type: ignore[arg-type]
        elif kind in ("sliding_attention", "chunked_attention"):
            groups.append(CacheGroup("sliding_window", count, num_heads, page, window=window))
        elif kind in _STATES:
            none = PageShape(0, 0, 0)
            groups.append(
                CacheGroup("recurrent", count, num_heads, none, state_elements=_state(config, kind))
            )
        else:
            raise UnsupportedModel(
                f"Layers of type {kind} are not known, so what they keep cannot be planned. Known are full and sliding "
                "attention, latents, and the states of Jamba, Qwen3-Next and LFM2."
            )
    return groups


def _page(config: Any, num_heads: int) -> PageShape:
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        return PageShape(1, int(rank) + int(config.qk_rope_head_dim), 0)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    return PageShape(kv_heads, head_dim, int(getattr(config, "v_head_dim", None) or head_dim))


def _kinds(config: Any) -> list[str]:
    """One for each layer that keeps something of its own."""
    num_layers = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if sliding else "full_attention"] * num_layers
    return list(kinds)[: num_layers - int(getattr(config, "num_kv_shared_layers", None) or 0)]


def _state(config: Any, kind: str) -> int:
    """Elements that a layer keeps of a sequence, however long it is."""
    if getattr(
        config, "linear_num_value_heads", None
    ):  # gated delta rule: a matrix a head, and a short convolution
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        matrix = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        return int((2 * keys + values) * config.linear_conv_kernel_dim + matrix)
    if getattr(config, "mamba_d_state", None):
        inner = config.mamba_expand * config.hidden_size
        return int(inner * (config.mamba_d_conv + config.mamba_d_state))
    if kind == "conv":
        return int(config.hidden_size * config.conv_L_cache)
    raise UnsupportedModel(
        f"What {config.model_type} keeps in its layers of type {kind} is not known, so it cannot be planned."
    )
