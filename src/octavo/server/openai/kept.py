"""Responses and conversations that are kept to be asked for again, each for its tenant alone."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from octavo.server.chat.messages import ChatMessage
from octavo.server.problems import Problem


@dataclass(slots=True)
class KeptResponse:
    """A response, what it answered, and the messages that a next one goes on from.

    Attributes:
        items: of its own input.
        messages: all before it, its own input, and its output; without instructions.
        task: that still makes it, if it is made in the background.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    messages: tuple[ChatMessage, ...]
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class KeptConversation:
    """A conversation: responses add to it what they were asked and what they answered."""

    id: str
    metadata: dict[str, Any]
    items: list[dict[str, Any]]
    messages: tuple[ChatMessage, ...]
    created_at: int = field(default_factory=lambda: int(time.time()))

    def add(self, items: Sequence[dict[str, Any]], messages: Sequence[ChatMessage]) -> None:
        self.items += items
        self.messages += tuple(messages)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


T = TypeVar("T", KeptResponse, KeptConversation)


class Shelf(OrderedDict[tuple[str, str], T]):
    """At most `max_items` things by tenant and id; the longest unused go first. For the event loop alone."""

    def __init__(self, what: str, max_items: int) -> None:
        super().__init__()
        self._what = what
        self._max_items = max_items

    def find(self, namespace: str, id_: str) -> T:
        """What a tenant has kept.

        Raises:
            Problem: it is not there, or another's.
        """
        found = self.get((namespace, id_))
        if found is None:
            raise Problem(
                404, f"There is no {self._what} {id_[:80]!r}; it may have been forgotten.", "not_found"
            )
        self.move_to_end((namespace, id_))
        return found

    def keep(self, namespace: str, id_: str, thing: T) -> None:
        self[namespace, id_] = thing
        self.move_to_end((namespace, id_))
        while len(self) > self._max_items:
            self.popitem(last=False)

    def forget(self, namespace: str) -> int:
        """Drops all of a tenant's; how many there were."""
        gone = [key for key in self if key[0] == namespace]
        for key in gone:
            del self[key]
        return len(gone)
