"""The store on disk: one SQLite file a user, for all models, tenants and processes.

Nothing in the file is believed: a record is compared with what was asked for, and its checksum is taken, each
time it is read. A cell may have any type.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.kv.hashing import Name, namespace_key
from octavo.kv.storage.documents import Documents
from octavo.kv.storage.file import PAGE_BYTES, StoreFile
from octavo.kv.storage.records import (
    Age,
    Document,
    Record,
    Space,
    checksum,
    outlasts,
    pack_ids,
    unpack_ids,
)

_LOG_BYTES = 16 << 20
_SETTLED_BYTES = 2 << 20
"""A log of so many bytes is taken into the file when there is time; that takes about a millisecond for each."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What a store has of a namespace. Times are in seconds since 1970."""

    num_blocks: int
    num_tails: int
    num_bytes: int
    num_hits: int
    oldest_s: float
    used_s: float


class DiskStore:
    """See `Store`; safe with several processes.

    Args:
        path: of the file; its folder is made if need be. With `exported` True it is one lone file for another
            machine, without a write-ahead log.
        budget_bytes: what the file and its log take at most.
        max_age_s: records that were not used for so long are removed.

    Raises:
        OSError, sqlite3.Error: it cannot be made or opened. A file that is not a store of this format, or is
            damaged, is removed and made anew.
    """

    def __init__(
        self,
        path: Path,
        *,
        budget_bytes: int = 10 << 30,
        max_age_s: float = 30 * 86400,
        exported: bool = False,
    ) -> None:
        self.path = path
        self.budget_bytes = budget_bytes
        self.max_age_s = max_age_s
        self._log_bytes = max(4 * PAGE_BYTES, min(_LOG_BYTES, budget_bytes // 16))
        self._logged_bytes = 0
        self._file = StoreFile(path, log_bytes=self._log_bytes, exported=exported)
        self.was_made = self._file.was_made
        self._documents = Documents(self._file)
        self._num_doubtful = 0
        self._doubtful: list[int] = []

    def close(self) -> None:
        self._file.close()

    def cleared_mark(self) -> tuple[int, int] | None:
        """Changes when the user clears the store."""
        return self._file.cleared_mark()

    def mark_cleared(self) -> None:
        """Make running engines forget what they hold, and drop what they are about to write."""
        self._file.mark_cleared()

    @property
    def num_doubtful(self) -> int:
        return self._num_doubtful + self._documents.num_doubtful

    @property
    def room_bytes(self) -> int:
        """What the records may take: the log needs the rest of the budget."""
        return self.budget_bytes - 2 * self._log_bytes

    @property
    def used_bytes(self) -> int:
        """What is in the file."""
        return self._file.used_bytes

    @property
    def file_bytes(self) -> int:
        """What the file and its log take."""
        return self._file.num_bytes

    # Records

    def introduce(self, space: Space) -> None:
        fields = json.dumps(dict(space.fields), sort_keys=True)
        with self._file.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO spaces VALUES (?, ?, ?)", (space.namespace, space.model, fields)
            )

    def put(self, records: Sequence[Record], mark: object = None) -> int:
        now, num_new = time.time(), 0
        with self._file.transaction() as db:
            if self.cleared_mark() != mark:
                return 0
            self._remove(db, self._take_doubtful())
            for record in records:
                name = record.name
                if name.kind == "tail":
                    self._remove_beginnings(db, name)
                known = db.execute(
                    "SELECT id, expires_s FROM records WHERE hash = ?", (name.hash,)
                ).fetchone()
                if known and isinstance(known[1], float) and outlasts(record.expires_s, known[1]):
                    self._remove(db, [known[0]])
                row = (
                    *(name.hash, name.kind, name.namespace, name.parent, pack_ids(name.token_ids)),
                    *(record.position, len(record.payload)),
                    *(checksum(name, record.payload, record.expires_s), now, now, record.expires_s),
                )
                added = db.execute(
                    "INSERT OR IGNORE INTO records (hash, kind, namespace, parent, token_ids, position, num_bytes, "
                    "checksum, created_s, used_s, expires_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    row,
                )
                if added.rowcount:
                    db.execute(
                        "INSERT OR REPLACE INTO payloads VALUES (?, ?)", (added.lastrowid, record.payload)
                    )
                    num_new += 1
                    self._logged_bytes += len(record.payload)
        return num_new

    def _remove_beginnings(self, db: sqlite3.Connection, name: Name) -> None:
        """A longer tail serves for the shorter ones that it begins with."""
        ids = pack_ids(name.token_ids)
        found = db.execute(
            "SELECT id, token_ids FROM records WHERE kind = 'tail' AND namespace = ? AND parent = ?",
            (name.namespace, name.parent),
        ).fetchall()
        self._remove(
            db,
            [id_ for id_, tail in found if isinstance(tail, bytes) and tail != ids and ids.startswith(tail)],
        )

    def get(self, name: Name) -> bytes | None:
        row = self._file.reader.execute(
            "SELECT r.id, kind, namespace, parent, token_ids, num_bytes, checksum, expires_s, data "
            "FROM records r LEFT JOIN payloads p ON p.id = r.id WHERE hash = ?",
            (name.hash,),
        ).fetchone()
        if row is None:
            return None
        id_, kind, namespace, parent, ids, num_bytes, check, expires_s, data = row
        is_right = (
            (kind, namespace, parent, ids)
            == (name.kind, name.namespace, name.parent, pack_ids(name.token_ids))
            and isinstance(data, bytes)
            and len(data) == num_bytes
            and (expires_s is None or isinstance(expires_s, float))
            and check == checksum(name, data, expires_s)
        )
        if not is_right:
            self._doubt(id_)
            return None
        return None if expires_s is not None and expires_s <= time.time() else data

    def age_of(self, hash_: bytes) -> Age:
        row = self._file.reader.execute("SELECT expires_s FROM records WHERE hash = ?", (hash_,)).fetchone()
        if row is None:
            return "absent"
        return "expired" if isinstance(row[0], float) and row[0] <= time.time() else "served"

    def _doubt(self, id_: int) -> None:
        """Remove a record when next something is written."""
        self._num_doubtful += 1
        self._doubtful.append(id_)

    def _take_doubtful(self) -> list[int]:
        doubtful, self._doubtful = self._doubtful, []
        return doubtful

    def tails(self, namespace: bytes, parent: bytes) -> list[tuple[int, ...]]:
        rows = self._file.reader.execute(
            "SELECT token_ids FROM records WHERE kind = 'tail' AND namespace = ? AND parent = ? LIMIT 64",
            (namespace, parent),
        ).fetchall()
        return [unpack_ids(ids) for (ids,) in rows if isinstance(ids, bytes) and len(ids) % 4 == 0]

    def touch(self, hashes: Sequence[bytes]) -> None:
        now = time.time()
        with self._file.transaction() as db:
            db.executemany(
                "UPDATE records SET used_s = ?, num_hits = num_hits + 1 WHERE hash = ?",
                [(now, hash_) for hash_ in hashes],
            )

    def settle(self) -> None:
        if self._logged_bytes >= _SETTLED_BYTES:
            self._logged_bytes = 0
            self._file.settle()

    def has_room(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.room_bytes

    def trim(self, num_bytes: int = 0) -> int:
        now, room = time.time(), self.room_bytes - num_bytes
        with self._file.transaction() as db:
            old = db.execute(
                "SELECT id FROM records WHERE used_s < ? OR expires_s <= ?", (now - self.max_age_s, now)
            ).fetchall()
            gone = self._remove(db, [*(id_ for (id_,) in old), *self._take_doubtful()])
            self._documents.trim(db, oldest_s=now - self.max_age_s, max_bytes=self.room_bytes // 8)
            while (excess := self.used_bytes - room) > 0:
                # A twentieth more, so that it need not be done again at once.
                victims = self._used_longest_ago(db, excess + self.room_bytes // 20)
                if not victims:
                    break
                gone += self._remove(db, victims)
        self._file.shrink(self.room_bytes)
        return gone

    @staticmethod
    def _used_longest_ago(db: sqlite3.Connection, num_bytes: int) -> list[int]:
        """Records that take so many bytes, or fewer where several share a page."""
        rows = db.execute(
            "SELECT id, coalesce(CAST(num_bytes AS INTEGER), 0) FROM records ORDER BY used_s, position DESC"
        )
        found = []
        for id_, size in rows:
            found.append(id_)
            num_bytes -= -(-size // PAGE_BYTES) * PAGE_BYTES
            if num_bytes <= 0:
                break
        rows.close()
        return found

    @staticmethod
    def _remove(db: sqlite3.Connection, ids: Iterable[int]) -> int:
        rows = [(id_,) for id_ in ids]
        db.executemany("DELETE FROM payloads WHERE id = ?", rows)
        return db.executemany("DELETE FROM records WHERE id = ?", rows).rowcount if rows else 0

    def clear(self, **fields: str) -> int:
        with self._file.transaction() as db:
            gone = 0
            for namespace, _, known in self._known(db):
                if fields.items() <= known.items():
                    gone += self._remove_space(db, namespace)
            if not fields:  # those of namespaces that are unknown, which only damage can make
                gone += self._remove(db, [id_ for (id_,) in db.execute("SELECT id FROM records").fetchall()])
                db.execute("DELETE FROM payloads")
        self._file.shrink()
        return gone

    def remove(self, namespace: bytes, hashes: Collection[bytes]) -> int:
        with self._file.transaction() as db:
            found = {
                id_
                for hash_ in hashes
                for (id_,) in db.execute(
                    "SELECT id FROM records WHERE hash = ?1 AND namespace = ?2 UNION "
                    "SELECT id FROM records WHERE kind = 'tail' AND namespace = ?2 AND parent = ?1",
                    (hash_, namespace),
                ).fetchall()
            }
            return self._remove(db, found)

    def clear_space(self, namespace: bytes) -> int:
        """Remove all records of a namespace; returns how many."""
        with self._file.transaction() as db:
            gone = self._remove_space(db, namespace)
        self._file.shrink()
        return gone

    def _remove_space(self, db: sqlite3.Connection, namespace: bytes) -> int:
        rows = db.execute("SELECT id FROM records WHERE namespace = ?", (namespace,)).fetchall()
        return self._remove(db, [id_ for (id_,) in rows])

    def _known(self, db: sqlite3.Connection) -> list[tuple[bytes, str, dict[str, str | int]]]:
        """Namespaces, their models and fields; no fields where these cannot be read."""
        spaces = []
        for namespace, model, text in db.execute("SELECT namespace, model, fields FROM spaces").fetchall():
            try:
                fields = dict(json.loads(text))
            except (TypeError, ValueError):
                fields = {}
            spaces.append((namespace, str(model), fields))
        return spaces

    # Documents

    def put_document(self, document: Document) -> None:
        self._documents.put(document)

    def get_document(self, kind: str, tenant: str, key: bytes) -> Document | None:
        return self._documents.get(kind, tenant, key)

    def documents(self, kind: str) -> Iterator[Document]:
        return self._documents.of_kind(kind)

    def remove_document(self, kind: str, tenant: str, key: bytes) -> bool:
        return self._documents.remove(kind, tenant, key)

    def remove_documents(self, kind: str, tenant: str | None = None) -> int:
        return self._documents.remove_all(kind, tenant)

    # The whole of it, for commands

    def spaces(self) -> list[Space]:
        """What the namespaces are; those that are not the key of their fields are left out."""
        known = self._known(self._file.reader)
        return [Space(ns, fields, model) for ns, model, fields in known if namespace_key(fields) == ns]

    def totals(self) -> dict[bytes, Totals]:
        """What there is of each namespace."""
        rows = self._file.reader.execute(
            "SELECT namespace, sum(kind = 'block'), sum(kind = 'tail'), sum(num_bytes), sum(num_hits), min(created_s), "
            "max(used_s) FROM records GROUP BY namespace"
        ).fetchall()
        return {namespace: Totals(*figures) for namespace, *figures in rows}

    def check(self) -> tuple[int, int]:
        """Read all there is; returns how many records are sound, and how much was not sound and is removed now.

        A sound record is what its hash says, and its hash is keyed with what its namespace says.
        """
        known = {space.namespace for space in self.spaces()}
        sound, before = 0, self.num_doubtful
        rows = self._file.reader.execute(
            "SELECT id, kind, namespace, parent, hash, token_ids FROM records ORDER BY position"
        ).fetchall()
        for id_, kind, namespace, parent, hash_, ids in rows:
            try:
                name = Name.of(kind, namespace, parent, unpack_ids(ids))
                is_right = kind in ("block", "tail") and namespace in known and name.hash == hash_
            except (TypeError, struct.error):
                is_right = False
            if is_right:
                sound += self.get(name) is not None
            else:
                self._doubt(id_)
        self._documents.remove_unsound()
        with self._file.transaction() as db:
            self._remove(db, self._take_doubtful())
        return sound, self.num_doubtful - before
