"""The input and the settings of a response as all interfaces mean them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from octavo.server.chat.answer import ChatJob, ToolUse
from octavo.server.chat.messages import Call, ChatMessage
from octavo.server.openai.convert import schema_of, tool_of
from octavo.server.openai.responses_schema import (
    FunctionCallItem,
    FunctionOutputItem,
    InputMessage,
    NamedFunction,
    ReasoningItem,
    ResponseRequest,
)
from octavo.server.sampling import sampling, token_biases
from octavo.server.schema import OctavoOptions, text_of


def job_of(
    body: ResponseRequest, messages: Sequence[ChatMessage], namespace: str, vocab_size: int
) -> ChatJob:
    """What a request asks of the model, given all messages that it goes on from and its own."""
    params = sampling(
        {
            **body.common_sampling(),
            "logit_bias": token_biases(body.logit_bias, vocab_size),
            "max_tokens": body.max_output_tokens,
            "logprobs": (body.top_logprobs or 0) if body.wants_logprobs else None,
        }
    )
    schema, strict = schema_of(None if body.text is None else body.text.format)
    choice = body.tool_choice or "auto"
    system = [] if body.instructions is None else [ChatMessage("system", body.instructions)]
    return ChatJob(
        messages=[*system, *messages],
        params=params,
        namespace=namespace,
        tools=[tool_of(tool) for tool in body.tools or ()],
        tool_use=ToolUse(
            f"name:{choice.name}" if isinstance(choice, NamedFunction) else choice,
            body.parallel_tool_calls is not False,
        ),
        schema=schema,
        strict_schema=strict,
        priority=body.priority,
        disk=body.disk,
        octavo=body.octavo or OctavoOptions(),
    )


Items = Sequence[InputMessage | FunctionCallItem | FunctionOutputItem | ReasoningItem]


def messages_of(items: str | Items) -> list[ChatMessage]:
    """Input items as messages. What an assistant said and called in a row is one message."""
    if isinstance(items, str):
        return [ChatMessage("user", items)]
    messages: list[ChatMessage] = []
    for item in items:
        if isinstance(item, FunctionOutputItem):
            messages.append(ChatMessage("tool", text_of(item.output), call_id=item.call_id))
        elif isinstance(item, FunctionCallItem):
            call = Call(item.call_id, item.name, item.arguments)
            if messages and messages[-1].role == "assistant":
                last = messages.pop()
                messages.append(ChatMessage("assistant", last.content, (*last.calls, call)))
            else:
                messages.append(ChatMessage("assistant", "", (call,)))
        elif isinstance(item, InputMessage):
            role = "system" if item.role == "developer" else item.role
            messages.append(ChatMessage(role, text_of(item.content)))
    return messages


def kept_items(items: str | Items) -> list[dict[str, Any]]:
    """Input items as they are listed later, each with an id."""
    if isinstance(items, str):
        items = [InputMessage(role="user", content=items)]
    return [_kept(item) for item in items if not isinstance(item, ReasoningItem)]


def _kept(item: InputMessage | FunctionCallItem | FunctionOutputItem) -> dict[str, Any]:
    if isinstance(item, FunctionCallItem):
        return {"id": new_id("fc"), "status": "completed", **item.model_dump()}
    if isinstance(item, FunctionOutputItem):
        return {"id": new_id("fco"), "status": "completed", **item.model_dump()}
    kind = "output_text" if item.role == "assistant" else "input_text"
    part: dict[str, Any] = {"type": kind, "text": text_of(item.content)}
    if item.role == "assistant":
        part |= {"annotations": [], "logprobs": []}
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": item.role,
        "status": "completed",
        "content": [part],
    }


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
