"""The server and its engine are two processes, and what becomes of one when the other ends."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

import psutil

from octavo.kv.storage.file import store_path

from .conftest import PATIENCE_S, Served, served

CHAT = "/v1/chat/completions"
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Once upon a time there was a small boat. " * 6}],
    "temperature": 0,
    "max_tokens": 3000,
    "ignore_eos": True,
}


def engine_of(server: Served) -> psutil.Process:
    (process,) = psutil.Process(server.process.pid).children()
    return process


def is_over(process: psutil.Process) -> bool:
    """Whether it has ended, within some seconds; its new parent may not have asked how."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_when_the_engine_is_killed_clients_are_told_and_the_server_says_why(tiny: str) -> None:
    with served("--kv-disk", "0", model=tiny) as server, server.http() as http:
        engine = engine_of(server)
        for number in (signal.SIGINT, signal.SIGTERM):  # as of Ctrl-C, which both get: the server's to obey
            engine.send_signal(number)
        got = []
        with http.stream("POST", CHAT, json={**BODY, "stream": True}) as reply:
            for line in reply.iter_lines():
                got.append(line)
                if len(got) == 5:
                    engine.kill()
        assert any("was ended by SIGKILL" in line for line in got)
        assert "data: [DONE]" not in got
        assert server.process.wait(PATIENCE_S) == 1
    assert "was ended by SIGKILL" in "".join(server.said)
    assert "Traceback" not in "".join(server.said)
    assert [line["event"] for line in server.lines if "ended by SIGKILL" in line.get("traceback", "")] == [
        "stopping"
    ]


def test_when_the_server_is_killed_the_engine_saves_and_ends(tmp_path: Path, tiny: str) -> None:
    environment = {"OCTAVO_CACHE": str(tmp_path)}
    body = {**BODY, "max_tokens": 3, "octavo": {"why": True}}
    for turn in range(2):
        with served("--kv-disk", "1GiB", model=tiny, **environment) as server, server.http() as http:
            engine = engine_of(server)
            usage = http.post(CHAT, json=body).json()
            if turn == 0:
                with http.stream("POST", CHAT, json={**BODY, "stream": True}) as reply:
                    next(reply.iter_lines())
                    os.kill(server.process.pid, signal.SIGKILL)
                    assert is_over(engine)
            else:
                assert server.stop() == 0
                assert is_over(engine)
    assert usage["octavo"]["loaded_tokens"] > 200
    files = list(tmp_path.rglob(store_path().name))
    assert len(files) == 1
    with sqlite3.connect(files[0]) as store:
        assert store.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
