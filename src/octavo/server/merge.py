"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all sources as they come, each with the number of its source.

    Closing it closes the sources; so does the first error, which is raised.
    """
    items: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def feed(number: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source) as rest:
                async for item in rest:
                    items.put_nowait((number, item))
        except Exception as error:
            items.put_nowait(error)
        else:
            items.put_nowait(None)

    tasks = [asyncio.create_task(feed(number, source)) for number, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            item = await items.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
