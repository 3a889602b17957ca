"""Facts of public configs (what their config.json says of layers and widths), and what they keep, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}


@dataclass(frozen=True)
class Public:
    """`bf16` and `int8` are bytes of a token, `state` those of a conversation besides."""

    config: dict[str, Any]
    bf16: int
    int8: int
    parameters: int | None = None
    state: int = 0
    runs: bool = True


def int8_head(dim: int, value_dim: int | None = None) -> int:
    """Bytes of a head's token: codes, a scale and a zero a channel for 32 tokens, and a pair for the token's values."""
    return dim + dim * 4 // 32 + (dim if value_dim is None else value_dim) + 4


PUBLIC = {
    "Llama-2-7B": Public(
        {**_LLAMA, "intermediate_size": 11008, "num_key_value_heads": 32, "max_position_embeddings": 4096, "vocab_size": 32000, "tie_word_embeddings": False},
        bf16=2 * 32 * 32 * 128 * 2,
        int8=32 * 32 * int8_head(128),
        parameters=6_738_415_616,
    ),
    "Llama-3-8B": Public(
        {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128256, "tie_word_embeddings": False},
        bf16=2 * 32 * 8 * 128 * 2,
        int8=32 * 8 * int8_head(128),
        parameters=8_030_261_248,
    ),
    "Qwen2.5-7B": Public(
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "vocab_size": 152064, "tie_word_embeddings": False},
        bf16=2 * 28 * 4 * 128 * 2,
        int8=28 * 4 * int8_head(128),
        parameters=7_615_616_512,
    ),
    "Qwen3-8B": Public(
        {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "vocab_size": 151936, "tie_word_embeddings": False},
        bf16=2 * 36 * 8 * 128 * 2,
        int8=36 * 8 * int8_head(128),
        parameters=8_190_735_360,
    ),
    "Mistral-7B-v0.1": Public(
        {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": 4096, "vocab_size": 32000, "tie_word_embeddings": False},
        bf16=2 * 32 * 8 * 128 * 2,
        int8=32 * 8 * int8_head(128),
        parameters=7_241_732_096,
    ),
    "Gemma-2-2B": Public(
        {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096, "vocab_size": 256000},
        bf16=2 * 26 * 4 * 256 * 2,
        int8=26 * 4 * int8_head(256),
        parameters=2_614_341_888,
    ),
    "Gemma-3-1B": Public(
        {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144},
        bf16=2 * 26 * 1 * 256 * 2,
        int8=26 * 1 * int8_head(256),
        parameters=999_885_952,
    ),
    "DeepSeek-V2-Lite": Public(
        {"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 1, "max_position_embeddings": 163840, "vocab_size": 102400},
        bf16=27 * (512 + 64) * 2,
        int8=27 * (576 + 576 * 4 // 32),
        parameters=15_706_484_224,
        runs=False,
    ),
    "DeepSeek-V3": Public(
        {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "max_position_embeddings": 163840, "vocab_size": 129280},
        bf16=61 * (512 + 64) * 2,
        int8=61 * (576 + 576 * 4 // 32),
        parameters=671_026_404_352,
        runs=False,
    ),
    "Phi-3-mini-4k": Public(
        {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "sliding_window": 2047, "vocab_size": 32064},
        bf16=2 * 32 * 32 * 96 * 2,
        int8=32 * 32 * int8_head(96),
        parameters=3_821_079_552,
    ),
    "GPT-2": Public(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        bf16=2 * 12 * 12 * 64 * 2,
        int8=12 * 12 * int8_head(64),
        parameters=124_439_808,
    ),
    "Qwen3-Next-80B": Public(
        {"model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144, "vocab_size": 151936},
        bf16=2 * 12 * 2 * 256 * 2,
        int8=12 * 2 * int8_head(256),
        state=36 * (32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 4) * 4,
        runs=False,
    ),
    "Jamba-v0.1": Public(
        {"model_type": "jamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "num_experts": 16, "max_position_embeddings": 262144, "vocab_size": 65536},
        bf16=2 * 4 * 8 * 128 * 2,
        int8=4 * 8 * int8_head(128),
        state=28 * (8192 * (16 + 4)) * 4,
        runs=False,
    ),
    "SmolLM2-135M": Public(
        {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "vocab_size": 49152, "tie_word_embeddings": True},
        bf16=2 * 30 * 3 * 64 * 2,
        int8=30 * 3 * int8_head(64),
        parameters=134_515_008,
    ),
    "GPT-OSS-20B": Public(
        {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 32, "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072, "vocab_size": 201088, "quantization_config": {"quant_method": "mxfp4"}},
        bf16=2 * 24 * 8 * 64 * 2,
        int8=24 * 8 * int8_head(64),
        parameters=20_914_757_184,
    ),
}  # fmt: skip
