"""What is kept of responses and conversations: so much in memory, the rest on disk."""

from __future__ import annotations

import asyncio

import pytest

from octavo.kv.storage.memory import MemoryStore
from octavo.kv.storage.store_tier import StoreTier
from octavo.kv.storage.tier import NullTier, Tier
from octavo.server.openai.kept import KeptConversation, Shelf
from octavo.server.problems import Problem


def shelf(disk: Tier) -> Shelf[KeptConversation]:
    return Shelf("dialogue", 10, 10_000, disk, KeptConversation.unpacked)


def talk(id_: str, num_bytes: int) -> KeptConversation:
    return KeptConversation(id_, {}, [{"text": "x" * num_bytes}], ())


def test_memory_is_bounded_and_the_longest_unused_go_to_disk() -> None:
    async def run() -> None:
        tier = StoreTier(MemoryStore())
        kept = shelf(tier)
        for id_ in ("a", "b", "c"):
            assert await kept.keep("ada", talk(id_, 3000))
        await kept.find("ada", "a")
        assert await kept.keep("ada", talk("d", 3000))
        assert [thing.id for thing in kept.of("ada")] == ["c", "a", "d"]
        assert tier.flush(5)
        assert (await kept.find("ada", "b")).items == talk("b", 3000).items
        assert [thing.id for thing in kept.of("ada")] == ["a", "d", "b"]
        tier.close(5)

    asyncio.run(run())


def test_what_is_too_large_by_itself_is_on_disk_only() -> None:
    async def run() -> None:
        tier = StoreTier(MemoryStore())
        kept = shelf(tier)
        await kept.keep("ada", talk("small", 10))
        assert await kept.keep("ada", talk("large", 20_000))
        assert [thing.id for thing in kept.of("ada")] == ["small"]
        assert (await kept.find("ada", "large")).items == talk("large", 20_000).items
        assert [thing.id for thing in kept.of("ada")] == ["small"]
        await kept.drop("ada", "large")
        with pytest.raises(Problem):
            await kept.find("ada", "large")
        tier.close(5)

    asyncio.run(run())


def test_without_a_disk_what_is_too_large_has_no_place() -> None:
    async def run() -> None:
        kept = shelf(NullTier())
        await kept.keep("ada", talk("small", 10))
        assert not await kept.keep("ada", talk("large", 20_000))
        assert [thing.id for thing in kept.of("ada")] == ["small"]
        with pytest.raises(Problem, match="no dialogue"):
            await kept.find("ada", "large")

    asyncio.run(run())
