"""What the requests and answers of OpenAI's interface have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from octavo.engine.messages import Reply, TokenLogprob
from octavo.server.schema import OctavoOptions, Schema, Seed
from octavo.server.tokens import TokenTexts

if TYPE_CHECKING:
    from octavo.server.models import Model


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class CacheOptions(Schema):
    """How long a prompt should at least be kept. The other options are passed over."""

    ttl: str | None = None


class Common(Schema):
    """Fields of every request that generates.

    Those from `metadata` on change nothing of an answer. With `prompt_cache_retention` 24h or a `ttl` in
    `prompt_cache_options`, what is computed is evicted later than other things; with `in_memory` it is kept off the
    disk.
    """

    model: str
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Seed | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    octavo: OctavoOptions | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: CacheOptions | None = None

    @property
    def priority(self) -> int:
        """How much what is computed is worth keeping: the more, the longer it is asked to be there."""
        options = self.prompt_cache_options
        ttl = None if options is None else options.ttl
        return 2 if self.prompt_cache_retention == "24h" or ttl == "12h" else 0 if ttl is None else 1

    @property
    def disk(self) -> bool:
        """Whether what is computed may be kept on disk."""
        return self.prompt_cache_retention != "in_memory"

    def common_sampling(self) -> dict[str, Any]:
        """Settings of `SamplingParams`; the default temperature is that of the interface, 1."""
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
        }


class StreamOptions(Schema):
    include_usage: bool | None = None


def wants_usage(options: StreamOptions | None) -> bool:
    """Whether a stream ends with the usage."""
    return options is not None and bool(options.include_usage)


def stops_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """`stop`, one string or several."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def head_of(reply_id: str, kind: str, model: Model) -> dict[str, Any]:
    """What an answer begins with, or each chunk of one."""
    return {
        "id": reply_id,
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.fingerprint,
    }


class PromptTokensDetails(Schema):
    cached_tokens: int
    cache_write_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(Schema):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Schema):
    """Tokens. `cache_write_tokens` of the prompt were computed and kept for later requests."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


def usage_of(*replies: Reply) -> dict[str, Any]:
    """`Usage` of one answer, or of several prompts' together."""
    prompt = sum(reply.usage.prompt_tokens for reply in replies)
    completion = sum(reply.usage.completion_tokens for reply in replies)
    cached = sum(reply.usage.cached_tokens for reply in replies)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached, cache_write_tokens=prompt - cached),
    ).model_dump()


class TopLogprob(Schema):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Schema):
    content: list[ContentLogprob] | None
    refusal: None = None


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what cannot come."""
    return max(logprob, -9999.0)


def logprobs_of(texts: TokenTexts, logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> dict[str, Any]:
    """`ChoiceLogprobs` as JSON values."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token_id),
            "logprob": finite(logprob),
            "bytes": list(texts.bytes(token_id)),
        }

    content = [
        {
            **entry(item.token_id, item.logprob),
            "top_logprobs": [entry(token_id, logprob) for token_id, logprob in item.top],
        }
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


class ErrorObject(Schema):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Schema):
    """What went wrong, and what to do."""

    error: ErrorObject


class ModelCard(Schema):
    """A model. Its context is known once it is loaded, which the first request does."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["octavo"] = "octavo"
    max_context_tokens: int | None
    loaded: bool


class ModelList(Schema):
    object: Literal["list"] = "list"
    data: list[ModelCard]
