"""The store on disk: what it gives out is what was put in, or nothing."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kv.hashing import Name, namespace_key
from octavo.kv.storage.disk import DiskStore
from octavo.kv.storage.file import PAGE_BYTES, StoreGone
from octavo.kv.storage.records import Document, Record, Space

SPACE = b"s" * 32
ROOT = bytes(16)


def name(first: int = 0, *, num_tokens: int = 32, parent: bytes = ROOT, namespace: bytes = SPACE) -> Name:
    kind = "block" if num_tokens == 32 else "tail"
    return Name.of(kind, namespace, parent, range(first, first + num_tokens))


def record(first: int = 0, *, num_bytes: int = 1000, **options) -> Record:
    expires_s = options.pop("expires_s", None)
    payload = bytes((first + i) % 251 for i in range(num_bytes))
    return Record(name(first, **options), payload, expires_s=expires_s)


def alter(store: DiskStore, statement: str, *values: object) -> None:
    """Change the store's file behind its back."""
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute(statement, values)


@pytest.fixture
def store(tmp_path):
    store = DiskStore(tmp_path / "kv" / "store.sqlite")
    store.introduce(Space(SPACE, {"model": "m", "tenant": ""}, "tiny"))
    yield store
    store.close()


def test_what_is_put_comes_back_also_in_another_process_s_hands(store) -> None:
    assert store.put([record(0), record(1)]) == 2
    assert store.put([record(1), record(2)]) == 1
    other = DiskStore(store.path)
    assert [other.get(name(first)) for first in (0, 1, 2)] == [record(first).payload for first in (0, 1, 2)]
    assert other.get(name(3)) is None
    assert (other.was_made, other.num_doubtful) == (False, 0)
    other.close()


def test_only_the_owner_may_look_inside(tmp_path) -> None:
    (tmp_path / "kv").mkdir(mode=0o755)
    DiskStore(tmp_path / "kv" / "store.sqlite").close()
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    for path in (tmp_path / "kv").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("part", ["kind", "namespace", "parent", "token_ids"])
def test_a_record_that_is_not_what_was_asked_for_is_a_miss_and_is_removed(store, part: str) -> None:
    store.put([record(0)])
    asked = name(0)
    other = {"kind": "tail", "namespace": b"t" * 32, "parent": b"p" * 16, "token_ids": asked.token_ids[::-1]}
    values = {field: getattr(asked, field) for field in ("kind", "namespace", "parent", "hash", "token_ids")}
    assert store.get(Name(**{**values, part: other[part]})) is None
    assert store.num_doubtful == 1
    store.put([])
    assert store.get(asked) is None


COLUMNS = ("kind", "namespace", "parent", "token_ids", "num_bytes", "checksum", "expires_s")


@given(column=st.sampled_from((*COLUMNS, "data")), bit=st.integers(0, 2**32))
@settings(max_examples=60)
def test_a_changed_bit_anywhere_in_a_record_is_found(tmp_path_factory, column: str, bit: int) -> None:
    store = DiskStore(tmp_path_factory.mktemp("kv") / "store.sqlite")
    store.put([record(0, expires_s=time.time() + 1000)])
    table = "payloads" if column == "data" else "records"
    (value,) = store._file.reader.execute(f"SELECT {column} FROM {table}").fetchone()
    if isinstance(value, bytes):
        changed = bytearray(value)
        changed[bit // 8 % len(changed)] ^= 1 << bit % 8
        value = bytes(changed)
    elif isinstance(value, str):
        value = value[:-1] + chr(ord(value[-1]) ^ (1 << bit % 7))
    elif isinstance(value, float):
        value += 1 + bit % 1000
    else:
        value ^= 1 << bit % 62
    alter(store, f"UPDATE {table} SET {column} = ?", value)
    assert store.get(name(0)) is None
    assert store.num_doubtful == 1
    store.close()


def test_a_payload_that_is_missing_is_a_miss(store) -> None:
    store.put([record(0)])
    alter(store, "DELETE FROM payloads")
    assert store.get(name(0)) is None
    assert store.num_doubtful == 1


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000, b"SQLite format 3\0" + bytes(5000)])
def test_a_file_that_is_no_store_is_made_anew(tmp_path, content: bytes) -> None:
    path = tmp_path / "kv" / "store.sqlite"
    path.parent.mkdir()
    path.write_bytes(content)
    store = DiskStore(path)
    assert store.put([record(0)]) == 1
    assert store.get(name(0)) == record(0).payload
    store.close()


def test_a_store_of_another_format_is_made_anew(store) -> None:
    store.put([record(0)])
    alter(store, "PRAGMA user_version = 99")
    store.close()
    other = DiskStore(store.path)
    assert other.get(name(0)) is None
    other.close()


