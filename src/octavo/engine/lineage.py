"""Which requests go on from each other: what people see as a conversation, told from the tokens alone.

A request belongs to the conversation whose last prompt it begins with, so that a next turn, and an answer that is
asked for again, belong to it, whoever asks and by whatever interface. A prompt that differs earlier begins another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from octavo.engine.messages import FinishReason, Reply, Timings, Usage, Why
from octavo.kv.hashing import FORGOTTEN
from octavo.kv.storage.records import pack_ids

MAX_LINEAGES = 200
MAX_BYTES = 16 << 20
"""Of token ids and hashes, over all lineages."""

_HASH_BYTES = 128
"""What a hash takes, with its place in a table."""

_MAX_SEQUENCES = 8
"""Of a lineage, whose hashes are kept if they have nothing in common: the same prompt may be asked for ever."""

_MAX_NAMESPACES = 4096
"""Whose names are counted: more than there can be lineages, and each ephemeral conversation is one."""

MAX_TURNS = 50


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that was answered. `ended_s` is in seconds since 1970."""

    request_id: str
    ended_s: float
    usage: Usage
    timings: Timings
    why: Why | None
    finish_reason: FinishReason


@dataclass(eq=False, slots=True)
class Lineage:
    """A conversation, as the engine sees it.

    Attributes:
        name: unique in the namespace.
        prompt: token ids of the last request, packed.
        sequence: token ids of the last sequence as far as they are computed, packed.
        block_hashes: of the sealed blocks that its last sequences had, those of the last one at the end.
        turns: the last ones.
        used_s: seconds since 1970.
    """

    name: str
    namespace: bytes
    tenant: str
    prompt: bytes
    sequence: bytes = b""
    block_hashes: dict[bytes, None] = field(default_factory=dict)
    turns: deque[Turn] = field(default_factory=lambda: deque(maxlen=MAX_TURNS))
    num_turns: int = 0
    num_running: int = 0
    is_pinned: bool = False
    is_dropped: bool = False
    used_s: float = field(default_factory=time.time)

    @property
    def num_bytes(self) -> int:
        return len(self.prompt) + len(self.sequence) + _HASH_BYTES * len(self.block_hashes)


@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens of all answered requests of a namespace."""

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


class Lineages:
    """The last conversations of an engine, each namespace's by itself."""

    def __init__(self) -> None:
        self._lineages: dict[Lineage, None] = {}  # the one used last at the end
        self._numbers: dict[bytes, int] = {}  # of the last name; the namespace used last at the end
        self.totals: dict[bytes, Totals] = {}

    def __iter__(self) -> Iterator[Lineage]:
        return iter(self._lineages)

    def find(self, namespace: bytes, name: str) -> Lineage | None:
        """The lineage of a name."""
        return next((one for one in self._of(namespace) if one.name == name), None)

    def begin(self, namespace: bytes, tenant: str, token_ids: Sequence[int]) -> Lineage:
        """A request has come; its lineage, which is a new one if it goes on from none."""
        prompt = pack_ids(token_ids)
        begun = [one for one in self._of(namespace) if prompt.startswith(one.prompt)]
        lineage = max(begun, key=lambda one: len(one.prompt), default=None)
        if lineage is None:
            # A name is not given twice: pages and clients may still know what was forgotten by it.
            self._numbers[namespace] = number = self._numbers.pop(namespace, 0) + 1
            if len(self._numbers) > _MAX_NAMESPACES:
                del self._numbers[next(iter(self._numbers))]
            lineage = Lineage(f"c{number}", namespace, tenant, prompt)
        lineage.prompt = prompt
        lineage.num_running += 1
        self._use(lineage)
        return lineage

    def reached(self, lineage: Lineage, token_ids: Sequence[int], block_hashes: Iterable[bytes]) -> None:
        """A sequence of it ends, with these tokens computed and these blocks sealed."""
        lineage.sequence = pack_ids(token_ids)
        last = dict.fromkeys(block_hashes)
        hashes = [*(hash_ for hash_ in lineage.block_hashes if hash_ not in last), *last]
        lineage.block_hashes = dict.fromkeys(hashes[-_MAX_SEQUENCES * (len(last) + 1) :])

    def end(self, lineage: Lineage, reply: Reply | None) -> None:
        """A request of it has ended. It leaves no turn if it failed, or was given up before its prompt was read."""
        lineage.num_running -= 1
        if reply is not None and reply.usage.cached_tokens + reply.usage.computed_tokens:
            usage = reply.usage
            lineage.num_turns += 1
            lineage.turns.append(
                Turn(reply.request_id, time.time(), usage, reply.timings, reply.why, reply.finish_reason)
            )
            key = FORGOTTEN if lineage.is_dropped else lineage.namespace
            self.totals[key] = self.totals.get(key, Totals()) + Totals(
                1,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.loaded_tokens,
                usage.computed_tokens,
                usage.completion_tokens,
            )
        if lineage in self._lineages:
            self._use(lineage)
            if not lineage.num_turns and not lineage.num_running:
                del self._lineages[lineage]

    def drop(self, lineage: Lineage) -> None:
        """Forget a conversation; its requests that still run leave no turn anywhere, and nothing to reuse."""
        lineage.is_dropped = True
        self._lineages.pop(lineage, None)

    def forget(self, namespace: bytes) -> None:
        """Forget a namespace: its conversations, also those that are being answered, and what was counted of it."""
        for lineage in list(self._of(namespace)):
            self.drop(lineage)
        totals = self.totals.pop(namespace, Totals())
        self.totals[FORGOTTEN] = self.totals.get(FORGOTTEN, Totals()) + totals

    def clear(self) -> None:
        """Forget all conversations, but those that are being answered."""
        for lineage in list(self._lineages):
            lineage.block_hashes, lineage.is_pinned = {}, False
            if not lineage.num_running:
                del self._lineages[lineage]

    def _of(self, namespace: bytes) -> Iterable[Lineage]:
        return (one for one in self._lineages if one.namespace == namespace)

    def _use(self, lineage: Lineage) -> None:
        lineage.used_s = time.time()
        self._lineages.pop(lineage, None)
        self._lineages[lineage] = None
        num_bytes = sum(one.num_bytes for one in self._lineages)
        for oldest in list(self._lineages):
            if len(self._lineages) <= MAX_LINEAGES and num_bytes <= MAX_BYTES:
                break
            if not oldest.num_running and not oldest.is_pinned:
                num_bytes -= oldest.num_bytes
                del self._lineages[oldest]
