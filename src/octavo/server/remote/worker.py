"""The engine's process. `RemoteEngine` starts it as `python -m octavo.server.remote.worker FD`.

It ends when the server's end of the socket closes, however the server has ended, and closes its engine first, which
saves what is to be kept. Signals that a terminal sends to both processes are the server's.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.engine.messages import Event, Failure
from octavo.errors import EngineStopped
from octavo.server.log import log_to_stderr
from octavo.server.remote.wire import Channel, Ended, pack_event, portable

if TYPE_CHECKING:
    from octavo.sessions.engine import Engine

FACTS = ("name", "tokenizer", "context", "vocab_size", "eos_token_ids", "fingerprint", "notices")
"""What never changes of an engine, sent once it is loaded."""

CALLS = frozenset(
    {
        *("snapshot", "memory", "recent", "counters", "num_sequences", "settle"),
        *("pin_conversation", "unpin_conversation", "drop_conversation", "forget", "forget_sequence"),
    }
)
"""What the server may ask of it."""


class Worker:
    """Runs an engine for whoever has the other end of `channel`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._engine: Engine | None = None
        self._events: list[object] = []  # of the step under way
        self._preparing: set[str] = set()
        self._lock = threading.Lock()  # of `_preparing`
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(64, "octavo-asked")

    def run(self) -> None:
        """Loads the engine and runs it until there are no more messages."""
        model, settings, logs = self._channel.receive()
        threading.Thread(target=self._read, name="octavo-remote", daemon=True).start()
        if logs:
            log_to_stderr()
        else:
            logging.getLogger("octavo").addHandler(logging.NullHandler())  # the server tells the notices
        try:
            engine = self._load(model, settings)
        except Exception as error:
            self._channel.send("failed", portable(error))
            return
        log_to_stderr()
        self._channel.send("ready", {name: getattr(engine, name) for name in FACTS})
        self._ended.wait()
        engine.close()

    def _load(self, model: str, settings: dict[str, Any]) -> Engine:
        from octavo.models.imports import no_garbage_collection, scan_transformers_once

        with no_garbage_collection():
            scan_transformers_once()
            from octavo.sessions.engine import Engine

            engine = Engine(model, progress=partial(self._channel.send, "progress"), **settings)
        self._engine, engine.on_step = engine, self._tell
        return engine

    def _read(self) -> None:
        try:
            with suppress(Ended):
                while True:
                    kind, *rest = self._channel.receive()
                    getattr(self, f"_take_{kind}")(*rest)
        finally:
            if self._engine is None:
                os._exit(1)  # nobody waits for what is being loaded
            self._ended.set()

    def _take_stream(
        self, request_id: str, prompt: str | tuple[int, ...], params: Any, sampling: dict[str, Any]
    ) -> None:
        if isinstance(prompt, str) or "grammar" in sampling:  # what takes long holds nobody up
            self._preparing.add(request_id)
            self._pool.submit(self._prepare, request_id, prompt, params, sampling)
        else:
            self._submit(request_id, prompt, params, sampling)

    def _take_drop(self, request_id: str) -> None:
        assert self._engine is not None
        with self._lock:
            if request_id in self._preparing:
                self._preparing.remove(request_id)
                return
        self._engine.drop(request_id)

    def _take_abort(self, request_id: str) -> None:
        assert self._engine is not None
        self._engine.abort(request_id)

    def _take_call(self, number: int, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._pool.submit(self._answer, number, name, args, options)

    def _prepare(self, request_id: str, *asked: Any) -> None:
        assert self._engine is not None
        self._submit(request_id, *asked)
        with self._lock:
            is_wanted = request_id in self._preparing
            self._preparing.discard(request_id)
        if not is_wanted:
            self._engine.drop(request_id)

    def _submit(self, request_id: str, *asked: Any) -> None:
        assert self._engine is not None

        def refused(accepted: Future[None]) -> None:
            error = accepted.exception()
            if error is not None:
                self._refuse(request_id, error)

        try:
            self._engine.submit(request_id, *asked, sink=self._take).add_done_callback(refused)
        except Exception as error:
            self._refuse(request_id, error)

    def _refuse(self, request_id: str, error: BaseException) -> None:
        assert self._engine is not None
        self._engine.drop(request_id)
        with suppress(Ended):
            self._channel.send("events", [Failure(request_id, portable(error))])

    def _take(self, event: Event) -> None:
        self._events.append(pack_event(event))

    def _tell(self) -> None:
        """Sends the events of a step, all at once. For the engine's thread."""
        assert self._engine is not None
        with suppress(Ended):
            if self._events:
                events, self._events = self._events, []
                self._channel.send("events", events)
            if not self._ended.is_set():
                try:
                    self._engine.check()
                except EngineStopped as error:
                    self._channel.send("stopped", portable(error))

    def _answer(self, number: int, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        value, failed = None, None
        try:
            if name not in CALLS:
                raise AttributeError(name)
            value = getattr(self._engine, name)
            if callable(value):
                value = value(*args, **options)
        except Exception as error:
            value, failed = None, portable(error)
        with suppress(Ended):
            self._channel.send("answer", number, value, failed)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    with suppress(Ended):
        Worker(Channel(socket.socket(fileno=int(sys.argv[1])))).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as the program `octavo` ends


if __name__ == "__main__":
    main()
