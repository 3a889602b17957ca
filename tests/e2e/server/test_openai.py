"""OpenAI's own SDK against the server, with its strict validation of answers."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from .conftest import PATIENCE_S, Served

pytestmark = pytest.mark.bundled

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": "smollm2", "temperature": 0, "max_completion_tokens": 24}


def chat(client: openai.OpenAI, messages=QUESTION, **options):
    return client.chat.completions.create(messages=messages, **{**GREEDY, **options})


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("smollm2", "octavo")
    assert client.models.retrieve("smollm2") == model
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o'"):
        client.models.retrieve("gpt-4o")


def test_an_answer_is_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = chat(client)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    # The same prompt again: all but its last token is known.
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert usage.prompt_tokens_details.cache_write_tokens == 1
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_include_usage_no_chunk_has_any(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_a_history_sent_back_as_text_is_read_as_it_was_generated(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "You tell stories."}]
    known = 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"Tell me story number {turn} about a cat named Zyxqua."})
        reply = chat(client, messages, temperature=1.3, seed=turn, extra_body={"octavo": {"why": True}})
        report = reply.octavo
        assert report["history"] == "exact"
        assert report["num_history_tokens"] == known
        if known:  # the last token of an answer was chosen and not yet read
            assert reply.usage.prompt_tokens_details.cached_tokens == known - 1
        known = reply.usage.prompt_tokens + reply.usage.completion_tokens
        # What SDKs do with an answer: as an object, with fields that mean nothing to the model.
        messages.append(reply.choices[0].message.model_dump())


def test_exact_histories_can_be_switched_off(client: openai.OpenAI) -> None:
    first = chat(client, temperature=1.5, seed=5)
    messages = [*QUESTION, first.choices[0].message, {"role": "user", "content": "Are you sure?"}]
    report = {}
    for exact in (True, False):
        options = {"octavo": {"why": True, "exact_history": exact}}
        report[exact] = chat(client, messages, extra_body=options).octavo
    assert (report[True]["history"], report[False]["history"]) == ("exact", "retokenised")
    assert report[False]["num_history_tokens"] == 0


def test_an_answer_ends_when_its_time_is_over(client: openai.OpenAI) -> None:
    about = {"octavo": {"timeout_s": 0.05, "urgency": -1}, "ignore_eos": True}
    reply = chat(client, max_completion_tokens=6000, extra_body=about)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens < 6000
    with pytest.raises(openai.BadRequestError, match="urgency"):
        chat(client, extra_body={"octavo": {"urgency": 1}})


def test_an_answer_that_was_changed_is_not_taken_for_the_generated_one(client: openai.OpenAI) -> None:
    chat(client)
    messages = [*QUESTION, {"role": "assistant", "content": "London."}, {"role": "user", "content": "Sure?"}]
    reply = chat(client, messages, extra_body={"octavo": {"why": True}})
    assert reply.octavo["history"] == "retokenised"
    assert reply.octavo["why"]["cause"] in ("changed_token", "below_one_block")


def test_several_answers_have_seeds_and_one_prompt(client: openai.OpenAI) -> None:
    options = {"n": 3, "temperature": 1.2, "seed": 11, "max_completion_tokens": 12}
    first, again = chat(client, **options), chat(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    streamed = ["", "", ""]
    for chunk in chat(client, **options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert first.usage.completion_tokens == 36


def test_stop_strings_end_an_answer_and_are_no_part_of_it(client: openai.OpenAI) -> None:
    reply = chat(client, stop=[" capital", "nowhere"])
    assert reply.choices[0].message.content == "The"
    assert reply.choices[0].finish_reason == "stop"
    assert chat(client, max_completion_tokens=2).choices[0].finish_reason == "length"
    assert chat(client, max_completion_tokens=None, max_tokens=2).usage.completion_tokens == 2


def test_logprobs_of_chosen_and_other_tokens(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=3).choices[0]
    tokens = whole.logprobs.content
    text = b"".join(bytes(token.bytes) for token in tokens).decode()
    assert text == whole.message.content + "<|im_end|>"
    for token in tokens:
        assert len(token.top_logprobs) == 3
        # Greedily the likeliest is chosen.
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, token.top_logprobs[0].logprob)
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1.0001
    streamed = [
        token
        for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert [token.logprob for token in streamed] == [token.logprob for token in tokens]
    assert chat(client).choices[0].logprobs is None


def test_biases_and_penalties_move_tokens(client: openai.OpenAI) -> None:
    first = chat(client, logprobs=True).choices[0]
    the = first.logprobs.content[0].token
    token_id = 504  # "The"
    assert the == "The"
    banned = chat(client, logit_bias={str(token_id): -100}).choices[0].message.content
    assert not banned.startswith("The")
    forced = chat(client, logit_bias={str(token_id): 100}, max_completion_tokens=3)
    assert forced.choices[0].message.content == "TheTheThe"
    punished = chat(client, logit_bias={str(token_id): 20}, frequency_penalty=2, presence_penalty=2)
    assert punished.choices[0].message.content != "TheTheThe"


def test_fields_that_only_steer_caches_change_no_token(client: openai.OpenAI) -> None:
    plain = chat(client).choices[0].message.content
    dressed = chat(
        client,
        prompt_cache_key="a",
        prompt_cache_retention="24h",
        prompt_cache_options={"ttl": "12h", "mode": "explicit"},
        metadata={"a": "b"},
        user="me",
        safety_identifier="x",
        service_tier="flex",
        store=False,
    )
    assert dressed.choices[0].message.content == plain
    off_disk = chat(client, prompt_cache_retention="in_memory")
    assert off_disk.choices[0].message.content == plain


def test_completions_echo_and_take_several_prompts(server: Served, client: openai.OpenAI) -> None:
    options = {"model": "smollm2", "temperature": 0, "max_tokens": 4}
    plain = client.completions.create(prompt="Paris is the capital of", **options)
    echoed = client.completions.create(prompt="Paris is the capital of", echo=True, **options)
    assert echoed.choices[0].text == "Paris is the capital of" + plain.choices[0].text
    # The SDK's strict validation does not know that a chunk has no finish reason before the last one.
    with server.openai(_strict_response_validation=False) as lax:
        streamed = lax.completions.create(prompt="Paris is the capital of", echo=True, stream=True, **options)
        assert "".join(chunk.choices[0].text for chunk in streamed) == echoed.choices[0].text
    several = client.completions.create(prompt=["Paris is the capital of", "One, two,"], n=2, **options)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[1].text == plain.choices[0].text
    assert several.choices[2].text != plain.choices[0].text
    by_ids = client.completions.create(prompt=[57, 1312], **options)
    assert by_ids.usage.prompt_tokens == 2


def test_scores_of_a_prompt_are_those_of_generating_it(server: Served) -> None:
    """`echo` with `logprobs`: what the model thought of each token, as when it chose that token itself."""
    # The first token of an echoed prompt has no log-probability, which the SDK's strict validation does not know.
    with server.http() as http:
        options = {"model": "smollm2", "temperature": 0, "logprobs": 2}
        said = http.post("/v1/completions", json={"prompt": "Once upon", "max_tokens": 6, **options}).json()
        generated = said["choices"][0]["logprobs"]
        whole = "Once upon" + said["choices"][0]["text"]
        scored = http.post(
            "/v1/completions", json={"prompt": whole, "max_tokens": 0, "echo": True, **options}
        )
        reply = scored.json()
    logprobs = reply["choices"][0]["logprobs"]
    assert reply["choices"][0]["text"] == whole
    assert reply["usage"]["completion_tokens"] == 0
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["tokens"][-6:] == generated["tokens"]
    assert logprobs["token_logprobs"][-6:] == generated["token_logprobs"]
    assert logprobs["top_logprobs"][-6:] == generated["top_logprobs"]
    assert all(
        whole[offset:].startswith(token)
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    )


def test_a_scored_prompt_is_computed_once_and_scores_are_streamed(server: Served) -> None:
    prompt = "The ferryman knew every stone below the water, and every stone knew him. " * 4
    ask = {
        "model": "smollm2",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 3,
        "echo": True,
        "logprobs": 1,
    }
    with server.http() as http:

        def streamed(**changes: Any) -> list[dict[str, Any]]:
            options = {"stream": True, "stream_options": {"include_usage": True}, **changes}
            with http.stream("POST", "/v1/completions", json={**ask, **options}) as reply:
                lines = [
                    line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")
                ]
            return [json.loads(line) for line in lines]

        first = streamed()
        again = http.post("/v1/completions", json=ask).json()
        only_scored = streamed(max_tokens=0, n=2)
        plain = http.post("/v1/completions", json={**ask, "echo": False}).json()
    whole = again["choices"][0]
    pieces = [chunk["choices"][0] for chunk in first if chunk["choices"]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"][name]]
        assert joined == whole["logprobs"][name], name
    # It is scored anew each time, and what was computed for that is there for others.
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == plain["usage"]["prompt_tokens"] - 1
    scored = [chunk["choices"][0] for chunk in only_scored if chunk["choices"]]
    assert [(piece["index"], piece["text"], piece["finish_reason"]) for piece in scored] == [
        (0, prompt, None), (0, "", "length"), (1, prompt, None), (1, "", "length")
    ]  # fmt: skip
    assert all(piece["logprobs"]["tokens"] == pieces[0]["logprobs"]["tokens"] for piece in scored[::2])
    assert only_scored[-1]["usage"]["completion_tokens"] == 0


def test_a_suffix_needs_a_model_that_can(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not trained to fill in") as caught:
        client.completions.create(model="smollm2", prompt="def f(", suffix="return 1")
    assert caught.value.param == "suffix"


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0", "king"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", "token ids"),
        ({"n": 200}, "n", "128"),
        ({"n": 100}, None, "at most 16 answers"),
        ({"stop": ""}, None, "stop string is empty"),
        ({"functions": [{"name": "f"}]}, None, "use tools"),
        ({"modalities": ["text", "audio"]}, None, "audio is not supported"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, None, "audio is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content", "'text'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(client: openai.OpenAI, change: dict, param: str | None, said: str) -> None:
    options = {"messages": QUESTION, **GREEDY, **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**options)
    error = caught.value
    assert said in error.message
    assert error.type == "invalid_request_error"
    assert param is None or error.param.startswith(param)


def test_a_prompt_that_is_too_long_says_both_numbers(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "word " * 9000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, messages, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        sizes = caught.value.body["exceed_context"]
        assert sizes["num_prompt_tokens"] > sizes["max_context_tokens"] == 8192


def test_many_at_once_answer_as_one_alone(server: Served, client: openai.OpenAI) -> None:
    prompts = [[{"role": "user", "content": f"Say the number {number}."}] for number in range(6)]
    alone = [
        chat(client, messages, max_completion_tokens=10).choices[0].message.content for messages in prompts
    ]

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S, _strict_response_validation=True
        ) as client:

            async def ask(messages) -> str:
                text = ""
                options = {**GREEDY, "max_completion_tokens": 10}
                stream = await client.chat.completions.create(messages=messages, stream=True, **options)
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*map(ask, prompts))

    assert asyncio.run(ask_all()) == alone


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Nonce 81f3a. ", "Nonce 90c2e. "),
        ("Today is Monday, 3 March. ", "Today is Tuesday, 4 March. "),
        ('{"berth": 4, "tide": "low"} ', '{"tide": "low", "berth": 4} '),
    ],
)
def test_what_is_before_a_change_is_reused_and_the_change_is_shown(
    client: openai.OpenAI, before: str, after: str
) -> None:
    rules = f"You answer for the harbour office of {before[:3]}. Be brief, and never promise a berth. " * 4
    later = "Say when the tide is high."
    why = {"extra_body": {"octavo": {"why": True}}}
    usage = []
    for changing in (before, before, after):
        messages = [{"role": "system", "content": rules + changing + later}, *QUESTION]
        reply = chat(client, messages, max_completion_tokens=2, **why)
        usage.append(reply.usage)
    assert usage[1].prompt_tokens_details.cached_tokens == usage[1].prompt_tokens - 1
    told = reply.octavo["why"]
    assert told["cause"] == "changed_token"
    place = told["difference"]["position"]
    assert place - 32 < usage[2].prompt_tokens_details.cached_tokens <= place
    shown = told["difference"]
    assert shown["before"] + shown["earlier"] in rules + before + later
    assert shown["before"] + shown["now"] in rules + after + later


def test_streamed_completions_say_why_too(client: openai.OpenAI, server: Served) -> None:
    prompts = ["Paris is the capital of", "One, two, three, four, five,"]
    options = {"model": "smollm2", "temperature": 0, "max_tokens": 3, "extra_body": {"octavo": {"why": True}}}
    client.completions.create(prompt=prompts, **options)
    whole = client.completions.create(prompt=prompts, **options)
    with server.openai(_strict_response_validation=False) as lax:
        chunks = list(lax.completions.create(prompt=prompts, stream=True, **options))
    assert [one["cached_tokens"] for one in chunks[-1].octavo] == [
        one["cached_tokens"] for one in whole.octavo
    ]
    assert chunks[-1].choices == []
    assert all(chunk.choices for chunk in chunks[:-1])
