"""The documents of the store on disk: conversations and transcripts, each checked when it is read."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate

from octavo.kv.storage.file import StoreFile
from octavo.kv.storage.records import Document


class Documents:
    """See `Store`, whose methods for documents these are."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file
        self.num_doubtful = 0

    def put(self, document: Document) -> None:
        with self._file.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?, ?)",
                (
                    *(document.kind, document.tenant, document.key, document.data),
                    *(_digest(document), document.used_s or time.time()),
                ),
            )

    def get(self, kind: str, tenant: str, key: bytes) -> Document | None:
        rows = self._file.reader.execute(
            "SELECT * FROM documents WHERE kind = ? AND tenant = ? AND key = ?", (kind, tenant, key)
        )
        return next(self._sound(rows.fetchall()), None)

    def of_kind(self, kind: str) -> Iterator[Document]:
        rows = self._file.reader.execute(
            "SELECT * FROM documents WHERE kind = ? ORDER BY used_s DESC", (kind,)
        )
        return self._sound(rows.fetchall())

    def remove(self, kind: str, tenant: str, key: bytes) -> bool:
        with self._file.transaction() as db:
            found = db.execute(
                "DELETE FROM documents WHERE kind = ? AND tenant = ? AND key = ?", (kind, tenant, key)
            )
            return found.rowcount > 0

    def remove_all(self, kind: str, tenant: str | None = None) -> int:
        with self._file.transaction() as db:
            gone = db.execute(
                "DELETE FROM documents WHERE kind = ? AND (? IS NULL OR tenant = ?)", (kind, tenant, tenant)
            ).rowcount
        self._file.shrink()
        return gone

    def remove_unsound(self) -> None:
        """Read them all, and remove and count those that are not what was put in."""
        with self._file.transaction() as db:
            rows = db.execute("SELECT rowid, * FROM documents")
            self._remove(db, [rowid for rowid, *row in rows if next(self._sound([row]), None) is None])

    def trim(self, db: sqlite3.Connection, *, oldest_s: float, max_bytes: int) -> None:
        """Remove those that were not used since `oldest_s`, and what is over a budget, the oldest first.

        Conversations stay: they are there because somebody asked for it.
        """
        db.execute("DELETE FROM documents WHERE used_s < ? AND kind != 'conversation'", (oldest_s,))
        rows = db.execute(
            "SELECT rowid, coalesce(length(data), 0) FROM documents WHERE kind != 'conversation' ORDER BY used_s DESC"
        ).fetchall()
        kept = accumulate(length for _, length in rows)
        self._remove(db, [rowid for (rowid, _), total in zip(rows, kept, strict=True) if total > max_bytes])

    @staticmethod
    def _remove(db: sqlite3.Connection, rowids: Iterable[int]) -> None:
        db.executemany("DELETE FROM documents WHERE rowid = ?", [(rowid,) for rowid in rowids])

    def _sound(self, rows: Iterable[Iterable[object]]) -> Iterator[Document]:
        for kind, tenant, key, data, check, used_s in rows:
            document = Document(kind, key, data, tenant, used_s)  # type: ignore[arg-type]
            try:
                is_right = _digest(document) == check
            except (TypeError, AttributeError):
                is_right = False
            if is_right:
                yield document
            else:
                self.num_doubtful += 1


def _digest(document: Document) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for part in (document.kind.encode(), document.tenant.encode(), document.key, document.data):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
