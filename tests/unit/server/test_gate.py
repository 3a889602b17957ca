"""Limits and names that the gate goes by."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from octavo.errors import InvalidRequest
from octavo.server.background import Background
from octavo.server.gate import Gate, Rates, is_loopback
from octavo.server.problems import Problem
from octavo.server.settings import ServerSettings
from octavo.server.tenants import METRICS, NOBODY, Keys


def test_a_tenant_has_a_minutes_worth_which_fills_steadily(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rates = Rates(6)
    for _ in range(6):
        rates.take("ada")
    with pytest.raises(Problem) as caught:
        rates.take("ada")
    assert caught.value.status == 429
    assert caught.value.headers == {"Retry-After": "10"}
    rates.take("bob")  # who has a bucket of his own
    now += 10.5
    rates.take("ada")
    with pytest.raises(Problem):
        rates.take("ada")
    now += 1000
    for _ in range(6):  # it never holds more than a minute's worth
        rates.take("ada")
    with pytest.raises(Problem):
        rates.take("ada")


def test_without_a_limit_nothing_is_counted() -> None:
    rates = Rates(None)
    for _ in range(10_000):
        rates.take("ada")


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.com", False),
        ("10.0.0.1", False),
        ("localhost.evil", False),
    ],
)
def test_which_names_are_this_machine(name: str, own: bool) -> None:
    assert is_loopback(name) is own


def test_keys_are_found_by_their_hash_and_only_whole() -> None:
    keys = Keys(["secret-one", "secret-two"], metrics_key="secret-three")
    one, two = keys.find("secret-one"), keys.find("secret-two")
    assert one is not None
    assert two is not None
    assert one.namespace != two.namespace
    assert keys.find("secret-three") is METRICS
    assert keys.find("secret-on") is None
    assert keys.find("") is None
    assert keys.find("\udcff") is None
    assert "secret" not in repr(vars(keys))
    assert Keys().tenants == [NOBODY]
    assert {tenant.namespace for tenant in keys.tenants} == {one.namespace, two.namespace}
    with pytest.raises(InvalidRequest, match="empty"):
        Keys([" "])


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70_000},
        {"max_body_bytes": 0},
        {"max_requests": 0},
        {"drain_s": -1},
        {"requests_per_minute": 0},
    ],
)
def test_settings_are_checked(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidRequest, match=name):
        ServerSettings(**wrong)


class Gated:
    """A gate in front of an application that tells the size of its body. `sent` are the statuses of answers."""

    def __init__(self, **settings: Any) -> None:
        self.sent: list[int] = []
        self.background = Background()
        self.gate = Gate(self._app, ServerSettings(**settings), Keys(["secret"]), dict, self.background)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200 + len(body), "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, path: str, *pieces: bytes, method: str = "GET", ends: bool = False) -> None:
        """Sends a request with a body or, unless it `ends`, with the beginning of one whose rest never comes."""
        coming = list(pieces)

        async def receive() -> Message:
            if not coming:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": coming.pop(0), "more_body": bool(coming) or not ends}

        async def send(message: Message) -> None:
            self.sent += [message["status"]] if "status" in message else []

        headers = [(b"authorization", b"Bearer secret")]
        await self.gate({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)


@pytest.mark.parametrize("path", ["/health", "/", "/dashboard/assets/page.css"])
def test_what_is_open_to_all_takes_no_place_and_no_body(path: str) -> None:
    async def ask() -> list[int]:
        gated = Gated(max_requests=1)
        waiting = asyncio.create_task(gated.ask("/v1/models"))  # it has the only place
        await asyncio.sleep(0)
        await asyncio.wait_for(gated.ask(path, b"four"), 5)
        assert gated.gate.num_open == 1
        waiting.cancel()
        return gated.sent

    assert asyncio.run(ask()) == [200]


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.server.gate._PIECE_S", 0.05)
    gated = Gated()
    asyncio.run(asyncio.wait_for(gated.ask("/v1/models", b"fo"), 5))
    assert gated.sent == [408]
    assert gated.gate.num_open == 0


def test_what_is_made_in_the_background_takes_places_and_can_be_looked_at_and_ended() -> None:
    async def ask() -> list[int]:
        gated = Gated(max_requests=2)
        task = gated.background.start(asyncio.sleep(60))
        await gated.ask("/v1/responses", b"", method="POST", ends=True)
        gated.background.start(asyncio.sleep(60))
        await gated.ask("/v1/responses", b"", method="POST", ends=True)
        await gated.ask("/v1/responses/resp_1", b"", ends=True)
        await gated.ask("/v1/responses/resp_1/cancel", b"", method="POST", ends=True)
        task.cancel()
        await asyncio.wait([task])
        await gated.ask("/v1/responses", b"", method="POST", ends=True)
        return gated.sent

    assert asyncio.run(ask()) == [200, 429, 200, 200, 200]
