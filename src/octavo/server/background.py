"""Work that goes on after its request has been answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine


class Background:
    """Tasks that nobody waits for until the server ends. For one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many are running."""
        return len(self._tasks)

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self, seconds: float, hurries: Callable[[], bool]) -> None:
        """Waits until all have ended, at most so long and while nobody hurries, then cancels those that remain."""
        until = time.monotonic() + seconds
        while self._tasks and time.monotonic() < until and not hurries():
            await asyncio.wait(self._tasks, timeout=0.1)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
