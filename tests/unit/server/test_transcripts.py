from __future__ import annotations

from octavo.kv.storage.memory import MemoryStore
from octavo.kv.storage.records import Document
from octavo.kv.storage.store_tier import StoreTier
from octavo.kv.storage.tier import NullTier
from octavo.server.chat.transcripts import DurableTranscripts, MemoryTranscripts, Transcript

SAID = Transcript((1, 2, 70_000), 1, "Grüße")


def same(first: Transcript | None, second: Transcript) -> bool:
    return first is not None and (list(first.ids), first.num_answer_tokens, first.text) == (
        list(second.ids),
        second.num_answer_tokens,
        second.text,
    )


def test_transcripts_outlive_memory_and_are_a_tenant_s_and_a_model_s_own() -> None:
    tier = StoreTier(MemoryStore())
    DurableTranscripts(MemoryTranscripts(1 << 20), tier, b"model").put("a", b"key", SAID)
    assert tier.flush(5.0)
    later = DurableTranscripts(MemoryTranscripts(1 << 20), tier, b"model")
    assert later.get("b", b"key") is None
    assert DurableTranscripts(MemoryTranscripts(1 << 20), tier, b"other").get("a", b"key") is None
    assert same(later.get("a", b"key"), SAID)
    tier._store.remove_documents("transcript")
    assert same(later.get("a", b"key"), SAID), "it is in memory now"
    later.put("a", b"key", SAID)
    assert later.forget("a") == 1
    assert tier.flush(5.0)
    assert later.get("a", b"key") is None
    tier.close(5.0)


def test_one_that_cannot_be_read_is_none() -> None:
    tier = StoreTier(MemoryStore())
    transcripts = DurableTranscripts(MemoryTranscripts(1 << 20), tier, b"model")
    for data in (b"", b"\x01\x00\x00\x00\x01\x00\x00\x00\x07\x00\x00\x00\xff"):
        tier.put_document(Document("transcript", transcripts._own(b"key"), data, "a"))
        tier.flush(5.0)
        assert transcripts.get("a", b"key") is None
    tier.close(5.0)


def test_without_a_disk_they_are_in_memory() -> None:
    transcripts = DurableTranscripts(MemoryTranscripts(1 << 20), NullTier(), b"model")
    transcripts.put("a", b"key", SAID)
    assert same(transcripts.get("a", b"key"), SAID)
