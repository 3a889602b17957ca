"""Small GGUF files, made with llama.cpp's own conventions from random transformers models."""

from __future__ import annotations

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import quantize
from transformers.convert_slow_tokenizer import bytes_to_unicode

T = gguf.GGMLQuantizationType
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ALPHABET = list(bytes_to_unicode().values())
MERGES = ["t h", "th e", "Ġ the", "Ġ Ġ"]
TOKENS = SPECIAL + ALPHABET + ["th", "the", "Ġthe", "ĠĠ"]
TOKENS += [f"<unused{i}>" for i in range(-len(TOKENS) % 8)]
SIZES = {"vocab_size": len(TOKENS), "max_position_embeddings": 128}
SIZES |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TIED = {"tie_word_embeddings": True, "pad_token_id": None}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **HEADS, **TIED, rope_theta=5000.0),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, **HEADS, **TIED),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **HEADS, **TIED, head_dim=32),
    "phi3": lambda: transformers.Phi3Config(**SIZES, **HEADS, pad_token_id=None, partial_rotary_factor=0.5),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, **HEADS, **TIED, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES,
        **HEADS,
        **TIED,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=20,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 6},
        **HEADS,
        **TIED,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=20,
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES, **HEADS, pad_token_id=None),
    "granite": lambda: transformers.GraniteConfig(
        **SIZES,
        **HEADS,
        **TIED,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        logits_scaling=1.7,
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(
        **SIZES, **HEADS, rope_theta=7000.0, sliding_window=None
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=128, vocab_size=len(TOKENS), n_inner=96
    ),
}


class Writer(gguf.GGUFWriter):
    """The first value of a key wins, so that a test can say it before the rest is written."""

    def add_key_value(self, key, val, vtype, sub_type=None):
        if key not in self.kv_data[0]:
            super().add_key_value(key, val, vtype, sub_type)


def make_model(arch="llama", **changes):
    """A random model whose norms and biases are not the ones and zeros that hide a mistake."""
    torch.manual_seed(0)
    config = CONFIGS[arch]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            # Few bits, so that a norm that is stored with one added comes back as it was.
            parameter.data.uniform_(0.5, 1.5).mul_(1 << 16).round_().div_(1 << 16)
    return model


def to_llama_cpp(arch, name, weight, config):
    """What llama.cpp's converter does to a weight."""
    if arch in ("llama", "granite") and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)
    if arch.startswith("gemma") and "norm" in name:
        return weight + 1
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return weight.T
    return weight


def write_gguf(
    path,
    model,
    arch="llama",
    kind=T.F32,
    *,
    metadata=None,
    tensors=None,
    leave_out=(),
    tokenizer=None,
    pack=quantize,
):
    """Write the model.

    Args:
        path: of the file.
        model: what is written.
        arch: llama.cpp's name of the architecture.
        kind: type of the matrices; norms and biases are F32.
        metadata: key -> (method of the writer, value), instead of the model's own or besides.
        tensors: name -> (values, type), besides the model's own.
        leave_out: names of tensors not to write.
        tokenizer: of `model`, `pre`, `template`, `bos`, `tokens`, `types` and `scores`, what is not as usual;
            `pre` and `bos` are not written if they are None.
        pack: makes rows of a type from a matrix.
    """
    config = model.config
    heads, width = config.num_attention_heads, config.hidden_size
    writer = Writer(path, arch)
    for key, (add, value) in (metadata or {}).items():
        getattr(writer, add)(key, value)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(config.n_inner if arch == "gpt2" else config.intermediate_size)
    writer.add_head_count(heads)
    if arch in ("gpt2", "starcoder2"):
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch != "gpt2":
        head_dim = getattr(config, "head_dim", None) or width // heads
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        writer.add_rope_freq_base(rope["rope_theta"])
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(head_dim * share))
    settings = {"model": "gpt2", "pre": "gpt-2", "template": TEMPLATE, "bos": False, "tokens": TOKENS} | (
        tokenizer or {}
    )
    writer.add_tokenizer_model(settings["model"])
    if settings["pre"] is not None:
        writer.add_tokenizer_pre(settings["pre"])
    writer.add_token_list(settings["tokens"])
    writer.add_token_types(
        settings.get("types") or [3 if token in SPECIAL else 1 for token in settings["tokens"]]
    )
    if "scores" in settings:
        writer.add_token_scores(settings["scores"])
    else:
        writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if settings["bos"] is not None:
        writer.add_add_bos_token(settings["bos"])
    writer.add_chat_template(settings["template"])
    names = gguf.get_tensor_name_map(
        {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
    )
    tied = config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        to = f"{names.get_name(stem)}.{suffix}"
        if to in leave_out or (tied and name == "lm_head.weight"):
            continue
        values = to_llama_cpp(arch, name, parameter.float().numpy(), config)
        packed = kind if values.ndim == 2 else T.F32
        writer.add_tensor(to, pack(np.ascontiguousarray(values), packed), raw_dtype=packed)
    for to, (values, packed) in (tensors or {}).items():
        writer.add_tensor(to, values, raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model, length=40):
    """Of two rows of random tokens."""
    ids = torch.randint(0, len(TOKENS), (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits
