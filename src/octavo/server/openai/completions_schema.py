"""Requests and answers of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.server.openai.schema import Common, StreamOptions, Usage
from octavo.server.schema import MAX_STOPS, OctavoReport, Schema

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class CompletionRequest(Common):
    """Text to go on from: one, several, or token ids."""

    prompt: (
        str | Annotated[list[str], Field(min_length=1, max_length=256)] | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=256)]
    )  # fmt: skip
    suffix: str | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stream_options: StreamOptions | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, of which there is at least one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: list[Any] = self.prompt
        return [prompts] if isinstance(prompts[0], int) else prompts


class CompletionLogprobs(Schema):
    """Lists with an entry a token. The first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Schema):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Schema):
    """The continuations, those of the first prompt first. `octavo` is there if the request asked for it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    octavo: list[OctavoReport] | None = None
