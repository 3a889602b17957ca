"""Responses and conversations that are kept to be asked for again, each for its tenant alone."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

from octavo.kv.storage.records import Document
from octavo.kv.storage.tier import Tier
from octavo.server.chat.messages import Call, ChatMessage
from octavo.server.problems import Problem

_FLUSH_S = 30.0
_ENDED = {"code": "server_error", "message": "The server ended while it was made."}


@dataclass(frozen=True, slots=True)
class Trace:
    """What an answer has left elsewhere: the model's keys and values of `ids`, and transcripts under `keys`."""

    model: str
    ids: array[int]
    keys: tuple[bytes, ...]

    def before(self, later: Trace) -> Trace | None:
        """Both as one, if the later one goes on from this one."""
        if self.model != later.model or later.ids[: len(self.ids)] != self.ids:
            return None
        return Trace(self.model, later.ids, (*self.keys, *later.keys))

    def packed(self) -> list[Any]:
        return [self.model, list(self.ids), [key.hex() for key in self.keys]]

    @classmethod
    def unpacked(cls, values: Sequence[Any]) -> Self:
        model, ids, keys = values
        return cls(model, array("i", ids), tuple(map(bytes.fromhex, keys)))


@dataclass(slots=True)
class KeptResponse:
    """A response, what it answered, and the messages that a next one goes on from.

    Attributes:
        items: of its own input.
        messages: all before it, its own input, and its output; without instructions.
        task: that still makes it, if it is made in the background.
        disk: whether it may be kept on disk.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    messages: tuple[ChatMessage, ...]
    task: asyncio.Task[None] | None = None
    traces: list[Trace] = field(default_factory=list)
    disk: bool = True

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def is_made(self) -> bool:
        """Whether it is still being made in the background."""
        return self.task is not None and not self.task.done()

    @property
    def is_unfinished(self) -> bool:
        return self.response["status"] in ("queued", "in_progress")

    def end_with_the_server(self) -> None:
        """Nobody will finish it."""
        self.response |= {"status": "failed", "error": _ENDED}

    @property
    def conversation_id(self) -> str | None:
        """Of the conversation that it was made in."""
        named = self.response.get("conversation")
        return None if named is None else str(named["id"])

    def packed(self) -> dict[str, Any]:
        traces = [trace.packed() for trace in self.traces]
        messages = _packed(self.messages)
        return {"response": self.response, "items": self.items, "messages": messages, "traces": traces}

    @classmethod
    def unpacked(cls, values: Mapping[str, Any]) -> Self:
        traces = [Trace.unpacked(one) for one in values["traces"]]
        kept = cls(values["response"], values["items"], _unpacked(values["messages"]), traces=traces)
        if kept.is_unfinished:  # what is being made is in memory
            kept.end_with_the_server()
        return kept


@dataclass(slots=True)
class KeptConversation:
    """A conversation: responses add to it what they were asked and what they answered.

    Attributes:
        disk: whether it may be kept on disk; not if one of its responses may not.
    """

    id: str
    metadata: dict[str, Any]
    items: list[dict[str, Any]]
    messages: tuple[ChatMessage, ...]
    created_at: int = field(default_factory=lambda: int(time.time()))
    traces: list[Trace] = field(default_factory=list)
    disk: bool = True
    is_made: ClassVar = False

    def add(
        self, items: Sequence[dict[str, Any]], messages: Sequence[ChatMessage], trace: Trace | None
    ) -> None:
        self.items += items
        self.messages += tuple(messages)
        if trace is not None:
            joined = self.traces[-1].before(trace) if self.traces else None
            if joined is not None:
                self.traces.pop()
            self.traces.append(joined or trace)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }

    def packed(self) -> dict[str, Any]:
        traces = [trace.packed() for trace in self.traces]
        messages = _packed(self.messages)
        return {**self.as_json(), "items": list(self.items), "messages": messages, "traces": traces}

    @classmethod
    def unpacked(cls, values: Mapping[str, Any]) -> Self:
        messages = _unpacked(values["messages"])
        traces = [Trace.unpacked(one) for one in values["traces"]]
        return cls(values["id"], values["metadata"], values["items"], messages, values["created_at"], traces)


T = TypeVar("T", KeptResponse, KeptConversation)


class Shelf(Generic[T]):
    """Things by tenant and id, the last ones in memory and below them all of them on disk. For one event loop.

    Args:
        what: they are called in messages, and the kind of their documents.
        max_items: in memory; the longest unused leave it first, but those that are still made stay.
        max_bytes: in memory, as the things are written; one that alone has more is on disk only.
        disk: keeps nothing if there is no disk tier.
        unpacked: makes a thing of what its `packed` gave; raises if another version gave it.
    """

    def __init__(
        self,
        what: str,
        max_items: int,
        max_bytes: int,
        disk: Tier,
        unpacked: Callable[[Mapping[str, Any]], T],
    ) -> None:
        self._what = what
        self._max_items, self._max_bytes = max_items, max_bytes
        self._disk = disk
        self._thing_of: Callable[[Mapping[str, Any]], T] = unpacked
        self._things: OrderedDict[tuple[str, str], T] = OrderedDict()
        self._sizes: dict[tuple[str, str], int] = {}  # not yet of those that are being written
        self._writing = threading.Lock()  # so that nothing older is written behind what is newer

    def __contains__(self, key: tuple[str, str]) -> bool:
        """Whether a tenant's thing of an id is in memory."""
        return key in self._things

    def of(self, namespace: str) -> list[T]:
        """A tenant's things that are in memory."""
        return [thing for (owner, _), thing in self._things.items() if owner == namespace]

    async def find(self, namespace: str, id_: str) -> T:
        """What a tenant has kept.

        Raises:
            Problem: it is not there, or another's.
        """
        key = (namespace, id_)
        if key not in self._things:
            read = await asyncio.to_thread(self._read, namespace, id_)
            if read is not None and key not in self._things:  # somebody else may have read it meanwhile
                thing, size = read
                self._things[key], self._sizes[key] = thing, size
                self._make_room()
                return thing
        if key not in self._things:
            said = f"There is no {self._what} {id_[:80]!r}; it may have been forgotten."
            raise Problem(404, said, "not_found")
        self._things.move_to_end(key)
        return self._things[key]

    async def keep(self, namespace: str, thing: T) -> bool:
        """Keeps something in memory and, if it may be there, on disk, in place of what was there.

        Returns whether there is a place for it; it may be too large for memory alone.
        """
        key = (namespace, thing.id)
        self._things[key] = thing
        self._things.move_to_end(key)
        size, held = self._sizes.pop(key, 0), False

        def write() -> tuple[int, bool]:
            with self._writing:
                data = json.dumps(thing.packed()).encode()
                if not thing.disk:
                    self._disk.remove_document(self._what, namespace, thing.id.encode())
                    return len(data), False
                document = Document(self._what, thing.id.encode(), data, namespace)
                # It may have been deleted meanwhile.
                return len(data), key in self._things and self._disk.put_document(document)

        try:
            size, held = await asyncio.to_thread(write)
            if size > self._max_bytes and held:
                await asyncio.to_thread(self._disk.flush, _FLUSH_S)  # only then can it be read from there
        finally:
            if key in self._things:
                self._sizes[key] = size
                self._make_room()
        return held or size <= self._max_bytes

    def _make_room(self) -> None:
        """Lets what is too large by itself leave memory, then the longest unused."""
        total = sum(self._sizes.values())
        for key in sorted(self._things, key=lambda key: self._sizes.get(key, 0) <= self._max_bytes):
            if len(self._things) <= self._max_items and total <= self._max_bytes:
                return
            if key in self._sizes and not self._things[key].is_made:
                total -= self._sizes[key]
                self._remove(key)

    def _remove(self, key: tuple[str, str]) -> None:
        self._things.pop(key, None)
        self._sizes.pop(key, None)

    async def drop(self, namespace: str, id_: str) -> None:
        """Deletes a thing, which was found."""
        self._remove((namespace, id_))

        def remove() -> None:
            with self._writing:
                self._disk.remove_document(self._what, namespace, id_.encode())
            self._disk.flush(_FLUSH_S)

        await asyncio.to_thread(remove)

    def forget(self, namespace: str) -> int:
        """Drops all of a tenant's, in memory and on disk; how many there were in memory."""
        self._disk.remove_documents(self._what, namespace)
        gone = [key for key in self._things if key[0] == namespace]
        for key in gone:
            self._remove(key)
        return len(gone)

    def clear(self) -> None:
        """Drops what is in memory."""
        self._things.clear()
        self._sizes.clear()

    def _read(self, namespace: str, id_: str) -> tuple[T, int] | None:
        document = self._disk.get_document(self._what, namespace, id_.encode("utf-8", "surrogatepass"))
        if document is None:
            return None
        try:
            return self._thing_of(json.loads(document.data)), len(document.data)
        except (ValueError, KeyError, TypeError):
            return None


def _packed(messages: Sequence[ChatMessage]) -> list[list[Any]]:
    return [
        [message.role, message.content, message.call_id]
        + [[call.id, call.name, call.arguments] for call in message.calls]
        for message in messages
    ]


def _unpacked(values: Sequence[Sequence[Any]]) -> tuple[ChatMessage, ...]:
    return tuple(
        ChatMessage(role, content, tuple(Call(*call) for call in calls), call_id)
        for role, content, call_id, *calls in values
    )
