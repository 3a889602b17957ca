"""From the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from octavo.engine.messages import Event, Failure

Sink = Callable[[Event], None]


class Mailbox:
    """Takes events to an event loop, which is woken once for all that come while it is busy."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._letters: deque[tuple[Sink, Event]] = deque()
        self._woken = False

    @classmethod
    def of_this_loop(cls, latest: Mailbox | None) -> Mailbox:
        """That of the running loop: `latest`, unless that is another loop's."""
        loop = asyncio.get_running_loop()
        return cls(loop) if latest is None or latest.loop is not loop else latest

    def put(self, deliver: Sink, event: Event) -> None:
        """Has `deliver(event)` called on the loop. For the engine's thread."""
        self._letters.append((deliver, event))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False
        while self._letters:
            deliver, event = self._letters.popleft()
            deliver(event)


class Inbox:
    """The events of one request, for a coroutine of the mailbox's loop.

    Attributes:
        put: takes an event; for the engine's thread.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.put: Sink = partial(mailbox.put, self._events.put_nowait)

    async def next(self) -> Event:
        """Waits for the next event; raises the error that a failure tells of."""
        event = await self._events.get()
        if isinstance(event, Failure):
            raise event.error
        return event
