"""Tools in every format that is known, on a random model: only the grammar makes its answers calls."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from families import tiny_loaded

from octavo.config import SamplingParams
from octavo.engine.constraint import Grammars
from octavo.errors import InvalidRequest
from octavo.server.chat.answer import Answer, Asked, ChatJob, Progress, ReplyPiece, ToolUse
from octavo.server.chat.messages import Call, ChatMessage, Tool
from octavo.server.chat.transcripts import MemoryTranscripts
from octavo.server.models import Model
from octavo.server.schema import OctavoOptions
from octavo.server.settings import ServerSettings
from octavo.sessions.engine import Engine

SPECIALS = [
    "[TOOL_CALLS]",
    "[ARGS]",
    "[INST]",
    "[/INST]",
    "<|python_tag|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
QWEN = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %} Answer with <tool_call>
{"name": <name>, "arguments": <args>}
</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' %}<tool_response>
{{ message.content }}
</tool_response>{% else %}{{ message.content }}{% endif %}{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{{ '<s>' }}{%- for message in messages %}<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>
{% if loop.first and tools %}Answer with {"name": name, "parameters": arguments}. {% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif -%}
{% for call in message.tool_calls or [] %}{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}{{ message.content }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>
{% endif %}"""
MISTRAL = """{{ '<s>' }}{%- for message in messages %}{% if message.role == 'user' %}{% if tools and loop.first %}{{ tools | tojson }}{% endif %}[INST] {{ message.content }}[/INST]{% elif message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}[RESULT] {"content": {{ message.content | tojson }}}{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]</s>{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"""
MISTRAL_ARGS = MISTRAL.replace("[TOOL_CALLS] [{% for", "{% for").replace('{"name": "{{ call.function.name }}", "arguments": ', "[TOOL_CALLS]{{ call.function.name }}[ARGS]").replace("}}}{{ ', ' if", "}}{{ '' if").replace("{% endfor %}]</s>", "{% endfor %}</s>")  # fmt: skip
PLAIN = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {"hermes": QWEN, "llama3": LLAMA, "mistral": MISTRAL, "mistral-args": MISTRAL_ARGS, "own": PLAIN}
ENDS = {"hermes": "<|im_end|>", "llama3": "<|eot_id|>", "own": "<|im_end|>"}

WEATHER = Tool(
    "get_weather",
    "Tells the weather",
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "note": {"type": "string", "maxLength": 6},
        },
        "required": ["city", "days", "note"],
        "additionalProperties": False,
    },
)
TIME = Tool("get-time", "", {"type": "object", "properties": {}, "additionalProperties": False})
CALLS = {
    "get_weather": lambda args: (
        args["city"] in ("Paris", "Rome") and 1 <= args["days"] <= 9 and len(args["note"]) <= 6
    ),
    "get-time": lambda args: args == {},
}
HOT = SamplingParams(temperature=1.0, seed=1, max_tokens=400)


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request: pytest.FixtureRequest):
    loaded = tiny_loaded("llama", max_position_embeddings=8192)
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS})
    loaded.tokenizer.chat_template = TEMPLATES[request.param]
    end = loaded.tokenizer.convert_tokens_to_ids(ENDS.get(request.param, "</s>"))
    loaded = replace(loaded, context_length=8192, eos_token_ids=frozenset({end}))
    with Engine(loaded, kv_memory="64MiB") as engine:
        model = Model(engine, MemoryTranscripts(1 << 20), ServerSettings())
        assert model.tool_format.name == request.param
        yield model
        engine.check_integrity()


def ask(model: Model, *messages: ChatMessage, **job: Any) -> tuple[list[Answer], ReplyPiece]:
    """The answers of a job, and its last piece."""
    asked = Asked(model, ChatJob(messages=messages, **{"params": HOT, **job}))

    async def read() -> tuple[list[Answer], ReplyPiece]:
        answers: dict[int, Answer] = {}
        async for piece in asked.pieces():
            if isinstance(piece, ReplyPiece):
                assert piece.answers == tuple(answers[index] for index in sorted(answers))
                return list(piece.answers), piece
            if not isinstance(piece, Progress):
                answers.setdefault(piece.index, Answer(piece.index)).add(piece)
        raise AssertionError

    return asyncio.run(read())


USER = ChatMessage("user", "What is the weather?")


def check(answer: Answer) -> None:
    assert answer.ending == "calls"
    for call in answer.calls:
        assert CALLS[call.name](json.loads(call.arguments)), call


def test_a_required_call_is_valid(model: Model) -> None:
    ends = dict.fromkeys(model.engine.eos_token_ids, -3.0)  # so that there is more than one call
    params = replace(HOT, n=8, max_tokens=900, logit_bias=ends)
    answers, _ = ask(model, USER, tools=[WEATHER, TIME], tool_use=ToolUse("required"), params=params)
    for answer in answers:
        if answer.ending != "length":  # a random model may call tools for ever
            check(answer)
        assert answer.text == ""
    assert {call.name for answer in answers for call in answer.calls} == set(CALLS)
    assert any(len(answer.calls) > 1 for answer in answers)
    assert sum(answer.ending == "calls" for answer in answers) >= 2


