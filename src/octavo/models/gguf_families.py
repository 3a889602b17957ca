"""Which architectures can be read from a GGUF file: names and settings there, and in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one `general.architecture` maps to a family of transformers.

    Attributes:
        model_type: of the config.
        names: stem of a GGUF name (`blk.N.` left out for a layer's) -> stem of the parameter's.
        layers: prefix of a layer's parameters.
        keys: GGUF key (without the architecture) -> config field. All have to be there.
        optional: the same for those that may be missing.
        interleaved_heads: query and key rows are stored with each head's two halves interleaved.
        shifted_norms: weights of norms are stored with one added, as they multiply.
        transposed: stems whose weight transformers keeps with the input dimension first.
    """

    model_type: str
    names: Mapping[str, str]
    keys: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    interleaved_heads: bool = False
    shifted_norms: bool = False
    transposed: frozenset[str] = field(default_factory=frozenset)


_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_DECODER = _ENDS | _NORMS | _ATTENTION | _MLP

ARCHITECTURES = {
    "llama": Architecture("llama", _DECODER, _KEYS | _RMS, interleaved_heads=True),
    "qwen2": Architecture("qwen2", _DECODER, _KEYS | _RMS),
    "qwen3": Architecture(
        "qwen3",
        _DECODER | _HEAD_NORMS,
        _KEYS | _RMS,
    ),
    "phi3": Architecture(
        "phi3",
        _ENDS
        | _NORMS
        | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        _KEYS | _RMS,
    ),
    "gemma": Architecture("gemma", _DECODER, _KEYS | _RMS, shifted_norms=True),
    "gemma2": Architecture(
        "gemma2", _DECODER | _FOUR_NORMS, _KEYS | _RMS | _WINDOW, optional=_CAPS, shifted_norms=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _DECODER | _FOUR_NORMS | _HEAD_NORMS,
        _KEYS | _RMS | _WINDOW,
        optional=_CAPS,
        shifted_norms=True,
    ),
    "olmo2": Architecture(
        "olmo2",
        _ENDS
        | _ATTENTION
        | _MLP
        | _HEAD_NORMS
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        _KEYS | _RMS,
    ),
    "granite": Architecture(
        "granite",
        _DECODER,
        _KEYS | _RMS,
        optional={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        interleaved_heads=True,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _ENDS | _NORMS | _ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        _KEYS | {"attention.layer_norm_epsilon": "norm_epsilon"},
    ),
    "gpt2": Architecture(
        "gpt2",
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
            "attn_norm": "ln_1",
            "ffn_norm": "ln_2",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        {
            "block_count": "n_layer",
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        layers="transformer.h",
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
}
