"""SentencePiece vocabularies in GGUF files split text as SentencePiece does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_files import make_model, write_gguf

from octavo.engine.verify import default_text
from octavo.models.load import load_model

TEXTS = (
    "the",
    "The Crofts took possession, and Anne walked up to Kellynch.",
    "two  spaces,   three    and four",
    "line\nbreaks\n\nand\ttabs",
    "naïve café — 中文 🙂",
    "12345 67,890.12",
)


SPELLED = {
    "llama": {"add_dummy_prefix": True},
    "llama-bare": {"add_dummy_prefix": False},
    "phi3-bare": {"add_dummy_prefix": False},
    "gemma2": {
        "add_dummy_prefix": False,
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
        **{"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"},
        "user_defined_symbols": ["<mask>"],
    },
}
"""What the families' trainers are told that differs; `-bare` are those without a space before a text."""


@pytest.fixture(scope="module", params=SPELLED)
def vocabulary(request, tmp_path_factory):
    """SentencePiece as a family of models trains it, and what llama.cpp's converter makes of it."""
    folder = tmp_path_factory.mktemp("spm")
    text = folder / "text.txt"
    text.write_text(default_text()[:60_000], encoding="utf-8")
    asked = {"folder": str(folder), "options": SPELLED[request.param], "texts": TEXTS}
    program = Path(__file__).with_name("train_sentencepiece.py")
    run = subprocess.run(
        [sys.executable, program],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = json.loads(run.stdout)
    ids = dict(zip(TEXTS, found.pop("ids"), strict=True))
    settings = {"model": "llama", "pre": "default", **found}
    arch = request.param.partition("-")[0]
    model = make_model(arch, vocab_size=len(found["tokens"]))
    prefix = {"tokenizer.ggml.add_space_prefix": ("add_bool", SPELLED[request.param]["add_dummy_prefix"])}
    path = write_gguf(folder / "tiny.gguf", model, arch, tokenizer=settings, metadata=prefix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(folder / "cache"))
        return ids, load_model(path, dtype="fp32").tokenizer


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_becomes_the_ids_that_sentencepiece_gives_it(vocabulary, text):
    ids, tokenizer = vocabulary
    assert tokenizer.encode(text, add_special_tokens=False) == ids[text]
    assert tokenizer.decode(ids[text]) == text