CELLS = ("token_ids", "parent", "hash", "num_bytes", "position", "used_s", "expires_s", "kind", "namespace")


@pytest.mark.parametrize("value", [None, "text", 7, -1.5])
@pytest.mark.parametrize("column", CELLS)
def test_a_cell_of_another_type_stops_neither_writing_nor_checking(tmp_path, column: str, value) -> None:
    fields = {"model": "m", "tenant": ""}
    space, budget = namespace_key(fields), 6 << 20
    store = DiskStore(tmp_path / "kv" / "store.sqlite", budget_bytes=budget)
    store.introduce(Space(space, fields, "tiny"))
    for number in range(30):
        store.put([record(number, num_bytes=2 * PAGE_BYTES, namespace=space)])
    store.put([record(0, num_tokens=5, namespace=space)])
    alter(store, f"UPDATE OR IGNORE records SET {column} = ? WHERE id > 10", value)
    store.put_document(Document("transcript", b"1", b"said"))
    alter(store, "UPDATE documents SET data = ?", value)
    store.put([record(0, num_tokens=9, namespace=space)])
    store.budget_bytes = budget // 2
    store.trim()
    assert store.used_bytes <= store.room_bytes
    store.check()
    sound = sum(store.get(name(first, namespace=space)) is not None for first in range(30))
    assert store.check() == (sound + (store.get(name(0, num_tokens=9, namespace=space)) is not None), 0)
    assert not list(store.documents("transcript"))
    store.close()


def test_spaces_may_come_while_they_are_listed(store) -> None:
    fields = [{"model": "m", "tenant": str(number)} for number in range(9)]
    coming = iter([Space(namespace_key(field), field, "tiny") for field in fields])
    # Before each statement that lists them another one is introduced, as the writer's thread may do.
    store._file.reader.set_trace_callback(lambda _: store.introduce(next(coming)))
    listed = store.spaces()
    store._file.reader.set_trace_callback(None)
    assert all(space.model == "tiny" and space.fields in fields for space in listed)
    assert len(store.spaces()) == len(fields) - len(list(coming)) > 0


def test_a_longer_tail_takes_the_place_of_its_beginning(store) -> None:
    store.put([record(0, num_tokens=5), record(100, num_tokens=5)])
    store.put([record(0, num_tokens=9)])
    assert sorted(store.tails(SPACE, ROOT)) == [tuple(range(9)), tuple(range(100, 105))]
    assert store.get(name(0, num_tokens=5)) is None
    assert store.tails(b"t" * 32, ROOT) == []


def test_when_there_is_time_the_log_is_taken_into_the_file(store, tmp_path) -> None:
    def in_file_alone() -> int:
        alone = tmp_path / "alone.sqlite"
        shutil.copy(store.path, alone)
        with closing(sqlite3.connect(alone)) as db:
            return (
                db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'records'").fetchone()[0]
                and (db.execute("SELECT count(*) FROM records").fetchone()[0])
            )

    store.put([record(0, num_bytes=100_000)])
    store.settle()
    assert in_file_alone() == 0, "so little can wait"
    store.put([record(first, num_bytes=500_000) for first in range(1, 6)])
    assert in_file_alone() == 0
    store.settle()
    assert in_file_alone() == 6
    assert store.get(name(3)) == record(3, num_bytes=500_000).payload


def test_the_budget_is_held_and_what_was_used_longest_ago_goes(tmp_path) -> None:
    budget = 6 << 20
    store = DiskStore(tmp_path / "kv" / "store.sqlite", budget_bytes=budget)
    for first in range(100):
        store.put([record(first, num_bytes=2 * PAGE_BYTES)])
        store.touch([name(0).hash])
        store.trim()
        assert store.used_bytes <= store.room_bytes
        assert store.file_bytes <= budget + (1 << 20)
    assert store.get(name(0)) is not None
    assert store.get(name(1)) is None
    assert store.get(name(99)) is not None
    store.budget_bytes = budget // 3  # the next start has a smaller one
    store.trim()
    assert store.file_bytes <= budget // 3 + (1 << 20)
    store.close()


def test_what_is_too_old_or_expired_goes(tmp_path) -> None:
    store = DiskStore(tmp_path / "kv" / "store.sqlite", max_age_s=3600)
    store.put([record(0), record(1), record(2, expires_s=time.time() + 0.05)])
    assert store.get(name(2)) is not None
    alter(store, "UPDATE records SET used_s = used_s - 4000 WHERE hash = ?", name(1).hash)
    time.sleep(0.06)
    assert store.get(name(2)) is None
    assert store.trim() == 2
    assert [store.get(name(first)) is not None for first in range(3)] == [True, False, False]
    assert store.num_doubtful == 0
    store.close()


