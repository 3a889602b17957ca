"""What a grammar of calls lets through, and what it cannot be made of."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.errors import InvalidRequest
from octavo.server.chat.messages import Tool
from octavo.server.tools.formats import HERMES, LLAMA3
from octavo.server.tools.grammar import call_grammar

# Hand-written tools often leave out that arguments are an object.
LOOSE = Tool("f", "", {"properties": {"city": {"type": "string"}}, "required": ["city"]})


def takes(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    return bool(matcher.consume_tokens(list(text.encode()))) and bool(matcher.is_accepting())


def test_arguments_are_an_object() -> None:
    grammar = call_grammar([LOOSE], HERMES, {}, required=True, parallel=False)

    def call(arguments: str) -> str:
        return (
            HERMES.begin
            + HERMES.before_name
            + "f"
            + HERMES.after_name
            + arguments
            + HERMES.after_call
            + HERMES.end
        )

    assert takes(grammar, call('{"city": "Oslo"}'))
    for arguments in ('"x"', "null", "[]"):
        assert not takes(grammar, call(arguments))


def test_calls_that_look_like_any_json_do_not_go_with_a_schema() -> None:
    with pytest.raises(InvalidRequest, match="begin like any JSON"):
        call_grammar([LOOSE], LLAMA3, {}, required=False, parallel=True, text_schema={"type": "object"})
    call_grammar([LOOSE], LLAMA3, {}, required=True, parallel=True, text_schema={"type": "object"})
