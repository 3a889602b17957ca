"""Anthropic's messages as all interfaces mean them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

from octavo.server.anthropic.schema import (
    AssistantMessage,
    CountRequest,
    MessagesRequest,
    SystemMessage,
    TextBlock,
    Tool,
    ToolChoiceAuto,
    ToolChoiceTool,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from octavo.server.chat.answer import ChatJob, ToolUse
from octavo.server.chat.messages import Call, ChatMessage
from octavo.server.chat.messages import Tool as ChatTool
from octavo.server.problems import Problem
from octavo.server.sampling import sampling
from octavo.server.schema import OctavoOptions, text_of

Retention = Literal["5m", "1h"]
_PRIORITIES: dict[Retention | None, int] = {None: 0, "5m": 1, "1h": 2}
"""A mark says that a prompt will come again. What is marked is never kept shorter than what is not."""


def job_of(body: CountRequest, namespace: str) -> ChatJob:
    """What a request asks of the model.

    A last message of the assistant is the beginning of the answer.

    Raises:
        Problem: it is the only message.
    """
    messages = list(_messages(body))
    prefill = ""
    if messages[-1].role == "assistant" and not messages[-1].calls:
        prefill = messages.pop().content.rstrip()
        if not messages:
            raise Problem(400, "There is no message of the user to answer.", "invalid_value", "messages")
    settings = {}
    schema = None
    if isinstance(body, MessagesRequest):
        if body.output_config is not None and body.output_config.format is not None:
            schema = body.output_config.format.schema_
        settings = {
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "max_tokens": max(body.max_tokens, 1),
            "stop": tuple(body.stop_sequences or ()),
        }
    return ChatJob(
        messages=messages,
        params=sampling(settings),
        namespace=namespace,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_use=_tool_use(body),
        schema=schema,
        prefill=prefill,
        priority=_PRIORITIES[retention_of(body)],
        octavo=body.octavo or OctavoOptions(),
        call_prefix="toolu_",
    )


def retention_of(body: CountRequest) -> Retention | None:
    """The longest time that a mark in the request asks to keep what was read; None without a mark."""
    marks = [body.cache_control]
    marks += [tool.cache_control for tool in body.tools or ()]
    for content in (body.system, *(message.content for message in body.messages)):
        if isinstance(content, list):
            marks += [getattr(block, "cache_control", None) for block in content]
    times = {mark.ttl or "5m" for mark in marks if mark is not None}
    return "1h" if "1h" in times else "5m" if times else None


def _messages(body: CountRequest) -> Iterator[ChatMessage]:
    if body.system is not None:
        text = text_of(body.system)
        if text:
            yield ChatMessage("system", text)
    for message in body.messages:
        if isinstance(message, AssistantMessage):
            yield _assistant(message)
        elif isinstance(message, SystemMessage):
            yield ChatMessage("system", text_of(message.content))
        else:
            yield from _user(message)


def _assistant(message: AssistantMessage) -> ChatMessage:
    if isinstance(message.content, str):
        return ChatMessage("assistant", message.content)
    text = "".join(block.text for block in message.content if isinstance(block, TextBlock))
    calls = tuple(
        Call(block.id, block.name, json.dumps(block.input))
        for block in message.content
        if isinstance(block, ToolUseBlock)
    )
    return ChatMessage("assistant", text, calls)


def _user(message: UserMessage) -> Iterator[ChatMessage]:
    """Results of tools are messages of their own, and text between them one of the user."""
    if isinstance(message.content, str):
        yield ChatMessage("user", message.content)
        return
    texts: list[str] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            if texts:
                yield ChatMessage("user", "\n\n".join(texts))
                texts = []
            failed = "Error: " if block.is_error else ""
            yield ChatMessage("tool", failed + text_of(block.content), call_id=block.tool_use_id)
        else:
            texts.append(block.text)
    if texts or not message.content:
        yield ChatMessage("user", "\n\n".join(texts))


def _tool(tool: Tool) -> ChatTool:
    return ChatTool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))


def _tool_use(body: CountRequest) -> ToolUse:
    choice = body.tool_choice
    if isinstance(choice, ToolChoiceTool):
        return ToolUse(f"name:{choice.name}", parallel=False)
    if isinstance(choice, ToolChoiceAuto):
        mode = "auto" if choice.type == "auto" else "required"
        return ToolUse(mode, parallel=not choice.disable_parallel_tool_use)
    return ToolUse("auto" if choice is None else "none")
