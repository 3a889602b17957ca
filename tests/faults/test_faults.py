"""Whatever happens to the store, no answer is wrong, nothing crashes and nothing hangs.

A short set runs with the other tests; `make faults` runs `OCTAVO_FAULT_TRIALS` trials of each kind, and prints how
many records were still served. Each trial compares logits with a run without a store, byte by byte.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import tiny_loaded

from octavo.engine import tiers
from octavo.engine.engine import TokenEngine
from octavo.kv.hashing import Name
from octavo.kv.storage import open_tier
from octavo.kv.storage.disk import DiskStore
from octavo.kv.storage.records import Record, Space

TRIALS = int(os.environ.get("OCTAVO_FAULT_TRIALS", "12"))
PROMPTS = [[(31 * number + 7 * i) % 300 + 10 for i in range(200)] for number in range(3)]
FILES = ("store-1.sqlite", "store-1.sqlite-wal")
SPACE = b"s" * 32


class Subject:
    """An engine whose tier is changed for each trial, the answers that it has to give, and a store that has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiers._MIN_PATIENCE_S = 5.0
        self.engine = TokenEngine(tiny_loaded("llama"), kv_memory="8MiB", kv_disk=0, debug_fill=True)
        self.expected = [self._logits(prompt) for prompt in PROMPTS]
        self.written = folder / "written"
        self.use(self.written)
        for prompt in PROMPTS:
            self._logits(prompt)
        assert self.engine.flush()
        self.early = self.copy(self.written, "early")  # nothing of it is in the file yet, all in its log
        self.engine.disk.close(10.0)
        self.whole = self.copy(self.written, "whole")

    def copy(self, source: Path, name: str) -> Path:
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        (target / "kv").mkdir(parents=True)
        for file in FILES:
            if (source / "kv" / file).exists():
                shutil.copy(source / "kv" / file, target / "kv" / file)
        return target

    def use(self, folder: Path) -> None:
        """Go on with the store of a folder, and with nothing in memory."""
        os.environ["OCTAVO_CACHE"] = str(folder)
        tier = open_tier(1 << 30, self.engine._save_more)

        def change() -> None:
            cache = self.engine._core._cache
            cache.forget_all()
            cache.tiers.tier = self.engine.disk = tier
            cache.tiers._known.clear()
            cache.tiers._is_slow = lambda: False  # a model as small as this computes faster than it loads

        self.engine._ask(change)

    def trial(self, folder: Path, prepare: Callable[[DiskStore], object] | None = None) -> int:
        """Answers everything twice; returns how many tokens were loaded. `prepare` gets the open store first."""
        self.use(folder)
        if prepare is not None:
            assert self.engine.disk.flush(10.0)  # what changes a store does so one at a time
            prepare(self.engine.disk._store)
        began, loaded = time.monotonic(), 0
        for again in range(2):
            for prompt, expected in zip(PROMPTS, self.expected, strict=True):
                logits = self._logits(prompt)
                assert torch.equal(logits, expected)
                loaded += 0 if again else self.last.usage.loaded_tokens
        self.engine.check_integrity()
        self.engine.disk.close(10.0)
        assert time.monotonic() - began < 60
        return loaded

    def _logits(self, prompt: list[int]) -> torch.Tensor:
        rows = []
        runner = self.engine._core._cache.runner
        run = runner.run

        def recorded(*args, **options):
            logits = run(*args, **options)
            rows.append(torch.as_tensor(logits).clone())
            return logits

        runner.run = recorded
        try:
            self.last = self.engine.generate(prompt, max_tokens=4, ignore_eos=True)
        finally:
            runner.run = run
        return torch.cat(rows)[-4:]


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    before = os.environ.get("OCTAVO_CACHE")
    patience_s = tiers._MIN_PATIENCE_S
    subject = Subject(tmp_path_factory.mktemp("faults"))
    yield subject
    tiers._MIN_PATIENCE_S = patience_s
    subject.engine.close()
    if before is None:
        os.environ.pop("OCTAVO_CACHE", None)
    else:
        os.environ["OCTAVO_CACHE"] = before


def tell(capsys, kind: str, trials: int, loaded: int) -> None:
    with capsys.disabled():
        print(f"\n{kind}: {trials} trials, 0 wrong, {loaded:,} tokens loaded", end=" ")


def test_a_whole_store_is_used(subject, capsys) -> None:
    loaded = subject.trial(subject.copy(subject.whole, "trial"))
    assert loaded == 3 * 199
    tell(capsys, "whole", 1, loaded)


def damaged(
    subject, capsys, what: str, source: str, seed: int, damage: Callable[[random.Random, Path], None]
) -> None:
    """Trials with a copy of a store of which `damage` changes one file."""
    rng, loaded = random.Random(seed), 0
    for _ in range(TRIALS):
        folder = subject.copy(getattr(subject, source), "trial")
        damage(rng, rng.choice([p for p in (folder / "kv").iterdir() if p.stat().st_size]))
        loaded += subject.trial(folder)
    tell(capsys, f"{what}, {source}", TRIALS, loaded)


@pytest.mark.parametrize("source", ["whole", "early"])
def test_files_that_are_cut_short(subject, capsys, source: str) -> None:
    def cut(rng: random.Random, path: Path) -> None:
        os.truncate(path, rng.randrange(path.stat().st_size))

    damaged(subject, capsys, "cut short", source, 1, cut)


@pytest.mark.parametrize("source", ["whole", "early"])
def test_bits_that_are_flipped_anywhere(subject, capsys, source: str) -> None:
    def flip(rng: random.Random, path: Path) -> None:
        data = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 1, 8, 64))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)

    damaged(subject, capsys, "bits flipped", source, 2, flip)


