"""What the engine needs of a tier below memory, and the one that is none; `StoreTier` is one with a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.kv.hashing import Name
from octavo.kv.storage.records import Document, Payload, Record, Space


@dataclass(frozen=True, slots=True)
class TierReport:
    """What a tier below memory did since the start.

    Attributes:
        state: "on"; "off", because the user wants none; "failed", with the `reason`.
        place: where it keeps its records.
        used_bytes, budget_bytes: what its records take, and what it never passes.
        num_written, num_loaded: blocks and tails that went down, and that came back and were used.
        num_dropped: those that found the queue full, and would have to be computed again.
        num_doubtful: records that were not what they should be; each was a miss and was removed.
    """

    state: str = "off"
    reason: str = ""
    place: str = ""
    used_bytes: int = 0
    budget_bytes: int = 0
    num_written: int = 0
    num_loaded: int = 0
    num_dropped: int = 0
    num_doubtful: int = 0


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another namespace of the same tenant that has a prompt's first block.

    `model` is its model's name, and `fields` those in which it differs: its value, and that of the one asked for.
    """

    model: str
    fields: Mapping[str, tuple[str | int, str | int]]


@dataclass(eq=False, slots=True)
class Load:
    """What a prompt wants from the tier: as many blocks as there are after `parent`, then a tail.

    Attributes:
        deliver: called on the reader's thread with each batch of (record's name, payload), and whether it is the
            last one; the batches of a load come in order.
        cancelled: set by whoever does not want more.
        elsewhere, num_expired_tokens: why less came than was wanted; known when the last batch comes.
    """

    namespace: bytes
    parent: bytes
    token_ids: Sequence[int]
    deliver: Callable[[Load, list[tuple[Name, Payload]], bool], None]
    cancelled: bool = False
    elsewhere: Elsewhere | None = None
    num_expired_tokens: int = 0
    started_s: float = field(default_factory=time.perf_counter)


class Tier(Protocol):
    """What the engine needs of a tier; all calls return at once, or nearly."""

    workspace_bytes: int
    """Memory that it may hold: its queue, what is on its way up, and the store's own caches."""

    def introduce(self, space: Space) -> None: ...
    def put(self, record: Record) -> bool: ...
    def touch(self, hashes: Sequence[bytes]) -> None: ...
    def load(self, load: Load) -> bool: ...
    def has_room(self) -> bool: ...
    def give_turn(self) -> None:
        """Lets it write something now, for which it is waited for a moment. From here on it waits for turns."""

    def rest(self) -> None:
        """Until the next turn the engine computes nothing."""

    def was_cleared(self) -> bool: ...
    def report(self) -> TierReport: ...
    def take_complaint(self) -> str | None: ...
    def clear(self, **fields: str) -> None: ...
    def remove(self, namespace: bytes, hashes: Collection[bytes]) -> None: ...
    def put_document(self, document: Document) -> bool: ...
    def get_document(self, kind: str, tenant: str, key: bytes) -> Document | None: ...
    def documents(self, kind: str) -> list[Document]: ...
    def remove_document(self, kind: str, tenant: str, key: bytes) -> None: ...
    def remove_documents(self, kind: str, tenant: str) -> None: ...
    def flush(self, timeout_s: float) -> bool: ...
    def close(self, timeout_s: float) -> None: ...


class NullTier:
    """No tier below memory."""

    workspace_bytes = 0

    def __init__(self, reason: str = "", place: str = "") -> None:
        """Args: `reason` says why the tier that was wanted cannot be had."""
        self._reason, self._place = reason, place
        self._complaint: str | None = complain_of(reason) if reason else None

    def introduce(self, space: Space) -> None:
        pass

    def put(self, record: Record) -> bool:  # noqa: ARG002
        return False

    def touch(self, hashes: Sequence[bytes]) -> None:
        pass

    def load(self, load: Load) -> bool:  # noqa: ARG002
        return False

    def has_room(self) -> bool:
        return False

    def give_turn(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def was_cleared(self) -> bool:
        return False

    def report(self) -> TierReport:
        return TierReport("failed" if self._reason else "off", self._reason, self._place)

    def take_complaint(self) -> str | None:
        complaint, self._complaint = self._complaint, None
        return complaint

    def clear(self, **fields: str) -> None:
        pass

    def remove(self, namespace: bytes, hashes: Collection[bytes]) -> None:
        pass

    def put_document(self, document: Document) -> bool:  # noqa: ARG002
        return False

    def get_document(self, kind: str, tenant: str, key: bytes) -> Document | None:  # noqa: ARG002
        return None

    def documents(self, kind: str) -> list[Document]:  # noqa: ARG002
        return []

    def remove_document(self, kind: str, tenant: str, key: bytes) -> None:
        pass

    def remove_documents(self, kind: str, tenant: str) -> None:
        pass

    def flush(self, timeout_s: float) -> bool:  # noqa: ARG002
        return True

    def close(self, timeout_s: float) -> None:
        pass


def told(error: BaseException) -> str:
    """A short reason for a person."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).rstrip(".") or type(error).__name__


def complain_of(reason: str) -> str:
    """What the user is told when a tier cannot be used."""
    return (
        f"The disk tier cannot be used ({reason}): answers go on without it, and what leaves memory is "
        "computed again."
    )
