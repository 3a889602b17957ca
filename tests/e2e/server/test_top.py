"""`octavo top`, beside a server that runs."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from .conftest import PATIENCE_S, Served, served

TOP = [sys.executable, "-m", "octavo.cli.main", "top"]


@pytest.fixture(scope="module")
def asked(tiny: str) -> Iterator[Served]:
    with served(model=tiny) as server:
        with server.openai() as client:
            for text in ("one", "two"):
                message = {"role": "user", "content": f"{text} and a question that is longer than a block"}
                client.chat.completions.create(model="tiny", messages=[message], max_tokens=8, temperature=0)
        yield server


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOP, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
    )


def test_it_prints_once_where_nobody_watches(asked: Served) -> None:
    for arguments in ((asked.url,), (asked.url, "--once")):
        shown = run(*arguments)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "KV reusable" in shown.stdout
        assert "answering 0, waiting 0" in shown.stdout
        rows = [line.split() for line in shown.stdout.splitlines() if line.startswith("■ c")]
        assert [(row[1], row[2]) for row in rows] == [("c2", "1"), ("c1", "1")]
        assert shown.stdout.count("□") == 3  # one in the key


def test_json_is_what_the_server_says(asked: Served) -> None:
    shown = json.loads(run(asked.url, "--json").stdout)
    assert set(shown["models"]["tiny"]["conversations"]) == {"c1", "c2"}


def test_on_a_terminal_it_goes_on_until_ctrl_c(asked: Served) -> None:
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in what a script starts in the background
        os.execve(
            sys.executable,
            [*TOP, asked.url],
            {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        )
    shown, deadline = b"", time.monotonic() + PATIENCE_S
    while b"conversation" not in shown and time.monotonic() < deadline:
        shown += os.read(terminal, 65536)
    os.write(terminal, b"\x03")
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # the other end is closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert b"c2" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("http://127.0.0.1:1",), 1, "No server answers at http://127.0.0.1:1"),
        (("nonsense",), 2, "'nonsense' is not an address of HTTP. Write http://HOST:PORT."),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(arguments: tuple[str, ...], code: int, said: str) -> None:
    shown = run(*arguments)
    assert shown.returncode == code
    assert said in shown.stderr
    assert "Traceback" not in shown.stderr
