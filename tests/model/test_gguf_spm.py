"""SentencePiece vocabularies in GGUF files split text as SentencePiece does."""

from __future__ import annotations

import pytest
import sentencepiece
from gguf_files import make_model, write_gguf

from octavo.engine.verify import default_text
from octavo.models.load import load_model

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
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
    "gemma2": {
        "add_dummy_prefix": False,
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
        **{"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"},
        "user_defined_symbols": ["<mask>"],
    },
}
"""What the families' trainers are told that differs."""


@pytest.fixture(scope="module", params=SPELLED)
def vocabulary(request, tmp_path_factory):
    """SentencePiece as a family of models trains it, and what llama.cpp's converter makes of it."""
    folder = tmp_path_factory.mktemp("spm")
    text = folder / "text.txt"
    text.write_text(default_text()[:60_000], encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "spm"),
        model_type="bpe",
        vocab_size=640,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **SPELLED[request.param],
    )
    spm = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    tokens, types = [], []
    for index in range(spm.vocab_size()):
        tokens.append(spm.id_to_piece(index))
        special = CONTROL if spm.is_control(index) else UNKNOWN if spm.is_unknown(index) else NORMAL
        types.append(BYTE if spm.is_byte(index) else special)
    scores = [spm.get_score(index) for index in range(spm.vocab_size())]
    settings = {"model": "llama", "pre": "default", "tokens": tokens, "types": types, "scores": scores}
    model = make_model(request.param, vocab_size=len(tokens))
    path = write_gguf(folder / "tiny.gguf", model, request.param, tokenizer=settings)
    return spm, load_model(path, dtype="fp32").tokenizer


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_becomes_the_ids_that_sentencepiece_gives_it(vocabulary, text):
    spm, tokenizer = vocabulary
    assert tokenizer.encode(text, add_special_tokens=False) == spm.encode(text)
    assert tokenizer.decode(spm.encode(text)) == text
