"""What the dashboard is sent: snapshots as JSON in sections, of which a stream repeats only those that changed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from octavo.engine.lineage import Turn
from octavo.engine.snapshot import Cell, Conversation, Snapshot
from octavo.errors import EngineStopped
from octavo.server.dashboard.changes import Sections, changed
from octavo.server.http import sse_json
from octavo.server.models import Models
from octavo.server.tenants import METRICS, Keys, Tenant
from octavo.spec import BLOCK_SIZE

EVERY_S = 0.4
"""Between two looks at the engines: whatever happens is seen within a second."""

_SILENCE_S = 5.0
MAX_CONVERSATIONS, MAX_TURNS = 60, 20


class Feed:
    """Looks at the engines for all who look on: at most once in a while, however many they are.

    Args:
        stopping: set when the server is to end, and so the streams, which have no end of their own.
    """

    def __init__(self, models: Models, keys: Keys, stopping: threading.Event) -> None:
        self._models, self._keys, self._stopping = models, keys, stopping
        self._seen: dict[Tenant, tuple[float, asyncio.Task[Sections]]] = {}

    async def state(self, tenant: Tenant) -> Sections:
        """What a tenant may know now: everything where no keys are set, otherwise what is its own.

        Who has the key of the metrics is told how much there is and not whose.
        """
        return await asyncio.to_thread(self._look, tenant)

    async def events(self, tenant: Tenant) -> AsyncGenerator[bytes, None]:
        """Server-sent events: the whole state, and then what has changed in it."""
        last: Sections = {}
        spoke_s = time.monotonic()
        while not self._stopping.is_set():
            began_s = time.monotonic()
            state = await self._shared(tenant)
            if changes := changed(last, state):
                yield sse_json(changes, "state")
                spoke_s = time.monotonic()
            elif time.monotonic() - spoke_s > _SILENCE_S:
                yield b": nothing has changed\n\n"
                spoke_s = time.monotonic()
            last = state
            # Looking on a large cache takes long, and may take a quarter of the time at most.
            await asyncio.sleep(max(EVERY_S, 3 * (time.monotonic() - began_s)))
        yield sse_json({}, "end")

    async def _shared(self, tenant: Tenant) -> Sections:
        """The state as one of the streams of a tenant has seen it not long ago."""
        now = time.monotonic()
        self._seen = {one: seen for one, seen in self._seen.items() if now - seen[0] < EVERY_S / 2}
        if tenant not in self._seen:
            self._seen[tenant] = now, asyncio.create_task(self.state(tenant))
        return await asyncio.shield(self._seen[tenant][1])

    def _look(self, tenant: Tenant) -> Sections:
        whole = not self._keys or tenant is METRICS
        models: Sections = {}
        for name, engine in self._models.engines().items():
            try:
                seen = engine.snapshot(None if whole else tenant.namespace, names=tenant is not METRICS)
            except EngineStopped:
                continue
            models[name] = sections_of(seen)
        who = {
            "tenant": tenant.name,
            "whole": whole,
            "may_act": tenant is not METRICS,
            "names": self._models.names,
        }
        return {"who": who, "models": models}


def sections_of(seen: Snapshot) -> Sections:
    """A snapshot as JSON values."""
    memory = asdict(seen.memory)
    del memory["disk"]["place"]
    if not seen.whole:
        del memory["workspace_bytes"]
    return {
        "model": {
            "context": seen.context,
            "dtype": seen.dtype,
            "block_tokens": BLOCK_SIZE,
            "block_bytes": seen.block_bytes,
            "slot_bytes": seen.slot_bytes,
            "num_blocks": seen.num_blocks,
        },
        "memory": memory,
        "counts": {
            **asdict(seen.totals),
            "generated_tokens": seen.num_generated,
            "running": seen.num_running,
            "waiting": seen.num_waiting,
            "evicted_blocks": seen.num_evicted,
            "restored_blocks": seen.num_restored,
        },
        "cells": {
            "rows": [_cell(cell) for cell in seen.cells],
            "num_more": seen.num_more_cells,
        },
        "conversations": {one.name: _conversation(one) for one in seen.conversations[:MAX_CONVERSATIONS]},
    }


def _cell(cell: Cell) -> list[Any]:
    """Id, kind, state, holders, conversations, position, tokens, time of last use."""
    return [
        cell.id,
        cell.kind,
        cell.state,
        cell.num_holders,
        list(cell.conversations),
        cell.position,
        cell.num_tokens,
        cell.used_s,
    ]


def _conversation(one: Conversation) -> Sections:
    return {
        "num_turns": one.num_turns,
        "num_running": one.num_running,
        "is_pinned": one.is_pinned,
        "used_s": one.used_s,
        "num_blocks": one.num_blocks,
        "num_shared_blocks": one.num_shared_blocks,
        "num_bytes": one.num_bytes,
        "turns": [_turn(turn) for turn in one.turns[-MAX_TURNS:]],
    }


def _turn(turn: Turn) -> Sections:
    return {
        "request_id": turn.request_id,
        "ended_s": turn.ended_s,
        "prompt_tokens": turn.usage.prompt_tokens,
        "cached_tokens": turn.usage.cached_tokens,
        "loaded_tokens": turn.usage.loaded_tokens,
        "computed_tokens": turn.usage.computed_tokens,
        "completion_tokens": turn.usage.completion_tokens,
        "ttft_s": turn.timings.ttft_s,
        "queue_s": turn.timings.queue_s,
        "total_s": turn.timings.total_s,
        "tokens_per_s": turn.timings.decode_tokens_per_s,
        "why": None if turn.why is None else asdict(turn.why),
        "finish_reason": turn.finish_reason,
    }
