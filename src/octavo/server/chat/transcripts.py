"""What was generated, kept as token ids, so that an answer that comes back as text is recognised."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    def put(self, namespace: str, key: bytes, transcript: Transcript) -> None: ...
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

    def put(self, namespace: str, key: bytes, transcript: Transcript) -> None:
        kept = Transcript(array("i", transcript.ids), transcript.num_answer_tokens, transcript.text)
        with self._lock:
            self._drop((namespace, key))
            self._entries[namespace, key] = kept
            self._bytes += _size(kept)
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def forget(self, namespace: str) -> int:
        with self._lock:
            gone = [key for key in self._entries if key[0] == namespace]
            for key in gone:
                self._drop(key)
            return len(gone)

    def _drop(self, key: tuple[str, bytes]) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self._bytes -= _size(found)


def _size(transcript: Transcript) -> int:
    return _ENTRY_BYTES + 4 * len(transcript.ids) + 4 * len(transcript.text)
