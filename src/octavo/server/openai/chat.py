"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator
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
from octavo.server.chat.messages import Call, ChatMessage, Tool
from octavo.server.http import JsonReply, event_stream, json_bytes, sse, sse_json, unless_gone, visit_of
from octavo.server.models import Model, Models
from octavo.server.openai.chat_schema import (
    AssistantMessage,
    ChatRequest,
    FunctionTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ToolMessage,
)
from octavo.server.openai.schema import logprobs_of, usage_of
from octavo.server.problems import openai_error
from octavo.server.report import note_reply, octavo_report
from octavo.server.sampling import sampling, token_biases
from octavo.server.schema import text_of

_ENDINGS: dict[Ending, str] = {"stop": "stop", "length": "length", "calls": "tool_calls"}


async def create_chat_completion(models: Models, request: Request, body: ChatRequest) -> Response:
    """Answers messages, as one object or as a stream of chunks."""
    model = models.find(body.model)
    visit = visit_of(request)
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
    wants_logprobs = body.logprobs or body.top_logprobs is not None
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    params = sampling(
        {
            **body.common_sampling(),
            "logit_bias": token_biases(body.logit_bias, model.vocab_size),
            "max_tokens": body.max_completion_tokens or body.max_tokens,
            "stop": stop,
            "n": body.n,
            "logprobs": (body.top_logprobs or 0) if wants_logprobs else None,
        }
    )
    schema, strict = _schema(body)
    job = ChatJob(
        messages=[_message(message) for message in body.messages],
        params=params,
        namespace=namespace,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_use=ToolUse(_choice(body), body.parallel_tool_calls is not False),
        schema=schema,
        strict_schema=strict,
        priority=body.priority,
        exact_history=body.octavo is None or body.octavo.exact_history,
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


def _tool(tool: FunctionTool) -> Tool:
    function = tool.function
    parameters = function.parameters or {"type": "object", "properties": {}}
    return Tool(function.name, function.description or "", parameters, bool(function.strict))


def _choice(body: ChatRequest) -> str:
    if isinstance(body.tool_choice, NamedTool):
        return f"name:{body.tool_choice.function.name}"
    return body.tool_choice or "auto"


def _schema(body: ChatRequest) -> tuple[dict[str, Any] | None, bool]:
    if isinstance(body.response_format, JsonObjectFormat):
        return {"type": "object"}, True
    if isinstance(body.response_format, JsonSchemaFormat):
        wanted = body.response_format.json_schema
        return wanted.schema_, wanted.strict is not False
    return None, True


async def _whole(asked: Asked, model: Model, body: ChatRequest, reply_id: str, visit: Any) -> Response:
    answers: dict[int, Answer] = {}
    async with aclosing(asked.pieces()) as pieces:
        async for piece in pieces:
            if isinstance(piece, ReplyPiece):
                note_reply(visit, model.name, piece.reply, piece.prompt)
                completion = {
                    "id": reply_id,
                    "object": "chat.completion",
                    "created": int(time.time()),
                    "model": model.name,
                    "system_fingerprint": model.fingerprint,
                    "choices": [_choice_object(answers[index], model, body) for index in sorted(answers)],
                    "usage": usage_of(piece.reply),
                    "service_tier": "default",
                }
                if body.octavo is not None and body.octavo.why:
                    completion["octavo"] = octavo_report(piece.reply, piece.prompt)
                return JsonReply(completion)
            if not isinstance(piece, Progress):
                answers.setdefault(piece.index, Answer(piece.index)).add(piece)
    raise AssertionError("pieces end with a reply or an error")


def _choice_object(answer: Answer, model: Model, body: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    wants_logprobs = body.logprobs or body.top_logprobs is not None
    return {
        "index": answer.index,
        "message": message,
        "logprobs": logprobs_of(model.texts, answer.logprobs) if wants_logprobs else None,
        "finish_reason": _ENDINGS[answer.ending],
    }


async def _chunks(
    asked: Asked, model: Model, body: ChatRequest, reply_id: str, visit: Any
) -> AsyncGenerator[bytes, None]:
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    head = {
        "id": reply_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.fingerprint,
        "service_tier": "default",
    }
    # Everything but the choice is the same in every chunk, so it is written once.
    before = b"data: " + json_bytes(head)[:-1] + b',"choices":['
    after = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def chunk(index: int, delta: str, logprobs: Any = None, ending: str | None = None) -> bytes:
        rest = f'"logprobs":{json.dumps(logprobs)},"finish_reason":{json.dumps(ending)}'
        return before + f'{{"index":{index},"delta":{delta},{rest}}}'.encode() + after

    begun: set[int] = set()
    async with aclosing(asked.pieces()) as pieces:
        async for piece in pieces:
            if isinstance(piece, Progress):
                yield f": read {piece.num_computed_tokens} of {piece.num_prompt_tokens} tokens\n\n".encode()
                continue
            if isinstance(piece, ReplyPiece):
                note_reply(visit, model.name, piece.reply, piece.prompt)
                report = {}
                if body.octavo is not None and body.octavo.why:
                    report["octavo"] = octavo_report(piece.reply, piece.prompt)
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


def _chunk_of(piece: Piece, chunk: Any, model: Model) -> bytes:
    if isinstance(piece, TextPiece):
        logprobs = logprobs_of(model.texts, piece.logprobs) if piece.logprobs else None
        return bytes(chunk(piece.index, f'{{"content":{json.dumps(piece.text)}}}', logprobs))
    if isinstance(piece, CallPiece):
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.number, "id": piece.id, "type": "function", "function": function}
        return bytes(chunk(piece.index, json.dumps({"tool_calls": [call]})))
    if isinstance(piece, ArgumentsPiece):
        call = {"index": piece.number, "function": {"arguments": piece.text}}
        return bytes(chunk(piece.index, json.dumps({"tool_calls": [call]})))
    assert isinstance(piece, EndPiece)
    return bytes(chunk(piece.index, "{}", None, _ENDINGS[piece.ending]))
