"""Sampling settings as the interfaces give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.config import SamplingParams
from octavo.server.problems import Problem


def sampling(settings: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` of those settings that are not None.

    Raises:
        InvalidRequest: a value is out of range.
    """
    return SamplingParams(**{name: value for name, value in settings.items() if value is not None})


def token_biases(biases: Mapping[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """`logit_bias` of the interfaces, whose keys are token ids as text.

    Raises:
        Problem: a key is no token id.
    """
    if biases is None:
        return None
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise Problem(
                400,
                f"logit_bias has the key {key[:40]!r}; keys are token ids from 0 to {vocab_size - 1}.",
                "invalid_value",
                "logit_bias",
            )
    return {int(key): value for key, value in biases.items()}
