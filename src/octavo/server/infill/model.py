"""What a served model can do with gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.server.infill.prompt import FimPrompts
from octavo.server.problems import Problem

if TYPE_CHECKING:
    from octavo.server.models import Model

_RESERVED = 256
"""Tokens kept for the answer when a request does not say how many it wants."""


def fim_of(model: Model, param: str) -> FimPrompts:
    """How a model writes gaps.

    Raises:
        Problem: it cannot.
    """
    if model.fim is None:
        raise Problem(
            400,
            f"{model.name} was not trained to fill in text between a prompt and a suffix: it has no tokens for it. "
            "Leave suffix out, take a model of code that has them, or name the tokens with --fim-tokens.",
            "unsupported_value",
            param,
        )
    return model.fim


def room_for(model: Model, max_tokens: int | None) -> int:
    """Tokens that a prompt may have beside an answer of `max_tokens`, which gets a quarter of the window at most."""
    context = model.engine.context
    return context - 1 - min(_RESERVED if max_tokens is None else max_tokens, context // 4)
