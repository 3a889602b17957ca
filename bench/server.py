"""What the server adds, and what it tells: two measurements over raw sockets, with a server process of their own.

    python bench/server.py overhead     tokens/s of 16 streams over HTTP beside the same engine in this process
    python bench/server.py keys         first-token times of a prompt that another key, or the same, has asked before

`overhead` alternates both in one sitting. `keys` prints two-sample Kolmogorov-Smirnov tests: times of another key's
prompts must not differ from those of cold prompts, and times of one's own must.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import math
import random
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo import Engine

_WORDS = ("river", "stone", "window", "music", "garden", "letter", "winter", "bridge", "market", "silver")


@contextmanager
def served(model: str, *options: str) -> Iterator[tuple[str, int]]:
    """The address of a server of its own, which logs to nobody."""
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "serve",
        model,
        "--port",
        "0",
        "--kv-disk",
        "0",
        *options,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("{") and (said := json.loads(line))["event"] == "serving":
                host, port = said["url"].removeprefix("http://").split(":")
                break
        else:
            raise SystemExit("The server has ended.")
        threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
        yield host, int(port)
    finally:
        process.terminate()
        process.wait()


def post(body: dict[str, object], key: str = "none") -> bytes:
    data = json.dumps(body).encode()
    head = f"Content-Type: application/json\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}"
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode() + data


def question(seed: str) -> list[dict[str, str]]:
    words = " ".join(random.Random(seed).choices(_WORDS, k=20))
    return [{"role": "user", "content": f"Tell a long story {seed} with these words: {words}."}]


# Overhead


def overhead(asked: argparse.Namespace) -> None:
    from octavo import Engine

    memory = ("--kv-memory", "1GiB")
    with Engine(asked.model, kv_memory="1GiB", kv_disk=0) as engine, served(asked.model, *memory) as address:
        name = engine.name
        own, http = [], []
        for number in range(asked.repeats + 1):
            rates = in_process(engine, number, asked), over_http(address, name, number, asked)
            if number:  # the first round warms up
                own.append(rates[0])
                http.append(rates[1])
            print(
                f"round {number}: {rates[0]:.0f} tok/s in the process, {rates[1]:.0f} over HTTP", flush=True
            )
    ratios = [there / here for here, there in zip(own, http, strict=True)]
    print(
        f"{asked.streams} streams: {statistics.median(own):.0f} tok/s in the process, "
        f"{statistics.median(http):.0f} over HTTP, "
        f"{statistics.median(ratios):.3f} of it (from {min(ratios):.3f} to {max(ratios):.3f})"
    )


def in_process(engine: Engine, number: int, asked: argparse.Namespace) -> float:
    """Tokens a second of streams that one event loop of this process reads, which is what costs least."""

    async def read(index: int) -> int:
        ids = engine.chat_ids(question(f"{number}.{index}"))
        events = engine.astream(ids, max_tokens=asked.tokens, ignore_eos=True)
        return sum([len(getattr(event, "token_ids", ())) async for event in events])

    async def read_all() -> int:
        return sum(await asyncio.gather(*map(read, range(asked.streams))))

    start = time.perf_counter()
    num_tokens = asyncio.run(read_all())
    return num_tokens / (time.perf_counter() - start)


def over_http(address: tuple[str, int], model: str, number: int, asked: argparse.Namespace) -> float:
    """The same over HTTP. The client looks for the end of a stream and counts nothing."""
    selector = selectors.DefaultSelector()
    start = time.perf_counter()
    for index in range(asked.streams):
        body = {"model": model, "messages": question(f"{number}.{index}"), "max_tokens": asked.tokens}
        connection = socket.create_connection(address)
        connection.sendall(post({**body, "temperature": 0, "stream": True, "ignore_eos": True}))
        selector.register(connection, selectors.EVENT_READ, bytearray())
    left = asked.streams
    while left:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 16)
            key.data[:] = key.data[-16:] + data
            if not data:
                raise SystemExit("The server has closed a connection.")
            if b"data: [DONE]" in key.data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                left -= 1
    return asked.streams * asked.tokens / (time.perf_counter() - start)


# Keys


def keys(asked: argparse.Namespace) -> None:
    from octavo.models.catalog import resolve

    chance = random.Random(1)
    with served(asked.model, "--kv-memory", "2GiB", "--api-key", "ada", "--api-key", "bob") as address:
        connections = {key: socket.create_connection(address) for key in ("ada", "bob")}
        name = resolve(asked.model).name

        def first_token_s(key: str, seed: str) -> float:
            body = {"model": name, "messages": question(seed), "max_tokens": 1, "temperature": 0}
            start = time.perf_counter()
            connections[key].sendall(post(body, key))
            reply = bytearray()
            while b"\r\n\r\n" not in reply or not reply.endswith(b"}"):
                data = connections[key].recv(1 << 16)
                if not data:
                    raise SystemExit("The server has closed a connection.")
                reply += data
            if not reply.startswith(b"HTTP/1.1 200"):
                raise SystemExit(reply.decode())
            return time.perf_counter() - start

        for number in range(20):
            for key in connections:
                first_token_s(key, f"warm {key} {number}")
        cold, others, own = [], [], []
        for number in range(asked.samples):
            first_token_s("ada", f"shared {number}")
            measures = [
                lambda number=number: cold.append(first_token_s("bob", f"cold {number}")),
                lambda number=number: others.append(first_token_s("bob", f"shared {number}")),
                lambda number=number: own.append(first_token_s("ada", f"shared {number}")),
            ]
            chance.shuffle(measures)
            for measure in measures:
                measure()
    for what, times in (("cold", cold), ("another key's", others), ("one's own", own)):
        print(f"{what:>14}: median {statistics.median(times) * 1e3:.2f} ms")
    for what, times in (("another key's", others), ("one's own", own)):
        distance, p = kolmogorov_smirnov(times, cold)
        print(f"{what} against cold: D = {distance:.3f}, p = {p:.2g}")


def kolmogorov_smirnov(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The two-sample statistic, and the probability of a larger one if both are drawn alike."""
    one, other = sorted(one), sorted(other)
    distance = max(
        abs(bisect.bisect_right(one, value) / len(one) - bisect.bisect_right(other, value) / len(other))
        for value in (*one, *other)
    )
    size = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    scaled = (size + 0.12 + 0.11 / size) * distance
    if scaled < 0.2:
        return distance, 1.0  # the series below does not settle there
    p = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, p))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "keys"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=192, help="of each stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=200, help="of each kind")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is ended
    {"overhead": overhead, "keys": keys}[asked.what](asked)


if __name__ == "__main__":
    main()
