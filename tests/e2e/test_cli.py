"""The program `octavo` as people use it: a process of its own, the bundled model, pipes and a terminal."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.models.bundled import MODELS
from octavo.spec import BLOCK_SIZE

OCTAVO = [sys.executable, "-m", "octavo.cli.main"]
TURNS = (
    "My name is Ada and I live in Paris, not far from the river.\nWhat is my name?\nAnd where do I live?\n"
)
PATIENCE_S = 60


def octavo(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OCTAVO, *arguments], input=stdin, capture_output=True, text=True, timeout=PATIENCE_S
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The sentence of a mistake."""
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (sentence,) = result.stderr.splitlines()
    return sentence


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "turns.txt"
    path.write_text(TURNS)
    return str(path)


def chat(script: str, *arguments: str) -> list[dict[str, Any]]:
    result = octavo("chat", "smollm2", "--script", script, "--json", "--max-tokens", "12", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.bundled
def test_a_script_is_answered_alike_with_and_without_the_cache(script: str) -> None:
    kept, computed = chat(script), chat(script, "--no-cache")
    assert len(kept) == 3
    assert [reply["token_ids"] for reply in kept] == [reply["token_ids"] for reply in computed]
    assert [reply["text"] for reply in kept] == [reply["text"] for reply in computed]
    for earlier, later in itertools.pairwise(kept):
        usage = earlier["usage"]
        known = usage["prompt_tokens"] + usage["completion_tokens"]
        # The last sampled token has no key yet; what lies behind the last full block may be lost.
        assert known - BLOCK_SIZE <= later["usage"]["cached_tokens"] < known
        assert later["usage"]["prompt_tokens"] == (
            later["usage"]["cached_tokens"] + later["usage"]["computed_tokens"]
        )
    for reply in computed:
        usage = reply["usage"]
        assert usage["cached_tokens"] == 0
        lengths = range(usage["prompt_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])
        assert usage["computed_tokens"] == sum(lengths)
        assert reply["why"]["cause"] == "no_cache"


def test_no_such_model() -> None:
    assert "/nonexistent" in refused(octavo("run", "/nonexistent", "x"))


def test_a_text_file_named_gguf(tmp_path: Path) -> None:
    file = tmp_path / "notes.gguf"
    file.write_text("These are notes.\n")
    assert str(file) in refused(octavo("run", str(file), "x"))


@pytest.mark.bundled
def test_a_truncated_gguf(tmp_path: Path) -> None:
    assert octavo("pull", "smollm2").returncode == 0
    file = tmp_path / "cut.gguf"
    with MODELS["smollm2"].path.open("rb") as whole:
        file.write_bytes(whole.read(40 << 20))
    assert str(file) in refused(octavo("run", str(file), "x"))


@pytest.mark.bundled
def test_a_prompt_longer_than_the_window() -> None:
    sentence = refused(octavo("run", "smollm2", stdin=" word" * 9000))
    assert re.search(r"prompt has 9,\d\d\d tokens and the context window holds 8,192", sentence)


@pytest.mark.bundled
def test_pipes_get_plain_text_and_may_close_early() -> None:
    command = [*OCTAVO, "run", "smollm2", "Count from one to one hundred.", "--max-tokens", "40"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.read(1) not in (b"", b"\x1b")
        run.stdout.close()
        assert run.stderr.read() == b""
        assert run.wait(PATIENCE_S) == 1


class TerminalSession:
    """A program in a terminal of its own."""

    def __init__(self, *command: str) -> None:
        self._pid, self._handle = pty.fork()
        if self._pid == 0:
            os.environ.update(TERM="xterm", COLUMNS="100", LINES="30")
            os.execvp(command[0], command)

    def send(self, text: str) -> None:
        os.write(self._handle, text.encode())

    def wait_for(self, pattern: str) -> None:
        """Reads until what was printed since the last call holds `pattern`."""
        printed = ""
        for piece in self._pieces():
            printed += piece
            if re.search(pattern, printed, re.DOTALL):
                return
        raise AssertionError(f"{pattern!r} was not printed, but {printed[-2000:]!r}")

    def exit_code(self) -> int:
        """Reads to the end; negative if the program had to be killed."""
        for _ in self._pieces():
            pass
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _pieces(self) -> Iterator[str]:
        """What is printed, until the program ends or patience does."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if not select.select([self._handle], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self._handle, 4096)
            except OSError:  # the program has ended
                return
            if b"\x1b[6n" in data:  # it asks where the cursor is
                os.write(self._handle, b"\x1b[1;1R")
            yield data.decode(errors="replace")


@pytest.mark.bundled
def test_a_chat_at_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    listens, answers = r".*\?2004h", r"\?2004l"  # the editor takes the terminal, and leaves it
    session = TerminalSession(*OCTAVO, "chat", "smollm2", "--max-tokens", "500")
    try:
        session.wait_for("smollm2 · 8,192 tokens of context" + listens)
        session.send("Tell me a very long story about a river.\r")
        session.wait_for(answers + r"\S+ \S+ \S+ ")
        session.send("\x03")
        session.wait_for(r"Stopped after \d+ tokens?\." + listens)
        session.send("/memory\r")
        session.wait_for(r"Weights +\d+ MiB" + listens)
        session.send("/clear\r")
        session.wait_for(
            r"cleared, in memory and on disk: [1-9][\d.]* [KM]iB went back to the system" + listens
        )
        session.send("\x04")
    finally:
        code = session.exit_code()
    assert code == 0
