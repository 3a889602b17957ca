"""Responses and conversations with OpenAI's SDK."""

from __future__ import annotations

import json
import time

import openai
import pytest
from pydantic import BaseModel, Field

from .conftest import Served
from .test_tools import PARAMETERS

pytestmark = pytest.mark.bundled

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": PARAMETERS,
}
OPTIONS = {"model": "smollm2", "temperature": 0, "max_output_tokens": 100}
WHY = {"octavo": {"why": True}}


def test_a_response_is_the_same_whole_streamed_and_kept(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="What is the capital of France?", **OPTIONS)
    assert "Paris" in whole.output_text
    assert (whole.status, whole.error, whole.incomplete_details) == ("completed", None, None)
    events = list(client.responses.create(input="What is the capital of France?", stream=True, **OPTIONS))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert text == last.output_text == whole.output_text
    assert last.usage.input_tokens_details.cached_tokens == last.usage.input_tokens - 1
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(last.id) == last
    with pytest.raises(openai.BadRequestError, match="not streamed"):
        client.responses.retrieve(last.id, stream=True)
    short = client.responses.create(input="Count to fifty.", **{**OPTIONS, "max_output_tokens": 3})
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_three_tool_turns_on_kept_responses_compute_only_what_is_new(client: openai.OpenAI) -> None:
    options = {**OPTIONS, "tools": [WEATHER], "parallel_tool_calls": False, "extra_body": WHY}
    response = client.responses.create(input="The weather in Paris?", tool_choice="required", **options)
    for turn in range(3):
        (call,) = response.output
        assert (call.type, call.name) == ("function_call", "get_weather")
        assert set(json.loads(call.arguments)) == {"city", "unit"}
        known = response.usage.input_tokens + response.usage.output_tokens
        result = {"type": "function_call_output", "call_id": call.call_id, "output": f"{20 + turn} degrees"}
        response = client.responses.create(
            input=[result], previous_response_id=response.id, tool_choice="required", **options
        )
        assert response.octavo["history"] == "exact"
        assert response.usage.input_tokens_details.cached_tokens == known - 1


def test_instructions_hold_for_one_response(client: openai.OpenAI) -> None:
    first = client.responses.create(input="Hello!", instructions="Answer in French.", **OPTIONS)
    assert first.instructions == "Answer in French."
    second = client.responses.create(input="Hello!", previous_response_id=first.id, **OPTIONS)
    assert second.instructions is None
    plain = client.chat.completions.create(
        model="smollm2",
        temperature=0,
        max_completion_tokens=100,
        messages=[
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Hello!"},
        ],
    )
    assert second.output_text == plain.choices[0].message.content
    assert second.usage.input_tokens == plain.usage.prompt_tokens


