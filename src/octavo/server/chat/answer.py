"""Answers to messages, in pieces: text, calls, ends. Each interface writes the same pieces its own way."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from octavo.config import SamplingParams
from octavo.engine.messages import Choice, Delta, Progress, Reply, TokenLogprob
from octavo.errors import EngineStopped, InvalidRequest
from octavo.server.chat.messages import Call, ChatMessage, Tool
from octavo.server.chat.prompt import ChatHistory, Prompt
from octavo.server.models import Model
from octavo.server.schema import OctavoOptions
from octavo.server.tools.grammar import call_grammar, json_grammar
from octavo.server.tools.reader import ArgumentsText, CallBegun, CallReader, Read

Ending = Literal["stop", "length", "calls"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Whether and how tools are called. `choice` is a mode or, behind `name:`, the tool that has to be called."""

    choice: str = "auto"
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ChatJob:
    """What is asked of the model.

    Attributes:
        schema: the answer is JSON of this schema.
        prefill: the beginning of the answer, written by the caller.
        priority: how much what is computed is worth keeping, as in `Retention`.
        disk: whether what is computed, and the transcript of the answer, may be kept on disk.
        octavo: what only Octavo knows.
    """

    messages: Sequence[ChatMessage]
    params: SamplingParams
    namespace: str = ""
    tools: Sequence[Tool] = ()
    tool_use: ToolUse = field(default_factory=ToolUse)
    schema: Mapping[str, Any] | None = None
    strict_schema: bool = True
    prefill: str = ""
    priority: int = 0
    disk: bool = True
    octavo: OctavoOptions = field(default_factory=OctavoOptions)
    call_prefix: str = "call_"


@dataclass(frozen=True, slots=True)
class BeginPiece:
    """The first token has come, so it is known how many of the prompt's were reused. Sent once for all answers."""

    index: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More text of an answer. It may be empty where there are log-probabilities."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A call begins."""

    index: int
    number: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of a call's arguments."""

    index: int
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class EndPiece:
    """An answer has ended. `stop` is the caller's stop string that ended it."""

    index: int
    ending: Ending
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """All answers have ended; `answers` are in the order of their index, and `keys` the names of their transcripts."""

    reply: Reply
    prompt: Prompt
    answers: tuple[Answer, ...]
    keys: tuple[bytes, ...]


Piece = BeginPiece | TextPiece | CallPiece | ArgumentsPiece | EndPiece | ReplyPiece | Progress


@dataclass(slots=True)
class Answer:
    """One whole answer."""

    index: int
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending = "stop"
    stop: str | None = None

    def add(self, piece: Piece) -> None:
        """Takes up a piece of this answer."""
        if isinstance(piece, TextPiece):
            self.text += piece.text
            self.logprobs += piece.logprobs
        elif isinstance(piece, CallPiece):
            self.calls.append(Call(piece.id, piece.name, ""))
        elif isinstance(piece, ArgumentsPiece):
            call = self.calls[piece.number]
            self.calls[piece.number] = replace(call, arguments=call.arguments + piece.text)
        elif isinstance(piece, EndPiece):
            self.ending, self.stop = piece.ending, piece.stop


