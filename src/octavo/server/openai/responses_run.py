"""Making a response: its object, and the events that tell how it grows."""

from __future__ import annotations

import copy
import time
from array import array
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from octavo.engine.messages import Progress
from octavo.server.chat.answer import (
    Answer,
    ArgumentsPiece,
    Asked,
    BeginPiece,
    CallPiece,
    Ending,
    EndPiece,
    ReplyPiece,
    TextPiece,
)
from octavo.server.chat.messages import ChatMessage
from octavo.server.gate import Visit
from octavo.server.models import Model
from octavo.server.openai.kept import Trace
from octavo.server.openai.responses_convert import new_id
from octavo.server.openai.responses_schema import NamedFunction, ResponseRequest
from octavo.server.openai.schema import logprobs_of
from octavo.server.problems import Problem
from octavo.server.report import note_reply, report_field

Event = dict[str, Any]


class ResponseRun:
    """One response being made.

    Attributes:
        response: the object, as far as it has got.
        trace: of the answer, when it has ended.
    """

    def __init__(
        self, model: Model, body: ResponseRequest, visit: Visit, conversation_id: str | None
    ) -> None:
        self._model = model
        self._body = body
        self._visit = visit
        self._number = -1
        self._answer = Answer(0)
        self.trace: Trace | None = None
        self._item: dict[str, Any] | None = None  # the output item that grows
        text_format: dict[str, Any] = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            text_format = body.text.format.model_dump(by_alias=True)
        choice = body.tool_choice or "auto"
        self.response: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "queued" if body.background else "in_progress",
            "background": bool(body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "conversation": None if conversation_id is None else {"id": conversation_id},
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "text": {"format": text_format},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "truncation": "disabled",
            "usage": None,
            "metadata": body.metadata or {},
            "store": body.store is not False,
        }

    @property
    def message(self) -> ChatMessage:
        """The whole answer, when it has ended."""
        return ChatMessage("assistant", self._answer.text, tuple(self._answer.calls))

    async def events(self, asked: Asked) -> AsyncGenerator[Event, None]:
        """Makes the response. The last event has the finished object, unless it fails, which is raised."""
        yield self._told("response.created")
        self.response["status"] = "in_progress"
        yield self._told("response.in_progress")
        async with aclosing(asked.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Progress | BeginPiece):
                    continue
                if isinstance(piece, ReplyPiece):
                    (self._answer,) = piece.answers
                    for event in self._finished(piece):
                        yield event
                    return
                for event in self._grown(piece):
                    yield event

    def failed(self, problem: Problem) -> Event:
        """The event that tells of a failure; the object tells of it too."""
        code = "server_error" if problem.status >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": problem.message}}
        return self._told("response.failed")

    def _grown(self, piece: TextPiece | CallPiece | ArgumentsPiece | EndPiece) -> Iterator[Event]:
        if isinstance(piece, TextPiece):
            if self._item is None or self._item["type"] != "message":
                yield from self._close("completed")
                yield from self._open_message()
            part = self._part()
            part["text"] += piece.text
            logprobs = self._logprobs(piece)
            part["logprobs"] += logprobs
            yield self._event(
                "response.output_text.delta",
                **self._place(),
                content_index=0,
                delta=piece.text,
                logprobs=logprobs,
            )
        elif isinstance(piece, CallPiece):
            yield from self._close("completed")
            self._item = {
                "id": new_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": piece.id,
                "name": piece.name,
                "arguments": "",
            }
            yield self._added()
        elif isinstance(piece, ArgumentsPiece):
            assert self._item is not None
            self._item["arguments"] += piece.text
            yield self._event("response.function_call_arguments.delta", **self._place(), delta=piece.text)
        else:
            yield from self._close("incomplete" if piece.ending == "length" else "completed")

    def _open_message(self) -> Iterator[Event]:
        self._item = {
            "id": new_id("msg"),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        yield self._added()
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._item["content"].append(part)
        yield self._event(
            "response.content_part.added", **self._place(), content_index=0, part=copy.deepcopy(part)
        )

    def _close(self, status: str) -> Iterator[Event]:
        item = self._item
        if item is None:
            return
        item["status"] = status
        place = self._place()
        if item["type"] == "message":
            part = self._part()
            shown = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **place, content_index=0, **shown)
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        else:
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **named)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)
        self.response["output"].append(item)
        self._item = None

    def _finished(self, end: ReplyPiece) -> Iterator[Event]:
        if not self.response["output"]:  # an answer without a word is a message still
            yield from self._open_message()
            yield from self._close("completed")
        usage = end.reply.usage
        ids = array("i", (*end.prompt.ids, *end.reply.token_ids))
        self.trace = Trace(self._model.name, ids, end.keys)
        ending: Ending = self._answer.ending
        self.response |= {
            "status": "incomplete" if ending == "length" else "completed",
            "completed_at": None if ending == "length" else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if ending == "length" else None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        self.response |= report_field(self._body.octavo, end.reply, end.prompt)
        note_reply(self._visit, self._model.name, end.reply, end.prompt)
        yield self._told(f"response.{self.response['status']}")

    def _part(self) -> dict[str, Any]:
        assert self._item is not None
        part: dict[str, Any] = self._item["content"][0]
        return part

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.response["output"])}

    def _added(self) -> Event:
        item = copy.deepcopy(self._item)
        return self._event("response.output_item.added", output_index=len(self.response["output"]), item=item)

    def _logprobs(self, piece: TextPiece) -> list[dict[str, Any]]:
        return logprobs_of(self._model.texts, piece.logprobs)["content"] if piece.logprobs else []

    def _told(self, kind: str) -> Event:
        return self._event(kind, response=copy.deepcopy(self.response))

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}
