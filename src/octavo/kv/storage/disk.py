"""The store on disk: one SQLite file a user, for all models, tenants and processes.

It is written in WAL mode and read without a memory map: a file that is cut short or overwritten under a map
ends the process. Nothing in the file is believed: a record is compared with what was asked for, and its
checksum is taken, each time it is read. The large pages make a block's bytes a few reads.

kv/                  the folder, which only its owner may enter
├── store-1.sqlite   records, documents and what the namespaces are; the number is the format
├── lock             held while the file is made or removed
└── cleared          written anew when the user clears the store: running engines then forget what they hold
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from octavo.kv.hashing import Name, block_hash, namespace_key
from octavo.kv.storage.records import (
    FORMAT,
    Document,
    Record,
    Space,
    checksum,
    pack_ids,
    unpack_ids,
)

PAGE_BYTES = 64 << 10
WAL_BYTES = 16 << 20
_APPLICATION_ID = 0x0C7A70
_SCHEMA = """
CREATE TABLE spaces (namespace BLOB PRIMARY KEY, model TEXT, fields TEXT);
CREATE TABLE records (
  id INTEGER PRIMARY KEY, hash BLOB UNIQUE, kind TEXT, namespace BLOB, parent BLOB, token_ids BLOB,
  position INTEGER, num_bytes INTEGER, checksum INTEGER, created_s REAL, used_s REAL, expires_s REAL,
  num_hits INTEGER DEFAULT 0
);
CREATE INDEX records_by_parent ON records (namespace, parent) WHERE kind = 'tail';
CREATE INDEX records_by_use ON records (used_s);
CREATE TABLE payloads (id INTEGER PRIMARY KEY, data BLOB);
CREATE TABLE documents (
  kind TEXT, tenant TEXT, key BLOB, data BLOB, checksum BLOB, used_s REAL, PRIMARY KEY (kind, tenant, key)
);
"""


class StoreGone(OSError):
    """The store's file was deleted or replaced while it was open."""


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
        self._wal_bytes = max(4 * PAGE_BYTES, min(WAL_BYTES, budget_bytes // 16))
        self.max_age_s = max_age_s
        self.num_doubtful = 0
        self.was_made = False
        self._exported = exported
        self._doubtful: list[int] = []
        if not exported:
            make_private(path.parent)
        with self._locked():
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) or exported:
                    raise
                self._close()
                remove_file(path)
                self._open()
        self._inode = path.stat().st_ino

    # Opening

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time makes or removes the file."""
        if self._exported:
            yield
            return
        handle = os.open(self.path.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _open(self) -> None:
        self.was_made = not self.path.exists()
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._writer = self._connect()
        self._reader = self._connect()
        if self._writer.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            if self._writer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError("this is not a store of the present format")
            self._writer.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            self._writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
            if not self._exported:
                self._writer.execute("PRAGMA journal_mode = WAL")
            self._writer.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {FORMAT}; COMMIT;"
            )
        self._writer.execute("SELECT count(*) FROM sqlite_master")
        self._reader.execute("SELECT 1 FROM records LIMIT 1").fetchone()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=30.0, isolation_level=None, check_same_thread=False)
        for pragma in (
            "synchronous = NORMAL",
            f"wal_autocheckpoint = {self._wal_bytes // PAGE_BYTES}",
            f"journal_size_limit = {self._wal_bytes}",
            "cache_size = -4096",
            "mmap_size = 0",
            "cell_size_check = ON",
            "trusted_schema = OFF",
        ):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def _close(self) -> None:
        for name in ("_writer", "_reader"):
            connection = self.__dict__.pop(name, None)
            if connection is not None:
                with suppress(sqlite3.Error):
                    connection.close()

    def close(self) -> None:
        self._close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing. Raises StoreGone if the file is not there any more."""
        try:
            inode = self.path.stat().st_ino
        except FileNotFoundError:
            inode = None
        if inode != self._inode:
            raise StoreGone(f"{self.path} was deleted")
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield self._writer
            self._writer.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._writer.execute("ROLLBACK")
            raise

    # Records

    def introduce(self, space: Space) -> None:
        fields = json.dumps(dict(space.fields), sort_keys=True)
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO spaces VALUES (?, ?, ?)", (space.namespace, space.model, fields)
            )

    def put(self, records: Sequence[Record], mark: object = None) -> int:
        now, num_new = time.time(), 0
        with self._transaction() as db:
            if self.cleared_mark() != mark:
                return 0
            self._remove(db, self._take_doubtful())
            for record in records:
                name = record.name
                if name.kind == "tail":
                    self._remove_beginnings(db, name)
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
        return num_new

    def _remove_beginnings(self, db: sqlite3.Connection, name: Name) -> None:
        """A longer tail serves for the shorter ones that it begins with."""
        ids = pack_ids(name.token_ids)
        found = db.execute(
            "SELECT id, token_ids FROM records WHERE kind = 'tail' AND namespace = ? AND parent = ?",
            (name.namespace, name.parent),
        ).fetchall()
        self._remove(db, [id_ for id_, other in found if other != ids and ids.startswith(other)])

    def get(self, name: Name) -> bytes | None:
        row = self._reader.execute(
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
            self.doubt(id_)
            return None
        return None if expires_s is not None and expires_s <= time.time() else data

    def doubt(self, id_: int) -> None:
        """Remove a record when next something is written."""
        self.num_doubtful += 1
        self._doubtful.append(id_)

    def _take_doubtful(self) -> list[int]:
        doubtful, self._doubtful = self._doubtful, []
        return doubtful

    def tails(self, namespace: bytes, parent: bytes) -> list[tuple[int, ...]]:
        rows = self._reader.execute(
            "SELECT token_ids FROM records WHERE kind = 'tail' AND namespace = ? AND parent = ? LIMIT 64",
            (namespace, parent),
        ).fetchall()
        return [unpack_ids(ids) for (ids,) in rows if isinstance(ids, bytes) and len(ids) % 4 == 0]

    def touch(self, hashes: Sequence[bytes]) -> None:
        now = time.time()
        with self._transaction() as db:
            db.executemany(
                "UPDATE records SET used_s = ?, num_hits = num_hits + 1 WHERE hash = ?",
                [(now, hash_) for hash_ in hashes],
            )

    def trim(self) -> int:
        now = time.time()
        with self._transaction() as db:
            old = db.execute(
                "SELECT id FROM records WHERE used_s < ? OR expires_s <= ?", (now - self.max_age_s, now)
            ).fetchall()
            gone = self._remove(db, [*(id_ for (id_,) in old), *self._take_doubtful()])
            db.execute(
                "DELETE FROM documents WHERE used_s < ? AND kind != 'conversation'", (now - self.max_age_s,)
            )  # conversations are there because somebody asked for it
            self._trim_documents(db)
            excess = self.used_bytes - self.room_bytes
            if excess > 0:
                rows = db.execute("SELECT id, num_bytes FROM records ORDER BY used_s, position DESC")
                victims = []
                excess += self.room_bytes // 20  # so that it need not be done again at once
                for id_, num_bytes in rows:
                    victims.append(id_)
                    excess -= -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
                    if excess <= 0:
                        break
                rows.close()
                gone += self._remove(db, victims)
        self._give_back()
        return gone

    def _trim_documents(self, db: sqlite3.Connection) -> None:
        """Documents that nobody asked to keep take an eighth of the room at most."""
        rows = db.execute(
            "SELECT rowid, length(data) FROM documents WHERE kind != 'conversation' ORDER BY used_s DESC"
        ).fetchall()
        kept = accumulate(length for _, length in rows)
        gone = [(id_,) for (id_, _), total in zip(rows, kept, strict=True) if total > self.room_bytes // 8]
        db.executemany("DELETE FROM documents WHERE rowid = ?", gone)

    def _give_back(self) -> None:
        """Make the file smaller where it holds pages of nothing and is over its budget."""
        over = self._number("page_count") * PAGE_BYTES - self.room_bytes
        if over > 0:
            self._writer.executescript(
                f"PRAGMA incremental_vacuum({-(-over // PAGE_BYTES)})"
            )  # it has to be stepped
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @property
    def room_bytes(self) -> int:
        """What the records may take: the log needs the rest of the budget."""
        return self.budget_bytes - 2 * self._wal_bytes

    @property
    def used_bytes(self) -> int:
        """What is in the file."""
        return (self._number("page_count") - self._number("freelist_count")) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        """What the file and its log take."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                total += Path(f"{self.path}{suffix}").stat().st_size
        return total

    def _number(self, pragma: str) -> int:
        return int(self._writer.execute(f"PRAGMA {pragma}").fetchone()[0])

    @staticmethod
    def _remove(db: sqlite3.Connection, ids: Iterable[int]) -> int:
        rows = [(id_,) for id_ in ids]
        db.executemany("DELETE FROM payloads WHERE id = ?", rows)
        return db.executemany("DELETE FROM records WHERE id = ?", rows).rowcount if rows else 0

    def clear(self, **fields: str) -> int:
        with self._transaction() as db:
            gone = 0
            for namespace, known in self._fields(db):
                if fields.items() <= known.items():
                    rows = db.execute("SELECT id FROM records WHERE namespace = ?", (namespace,)).fetchall()
                    gone += self._remove(db, [id_ for (id_,) in rows])
            if not fields:  # those of namespaces that are unknown, which only damage can make
                gone += self._remove(db, [id_ for (id_,) in db.execute("SELECT id FROM records").fetchall()])
                db.execute("DELETE FROM payloads")
        self._writer.executescript(
            "PRAGMA incremental_vacuum"
        )  # so that the bytes are gone, not just forgotten
        self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return gone

    def clear_space(self, namespace: bytes) -> int:
        """Remove all records of a namespace; returns how many."""
        with self._transaction() as db:
            rows = db.execute("SELECT id FROM records WHERE namespace = ?", (namespace,)).fetchall()
            gone = self._remove(db, [id_ for (id_,) in rows])
        self._shrink()
        return gone

    def _shrink(self) -> None:
        """Give all empty pages back, so that the bytes are gone and not just forgotten."""
        self._writer.executescript("PRAGMA incremental_vacuum")
        self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _fields(self, db: sqlite3.Connection) -> list[tuple[bytes, dict[str, str | int]]]:
        spaces = []
        for namespace, text in db.execute("SELECT namespace, fields FROM spaces").fetchall():
            try:
                spaces.append((namespace, dict(json.loads(text))))
            except (TypeError, ValueError):
                spaces.append((namespace, {}))
        return spaces

    # Documents

    def put_document(self, document: Document) -> None:
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?, ?)",
                (
                    *(document.kind, document.tenant, document.key, document.data),
                    *(_document_check(document), document.used_s or time.time()),
                ),
            )

    def get_document(self, kind: str, tenant: str, key: bytes) -> Document | None:
        rows = self._reader.execute(
            "SELECT * FROM documents WHERE kind = ? AND tenant = ? AND key = ?", (kind, tenant, key)
        )
        return next(self._checked(rows.fetchall()), None)

    def documents(self, kind: str) -> Iterator[Document]:
        rows = self._reader.execute("SELECT * FROM documents WHERE kind = ? ORDER BY used_s DESC", (kind,))
        return self._checked(rows.fetchall())

    def remove_document(self, kind: str, tenant: str, key: bytes) -> bool:
        with self._transaction() as db:
            found = db.execute(
                "DELETE FROM documents WHERE kind = ? AND tenant = ? AND key = ?", (kind, tenant, key)
            )
            return found.rowcount > 0

    def remove_documents(self, kind: str, tenant: str | None = None) -> int:
        """Remove all documents of a kind, or those of one tenant; returns how many."""
        with self._transaction() as db:
            gone = db.execute(
                "DELETE FROM documents WHERE kind = ? AND (? IS NULL OR tenant = ?)", (kind, tenant, tenant)
            ).rowcount
        self._shrink()
        return gone

    def _checked(self, rows: Iterable[tuple[object, ...]]) -> Iterator[Document]:
        for kind, tenant, key, data, check, used_s in rows:
            document = Document(kind, key, data, tenant, used_s)  # type: ignore[arg-type]
            try:
                is_right = _document_check(document) == check
            except (TypeError, AttributeError):
                is_right = False
            if is_right:
                yield document
            else:
                self.num_doubtful += 1

    # The whole of it, for commands

    def spaces(self) -> list[Space]:
        """What the namespaces are; those that are not the key of their fields are left out."""
        found = self._reader.execute("SELECT namespace, model FROM spaces").fetchall()
        models = {namespace: str(model) for namespace, model in found}
        known = self._fields(self._reader)
        return [Space(ns, fields, models[ns]) for ns, fields in known if namespace_key(fields) == ns]

    def names(self, namespace: bytes | None = None) -> Iterator[Name]:
        """The names of all records, or of a namespace's, as they are written; `get` says whether one is sound."""
        where, values = ("WHERE namespace = ?", (namespace,)) if namespace is not None else ("", ())
        rows = self._reader.execute(
            f"SELECT id, kind, namespace, parent, hash, token_ids FROM records {where} ORDER BY position",
            values,
        ).fetchall()
        for id_, kind, space, parent, hash_, ids in rows:
            try:
                yield Name(kind, space, parent, hash_, unpack_ids(ids))
            except (TypeError, struct.error):
                self.doubt(id_)

    def totals(self) -> dict[bytes, Totals]:
        """What there is of each namespace."""
        rows = self._reader.execute(
            "SELECT namespace, sum(kind = 'block'), sum(kind = 'tail'), sum(num_bytes), sum(num_hits), min(created_s), "
            "max(used_s) FROM records GROUP BY namespace"
        ).fetchall()
        return {namespace: Totals(*figures) for namespace, *figures in rows}

    def check(self) -> tuple[int, int]:
        """Read every record; returns how many are sound and how many were not, and are removed now.

        A sound record is what its hash says, and its hash is keyed with what its namespace says.
        """
        known = {space.namespace for space in self.spaces()}
        sound, before = 0, self.num_doubtful
        for name in self.names():
            if (
                name.namespace in known
                and block_hash(name.namespace, name.parent, name.token_ids) == name.hash
            ):
                sound += self.get(name) is not None
            else:
                row = self._reader.execute("SELECT id FROM records WHERE hash = ?", (name.hash,)).fetchone()
                self.doubt(row[0])
        for kind in ("conversation", "transcript"):
            list(self.documents(kind))
        self.trim()
        return sound, self.num_doubtful - before

    # Clearing by the user, which every process has to hear of

    def cleared_mark(self) -> tuple[int, int] | None:
        """Changes when the user clears the store."""
        try:
            stat = (self.path.parent / "cleared").stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def mark_cleared(self) -> None:
        """Make running engines forget what they hold, and drop what they are about to write."""
        new = self.path.parent / f".cleared-{os.getpid()}"
        new.write_text("")
        new.replace(self.path.parent / "cleared")


def _document_check(document: Document) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for part in (document.kind.encode(), document.tenant.encode(), document.key, document.data):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def store_path() -> Path:
    """The user's store: in `OCTAVO_CACHE`, else in the platform's cache folder."""
    root = os.environ.get("OCTAVO_CACHE")
    if root is None:
        import platformdirs

        root = platformdirs.user_cache_dir("octavo")
    return Path(root, "kv", f"store-{FORMAT}.sqlite")


def make_private(folder: Path) -> None:
    """A folder that only its owner may enter.

    Raises:
        OSError: it cannot be made, or belongs to somebody else.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.stat()
    if stat.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if stat.st_mode & 0o077:
        folder.chmod(0o700)


def remove_file(path: Path) -> None:
    """Remove a store's file and what SQLite keeps beside it."""
    for suffix in ("-wal", "-shm", "-journal", ""):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
