"""What waits to be written: bounded, in order, and readable meanwhile."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.kv.hashing import Name
from octavo.kv.storage.records import Payload, Record

BATCH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Put:
    """A record to be written, unless the store was cleared since `mark` was read."""

    record: Record
    mark: object


Job = Put | Callable[[], object] | None
"""Something to write, something to do between two writes, or the end."""


class WriteQueue:
    """Jobs of one writer. Records in it take `num_bytes` at most, or are one."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[bytes, Put] = {}
        self._used_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether a record as large as those before would most likely be taken."""
        return self._used_bytes <= self.num_bytes * 3 // 4

    @property
    def is_half_full(self) -> bool:
        return self._used_bytes > self.num_bytes // 2

    def put(self, record: Record, mark: object) -> bool:
        """Queue a record, whose payload must not change any more. False if there is no room for it."""
        size, job = len(record.payload), Put(record, mark)
        with self._lock:
            if self._used_bytes and self._used_bytes + size > self.num_bytes:
                return False
            self._used_bytes += size
            self._waiting[record.name.hash] = job
        self._jobs.put(job)
        return True

    def call(self, job: Callable[[], object] | None) -> None:
        """Queue something that the writer is to do behind what waits; None ends it."""
        self._jobs.put(job)

    def next(self, max_bytes: int) -> list[Job]:
        """Waits for the next jobs: records up to so many bytes, or one, and what comes behind them if it is something
        else."""
        jobs = [self._jobs.get()]
        size = 0
        while isinstance(jobs[-1], Put):
            size += len(jobs[-1].record.payload)
            if size >= max_bytes:
                break
            try:
                jobs.append(self._jobs.get_nowait())
            except queue.Empty:
                break
        return jobs

    def done(self, jobs: Sequence[Job]) -> None:
        """These records do not wait any more."""
        with self._lock:
            for job in jobs:
                if isinstance(job, Put):
                    self._used_bytes -= len(job.record.payload)
                    if self._waiting.get(job.record.name.hash) is job:
                        del self._waiting[job.record.name.hash]

    def get(self, name: Name, mark: object) -> Payload | None:
        """The payload of exactly this record, if it waits and was queued since the user has cleared the store."""
        job = self._waiting.get(name.hash)
        if job is None or job.record.name != name or not _is_served(job, mark):
            return None
        return job.record.payload

    def tails(self, namespace: bytes, parent: bytes, mark: object) -> list[tuple[int, ...]]:
        """The token ids of the tails that wait and continue `parent`."""
        with self._lock:
            waiting = list(self._waiting.values())
        return [
            name.token_ids
            for job in waiting
            if (name := job.record.name).kind == "tail"
            and (name.namespace, name.parent) == (namespace, parent)
            and _is_served(job, mark)
        ]


def _is_served(job: Put, mark: object) -> bool:
    expires_s = job.record.expires_s
    return job.mark == mark and (expires_s is None or expires_s > time.time())
