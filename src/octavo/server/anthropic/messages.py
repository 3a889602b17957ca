"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.messages import Progress, Reply
from octavo.server.anthropic.convert import Retention, job_of, retention_of
from octavo.server.anthropic.schema import CountRequest, MessagesRequest
from octavo.server.chat.answer import (
    Answer,
    ArgumentsPiece,
    Asked,
    BeginPiece,
    CallPiece,
    EndPiece,
    ReplyPiece,
    TextPiece,
)
from octavo.server.gate import Visit
from octavo.server.http import JsonReply, event_stream, sse_json, sse_progress, unless_gone, visit_of
from octavo.server.models import Model, Models
from octavo.server.problems import anthropic_error
from octavo.server.report import note_reply, report_field


async def create_message(models: Models, request: Request, body: MessagesRequest) -> Response:
    """Answers messages, as one object or as a stream of events."""
    visit = visit_of(request)
    model = await models.hold(body.model, visit)
    asked = await asyncio.to_thread(lambda: Asked(model, job_of(body, visit.tenant.namespace)))
    answering = _Answering(asked, model, body, visit)
    if body.stream:
        return await event_stream(
            request,
            answering.events(),
            lambda problem: sse_json(anthropic_error(problem, visit.request_id), "error"),
        )
    return await unless_gone(request, answering.whole())


async def count_tokens(models: Models, request: Request, body: CountRequest) -> dict[str, int]:
    """How many tokens the prompt of these messages has."""
    visit = visit_of(request)
    model = await models.hold(body.model, visit)
    namespace = visit.tenant.namespace
    asked = await asyncio.to_thread(lambda: Asked(model, job_of(body, namespace)))
    return {"input_tokens": len(asked.prompt.ids)}


class _Answering:
    """One request being answered."""

    def __init__(self, asked: Asked, model: Model, body: MessagesRequest, visit: Visit) -> None:
        self._asked = asked
        self._model = model
        self._body = body
        self._visit = visit
        self._retention = retention_of(body)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._reads_only = body.max_tokens == 0

    async def whole(self) -> Response:
        end = await self._asked.whole()
        (answer,) = end.answers
        note_reply(self._visit, self._model.name, end.reply, end.prompt)
        content: list[dict[str, Any]] = []
        if not self._reads_only:
            if answer.text:
                content.append({"type": "text", "text": answer.text, "citations": None})
            content += [
                {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
                for call in answer.calls
            ]
        return JsonReply(
            {
                **self._head(),
                "content": content,
                **self._ending(end),
                "usage": self._usage(end.reply.usage.cached_tokens, self._num_output(end.reply)),
                **report_field(self._body.octavo, end.reply, end.prompt),
            }
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        begun = False
        block: str | None = None  # the kind of the open content block
        index = -1
        async with aclosing(self._asked.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Progress):
                    yield sse_progress(piece)
                    continue
                out: list[bytes] = []
                if not begun:
                    begun = True
                    cached = piece.num_cached_tokens if isinstance(piece, BeginPiece) else 0
                    out.append(_event("message_start", message=self._start(cached)))
                if isinstance(piece, ReplyPiece):
                    out += self._last_events(piece)
                    yield b"".join(out)
                    return
                if isinstance(piece, EndPiece):
                    if block is not None:
                        out.append(_event("content_block_stop", index=index))
                elif not self._reads_only and not isinstance(piece, BeginPiece):
                    kind = "text" if isinstance(piece, TextPiece) else "tool_use"
                    if isinstance(piece, CallPiece) or (isinstance(piece, TextPiece) and block != "text"):
                        if block is not None:
                            out.append(_event("content_block_stop", index=index))
                        index, block = index + 1, kind
                        out.append(_event("content_block_start", index=index, content_block=_opened(piece)))
                    if isinstance(piece, TextPiece):
                        delta = {"type": "text_delta", "text": piece.text}
                        out.append(_event("content_block_delta", index=index, delta=delta))
                    elif isinstance(piece, ArgumentsPiece):
                        delta = {"type": "input_json_delta", "partial_json": piece.text}
                        out.append(_event("content_block_delta", index=index, delta=delta))
                if out:
                    yield b"".join(out)

    def _last_events(self, end: ReplyPiece) -> list[bytes]:
        note_reply(self._visit, self._model.name, end.reply, end.prompt)
        usage = self._usage(end.reply.usage.cached_tokens, self._num_output(end.reply))
        report = report_field(self._body.octavo, end.reply, end.prompt)
        return [
            _event("message_delta", delta=self._ending(end), usage=usage, **report),
            _event("message_stop"),
        ]

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model.name}

    def _start(self, cached: int) -> dict[str, Any]:
        usage = self._usage(cached, 0)
        return {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _num_output(self, reply: Reply) -> int:
        return 0 if self._reads_only else reply.usage.completion_tokens

    def _usage(self, cached: int, output: int) -> dict[str, Any]:
        fresh = len(self._asked.prompt.ids) - cached
        created: dict[Retention, int] = {"5m": 0, "1h": 0}
        if self._retention is not None:
            created[self._retention] = fresh
        return {
            "input_tokens": fresh - sum(created.values()),
            "cache_creation_input_tokens": sum(created.values()),
            "cache_read_input_tokens": cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created["5m"],
                "ephemeral_1h_input_tokens": created["1h"],
            },
            "output_tokens": output,
            "service_tier": "standard",
        }

    def _ending(self, end: ReplyPiece) -> dict[str, Any]:
        (answer,) = end.answers
        return {"stop_reason": self._reason(answer, end.reply), "stop_sequence": answer.stop}

    def _reason(self, answer: Answer, reply: Reply) -> str:
        if self._reads_only:
            return "max_tokens"
        if answer.ending == "length":
            full = reply.usage.prompt_tokens + reply.usage.completion_tokens >= self._model.engine.context
            return "model_context_window_exceeded" if full else "max_tokens"
        if answer.ending == "calls":
            return "tool_use"
        return "end_turn" if answer.stop is None else "stop_sequence"


def _event(kind: str, **fields: Any) -> bytes:
    return sse_json({"type": kind, **fields}, kind)


def _opened(piece: Any) -> dict[str, Any]:
    if isinstance(piece, CallPiece):
        return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
    return {"type": "text", "text": "", "citations": None}


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object; empty where the answer ended in the middle of them."""

    def number(text: str) -> Any:
        value = float(text)
        return value if math.isfinite(value) else text

    try:
        value = json.loads(arguments, parse_float=number)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
