"""Work in the background has its time when the server ends, and no longer."""

from __future__ import annotations

import asyncio
import time

from octavo.server.background import Background


async def nap(seconds: float, ends: list[str]) -> None:
    try:
        await asyncio.sleep(seconds)
        ends.append("finished")
    except asyncio.CancelledError:
        ends.append("cancelled")
        raise


def test_what_does_not_end_in_time_is_cancelled() -> None:
    async def run(seconds: float, hurries: bool) -> list[str]:
        background, ends = Background(), []
        background.start(nap(0.1, ends))
        background.start(nap(600, ends))
        assert len(background) == 2
        await asyncio.sleep(0)
        began = time.monotonic()
        await background.end(seconds, lambda: hurries)
        assert time.monotonic() - began < 60
        assert len(background) == 0
        return ends

    assert asyncio.run(run(1, hurries=False)) == ["finished", "cancelled"]
    assert asyncio.run(run(600, hurries=True)) == ["cancelled", "cancelled"]
    assert asyncio.run(run(-1, hurries=False)) == ["cancelled", "cancelled"]
