"""The client of `octavo bench chat`: conversations over HTTP, and what they measured."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from octavo.cli.bench_workloads import Figure
from octavo.errors import EngineError

_WORDS = (
    "river",
    "stone",
    "window",
    "music",
    "garden",
    "letter",
    "winter",
    "bridge",
    "market",
    "silver",
    "paper",
    "morning",
    "forest",
    "island",
    "coffee",
    "number",
    "travel",
    "mirror",
    "candle",
    "engine",
)
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """`model` None takes the first that a server lists; `words` are of each message of the user."""

    model: str | None
    turns: int
    words: int
    max_tokens: int
    ignore_eos: bool


@dataclass(slots=True)
class Turn:
    """What one answer took. `cached_tokens` is None where the server does not tell."""

    number: int
    first_token_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class ChatFigure:
    """One server with one number of conversations at once."""

    server: str
    chats: int
    tokens_per_s: Figure
    turns: tuple[Turn, ...]

    @property
    def first_ms(self) -> float:
        """The median first-token time of first turns."""
        return statistics.median(turn.first_token_s for turn in self.turns if turn.number == 1) * 1e3

    @property
    def later_ms(self) -> float | None:
        """The same of all other turns."""
        later = [turn.first_token_s for turn in self.turns if turn.number > 1]
        return statistics.median(later) * 1e3 if later else None

    @property
    def cached_share(self) -> float | None:
        """Cached tokens of later turns, of those that the turn before had read or written."""
        cached = [turn.cached_tokens for turn in self.turns if turn.number > 1]
        known = [
            before.prompt_tokens + before.completion_tokens
            for before, turn in zip(self.turns, self.turns[1:], strict=False)
            if turn.number > 1
        ]
        told = [number for number in cached if number is not None]
        return sum(told) / sum(known) if told and len(told) == len(known) else None

    def as_dict(self) -> dict[str, object]:
        return {
            "server": self.server,
            "chats": self.chats,
            "tokens_per_s": self.tokens_per_s.as_dict(),
            "first_token_ms_turn_1": self.first_ms,
            "first_token_ms_later": self.later_ms,
            "cached_share": self.cached_share,
        }


@dataclass(slots=True)
class _Found:
    rates: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


async def measure(
    servers: dict[str, str],
    chats: Sequence[int],
    settings: ChatSettings,
    repeats: int,
    progress: Callable[[str], None],
) -> list[ChatFigure]:
    """Measures every server with every number of conversations; within a round the servers take turns.

    Raises:
        EngineError: a server cannot be reached or refuses; the message has what it said.
    """
    found: dict[tuple[int, str], _Found] = {(number, name): _Found() for number in chats for name in servers}
    async with _client(max(chats)) as client:
        models = {name: settings.model or await _first_model(client, url) for name, url in servers.items()}
        for number in range(repeats + 1):  # the first round warms up
            for (together, name), figure in found.items():
                one = _Conversations(client, servers[name], models[name], settings)
                rate, turns = await one.run(together, f"{number} {together}")
                if number:
                    figure.rates.append(rate)
                    figure.turns += turns
                progress(f"round {number}: {name}, {together} chats: {rate:.1f} tok/s")
    return [
        ChatFigure(name, number, Figure(f"{number} chats", "tok/s", tuple(figure.rates)), tuple(figure.turns))
        for (number, name), figure in found.items()
    ]


async def measure_once(url: str, chats: int, settings: ChatSettings, seed: str) -> tuple[float, list[Turn]]:
    """Output tokens a second of so many conversations at once with one server, and their turns; raises as `measure`."""
    async with _client(chats) as client:
        model = settings.model or await _first_model(client, url)
        return await _Conversations(client, url, model, settings).run(chats, seed)


def _client(num_connections: int) -> httpx2.AsyncClient:
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # A new connection each time: servers close those that have been idle, some of them just when they are used again.
    limits = httpx2.Limits(max_connections=num_connections, max_keepalive_connections=0)
    return httpx2.AsyncClient(headers=headers, timeout=_PATIENCE_S, limits=limits)


async def _first_model(client: httpx2.AsyncClient, url: str) -> str:
    try:
        reply = await client.get(f"{url}/v1/models")
        return str(reply.raise_for_status().json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{url}/v1/models does not list a model: {error}. Is the server up?") from error


@dataclass(frozen=True, slots=True)
class _Conversations:
    client: httpx2.AsyncClient
    url: str
    model: str
    settings: ChatSettings

    async def run(self, together: int, seed: str) -> tuple[float, list[Turn]]:
        """Output tokens a second of that many conversations at once, and their turns."""
        start = time.perf_counter()
        each = await asyncio.gather(*(self._chat(f"{seed} {index}") for index in range(together)))
        seconds = time.perf_counter() - start
        turns = [turn for chat in each for turn in chat]
        return sum(turn.completion_tokens for turn in turns) / seconds, turns

    async def _chat(self, seed: str) -> list[Turn]:
        drawn = random.Random(seed)
        messages: list[dict[str, str]] = []
        turns = []
        for number in range(1, self.settings.turns + 1):
            text = " ".join(drawn.choices(_WORDS, k=self.settings.words))
            messages.append({"role": "user", "content": f"Tell a story with these words: {text}"})
            answer, turn = await self._turn(messages, number)
            messages.append({"role": "assistant", "content": answer})
            turns.append(turn)
        return turns

    async def _turn(self, messages: list[dict[str, str]], number: int) -> tuple[str, Turn]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.settings.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.settings.ignore_eos:
            body["ignore_eos"] = True
        parts: list[str] = []
        first: float | None = None
        usage: dict[str, Any] = {}
        start = time.perf_counter()
        try:
            async with self.client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as reply:
                if reply.is_error:
                    said = (await reply.aread()).decode(errors="replace")[:500]
                    raise EngineError(f"{self.url} answered {reply.status_code}: {said}")
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices", ()):
                        text = choice.get("delta", {}).get("content")
                        if text:
                            first = first or time.perf_counter() - start
                            parts.append(text)
        except (httpx2.HTTPError, ValueError) as error:
            raise EngineError(f"{self.url} failed in turn {number}: {error!r}.") from error
        if "completion_tokens" not in usage:
            raise EngineError(f"{self.url} does not tell usage, without which tokens cannot be counted.")
        details = usage.get("prompt_tokens_details") or {}
        seconds = first if first is not None else time.perf_counter() - start
        return "".join(parts), Turn(
            number, seconds, usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens")
        )
