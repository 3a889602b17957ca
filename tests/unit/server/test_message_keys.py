"""Names of lists of messages, and the memory of what was generated."""

from __future__ import annotations

import json

import pytest

from octavo.server.chat.messages import Call, ChatMessage, MessageKeys, Tool
from octavo.server.chat.transcripts import MemoryTranscripts, Transcript

ASK = ChatMessage("user", "Hi")


def name(*messages: ChatMessage, scope: str = "m", tools: tuple[Tool, ...] = ()) -> bytes:
    keys = MessageKeys(scope, tools)
    return [keys.add(message) for message in messages][-1]


def called(arguments: str, id_: str = "1") -> ChatMessage:
    return ChatMessage("assistant", "", (Call(id_, "f", arguments),))


def test_what_clients_change_does_not_change_a_name() -> None:
    assert name(ASK, ChatMessage("assistant", " Yes.\n")) == name(ASK, ChatMessage("assistant", "Yes."))
    written = '{"b": 1, "a": [2]}'
    assert name(ASK, called(written)) == name(
        ASK, called(json.dumps(json.loads(written), indent=4, sort_keys=True), "2")
    )
    assert name(ASK, called("not json")) != name(ASK, called("not  json"))


def test_what_was_said_otherwise_has_another_name() -> None:
    names = [
        name(ASK, ChatMessage("assistant", "Yes.")),
        name(ASK, ChatMessage("assistant", "yes.")),
        name(ChatMessage("system", "Hi"), ChatMessage("assistant", "Yes.")),
        name(ASK, ChatMessage("user", "Yes.")),
        name(ASK, ChatMessage("assistant", "Yes."), scope="n"),
        name(ASK, ChatMessage("assistant", "Yes."), tools=(Tool("f"),)),
        name(ASK, called("{}")),
        name(ASK, called('{"a": 1}')),
        name(ASK),
        name(ChatMessage("user", "Hi"), ASK),
    ]
    assert len(set(names)) == len(names)


def test_a_name_to_come_is_that_of_the_list_with_the_message() -> None:
    keys = MessageKeys("m", ())
    keys.add(ASK)
    answer = ChatMessage("assistant", "Yes.")
    assert keys.after(answer) == keys.after(answer) == name(ASK, answer)


def test_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    store = MemoryTranscripts(max_bytes=3 * (400 + 400 + 4))
    for key in (b"a", b"b", b"c"):
        store.put("t", key, Transcript(range(100), 1, "x"))
    assert store.get("t", b"a") is not None
    store.put("t", b"d", Transcript(range(100), 1, "x"))
    assert [store.get("t", key) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert store.get("other", b"a") is None
    store.put("other", b"a", Transcript([1], 1, ""))
    assert store.forget("t") >= 2
    assert store.get("t", b"a") is None
    assert store.get("other", b"a") is not None


@pytest.mark.parametrize("arguments", ["[" * 100_000, "{", "1e999"])
def test_arguments_that_are_no_json_are_text(arguments: str) -> None:
    assert name(called(arguments)) == name(called(arguments))
