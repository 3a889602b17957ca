"""Pins: sealed blocks that are held in memory by name, whoever else needs room."""

from __future__ import annotations

import time

from octavo.errors import InvalidRequest
from octavo.kv.manager import KVCacheManager
from octavo.kv.table import BlockTable
from octavo.spec import BLOCK_SIZE

SHARE = 0.5
"""Of the blocks, that pins may hold: the rest is for those who come."""

Name = tuple[bytes, str]


class Pins:
    """Pins by namespace and name."""

    def __init__(self, manager: KVCacheManager, num_blocks: int) -> None:
        self._manager = manager
        self.max_blocks = int(num_blocks * SHARE)
        self._pins: dict[Name, tuple[BlockTable, float]] = {}

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that are held."""
        return len(self._blocks())

    def block_ids(self) -> set[int]:
        """The blocks that are held."""
        return self._blocks()

    def _blocks(self, but: Name | None = None) -> set[int]:
        return {id_ for name, (table, _) in self._pins.items() if name != but for id_ in table.block_ids}

    def check(self, name: Name, num_tokens: int) -> None:
        """Raises InvalidRequest if a prompt cannot be pinned beside the other pins."""
        room = self.max_blocks - len(self._blocks(but=name))
        if num_tokens // BLOCK_SIZE > room:
            raise InvalidRequest(
                f"The prompt of {num_tokens:,} tokens cannot be pinned: pins may hold {self.max_blocks * BLOCK_SIZE:,} "
                f"tokens, half of the cache, and {max(room, 0) * BLOCK_SIZE:,} of them are left. Let go of another pin "
                "(unpin), raise the cache budget (kv_memory, --kv-memory), or use priority instead."
            )

    def hold(self, name: Name, table: BlockTable, ttl_s: float | None) -> int:
        """Pin a sequence's blocks, as many as there is room for; returns how many tokens that is."""
        self.release(name)
        others = self._blocks()
        room, num_blocks = self.max_blocks - len(others), 0
        for block_id in table.block_ids:
            room -= block_id not in others
            if room < 0:
                break
            num_blocks += 1
        until = time.monotonic() + ttl_s if ttl_s is not None else float("inf")
        self._pins[name] = self._manager.pin(table, num_blocks), until
        return num_blocks * BLOCK_SIZE

    def release(self, name: Name) -> bool:
        """Let go of a pin; whether there was one."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._manager.free(pin[0])
        return pin is not None

    def expire(self) -> None:
        """Let go of pins whose time is over."""
        now = time.monotonic()
        for name in [name for name, (_, until) in self._pins.items() if until <= now]:
            self.release(name)

    def clear(self, namespace: bytes | None = None) -> None:
        """Let go of all pins, or of those of a namespace."""
        for name in list(self._pins):
            if namespace in (None, name[0]):
                self.release(name)
