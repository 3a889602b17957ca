"""What every request passes first: an id, whose it is, whether it may come in, and a line in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.background import Background
from octavo.server.log import log
from octavo.server.metrics import Metrics
from octavo.server.problems import Problem, error_body, problem_of
from octavo.server.settings import ServerSettings
from octavo.server.tenants import METRICS, NOBODY, Keys, Tenant

if TYPE_CHECKING:
    from octavo.server.engines import ServedEngine

_OPEN_PATHS = frozenset({"/health", "/ready", "/", "/chat"})
_OPEN_FOLDER = "/dashboard/assets/"
"""Pages and what they are made of need no key: they tell nothing of anybody, and ask for the key themselves."""

_METRICS_PATHS = frozenset({"/metrics", "/dashboard/state", "/dashboard/events"})

_PIECE_S = 60.0
"""How long the next piece of a body may take."""


@dataclass(slots=True)
class Visit:
    """What is known of a request on its way; handlers add to `fields`, which go into the log.

    `send` is the connection's own, below all middleware, for the many small pieces of a stream's body. `releases` are
    called when the request has been answered.
    """

    request_id: str
    tenant: Tenant
    fields: dict[str, Any]
    metrics: Metrics
    send: Send
    releases: list[Callable[[], None]] = field(default_factory=list)


class Gate:
    """Middleware around the whole application.

    It reads the body before the application sees the request, so that one that is too large is refused whatever
    becomes of it. Open paths take none of the places and have no body, so that nobody without a key can take up either.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        keys: Keys,
        engines: Callable[[], dict[str, ServedEngine]],
        background: Background,
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._background = background
        self.num_open = 0
        self._rates = Rates(settings.requests_per_minute)
        self.metrics = Metrics(engines, lambda: self.num_open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        visit = Visit(f"req_{secrets.token_hex(12)}", NOBODY, {}, self.metrics, send)
        scope.setdefault("state", {})["visit"] = visit
        status = 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = visit.request_id.encode()
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", name),
                    (b"request-id", name),
                ]
            await send(message)

        is_open = _is_open(scope["path"])
        self.num_open += not is_open
        failure: BaseException | None = None
        try:
            self._check_host(scope)
            visit.tenant = self._tenant(scope)
            num_running = self.num_open + (len(self._background) if _is_work(scope) else 0)
            if not is_open and num_running > self._settings.max_requests:
                raise Problem(
                    429,
                    f"The server is answering {self._settings.max_requests} requests already. Try again soon.",
                    "too_many_requests",
                    headers={"Retry-After": "1"},
                )
            if scope["method"] == "POST":
                self._rates.take(visit.tenant.namespace)
            body = b"" if is_open else await self._body(scope, receive)
            await self._app(scope, _replay(body, receive), tell)
        except Exception as error:
            problem = problem_of(error)
            failure = error if problem.status == 500 else None
            if not status:
                said = json.dumps(error_body(problem, scope["path"], visit.request_id))
                reply = Response(said, problem.status, problem.headers, "application/json")
                await reply(scope, receive, tell)
        finally:
            self.num_open -= not is_open
            for release in visit.releases:
                release()
            self.metrics.requests.labels(scope["method"], status).inc()
            if visit.fields.get("gone"):
                self.metrics.gone.inc()
            level = logging.ERROR if failure is not None or status >= 500 else logging.INFO
            log(
                "request",
                level,
                error=failure,
                request_id=visit.request_id,
                tenant=visit.tenant.name or None,
                method=scope["method"],
                path=scope["path"],
                status=status or None,
                duration_ms=round(1000 * (time.perf_counter() - started), 1),
                **visit.fields,
            )

    def _check_host(self, scope: Scope) -> None:
        """A page in a browser can make a name of its own lead to this machine; without keys that must not do."""
        if self._keys or not is_loopback(self._settings.host):
            return
        host = _header(scope, b"host").rpartition("@")[2]
        name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if name and not is_loopback(name):
            raise Problem(
                403,
                f"The server answers to localhost, and the request is for {name!r}. Start it with an API key to "
                "let it answer to other names.",
                "wrong_host",
            )

    def _tenant(self, scope: Scope) -> Tenant:
        if not self._keys or _is_open(scope["path"]):
            return NOBODY
        scheme, _, key = _header(scope, b"authorization").partition(" ")
        if scheme.lower() != "bearer":
            key = _header(scope, b"x-api-key")
        tenant = self._keys.find(key.strip()) if key else None
        if scope["path"] == "/metrics" and tenant is not METRICS:
            # They tell of all tenants, so no tenant's key opens them.
            if not is_loopback((scope.get("client") or ("",))[0]):
                raise Problem(
                    403, "The metrics need the key that --metrics-key has set, or this machine.", "wrong_key"
                )
            return NOBODY
        if tenant is METRICS and scope["path"] not in _METRICS_PATHS:
            tenant = None
        if tenant is None:
            raise Problem(
                401,
                "The API key is wrong. "
                if key
                else "There is no API key. Send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return tenant

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._settings.max_body_bytes
        size = 0
        parts: list[bytes] = []
        declared = _header(scope, b"content-length")
        if declared.isdecimal():
            size = int(declared)
        while size <= limit:
            try:
                async with asyncio.timeout(_PIECE_S):
                    message = await receive()
            except TimeoutError:
                raise Problem(
                    408,
                    f"The next piece of the body did not come within {_PIECE_S:.0f} s. Send the request again.",
                    "incomplete_body",
                    headers={"Connection": "close"},
                ) from None
            if message["type"] == "http.disconnect":
                raise Problem(400, "The body ended before all of it had come.", "incomplete_body")
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)
            size = max(size, sum(map(len, parts)))
        raise Problem(
            413,
            f"The body of the request has more than {limit:,} bytes (--max-body). Send less.",
            "body_too_large",
            headers={"Connection": "close"},
        )


class Rates:
    """Requests of each tenant in a minute: a bucket that holds a minute's worth, and fills steadily."""

    def __init__(self, per_minute: int | None) -> None:
        self._per_minute = per_minute
        self._buckets: dict[str, tuple[float, float]] = {}  # what is left, and when that was so

    def take(self, namespace: str) -> None:
        """Counts a request.

        Raises:
            Problem: it is one too many.
        """
        if self._per_minute is None:
            return
        now = time.monotonic()
        left, then = self._buckets.get(namespace, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - then) * self._per_minute / 60)
        self._buckets[namespace] = (max(left - 1, 0.0) if left >= 1 else left, now)
        if left < 1:
            wait_s = math.ceil((1 - left) * 60 / self._per_minute)
            raise Problem(
                429,
                f"This key may make {self._per_minute} requests a minute. Try again in {wait_s} s.",
                "rate_limit_exceeded",
                headers={"Retry-After": str(wait_s)},
            )


def is_loopback(name: str) -> bool:
    """Whether a host or address is this machine's own."""
    if name.lower() == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


def _is_work(scope: Scope) -> bool:
    """Whether a request may ask for more than a look, or for the end of what is made in the background."""
    return scope["method"] == "POST" and not scope["path"].endswith("/cancel")


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` as it was before the body was read."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
