"""GGUF files and folders whose weights are packed, or can be: small, random, of every type."""

from __future__ import annotations

import numpy as np
import transformers
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from gguf_files import SPECIAL, TEMPLATE, TOKENS, T, make_model, write_gguf
from tokenizers import Tokenizer, models, pre_tokenizers

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""K-quants have 256 inputs to a scale."""

_HALVES = {T.Q2_K: (80, 82), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,), T.IQ4_NL: (0,)}
"""Where a block's half-precision scales are, in types that the gguf package reads and does not write."""
_LARGEST = {T.Q2_K: 60.0, T.Q4_K: 945.0, T.Q5_K: 1953.0, T.Q6_K: 4096.0, T.IQ4_NL: 127.0}


def pack(values: np.ndarray, kind: T) -> np.ndarray:
    """Rows of a type: `values` quantised where the gguf package can, else random codes of about their size."""
    if kind not in _HALVES:
        return quantize(np.ascontiguousarray(values), kind)
    size, num_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(values.size)
    blocks = random.integers(0, 256, (values.size // size, num_bytes), dtype=np.uint8)
    for place in _HALVES[kind]:
        scales = random.uniform(0.5, 1.0, len(blocks)) * 4 * values.std() / _LARGEST[kind]
        blocks[:, place : place + 2] = scales.astype("<f2")[:, None].view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


def write_packed(path, kind: T, arch: str = "llama", **changes):
    """A file of a random model with all matrices of one type."""
    model = make_model(arch, **(WIDE if kind in _HALVES else {}), **changes)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4.0)  # attention that is not flat shows mistakes
    return write_gguf(path, model, arch, kind, pack=pack)


def save_folder(path, **changes):
    """A folder of a random model, as transformers saves one."""
    make_model(**changes).save_pretrained(path)
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[2], chat_template=TEMPLATE
    ).save_pretrained(path)
    return path
