"""What went wrong, as HTTP: one table from Octavo's errors to status and code, and each interface's own shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.errors import (
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
    NetworkUnavailable,
    NotEnoughMemory,
    PromptTooLong,
    RequestTooLarge,
    UserError,
)


@dataclass(slots=True)
class Problem(Exception):
    """A request that gets an error as its answer.

    Attributes:
        status: of HTTP.
        message: a sentence for the caller, with the values involved and the next step.
        code: a word for programs, such as `model_not_found`.
        param: the field of the request that is wrong, as a path with dots.
        extra: more fields of OpenAI's error object.
        headers: of the answer.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def problem_of(error: BaseException) -> Problem:
    """The answer to a request that ended in `error`."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, PromptTooLong):
        sizes = {"num_prompt_tokens": error.num_tokens, "max_context_tokens": error.max_tokens}
        return Problem(400, str(error), "context_length_exceeded", "messages", {"exceed_context": sizes})
    if isinstance(error, RequestTooLarge):
        return Problem(400, str(error), "request_too_large")
    if isinstance(error, ModelNotFound):
        return Problem(404, str(error), "model_not_found", "model")
    if isinstance(error, InvalidRequest):
        return Problem(400, str(error), "invalid_value")
    if isinstance(error, UserError):
        return Problem(400, str(error), "model_unusable", "model")
    if isinstance(error, (EngineStopped, NotEnoughMemory, NetworkUnavailable)):
        return Problem(503, str(error), "unavailable", headers={"Retry-After": "5"})
    return Problem(500, f"The server failed: {type(error).__name__}. Its log has the cause.", "server_error")


_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _kind(types: dict[int, str], status: int, server: str) -> str:
    return types.get(status, server if status >= 500 else "invalid_request_error")


def openai_error(problem: Problem) -> dict[str, Any]:
    """The body of an error as OpenAI writes it."""
    message = problem.message
    if sizes := problem.extra.get("exceed_context"):  # clients look for these words
        message = f"This model's maximum context length is {sizes['max_context_tokens']} tokens. {message}"
    return {
        "error": {
            "message": message,
            "type": _kind(_OPENAI_TYPES, problem.status, "server_error"),
            "param": problem.param,
            "code": problem.code,
            **problem.extra,
        }
    }


def anthropic_error(problem: Problem, request_id: str) -> dict[str, Any]:
    """The body of an error as Anthropic writes it."""
    kind = _kind(_ANTHROPIC_TYPES, problem.status, "api_error")
    message = problem.message
    if sizes := problem.extra.get("exceed_context"):  # clients look for these words
        counts = f"{sizes['num_prompt_tokens']} tokens > {sizes['max_context_tokens']} maximum"
        message = f"prompt is too long: {counts}. {message}"
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def error_body(problem: Problem, path: str, request_id: str) -> dict[str, Any]:
    """The body of an error in the shape of the interface that `path` belongs to."""
    if path.startswith("/v1/messages"):
        return anthropic_error(problem, request_id)
    return openai_error(problem)
