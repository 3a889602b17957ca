from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.errors import InvalidConversation
from octavo.sessions.conversation import Conversation


@pytest.fixture
def data(make_engine: Callable[..., Any]) -> dict[str, Any]:
    engine = make_engine()
    conversation = Conversation(engine, system="Be kind.", overflow="drop-oldest")
    engine.will_say("Hello")
    conversation.ask("Hi")
    engine.will_say(" Pari", end=False)
    conversation.ask("The capital?")
    loaded = json.loads(json.dumps(conversation.to_dict()))
    assert isinstance(loaded, dict)
    return loaded


def test_a_restored_conversation_goes_on_from_the_same_tokens(
    make_engine: Callable[..., Any], data: dict[str, Any]
) -> None:
    engine = make_engine()
    engine.name = "the same under another name"
    conversation = Conversation.from_dict(engine, data, temperature=0.5)
    assert conversation.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "The capital?"},
        {"role": "assistant", "content": " Pari"},
    ]
    before = conversation.token_ids
    assert before == [i for turn in data["turns"] for part in ("prompt", "answer") for i in turn[part]["ids"]]
    engine.will_say("Fine.")
    conversation.ask("Go on.")
    assert engine.prompts[0][: len(before)] == before
    assert engine.params[0].temperature == 0.5
    assert conversation.difference is None
    assert {**Conversation.from_dict(engine, data).to_dict(), "model": data["model"]} == data


def test_tools_are_saved(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    tools = [{"name": "look_up"}]
    saved = json.loads(json.dumps(Conversation(engine, tools=tools).to_dict()))
    assert Conversation.from_dict(engine, saved).history.tools == tuple(tools)


def test_another_tokenizer_is_refused(make_engine: Callable[..., Any], data: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidConversation, match=r"saved with the model 'toy-chatml'.*not those of 'toy-mistral'"
    ):
        Conversation.from_dict(make_engine("mistral", "pieces"), data)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("turns",), {}, "'turns' is a dict, not a list"),
        (("turns", 0), "Hi", "damaged"),
        (("turns", 0, "user"), None, "'user' is a NoneType, not a str"),
        (("turns", 1, "answer", "ids"), [1, -2], "not a token id"),
        (("turns", 1, "answer", "ids"), [1, True], "not a token id"),
        (("turns", 0, "prompt", "ids"), "12", "'ids' is a str"),
        (("turns", 0, "answer", "finish_reason"), "bored", "'finish_reason' is 'bored'"),
        (("system",), 3, "'system' is a int"),
        (("overflow",), "drop", "'overflow' is 'drop'"),
        (("format",), 2, "has format 2 and this version of Octavo reads 1"),
    ],
)
def test_damage_is_named(
    make_engine: Callable[..., Any], data: dict[str, Any], path: tuple[Any, ...], value: object, words: str
) -> None:
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(InvalidConversation, match=words):
        Conversation.from_dict(make_engine(), data)


@pytest.mark.parametrize("name", ["turns", "system", "tools", "overflow"])
def test_a_missing_part_is_named(make_engine: Callable[..., Any], data: dict[str, Any], name: str) -> None:
    del data[name]
    with pytest.raises(InvalidConversation, match=f"damaged: '{name}' is missing"):
        Conversation.from_dict(make_engine(), data)


@pytest.mark.parametrize("data", [{}, [], "text", None])
def test_something_else_is_no_conversation(make_engine: Callable[..., Any], data: Any) -> None:
    with pytest.raises(InvalidConversation, match="not a saved conversation"):
        Conversation.from_dict(make_engine(), data)