def test_a_named_tool_is_called_once(model: Model) -> None:
    for name in CALLS:
        (answer,), _ = ask(model, USER, tools=[WEATHER, TIME], tool_use=ToolUse(f"name:{name}"))
        check(answer)
        assert [call.name for call in answer.calls] == [name]
    with pytest.raises(InvalidRequest, match="none of the tools"):
        ask(model, USER, tools=[WEATHER], tool_use=ToolUse("name:other"))


def test_an_echoed_call_is_a_full_hit(model: Model) -> None:
    options = {"tools": [WEATHER, TIME], "tool_use": ToolUse("required", parallel=False)}
    messages = [USER]
    known = None
    for turn in range(3):
        (answer,), end = ask(model, *messages, **options, params=replace(HOT, seed=turn))
        check(answer)
        assert end.prompt.history == "exact"
        usage = end.reply.usage
        if known is not None:
            assert usage.cached_tokens == known - 1
        known = usage.prompt_tokens + usage.completion_tokens
        (call,) = answer.calls
        spaced = json.dumps(
            json.loads(call.arguments), indent=2, sort_keys=True
        )  # as some clients send it back
        messages += [
            ChatMessage("assistant", "", (replace(call, arguments=spaced),)),
            ChatMessage("tool", f"Result {turn}", call_id=call.id),
        ]


def test_without_the_store_calls_are_written_by_the_template(model: Model) -> None:
    (answer,), _ = ask(model, USER, tools=[WEATHER], tool_use=ToolUse("required", parallel=False))
    echoed = ChatMessage("assistant", "", tuple(answer.calls))
    result = ChatMessage("tool", "Sunny", call_id=answer.calls[0].id)
    _, exact = ask(model, USER, echoed, result, tools=[WEATHER])
    _, plain = ask(model, USER, echoed, result, tools=[WEATHER], octavo=OctavoOptions(exact_history=False))
    assert (exact.prompt.history, plain.prompt.history) == ("exact", "retokenised")
    # The grammar writes calls as the template does, so that the text is the same too.
    decode = model.engine.chat_template.decode
    assert decode(exact.prompt.ids) == decode(plain.prompt.ids)


def test_without_a_choice_text_is_free_and_calls_are_valid(model: Model) -> None:
    answers, _ = ask(model, USER, tools=[WEATHER], params=replace(HOT, n=4, max_tokens=60))
    assert any(answer.text for answer in answers)
    assert not any(answer.calls for answer in answers if answer.text and not model.tool_format.anywhere)
    asked = Asked(model, ChatJob(messages=[USER], params=HOT, tools=[WEATHER]))
    written = model.tool_format
    lead = "Let me see. " if written.anywhere else ""
    right = written.text_of([Call("", "get_weather", '{"city": "Rome", "days": 3, "note": ""}')])
    wrong = written.text_of([Call("", "get_weather", '{"city": "Rome", "days": 0, "note": ""}')])
    assert allowed(model, asked.grammar, lead + right) is None
    refused = allowed(model, asked.grammar, lead + wrong)
    assert refused is not None
    assert refused.endswith('"days": ')
    assert allowed(model, asked.grammar, "Just text: {} <tool") is None


def allowed(model: Model, grammar: str | None, text: str) -> str | None:
    """The part of `text` that a grammar allows, or None if all of it and the end are."""
    assert grammar is not None
    engine = model.engine
    constraint = Grammars(engine.tokenizer, engine.vocab_size, engine.eos_token_ids).compile(grammar)
    ids = [*engine.tokenizer.encode(text, add_special_tokens=False), *engine.eos_token_ids]
    for place, token_id in enumerate(ids):
        if not constraint.mask()[token_id]:
            return str(engine.tokenizer.decode(ids[:place]))
        constraint.accept(token_id)
    return None


def test_with_none_nothing_is_read_as_a_call(model: Model) -> None:
    (answer,), _ = ask(
        model, USER, tools=[WEATHER], tool_use=ToolUse("none"), params=replace(HOT, max_tokens=30)
    )
    assert answer.calls == []
    assert answer.ending != "calls"


def test_an_answer_can_be_json(model: Model) -> None:
    for schema in (
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"type": "array", "items": {"enum": [1, "é"]}, "maxItems": 3},
    ):
        answers, _ = ask(model, USER, schema=schema, params=replace(HOT, n=4))
        for answer in answers:
            assert answer.ending == "stop"
            value = json.loads(answer.text)
            assert isinstance(value, dict | list)
            assert all(
                item in (True, False, 1, "é")
                for item in (value.values() if isinstance(value, dict) else value)
            )


def test_a_schema_that_cannot_be_held_to_is_refused(model: Model) -> None:
    for schema in (
        {"type": "nonsense"},
        {"$ref": "#/nowhere"},
        {"type": "object", "unevaluatedProperties": 5},
    ):
        with pytest.raises(InvalidRequest, match="cannot be used"):
            ask(model, USER, schema=schema)
