"""`octavo cache clear`: what goes and what stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli.main import invoke
from octavo.kv.hashing import Name, namespace_key
from octavo.kv.storage.disk import DiskStore
from octavo.kv.storage.file import store_path
from octavo.kv.storage.records import Document, Record, Space

KINDS = ("transcript", "response", "dialogue", "conversation")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a block and documents for each of two models and two tenants."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    store = DiskStore(store_path())
    for model in ("one", "two"):
        for tenant in ("ada", "bob"):
            fields = {"tenant": tenant, "weights": model}
            namespace = namespace_key(fields)
            store.introduce(Space(namespace, fields, model))
            store.put(
                [Record(Name.of("block", namespace, namespace, range(32)), b"bytes")], store.cleared_mark()
            )
            for kind in KINDS:
                store.put_document(Document(kind, model.encode(), b"{}", tenant))
    store.close()
    return store_path()


def left(path: Path) -> tuple[list[str], dict[str, int]]:
    store = DiskStore(path)
    try:
        totals = store.totals()
        spaces = [
            f"{space.model}/{space.fields['tenant']}" for space in store.spaces() if space.namespace in totals
        ]
        return sorted(spaces), {kind: len(list(store.documents(kind))) for kind in KINDS}
    finally:
        store.close()


ALL = ["one/ada", "one/bob", "two/ada", "two/bob"]


@pytest.mark.parametrize(
    ("options", "spaces", "documents"),
    [
        ((), [], 0),
        (("--model", "one"), ["two/ada", "two/bob"], 4),
        (("--tenant", "ada"), ["one/bob", "two/bob"], 2),
        (("--model", "one", "--tenant", "ada"), ["one/bob", "two/ada", "two/bob"], 4),
    ],
)
def test_clear(kept: Path, options: tuple[str, ...], spaces: list[str], documents: int) -> None:
    assert left(kept) == (ALL, dict.fromkeys(KINDS, 4))
    assert invoke(["cache", "clear", "--yes", *options]) == 0
    of_servers = dict.fromkeys(KINDS[:3], documents)
    assert left(kept) == (spaces, {**of_servers, "conversation": 4})
