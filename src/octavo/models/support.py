"""Which models Octavo runs, and the reason for each that it refuses. Never run wrongly."""

from __future__ import annotations

from typing import Any

from octavo.errors import UnsupportedModel
from octavo.spec import CacheGroup, CacheSpec, ComputeDtype, PageShape

_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
_TESTED = (
    "gemma gemma2 gemma3_text gpt2 gpt_neox gpt_oss granite llama mistral mixtral olmo2 phi3 qwen2 qwen3 qwen3_moe "
    "starcoder2"
)
TESTED_FAMILIES = frozenset(_TESTED.split())
"""Families whose logits the tests compare with transformers' own; others are compared when they are loaded."""


def refuse_unsupported(model: Any) -> None:
    """Checks a loaded transformers model.

    Raises:
        UnsupportedModel: naming the model type and the reason.
    """
    config = model.config
    kind = getattr(config, "model_type", type(model).__name__)

    def refuse(reason: str) -> None:
        raise UnsupportedModel(f"Octavo does not run {kind} models of this kind: {reason}.")

    if model.training:
        refuse("the model is in training mode, and Octavo only infers; call model.eval() first")
    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder, and Octavo runs decoders")
    if any(hasattr(config, name) for name in ("vision_config", "audio_config", "text_config")):
        refuse("it takes more than text (or wraps a text model); load its text model by itself")
    if not hasattr(model, "lm_head") and getattr(model, "get_output_embeddings", lambda: None)() is None:
        refuse("it has no language-model head")
    if not getattr(model, "_supports_attention_backend", False):
        refuse("its attention does not go through transformers' attention interface")
    if any(getattr(module, "is_causal", None) is False for module in model.modules()):
        refuse("it attends to later tokens too (it is not causal)")
    if getattr(config, "is_heterogeneous", False):
        refuse("its layers differ in shape or kind, which is not supported yet")
    if getattr(config, "alibi", False) or getattr(config, "use_alibi", False):
        refuse("ALiBi position biases are added inside its attention")
    if getattr(config, "kv_lora_rank", None):
        refuse("its cache holds latents (MLA), which are not supported yet")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("some of its layers share keys and values, which is not supported yet")
    if getattr(config, "attn_temperature_tuning", None) or getattr(config, "attention_chunk_size", None):
        refuse("its attention is chunked or tuned by position, which is not supported yet")
    if getattr(config, "add_cross_attention", False):
        refuse("it has cross-attention")
    if getattr(config, "reorder_and_upcast_attn", False):
        refuse("it asks for GPT-2's reordered attention, which bypasses the attention interface")
    _refuse_layers(config, refuse)
    _refuse_rope(config, refuse)


def _refuse_layers(config: Any, refuse: Any) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ())
    other = layer_types - {"full_attention", "sliding_attention"}
    if other:
        refuse(f"it has layers of type {', '.join(sorted(other))}, which are not supported yet")


def _refuse_rope(config: Any, refuse: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    sets = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    for parameters in sets:
        kind = parameters.get("rope_type", "default")
        if kind not in _STATIC_ROPE:
            refuse(f"its rotary embedding ({kind}) depends on the longest position in the batch")
        share = parameters.get("partial_rotary_factor")
        if share is not None and not 0 < share <= 1:
            refuse(f"its rotary embedding turns {share:g} of a head's channels (partial_rotary_factor)")
        if "mrope_section" in parameters or parameters.get("type") == "mrope":
            refuse("its rotary embedding takes several positions per token (M-RoPE)")
    if getattr(config, "mrope_section", None):
        refuse("its rotary embedding takes several positions per token (M-RoPE)")


def cache_spec(model: Any, dtype: ComputeDtype) -> CacheSpec:
    """Reads the layout of keys and values in the compute dtype from the model's config."""
    config = model.config
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    page = PageShape(num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim)
    group = CacheGroup("full_attention", int(config.num_hidden_layers), heads, page)
    return CacheSpec((group,), dtype)
