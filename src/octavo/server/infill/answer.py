"""Answers of llama.cpp's interface, made from the engine's events."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.messages import Choice, Delta, Reply
from octavo.errors import EngineStopped
from octavo.server.gate import Visit
from octavo.server.http import JsonReply, event_stream, sse_json, unless_gone, visit_of
from octavo.server.infill.options import Options
from octavo.server.infill.schema import Llama
from octavo.server.models import Model
from octavo.server.openai.schema import logprobs_of
from octavo.server.problems import openai_error
from octavo.server.report import note_reply

_BLANK_END = re.compile(r"\n\s*\Z")
_LINE_BEGIN = re.compile(r"\n([ \t]*)(?=[^\s])")


@dataclass(slots=True)
class Ends:
    """Where plugins want a text to end: after a time, if it has a whole line, and before a line less indented.

    Attributes:
        seconds: since the first token; 0 is no limit.
        indent: characters that a line must be indented; what may turn out to be such a line's beginning is held back.
    """

    indent: int
    seconds: float
    text: str = ""
    ended: bool = False
    _began_s: float | None = None
    _given: int = 0

    def push(self, text: str, now_s: float, *, last: bool) -> str:
        """More text; what of it can be given out, which is all if it is the `last`. Nothing is behind the end."""
        if self._began_s is None:
            self._began_s = now_s
        self.text += text
        end, held = len(self.text), None
        if self.indent:
            for line in _LINE_BEGIN.finditer(self.text, max(0, self._given - 1)):
                if len(line[1]) < self.indent:
                    self.text, self.ended = self.text[: line.start()], True
                    return self._give(line.start())
            held = _BLANK_END.search(self.text, self._given)
        if self.seconds and now_s - self._began_s >= self.seconds and "\n" in self.text:
            self.ended = True
        return self._give(held.start() if held is not None and not last and not self.ended else end)

    def _give(self, end: int) -> str:
        text, self._given = self.text[self._given : end], end
        return text


@dataclass(slots=True)
class Job:
    """One prompt, and what its answers have got to."""

    ids: Sequence[int]
    options: Options
    ends: dict[int, Ends] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    reply: Reply | None = None

    async def pieces(
        self, model: Model, namespace: str
    ) -> AsyncGenerator[tuple[int, str, tuple[int, ...]], None]:
        """Generates: index, text and tokens of each piece. `reply` is there when they have ended."""
        options = self.options
        events = model.engine.astream(self.ids, options.params, cache_namespace=namespace, **options.engine)
        async with aclosing(events):
            async for event in events:
                if not isinstance(event, Delta):
                    continue
                ends = self.ends.setdefault(event.index, Ends(options.indent, options.seconds))
                if options.generates and not ends.ended:
                    text = ends.push(event.text, time.perf_counter(), last=event.finish_reason is not None)
                    self.tokens.setdefault(event.index, []).extend(event.token_ids)
                    if text or event.token_ids:
                        yield event.index, text, event.token_ids
                    if ends.ended or event.finish_reason is not None:
                        self.done.add(event.index)
                        if len(self.done) == options.params.n:
                            model.engine.abort(event.request_id)
                if event.reply is not None:
                    self.reply = event.reply
                    return
        raise EngineStopped("The engine ended the answer without a reply.")

    def results(self, model: Model, *, streamed: bool) -> list[dict[str, Any]]:
        """What is told of the answers when they have ended; `LlamaCompletion` as JSON values."""
        assert self.reply is not None
        return [self._result(model, self.reply, choice, streamed) for choice in self.reply.choices]

    def _result(self, model: Model, reply: Reply, choice: Choice, streamed: bool) -> dict[str, Any]:
        options = self.options
        ends = self.ends.get(choice.index)
        text = "" if ends is None else ends.text
        tokens = self.tokens.get(choice.index, []) if options.generates else []
        stopped = options.generates and choice.finish_reason == "stop" and not (ends and ends.ended)
        full = (
            options.generates
            and choice.finish_reason == "length"
            and len(tokens) != options.params.max_tokens
        )
        by_word = stopped and isinstance(choice.stop, str)
        result: dict[str, Any] = {
            "index": choice.index,
            "content": "" if streamed else text,
            "tokens": tokens if options.wants_tokens and not streamed else [],
            "id_slot": options.slot,
            "stop": True,
            "model": model.name,
            "tokens_predicted": len(tokens),
            "tokens_evaluated": reply.usage.prompt_tokens,
            "generation_settings": options.settings(model.engine.context, reply.seed),
            "prompt": model.engine.tokenizer.decode(list(self.ids)) if options.wants("prompt") else "",
            "has_new_line": "\n" in text,
            "truncated": full,
            "stop_type": "word" if by_word else "eos" if stopped else "limit",
            "stopping_word": choice.stop if by_word else "",
            "tokens_cached": reply.usage.cached_tokens,
            "timings": _times(reply, len(tokens)),
        }  # fmt: skip
        if options.params.logprobs is not None and choice.logprobs is not None and options.generates:
            content = logprobs_of(model.texts, choice.logprobs)["content"]
            result["completion_probabilities"] = [
                {"id": id_, **entry} for id_, entry in zip(choice.token_ids, content, strict=False)
            ]
        return options.selected(result)


async def answer(
    model: Model,
    request: Request,
    body: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    several: bool = False,
    ends: Sequence[int] = (),
) -> Response:
    """Goes on from prompts, as one object, a list of them, or a stream of events; see `Options.of` for `ends`."""
    visit = visit_of(request)
    options = Options.of(body, model.vocab_size, ends)
    jobs = [Job(ids, options) for ids in prompts]
    if body.stream:
        pieces = _events(jobs, model, visit)
        return await event_stream(request, pieces, lambda problem: sse_json(openai_error(problem)))
    return await unless_gone(request, _whole(jobs, model, visit, several or options.params.n > 1))


async def _whole(jobs: Sequence[Job], model: Model, visit: Visit, several: bool) -> Response:
    async def run(job: Job) -> None:
        async with aclosing(job.pieces(model, visit.tenant.namespace)) as pieces:
            async for _ in pieces:
                pass

    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(run(job))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    results: list[dict[str, Any]] = []
    for job in jobs:
        _note(visit, model, job)
        results += job.results(model, streamed=False)
    _number(results)
    return JsonReply(results if several else results[0])


async def _events(jobs: Sequence[Job], model: Model, visit: Visit) -> AsyncGenerator[bytes, None]:
    """Events of one prompt after the other, each answer ended by what is told of it."""
    for number, job in enumerate(jobs):
        first = number * job.options.params.n
        counts: dict[int, int] = {}
        async with aclosing(job.pieces(model, visit.tenant.namespace)) as pieces:
            async for index, text, tokens in pieces:
                counts[index] = counts.get(index, 0) + len(tokens)
                yield sse_json(
                    {
                        "index": first + index,
                        "content": text,
                        "tokens": list(tokens),
                        "stop": False,
                        "id_slot": job.options.slot,
                        "tokens_predicted": counts[index],
                        "tokens_evaluated": len(job.ids),
                    }
                )
        _note(visit, model, job)
        for result in _number(job.results(model, streamed=True), first):
            yield sse_json(result)


def _note(visit: Visit, model: Model, job: Job) -> None:
    assert job.reply is not None
    note_reply(visit, model.name, job.reply)


def _number(results: list[dict[str, Any]], first: int = 0) -> list[dict[str, Any]]:
    for number, result in enumerate(results, first):
        if "index" in result:
            result["index"] = number
    return results


def _times(reply: Reply, predicted: int) -> dict[str, Any]:
    """`Times` as JSON values."""
    prompt = reply.usage.prompt_tokens - reply.usage.cached_tokens
    prompt_ms = 1000 * reply.timings.prefill_s
    predicted_ms = 1000 * (reply.timings.total_s - reply.timings.ttft_s)
    return {
        "cache_n": reply.usage.cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt if prompt else 0.0,
        "prompt_per_second": 1000 * prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / predicted if predicted else 0.0,
        "predicted_per_second": 1000 * predicted / predicted_ms if predicted_ms else 0.0,
    }
