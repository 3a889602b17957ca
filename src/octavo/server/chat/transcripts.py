"""What was generated, kept as token ids, so that an answer that comes back as text is recognised."""

from __future__ import annotations

import struct
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from octavo.kv.storage.records import Document, pack_ids, unpack_ids
from octavo.kv.storage.tier import Tier

_KIND = "transcript"
_ENTRY_BYTES = 400
"""What an entry takes besides its ids and text, about."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A prompt with its answer, as the model saw and said them.

    Attributes:
        ids: of both.
        num_answer_tokens: how many of the last ones are the answer.
        text: of the answer, as it was shown.
    """

    ids: Sequence[int]
    num_answer_tokens: int
    text: str

    @property
    def answer_ids(self) -> Sequence[int]:
        return self.ids[len(self.ids) - self.num_answer_tokens :]


class TranscriptStore(Protocol):
    """Transcripts by tenant and by the name of the messages that they hold (`MessageKeys`)."""

    def get(self, namespace: str, key: bytes) -> Transcript | None: ...
    def put(self, namespace: str, key: bytes, transcript: Transcript, *, disk: bool = True) -> None:
        """Keeps one; off the disk unless `disk` is set."""
        ...

    def remove(self, namespace: str, key: bytes) -> None: ...
    def forget(self, namespace: str) -> int:
        """Drops all of a tenant's; how many there were."""
        ...


class MemoryTranscripts:
    """Transcripts in memory, at most `max_bytes` of them; the longest unused go first. Safe between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[str, bytes], Transcript] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, namespace: str, key: bytes) -> Transcript | None:
        with self._lock:
            found = self._entries.get((namespace, key))
            if found is not None:
                self._entries.move_to_end((namespace, key))
            return found

    def put(self, namespace: str, key: bytes, transcript: Transcript, *, disk: bool = True) -> None:  # noqa: ARG002
        kept = Transcript(array("i", transcript.ids), transcript.num_answer_tokens, transcript.text)
        with self._lock:
            self._drop((namespace, key))
            self._entries[namespace, key] = kept
            self._bytes += _size(kept)
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def remove(self, namespace: str, key: bytes) -> None:
        with self._lock:
            self._drop((namespace, key))

    def forget(self, namespace: str) -> int:
        with self._lock:
            gone = [key for key in self._entries if key[0] == namespace]
            for key in gone:
                self._drop(key)
            return len(gone)

    def clear(self) -> None:
        """Drops all."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _drop(self, key: tuple[str, bytes]) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self._bytes -= _size(found)


class DurableTranscripts:
    """Transcripts of one model, in memory and below it on disk, where they outlive the process.

    Args:
        disk: keeps nothing if there is no disk tier.
        fingerprint: of the model whose ids they are.
    """

    def __init__(self, memory: TranscriptStore, disk: Tier, fingerprint: bytes) -> None:
        self._memory, self._disk, self._fingerprint = memory, disk, fingerprint

    def get(self, namespace: str, key: bytes) -> Transcript | None:
        key = self._own(key)
        found = self._memory.get(namespace, key)
        if found is None:
            document = self._disk.get_document(_KIND, namespace, key)
            found = None if document is None else _unpacked(document.data)
            if found is not None:
                self._memory.put(namespace, key, found)
        return found

    def put(self, namespace: str, key: bytes, transcript: Transcript, *, disk: bool = True) -> None:
        key = self._own(key)
        self._memory.put(namespace, key, transcript)
        if disk:
            self._disk.put_document(Document(_KIND, key, _packed(transcript), namespace))

    def remove(self, namespace: str, key: bytes) -> None:
        self._memory.remove(namespace, self._own(key))
        self._disk.remove_document(_KIND, namespace, self._own(key))

    def forget(self, namespace: str) -> int:
        self._disk.remove_documents(_KIND, namespace)
        return self._memory.forget(namespace)

    def _own(self, key: bytes) -> bytes:
        return blake2b(key, digest_size=16, key=self._fingerprint[:64]).digest()


def _packed(transcript: Transcript) -> bytes:
    head = struct.pack("<II", transcript.num_answer_tokens, len(transcript.ids))
    return head + pack_ids(transcript.ids) + transcript.text.encode()


def _unpacked(data: bytes) -> Transcript | None:
    """What `_packed` packed; None if another version did."""
    try:
        num_answer_tokens, num_ids = struct.unpack_from("<II", data)
        ids, text = data[8 : 8 + 4 * num_ids], data[8 + 4 * num_ids :].decode()
    except (struct.error, UnicodeDecodeError):
        return None
    return Transcript(array("i", unpack_ids(ids)), num_answer_tokens, text)


def _size(transcript: Transcript) -> int:
    return _ENTRY_BYTES + 4 * len(transcript.ids) + 4 * len(transcript.text)
