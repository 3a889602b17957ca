"""Requests from a file, answered without a network: the lines of OpenAI's batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx2
from starlette.types import ASGIApp

from octavo.errors import InvalidRequest

_JSON = {"content-type": "application/json"}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch. `custom_id` names it in the output."""

    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def order(self) -> str:
        """Sorts requests with the same beginning next to each other."""
        body = self.body
        prompt = [body.get(name) for name in ("system", "instructions", "messages", "prompt", "input")]
        return json.dumps([self.url, body.get("tools"), prompt])


def read_batch(path: Path) -> list[BatchLine]:
    """The requests of a file, a JSON object a line with `custom_id`, `url` and `body`.

    Raises:
        InvalidRequest: the file cannot be read, or a line is something else; the message has its number.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The batch {path} cannot be read: {error}.") from error
    lines: dict[str, BatchLine] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            found = BatchLine(value["custom_id"], value["url"], value["body"])
            right = isinstance(found.custom_id, str) and isinstance(found.body, dict) and found.url in PATHS
        except (ValueError, KeyError, TypeError, RecursionError):
            right = False
        if not right:
            raise InvalidRequest(
                f"Line {number} of {path} is no request. Write an object with custom_id, url (one of "
                f"{', '.join(PATHS)}) and body."
            )
        if found.custom_id in lines:
            raise InvalidRequest(
                f"Line {number} of {path} has the custom_id {found.custom_id!r} a second time."
            )
        for name, what in (("stream", "a stream"), ("background", "an answer in the background")):
            if found.body.get(name):
                raise InvalidRequest(f"Line {number} of {path} asks for {what}, which a file cannot hold.")
        lines[found.custom_id] = found
    return list(lines.values())


def answered(path: Path) -> set[str]:
    """The requests that a file of answers has already.

    Errors are taken out of the file, so that those requests are tried again, and a last line that was cut off.

    Raises:
        InvalidRequest: the file is something else.
    """
    if not path.exists():
        return set()
    data = path.read_bytes()
    good, done = [], set()
    try:
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            answer = json.loads(line)
            if answer["response"]["status_code"] == 200:
                good.append(line)
                done.add(answer["custom_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"{path} is there and has no answers of a batch in it. Name another file with --output."
        ) from error
    if len(kept := b"".join(good)) < len(data):
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(kept)
        new.replace(path)
    return done


async def answer_batch(
    app: ASGIApp,
    lines: Sequence[BatchLine],
    output: TextIO,
    *,
    max_running: int,
    told: Callable[[int, bool], None],
) -> int:
    """Answers requests, those with the same beginning one after the other, each on a line as soon as it is there.

    Args:
        output: is written to and flushed after every line.
        max_running: requests at once.
        told: called with how many are answered, and whether the last one was.

    Returns:
        How many got an error for an answer.
    """
    waiting = iter(sorted(lines, key=lambda line: line.order))
    num_done = num_failed = 0
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:

        async def work(source: Iterator[BatchLine]) -> None:
            nonlocal num_done, num_failed
            for line in source:
                content = json.dumps(line.body).encode()  # odd values are the server's to refuse
                reply = await client.post(line.url, content=content, headers=_JSON)
                good = reply.status_code == 200
                response = {
                    "status_code": reply.status_code,
                    "request_id": reply.headers["x-request-id"],
                    "body": reply.json(),
                }
                answer = {"id": reply.headers["x-request-id"], "custom_id": line.custom_id}
                output.write(json.dumps({**answer, "response": response, "error": None}) + "\n")
                output.flush()
                num_done += 1
                num_failed += not good
                told(num_done, good)

        async with asyncio.TaskGroup() as group:
            for _ in range(max_running):
                group.create_task(work(waiting))
    return num_failed
