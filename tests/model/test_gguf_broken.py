"""GGUF files that cannot be loaded: one sentence each, and nothing left in the model cache."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import numpy as np
import pytest
from gguf_files import TOKENS, T, make_model, write_gguf

from octavo.errors import InvalidModelFile, OctavoError, UnsupportedModel
from octavo.models.gguf_header import read_header
from octavo.models.load import load_model
from octavo.models.store import model_cache


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def whole(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", make_model())


def refused(path):
    """The error of a file that must not be loaded."""
    with pytest.raises(OctavoError) as caught:
        load_model(path, dtype="fp32")
    assert left_in_cache() == []
    assert "\n" not in str(caught.value)
    return caught.value


def left_in_cache():
    return [path for folder in ("gguf", "files") for path in model_cache(folder).iterdir()]


@pytest.mark.parametrize("content", [b"Once upon a time", b"", b"GG", b"\x89PNG\r\n"])
def test_what_is_not_gguf_is_refused_by_its_first_bytes(content, tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_bytes(content)
    error = refused(path)
    assert isinstance(error, InvalidModelFile)
    assert f"is not a GGUF file: it starts with {content[:4]!r}" in str(error)


def test_a_shortened_file_is_refused_with_both_sizes(whole):
    size = whole.stat().st_size
    with whole.open("r+b") as file:
        file.truncate(size - 4096)
    error = refused(whole)
    assert isinstance(error, InvalidModelFile)
    assert f"is cut short: it has {size - 4096:,} bytes" in str(error)


def number(value):
    return "add_uint32", value


ODD = {
    "tokenizer": (UnsupportedModel, "tokenizer of kind 'bert'", {"tokenizer": {"model": "bert"}}),
    "splitting": (UnsupportedModel, "pre-tokenizer 'klingon'", {"tokenizer": {"pre": "klingon"}}),
    "default": (UnsupportedModel, "does not say how", {"tokenizer": {"pre": "default"}}),
    "no splitting": (UnsupportedModel, "Convert the model again with a newer", {"tokenizer": {"pre": None}}),
    "few tokens": (InvalidModelFile, "cannot be used", {"tokenizer": {"tokens": TOKENS[:40]}}),
    "many tokens": (InvalidModelFile, "embeddings", {"tokenizer": {"tokens": [*TOKENS, "one more"]}}),
    "alike": (
        InvalidModelFile,
        "1 of its tokens are spelled",
        {"tokenizer": {"tokens": [*TOKENS[:-1], TOKENS[0]]}},
    ),
    "rope": (UnsupportedModel, "'yarn'", {"metadata": {"llama.rope.scaling.type": ("add_string", "yarn")}}),
    "rotary": (
        UnsupportedModel,
        "rotates 8 of the 16",
        {"metadata": {"llama.rope.dimension_count": number(8)}},
    ),
    "more": (
        UnsupportedModel,
        "'blk.0.mystery.weight'",
        {"tensors": {"blk.0.mystery.weight": (np.ones(8, "f"), T.F32)}},
    ),
    "longrope": (
        UnsupportedModel,
        "longrope",
        {"tensors": {"rope_factors_long.weight": (np.ones(8, "f"), T.F32)}},
    ),
    "factors": (UnsupportedModel, "rope_freqs", {"tensors": {"rope_freqs.weight": (np.ones(5, "f"), T.F32)}}),
    "fewer": (
        UnsupportedModel,
        r"up_proj.weight should be \(96, 64\) and is absent",
        {"leave_out": {"blk.0.ffn_up.weight"}},
    ),
    "no embedding": (InvalidModelFile, "token embedding", {"leave_out": {"token_embd.weight"}}),
    "shape": (
        UnsupportedModel,
        "k_proj.weight should be",
        {"metadata": {"llama.attention.head_count_kv": number(1)}},
    ),
    "layers": (InvalidModelFile, "says 3 layers", {"metadata": {"llama.block_count": number(3)}}),
    "many layers": (InvalidModelFile, "layers", {"metadata": {"llama.block_count": number(2**32 - 1)}}),
    "layers between": (
        InvalidModelFile,
        "says 50 layers, and its tensors are of 3,",
        {
            "metadata": {"llama.block_count": number(50)},
            "tensors": {"blk.49.attn_norm.weight": (np.ones(64, "f"), T.F32)},
        },
    ),
    "wide": (InvalidModelFile, "another width", {"metadata": {"llama.embedding_length": number(2**32 - 1)}}),
    "no heads": (
        InvalidModelFile,
        "head_count is 0",
        {"metadata": {"llama.attention.head_count": number(0)}},
    ),
    "long heads": (
        UnsupportedModel,
        "rotates 16",
        {"metadata": {"llama.attention.key_length": number(2**31)}},
    ),
    "per layer": (
        InvalidModelFile,
        "feed_forward_length is",
        {"metadata": {"llama.feed_forward_length": ("add_array", [1, 2])}},
    ),
    "not causal": (
        UnsupportedModel,
        "attends to later tokens",
        {"metadata": {"llama.attention.causal": ("add_bool", False)}},
    ),
    "parts": (InvalidModelFile, "one of 5 parts", {"metadata": {"split.count": ("add_uint16", 5)}}),
}


@pytest.mark.parametrize("case", ODD)
def test_what_cannot_be_run_right_is_refused_with_the_reason(case, tmp_path):
    kind, words, options = ODD[case]
    error = refused(write_gguf(tmp_path / "odd.gguf", make_model(), **options))
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error


@pytest.mark.parametrize(
    ("arch", "words", "metadata"),
    [
        ("olmo2", "slides its attention over 32 tokens", {"olmo2.attention.sliding_window": number(32)}),
        (
            "gemma3",
            "which layers slide over a window, but with \\[True, False\\]",
            {"gemma3.attention.sliding_window_pattern": ("add_array", [True, False])},
        ),
    ],
)
def test_layers_that_slide_in_a_way_that_cannot_be_read_are_refused(arch, words, metadata, tmp_path):
    path = write_gguf(tmp_path / "odd.gguf", make_model(arch), arch, metadata=metadata)
    with pytest.raises(UnsupportedModel, match=words):
        raise refused(path)


@pytest.mark.parametrize("rotated", [32, 7])
def test_a_rotary_width_that_no_head_has_is_refused(rotated, tmp_path):
    metadata = {"phi3.rope.dimension_count": number(rotated)}
    error = refused(write_gguf(tmp_path / "odd.gguf", make_model("phi3"), "phi3", metadata=metadata))
    assert type(error) is InvalidModelFile
    assert f"rotates {rotated} of the 16 dimensions" in str(error)


def test_an_architecture_that_cannot_be_read_is_named(tmp_path):
    path = write_gguf(tmp_path / "odd.gguf", make_model())
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    error = refused(path)
    assert type(error) is UnsupportedModel
    assert "architecture 'mamba'" in str(error)


@pytest.mark.parametrize(
    ("position", "layout", "value", "words"),
    [
        (4, "<I", 1, "version 1 of GGUF"),
        (4, ">I", 3, "big-endian"),
        (8, "<Q", 2**60, "asks for 1,152,921,504,606,846,976 tensors"),
        (16, "<Q", 2**60, "asks for 1,152,921,504,606,846,976 metadata entries"),
        (24, "<Q", 2**63, "characters"),
        (24, "<Q", 2**25, "characters"),
    ],
)
def test_a_false_number_in_the_first_bytes_is_named(position, layout, value, words, whole):
    content = bytearray(whole.read_bytes())
    struct.pack_into(layout, content, position, value)
    whole.write_bytes(content)
    assert words in str(refused(whole))


def test_a_file_cut_anywhere_is_refused(whole):
    content = whole.read_bytes()
    start = min(tensor.offset for tensor in read_header(whole).tensors.values())
    lengths = {*range(0, start, 61), *range(start, len(content), 9973), len(content) - 1}
    for length in lengths:
        whole.write_bytes(content[:length])
        assert isinstance(refused(whole), InvalidModelFile), length


def test_a_header_with_flipped_bytes_is_loaded_or_refused(whole):
    content = whole.read_bytes()
    start = min(tensor.offset for tensor in read_header(whole).tensors.values())
    random_bytes = random.Random(0)
    loaded = 0
    for _ in range(120):
        broken = bytearray(content)
        for _ in range(random_bytes.choice([1, 1, 3])):
            broken[random_bytes.randrange(start)] = random_bytes.choice(
                [0, 1, 0x7F, 0xFF, random_bytes.randrange(256)]
            )
        whole.write_bytes(broken)
        with suppress(OctavoError):
            load_model(whole, dtype="fp32")
            loaded += 1
    assert 0 < loaded < 120
