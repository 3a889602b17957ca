"""Things that take long to load and much memory: loaded when they are asked for, within a limit, and unloaded when
nobody has used them for a while. For one event loop; what takes long is done beside it."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from octavo.errors import NotEnoughMemory
from octavo.server.log import log

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loading(Generic[T]):
    """How something is loaded.

    Attributes:
        num_bytes: what it will take, about.
        load: takes long, and may raise anything.
    """

    name: str
    num_bytes: int
    load: Callable[[], T]


@dataclass(eq=False, slots=True)
class _Place(Generic[T]):
    """`thing` is None while it is not loaded; `num_users` counts also those who wait for it."""

    loading: Loading[T]
    num_bytes: int
    thing: T | None = None
    task: asyncio.Task[T] | None = None
    num_users: int = 0
    used_s: float = field(default_factory=time.monotonic)


class Places(Generic[T]):
    """Args:
    unload: lets go of a thing; takes long.
    size_of: the bytes that a loaded thing takes.
    limit_bytes: that loaded things take together; None for no limit.
    keep_alive_s: after its last use a thing is unloaded; None keeps it until its room is needed.
    """

    def __init__(
        self,
        loadings: Sequence[Loading[T]],
        *,
        unload: Callable[[T], None],
        size_of: Callable[[T], int],
        limit_bytes: int | None = None,
        keep_alive_s: float | None = None,
    ) -> None:
        self._places = {one.name: _Place(one, one.num_bytes) for one in loadings}
        self._unload_thing = unload
        self._size_of = size_of
        self._limit_bytes = limit_bytes
        self._keep_alive_s = keep_alive_s
        self._changing = asyncio.Lock()  # one is loaded or unloaded at a time, so that sums are true
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def loaded(self) -> dict[str, T]:
        """What is loaded now, by name. It may be unloaded at any time, unless it was taken."""
        return {name: place.thing for name, place in self._places.items() if place.thing is not None}

    def put(self, name: str, thing: T) -> None:
        """Something is loaded already."""
        place = self._places[name]
        place.thing, place.num_bytes = thing, self._size_of(thing)

    async def take(self, name: str) -> T:
        """A thing, which is loaded first if need be; it stays loaded until `give` is called as often.

        Raises:
            KeyError: there is none of this name.
            NotEnoughMemory: others that are in use leave no room for it.
            Exception: what loading raised. The next one who takes it tries again.
        """
        place = self._places[name]
        place.num_users += 1
        try:
            if place.thing is not None:
                return place.thing
            if place.task is None:
                place.task = asyncio.create_task(self._load(place))
                place.task.add_done_callback(
                    lambda task: task.cancelled() or task.exception()
                )  # has been heard
            return await asyncio.shield(place.task)  # whoever waits may go; who comes later finds it loaded
        except BaseException:
            self.give(name)
            raise

    def give(self, name: str) -> None:
        """A user of a thing does not need it any more."""
        place = self._places[name]
        place.num_users -= 1
        place.used_s = time.monotonic()
        self._expire_later(place)

    def close(self) -> None:
        """Unloads everything. Nobody may use anything any more."""
        for place in self._places.values():
            thing, place.thing = place.thing, None
            if thing is not None:
                self._unload_thing(thing)

    def unchanging(self) -> AbstractAsyncContextManager[None]:
        """Nothing is loaded or unloaded meanwhile."""
        return self._changing

    async def _load(self, place: _Place[T]) -> T:
        try:
            async with self._changing:
                await self._make_room(place)
                start = time.monotonic()
                thing = await asyncio.to_thread(place.loading.load)
                self.put(place.loading.name, thing)
        finally:
            place.task = None
        seconds = round(time.monotonic() - start, 3)
        log("loaded", model=place.loading.name, bytes=place.num_bytes, duration_s=seconds)
        place.used_s = time.monotonic()
        self._expire_later(place)
        return thing

    async def _make_room(self, wanted: _Place[T]) -> None:
        """Unloads what is idle, the longest unused first, until there is room."""
        while self._limit_bytes is not None:
            held = [place for place in self._places.values() if place.thing is not None]
            if sum(place.num_bytes for place in held) + wanted.num_bytes <= self._limit_bytes:
                return
            idle = [place for place in held if not place.num_users]
            if idle:
                await self._unload(min(idle, key=lambda place: place.used_s))
                continue
            if not held:
                return  # it was let in at the start, so it is tried
            busy = " and ".join(place.loading.name for place in held)
            raise NotEnoughMemory(
                f"{wanted.loading.name} needs about {wanted.num_bytes:,} bytes, and {busy}, which "
                f"{'is' if len(held) == 1 else 'are'} answering, leave no room for it below the limit of "
                f"{self._limit_bytes:,} bytes (--max-loaded). Try again in a while."
            )

    def _expire_later(self, place: _Place[T]) -> None:
        if self._keep_alive_s is not None and place.thing is not None and not place.num_users:
            asyncio.get_running_loop().call_later(self._keep_alive_s, self._expire, place, place.used_s)

    def _expire(self, place: _Place[T], used_s: float) -> None:
        """Unloads what nobody has used since."""
        if place.used_s == used_s and not place.num_users and place.thing is not None:
            task = asyncio.create_task(self._unload_idle(place, used_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _unload_idle(self, place: _Place[T], used_s: float) -> None:
        async with self._changing:
            # While another one was loaded or unloaded, it may have been used.
            if place.used_s == used_s and place.thing is not None and not place.num_users:
                await self._unload(place)

    async def _unload(self, place: _Place[T]) -> None:
        thing, place.thing = place.thing, None
        assert thing is not None
        work = asyncio.to_thread(self._unload_thing, thing)
        del thing
        await work
        del work  # which holds what it was given
        await asyncio.to_thread(_collect)
        log("unloaded", model=place.loading.name)


def _collect() -> None:
    """Gives back what only cycles hold, also among what was there when the process began to serve, and what the C
    library keeps."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if "torch" in sys.modules:  # else engines have processes of their own, which have ended
        from octavo.models.exact import give_back_freed_memory

        give_back_freed_memory()
