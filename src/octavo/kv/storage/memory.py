"""A store in memory: what tests use in place of the disk, and what ends with the process."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from octavo.kv.hashing import Name
from octavo.kv.storage.records import Age, Document, Record, Space, outlasts


class MemoryStore:
    """Records and documents in dictionaries, without a budget."""

    def __init__(self) -> None:
        self.num_doubtful = 0
        self.records: dict[bytes, Record] = {}
        self._spaces: dict[bytes, Space] = {}
        self._documents: dict[tuple[str, str, bytes], Document] = {}

    @property
    def used_bytes(self) -> int:
        return sum(len(record.payload) for record in self.records.values())

    def introduce(self, space: Space) -> None:
        self._spaces[space.namespace] = space

    def spaces(self) -> list[Space]:
        return list(self._spaces.values())

    def put(self, records: Sequence[Record], mark: object = None) -> int:  # noqa: ARG002
        num_new = 0
        for record in records:
            known = self.records.get(record.name.hash)
            if known is None or outlasts(record.expires_s, known.expires_s):
                copy = Record(record.name, bytes(record.payload), record.position, record.expires_s)
                self.records[record.name.hash] = copy
                num_new += 1
        return num_new

    def get(self, name: Name) -> bytes | None:
        record = self.records.get(name.hash)
        expired = self.age_of(name.hash) == "expired"
        return None if record is None or record.name != name or expired else bytes(record.payload)

    def age_of(self, hash_: bytes) -> Age:
        record = self.records.get(hash_)
        if record is None:
            return "absent"
        return "expired" if record.expires_s is not None and record.expires_s <= time.time() else "served"

    def tails(self, namespace: bytes, parent: bytes) -> list[tuple[int, ...]]:
        names = (record.name for record in self.records.values())
        return [
            name.token_ids
            for name in names
            if (name.kind, name.namespace, name.parent) == ("tail", namespace, parent)
        ]

    def touch(self, hashes: Sequence[bytes]) -> None:
        for hash_ in hashes:
            if hash_ in self.records:
                self.records[hash_] = self.records.pop(hash_)

    def settle(self) -> None:
        pass

    def has_room(self, num_bytes: int) -> bool:  # noqa: ARG002
        return True

    def trim(self, num_bytes: int = 0) -> int:  # noqa: ARG002
        return 0

    def clear(self, **fields: str) -> int:
        gone = [
            hash_
            for hash_, record in self.records.items()
            if fields.items() <= self._spaces[record.name.namespace].fields.items()
        ]
        for hash_ in gone:
            del self.records[hash_]
        return len(gone)

    def remove(self, namespace: bytes, hashes: Collection[bytes]) -> int:
        gone = [
            hash_
            for hash_, record in self.records.items()
            if record.name.namespace == namespace
            and (hash_ in hashes or (record.name.kind == "tail" and record.name.parent in hashes))
        ]
        for hash_ in gone:
            del self.records[hash_]
        return len(gone)

    def put_document(self, document: Document) -> None:
        self._documents[document.kind, document.tenant, document.key] = document

    def get_document(self, kind: str, tenant: str, key: bytes) -> Document | None:
        return self._documents.get((kind, tenant, key))

    def documents(self, kind: str) -> Iterator[Document]:
        found = [document for document in self._documents.values() if document.kind == kind]
        return iter(sorted(found, key=lambda document: -document.used_s))

    def remove_document(self, kind: str, tenant: str, key: bytes) -> bool:
        return self._documents.pop((kind, tenant, key), None) is not None

    def remove_documents(self, kind: str, tenant: str | None = None) -> int:
        gone = [key for key in self._documents if key[0] == kind and tenant in (None, key[1])]
        for key in gone:
            del self._documents[key]
        return len(gone)

    def close(self) -> None:
        pass
