"""Records: the bytes of a block or of a raw tail with all that says what they are, and the check of both."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from octavo.kv.hashing import Name

FORMAT = 1
"""Raised when records change in form or meaning; a store of another format is not read."""

Payload = bytes | memoryview
"""Bytes, or a contiguous buffer of them."""


@dataclass(frozen=True, slots=True)
class Record:
    """A block's pages of all layers, or the raw rows of an open block.

    `position` is that of its first token. From `expires_s` on (seconds since 1970) it is not served.
    """

    name: Name
    payload: Payload
    position: int = 0
    expires_s: float | None = None


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes, four each."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """What `pack_ids` packed. Raises struct.error if the length is wrong."""
    return struct.unpack(f"<{len(data) // 4}I", data)


def checksum(name: Name, payload: Payload, expires_s: float | None) -> int:
    """A check (63 bits) over everything in a record, its format included: a CRC, and a sum of words."""
    ids = pack_ids(name.token_ids)
    head = struct.pack("<I8sIQd", FORMAT, name.kind.encode(), len(ids), len(payload), expires_s or 0.0)
    crc = zlib.crc32(payload, zlib.crc32(head + name.namespace + name.parent + name.hash + ids))
    words = np.frombuffer(payload, dtype="<u4", count=len(payload) // 4).sum(dtype=np.uint64)
    return (crc << 31) | (int(words) & 0x7FFF_FFFF)


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace that a store knows: whose blocks these are, in words."""

    namespace: bytes
    fields: Mapping[str, str | int]
    """What the namespace is the key of: tenant, model, format, numerics."""
    model: str
    """The model's name, for people."""


@dataclass(frozen=True, slots=True)
class Document:
    """Something to keep besides records: a conversation, or a transcript.

    `tenant` is whose it is; `data` is bytes that the store does not look into.
    """

    kind: str
    key: bytes
    data: bytes
    tenant: str = ""
    used_s: float = 0.0


def outlasts(expires_s: float | None, other: float | None) -> bool:
    """Whether what expires at the one time is served for longer than what expires at the other."""
    return other is not None and (expires_s is None or expires_s > other)


Age = Literal["served", "expired", "absent"]


class Store(Protocol):
    """Keyed bytes. Everything it gives out was checked; what does not agree is a miss and is removed.

    What changes it is called from one thread, `get` to `tails` from one other, and documents are read from any.
    Any method may raise OSError or sqlite3.Error: the store cannot be used then.
    """

    @property
    def num_doubtful(self) -> int:
        """What did not agree so far."""

    @property
    def used_bytes(self) -> int:
        """What is in the store; asked on the thread that writes."""

    def introduce(self, space: Space) -> None:
        """Say what a namespace is, once before its first record."""

    def put(self, records: Sequence[Record], mark: object = None) -> int:
        """Keep records; returns how many were not here before. A longer tail takes the place of its beginning.

        One that is here already is replaced if it expires earlier.
        None is kept if the user has cleared the store since `mark` was what `cleared_mark` gives.
        """

    def get(self, name: Name) -> bytes | None:
        """The payload of exactly this record."""

    def age_of(self, hash_: bytes) -> Age:
        """Whether a record of this hash is served, has expired, or is not here."""

    def spaces(self) -> list[Space]:
        """What the namespaces are."""

    def tails(self, namespace: bytes, parent: bytes) -> list[tuple[int, ...]]:
        """The token ids of the tails that continue `parent`."""

    def touch(self, hashes: Sequence[bytes]) -> None:
        """These records were used just now, each before the one behind it."""

    def settle(self) -> None:
        """There is time for what has to be done some day."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether the budget allows so much more; asked on the thread that writes."""

    def trim(self, num_bytes: int = 0) -> int:
        """Remove what is too old, expired, or over the budget with so much more; returns how many records."""

    def clear(self, **fields: str) -> int:
        """Remove all records whose namespace has these fields; returns how many."""

    def remove(self, namespace: bytes, hashes: Collection[bytes]) -> int:
        """Remove the records of a namespace with these hashes and the tails behind them; returns how many."""

    def put_document(self, document: Document) -> None:
        """Keep a document, in place of one of the same kind, tenant and key."""

    def get_document(self, kind: str, tenant: str, key: bytes) -> Document | None: ...

    def documents(self, kind: str) -> Iterator[Document]:
        """All documents of a kind, the one used last first."""

    def remove_document(self, kind: str, tenant: str, key: bytes) -> bool:
        """Whether there was one."""

    def remove_documents(self, kind: str, tenant: str | None = None) -> int:
        """Remove all documents of a kind, or those of one tenant; returns how many."""

    def close(self) -> None: ...
