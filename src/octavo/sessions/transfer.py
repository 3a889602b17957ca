"""A kept conversation with its keys and values as one file, for another machine or another user."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import InvalidConversation, InvalidRequest
from octavo.kv.hashing import ROOT_HASH, Name
from octavo.kv.storage.disk import DiskStore
from octavo.kv.storage.file import remove_file
from octavo.kv.storage.records import Record, Space
from octavo.sessions import archive
from octavo.sessions.archive import Kept
from octavo.spec import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Transfer:
    """What was taken over: a conversation, how many of its tokens' keys and values, and how many records not."""

    kept: Kept
    num_tokens: int
    num_doubtful: int = 0


def export(store: DiskStore, item: Kept, path: Path) -> Transfer:
    """Write a conversation, and what the store has of its keys and values, to a new file.

    Raises:
        InvalidRequest: the file exists, or cannot be written.
    """
    if path.exists():
        raise InvalidRequest(f"{path} exists already and is not replaced. Give another name.")
    try:
        target = DiskStore(path, budget_bytes=1 << 60, exported=True)
        try:
            target.put_document(item.to_document())
            num_tokens = 0
            for space in store.spaces():
                fields = space.fields
                if (fields.get("model"), fields.get("tenant")) == (item.fingerprint, item.tenant):
                    num_tokens = max(num_tokens, _copy(store, target, space, chain(store, space, item)))
        finally:
            target.close()
    except (OSError, sqlite3.Error) as error:
        remove_file(path)
        raise InvalidRequest(f"{path} cannot be written: {error}. Give another place.") from error
    return Transfer(item, num_tokens)


def chain(store: DiskStore, space: Space, item: Kept) -> Iterator[Name]:
    """The names under which a namespace would have a conversation's blocks, and then its tails."""
    parent, ids = ROOT_HASH, item.token_ids
    for start in range(0, len(ids) + 1, BLOCK_SIZE):
        for tail in store.tails(space.namespace, parent):
            if tuple(ids[start : start + len(tail)]) == tail:
                yield Name.of("tail", space.namespace, parent, tail)
        block = ids[start : start + BLOCK_SIZE]
        if len(block) < BLOCK_SIZE:
            return
        name = Name.of("block", space.namespace, parent, block)
        yield name
        parent = name.hash


def _copy(store: DiskStore, target: DiskStore, space: Space, names: Iterator[Name]) -> int:
    """Copy the records that are there; returns the tokens that they hold one after the other."""
    num_tokens, whole = 0, True
    target.introduce(space)
    for name in names:
        payload = store.get(name)
        if payload is not None:
            target.put([Record(name, payload)], target.cleared_mark())
        if name.kind == "block":
            whole = whole and payload is not None
            num_tokens += BLOCK_SIZE * whole
    return num_tokens


def import_file(store: DiskStore, path: Path) -> list[Transfer]:
    """Take over the conversations of an exported file, and the records that are sound.

    Raises:
        InvalidConversation: the file is not an export, or is damaged.
        OSError, sqlite3.Error: the store cannot be written.
    """
    if not path.is_file():
        raise InvalidRequest(f"{path} is not a file. Give one that `octavo cache export` wrote.")
    source = None
    try:
        source = DiskStore(path, exported=True)
        spaces, items = source.spaces(), archive.kept(source)
    except (sqlite3.Error, OSError) as error:
        if source is not None:
            source.close()
        raise InvalidConversation(
            f"{path} is not an exported conversation, or it is damaged ({error}). Export it again."
        ) from error
    try:
        if not items:
            raise InvalidConversation(f"{path} has no conversation that is whole. Export it again.")
        transfers = []
        for item in items:
            store.put_document(item.to_document())
            num_tokens = 0
            for space in spaces:
                if space.fields.get("model") == item.fingerprint:
                    num_tokens = max(num_tokens, _copy(source, store, space, chain(source, space, item)))
            transfers.append(Transfer(item, num_tokens, source.num_doubtful))
        return transfers
    finally:
        source.close()
