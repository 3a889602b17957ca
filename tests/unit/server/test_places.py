"""Loading on demand, within a limit, and unloading, against a model of it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import NotEnoughMemory
from octavo.server.places import Loading, Places


class Thing:
    def __init__(self, name: str, num_bytes: int) -> None:
        self.name, self.num_bytes, self.is_open = name, num_bytes, True


class Library:
    """Things that can be loaded, and what has happened."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.events: list[str] = []
        self.fails: set[str] = set()
        self.waits: dict[str, threading.Event] = {}

    def places(self, **options: Any) -> Places[Thing]:
        return Places(
            [Loading(name, size, lambda name=name: self.load(name)) for name, size in self.sizes.items()],
            unload=self.unload,
            size_of=lambda thing: thing.num_bytes,
            **options,
        )

    def load(self, name: str) -> Thing:
        if name in self.waits:
            assert self.waits[name].wait(30)
        if name in self.fails:
            raise RuntimeError(f"{name} is broken")
        self.events.append(f"+{name}")
        return Thing(name, self.sizes[name])

    def unload(self, thing: Thing) -> None:
        thing.is_open = False
        self.events.append(f"-{thing.name}")


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def test_the_longest_unused_makes_room_and_what_is_used_stays() -> None:
    library = Library({"a": 4, "b": 4, "c": 4})

    async def work() -> None:
        places = library.places(limit_bytes=8)
        await places.take("a")
        places.give("a")
        b = await places.take("b")
        await places.take("c")
        assert library.events == ["+a", "+b", "-a", "+c"]
        with pytest.raises(NotEnoughMemory, match="a needs about 4 bytes, and b and c, which are answering"):
            await places.take("a")
        assert b.is_open
        places.give("b")
        await places.take("a")
        assert library.events[-2:] == ["-b", "+a"]
        assert not b.is_open

    run(work)


def test_many_who_ask_wait_for_one_load_and_hear_of_its_failure() -> None:
    library = Library({"a": 1, "b": 1})
    library.fails.add("a")

    async def work() -> None:
        places = library.places()
        found = await asyncio.gather(*(places.take("a") for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in found] == ["a is broken"] * 3
        assert (await places.take("b")).is_open  # another one's failure is nobody else's
        library.fails.clear()
        assert len({id(thing) for thing in await asyncio.gather(*(places.take("a") for _ in range(3)))}) == 1
        assert library.events == ["+b", "+a"]

    run(work)


def test_while_one_loads_what_is_loaded_is_given_out_and_who_goes_leaves_it_loaded() -> None:
    library = Library({"a": 1, "b": 1})
    library.waits["b"] = threading.Event()

    async def work() -> None:
        places = library.places(keep_alive_s=0.0)
        await places.take("a")
        waiting = asyncio.create_task(places.take("b"))
        await asyncio.sleep(0.05)
        assert (await asyncio.wait_for(places.take("a"), 5)).is_open
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        library.waits["b"].set()
        while "-b" not in library.events:  # nobody wants it any more
            await asyncio.sleep(0.01)
        assert places.loaded().keys() == {"a"}

    run(work)


def test_after_a_while_without_use_a_thing_is_gone() -> None:
    library = Library({"a": 1})

    async def work() -> None:
        places = library.places(keep_alive_s=0.05)
        first = weakref.ref(await places.take("a"))
        await asyncio.sleep(0.15)
        assert library.events == ["+a"], "it is in use"
        places.give("a")
        await places.take("a")
        places.give("a")
        while places.loaded():
            await asyncio.sleep(0.01)
        while "-a" not in library.events or first() is not None:
            gc.collect()
            await asyncio.sleep(0.01)
        await places.take("a")
        assert library.events == ["+a", "-a", "+a"]

    run(work)


def test_what_is_used_while_another_one_loads_stays() -> None:
    library = Library({"a": 1, "b": 1})
    library.waits["b"] = threading.Event()

    async def work() -> None:
        places = library.places(keep_alive_s=0.2)
        await places.take("a")
        places.give("a")
        loading = asyncio.create_task(places.take("b"))
        await asyncio.sleep(0.3)  # by now a is to be unloaded, and waits for b
        await places.take("a")
        places.give("a")
        library.waits["b"].set()
        await loading
        await asyncio.sleep(0.05)
        assert library.events == ["+a", "+b"]

    run(work)


@given(
    sizes=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), min_size=1),
    limit=st.integers(5, 12),
    steps=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=25),
)
def test_the_limit_holds_and_what_is_held_is_open(
    sizes: dict[str, int], limit: int, steps: list[tuple[str, bool]]
) -> None:
    library = Library(sizes)

    async def work() -> None:
        places = library.places(limit_bytes=limit)
        held: list[Thing] = []
        for name, takes in steps:
            if name not in sizes:
                continue
            if takes:
                used = {thing.name for thing in held}
                fits = name in places.loaded() or sum(sizes[one] for one in used | {name}) <= limit
                try:
                    held.append(await places.take(name))
                    assert fits
                except NotEnoughMemory:
                    assert not fits
            elif found := next((thing for thing in held if thing.name == name), None):
                held.remove(found)
                places.give(name)
            assert all(thing.is_open for thing in held)
            assert sum(sizes[one] for one in places.loaded()) <= limit
        places.close()
        assert not any(thing.is_open for thing in held)

    run(work)
