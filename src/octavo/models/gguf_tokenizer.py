"""The tokenizer inside a GGUF header, and the tokens that end an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidModelFile, UnsupportedModel
from octavo.models.gguf_header import Header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_SPLIT_LIKE_GPT2 = frozenset({"gpt-2", "phi-2", "olmo", "mpt"})
_SPLIT_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
"""Pre-tokenizers that cut every digit off first, then split as GPT-2 does."""
_BEGINS_TEXT = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken"})
"""Pre-tokenizers whose texts start with the beginning token where the file does not say."""
_WHOLE_WORDS = _BEGINS_TEXT | {"falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
"""Pre-tokenizers whose pieces are looked up whole before any merge."""
_CONTROL, _USER_DEFINED = 3, 4
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ENDS_OF_TURN = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>"}
)


def build(header: Header) -> PreTrainedTokenizerFast:
    """The tokenizer that the header describes, with its chat template.

    Raises:
        InvalidModelFile: the header has no tokenizer, or one with tokens that are spelled alike.
        UnsupportedModel: the tokenizer is of a kind that cannot be rebuilt exactly.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    metadata = header.metadata
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    tokens = _tokens(header)
    if kind == "gpt2" and split == "default":
        # Old converters did not name it. Most families split otherwise than GPT-2, which shows in no other place.
        if metadata["general.architecture"] != "gpt2":
            raise UnsupportedModel(
                f"{header.path} does not say how its tokenizer splits text (tokenizer.ggml.pre). Convert the model "
                "again with a newer llama.cpp, or take another conversion, its safetensors folder or hub id."
            )
        split = "gpt-2"
    if kind not in ("gpt2", "llama") or (
        kind == "gpt2" and split not in _SPLIT_LIKE_GPT2 | _SPLIT_DIGITS | GGUF_PRE_TOKENIZER_SPLITS.keys()
    ):
        raise UnsupportedModel(
            f"{header.path} has a tokenizer of kind {kind!r} with pre-tokenizer {split!r}, which cannot be "
            "rebuilt exactly. Take the model's safetensors folder or hub id instead."
        )
    if kind == "gpt2":
        backend = _byte_level(header, tokens, split)
    else:
        described = {
            name: metadata[f"tokenizer.{key}"]
            for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
            if f"tokenizer.{key}" in metadata
        }
        backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], described)
        if metadata.get("tokenizer.ggml.add_space_prefix") is False:
            _leave_beginnings(backend)
    special: dict[str, Any] = {}
    for name, key in _NAMED.items():
        token_id = _token_id(header, key)
        special[f"{name}_token"] = None if token_id is None else tokens[token_id]
    # As llama.cpp does where the file does not say.
    begins = special["bos_token"] is not None and (kind == "llama" or split in _BEGINS_TEXT)
    for name, default in (("add_bos_token", begins), ("add_eos_token", False)):
        special[name] = bool(metadata.get(f"tokenizer.ggml.{name}", default))
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


def _byte_level(header: Header, tokens: list[str], split: str) -> Tokenizer:
    """Byte-level BPE. transformers would add an `<|endoftext|>`, and cut tokens such as `<｜User｜>` into bytes."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kinds = dict(enumerate(header.metadata.get("tokenizer.ggml.token_type", [])))
    # Those tokens are looked for in the text itself, so they are not spelled in the alphabet of bytes.
    added = {index for index in range(len(tokens)) if kinds.get(index) in (_CONTROL, _USER_DEFINED)}
    raw = added | {_token_id(header, key) for key in _NAMED.values()}
    spelling = bytes_to_unicode()
    alphabet = set(spelling.values())
    vocabulary = {
        token
        if index in raw or set(token) <= alphabet
        else "".join(spelling[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }
    if len(vocabulary) != len(tokens):
        raise InvalidModelFile(
            f"{header.path} cannot be used: {len(tokens) - len(vocabulary):,} of its tokens are spelled as others "
            "are. Take another conversion of the model."
        )
    merges = [tuple(merge.split(" ")) for merge in header.metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in _WHOLE_WORDS))
    first: list[Any] = []
    if split in _SPLIT_DIGITS:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif split in GGUF_PRE_TOKENIZER_SPLITS:
        first = [pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[split]), behavior="isolated")]
    bytes_of = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=split not in GGUF_PRE_TOKENIZER_SPLITS
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, bytes_of])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(tokens[index], normalized=False, special=kinds[index] == _CONTROL)
            for index in sorted(added)
        ]
    )
    return backend


def _leave_beginnings(backend: Tokenizer) -> None:
    """Makes a SentencePiece tokenizer put no space before a text, and take none from before a decoded one."""
    from tokenizers import decoders, normalizers

    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def eos_token_ids(header: Header) -> set[int]:
    """Tokens that end an answer: those the header names, and control tokens known to end a turn."""
    tokens = _tokens(header)
    kinds = header.metadata.get("tokenizer.ggml.token_type", [])
    named = (_token_id(header, key) for key in ("eos", "eot"))
    known = (index for index, kind in enumerate(kinds) if kind == _CONTROL and tokens[index] in _ENDS_OF_TURN)
    return {token_id for token_id in (*named, *known) if token_id is not None}


def _tokens(header: Header) -> list[str]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise InvalidModelFile(f"{header.path} has no tokenizer. Take another conversion of the model.")
    return tokens


def _token_id(header: Header, key: str) -> int | None:
    token_id = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    known = isinstance(token_id, int) and 0 <= token_id < len(_tokens(header))
    return token_id if known else None