class Asked:
    """A job that has been made a prompt, ready to be answered.

    Making it renders and tokenises, which takes milliseconds: not for the event loop.

    Attributes:
        grammar: that the answer follows, if it follows one.

    Raises:
        InvalidRequest: the template refuses the messages, or the tools or the schema cannot be held to.
    """

    def __init__(self, model: Model, job: ChatJob) -> None:
        self._model = model
        self._job = job
        template = model.engine.chat_template
        self._tool_format = model.tool_format
        self._history = ChatHistory(
            job.messages,
            job.tools,
            template=template,
            tool_format=self._tool_format,
            namespace=job.namespace,
            scope=model.scope,
            store=model.transcripts if job.octavo.exact_history else None,
        )
        self.prompt = self._history.prompt(job.prefill)
        self._reads_calls = bool(job.tools) and job.tool_use.choice != "none"
        self.grammar = self._make_grammar()
        self._stop = set(job.params.stop)
        # Where there may be calls the engine does not look for the caller's stop strings, which could cut a call.
        stops = () if self._reads_calls else job.params.stop
        self._params = replace(job.params, stop=(*stops, *template.stop))

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Generates. Closing the iterator ends the request.

        Raises:
            InvalidRequest: the prompt does not fit; raised before the first piece.
        """
        options: dict[str, Any] = {
            "cache_namespace": self._job.namespace,
            "priority": self._job.priority,
            "disk": self._job.disk,
            **self._job.octavo.settings,
        }
        if self.grammar is not None:
            options["grammar"] = self.grammar
        if self._reads_calls:
            options["shown_specials"] = tuple(self._model.specials)
        answers: dict[int, Answer] = {}
        readers: dict[int, CallReader] = {}
        ended: set[int] = set()
        tokens: dict[int, int] = {}  # of each answer until it ended
        events = self._model.engine.astream(self.prompt.ids, self._params, **options)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Progress):
                    yield event
                    continue
                assert isinstance(event, Delta)
                if not answers:
                    yield BeginPiece(event.index, event.num_cached_tokens)
                answer = answers.setdefault(event.index, Answer(event.index))
                if event.index not in ended:
                    tokens[event.index] = tokens.get(event.index, 0) + len(event.token_ids)
                    found: list[Read] = [event.text] if event.text else []
                    stopped: str | None = None
                    if self._reads_calls:
                        reader = readers.setdefault(
                            event.index, CallReader(self._tool_format, self._job.params.stop)
                        )
                        found = reader.push(event.text)
                        if event.finish_reason is not None:
                            found += reader.finish()
                        stopped = reader.stopped
                    if event.logprobs and not any(isinstance(item, str) for item in found):
                        found.insert(0, "")
                    logprobs = event.logprobs
                    for item in found:
                        piece = self._piece(event.index, item, logprobs)
                        if isinstance(piece, TextPiece):
                            logprobs = ()
                        answer.add(piece)
                        yield piece
                    if event.finish_reason is not None or stopped is not None:
                        ended.add(event.index)
                        end = self._end(answer, event, stopped)
                        answer.add(end)
                        yield end
                        if event.reply is None and len(ended) == self._params.n:
                            self._model.engine.abort(event.request_id)
                if event.reply is not None:
                    stops = {index: reader.stopped for index, reader in readers.items()}
                    reply = _cut(event.reply, answers, tokens, stops)
                    keys = tuple(self._keep(answers[choice.index], choice) for choice in reply.choices)
                    in_order = tuple(answers[index] for index in sorted(answers))
                    yield ReplyPiece(reply, self.prompt, in_order, keys)
                    return
        raise EngineStopped("The engine ended the answer without a reply.")

    async def whole(self) -> ReplyPiece:
        """Generates to the end; raises as `pieces` does."""
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, ReplyPiece):
                    return piece
        raise AssertionError("pieces end with a reply or an error")

    def _piece(self, index: int, item: Read, logprobs: tuple[TokenLogprob, ...]) -> Piece:
        if isinstance(item, CallBegun):
            return CallPiece(index, item.number, f"{self._job.call_prefix}{secrets.token_hex(12)}", item.name)
        if isinstance(item, ArgumentsText):
            return ArgumentsPiece(index, item.number, item.text)
        return TextPiece(index, item, logprobs)

    def _end(self, answer: Answer, event: Delta, stopped: str | None) -> EndPiece:
        if stopped is not None:
            return EndPiece(answer.index, "stop", stopped)
        if event.finish_reason in ("length", "timeout"):
            return EndPiece(answer.index, "length")
        stop = event.stop if isinstance(event.stop, str) and event.stop in self._stop else None
        return EndPiece(answer.index, "calls" if answer.calls else "stop", stop)

    def _keep(self, answer: Answer, choice: Choice) -> bytes:
        message = ChatMessage("assistant", self._job.prefill + answer.text, tuple(answer.calls))
        return self._history.keep(self.prompt, message, choice.token_ids, choice.text, disk=self._job.disk)

    def _make_grammar(self) -> str | None:
        job, choice = self._job, self._job.tool_use.choice
        if not job.tools and choice not in ("auto", "none"):
            raise InvalidRequest(
                "tool_choice asks for a call, and there are no tools. Give tools, or leave it out."
            )
        if not self._reads_calls:
            return None if job.schema is None else json_grammar(job.schema, strict=job.strict_schema)
        tools = list(job.tools)
        if choice.startswith("name:"):
            tools = [tool for tool in tools if tool.name == choice.removeprefix("name:")]
            if not tools:
                raise InvalidRequest(
                    f"tool_choice names {choice.removeprefix('name:')!r}, which is none of the tools "
                    f"({', '.join(tool.name for tool in job.tools)})."
                )
        return call_grammar(
            tools,
            self._tool_format,
            self._model.specials,
            required=choice != "auto",
            parallel=job.tool_use.parallel and not choice.startswith("name:"),
            text_schema=job.schema,
        )


def _cut(
    reply: Reply, answers: Mapping[int, Answer], tokens: Mapping[int, int], stops: Mapping[int, str | None]
) -> Reply:
    """The reply as if the engine had found the stop strings in `stops`, without what it generated until it ended."""
    choices = []
    for choice in reply.choices:
        stop = stops.get(choice.index)
        if stop is not None:
            num = tokens[choice.index]
            choice = replace(
                choice,
                text=answers[choice.index].text,
                token_ids=choice.token_ids[:num],
                finish_reason="stop",
                stop=stop,
                logprobs=choice.logprobs and choice.logprobs[:num],
            )
        choices.append(choice)
    lengths = [sum(len(one.token_ids) for one in some) for some in (reply.choices, choices)]
    usage = replace(reply.usage, completion_tokens=reply.usage.completion_tokens - lengths[0] + lengths[1])
    return replace(reply, choices=tuple(choices), usage=usage)
