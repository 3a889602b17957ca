"""The engine's own thread: it does what others ask between two steps, and tells everybody when it has ended."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import torch

from octavo.engine.core import EngineCore
from octavo.engine.messages import Event
from octavo.errors import EngineError, EngineStopped

T = TypeVar("T")


class EngineThread:
    """Runs an `EngineCore`. Work may be posted before it is started."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._died: BaseException | None = None
        self._thread = threading.Thread(target=lambda: self._run(), name="octavo-engine", daemon=True)

    def start(
        self,
        core: EngineCore,
        num_threads: int | None,
        dispatch: Callable[[list[Event]], None],
        ended: Callable[[EngineStopped], None],
    ) -> None:
        """Begins to compute with this many threads, or torch's own number.

        Args:
            dispatch: gets the events of each step, on this thread.
            ended: called last of all, on this thread, however it ends.
        """
        self._core, self._num_threads = core, num_threads
        self._dispatch, self._ended = dispatch, ended
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def post(self, command: Callable[[], None]) -> None:
        """Has `command` run on the thread. It must not raise: that ends the thread."""
        self._commands.put(command)

    def ask(self, function: Callable[[], T]) -> T:
        """Runs `function` on the thread, between two steps, and returns its result."""
        if threading.current_thread() is self._thread:  # as a finalizer, say
            raise EngineError("The engine's own thread cannot wait for itself.")
        return self.wait(self.call(function))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` on the thread; raises EngineStopped at once if it does not run any more."""
        self.check()
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._commands.put(run)
        return future

    def wait(self, future: Future[T]) -> T:
        """The result of a call; EngineStopped if the thread ends without giving one."""
        while True:
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                if self.is_over and not future.done():
                    raise self.stopped() from self._died

    def check(self) -> None:
        """Raises EngineStopped if it does not run any more."""
        if self._closed or self._died is not None:
            raise self.stopped()

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended, so that nobody will answer."""
        return not self._thread.is_alive()

    def stopped(self) -> EngineStopped:
        """What to tell those who still want something."""
        reason = "it was closed" if self._died is None else f"its thread died of {self._died!r}"
        error = EngineStopped(f"The engine does not run any more: {reason}. Make a new one.")
        error.__cause__ = self._died
        return error

    def close(self) -> None:
        """Ends the thread after the step under way, and waits for that. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        core = self._core
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            while True:
                while not core.has_work or not self._commands.empty():
                    timeout_s = None
                    if not core.has_work:
                        core.rest()
                        timeout_s = core.patience_s
                    with suppress(queue.Empty):
                        command = self._commands.get(timeout=timeout_s)
                        if command is None:
                            return
                        command()
                    core.wake()
                self._dispatch(core.step())
        except BaseException as error:
            self._died = error
        finally:
            with suppress(Exception):
                core.close()
            self._ended(self.stopped())
