"""An engine that says what a test tells it, with a token a character, and the program run in this process."""

from __future__ import annotations

import io
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from octavo.cli import load, main
from octavo.config import SamplingParams
from octavo.engine.messages import (
    Choice,
    Delta,
    Event,
    FinishReason,
    MemoryReport,
    Progress,
    Reply,
    Timings,
    TokenLogprob,
    Usage,
    Why,
)
from octavo.errors import PromptTooLong
from octavo.models.loaded import Source
from octavo.sessions.conversation import Conversation
from octavo.sessions.template import ChatTemplate

END = "\x04"  # ends a turn


class CharTokenizer:
    """Each character is its own id. `chat_template` may be None."""

    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
    bos_token = None
    bos_token_id = None

    def __init__(self, chat_template: str | None = "chat") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(id_) for id_ in ids)

    def get_vocab(self) -> dict[str, int]:
        return {"a": 97}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"{m['role'][0]}:{m['content']}{END}" for m in messages) + "a:"


class ScriptedEngine:
    """Answers each prompt with the next of `answers`: text, or an exception that is raised instead.

    `before_token(n)` is called before the n-th token of an answer is made.
    """

    name = "toy"
    notices: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.context = 2000
        self.tokenizer = CharTokenizer()
        self.answers: list[str | BaseException] = []
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.why: Why | None = None
        self.notes: tuple[str, ...] = ()
        self.before_token: Callable[[int], None] = lambda _: None
        self.follows_aborts = True
        self.num_clears = 0
        self.is_closed = False
        self._aborted = False

    @property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, {ord(END)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def conversation(self, **options: Any) -> Conversation:
        return Conversation(self, **options)

    def restore(self, data: Any, **sampling: Any) -> Conversation:
        return Conversation.from_dict(self, data, **sampling)

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **sampling: Any
    ) -> Iterator[Event]:
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        params = params or SamplingParams(**sampling)
        if len(text) >= self.context:
            raise PromptTooLong(len(text), self.context)
        self.prompts.append(text)
        self.params.append(params)
        self._aborted = False
        return self._events(len(text), params)

    def _events(self, num_prompt: int, params: SamplingParams) -> Iterator[Event]:
        answer = self.answers.pop(0)
        yield Progress("r", num_prompt // 2, num_prompt)
        text = answer if isinstance(answer, str) else "part"
        said = ""
        for character in text:
            self.before_token(len(said))
            if self._aborted:
                yield self._last(said, num_prompt, "abort", params)
                return
            said += character
            if len(said) == params.max_tokens:
                yield Delta("r", 0, character, (ord(character),))
                yield self._last(said, num_prompt, "length", params)
                return
            yield Delta("r", 0, character, (ord(character),))
        if isinstance(answer, BaseException):
            raise answer
        yield self._last(said, num_prompt, "stop", params)

    def _last(self, said: str, num_prompt: int, reason: FinishReason, params: SamplingParams) -> Delta:
        ids = tuple(ord(character) for character in said)
        logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(TokenLogprob(id_, -0.5, ((id_, -0.5), (ord("z"), -float("inf")))) for id_ in ids)
        reply = Reply(
            "r",
            (Choice(0, said, ids, reason, None, logprobs),),
            Usage(num_prompt, num_prompt - 1, 1, len(said)),
            Timings(0.0, 0.03, 0.041, 0.5, 58.2),
            self.memory(),
            seed=7,
            why=self.why,
            notes=self.notes,
        )
        return Delta("r", 0, "", (), (), reason, reply)

    def abort(self, request_id: str) -> None:
        assert request_id == "r"
        self._aborted = self.follows_aborts

    def memory(self) -> MemoryReport:
        return MemoryReport(
            257 << 20,
            0,
            4 << 20,
            0 if self.num_clears else 12 << 20,
            1 << 30,
            46080,
            5 << 20,
            "int8",
            weights="Q4_1",
        )

    def clear(self) -> int:
        self.num_clears += 1
        return 12 << 20


class FakeStream(io.StringIO):
    """A standard stream that may claim to be a terminal."""

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, text: str = "", is_terminal: bool = False) -> None:
        super().__init__(text)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@dataclass
class Result:
    code: int
    out: str
    err: str


class Program:
    """The program `octavo` with a scripted engine. `stdin` is a terminal while it is None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.engine = ScriptedEngine()
        self.stdin: str | None = None
        self.is_terminal = False  # standard output and standard error

        def make_engine(model: str, *, progress: Any, **settings: Any) -> ScriptedEngine:
            progress("load", 1, 2)
            self.engine.settings = settings
            return self.engine

        monkeypatch.setattr(load, "make_engine", make_engine)
        monkeypatch.setattr(load.catalog, "resolve", lambda name: Source("folder", name, Path(name)))

    def __call__(self, *arguments: str) -> Result:
        out, err = FakeStream("", self.is_terminal), FakeStream("", self.is_terminal)
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", FakeStream(self.stdin or "", self.stdin is None))
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code = main.invoke(arguments)
        return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    for name in ("OCTAVO_DEBUG", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Program(monkeypatch)


@pytest.fixture
def plain() -> Callable[[str], str]:
    """Text without escape sequences."""
    return lambda text: re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.fixture(autouse=True)
def interrupts_work() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
