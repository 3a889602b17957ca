"""Anthropic's own SDK against the server, with its strict validation of answers."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from .conftest import Served

pytestmark = pytest.mark.bundled

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {
    "model": "smollm2",
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
}  # the SDK has no word for it


@pytest.fixture
def claude(server: Served) -> Iterator[anthropic.Anthropic]:
    with server.anthropic() as client:
        yield client


def send(client: anthropic.Anthropic, messages=QUESTION, **options) -> anthropic.types.Message:
    extra = {**GREEDY["extra_body"], **options.pop("extra_body", {})}
    return client.messages.create(messages=messages, **{**GREEDY, **options, "extra_body": extra})


def num_input(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_an_answer_is_the_same_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    whole = send(claude, system="You know capitals.")
    (block,) = whole.content
    assert "Paris" in block.text
    assert (whole.role, whole.stop_reason, whole.stop_sequence) == ("assistant", "end_turn", None)
    with claude.messages.stream(messages=QUESTION, system="You know capitals.", **GREEDY) as stream:
        assert "".join(stream.text_stream) == block.text
        streamed = stream.get_final_message()
    assert streamed.usage.cache_read_input_tokens == num_input(whole.usage) - 1
    assert num_input(streamed.usage) == num_input(whole.usage)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.stop_reason == "end_turn"


def test_the_order_of_events(claude: anthropic.Anthropic) -> None:
    kinds = [event.type for event in send(claude, stream=True, max_tokens=3)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_marks_decide_as_what_new_tokens_are_counted(claude: anthropic.Anthropic) -> None:
    def blocks(text: str, **mark):
        return [{"role": "user", "content": [{"type": "text", "text": text, **mark}]}]

    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    first = send(claude, blocks("Is this text about the harbour kept?", **mark)).usage
    assert first.cache_creation_input_tokens == first.cache_creation.ephemeral_1h_input_tokens > 0
    assert first.input_tokens == 0
    again = send(claude, blocks("Is this text about the harbour kept?", **mark)).usage
    assert again.cache_read_input_tokens == num_input(first) - 1
    assert again.cache_creation_input_tokens == 1
    unmarked = send(claude, blocks("Is that text about the river kept?")).usage
    assert (unmarked.cache_creation_input_tokens, unmarked.cache_creation.ephemeral_5m_input_tokens) == (0, 0)
    assert unmarked.input_tokens > 0


def test_a_prompt_can_be_read_beforehand(claude: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "Which of the seven seas is the saltiest, and why?"}]
    for stream in (False, True):
        read = send(claude, messages, max_tokens=0, stream=stream)
        if stream:
            events = list(read)
            assert [event.type for event in events] == ["message_start", "message_delta", "message_stop"]
            assert events[1].usage.output_tokens == 0
        else:
            assert (read.content, read.usage.output_tokens, read.stop_reason) == ([], 0, "max_tokens")
            assert read.usage.cache_read_input_tokens < 30
    answer = send(claude, messages, max_tokens=2)
    assert answer.usage.cache_read_input_tokens == num_input(answer.usage) - 1


def test_tokens_are_counted_as_they_will_be_sent(claude: anthropic.Anthropic) -> None:
    options = {"model": "smollm2", "messages": QUESTION, "system": "You know capitals."}
    counted = claude.messages.count_tokens(**options).input_tokens
    assert counted == num_input(claude.messages.create(**options, max_tokens=1).usage)


def test_a_history_sent_back_is_read_as_it_was_generated(claude: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "Invent a word and explain it."}]
    options = {"extra_body": {"temperature": 1, "octavo": {"why": True}}}
    known = None
    for _ in range(3):
        reply = send(claude, messages, **options)
        assert reply.octavo["history"] == "exact"
        if known is not None:
            assert reply.usage.cache_read_input_tokens == known - 1
        known = num_input(reply.usage) + reply.usage.output_tokens
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": [{"type": "text", "text": "Another one."}]},
        ]


def test_an_answer_can_be_begun(claude: anthropic.Anthropic) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The answer in one word:"}]
    reply = send(claude, begun, max_tokens=4)
    assert "Paris" in reply.content[0].text
    # Sent back whole it is known, too.
    whole = [*QUESTION, {"role": "assistant", "content": begun[1]["content"] + reply.content[0].text}]
    more = send(claude, [*whole, {"role": "user", "content": "Sure?"}], extra_body={"octavo": {"why": True}})
    assert more.octavo["history"] == "exact"


def test_stop_sequences(claude: anthropic.Anthropic) -> None:
    reply = send(claude, stop_sequences=[" capital", "nothing"])
    assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == (
        "The",
        "stop_sequence",
        " capital",
    )
    assert send(claude, max_tokens=2).stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no message of the user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}]},
            "tools.0.type",
        ),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "prompt is too long"),
    ],
)
def test_what_is_wrong_is_said(claude: anthropic.Anthropic, change: dict, said: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**{"messages": QUESTION, **GREEDY, **change})
    body = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert said in body["error"]["message"]
    assert body["request_id"] == caught.value.request_id


def test_an_unknown_model(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(messages=QUESTION, **{**GREEDY, "model": "claude"})
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_a_message_of_the_system_between_others(claude: anthropic.Anthropic) -> None:
    reply = send(claude, QUESTION)
    first = {"role": "system", "content": "Answer in French."}
    behind = [*QUESTION, {"role": "assistant", "content": reply.content[0].text}, first, *QUESTION]
    parts = {"role": "system", "content": [{"type": "text", "text": "Answer in French."}]}
    counts = [
        claude.messages.count_tokens(model="smollm2", messages=messages, system=system).input_tokens
        for messages, system in (
            ([first, *QUESTION], anthropic.omit),
            ([parts, *QUESTION], anthropic.omit),
            (QUESTION, "Answer in French."),
        )
    ]
    assert len(set(counts)) == 1
    assert send(claude, behind).usage.input_tokens > reply.usage.input_tokens
