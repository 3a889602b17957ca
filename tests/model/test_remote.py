"""An engine in a process of its own does what one in this process does, on a tiny random model."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from families import tiny_model, tiny_tokenizer

from octavo.engine.messages import Delta, Event
from octavo.errors import EngineStopped, InvalidRequest, PromptTooLong
from octavo.server.engines import ServedEngine
from octavo.server.remote.engine import RemoteEngine
from octavo.sessions.engine import Engine

PROMPT = list(range(10, 60))
SETTINGS = {"kv_memory": "16MiB", "kv_disk": 0}
LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def here(folder: str) -> Iterator[Engine]:
    with Engine(folder, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def remote(folder: str) -> Iterator[RemoteEngine]:
    stages = []
    engine = RemoteEngine(folder, progress=lambda stage, *_: stages.append(stage), **SETTINGS)
    assert "hash" in stages
    yield engine
    engine.close()
    with pytest.raises(EngineStopped, match="closed"):
        engine.memory()


def events_of(engine: ServedEngine, prompts: list[Any], **sampling: Any) -> list[list[Event]]:
    """The events of each prompt, asked at once."""

    async def read(prompt: Any) -> list[Event]:
        return [event async for event in engine.astream(prompt, **sampling)]

    async def read_all() -> list[list[Event]]:
        return await asyncio.gather(*map(read, prompts))

    return asyncio.run(read_all())


def told(events: list[Event]) -> tuple[Any, ...]:
    """What does not depend on time and on what was there before."""
    deltas = [event for event in events if isinstance(event, Delta)]
    reply = deltas[-1].reply
    assert reply is not None
    texts: dict[int, str] = {}
    for event in deltas:
        texts[event.index] = texts.get(event.index, "") + event.text
    assert [texts[choice.index] for choice in reply.choices] == [choice.text for choice in reply.choices]
    return reply.choices, reply.usage.prompt_tokens, reply.seed, reply.prompt_logprobs


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 40, "seed": 1},
        {"max_tokens": 30, "temperature": 1.0, "seed": 5, "n": 3, "logprobs": 2},
        {"max_tokens": 20, "grammar": "start: /[a-f]{3,9}/", "temperature": 1.0, "seed": 1},
        {"max_tokens": 8, "prompt_logprobs": 1, "seed": 2, "logit_bias": {70: 5.0}, "cache_namespace": "ada"},
    ],
    ids=["greedy", "several", "grammar", "scores"],
)
def test_events_are_those_of_an_engine_in_this_process(
    here: Engine, remote: RemoteEngine, sampling: dict[str, Any]
) -> None:
    prompts = [PROMPT, PROMPT[5:], "Once upon a time."]
    expected, found = (events_of(engine, prompts, **sampling) for engine in (here, remote))
    assert [told(events) for events in found] == [told(events) for events in expected]


def test_what_never_changes_is_known_here(here: Engine, remote: RemoteEngine) -> None:
    for name in ("name", "context", "vocab_size", "eos_token_ids", "fingerprint", "notices"):
        assert getattr(remote, name) == getattr(here, name)
    messages = [{"role": "user", "content": "Grüße, </s> <|im_start|>"}]
    assert remote.chat_template.prompt(messages) == here.chat_template.prompt(messages)
    assert remote.encode("Grüße") == here.encode("Grüße")
    assert remote.tokenizer.added_tokens_decoder == here.tokenizer.added_tokens_decoder


def test_what_is_asked_of_it_is_answered(remote: RemoteEngine) -> None:
    reply = remote.generate(PROMPT, max_tokens=5, ignore_eos=True, cache_namespace="bob")
    assert remote.recent(1, tenant="bob")[0].request_id == reply.request_id
    assert remote.num_sequences == (0, 0)
    assert remote.counters().num_steps > 0
    name = remote.snapshot("bob").conversations[0].name
    assert remote.pin_conversation(name, cache_namespace="bob") > 0
    remote.unpin_conversation(name, cache_namespace="bob")
    again = remote.generate(PROMPT, max_tokens=1, cache_namespace="bob")
    assert again.usage.cached_tokens == len(PROMPT) - 1
    assert remote.drop_conversation(name, cache_namespace="bob") >= 0
    assert remote.generate(PROMPT, max_tokens=1, cache_namespace="bob").usage.cached_tokens == 0
    assert remote.forget_sequence(PROMPT[:-1], cache_namespace="bob") >= 0
    assert remote.forget("bob") >= 0
    assert not remote.settle(1.0) or remote.disk.report().state == "off"
    assert remote.memory().kv_used_bytes == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "kind", "said"),
    [
        (PROMPT, {"colour": "red"}, InvalidRequest, "colour"),
        (PROMPT, {"temperature": -1}, InvalidRequest, "temperature is -1"),
        (PROMPT, {"grammar": "start: ("}, InvalidRequest, "grammar"),
        ([], {}, InvalidRequest, "empty|no tokens"),
        ([5] * 600, {}, PromptTooLong, "600 tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_same_error(
    here: Engine, remote: RemoteEngine, prompt: list[int], sampling: Any, kind: type, said: str
) -> None:
    errors = []
    for engine in (here, remote):
        with pytest.raises(kind, match=said) as raised:
            events_of(engine, [prompt], **sampling)
        errors.append(raised.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]) == str(errors[1])


@pytest.mark.parametrize(
    "sampling", [LONG, {**LONG, "grammar": "start: /.{1,400}/"}], ids=["plain", "grammar"]
)
def test_closing_the_iterator_ends_the_request(remote: RemoteEngine, sampling: dict[str, Any]) -> None:
    async def begin(num_events: int) -> None:
        async with aclosing(remote.astream(PROMPT, **sampling)) as events:
            for _ in range(num_events):
                await anext(events)

    async def cancelled() -> None:
        task = asyncio.create_task(begin(100_000))
        await asyncio.sleep(0.001)  # the grammar may be compiled at this moment
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    before = remote.counters().ended["length"]
    asyncio.run(begin(3))
    asyncio.run(cancelled())
    deadline = time.monotonic() + 60
    while remote.num_sequences != (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert remote.counters().ended["length"] == before


def test_what_is_not_offered_cannot_be_called(remote: RemoteEngine) -> None:
    with pytest.raises(AttributeError, match="close"):
        remote._ask("close")
    remote.check()


def test_what_cannot_be_loaded_is_told_as_here(folder: str) -> None:
    with pytest.raises(InvalidRequest, match="much"):
        RemoteEngine(folder, kv_memory="much")


def test_when_its_process_is_killed_everybody_is_told(folder: str) -> None:
    engine = RemoteEngine(folder, **SETTINGS)

    async def read() -> list[str]:
        async def one(events: AsyncIterator[Event]) -> str:
            with pytest.raises(EngineStopped) as raised:
                async for event in events:
                    if isinstance(event, Delta) and len(begun) < 3:
                        begun.add(id(events))
                    if len(begun) == 3:
                        os.kill(engine.process_id, signal.SIGKILL)
            return str(raised.value)

        begun: set[int] = set()
        streams = [engine.astream(PROMPT[number:], **LONG) for number in range(3)]
        return list(await asyncio.gather(*map(one, streams)))

    said = asyncio.run(read())
    assert len(set(said)) == 1
    assert "was ended by SIGKILL" in said[0]
    for ask in (engine.check, engine.memory, lambda: engine.generate(PROMPT, max_tokens=1)):
        with pytest.raises(EngineStopped, match="SIGKILL"):
            ask()
    engine.close()
    engine.close()
