"""Trains a SentencePiece vocabulary and splits texts with it: JSON in, JSON out.

A program of its own: the package brings a second OpenMP runtime into the process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sentencepiece

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def main(folder: Path, options: dict[str, object], texts: list[str]) -> dict[str, object]:
    """Args: `folder` has `text.txt`; `options` of the trainer; `texts` to split."""
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "spm"),
        model_type="bpe",
        vocab_size=640,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **options,
    )
    spm = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    tokens, types = [], []
    for index in range(spm.vocab_size()):
        tokens.append(spm.id_to_piece(index))
        special = CONTROL if spm.is_control(index) else UNKNOWN if spm.is_unknown(index) else NORMAL
        types.append(BYTE if spm.is_byte(index) else special)
    scores = [spm.get_score(index) for index in range(spm.vocab_size())]
    return {"tokens": tokens, "types": types, "scores": scores, "ids": [spm.encode(text) for text in texts]}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(main(Path(asked["folder"]), asked["options"], asked["texts"])))
