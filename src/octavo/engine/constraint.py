"""Grammars that an answer must follow, token by token."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from octavo.errors import InvalidRequest

Mask = npt.NDArray[np.bool_]


class Constraint:
    """Where an answer is in its grammar. Made by `Grammars.compile`; each answer has a copy of its own."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> Constraint:
        return Constraint(self._matcher.deep_copy(), self._vocab_size)

    def mask(self) -> Mask:
        """Which tokens may come next, bool `[vocabulary]`; at least one.

        Raises:
            InvalidRequest: the grammar has become too complex to follow.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._matcher.is_error() or not mask.any():
            reason = self._matcher.get_error() or "no token can follow"
            raise InvalidRequest(
                f"The grammar of the answer cannot be followed: {reason}. Simplify the schema."
            )
        return mask

    def accept(self, token_id: int) -> None:
        """Takes the token that was chosen."""
        self._matcher.consume_token(token_id)


class Grammars:
    """Compiles grammars for one model. Safe between threads.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: logits in a row.
        eos_token_ids: may come where a grammar may end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._prepared: LLTokenizer | None = None

    def compile(self, grammar: str) -> Constraint:
        """A grammar in llguidance's Lark, at its beginning. The first one takes some 0.4 s, later ones milliseconds.

        Raises:
            InvalidRequest: it is none, or has parts that cannot be held to.
        """
        with self._lock:
            if self._prepared is None:
                # It may have tokens without a logit; masks are cut to those that have one.
                num_tokens = max(self._vocab_size, len(self._tokenizer))
                self._prepared = from_tokenizer(self._tokenizer, n_vocab=num_tokens, eos_token=self._eos)
        matcher = LLMatcher(self._prepared, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().partition("\n")[0]
            raise InvalidRequest(f"The schema or grammar of the answer cannot be used: {reason}.")
        return Constraint(matcher, self._vocab_size)