def test_regions_that_are_overwritten(subject, capsys) -> None:
    def overwrite(rng: random.Random, path: Path) -> None:
        data = bytearray(path.read_bytes())
        length = rng.choice((16, 512, 4096, 65536))
        start, source = rng.randrange(len(data) - length), rng.randrange(len(data) - length)
        data[start : start + length] = rng.choice(
            (bytes(length), rng.randbytes(length), data[source : source + length])
        )
        path.write_bytes(data)

    damaged(subject, capsys, "overwritten", "whole", 3, overwrite)


def test_an_index_that_is_stale(subject, capsys) -> None:
    """Rows that lead to the bytes, tokens, parents or hashes of others, and a file with the log of another time."""
    rng, loaded = random.Random(4), 0
    changes = (
        "UPDATE payloads SET data = (SELECT data FROM payloads p WHERE p.id = payloads.id % 20 + 1)",
        "UPDATE records SET token_ids = (SELECT token_ids FROM records r WHERE r.id = records.id % 20 + 1)",
        "UPDATE records SET parent = (SELECT parent FROM records r WHERE r.id = records.id % 20 + 1)",
        "UPDATE records SET namespace = zeroblob(32)",
        "UPDATE records SET kind = 'tail'",
        "UPDATE OR IGNORE records SET hash = (SELECT hash FROM records r WHERE r.id = records.id + 1)",
        "DELETE FROM payloads WHERE id % 2",
        "DELETE FROM records WHERE id % 3 = 0",
        "UPDATE payloads SET data = substr(data, 1, length(data) - 1)",
    )
    for change in changes:
        folder = subject.copy(subject.whole, "trial")
        with sqlite3.connect(folder / "kv" / FILES[0]) as db:
            db.execute(change)
        db.close()
        loaded += subject.trial(folder)
    for _ in range(3):
        folder = subject.copy(subject.early, "trial")
        shutil.copy(subject.whole / "kv" / FILES[0], folder / "kv" / FILES[0])
        log = folder / "kv" / FILES[1]
        if log.exists():
            os.truncate(log, rng.randrange(log.stat().st_size + 1))
        loaded += subject.trial(folder)
    tell(capsys, "stale", len(changes) + 3, loaded)


def content(number: int) -> Record:
    name = Name.of("block", SPACE, bytes(16), range(number, number + 32))
    return Record(name, random.Random(number).randbytes(20_000 + number % 7))


def write_for_ever(path: Path, seed: int) -> None:
    """A child's work until it is killed."""
    rng = random.Random(seed)
    store = DiskStore(path, budget_bytes=8 << 20)
    store.introduce(Space(SPACE, {"model": "m"}, "m"))
    while True:
        store.put([content(rng.randrange(400)) for _ in range(rng.randrange(1, 6))], store.cleared_mark())
        if rng.random() < 0.2:
            store.touch([content(rng.randrange(400)).name.hash])
        if rng.random() < 0.2:
            store.trim()
        if rng.random() < 0.01:
            store.clear()


def child(path: Path, seed: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(path, seed)
        finally:
            os._exit(1)  # it never comes here by itself
    return pid


def check(path: Path) -> int:
    """Every record is right or not there; returns how many are there."""
    store = DiskStore(path, budget_bytes=8 << 20)
    found = 0
    for number in range(400):
        payload = store.get(content(number).name)
        assert payload is None or payload == content(number).payload
        found += payload is not None
    assert store.num_doubtful == 0, "an interrupted write leaves no record that is not whole"
    store.put([content(0)], store.cleared_mark())
    store.close()
    return found


def test_killed_at_a_random_moment_of_writing(tmp_path, capsys) -> None:
    rng, found, path = random.Random(5), 0, tmp_path / "kv" / "store.sqlite"
    DiskStore(path).close()
    trials = max(TRIALS, 25)
    for trial in range(trials):
        pid = child(path, trial)
        time.sleep(rng.uniform(0.002, 0.12))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        if trial % 5 == 4 or trials <= 25:
            found += check(path)
    assert check(path) > 0
    tell(capsys, "killed", trials, found)


def test_two_processes_at_once(tmp_path, capsys) -> None:
    path = tmp_path / "kv" / "store.sqlite"
    DiskStore(path).close()
    pids = [child(path, seed) for seed in range(2)]
    end, rounds = time.monotonic() + min(20, 2 + TRIALS / 20), 0
    while time.monotonic() < end:
        check(path)
        rounds += 1
    for pid in pids:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it still writes"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    tell(capsys, "two at once", rounds, check(path))


def test_a_file_that_may_not_grow(subject, tmp_path, capsys) -> None:
    """The error of a full disk, from SQLite itself, where no file system can be mounted."""

    def fill(store: DiskStore) -> None:
        with store._file.transaction() as db:
            pages = db.execute("PRAGMA page_count").fetchone()[0]
            assert db.execute(f"PRAGMA max_page_count = {pages}").fetchone()[0] == pages

    loaded = subject.trial(tmp_path, fill)
    report = subject.engine.disk.report()
    assert (report.state, report.reason) == ("failed", "database or disk is full")
    tell(capsys, "may not grow", 1, loaded)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB, where this user may make one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full(subject, small_disk, capsys) -> None:
    (small_disk / "ballast").write_bytes(bytes(1_000_000))
    loaded = subject.trial(small_disk)
    assert subject.engine.disk.report().state == "failed"
    assert "full" in subject.engine.disk.report().reason or "space" in subject.engine.disk.report().reason
    tell(capsys, "disk full", 1, loaded)


def test_a_disk_that_is_read_only(subject, small_disk, capsys) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    shutil.copytree(subject.whole / "kv", small_disk / "kv")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    loaded = subject.trial(small_disk)
    assert subject.engine.disk.report().state == "failed"
    tell(capsys, "read-only", 1, loaded)
