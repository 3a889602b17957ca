"""Conversations over HTTP with this server and others, in one sitting and with the same client.

    python bench/servers.py SITTING.toml [--chats 1,4,8] [--turns 10] [--rounds 1] [--results FOLDER --name NAME]

The file has a table for each server, with the `command` that starts it, in which {port} stands for its port, and `env`
if it needs any. The first one is what the others are compared with. All are started before anything is measured; the
one that is asked runs, and the others are stopped (SIGSTOP), so that no thread of theirs spins. A short chat warms each
of them up. Every answer has the same number of tokens, which all are asked for with `ignore_eos`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from octavo.cli.bench_client import ChatFigure, ChatSettings, measure_once
from octavo.cli.bench_machine import machine
from octavo.cli.bench_workloads import Figure

_START_S = 300.0


class Server:
    """A server of the file, running or stopped."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], url: str) -> None:
        self.name, self.url = name, url
        self._process = process

    def wait(self) -> None:
        """Until it lists its models."""
        deadline = time.monotonic() + _START_S
        while True:
            if self._process.poll() is not None:
                raise SystemExit(f"{self.name} has ended with {self._process.returncode}; its log says why.")
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline:
                    raise SystemExit(f"{self.name} does not answer after {_START_S:.0f} s.") from None
            time.sleep(0.5)

    def signal(self, number: int) -> None:
        """Sends a signal to all of its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)


@contextmanager
def started(name: str, described: dict[str, Any], log: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [part.replace("{port}", str(port)) for part in described["command"]]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **described.get("env", {})},
            start_new_session=True,
        )
    server = Server(name, process, f"http://127.0.0.1:{port}")
    try:
        server.wait()
        yield server
    finally:
        server.signal(signal.SIGCONT)
        server.signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            server.signal(signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sitting", type=Path)
    parser.add_argument("--chats", default="1,4,8", help="conversations at once")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--words", type=int, default=75)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("bench/results"))
    parser.add_argument("--name", default="servers")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended
    described = tomllib.loads(asked.sitting.read_text())
    counts = [int(part) for part in asked.chats.split(",")]
    settings = ChatSettings(None, asked.turns, asked.words, asked.max_tokens, True)
    asked.results.mkdir(parents=True, exist_ok=True)
    about = machine()
    figures: dict[tuple[int, str], ChatFigure] = {}
    with ExitStack() as stack:
        servers = []
        for name, table in described.items():
            log = asked.results / f"{name}.log"
            servers.append(stack.enter_context(started(name, table, log)))
            with servers[-1].running():
                short = ChatSettings(None, 2, asked.words, 8, True)
                asyncio.run(measure_once(servers[-1].url, 1, short, "warm"))
            print(f"{name} is up", file=sys.stderr, flush=True)
        for number in range(asked.rounds):
            for chats in counts:
                for server in servers:
                    with server.running():
                        rate, turns = asyncio.run(
                            measure_once(server.url, chats, settings, f"{number} {chats}")
                        )
                    before = figures.get((chats, server.name))
                    rates = (*(before.tokens_per_s.values if before else ()), rate)
                    figures[chats, server.name] = ChatFigure(
                        server.name,
                        chats,
                        Figure(f"{chats} chats", "tok/s", rates),
                        (*(before.turns if before else ()), *turns),
                    )
                    print(
                        f"round {number + 1}: {server.name}, {chats} chats: {rate:.1f} tok/s", file=sys.stderr
                    )
    text = told(figures, counts, list(described), asked, about)
    (asked.results / f"{asked.name}.md").write_text(text + "\n")
    values = {"machine": about, "figures": [figure.as_dict() for figure in figures.values()]}
    (asked.results / f"{asked.name}.json").write_text(json.dumps(values, indent=1) + "\n")
    print(text)


def told(
    figures: dict[tuple[int, str], ChatFigure],
    counts: list[int],
    names: list[str],
    asked: argparse.Namespace,
    about: dict[str, Any],
) -> str:
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {about['cpu']}, {about['usable_cpus']} CPUs. {asked.turns} turns, "
        f"{asked.words} words in, {asked.max_tokens} tokens out, {asked.rounds} rounds. Behind each figure: what "
        f"{names[0]} has of it.",
        "",
        "| chats | server | output tok/s | first token, turn 1 | turns 2 and on | cached |",
        "|---|---|---|---|---|---|",
    ]
    for chats in counts:
        own = figures[chats, names[0]]
        for name in names:
            figure = figures[chats, name]
            cached, rate = figure.cached_share, figure.tokens_per_s.median
            lines.append(
                f"| {chats} | {name} | {_beside(rate, own.tokens_per_s.median)} "
                f"| {_beside(figure.first_ms, own.first_ms)} ms "
                f"| {_beside(figure.later_ms or 0.0, own.later_ms or 0.0)} ms "
                f"| {'not told' if cached is None else f'{cached:.1%}'} |"
            )
    return "\n".join(lines)


def _beside(value: float, own: float) -> str:
    ratio = f" ({own / value:.2f}x)" if value and value != own else ""
    return f"{value:.1f}{ratio}"


if __name__ == "__main__":
    main()
