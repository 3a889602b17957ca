"""Calls read from an answer that comes in pieces: the same whatever the pieces are."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.chat.messages import Call
from octavo.server.tools.formats import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat
from octavo.server.tools.reader import ArgumentsText, CallBegun, CallReader

FORMATS = [HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS]


def read(
    tool_format: ToolFormat, pieces: list[str], reader: CallReader | None = None
) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls (name, arguments) of an answer in pieces."""
    reader = reader or CallReader(tool_format)
    text, calls = "", []
    for found in [item for piece in pieces for item in reader.push(piece)] + reader.finish():
        if isinstance(found, CallBegun):
            assert found.number == len(calls)
            calls.append((found.name, ""))
        elif isinstance(found, ArgumentsText):
            name, arguments = calls[found.number]
            calls[found.number] = (name, arguments + found.text)
        else:
            assert not calls, "text behind a call"
            text += found
    return text, calls


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\{}[]<>/\n é'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
calls = st.lists(
    st.tuples(
        st.sampled_from(["f", "get_weather"]), st.dictionaries(st.text(max_size=4), values, max_size=3)
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda one: one.name)
@given(
    calls=calls,
    text=st.text(alphabet="ab <t[{\n", max_size=12),
    places=st.lists(st.integers(0, 999), max_size=12),
)
def test_calls_come_back_byte_for_byte(tool_format: ToolFormat, calls, text: str, places: list[int]) -> None:
    if not tool_format.anywhere or tool_format.begin in text:
        text = ""
    said = [(name, json.dumps(arguments)) for name, arguments in calls]
    written = text + tool_format.text_of([Call("", name, arguments) for name, arguments in said])
    # White space in front of a call is no part of the text.
    assert read(tool_format, cut(written, places)) == (text.rstrip(), said)


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda one: one.name)
@given(
    text=st.text(alphabet="ab <tool_call>[T{\n", max_size=30), places=st.lists(st.integers(0, 99), max_size=8)
)
def test_text_without_calls_is_whole(tool_format: ToolFormat, text: str, places: list[int]) -> None:
    if text.startswith("{") or tool_format.begin in text:
        text = f"x{text}".replace(tool_format.begin or "{", "")
    shown, found = read(tool_format, cut(text, places))
    assert (shown.rstrip(), found) == (text.rstrip(), [])


def test_an_answer_that_ends_inside_a_call() -> None:
    whole = HERMES.text_of([Call("", "f", '{"a": "b"}')])
    for length in range(len(whole)):
        text, found = read(HERMES, [whole[:length]])
        for name, arguments in found:
            assert name == "f"
            assert '{"a": "b"}'.startswith(arguments)
        assert text == "" or whole.startswith(text)


def test_arguments_stream_as_they_come() -> None:
    reader = CallReader(HERMES)
    reader.push('<tool_call>\n{"name": "f", "arguments": ')
    assert reader.push('{"city": "Pa') == [ArgumentsText(0, '{"city": "Pa')]
    assert reader.push('ris"}') == [ArgumentsText(0, 'ris"}')]
    assert reader.push("}\n</tool_call>") == []


@pytest.mark.parametrize("places", [[], list(range(1, 200))], ids=["whole", "letters"])
@pytest.mark.parametrize(
    ("text", "stops", "shown", "stopped"),
    [
        ("I look\n", ["END", '"', "tool", "\n<tool_call>"], "I look", None),
        ("I look\n", ["END", "\n"], "I look", "\n"),
        ("I look \n\nand see", ["\n\n"], "I look ", "\n\n"),
        ("I look.\n\n", ["x", "\n\n\n", ".\n\n"], "I look", ".\n\n"),
        ("The EN, the END of it. ", ["END of", "D o"], "The EN, the ", "END of"),
        ("The END of it. ", ["END of", "END"], "The ", "END"),
        ("The EN", ["END"], "The EN", None),
    ],
)
def test_a_stop_string_ends_the_text_and_no_call(
    text: str, stops: list[str], shown: str, stopped: str | None, places: list[int]
) -> None:
    call = ("f", '{"city": "END of\\n"}')
    reader = CallReader(HERMES, stops)
    pieces = cut(text + HERMES.text_of([Call("", *call)]), places)
    assert read(HERMES, pieces, reader) == (shown, [] if stopped else [call])
    assert reader.stopped == stopped
    reader = CallReader(HERMES, ["END"])
    assert read(HERMES, cut("The EN", places), reader) == ("The EN", [])


@pytest.mark.parametrize("tool_format", [HERMES, MISTRAL, MISTRAL_ARGS], ids=lambda one: one.name)
@given(
    text=st.text(alphabet="ab \n<[", max_size=12),
    stops=st.lists(st.text(alphabet="a \n<", min_size=1, max_size=3), max_size=3),
    calls=calls | st.just([]),
    places=st.lists(st.integers(0, 99), max_size=12),
)
def test_stop_strings_of_white_space_end_the_text_too(
    tool_format: ToolFormat, text: str, stops: list[str], calls, places: list[int]
) -> None:
    said = [(name, json.dumps(arguments)) for name, arguments in calls]
    written = text + tool_format.text_of([Call("", name, arguments) for name, arguments in said])
    in_text = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    shown, stopped = text.rstrip(), None
    if in_text:
        begin, _, stopped = min(in_text)
        shown, said = text[:begin], []
    reader = CallReader(tool_format, stops)
    assert read(tool_format, cut(written, places), reader) == (shown, said)
    assert reader.stopped == stopped
