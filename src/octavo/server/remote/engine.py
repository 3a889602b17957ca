"""An engine in a process of its own, as the server sees it."""

from __future__ import annotations

import itertools
import queue
import subprocess
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from typing import Any

from octavo.config import SamplingParams
from octavo.engine.counters import Counters
from octavo.engine.journal import RequestRecord
from octavo.engine.mailbox import Inbox, Mailbox, Sink
from octavo.engine.messages import Delta, Event, Failure, MemoryReport, Reply, is_last
from octavo.engine.snapshot import Snapshot
from octavo.errors import EngineStopped
from octavo.kv.storage.tier import NullTier, Tier
from octavo.models.loaded import Progress
from octavo.server.remote.process import how_it_ended, start_worker
from octavo.server.remote.wire import Ended, unpack_events
from octavo.sessions.template import ChatTemplate

_CLOSING_S = 60.0


class RemoteEngine:
    """What `octavo.sessions.engine.Engine` is to the server; methods of the same name do the same, and raise the same.

    Args:
        model, progress, settings: those of `Engine`.
        logs: whether the process logs while it loads; afterwards it does.
        meanwhile: called while the other process loads, which takes seconds.

    Attributes:
        disk: none. What the server keeps beside its engines has a tier of the server's own.

    Raises:
        OctavoError: as `Engine`.
        EngineStopped: the process has ended while it loaded.
    """

    disk: Tier = NullTier()

    def __init__(
        self,
        model: str,
        *,
        progress: Progress | None = None,
        logs: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> None:
        self._process, self._channel = start_worker()
        try:
            facts = self._load(model, settings, logs, progress, meanwhile)
        except BaseException:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            raise
        self.name: str = facts["name"]
        self.tokenizer: Any = facts["tokenizer"]
        self.context: int = facts["context"]
        self.vocab_size: int = facts["vocab_size"]
        self.eos_token_ids: frozenset[int] = facts["eos_token_ids"]
        self.fingerprint: bytes = facts["fingerprint"]
        self.notices: tuple[str, ...] = facts["notices"]
        self._ids, self._numbers = itertools.count(), itertools.count()
        self._sinks: dict[str, Sink] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._mailbox: Mailbox | None = None
        self._over: EngineStopped | None = None
        threading.Thread(target=self._read, name="octavo-remote", daemon=True).start()

    @property
    def process_id(self) -> int:
        return self._process.pid

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.eos_token_ids)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    async def astream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **sampling: Any
    ) -> AsyncGenerator[Event, None]:
        self._mailbox = Mailbox.of_this_loop(self._mailbox)
        inbox = Inbox(self._mailbox)
        request_id = self._submit(prompt, params, sampling, inbox.put)
        try:
            while True:
                event = await inbox.next()
                yield event
                if is_last(event):
                    return
        finally:
            self._forget(request_id)

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **sampling: Any
    ) -> Reply:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request_id = self._submit(prompt, params, sampling, events.put)
        try:
            while True:
                event = events.get()
                if isinstance(event, Failure):
                    raise event.error
                if isinstance(event, Delta) and event.reply is not None:
                    return event.reply
        finally:
            self._forget(request_id)

    def abort(self, request_id: str) -> None:
        self._send("abort", request_id)

    @property
    def num_sequences(self) -> tuple[int, int]:
        found: tuple[int, int] = self._ask("num_sequences")
        return found

    def snapshot(self, cache_namespace: str | None = None, *, names: bool = True) -> Snapshot:
        seen: Snapshot = self._ask("snapshot", cache_namespace, names=names)
        return seen

    def memory(self) -> MemoryReport:
        report: MemoryReport = self._ask("memory")
        return report

    def counters(self) -> Counters:
        counters: Counters = self._ask("counters")
        return counters

    def recent(self, limit: int | None = None, *, tenant: str | None = None) -> list[RequestRecord]:
        records: list[RequestRecord] = self._ask("recent", limit, tenant=tenant)
        return records

    def pin_conversation(self, name: str, *, cache_namespace: str = "") -> int:
        return int(self._ask("pin_conversation", name, cache_namespace=cache_namespace))

    def unpin_conversation(self, name: str, *, cache_namespace: str = "") -> None:
        self._ask("unpin_conversation", name, cache_namespace=cache_namespace)

    def drop_conversation(self, name: str, *, cache_namespace: str = "") -> int:
        return int(self._ask("drop_conversation", name, cache_namespace=cache_namespace))

    def forget(self, cache_namespace: str, *, on_disk: bool = True) -> int:
        return int(self._ask("forget", cache_namespace, on_disk=on_disk))

    def forget_sequence(self, token_ids: Sequence[int], *, cache_namespace: str = "") -> int:
        return int(self._ask("forget_sequence", tuple(token_ids), cache_namespace=cache_namespace))

    def settle(self, timeout_s: float) -> bool:
        return bool(self._ask("settle", timeout_s))

    def check(self) -> None:
        if self._over is not None:
            raise self._stopped(self._over)

    def close(self) -> None:
        """Lets the process end, after the step under way and what it has to save, and waits for that."""
        if self._over is None:
            self._over = EngineStopped("The engine does not run any more: it was closed. Make a new one.")
        self._channel.close()
        try:
            self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it hangs; what is on disk stays whole
            self._process.wait()

    def _load(
        self,
        model: str,
        settings: dict[str, Any],
        logs: bool,
        progress: Progress | None,
        meanwhile: Callable[[], None],
    ) -> dict[str, Any]:
        """What the process tells of its engine once it is loaded."""
        try:
            self._channel.send(model, settings, logs)
            meanwhile()
            while True:
                kind, *rest = self._channel.receive()
                if kind == "ready":
                    facts: dict[str, Any] = rest[0]
                    return facts
                if kind == "failed":
                    raise rest[0]
                if progress is not None:
                    progress(*rest)
        except Ended:
            raise EngineStopped(how_it_ended(self._process.wait())) from None

    def _submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        sampling: dict[str, Any],
        sink: Sink,
    ) -> str:
        """Sends a request; all that becomes of it, a refusal too, comes to `sink`."""
        request_id = f"request-{next(self._ids)}"
        self._sinks[request_id] = sink
        try:
            asked = prompt if isinstance(prompt, str) else tuple(prompt)
            self._send("stream", request_id, asked, params, sampling)
        except BaseException:
            del self._sinks[request_id]
            raise
        return request_id

    def _forget(self, request_id: str) -> None:
        """Aborts the request if it still runs, and drops its events."""
        if self._sinks.pop(request_id, None) is not None and self._over is None:
            with suppress(EngineStopped):
                self._send("drop", request_id)

    def _ask(self, name: str, *args: Any, **options: Any) -> Any:
        number = next(self._numbers)
        future = self._calls[number] = Future()
        try:
            self._send("call", number, name, args, options)
            return future.result()
        finally:
            self._calls.pop(number, None)

    def _send(self, *message: object) -> None:
        self.check()
        try:
            self._channel.send(*message)
        except Ended:
            self.check()
            raise EngineStopped(how_it_ended(self._process.wait())) from None

    def _stopped(self, why: EngineStopped) -> EngineStopped:
        """An error to raise; one that is raised again and again collects tracebacks."""
        error = EngineStopped(*why.args)
        for note in getattr(why, "__notes__", ()):
            error.add_note(note)
        return error

    def _read(self) -> None:
        """Takes what the process sends to whom it is for. A thread of its own."""
        try:
            while True:
                kind, *rest = self._channel.receive()
                if kind == "events":
                    for event in unpack_events(rest[0]):
                        self._deliver(event)
                elif kind == "answer":
                    number, value, error = rest
                    future = self._calls.get(number)
                    if future is not None and error is None:
                        future.set_result(value)
                    elif future is not None:
                        future.set_exception(error)
                elif kind == "stopped":
                    self._over = rest[0]
        except Ended:
            pass
        finally:
            self._channel.close()
            self._tell_all()

    def _deliver(self, event: Event) -> None:
        sink = (
            self._sinks.pop(event.request_id, None) if is_last(event) else self._sinks.get(event.request_id)
        )
        if sink is not None:
            sink(event)

    def _tell_all(self) -> None:
        """The process has ended, or ends: whoever still waits is told."""
        if self._over is None:
            self._over = EngineStopped(how_it_ended(self._process.wait()))
        for request_id in list(self._sinks):
            self._deliver(Failure(request_id, self._stopped(self._over)))
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(self._stopped(self._over))
