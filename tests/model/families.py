"""Tiny random models of every tested family, and engines around them."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from octavo.models.loaded import LoadedModel

VOCAB = 320
_LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict] = {
    "llama": _LLAMA_LIKE,
    "mistral": {**_LLAMA_LIKE, "sliding_window": None},
    "qwen2": _LLAMA_LIKE,
    "qwen3": {**_LLAMA_LIKE, "head_dim": 32},
    "phi3": {**_LLAMA_LIKE, "sliding_window": None},
    "gemma": {**_LLAMA_LIKE, "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"},
    "olmo2": _LLAMA_LIKE,
    "granite": {**_LLAMA_LIKE, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_neox": {**{k: v for k, v in _LLAMA_LIKE.items() if k != "num_key_value_heads"}, "rotary_pct": 0.25},
    "starcoder2": {**_LLAMA_LIKE, "sliding_window": None},
    "mixtral": {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "mistral-sliding": {**_LLAMA_LIKE, "sliding_window": 40},
    "gemma2": {**_LLAMA_LIKE, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 20.0},
    "gemma3_text": {**_LLAMA_LIKE, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {**_LLAMA_LIKE, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "gpt_oss": {**_LLAMA_LIKE, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40},
}  # fmt: skip
"""Configurations by model type; `<model type>-<what is special>` is one more of the same type."""

FUSED = [
    "llama", "mistral", "mistral-sliding", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "olmo2", "granite",
]  # fmt: skip
"""Those whose layers run as one native call."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, one token a byte, with a few special tokens in front."""
    specials = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )  # fmt: skip


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **changes: object):
    """A random model of a family, in evaluation mode; the same weights at every call."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(family.encode()).digest()[:4]))
    config = AutoConfig.for_model(family.split("-")[0], **{**FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Larger weights than the usual start: attention that is not flat shows mistakes.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15 if "embed" not in name else 1.0)
            elif "bias" in name or "sinks" in name:
                parameter.normal_(0, 0.1)
    return model.eval()


def answers_at_once(engine, prompts: list[list[int]], **sampling: object) -> list:
    """The replies to prompts that are all asked at the same time, each in a thread of its own."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: engine.generate(prompt, ignore_eos=True, **sampling), prompts))


def tiny_loaded(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> LoadedModel:
    model = tiny_model(family, dtype, **changes)
    return LoadedModel(
        name=f"tiny-{family}",
        model=model,
        dtype="bf16" if dtype == torch.bfloat16 else "fp32",
        tokenizer=tiny_tokenizer(),
        fingerprint=hashlib.sha256(f"{family} {sorted(changes.items())}".encode()).digest(),
        context_length=512,
        eos_token_ids=frozenset({2}),
        weights_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        source="made in the test",
    )
