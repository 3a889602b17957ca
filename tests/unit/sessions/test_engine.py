from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.sessions.engine import Engine

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "How are you?"},
    {"role": "user", "content": "Fine."},
]


@pytest.fixture
def engine(make_engine: Callable[..., Any]) -> Any:
    """An `Engine` whose tokens come from a script."""
    toy = type("Toy", (make_engine, Engine), {})()
    del toy.chat_template  # the engine makes its own
    return toy


def test_a_list_of_messages_is_answered(engine: Any) -> None:
    engine.will_say("Good.")
    reply = engine.chat(CHAT)
    assert reply.text == "Good."
    rendered = engine.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert engine.prompts == [engine.ids(rendered)]
    assert engine.chat_ids(CHAT) == tuple(engine.prompts[0])


def test_a_malformed_message_is_refused(engine: Any) -> None:
    with pytest.raises(InvalidRequest, match="content of message 1"):
        engine.chat([{"role": "user", "content": None}])
    assert engine.prompts == []


def test_conversations_share_the_engines_template(engine: Any) -> None:
    engine.will_say("Hello", "Paris")
    conversation = engine.conversation(system="Be kind.", overflow="drop-oldest", top_k=3)
    conversation.ask("Hi")
    assert engine.params[0].top_k == 3
    restored = engine.restore(conversation.to_dict(), top_k=4)
    assert restored.messages == conversation.messages
    restored.ask("And?")
    assert engine.params[1].top_k == 4
    assert engine.chat_template is engine.chat_template


def test_a_given_overflow_counts_and_not_the_kept_one(engine: Any) -> None:
    data = engine.conversation().to_dict()
    assert engine.restore(data).to_dict()["overflow"] == "stop"
    assert engine.restore(data, overflow="drop-oldest").to_dict()["overflow"] == "drop-oldest"
    engine.kept = lambda *_: SimpleNamespace(data=data)
    assert engine.resume("last", overflow="drop-oldest").to_dict()["overflow"] == "drop-oldest"
