"""Tools and structured answers with the SDKs, on a model of 135M parameters whose template knows no tools."""

from __future__ import annotations

import json
from enum import Enum
from typing import Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from .conftest import Served

pytestmark = pytest.mark.bundled

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city", "parameters": PARAMETERS},
}
CLAUDE_WEATHER = {"name": "get_weather", "description": "The weather in a city", "input_schema": PARAMETERS}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
OPTIONS = {"model": "smollm2", "temperature": 0, "max_completion_tokens": 120}


def test_a_required_call_streams_and_comes_back_as_a_full_hit(client: openai.OpenAI) -> None:
    options = {**OPTIONS, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(messages=ASK, **options)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")

    pieces = []
    with client.chat.completions.stream(messages=ASK, **options) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                pieces.append(event.arguments_delta)
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert "".join(pieces) == streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert len(pieces) > 2

    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}
    after = client.chat.completions.create(
        messages=[*ASK, choice.message, result],
        **{**options, "tool_choice": "none"},
        extra_body={"octavo": {"why": True}},
    )
    assert after.octavo["history"] == "exact"
    known = whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert after.usage.prompt_tokens_details.cached_tokens == known - 1
    assert after.choices[0].message.tool_calls is None


def test_several_calls_and_a_named_one(client: openai.OpenAI) -> None:
    clock = {"type": "function", "function": {"name": "get_time"}}
    named = {"type": "function", "function": {"name": "get_time"}}
    reply = client.chat.completions.create(messages=ASK, tools=[WEATHER, clock], tool_choice=named, **OPTIONS)
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["get_time"]
    with pytest.raises(openai.BadRequestError, match="none of the tools"):
        client.chat.completions.create(messages=ASK, tools=[WEATHER], tool_choice=named, **OPTIONS)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(messages=ASK, tools=[{"type": "web_search"}], **OPTIONS)
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(messages=ASK, tool_choice="required", **OPTIONS)


class Size(Enum):
    small = "small"
    large = "large"


class Animal(BaseModel):
    name: str = Field(max_length=12)
    legs: int = Field(ge=0, le=8)
    size: Size
    diet: Literal["plants", "meat"] | None


def test_an_answer_of_a_pydantic_model(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        messages=[{"role": "user", "content": "Describe a horse."}], response_format=Animal, **OPTIONS
    )
    assert isinstance(reply.choices[0].message.parsed, Animal)
    free = client.chat.completions.create(
        messages=[{"role": "user", "content": "A JSON object with the key a."}],
        response_format={"type": "json_object"},
        stop=["}"],
        **OPTIONS,
    )
    assert free.choices[0].message.content.startswith("{")
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.chat.completions.create(messages=ASK, response_format=wrong, **OPTIONS)


def test_anthropic_tool_use(server: Served) -> None:
    with server.anthropic() as client:
        options = {
            "model": "smollm2",
            "max_tokens": 120,
            "tools": [CLAUDE_WEATHER],
            "extra_body": {"temperature": 0},
        }
        choice = {"type": "any", "disable_parallel_tool_use": True}
        whole = client.messages.create(messages=ASK, tool_choice=choice, **options)
        assert whole.stop_reason == "tool_use"
        (use,) = whole.content
        assert (use.type, use.name) == ("tool_use", "get_weather")
        assert set(use.input) == {"city", "unit"}
        with client.messages.stream(messages=ASK, tool_choice=choice, **options) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_message().content[0].input == use.input
        assert kinds.count("input_json") > 2

        result = {
            "type": "tool_result",
            "tool_use_id": use.id,
            "content": [{"type": "text", "text": "Sunny"}],
        }
        turn = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        extra = {"octavo": {"why": True}, "temperature": 0}
        after = client.messages.create(messages=turn, **{**options, "extra_body": extra})
        assert after.octavo["history"] == "exact"
        with pytest.raises(anthropic.BadRequestError, match="none of the tools"):
            client.messages.create(messages=ASK, tool_choice={"type": "tool", "name": "other"}, **options)


def test_stop_strings_end_text_and_no_call(server: Served) -> None:
    """They stand in the marks and in the arguments of the call."""
    stops = ["\n", '"', "city"]
    with server.openai() as client, server.anthropic() as claude:
        options = {**OPTIONS, "tools": [WEATHER], "tool_choice": "required", "stop": stops}
        (choice,) = client.chat.completions.create(messages=ASK, **options).choices
        assert choice.finish_reason == "tool_calls"
        assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"city", "unit"}
        reply = claude.messages.create(
            model="smollm2",
            messages=ASK,
            max_tokens=120,
            tools=[CLAUDE_WEATHER],
            tool_choice={"type": "any"},
            stop_sequences=stops,
        )
        assert reply.stop_reason == "tool_use"
        assert set(reply.content[0].input) == {"city", "unit"}

        said = [{"role": "user", "content": "Count from one to ninety in words."}]
        free = {**OPTIONS, "max_completion_tokens": 60}
        plain = client.chat.completions.create(messages=said, tools=[WEATHER], tool_choice="none", **free)
        words = plain.choices[0].message.content
        stop = words[12:18]
        end = {"tools": [WEATHER], "n": 2, "stop": stop, "extra_body": {"octavo": {"why": True}}}
        cut = client.chat.completions.create(messages=said, **end, **free)
        for choice in cut.choices:
            assert (choice.message.content, choice.finish_reason) == (words[: words.index(stop)], "stop")
        assert cut.usage.completion_tokens < plain.usage.completion_tokens
        more = [*said, cut.choices[0].message, {"role": "user", "content": "Go on."}]
        after = client.chat.completions.create(messages=more, **end, **free)
        assert after.octavo["history"] == "exact"
