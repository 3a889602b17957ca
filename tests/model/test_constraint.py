"""Grammars of answers, on their own."""

from __future__ import annotations

from families import tiny_tokenizer

from octavo.engine.constraint import Grammars


def test_a_tokenizer_may_have_more_tokens_than_the_model_has_logits() -> None:
    """Such as one that a token was added to, which the model was never trained with."""
    tokenizer = tiny_tokenizer()
    logits = len(tokenizer)
    tokenizer.add_tokens(["<added>"], special_tokens=True)
    constraint = Grammars(tokenizer, logits, {2}).compile('start: "yes"')
    for letter in "yes":
        mask = constraint.mask()
        assert mask.nonzero()[0].tolist() == [tokenizer.convert_tokens_to_ids(letter)]
        assert len(mask) == logits
        constraint.accept(tokenizer.convert_tokens_to_ids(letter))
    assert constraint.mask().nonzero()[0].tolist() == [2]
