"""Running the server: it listens, and ends when running answers are finished."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from octavo.errors import EngineStopped, InvalidRequest
from octavo.server.background import Background
from octavo.server.log import log
from octavo.server.settings import ServerSettings


class _Server(uvicorn.Server):
    """uvicorn, but a signal to stop is obeyed and not raised again once it has stopped."""

    def __init__(
        self,
        config: uvicorn.Config,
        ready: Callable[[], None],
        stopping: threading.Event,
        check: Callable[[], None],
        background: Background,
    ) -> None:
        super().__init__(config)
        self._ready, self._stopping, self._check, self._background = ready, stopping, check, background
        self.died: EngineStopped | None = None

    async def on_tick(self, counter: int) -> bool:
        try:
            self._check()
        except EngineStopped as error:  # requests are told, and nobody can be answered any more
            if self.died is None:
                log("stopping", error=error)
            self.died, self.should_exit = error, True
            self._stopping.set()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        until = time.monotonic() + (self.config.timeout_graceful_shutdown or 0)
        await super().shutdown(sockets)
        await self._background.end(until - time.monotonic(), lambda: self.force_exit)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _: object) -> None:
        if self.should_exit:  # asked a second time: do not wait for running answers
            self.force_exit = True
        self.should_exit = True
        self._stopping.set()
        log("stopping", signal=signal.Signals(number).name)


def listen(settings: ServerSettings) -> socket.socket:
    """A socket bound to the settings' address.

    Raises:
        InvalidRequest: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise InvalidRequest(
            f"The server cannot listen at {settings.host} port {settings.port}: {reason}. Take "
            "another --host or --port."
        ) from error
    return listener


def serve(
    app: ASGIApp,
    settings: ServerSettings,
    listener: socket.socket,
    ready: Callable[[], None],
    stopping: threading.Event,
    check: Callable[[], None] = lambda: None,
    background: Background | None = None,
) -> None:
    """Answers requests until the process is told to stop by SIGINT or SIGTERM.

    `ready` is called once it listens, and `check` ten times a second. When it is told to stop, `stopping` is set, it
    takes no new requests, and running answers, those in the `background` too, have `drain_s` seconds to finish.

    Raises:
        EngineStopped: that is what `check` raised, and it has stopped for that.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=settings.drain_s,
        timeout_keep_alive=65,
    )

    background = Background() if background is None else background
    server = _Server(config, ready, stopping, check, background)

    async def run() -> None:
        await server.serve(sockets=[listener])

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(run())
    log("stopped")
    if server.died is not None:
        raise server.died
