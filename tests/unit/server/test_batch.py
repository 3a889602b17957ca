"""Batches: files of requests and answers, and the order of work, with an application that only notes."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.server.batch import BatchLine, answer_batch, answered, read_batch

CHAT = "/v1/chat/completions"


def line(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(text if isinstance(text, str) else json.dumps(text) + "\n" for text in lines))
    return path


def test_requests_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", line("a", messages=[1]), "\n", line("b"))
    assert read_batch(path) == [BatchLine("a", CHAT, {"messages": [1]}), BatchLine("b", CHAT, {})]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{\n", "Line 2 .* no request"),
        ([1], "Line 2 .* no request"),
        ({"custom_id": 5, "url": CHAT, "body": {}}, "Line 2 .* no request"),
        ({"custom_id": "b", "url": "/v1/models", "body": {}}, "Line 2 .* no request"),
        (line("a"), "a second time"),
        (line("b", stream=True), "stream"),
        (line("b", background=True), "background"),
    ],
)
def test_a_wrong_line_is_told_by_its_number(tmp_path: Path, wrong: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_batch(write(tmp_path / "in.jsonl", line("a"), wrong))


def test_a_line_ends_where_json_says(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(
        json.dumps(line("a", prompt="x\u2028y\x85z"), ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert read_batch(path)[0].body == {"prompt": "x\u2028y\x85z"}


def test_answers_that_are_there_are_known_and_errors_and_half_a_line_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert answered(path) == set()
    good, bad = ({"response": {"status_code": status}} for status in (200, 503))
    write(
        path,
        {"custom_id": "a", **good},
        {"custom_id": "b", **bad},
        {"custom_id": "c", **good},
        '{"custom_id": "d',
    )
    assert answered(path) == {"a", "c"}
    assert [json.loads(text)["custom_id"] for text in path.read_text().splitlines()] == ["a", "c"]
    with pytest.raises(InvalidRequest, match="no answers"):
        answered(write(tmp_path / "other.txt", "some text\n"))


def test_odd_text_is_the_server_s_to_refuse() -> None:
    bodies = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append(json.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": 400, "headers": [(b"x-request-id", b"r")]})
        await send({"type": "http.response.body", "body": b"{}"})

    lines = [BatchLine("a", CHAT, {"x": "\ud800"}), BatchLine("b", CHAT, {"x": float("inf")})]
    told = lambda *_: None  # noqa: E731
    assert asyncio.run(answer_batch(app, lines, io.StringIO(), max_running=1, told=told)) == 2
    assert bodies == [lines[0].body, lines[1].body]


def test_requests_that_begin_alike_come_one_after_the_other() -> None:
    came = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        came.append(body["messages"][0])
        status = 400 if body["messages"][0] == "b1" else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-request-id", b"r")]})
        await send({"type": "http.response.body", "body": b'{"x": 1}'})

    lines = [BatchLine(name, CHAT, {"messages": [name]}) for name in ("b2", "a1", "b1", "a2")]
    output, told = io.StringIO(), []
    failed = asyncio.run(
        answer_batch(app, lines, output, max_running=1, told=lambda number, good: told.append((number, good)))
    )
    assert came == ["a1", "a2", "b1", "b2"]
    assert failed == 1
    assert told == [(1, True), (2, True), (3, False), (4, True)]
    answers = [json.loads(text) for text in output.getvalue().splitlines()]
    assert [answer["custom_id"] for answer in answers] == came
    assert answers[2]["response"] == {"status_code": 400, "request_id": "r", "body": {"x": 1}}
