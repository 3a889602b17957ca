"""The events of a request, for whoever reads them in a loop."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from octavo.engine.messages import Event, Failure, is_last


class Stream(Iterator[Event]):
    """Yields the events of a request. Closing it, or dropping it, aborts the request if that still runs.

    It is no generator, which would not notice that it is closed before anybody has begun to read it.

    Args:
        events: where they come in; a None ends them.
        forget: aborts the request if it still runs.
    """

    def __init__(self, events: queue.SimpleQueue[Event | None], forget: Callable[[], None]) -> None:
        self._events, self._forget = events, forget
        self._over = False

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        try:
            event = self._events.get()
        except BaseException:  # an interrupt
            self.close()
            raise
        if event is None:
            raise StopIteration
        self._over = self._over or is_last(event)
        if isinstance(event, Failure):
            raise event.error
        return event

    def close(self) -> None:
        """Aborts the request if it still runs, and ends the events, also for a thread that waits for one."""
        self._over = True
        self._forget()
        self._events.put(None)

    def __del__(self) -> None:
        self._forget()
