"""How a model writes calls of tools, as its chat template shows it; and a way for models whose template knows none."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from octavo.errors import InvalidRequest
from octavo.server.chat.messages import Call, ChatMessage, Tool
from octavo.sessions.template import ChatTemplate

_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""What Qwen's and Hermes' templates tell the model, nearly word for word."""

_IDS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Written:
    """What a chat template gets: messages and tools. `places` has where each message of a request stands."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    places: list[int]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text around the name and the arguments of a call.

    A call is `before_name` NAME `after_name` ARGUMENTS `after_call`. The first one follows `begin`, further ones
    follow `between`, and `end` follows the last.

    Attributes:
        anywhere: whether calls may follow text; otherwise they are the whole answer.
        optional: a special token that a model may write in front of everything.
        short_ids: whether the template wants ids of 9 letters.
        own_prompt: whether tools, calls and results are written into the messages' text by us, because the
            template has no place for them.
        in_user: whether those tools stand in the first message of the user, because the template takes none of the
            system.
    """

    name: str
    begin: str
    before_name: str
    after_name: str
    after_call: str
    between: str
    end: str = ""
    anywhere: bool = True
    optional: str = ""
    short_ids: bool = False
    own_prompt: bool = False
    in_user: bool = False

    def text_of(self, calls: Sequence[Call]) -> str:
        """Calls as the model writes them."""
        parts = [
            f"{self.before_name}{call.name}{self.after_name}{call.arguments}{self.after_call}"
            for call in calls
        ]
        return self.begin + self.between.join(parts) + self.end if parts else ""

    def written(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> Written:
        """The messages and the tools that the chat template gets."""
        if not self.own_prompt:
            names = {call.id: call.name for message in messages for call in message.calls}
            return Written(
                [self._message(message, names) for message in messages],
                [tool.as_openai() for tool in tools] or None,
                list(range(len(messages))),
            )
        plain: list[dict[str, Any]] = []
        places = []
        follows_result = False
        for message in messages:
            one = self._plain(message)
            # Many templates want user and assistant to take turns: results, and what the user says to them, are one.
            if follows_result and one["role"] == "user":
                plain[-1]["content"] += f"\n{one['content']}"
            else:
                plain.append(one)
            follows_result = message.role == "tool"
            places.append(len(plain) - 1)
        if tools:
            prompt = _PROMPT.format(tools="\n".join(json.dumps(tool.as_openai()) for tool in tools))
            if plain[0]["role"] == "system":
                plain[0]["content"] += f"\n\n{prompt}"
            elif self.in_user and plain[0]["role"] == "user":
                plain[0]["content"] = f"{prompt}\n\n{plain[0]['content']}"
            else:
                plain.insert(0, {"role": "system", "content": prompt})
                places = [place + 1 for place in places]
        return Written(plain, None, places)

    def _message(self, message: ChatMessage, names: dict[str, str]) -> dict[str, Any]:
        written: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.calls:
            written["tool_calls"] = [
                {
                    "id": self._id(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _parsed(call.arguments)},
                }
                for call in message.calls
            ]
        if message.role == "tool":
            call_id = message.call_id or ""
            written |= {"tool_call_id": self._id(call_id), "name": names.get(call_id, "")}
        return written

    def _plain(self, message: ChatMessage) -> dict[str, Any]:
        if message.role == "tool":
            return {"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"}
        parts = [part for part in (message.content, self.text_of(message.calls)) if part]
        return {"role": message.role, "content": "\n".join(parts)}

    def _id(self, call_id: str) -> str:
        if not self.short_ids:
            return call_id
        return "".join(_IDS[byte % len(_IDS)] for byte in blake2b(call_id.encode(), digest_size=9).digest())


HERMES = ToolFormat(
    "hermes",
    begin="<tool_call>\n",
    before_name='{"name": "',
    after_name='", "arguments": ',
    after_call="}\n</tool_call>",
    between="\n<tool_call>\n",
)
LLAMA3 = ToolFormat(
    "llama3",
    begin="",
    before_name='{"name": "',
    after_name='", "parameters": ',
    after_call="}",
    between="; ",
    anywhere=False,
    optional="<|python_tag|>",
)
MISTRAL = ToolFormat(
    "mistral",
    begin="[TOOL_CALLS] [",
    before_name='{"name": "',
    after_name='", "arguments": ',
    after_call="}",
    between=", ",
    end="]",
    short_ids=True,
)
MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    begin="[TOOL_CALLS]",
    before_name="",
    after_name="[ARGS]",
    after_call="",
    between="[TOOL_CALLS]",
    short_ids=True,
)
OWN = replace(HERMES, name="own", own_prompt=True)


def format_of(template: ChatTemplate) -> ToolFormat:
    """The format that a template shows its model, or `OWN` where it shows none that is known."""
    source = template.source
    tool = Tool("probe_of_tools").as_openai()
    try:
        messages = [{"role": "user", "content": "Hi"}]
        writes = tool["function"]["name"] in template.render(messages, [tool])
    except InvalidRequest:
        writes = False
    if not writes:
        return _own(template)
    if "[TOOL_CALLS]" in source:
        if "[ARGS]" in source:
            return MISTRAL_ARGS
        return MISTRAL if "[TOOL_CALLS] [" in source else replace(MISTRAL, begin="[TOOL_CALLS][")
    if "<tool_call>" in source and '"arguments"' in source.replace("\\", ""):
        return HERMES
    if "<|start_header_id|>" in source and '"parameters"' in source.replace("\\", ""):
        return LLAMA3
    return _own(template)


def _own(template: ChatTemplate) -> ToolFormat:
    """`OWN`, written where the template has a place for it."""
    messages = [{"role": "system", "content": "probe_of_system"}, {"role": "user", "content": "Hi"}]
    try:
        takes_system = "probe_of_system" in template.render(messages, None)
    except InvalidRequest:
        takes_system = False
    return replace(OWN, in_user=not takes_system)


def _parsed(arguments: str) -> Any:
    """Arguments as templates expect them: an object, or the text where it is not one."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
