"""Answers over HTTP: JSON, and streams of events that end when the client goes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.messages import Progress
from octavo.server.gate import Visit
from octavo.server.log import log
from octavo.server.problems import Problem, problem_of

T = TypeVar("T")


def visit_of(request: Request) -> Visit:
    """What the gate knows of a request."""
    visit: Visit = request.scope["state"]["visit"]
    return visit


def json_bytes(value: Any) -> bytes:
    """Compact JSON in ASCII, which holds also what is not valid Unicode."""
    return json.dumps(value, separators=(",", ":")).encode()


class JsonReply(Response):
    """A body of JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


class ClientGone(Exception):
    """The client has closed the connection, so nobody waits for the answer."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client closes the connection.

    Raises:
        ClientGone: it has.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, watch)


class EventStream(Response):
    """Server-sent events. Made by `event_stream`.

    Args:
        first: what is known already.
        rest: the remaining pieces; closed at the end, and when the client goes.
        failed: the event that tells of an error in the middle.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], failed: Callable[[Problem], bytes]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._first = first
        self._rest = rest
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(scope, send))
        watch = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({writing, watch}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            else:
                scope["state"]["visit"].fields["gone"] = True
        finally:
            await _cancel(writing, watch)
            await self._rest.aclose()

    async def _write(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        send = scope["state"]["visit"].send
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for piece in self._rest:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            problem = problem_of(error)
            scope["state"]["visit"].fields["code"] = problem.code
            if problem.status == 500:
                log(
                    "stream failed", logging.ERROR, error=error, request_id=scope["state"]["visit"].request_id
                )
            await send({"type": "http.response.body", "body": self._failed(problem), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def event_stream(
    request: Request, pieces: AsyncGenerator[bytes, None], failed: Callable[[Problem], bytes]
) -> EventStream:
    """A stream that has begun: what goes wrong before its first piece is still an error with a status.

    Raises:
        Exception: what the first piece raises; `ClientGone` when nobody waits for it any more.
    """
    try:
        first = await unless_gone(request, anext(pieces))
    except BaseException:
        await pieces.aclose()
        raise
    return EventStream(first, pieces, failed)


def sse(data: bytes, event: str | None = None) -> bytes:
    """One event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def sse_progress(progress: Progress) -> bytes:
    """A comment, which clients pass over, so that the connection is not idle while a prompt is read."""
    return f": read {progress.num_computed_tokens} of {progress.num_prompt_tokens} tokens\n\n".encode()


def sse_json(value: Mapping[str, Any], event: str | None = None) -> bytes:
    return sse(json_bytes(value), event)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
