"""What an engine holds and does at one moment, for people who look on: memory, blocks, conversations, counts.

The engine's thread only copies (`Observation`); what takes longer is done by whoever asks (`make_snapshot`). A
snapshot for one tenant tells nothing of the others: not what they hold, nor how much, nor how many they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Literal

from octavo.engine.lineage import Totals, Turn
from octavo.engine.messages import MemoryReport
from octavo.kv.storage.records import pack_ids
from octavo.kv.storage.tier import TierReport
from octavo.kv.view import CacheView
from octavo.spec import BLOCK_SIZE

MAX_CELLS = 4096
"""Cells in a snapshot; those used longest ago are left out first, and counted."""

CellKind = Literal["sealed", "open"]
CellState = Literal["used", "pinned", "reusable"]


@dataclass(frozen=True, slots=True)
class Holding:
    """What a running sequence holds."""

    namespace: bytes
    conversation: str
    block_ids: tuple[int, ...]
    slot: int | None
    num_tokens: int
    num_generated: int


@dataclass(frozen=True, slots=True)
class Known:
    """A conversation as it was copied; see `Lineage`."""

    namespace: bytes
    name: str
    tenant: str
    sequence: bytes
    block_hashes: frozenset[bytes]
    turns: tuple[Turn, ...]
    num_turns: int
    num_running: int
    is_pinned: bool
    used_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """Copies of everything that a snapshot is made of.

    Attributes:
        clock_s: the monotonic clock when it was made.
        pinned: ids of the blocks that pins hold.
        num_running, num_waiting: sequences by namespace.
        num_evicted, num_restored: blocks by namespace, since the start.
    """

    clock_s: float
    at_s: float
    model: str
    context: int
    memory: MemoryReport
    dtype: str
    block_bytes: int
    slot_bytes: int
    num_blocks: int
    cache: CacheView
    pinned: frozenset[int]
    holdings: tuple[Holding, ...]
    known: tuple[Known, ...]
    totals: Mapping[bytes, Totals]
    num_running: Counter[bytes]
    num_waiting: Counter[bytes]
    num_evicted: Counter[bytes]
    num_restored: Counter[bytes]


@dataclass(frozen=True, slots=True)
class Cell:
    """A block of the map.

    Attributes:
        id: of the block or slot; for one tenant its cells are counted from 0.
        kind: sealed, or open: raw and still filling, or the raw end of a turn.
        state: held by running sequences, held by a pin alone, or reusable.
        num_holders: sequences and pins that hold it now.
        conversations: the names of those that have it.
        position: of its first token; None if that is not known any more.
        num_tokens: in it.
        used_s: when it was used last, in seconds since 1970; None while it is held.
    """

    id: int
    kind: CellKind
    state: CellState
    num_holders: int
    conversations: tuple[str, ...]
    position: int | None
    num_tokens: int
    used_s: float | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests that go on from each other.

    Attributes:
        name: which only those of one tenant differ in.
        num_blocks, num_bytes: that it has in memory, those that it shares included.
        num_shared_blocks: of them, that others have too.
    """

    name: str
    tenant: str
    turns: tuple[Turn, ...]
    num_turns: int
    num_running: int
    is_pinned: bool
    used_s: float
    num_blocks: int
    num_shared_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine at one moment.

    Attributes:
        whole: whether it is of all tenants. If not, memory in use and reusable, and all that follows, are of the
            one tenant alone, what is free is not told apart from what others hold, and the workspace is not told.
        block_bytes, slot_bytes: of a sealed and of an open block in all layers.
        dtype: of open blocks; sealed ones have `memory.kv_format`.
        num_blocks: sealed ones that the budget allows.
        num_more_cells: that are not among the cells, as they would be too many.
        num_generated: tokens since the start, those of running answers included.
    """

    at_s: float
    whole: bool
    model: str
    context: int
    memory: MemoryReport
    dtype: str
    block_bytes: int
    slot_bytes: int
    num_blocks: int
    cells: tuple[Cell, ...]
    num_more_cells: int
    conversations: tuple[Conversation, ...]
    totals: Totals
    num_generated: int
    num_running: int
    num_waiting: int
    num_evicted: int
    num_restored: int


def make_snapshot(seen: Observation, namespace: bytes | None = None, *, names: bool = True) -> Snapshot:
    """The snapshot for the tenant of a namespace, or with None of all.

    Without `names` it tells how much there is and not whose: no conversations. One of several tenants has none of the
    text of differences, which is each one's own.
    """
    whole = namespace is None

    def mine(other: bytes) -> bool:
        return namespace in (None, other)

    def count(counts: Counter[bytes]) -> int:
        return sum(number for key, number in counts.items() if mine(key))

    known = [one for one in seen.known if mine(one.namespace)] if names else []
    if len({one.namespace for one in known}) > 1:
        known = [replace(one, turns=tuple(map(_without_text, one.turns))) for one in known]
    holdings = [one for one in seen.holdings if mine(one.namespace)]
    sealed = _sealed(seen, holdings, known, mine)
    cells = [*sealed, *_open(seen, holdings, known, mine)]
    if not names:
        cells = [replace(cell, conversations=()) for cell in cells]
    owned: dict[str, list[Cell]] = {one.name: [] for one in known}
    for cell in cells:
        for name in cell.conversations:
            if name in owned:
                owned[name].append(cell)
    memory = seen.memory
    if not whole:
        cells = [replace(cell, id=number) for number, cell in enumerate(cells)]
        memory = _own_memory(seen, cells)
    num_more = max(0, len(cells) - MAX_CELLS)
    if num_more:
        oldest = sorted(range(len(cells)), key=lambda at: cells[at].used_s or seen.at_s)[:num_more]
        left_out = set(oldest)
        shown = [cell for at, cell in enumerate(cells) if at not in left_out]
    totals = sum((some for key, some in seen.totals.items() if mine(key)), Totals())
    return Snapshot(
        at_s=seen.at_s,
        whole=whole,
        model=seen.model,
        context=seen.context,
        memory=memory,
        dtype=seen.dtype,
        block_bytes=seen.block_bytes,
        slot_bytes=seen.slot_bytes,
        num_blocks=seen.num_blocks,
        cells=tuple(shown if num_more else cells),
        num_more_cells=num_more,
        conversations=tuple(_conversation(seen, one, owned[one.name]) for one in reversed(known)),
        totals=totals,
        num_generated=totals.completion_tokens + sum(one.num_generated for one in holdings),
        num_running=count(seen.num_running),
        num_waiting=count(seen.num_waiting),
        num_evicted=count(seen.num_evicted),
        num_restored=count(seen.num_restored),
    )


def _sealed(
    seen: Observation, holdings: Sequence[Holding], known: Sequence[Known], mine: Callable[[bytes], bool]
) -> list[Cell]:
    by_hash = {block.block_hash: id_ for id_, block in seen.cache.published.items()}
    owners: dict[int, dict[str, None]] = {}
    for one in known:
        for hash_ in one.block_hashes:
            if hash_ in by_hash:
                owners.setdefault(by_hash[hash_], {})[one.name] = None
    running: dict[int, int] = {}  # and the position of its first token
    for holding in holdings:
        for number, id_ in enumerate(holding.block_ids):
            running[id_] = number * BLOCK_SIZE
            owners.setdefault(id_, {})[holding.conversation] = None
    cells = []
    for id_ in sorted(running.keys() | seen.cache.published.keys()):
        block = seen.cache.published.get(id_)
        if block is not None and not mine(block.namespace):
            continue
        state: CellState = "used" if id_ in running else "pinned" if id_ in seen.pinned else "reusable"
        left = seen.cache.left_s.get(id_)
        cells.append(
            Cell(
                id=id_,
                kind="sealed",
                state=state,
                num_holders=seen.cache.block_holders[id_],
                conversations=tuple(owners.get(id_, ())),
                position=running[id_] if block is None else block.depth * BLOCK_SIZE,
                num_tokens=BLOCK_SIZE,
                used_s=None if left is None else floor(10 * (seen.at_s - seen.clock_s + left)) / 10,
            )
        )
    return cells


def _open(
    seen: Observation, holdings: Sequence[Holding], known: Sequence[Known], mine: Callable[[bytes], bool]
) -> list[Cell]:
    cells: dict[int, Cell] = {}
    for slot, tail in seen.cache.tails.items():
        if not mine(tail.namespace):
            continue
        parent = None if isinstance(tail.parent, bytes) else seen.cache.published[tail.parent]
        position = 0 if parent is None else BLOCK_SIZE * (parent.depth + 1)
        packed = pack_ids(tail.token_ids)
        behind = [
            one
            for one in known
            if one.namespace == tail.namespace and (parent is None or parent.block_hash in one.block_hashes)
        ]
        whose = [one for one in behind if one.sequence[4 * position :].startswith(packed)]
        if not whose and parent is not None:  # of a turn that was asked again, or edited
            whose = behind
        cells[slot] = Cell(
            id=slot,
            kind="open",
            state="reusable",
            num_holders=seen.cache.slot_holders[slot] - 1,  # the tail itself is one of them
            conversations=tuple(one.name for one in whose),
            position=position,
            num_tokens=len(tail.token_ids),
            used_s=max((one.used_s for one in whose), default=None),
        )
    for holding in holdings:
        if holding.slot is None:
            continue
        position = max(0, holding.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        before = cells.get(holding.slot)
        names = [] if before is None else [*before.conversations]
        cells[holding.slot] = Cell(
            holding.slot,
            "open",
            "used",
            max(1, 0 if before is None else before.num_holders),
            tuple(dict.fromkeys([*names, holding.conversation])),
            position,
            holding.num_tokens - position,
            None,
        )
    return [cells[slot] for slot in sorted(cells)]


def _conversation(seen: Observation, one: Known, own: Sequence[Cell]) -> Conversation:
    return Conversation(
        name=one.name,
        tenant=one.tenant,
        turns=one.turns,
        num_turns=one.num_turns,
        num_running=one.num_running,
        is_pinned=one.is_pinned,
        used_s=one.used_s,
        num_blocks=len(own),
        num_shared_blocks=sum(len(cell.conversations) > 1 for cell in own),
        num_bytes=_num_bytes(seen, own),
    )


def _without_text(turn: Turn) -> Turn:
    return turn if turn.why is None else replace(turn, why=replace(turn.why, difference=None))


def _num_bytes(seen: Observation, cells: Iterable[Cell]) -> int:
    return sum(seen.block_bytes if cell.kind == "sealed" else seen.slot_bytes for cell in cells)


def _own_memory(seen: Observation, cells: Sequence[Cell]) -> MemoryReport:
    """The report as far as it is one tenant's: what it holds itself, and what is the same for all."""
    used = _num_bytes(seen, (cell for cell in cells if cell.state == "used"))
    total = _num_bytes(seen, cells)
    disk = seen.memory.disk
    return replace(
        seen.memory,
        kv_used_bytes=used,
        kv_reusable_bytes=total - used,
        kv_allocated_bytes=total,
        workspace_bytes=0,  # it grows with the longest step, whoever's it was
        disk=TierReport(state=disk.state, budget_bytes=disk.budget_bytes),
    )