def test_what_lasts_longer_takes_the_place_of_what_expires(store) -> None:
    now = time.time()

    def put(expires_s: float | None, fill: bytes) -> int:
        return store.put([Record(name(0), fill * 10, expires_s=expires_s)])

    assert put(now - 1, b"expired") == 1
    assert store.get(name(0)) is None
    assert put(now + 100, b"a") == 1
    assert put(now + 50, b"b") == 0
    assert store.get(name(0)) == b"a" * 10
    assert put(now + 200, b"c") == 1
    assert put(None, b"d") == 1
    assert (put(now + 300, b"e"), put(None, b"f")) == (0, 0)
    assert store.get(name(0)) == b"d" * 10
    assert store.num_doubtful == 0


def test_checking_removes_what_is_not_sound_and_nothing_else(tmp_path) -> None:
    fields = {"model": "m", "tenant": ""}
    space = namespace_key(fields)
    store = DiskStore(tmp_path / "kv" / "store.sqlite")
    store.introduce(Space(space, fields, "tiny"))
    store.put([record(first, num_bytes=PAGE_BYTES, namespace=space) for first in range(40)])
    store.put([record(50, namespace=space)])
    alter(store, "UPDATE records SET checksum = 1 WHERE hash = ?", name(50, namespace=space).hash)
    store.close()
    store = DiskStore(
        tmp_path / "kv" / "store.sqlite", budget_bytes=1 << 20
    )  # as the command does without a disk
    assert [store.check(), store.check()] == [(40, 1), (40, 0)]
    store.close()


def test_clearing_leaves_no_byte_behind(store) -> None:
    secret = b"what nobody is to read again" * 50
    store.introduce(Space(b"t" * 32, {"model": "m", "tenant": "other"}, "tiny"))
    store.put([Record(name(0), secret), Record(name(0, namespace=b"t" * 32), secret)])
    assert store.clear(tenant="other") == 1
    assert store.get(name(0)) == secret
    assert store.clear() == 1
    for path in store.path.parent.iterdir():
        assert secret[:28] not in path.read_bytes()


def test_what_was_computed_before_the_user_cleared_is_not_kept(store) -> None:
    mark = store.cleared_mark()
    store.mark_cleared()
    assert store.put([record(0)], mark) == 0
    assert store.put([record(0)], store.cleared_mark()) == 1


def test_a_store_that_was_deleted_is_told(store) -> None:
    store.put([record(0)])
    store.path.unlink()
    with pytest.raises(StoreGone, match="deleted"):
        store.put([record(1)])


def test_documents_are_kept_apart_by_tenant_and_checked(store) -> None:
    store.put_document(Document("conversation", b"1", b"mine", tenant="a", used_s=1.0))
    store.put_document(Document("conversation", b"1", b"theirs", tenant="b", used_s=2.0))
    store.put_document(Document("transcript", b"1", b"said"))
    assert store.get_document("conversation", "a", b"1").data == b"mine"
    assert [document.data for document in store.documents("conversation")] == [b"theirs", b"mine"]
    assert store.get_document("conversation", "c", b"1") is None
    alter(store, "UPDATE documents SET data = x'00' WHERE tenant = 'a'")
    assert store.get_document("conversation", "a", b"1") is None
    assert store.num_doubtful == 1
    assert [store.check(), store.check()] == [(0, 1), (0, 0)], "what is not sound is removed"
    assert store.remove_document("conversation", "b", b"1")
    assert not store.remove_document("conversation", "b", b"1")


def test_documents_have_their_share_and_conversations_stay(tmp_path) -> None:
    store = DiskStore(tmp_path / "kv" / "store.sqlite", budget_bytes=8 << 20)
    for number in range(20):
        document = Document(
            "transcript", str(number).encode(), bytes(100_000), used_s=time.time() - 20 + number
        )
        store.put_document(document)
        store.put_document(Document("conversation", str(number).encode(), bytes(1000), used_s=1.0))
    store.trim()
    left = [document.key for document in store.documents("transcript")]
    assert left == [str(number).encode() for number in range(19, 19 - len(left), -1)]
    assert 5 <= len(left) <= 10
    assert len(list(store.documents("conversation"))) == 20
    assert store.remove_documents("transcript", "nobody") == 0
    assert store.remove_documents("transcript") == len(left)
    store.close()


def test_a_folder_that_cannot_be_used_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file in its place")
    with pytest.raises(OSError):
        DiskStore(tmp_path / "kv" / "store.sqlite")
    if os.getuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(OSError):
            DiskStore(tmp_path / "locked" / "kv" / "store.sqlite")
