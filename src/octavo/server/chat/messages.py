"""Messages and tools as all interfaces mean them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` is the JSON text that the model generated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `call_id` names the call that a tool's message is the result of."""

    role: Role
    content: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema; `strict` refuses what it cannot hold to."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def as_openai(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class MessageKeys:
    """Names for a growing list of messages: equal for lists that say the same, whatever way they came.

    What clients change when they send an answer back does not count: space around it, the order and spacing of
    the JSON in arguments, and the ids of calls.
    """

    def __init__(self, scope: str, tools: Sequence[Tool]) -> None:
        """`scope` keeps apart what must not be taken for one another: tenants, models, ways to write tools."""
        self._hash = blake2b(digest_size=16)
        self._add([scope, [tool.as_openai() for tool in tools]])

    def add(self, message: ChatMessage) -> bytes:
        """The name of the list with `message` added."""
        calls = [[call.name, _canonical(call.arguments)] for call in message.calls]
        self._add([message.role, message.content.strip(), calls])
        return self._hash.digest()

    def after(self, message: ChatMessage) -> bytes:
        """The name that the list would have with `message` added."""
        other = MessageKeys.__new__(MessageKeys)
        other._hash = self._hash.copy()
        return other.add(message)

    def _add(self, value: Any) -> None:
        self._hash.update(json.dumps(value, sort_keys=True).encode() + b"\n")


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
