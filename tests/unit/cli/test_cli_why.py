"""`octavo why` and /why: what is printed of a record, and what is said when there is none."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.cli.why import lines
from octavo.engine.journal import RequestRecord
from octavo.engine.messages import Difference, Timings, Usage, Why

WHY = Why(
    "changed_token", 32, 18, "It differs.", 0.25, Difference(50, 'said "a"\n', "one way", "\x1b[31mother")
)
RECORD = RequestRecord(
    "r", "toy", "ada", 1e9, "stop", Usage(80, 32, 48, 7, 12), Timings(0.0, 0.03, 0.041, 0.5, 58.2), WHY
)


class FakeServer(http.server.BaseHTTPRequestHandler):
    """Answers with `body` and `status`, and notes the requests."""

    status = 200
    body: Any = None
    seen: list[tuple[str, str | None]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Authorization"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps(self.body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    FakeServer.seen, FakeServer.status = [], 200
    FakeServer.body = {"object": "list", "data": [RECORD.as_dict()]}
    with http.server.HTTPServer(("127.0.0.1", 0), FakeServer) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}"
        listener.shutdown()


def test_a_record_for_a_person() -> None:
    head, *rest = lines(RECORD.as_dict())
    assert head[8:] == (
        "  toy  32 of 80 prompt tokens reused (20 from memory, 12 from disk) · 48 computed · first token 41 ms · 7 tokens"
    )
    assert rest == [
        "  changed_token: It differs.",
        '    earlier  …said \\"a\\"\\n | one way…',
        '    now      …said \\"a\\"\\n | \\u001b[31mother…',
        "    cost     about 250 ms",
    ]


def test_nothing_more_could_be_reused() -> None:
    record = {**RECORD.as_dict(), "why": None, "memory_tokens": 0, "disk_tokens": 0}
    assert lines(record)[0][8:].startswith("  toy  0 of 80 prompt tokens reused · 48 computed")
    assert lines(record)[1:] == ["  Everything that was known was reused."]


def test_a_server_is_asked(program, server, monkeypatch) -> None:
    result = program("why", "--url", server, "-n", "3")
    assert (result.code, result.err) == (0, "")
    assert "changed_token: It differs." in result.out
    monkeypatch.setenv("OCTAVO_API_KEY", "mine other")
    result = program("why", "--url", server + "/", "--json")
    assert json.loads(result.out) == RECORD.as_dict()
    assert FakeServer.seen == [
        ("/v1/octavo/requests?limit=3", None),
        ("/v1/octavo/requests?limit=5", "Bearer mine"),
    ]
    FakeServer.body = {"data": []}
    assert program("why", "--url", server).out == "No request has finished yet.\n"


def test_what_goes_wrong_is_a_sentence(program, server) -> None:
    FakeServer.status = 401
    result = program("why", "--url", server)
    assert (result.code, result.err) == (
        2,
        f"The server at {server} wants a key. Set OCTAVO_API_KEY to one that it accepts.\n",
    )
    for FakeServer.status, FakeServer.body in ((404, {}), (200, []), (200, {"data": [3]})):
        result = program("why", "--url", server)
        assert result.code == 1
        assert result.err.endswith("Is it Octavo's server?\n")
    result = program("why", "--url", "http://127.0.0.1:1")
    assert result.code == 1
    assert "No server answers at http://127.0.0.1:1" in result.err
    for url in ("nowhere", "ftp://host"):
        result = program("why", "--url", url)
        assert (result.code, "Write http://HOST:PORT." in result.err) == (2, True)


def test_a_chat_tells_it_too(program) -> None:
    program.engine.answers, program.engine.records = ["Hi."], []
    program.stdin = "/why\nHello\n/why 2\n"
    asked = []

    def recent(limit: int, *, tenant: str) -> list[RequestRecord]:
        assert tenant == ""
        asked.append(limit)
        return [RECORD] * len(program.engine.prompts)

    program.engine.recent = recent
    result = program("chat", "toy")
    assert "No answer has been given yet." in result.err
    assert "changed_token: It differs." in result.err
    assert asked == [1, 2]
    program.stdin = "/why much\n"
    assert program("chat", "toy").code == 2
