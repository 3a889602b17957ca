"""Processes that each hold one engine. Only the one that is asked computes: the others are stopped."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Self

import psutil

WORKERS = Path(__file__).parent / "workers"
_GIVE_WAY_S = 0.1  # so that whoever waits for the lock gets it
_OF_SITTING = ("kind", "python", "env", "skip", "note", "restart")


class EngineDied(Exception):
    """An engine's process ended, or said what it must not; the message has where its log is."""


class Exclusive:
    """The right to compute.

    Args:
        lock: a file that other measurements on this machine lock too.
        realtime: the one that computes gets real-time priority, and the sitting that waits for it too; needs root.
    """

    def __init__(self, lock: Path | None = None, *, realtime: bool = False) -> None:
        self._lock = lock
        self._realtime = realtime

    @contextmanager
    def held(self) -> Iterator[None]:
        file: IO[str] | None = None if self._lock is None else self._lock.open("a")
        with file or nullcontext():
            if file is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            self.hurry(os.getpid())
            try:
                yield
            finally:
                self.relax(os.getpid())
        if file is not None:
            time.sleep(_GIVE_WAY_S)

    def hurry(self, pid: int) -> None:
        if self._realtime:
            _schedule(pid, os.SCHED_RR, 1)

    def relax(self, pid: int) -> None:
        if self._realtime:
            _schedule(pid, os.SCHED_OTHER, 0)


class EngineProcess:
    """One engine as a table of the sitting's file describes it; stopped except while it computes."""

    def __init__(
        self,
        name: str,
        table: dict[str, Any],
        log: Path,
        exclusive: Exclusive,
        patience_s: float = 600.0,
    ) -> None:
        self.name = name
        self._log = log
        self._exclusive = exclusive
        self._patience_s = patience_s
        options = {key: value for key, value in table.items() if key not in _OF_SITTING}
        python = Path(table.get("python", sys.executable)).expanduser()
        # An engine may call programs that lie beside its Python.
        path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
        start = time.perf_counter()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(WORKERS / f"{table['kind']}_worker.py"), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PATH": path, **table.get("env", {})},
                start_new_session=True,
            )
        self.versions: dict[str, str] = self._heard()["ready"]
        self.start_s = time.perf_counter() - start
        for pid in self._pids():
            exclusive.relax(pid)
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()

    def generate(self, prompts: Sequence[list[int]], tokens: Sequence[int]) -> list[list[float]]:
        """See `octavo.cli.bench_workloads.Generate`."""
        with self._exclusive.held():
            self._signal(signal.SIGCONT)
            try:
                for pid in self._pids():
                    self._exclusive.hurry(pid)
                assert self._process.stdin is not None
                self._process.stdin.write(
                    json.dumps({"prompts": list(prompts), "tokens": list(tokens)}) + "\n"
                )
                self._process.stdin.flush()
                return self._heard()["stamps"]
            finally:
                for pid in self._pids():
                    self._exclusive.relax(pid)
                self._signal(signal.SIGSTOP)

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._patience_s)[0]:
            self._signal(signal.SIGKILL)
            raise EngineDied(f"{self.name} has said nothing for {self._patience_s:.0f} s; see {self._log}.")
        line = self._process.stdout.readline()
        if not line:
            raise EngineDied(f"{self.name} has ended with code {self._process.wait()}; see {self._log}.")
        return json.loads(line)

    def _pids(self) -> list[int]:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return [process.pid, *(child.pid for child in process.children(recursive=True))]
        return []

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


def _schedule(pid: int, policy: int, priority: int) -> None:
    """Gives all threads of a process a scheduling policy."""
    with suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setscheduler(int(task.name), policy, os.sched_param(priority))
