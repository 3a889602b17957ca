"""The model cache: nothing half written, and a hash that is believed only while the file is the same."""

import os
import time

import pytest

from octavo.errors import EngineError, InvalidModelFile
from octavo.models import store


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def was_read(path):
    """Whether the file's content has to be read to know its hash."""
    calls = []
    store.hash_file(path, lambda *call: calls.append(call))
    return calls == [("hash", 3, 3)]


def test_the_cache_is_for_its_owner_only(cache):
    assert store.model_cache("gguf") == cache / "models" / "gguf"
    assert (cache / "models").stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_made_is_reported(cache, monkeypatch):
    cache.write_text("in the way")
    with pytest.raises(EngineError, match="Set OCTAVO_CACHE to a folder"):
        store.model_cache()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(cache, monkeypatch):
    path = store.model_cache() / "a"
    store.write_atomically(path, b"old")
    monkeypatch.setattr(store.Path, "write_bytes", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_appears_whole_or_not_at_all(cache):
    final = store.model_cache() / "final"
    with pytest.raises(ZeroDivisionError), store.new_folder(final) as folder:
        (folder / "half").write_bytes(b"x" * (1 // (folder == final)))
    assert list(final.parent.iterdir()) == []
    with store.new_folder(final) as folder:
        (folder / "whole").write_text("x")
        assert not final.exists()
    assert [path.name for path in final.iterdir()] == ["whole"]
    with store.new_folder(final) as folder:
        (folder / "late").write_text("x")
    assert [path.name for path in final.iterdir()] == ["whole"]
    assert list(final.parent.iterdir()) == [final]


def test_folders_of_dead_processes_are_removed_after_a_day(cache):
    old, recent = store.model_cache() / ".tmp-old", store.model_cache() / ".tmp-recent"
    for folder in (old, recent):
        folder.mkdir()
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    with store.new_folder(store.model_cache() / "final"):
        pass
    assert not old.exists()
    assert recent.exists()


def test_a_remembered_hash_is_used_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_SETTLED_NS", 0)
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    assert was_read(path)
    first = store.hash_file(path)
    assert was_read(path)
    first.remember()
    assert store.hash_file(path) == first
    assert not was_read(path)
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert was_read(path)
    second = store.hash_file(path)
    assert second.sha256 != first.sha256
    assert store.remembered_hashes() == []
    second.remember()
    assert [known.file.path for known in store.remembered_hashes()] == [str(path)]
    path.unlink()
    assert store.remembered_hashes() == []


def test_a_file_hashed_just_after_it_changed_is_read_again(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    store.hash_file(path).remember()
    assert was_read(path)
    monkeypatch.setattr(store, "_SETTLED_NS", -1)
    assert not was_read(path)


def test_a_file_that_changes_while_it_is_hashed_is_refused(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    with pytest.raises(InvalidModelFile, match="changed while it was read"):
        store.hash_file(path, lambda *_: path.write_bytes(b"growing"))


def test_a_damaged_record_is_no_record(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    known = store.hash_file(path)
    known.remember()
    for damage in (b"", b"{}", b"[1]", b'{"file": {"path": 3}}', b"\xff"):
        known.file.record.write_bytes(damage)
        assert store.remembered_hashes() == []
        assert store.hash_file(path).sha256 == known.sha256


def test_the_hash_of_several_files_depends_on_names_and_contents_only(tmp_path):
    def of(folder, **contents):
        (tmp_path / folder).mkdir()
        for name, content in contents.items():
            (tmp_path / folder / name).write_text(content)
        return store.hash_files(tmp_path / folder, list(contents))

    assert of("one", a="1", b="2") == of("two", b="2", a="1")
    assert len({of("three", a="1", b="2"), of("four", a="2", b="1"), of("five", a="1", c="2")}) == 3
