"""A tier below memory: a store behind two threads, so that the engine's thread never waits for it.

The writer's queue is bounded: what does not fit is dropped and counted. The writer takes records one by one, in
turns between the engine's steps, and many in one transaction when the queue fills. Until then they are served from
the queue. The reader fetches what a waiting prompt can use, checks it, and hands it over in batches while it reads
on. An error, whatever it is, turns the tier off, for good and with a reason; the engine then goes on as if there were
none. A thread that died of it would let everybody wait.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from octavo.kv.hashing import ROOT_HASH, BlockHash, Name, block_hash
from octavo.kv.prefix import common_prefix
from octavo.kv.storage.records import Document, Payload, Record, Space, Store
from octavo.kv.storage.tier import Elsewhere, Load, TierReport, complain_of, told
from octavo.kv.storage.turns import Turns
from octavo.kv.storage.write_queue import BATCH_BYTES, Put, WriteQueue
from octavo.spec import BLOCK_SIZE

_log = logging.getLogger(__name__)

QUEUE_BYTES = 16 << 20
"""What waits to be written is at most this, or one record."""

_TRIM_EVERY_BYTES = 64 << 20
_TURN_S, _PATIENCE_S = 0.002, 0.1
"""What the engine waits for a record to be written at most, and the writer for its turn."""

_MAX_SPACES = 64
"""Namespaces that are looked through for a prompt that is new."""

_FAILURES = (OSError, sqlite3.Error, MemoryError)


class StoreTier:
    """A `Store` as a tier.

    Args:
        store: is taken over, and closed by `close`.
        place: where it is, for people.
        notice: what the user is to be told first.
        on_room: called on the writer's thread when the queue has run empty.
        cleared_mark: what changes when the user clears the store, in whatever process.
    """

    def __init__(
        self,
        store: Store,
        *,
        place: str = "",
        budget_bytes: int = 0,
        on_room: Callable[[], None] = lambda: None,
        cleared_mark: Callable[[], object] = lambda: None,
        hash_function: BlockHash = block_hash,
        queue_bytes: int = QUEUE_BYTES,
        notice: str | None = None,
    ) -> None:
        self.workspace_bytes = queue_bytes + 5 * BATCH_BYTES
        self._store = store
        self._place, self._budget_bytes = place, budget_bytes
        self._on_room = on_room
        self._cleared_mark = cleared_mark
        self._mark = cleared_mark()
        self._hash = hash_function
        self._introduced: dict[bytes, Space] = {}
        self._reason = ""
        self._complaint = notice
        self._used_bytes = store.used_bytes
        self._num_written = self._num_dropped = self._num_loaded = 0
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._turns = Turns()
        self._settles = False
        self._jobs = WriteQueue(queue_bytes)
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._write, "octavo-tier-writer"), (self._read, "octavo-tier-reader"))
        ]
        for thread in self._threads:
            thread.start()

    # Called by the engine

    def introduce(self, space: Space) -> None:
        self._introduced[space.namespace] = space
        self._jobs.call(lambda: self._store.introduce(space))

    def put(self, record: Record) -> bool:
        """Queue a record; its payload must not change any more. False if there is no room: it is dropped."""
        if self._reason:
            return False
        if self._jobs.put(record, self._mark):
            return True
        self._num_dropped += 1
        return False

    def has_room(self) -> bool:
        """Whether a record as large as those before would most likely be taken."""
        return not self._reason and self._jobs.has_room

    def touch(self, hashes: Sequence[bytes]) -> None:
        """These were used just now, the deepest first."""
        if hashes:
            self._jobs.call(lambda: self._store.touch(hashes))

    def load(self, load: Load) -> bool:
        """Begin to load. False if there is no tier: nothing will be delivered."""
        if self._reason:
            return False
        self._loads.put(load)
        return True

    def give_turn(self) -> None:
        if not self._is_urgent:
            self._turns.give(_TURN_S)

    def rest(self) -> None:
        self._turns.rest()
        if not self._settles:
            self._settles = True
            self._jobs.call(self._settle)

    def was_cleared(self) -> bool:
        """Whether the user has cleared the store since this was asked last."""
        mark = self._cleared_mark()
        changed, self._mark = mark != self._mark, mark
        return changed

    def report(self) -> TierReport:
        return TierReport(
            state="failed" if self._reason else "on",
            reason=self._reason,
            place=self._place,
            used_bytes=self._used_bytes,
            budget_bytes=self._budget_bytes,
            num_written=self._num_written,
            num_loaded=self._num_loaded,
            num_dropped=self._num_dropped,
            num_doubtful=self._store.num_doubtful,
        )

    def take_complaint(self) -> str | None:
        """What the user is to be told, once: that things are kept, or why they are not."""
        complaint, self._complaint = self._complaint, None
        return complaint

    def clear(self, **fields: str) -> None:
        """Remove the records whose namespace has these fields, and what waits to be written. Waits for it."""
        done = threading.Event()

        def clear() -> None:
            try:
                self._store.clear(**fields)
            finally:
                done.set()

        self._jobs.call(clear)  # behind what waits, which it then removes
        with self._waiting():
            done.wait(timeout=60.0)

    def remove(self, namespace: bytes, hashes: Collection[bytes]) -> None:
        """Remove these records of a namespace, and the tails behind them, also those that wait to be written."""
        self._jobs.call(lambda: self._store.remove(namespace, hashes))

    def put_document(self, document: Document) -> bool:
        """Queue a document. False if there is no tier any more."""
        self._jobs.call(lambda: self._put_document(document))
        return not self._reason

    def get_document(self, kind: str, tenant: str, key: bytes) -> Document | None:
        """A document that was written; safe in any thread."""
        return next(iter(self._read_documents(lambda: [self._store.get_document(kind, tenant, key)])), None)

    def documents(self, kind: str) -> list[Document]:
        """All documents of a kind that were written, the one used last first; safe in any thread."""
        return self._read_documents(lambda: list(self._store.documents(kind)))

    def remove_document(self, kind: str, tenant: str, key: bytes) -> None:
        """Remove a document, also if it waits to be written."""
        self._jobs.call(lambda: self._store.remove_document(kind, tenant, key))

    def remove_documents(self, kind: str, tenant: str) -> None:
        """Remove a tenant's documents of a kind, and those that wait to be written."""
        self._jobs.call(lambda: self._store.remove_documents(kind, tenant))

    def _read_documents(self, read: Callable[[], Sequence[Document | None]]) -> list[Document]:
        if self._reason:
            return []
        try:
            return [document for document in read() if document is not None]
        except _FAILURES as error:
            self._fail(error)
            return []

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued is written; False if that took too long or the tier failed."""
        done = threading.Event()
        self._jobs.call(done.set)
        with self._waiting():
            return done.wait(timeout=timeout_s) and not self._reason

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most `timeout_s`, and let the store go."""
        end = time.monotonic() + timeout_s
        self._loads.put(None)
        self._jobs.call(None)
        with self._waiting():
            for thread in self._threads:
                thread.join(timeout=max(0.0, end - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            with suppress(*_FAILURES):
                self._store.close()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Inside, the writer waits for no turns."""
        with self._lock:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1

    # The writer's thread

    def _write(self) -> None:
        since_trim = _TRIM_EVERY_BYTES  # what is too old goes at the start
        pause = 0  # bytes to write before room is sought again, where there was none to be had
        while True:
            jobs = self._jobs.next(BATCH_BYTES if self._is_urgent else 1)
            if not self._is_urgent:
                self._turns.take(_PATIENCE_S)
            records: dict[object, list[Record]] = {}
            for job in jobs:
                if isinstance(job, Put):
                    records.setdefault(job.mark, []).append(job.record)
            size = sum(len(record.payload) for some in records.values() for record in some)
            try:
                is_short = since_trim >= pause and not self._store.has_room(size)
                if not self._reason and (since_trim >= _TRIM_EVERY_BYTES or is_short):
                    self._store.trim(size)
                    since_trim = 0
                    pause = 0 if self._store.has_room(size) else BATCH_BYTES
                for mark, some in records.items():
                    if not self._reason:
                        self._num_written += self._store.put(some, mark)
                since_trim += size
                self._used_bytes = self._store.used_bytes
            except Exception as error:
                self._fail(error)
            self._jobs.done(jobs)
            job = jobs[-1]
            if job is None:
                return
            if not isinstance(job, Put):
                try:
                    job()
                except Exception as error:
                    self._fail(error)
            if size and self.has_room():
                self._on_room()
            self._turns.end()

    def _put_document(self, document: Document) -> None:
        # Documents have an eighth of the room at most: one that is larger does not push out keys and values.
        if 8 * len(document.data) <= self._budget_bytes and not self._store.has_room(len(document.data)):
            self._store.trim(len(document.data))
        self._store.put_document(document)

    def _settle(self) -> None:
        self._settles = False
        if self._turns.are_free and not self._reason:
            self._store.settle()

    @property
    def _is_urgent(self) -> bool:
        """Whether somebody waits for what is queued, or soon would."""
        return bool(self._num_waiting) or self._jobs.is_half_full

    # The reader's thread

    def _read(self) -> None:
        while (load := self._loads.get()) is not None:
            batch: list[tuple[Name, Payload]] = []
            try:
                if not self._reason:
                    self._serve(load, batch)
            except Exception as error:
                self._fail(error)
            self._hand_over(load, batch, last=True)

    def _serve(self, load: Load, batch: list[tuple[Name, Payload]]) -> None:
        """Hand over all full batches; the rest stays in `batch`."""
        parent, start, size = load.parent, 0, 0
        reusable = len(load.token_ids) - 1
        used: list[bytes] = []
        while not load.cancelled and start + BLOCK_SIZE <= reusable:
            ids = load.token_ids[start : start + BLOCK_SIZE]
            name = Name.of("block", load.namespace, parent, ids, self._hash)
            payload = self._get(name)
            if payload is None:
                break
            batch.append((name, payload))
            used.append(name.hash)
            parent, start, size = name.hash, start + BLOCK_SIZE, size + len(payload)
            if size >= BATCH_BYTES:
                self._hand_over(load, batch, last=False)
                batch.clear()
                size = 0
        if not load.cancelled and start + BLOCK_SIZE <= reusable:
            self._explain(load, parent, start)
        wanted = tuple(load.token_ids[start : min(start + BLOCK_SIZE - 1, reusable)])
        if wanted and not load.cancelled:
            tails = self._jobs.tails(load.namespace, parent, self._mark) + self._store.tails(
                load.namespace, parent
            )
            length, ids = max(((common_prefix(ids, wanted), ids) for ids in tails), default=(0, ()))
            if length:
                name = Name.of("tail", load.namespace, parent, ids, self._hash)
                payload = self._get(name)
                if payload is not None:
                    batch.append((name, payload))
                    used.append(name.hash)
        self._num_loaded += len(used)
        self.touch(used[::-1])

    def _get(self, name: Name) -> Payload | None:
        """The payload of a record that waits to be written, or was."""
        waiting = self._jobs.get(name, self._mark)
        return self._store.get(name) if waiting is None else waiting

    def _explain(self, load: Load, parent: bytes, start: int) -> None:
        """Say why the blocks from `start` on were not here."""
        for begin in range(start, len(load.token_ids) - BLOCK_SIZE, BLOCK_SIZE):
            parent = self._hash(load.namespace, parent, load.token_ids[begin : begin + BLOCK_SIZE])
            if self._store.age_of(parent) != "expired":
                break
            load.num_expired_tokens += BLOCK_SIZE
        own = self._introduced.get(load.namespace)
        if start or load.parent != ROOT_HASH or load.num_expired_tokens or own is None:
            return
        for space in self._store.spaces()[-_MAX_SPACES:]:
            fields = {
                name: (theirs, own.fields.get(name, ""))
                for name, theirs in space.fields.items()
                if theirs != own.fields.get(name, "")
            }
            if fields and "tenant" not in fields:
                hash_ = self._hash(space.namespace, ROOT_HASH, load.token_ids[:BLOCK_SIZE])
                if self._store.age_of(hash_) == "served":
                    load.elsewhere = Elsewhere(space.model, fields)

    def _hand_over(self, load: Load, batch: list[tuple[Name, Payload]], *, last: bool) -> None:
        if not load.cancelled:
            load.deliver(load, list(batch), last)

    def _fail(self, error: BaseException) -> None:
        if not self._reason:
            self._reason = told(error)
            self._complaint = complain_of(self._reason)
            _log.warning("%s", self._complaint)
