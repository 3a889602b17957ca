from __future__ import annotations

import pytest

from octavo.errors import InvalidConversation
from octavo.kv.storage.memory import MemoryStore
from octavo.kv.storage.records import Document
from octavo.sessions import archive

DATA = {
    "model": "toy",
    "turns": [
        {"user": "Hello\n there", "prompt": {"ids": [1, 2]}, "answer": {"ids": [3]}},
        {"user": "And?", "prompt": {"ids": [4]}, "answer": {"ids": [5, 6]}},
    ],
}
FINGERPRINT = b"f" * 32


def store_with(*ids: str, tenant: str = "") -> MemoryStore:
    store = MemoryStore()
    for id_ in ids:
        archive.keep(store, DATA, id=id_, tenant=tenant, fingerprint=FINGERPRINT)
    return store


def test_what_is_kept_comes_back() -> None:
    store = store_with("abcd")
    item = archive.find(store, "ab")
    assert (item.id, item.model, item.num_turns, item.title) == ("abcd", "toy", 2, "Hello there")
    assert item.token_ids == [1, 2, 3, 4, 5, 6]
    assert item.data == DATA
    archive.keep(store, {**DATA, "turns": []}, id="abcd", tenant="", fingerprint=FINGERPRINT)
    assert [again.num_turns for again in archive.kept(store)] == [0]


def test_an_id_may_be_shortened_as_long_as_it_names_one() -> None:
    store = store_with("abcd", "abce", "abc")
    assert archive.find(store, "abcd").id == "abcd"
    assert archive.find(store, "abc").id == "abc", "a whole id is never ambiguous"
    assert archive.find(store, "last").id == "abc"
    with pytest.raises(InvalidConversation, match="3 kept conversations"):
        archive.find(store, "ab")
    with pytest.raises(InvalidConversation, match="under 'x'"):
        archive.find(store, "x")
    with pytest.raises(InvalidConversation, match="under 'last'"):
        archive.find(MemoryStore(), "last")


def test_tenants_do_not_see_each_other_s() -> None:
    store = store_with("abcd", tenant="a")
    assert archive.find(store, "abcd", "a").id == "abcd"
    with pytest.raises(InvalidConversation):
        archive.find(store, "abcd", "b")


def test_another_model_is_refused_with_both_names() -> None:
    item = archive.find(store_with("abcd"), "abcd")
    archive.check_model(item, name="renamed", fingerprint=FINGERPRINT)
    with pytest.raises(InvalidConversation, match=r"'toy' .*, which is not the model 'other'"):
        archive.check_model(item, name="other", fingerprint=b"g" * 32)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"id": 1, "model": 2, "fingerprint": 3, "saved_s": 4, "conversation": {}}']
)
def test_what_is_not_whole_is_left_out(data: bytes) -> None:
    store = store_with("abcd")
    store.put_document(Document(archive.KIND, b"x", data))
    assert [item.id for item in archive.kept(store)] == ["abcd"]
