"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.messages import Progress
from octavo.server.chat.answer import (
    Answer,
    ArgumentsPiece,
    Asked,
    BeginPiece,
    CallPiece,
    ChatJob,
    Ending,
    EndPiece,
    Piece,
    ReplyPiece,
    TextPiece,
    ToolUse,
)
from octavo.server.chat.messages import Call, ChatMessage
from octavo.server.gate import Visit
from octavo.server.http import (
    JsonReply,
    event_stream,
    json_bytes,
    sse,
    sse_json,
    sse_progress,
    unless_gone,
    visit_of,
)
from octavo.server.models import Model, Models
from octavo.server.openai.chat_schema import (
    AssistantMessage,
    ChatRequest,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ToolMessage,
)
from octavo.server.openai.convert import schema_of, tool_of
from octavo.server.openai.schema import head_of, logprobs_of, stops_of, usage_of, wants_usage
from octavo.server.problems import openai_error
from octavo.server.report import note_reply, report_field
from octavo.server.sampling import sampling, token_biases
from octavo.server.schema import OctavoOptions, text_of

_NOTHING_ELSE = '"logprobs":null,"finish_reason":null'
_ENDINGS: dict[Ending, str] = {"stop": "stop", "length": "length", "calls": "tool_calls"}


async def create_chat_completion(models: Models, request: Request, body: ChatRequest) -> Response:
    """Answers messages, as one object or as a stream of chunks."""
    visit = visit_of(request)
    model = await models.hold(body.model, visit)
    asked = await asyncio.to_thread(_ask, model, body, visit.tenant.namespace)
    reply_id = f"chatcmpl-{secrets.token_hex(12)}"
    if body.stream:
        return await event_stream(
            request,
            _chunks(asked, model, body, reply_id, visit),
            lambda problem: sse_json(openai_error(problem)),
        )
    return await unless_gone(request, _whole(asked, model, body, reply_id, visit))


def _ask(model: Model, body: ChatRequest, namespace: str) -> Asked:
    params = sampling(
        {
            **body.common_sampling(),
            "logit_bias": token_biases(body.logit_bias, model.vocab_size),
            "max_tokens": body.max_completion_tokens or body.max_tokens,
            "stop": stops_of(body.stop),
            "n": body.n,
            "logprobs": (body.top_logprobs or 0) if body.wants_logprobs else None,
        }
    )
    wanted = body.response_format
    schema, strict = schema_of(wanted.json_schema if isinstance(wanted, JsonSchemaFormat) else wanted)
    job = ChatJob(
        messages=[_message(message) for message in body.messages],
        params=params,
        namespace=namespace,
        tools=[tool_of(tool.function) for tool in body.tools or ()],
        tool_use=ToolUse(_choice(body), body.parallel_tool_calls is not False),
        schema=schema,
        strict_schema=strict,
        priority=body.priority,
        disk=body.disk,
        octavo=body.octavo or OctavoOptions(),
    )
    return Asked(model, job)


def _message(message: Message) -> ChatMessage:
    if isinstance(message, AssistantMessage):
        calls = tuple(
            Call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
        )
        return ChatMessage("assistant", text_of(message.content), calls)
    if isinstance(message, ToolMessage):
        return ChatMessage("tool", text_of(message.content), call_id=message.tool_call_id)
    return ChatMessage("system" if message.role == "developer" else message.role, text_of(message.content))


def _choice(body: ChatRequest) -> str:
    if isinstance(body.tool_choice, NamedTool):
        return f"name:{body.tool_choice.function.name}"
    return body.tool_choice or "auto"


async def _whole(asked: Asked, model: Model, body: ChatRequest, reply_id: str, visit: Visit) -> Response:
    end = await asked.whole()
    note_reply(visit, model.name, end.reply, end.prompt)
    return JsonReply(
        {
            **head_of(reply_id, "chat.completion", model),
            "choices": [_choice_object(answer, model, body) for answer in end.answers],
            "usage": usage_of(end.reply),
            "service_tier": "default",
            **report_field(body.octavo, end.reply, end.prompt),
        }
    )


def _choice_object(answer: Answer, model: Model, body: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return {
        "index": answer.index,
        "message": message,
        "logprobs": logprobs_of(model.texts, answer.logprobs) if body.wants_logprobs else None,
        "finish_reason": _ENDINGS[answer.ending],
    }


async def _chunks(
    asked: Asked, model: Model, body: ChatRequest, reply_id: str, visit: Visit
) -> AsyncGenerator[bytes, None]:
    with_usage = wants_usage(body.stream_options)
    head = {**head_of(reply_id, "chat.completion.chunk", model), "service_tier": "default"}
    # Everything but the choice is the same in every chunk, so it is written once.
    before = b"data: " + json_bytes(head)[:-1] + b',"choices":['
    after = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def chunk(index: int, delta: str, logprobs: Any = None, ending: str | None = None) -> bytes:
        rest = _NOTHING_ELSE
        if logprobs is not None or ending is not None:
            rest = f'"logprobs":{json.dumps(logprobs)},"finish_reason":{json.dumps(ending)}'
        return before + f'{{"index":{index},"delta":{delta},{rest}}}'.encode() + after

    begun: set[int] = set()
    async with aclosing(asked.pieces()) as pieces:
        async for piece in pieces:
            if isinstance(piece, Progress):
                yield sse_progress(piece)
                continue
            if isinstance(piece, ReplyPiece):
                note_reply(visit, model.name, piece.reply, piece.prompt)
                report = report_field(body.octavo, piece.reply, piece.prompt)
                if with_usage or report:
                    usage = {"usage": usage_of(piece.reply)} if with_usage else {}
                    yield sse_json({**head, "choices": [], **usage, **report})
                break
            if isinstance(piece, BeginPiece):
                continue
            opening = b""
            if piece.index not in begun:
                begun.add(piece.index)
                opening = chunk(piece.index, '{"role":"assistant","content":"","refusal":null}')
            yield opening + _chunk_of(piece, chunk, model)
    yield sse(b"[DONE]")


def _chunk_of(piece: Piece, chunk: Callable[..., bytes], model: Model) -> bytes:
    if isinstance(piece, TextPiece):
        logprobs = logprobs_of(model.texts, piece.logprobs) if piece.logprobs else None
        return chunk(piece.index, f'{{"content":{json.dumps(piece.text)}}}', logprobs)
    if isinstance(piece, CallPiece):
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.number, "id": piece.id, "type": "function", "function": function}
        return chunk(piece.index, json.dumps({"tool_calls": [call]}))
    if isinstance(piece, ArgumentsPiece):
        call = {"index": piece.number, "function": {"arguments": piece.text}}
        return chunk(piece.index, json.dumps({"tool_calls": [call]}))
    assert isinstance(piece, EndPiece)
    return chunk(piece.index, "{}", None, _ENDINGS[piece.ending])