def test_input_items_of_every_kind_and_in_pages(client: openai.OpenAI) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
        {"type": "reasoning", "id": "r", "summary": []},
    ]
    response = client.responses.create(input=items, tools=[WEATHER], tool_choice="none", **OPTIONS)
    page = client.responses.input_items.list(response.id, order="asc", limit=2)
    assert page.has_more
    kept = list(page)  # the SDK turns the pages
    assert [item.type for item in kept] == [
        "message",
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert [item.role for item in kept[:3]] == ["developer", "user", "assistant"]
    backwards = list(client.responses.input_items.list(response.id))
    assert [item.id for item in backwards] == [item.id for item in reversed(kept)]


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(
        metadata={"a": "b"}, items=[{"role": "user", "content": "I am Ada."}]
    )
    assert client.conversations.retrieve(conversation.id).metadata == {"a": "b"}
    known = None
    for text in ("What is my name?", "And again?"):
        reply = client.responses.create(input=text, conversation=conversation.id, extra_body=WHY, **OPTIONS)
        assert reply.conversation.id == conversation.id
        assert reply.octavo["history"] == "exact"
        if known is not None:
            assert reply.usage.input_tokens_details.cached_tokens == known - 1
        known = reply.usage.input_tokens + reply.usage.output_tokens
    items = client.conversations.items.list(conversation.id, order="asc")
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
    client.conversations.delete(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="x", conversation=conversation.id, **OPTIONS)


def test_what_is_not_stored_or_deleted_is_gone(client: openai.OpenAI) -> None:
    loose = client.responses.create(input="Hi", store=False, **OPTIONS)
    kept = client.responses.create(input="Hi", **OPTIONS)
    client.responses.delete(kept.id)
    for gone in (loose, kept):
        with pytest.raises(openai.NotFoundError, match="no response"):
            client.responses.retrieve(gone.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(input="x", previous_response_id=gone.id, **OPTIONS)


def test_what_was_computed_for_a_deleted_conversation_is_gone(client: openai.OpenAI) -> None:
    text = "The cooper of the island made nine barrels a week, and each had a name of its own. " * 5
    options = {**OPTIONS, "max_output_tokens": 8, "extra_body": WHY}
    talk = client.conversations.create()
    first = client.responses.create(input=text, conversation=talk.id, **options)
    client.responses.create(input="Name one.", conversation=talk.id, **options)
    client.responses.delete(first.id)
    asked = {"input": text, "store": False, **options}
    again = client.responses.create(**asked)
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1, (
        "the talk goes on from it"
    )
    client.conversations.delete(talk.id)
    gone = client.responses.create(**asked)
    assert gone.usage.input_tokens_details.cached_tokens < 32
    assert gone.octavo["why"]["cause"] == "cleared"


def test_a_response_in_the_background_can_be_asked_for_and_cancelled(client: openai.OpenAI) -> None:
    made = client.responses.create(input="Hi", background=True, **OPTIONS)
    assert made.status in ("queued", "in_progress")
    deadline = time.monotonic() + 200
    while client.responses.retrieve(made.id).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert client.responses.retrieve(made.id).output_text
    bias = {"2": -100, "0": -100}
    endless = client.responses.create(
        input="Count.",
        background=True,
        extra_body={"logit_bias": bias},
        **{**OPTIONS, "max_output_tokens": 4000},
    )
    assert client.responses.cancel(endless.id).status == "cancelled"
    assert client.responses.retrieve(endless.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(input="Hi", **OPTIONS).id)


class Answer(BaseModel):
    yes: bool
    reason: str = Field(max_length=30)


def test_an_answer_of_a_pydantic_model(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(input="Is water wet?", text_format=Answer, **OPTIONS).output_parsed
    assert isinstance(parsed, Answer)


def test_logprobs(client: openai.OpenAI) -> None:
    response = client.responses.create(
        input="Hi",
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        **{**OPTIONS, "max_output_tokens": 3},
    )
    logprobs = response.output[0].content[0].logprobs
    assert [len(token.top_logprobs) for token in logprobs] == [2, 2, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"conversation": "conv_x", "previous_response_id": "resp_x"}, "not both"),
        ({"background": True, "store": False}, "background"),
    ],
)
def test_what_is_wrong_is_said(server: Served, change: dict, said: str) -> None:
    with server.openai() as client, pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(**{"input": "x", **OPTIONS, **change})


@pytest.mark.parametrize(
    "metadata",
    [
        '{"a": "\\ud800"}',
        '{"\\ud800": "a"}',
        '{"a": ' + "[" * 260 + "]" * 260 + "}",
        '{"a": 1}',
        json.dumps({"a" * 65: "b"}),
        json.dumps({"a": "b" * 513}),
        json.dumps({str(number): "" for number in range(17)}),
    ],
)
@pytest.mark.parametrize("path", ["conversations", "responses", "chat/completions"])
def test_metadata_are_strings(server: Served, path: str, metadata: str) -> None:
    body = json.dumps({"model": "smollm2", "input": "Hi", "messages": [{"role": "user", "content": "Hi"}]})
    with server.http() as http:
        body = f'{body[:-1]}, "metadata": {metadata}}}'
        reply = http.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("metadata")


def test_what_is_kept_can_be_read_whatever_its_strings_hold(server: Served) -> None:
    tool = r'{"type": "function", "name": "f", "description": "\ud800", "parameters": {"title": "\ud800"}}'
    call = r'{"type": "function_call", "call_id": "c", "name": "f", "arguments": "\ud800"}'
    headers = {"Content-Type": "application/json"}
    options = '"model": "smollm2", "input": "Hi", "max_output_tokens": 2'
    with server.http(headers=headers) as http:
        body = f'{{{options}, "tools": [{tool}], "tool_choice": "none"}}'
        made = http.post("/v1/responses", content=body).json()
        assert http.get(f"/v1/responses/{made['id']}").json() == made
        talk = http.post("/v1/conversations", content=f'{{"items": [{call}]}}').json()
        (item,) = http.get(f"/v1/conversations/{talk['id']}/items").json()["data"]
        assert item["arguments"] == "\ud800"
