"""Octavo's errors. Each message is a sentence with the values involved and the next step.

OctavoError
├── UserError                 the caller can mend it; the command line exits with 2
│   ├── InvalidRequest        a parameter is out of range or contradicts another
│   │   ├── PromptTooLong     the prompt does not fit the context window
│   │   └── RequestTooLarge   the request can never fit the cache budget
│   ├── ModelNotFound         no such bundled model, folder, file or hub id
│   ├── InvalidModelFile      truncated, not GGUF, checksum differs
│   ├── UnsupportedModel      the architecture cannot be run exactly, and why
│   └── InvalidConversation   an impossible turn, rewind or edit
├── EngineError               ours or the machine's; the command line exits with 1
│   ├── NotEnoughMemory       what was asked for, what is free
│   ├── NetworkUnavailable    a download could not be made
│   ├── NumericalError        the model produced NaN for this request
│   ├── EngineStopped         the engine was closed, or its thread died
│   └── IntegrityError        the cache contradicts itself (`octavo.kv.integrity`)
└── KernelArgumentError       a tensor is not what the kernel was told (`octavo.kernels.native`)
"""

from __future__ import annotations

from typing import Any


class OctavoError(Exception):
    """Base of every error that Octavo raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, self.__dict__)


class UserError(OctavoError):
    """The caller's mistake: mend the call and try again."""


class InvalidRequest(UserError, ValueError):
    """A parameter is out of range, of the wrong kind, or contradicts another."""


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the context window.

    Attributes:
        num_tokens: tokens of the prompt.
        max_tokens: tokens of the context window.
    """

    def __init__(self, num_tokens: int, max_tokens: int, advice: str = "") -> None:
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        advice = advice or (
            "Shorten the prompt, or load the model with a larger context (context, --context) if it has one."
        )
        super().__init__(
            f"The prompt has {num_tokens:,} tokens and the context window holds {max_tokens:,}, "
            f"one of which is needed for the answer. {advice}"
        )


class RequestTooLarge(InvalidRequest):
    """The request can never fit the cache budget, even with nothing else in it."""


class ModelNotFound(UserError):
    """No bundled model, folder, file or hub id of this name."""


class InvalidModelFile(UserError):
    """A model file is truncated, of another type, or not the file it should be."""


class UnsupportedModel(UserError):
    """The model's architecture or settings cannot be run exactly; the message names them."""


class InvalidConversation(UserError):
    """The conversation cannot do that: an impossible rewind, edit, or a turn after closing."""


class EngineError(OctavoError):
    """Not the caller's mistake: the machine's, or ours."""


class NotEnoughMemory(EngineError, MemoryError):
    """What was asked for does not fit; the message has both numbers."""


class NetworkUnavailable(EngineError):
    """A download could not be made, and nothing usable is on this machine."""


class NumericalError(EngineError):
    """The model produced NaN or infinite logits for this request."""


class EngineStopped(EngineError):
    """The engine was closed, or its thread died; the cause is chained."""


def _again(kind: type[OctavoError], args: tuple[Any, ...], state: dict[str, Any]) -> OctavoError:
    """An error as it was pickled, whatever its class is made with."""
    error = Exception.__new__(kind, *args)
    error.__dict__.update(state)
    return error
