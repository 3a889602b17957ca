"""`/v1/completions`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.config import SamplingParams
from octavo.engine.messages import Delta, Reply, TokenLogprob
from octavo.server.gate import Visit
from octavo.server.http import JsonReply, event_stream, sse, sse_json, unless_gone, visit_of
from octavo.server.infill.model import fim_of, room_for
from octavo.server.infill.prompt import Gap
from octavo.server.merge import merged
from octavo.server.models import Model, Models
from octavo.server.openai.completions_schema import CompletionRequest
from octavo.server.openai.schema import finite, head_of, stops_of, usage_of, wants_usage
from octavo.server.problems import Problem, openai_error
from octavo.server.report import note_reply, octavo_report
from octavo.server.sampling import sampling, token_biases
from octavo.server.schema import OctavoOptions

_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Asked:
    """One prompt of the request.

    `echo` is its text if that begins the answer. With `scores` its tokens get log-probabilities, and nothing is
    generated beyond what that takes when `generates` is not set.
    """

    ids: tuple[int, ...]
    echo: str
    params: SamplingParams
    generates: bool
    scores: int | None


async def create_completion(models: Models, request: Request, body: CompletionRequest) -> Response:
    """Goes on from the prompts, as one object or as a stream of chunks."""
    model = await models.hold(body.model, visit_of(request))
    asked = await asyncio.to_thread(_ask, model, body, visit_of(request).tenant.namespace)
    reply_id = f"cmpl-{secrets.token_hex(12)}"
    if body.stream:
        pieces = _chunks(asked, model, body, reply_id, request)
        return await event_stream(request, pieces, lambda problem: sse_json(openai_error(problem)))
    return await unless_gone(request, _whole(asked, model, body, reply_id, request))


def _ask(model: Model, body: CompletionRequest, namespace: str) -> list[_Asked]:
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling(
        {
            **body.common_sampling(),
            "logit_bias": token_biases(body.logit_bias, model.vocab_size),
            "max_tokens": max(max_tokens, 1),
            "stop": stops_of(body.stop),
            "n": body.n,
            "best_of": body.best_of,
            "logprobs": body.logprobs,
            "stop_token_ids": None if body.suffix is None else fim_of(model, "suffix").tokens.ends,
        }
    )
    asked = []
    for prompt in body.prompts:
        ids = _ids(model, prompt, body.suffix, max_tokens, namespace)
        echo = (
            (prompt if isinstance(prompt, str) else model.engine.tokenizer.decode(ids)) if body.echo else ""
        )
        scores = body.logprobs if body.echo else None
        asked.append(_Asked(tuple(ids), echo, params, max_tokens > 0, scores))
    return asked


def _ids(
    model: Model, prompt: str | Sequence[int], suffix: str | None, max_tokens: int, namespace: str
) -> Sequence[int]:
    if suffix is None:
        return model.encode(prompt) if isinstance(prompt, str) else prompt
    fim = fim_of(model, "suffix")
    if not isinstance(prompt, str):
        raise Problem(400, "With a suffix the prompt must be text.", "invalid_value", "prompt")
    return fim.infill(Gap(prompt, suffix), room=room_for(model, max_tokens), namespace=namespace)


async def _events(
    asked: _Asked, model: Model, options: Mapping[str, Any]
) -> AsyncGenerator[Reply | Delta, None]:
    """The deltas of one prompt. Before them, if its tokens are to be scored, the reply that has their scores.

    The prompt is computed once: what is generated goes on from what was scored.
    """
    if asked.scores is not None:
        once = replace(asked.params, max_tokens=1, logprobs=None, stop=(), best_of=None)
        if asked.generates:
            once = replace(once, n=1)
        scoring = model.engine.astream(asked.ids, once, prompt_logprobs=asked.scores, **options)
        async with aclosing(scoring) as events:
            deltas = [event async for event in events if isinstance(event, Delta)]
        assert deltas[-1].reply is not None
        yield deltas[-1].reply
        if not asked.generates:
            for delta in deltas:
                yield delta
            return
    async with aclosing(model.engine.astream(asked.ids, asked.params, **options)) as events:
        async for event in events:
            if isinstance(event, Delta):
                yield event


async def _whole(
    asked: Sequence[_Asked], model: Model, body: CompletionRequest, reply_id: str, request: Request
) -> Response:
    visit = visit_of(request)

    async def answer(one: _Asked) -> Reply:
        scored = None
        async with aclosing(_events(one, model, _options(body, visit))) as events:
            async for event in events:
                if isinstance(event, Reply):
                    scored = event
                elif event.reply is not None:
                    return _told(one, event.reply, scored)
        raise AssertionError("events end with a reply or an error")

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(one)) for one in asked]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    replies = [task.result() for task in tasks]
    choices: list[dict[str, Any]] = []
    for one, reply in zip(asked, replies, strict=True):
        note_reply(visit, model.name, reply)
        for choice in reply.choices:
            scores = [*(reply.prompt_logprobs or ()), *(choice.logprobs or ())]
            ids = [*(one.ids if one.scores is not None else ()), *choice.token_ids]
            choices.append(
                {
                    "index": len(choices),
                    "text": one.echo + choice.text,
                    "logprobs": None
                    if body.logprobs is None
                    else _logprobs(model, ids, scores, body.logprobs, 0),
                    "finish_reason": _ending(choice.finish_reason),
                }
            )
    completion: dict[str, Any] = {
        **head_of(reply_id, "text_completion", model),
        "choices": choices,
        "usage": usage_of(*replies),
        **_report(body, replies),
    }
    return JsonReply(completion)


def _report(body: CompletionRequest, replies: Sequence[Reply]) -> dict[str, Any]:
    """The field `octavo`, if it was asked for: what each prompt reused."""
    if body.octavo is None or not body.octavo.reports:
        return {}
    return {"octavo": [octavo_report(reply, None) for reply in replies]}


def _options(body: CompletionRequest, visit: Visit) -> dict[str, Any]:
    return {
        "cache_namespace": visit.tenant.namespace,
        "priority": body.priority,
        "disk": body.disk,
        **(body.octavo or OctavoOptions()).settings,
    }


def _told(asked: _Asked, reply: Reply, scored: Reply | None) -> Reply:
    """The reply with what was found out when the prompt was scored, which is when it was computed, and without the
    one token that was generated for the sake of the prompt alone."""
    if scored is not None:
        counts = scored.usage
        usage = replace(
            reply.usage,
            cached_tokens=counts.cached_tokens,
            computed_tokens=counts.computed_tokens,
            loaded_tokens=counts.loaded_tokens,
        )
        reply = replace(reply, prompt_logprobs=scored.prompt_logprobs, usage=usage, why=scored.why)
    if asked.generates:
        return reply
    empty = tuple(
        replace(choice, text="", token_ids=(), finish_reason="length", logprobs=())
        for choice in reply.choices
    )
    return replace(reply, choices=empty, usage=replace(reply.usage, completion_tokens=0))


async def _chunks(
    asked: Sequence[_Asked], model: Model, body: CompletionRequest, reply_id: str, request: Request
) -> AsyncGenerator[bytes, None]:
    visit = visit_of(request)
    with_usage = wants_usage(body.stream_options)
    head = head_of(reply_id, "text_completion", model)
    num_answers = body.n or 1
    told: dict[int, Reply] = {}
    offsets: dict[int, int] = {}
    scored: dict[int, Reply] = {}

    def chunk(index: int, text: str, logprobs: Any = None, ending: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": ending}
        return sse_json({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

    sources = [_events(one, model, _options(body, visit)) for one in asked]
    async with aclosing(merged(sources)) as events:
        async for number, event in events:
            one = asked[number]
            if isinstance(event, Reply):
                scored[number] = event
                continue
            index = number * num_answers + event.index
            if index not in offsets:
                offsets[index] = len(one.echo)
                if one.echo:
                    scores = scored[number].prompt_logprobs if number in scored else None
                    yield chunk(
                        index, one.echo, scores and _logprobs(model, one.ids, scores, one.scores or 0, 0)
                    )
            text = event.text if one.generates else ""
            logprobs = None
            if event.logprobs and one.generates and body.logprobs is not None:
                logprobs = _logprobs(model, event.token_ids, event.logprobs, body.logprobs, offsets[index])
            offsets[index] += len(text)
            ending = None if event.finish_reason is None else _ending(event.finish_reason)
            if not one.generates:
                ending = ending and "length"
            if text or logprobs or ending:
                yield chunk(index, text, logprobs, ending)
            if event.reply is not None:
                told[number] = _told(one, event.reply, scored.get(number))
                note_reply(visit, model.name, told[number])
    replies = [told[number] for number in range(len(asked))]
    usage = {"usage": usage_of(*replies)} if with_usage else {}
    report = _report(body, replies)
    if usage or report:
        yield sse_json({**head, "choices": [], **usage, **report})
    yield sse(b"[DONE]")


def _logprobs(
    model: Model,
    ids: Sequence[int],
    scores: Sequence[TokenLogprob | None],
    num_top: int,
    offset: int,
) -> dict[str, Any]:
    tokens = [model.texts.text(id_) for id_ in ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    top = [
        None if score is None else {model.texts.text(id_): finite(value) for id_, value in score.top}
        for score in scores
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [None if score is None else finite(score.logprob) for score in scores],
        "top_logprobs": top if num_top else None,
        "text_offset": offsets,
    }


def _ending(reason: str) -> str:
    return "length" if reason in ("length", "timeout") else "stop"
