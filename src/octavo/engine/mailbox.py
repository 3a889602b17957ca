"""From the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from octavo.engine.messages import Event

Sink = Callable[[Event], None]


class Mailbox:
    """Takes events to an event loop, which is woken once for all that come while it is busy."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._letters: deque[tuple[Sink, Event]] = deque()
        self._woken = False

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
