"""A store behind threads: nothing waits for it, and when it fails there is none."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace

import pytest

from octavo.kv.hashing import block_hash
from octavo.kv.storage import open_tier
from octavo.kv.storage.disk import DiskStore
from octavo.kv.storage.memory import MemoryStore
from octavo.kv.storage.records import Document, Space
from octavo.kv.storage.store_tier import StoreTier
from octavo.kv.storage.tier import Load, NullTier
from octavo.kv.storage.write_queue import BATCH_BYTES

from .test_store import ROOT, SPACE, name, record


class Loads:
    """Asks a tier for a prompt, and collects what comes."""

    def __init__(self, tier, token_ids, parent: bytes = ROOT) -> None:
        self.batches: queue.Queue = queue.Queue()
        self.load = Load(SPACE, parent, tuple(token_ids), lambda *item: self.batches.put(item))
        self.asked = tier.load(self.load)

    def all(self) -> list:
        found, last = [], False
        while not last:
            _, batch, last = self.batches.get(timeout=10)
            found += batch
        return found


def chain(num_blocks: int, num_bytes: int = 100) -> list:
    """Records of a sequence of blocks."""
    parent, records = ROOT, []
    for block in range(num_blocks):
        records.append(record(32 * block, parent=parent, num_bytes=num_bytes))
        parent = records[-1].name.hash
    return records


@pytest.fixture
def tier():
    store = MemoryStore()
    store.introduce(Space(SPACE, {"model": "m"}, "tiny"))
    tier = StoreTier(store)
    yield tier
    tier.close(5.0)


def test_a_prompt_gets_the_blocks_that_are_there_and_then_a_tail(tier) -> None:
    records = chain(3)
    tail = record(96, num_tokens=9, parent=records[-1].name.hash)
    for item in [*records, tail]:
        assert tier.put(item)
    assert tier.flush(5.0)
    found = Loads(tier, range(200)).all()
    assert [n for n, _ in found] == [item.name for item in [*records, tail]]
    assert [bytes(payload) for _, payload in found] == [item.payload for item in [*records, tail]]
    # the last token is always computed: the third block would be the whole prompt, and one token of a tail is of use
    assert [n for n, _ in Loads(tier, range(96)).all()] == [item.name for item in records[:2]]
    assert [n for n, _ in Loads(tier, range(98)).all()] == [item.name for item in [*records, tail]]
    assert Loads(tier, [5, *range(1, 200)]).all() == []
    assert tier.report().num_written == 4


def test_large_prompts_come_in_batches_and_a_cancelled_load_is_silent(tier) -> None:
    for item in chain(9, num_bytes=BATCH_BYTES // 4):
        assert tier.put(item)
        assert tier.flush(5.0)
    loads = Loads(tier, range(300))
    sizes = [len(loads.batches.get(timeout=10)[1]) for _ in range(3)]
    assert sizes == [4, 4, 1]
    entered, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> bytes:
        entered.set()
        go_on.wait(10)
        return b"late"

    tier._store.get = wait
    loads = Loads(tier, range(300))
    entered.wait(10)
    loads.load.cancelled = True
    go_on.set()
    with pytest.raises(queue.Empty):
        loads.batches.get(timeout=0.1)


def test_the_queue_is_bounded_and_drops_are_counted() -> None:
    store, go_on = MemoryStore(), threading.Event()
    put = store.put
    store.put = lambda *args: go_on.wait(10) and put(*args)
    rooms = []
    tier = StoreTier(store, queue_bytes=1000, on_room=lambda: rooms.append(1))
    taken = [tier.put(record(first, num_bytes=300)) for first in range(6)]
    assert taken == [True] * 3 + [False] * 3
    assert not tier.has_room()
    assert tier.report().num_dropped == 3
    go_on.set()
    assert tier.flush(5.0)
    assert tier.has_room()
    assert rooms
    assert tier.report().num_written == 3
    assert tier.put(record(9, num_bytes=5000)), "one record goes through a queue that is smaller than it"
    tier.close(5.0)


def test_what_waits_to_be_written_is_served() -> None:
    store, go_on = MemoryStore(), threading.Event()
    store.introduce(Space(SPACE, {"model": "m"}, "tiny"))
    put, mark = store.put, [1]
    store.put = lambda *args: go_on.wait(10) and put(*args)
    tier = StoreTier(store, cleared_mark=lambda: mark[0])
    records = chain(3)
    late = record(96, num_tokens=5, parent=records[-1].name.hash)
    tail = record(96, num_tokens=9, parent=records[-1].name.hash)
    for item in [*records, tail, replace(late, expires_s=time.time() - 1)]:
        assert tier.put(item)
    found = Loads(tier, range(200)).all()
    assert [(n, bytes(payload)) for n, payload in found] == [(i.name, i.payload) for i in [*records, tail]]
    mark[0] = 2  # the user has cleared the store
    assert tier.was_cleared()
    assert Loads(tier, range(200)).all() == []
    assert tier.put(records[0]), "computed again"
    assert [n for n, _ in Loads(tier, range(200)).all()] == [records[0].name]
    go_on.set()
    assert tier.flush(5.0)
    assert [n for n, _ in Loads(tier, range(200)).all()] == [i.name for i in [*records, tail]]
    tier.close(5.0)


def test_beside_a_busy_engine_one_record_is_written_in_a_turn(tier) -> None:
    batches, put = [], tier._store.put
    tier._store.put = lambda *args: batches.append(len(args[0])) or put(*args)
    tier.give_turn()
    for item in chain(4):
        tier.put(item)
    while sum(batches) < 4:
        tier.give_turn()
        time.sleep(0.001)
    assert batches == [1] * 4
    tier.give_turn()
    for item in chain(12)[4:]:
        tier.put(item)
    assert tier.flush(5.0), "whoever waits does not wait for turns"
    assert len(tier._store.records) == 12
    tier.rest()
    for item in chain(20)[12:]:
        tier.put(item)
    while len(tier._store.records) < 20:  # without a turn
        time.sleep(0.001)


def test_what_has_to_be_done_some_day_is_done_when_there_is_time(tier) -> None:
    settled = threading.Event()
    tier._store.settle = settled.set
    tier.rest()
    assert settled.wait(5.0)
    settled.clear()
    tier.rest()
    tier.give_turn()
    tier.rest()
    assert settled.wait(5.0), "it is not forgotten"


def test_an_error_turns_the_tier_off_and_is_told_once(tier) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    tier._store.put = full
    assert tier.put(record(0))
    assert not tier.flush(5.0)
    report = tier.report()
    assert (report.state, report.reason) == ("failed", "no space left on device")
    assert "no space left on device" in tier.take_complaint()
    assert tier.take_complaint() is None
    assert not tier.put(record(1))
    assert not tier.has_room()
    assert not Loads(tier, range(100)).asked


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyError("a mistake of ours")])
def test_a_reader_s_error_ends_the_loads_that_wait(tier, error: Exception) -> None:
    def broken(*_: object) -> bytes:
        raise error

    tier._store.get = broken
    assert Loads(tier, range(100)).all() == []
    assert tier.report().state == "failed"


def test_a_writer_s_mistake_turns_the_tier_off(tier) -> None:
    def broken(*_: object) -> int:
        raise KeyError("a mistake of ours")

    tier._store.put = broken
    assert tier.put(record(0))
    assert not tier.flush(5.0)
    assert tier.report().state == "failed"


def test_closing_writes_what_is_queued_and_does_not_wait_for_ever() -> None:
    store = MemoryStore()
    tier = StoreTier(store)
    for item in chain(5):
        tier.put(item)
    tier.close(5.0)
    assert len(store.records) == 5
    slow = StoreTier(MemoryStore())
    slow._store.put = lambda *_: time.sleep(60) or 0
    slow.put(record(0))
    began = time.monotonic()
    slow.close(0.1)
    assert time.monotonic() - began < 5


def test_clearing_takes_what_waits_with_it(tier) -> None:
    tier.put(record(0))
    tier.clear(model="other")
    assert tier._store.get(name(0)) is not None
    tier.put(record(1))
    tier.clear(model="m")
    assert not tier._store.records


def test_a_clear_in_another_process_is_heard_of_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    tier = open_tier(1 << 30, lambda: None)
    assert "store-1.sqlite" in tier.take_complaint()
    assert not tier.was_cleared()
    other = open_tier(1 << 30, lambda: None)
    assert other.take_complaint() is None, "the notice is for the first run only"
    assert tier.put(record(0))
    other._store.mark_cleared()
    tier.put(record(1))  # computed before it was heard of
    assert tier.was_cleared()
    assert not tier.was_cleared()
    tier.put(record(2))
    assert tier.flush(5.0)
    assert [tier._store.get(name(first)) is not None for first in (1, 2)] == [False, True]
    for each in (tier, other):
        each.close(5.0)


@pytest.mark.parametrize("num_bytes", [3_000, 20_000, 70_000, 600_000])
def test_the_budget_of_the_disk_is_held_while_it_fills(tmp_path, num_bytes: int) -> None:
    budget = 16 << 20
    store = DiskStore(tmp_path / "kv" / "store.sqlite", budget_bytes=budget)
    store.introduce(Space(SPACE, {"model": "m"}, "tiny"))
    tier = StoreTier(store, budget_bytes=budget)
    for first in range(30 * budget // num_bytes // 20):
        while not tier.put(record(first, num_bytes=num_bytes)):
            time.sleep(0.001)
        assert store.file_bytes <= budget + BATCH_BYTES  # which the log has for a moment
    assert tier.flush(10.0)
    assert tier.report().used_bytes <= budget
    for number in range(40):
        tier.put_document(Document("conversation", bytes([number]), bytes(100_000)))
    assert tier.flush(10.0)
    assert tier.report().used_bytes <= budget
    assert len(tier.documents("conversation")) == 40
    tier.close(5.0)


def test_a_document_larger_than_its_share_pushes_no_keys_and_values_out(tmp_path) -> None:
    store = DiskStore(tmp_path / "kv" / "store.sqlite", budget_bytes=16 << 20)
    store.introduce(Space(SPACE, {"model": "m"}, "tiny"))
    tier = StoreTier(store, budget_bytes=16 << 20)
    records = [record(number, num_bytes=60_000) for number in range(40)]
    for one in records:
        assert tier.put(one)
    assert tier.flush(10.0)
    tier.put_document(Document("response", b"large", bytes(15 << 20)))
    tier.put_document(Document("response", b"small", b"x"))
    assert tier.flush(10.0)
    assert all(store.get(one.name) is not None for one in records)
    tier.close(5.0)


def test_without_a_budget_or_a_folder_there_is_no_tier(tmp_path, monkeypatch) -> None:
    assert isinstance(open_tier(0, lambda: None), NullTier)
    (tmp_path / "kv").write_text("in the way")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    tier = open_tier(1 << 30, lambda: None)
    assert tier.report().state == "failed"
    assert "file exists" in tier.take_complaint()
    assert not tier.put(record(0))
    assert not tier.load(Load(SPACE, ROOT, tuple(range(100)), lambda *_: None))
    assert block_hash(SPACE, ROOT, range(32)) == name(0).hash
