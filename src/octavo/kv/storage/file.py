"""The file of the store on disk: where it is, how it is opened, and how its room is given back.

It is written in WAL mode and read without a memory map: a file that is cut short or overwritten under a map
ends the process. The large pages make a block's bytes a few reads.

kv/                  the folder, which only its owner may enter
├── store-1.sqlite   records, documents and what the namespaces are; the number is the format
├── lock             held while the file is made or removed
└── cleared          written anew when the user clears the store: running engines then forget what they hold
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from octavo.kv.storage.records import FORMAT

PAGE_BYTES = 64 << 10
_CACHE_KIB = 4096
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


class StoreFile:
    """An open store, with a connection to write and one, `reader`, to read.

    Args:
        path: of the file; its folder is made if need be. With `exported` True it is one lone file, without a log.
        log_bytes: what its write-ahead log may grow to before it is taken into the file.

    Raises:
        OSError, sqlite3.Error: it cannot be made or opened. A file that is not a store of this format, or is
            damaged, is removed and made anew.
    """

    def __init__(self, path: Path, *, log_bytes: int, exported: bool) -> None:
        self.path = path
        self.was_made = False
        self._log_bytes = log_bytes
        self._exported = exported
        if not exported:
            make_private(path.parent)
        with self._locked():
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) or exported:
                    raise
                self.close()
                remove_file(path)
                self._open()
        self._inode = path.stat().st_ino

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
        self.reader = self._connect()
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
        self.reader.execute("SELECT 1 FROM records LIMIT 1").fetchone()
        for connection in (
            self._writer,
            self.reader,
        ):  # SQLite counts in pages of the size that it knows by now
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=30.0, isolation_level=None, check_same_thread=False)
        for pragma in (
            "synchronous = NORMAL",
            f"wal_autocheckpoint = {self._log_bytes // PAGE_BYTES}",
            f"journal_size_limit = {self._log_bytes}",
            "mmap_size = 0",
            "cell_size_check = ON",
            "trusted_schema = OFF",
        ):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def close(self) -> None:
        for name in ("_writer", "reader"):
            connection = self.__dict__.pop(name, None)
            if connection is not None:
                with suppress(sqlite3.Error):
                    connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
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

    # Room

    @property
    def used_bytes(self) -> int:
        """What is in the file."""
        return (self._number("page_count") - self._number("freelist_count")) * PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        """What the file and its log take."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                total += Path(f"{self.path}{suffix}").stat().st_size
        return total

    def settle(self) -> None:
        """Take the log into the file, as far as nobody reads it."""
        self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def shrink(self, num_bytes: int = 0) -> None:
        """Give pages of nothing back while the file takes more than `num_bytes`.

        With 0 all of them, so that what was removed is gone and not just forgotten.
        """
        over = self._number("page_count") * PAGE_BYTES - num_bytes
        if over > 0:
            self._writer.executescript(
                f"PRAGMA incremental_vacuum({-(-over // PAGE_BYTES)})"
            )  # it has to be stepped
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _number(self, pragma: str) -> int:
        return int(self._writer.execute(f"PRAGMA {pragma}").fetchone()[0])

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


@dataclass(frozen=True, slots=True)
class Look:
    """What a store's file looks like to somebody who changes nothing.

    `fault` says what is wrong with it, and is empty otherwise; `is_checked` says whether all of it was read.
    """

    num_bytes: int
    num_records: int
    num_documents: int
    fault: str
    is_checked: bool


def look_at(path: Path, *, check_up_to: int = 512 << 20) -> Look | None:
    """Reads a store's file without opening it as a store, which would make a damaged one anew. None if there is none.

    Args:
        check_up_to: files of at most so many bytes are read whole.
    """
    if not path.exists():
        return None
    num_bytes, fault, counts = path.stat().st_size, "", [0, 0]
    is_checked = num_bytes <= check_up_to
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
        try:
            if connection.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
                fault = "it is of another format"
            else:
                counts = [
                    int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
                    for table in ("records", "documents")
                ]
                if is_checked:
                    (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                    fault = "" if said == "ok" else " ".join(str(said).split())[:200]
        finally:
            connection.close()
    except (OSError, sqlite3.Error) as error:
        fault = str(error)
    return Look(num_bytes, counts[0], counts[1], fault, is_checked)
