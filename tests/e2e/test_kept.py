"""Conversations that outlive the program: kept, killed, resumed, moved to another machine, cleared."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.models.store import model_cache

OCTAVO = [sys.executable, "-m", "octavo.cli.main"]
PATIENCE_S = 120
LONG = "My name is Ada. " + "I like walking along the river in Paris, and I like to tell about it. " * 6


class Machine:
    """A user's cache folder with the models of this machine and a disk tier of its own."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "models").symlink_to(models)
        self.env = {**os.environ, "OCTAVO_CACHE": str(folder), "OCTAVO_KV_DISK": "1GiB"}

    def __call__(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*OCTAVO, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=self.env,
        )

    def chat(self, turn: str, *arguments: str) -> tuple[dict[str, Any], str]:
        """The reply to one turn, and what was said beside it."""
        result = self(
            "chat",
            "smollm2",
            "--json",
            "--max-tokens",
            "40",
            *arguments,
            stdin=turn.replace("\n", " ") + "\n",
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout), result.stderr


@pytest.mark.bundled
def test_a_conversation_s_whole_life(tmp_path: Path) -> None:
    models = model_cache().resolve()
    machine = Machine(tmp_path / "here", models)
    first, said = machine.chat(LONG, "--save")
    (id_,) = re.findall(r"--resume (\w+)", said)
    assert "keys and values of conversations are kept in" in first["notes"][0]

    again, said = machine.chat("What is my name?", "--resume", id_[:4])
    assert f"Kept as {id_}" in said
    assert again["notes"] == []
    known = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert again["usage"]["loaded_tokens"] == known - 1
    assert again["usage"]["computed_tokens"] == again["usage"]["prompt_tokens"] - known + 1

    (listed,) = [json.loads(line) for line in machine("cache", "ls", "--json").stdout.splitlines()]
    assert (listed["id"], listed["turns"], listed["model"]) == (id_, 2, "smollm2")
    assert listed["title"].startswith("My name is Ada.")
    assert LONG[:40] in machine("cache", "ls").stdout
    (shown,) = [json.loads(line) for line in machine("cache", "show", "--json").stdout.splitlines()]
    assert shown["blocks"] >= known // 32
    assert shown["hits"] >= known // 32
    assert "smollm2" in machine("cache", "show").stdout
    assert machine("cache", "verify").stdout.strip().endswith("none doubtful.")
    path = Path(machine("cache", "path").stdout.strip())
    assert path.parent == tmp_path / "here" / "kv"

    file = tmp_path / "ada.octavo"
    assert "2 turns of" in machine("cache", "export", "last", str(file)).stdout
    refused = machine("cache", "export", id_, str(file))
    assert (refused.returncode, "exists already" in refused.stderr) == (2, True)
    there = Machine(tmp_path / "there", models)
    moved = there("cache", "import", str(file))
    assert f"octavo chat smollm2 --resume {id_}" in moved.stdout
    here, _ = machine.chat("And where do I walk?", "--resume", id_)
    moved, _ = there.chat("And where do I walk?", "--resume", "last")
    assert moved["token_ids"] == here["token_ids"]
    assert moved["usage"]["loaded_tokens"] > known - 1

    assert machine("cache", "clear").returncode == 130, "it asks, and nobody says yes"
    assert "removed" in machine("cache", "clear", "--yes").stdout
    after, _ = machine.chat("What is my name?", "--resume", id_)
    assert after["usage"]["cached_tokens"] == 0
    assert machine("cache", "clear", "--yes", "--conversations", "--model", "smollm2").returncode == 0
    lost = machine("chat", "smollm2", "--resume", id_, stdin="x\n")
    assert (lost.returncode, "No conversation is kept" in lost.stderr) == (2, True)


@pytest.mark.bundled
def test_killed_after_a_turn(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "here", model_cache().resolve())
    program = subprocess.Popen(
        [*OCTAVO, "chat", "smollm2", "--json", "--max-tokens", "40", "--save"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=machine.env,
        bufsize=1,
    )
    try:
        program.stdin.write("\n".join([LONG, *["Tell me more."] * 20]))
        program.stdin.close()
        first = json.loads(program.stdout.readline())
        time.sleep(1.0)  # what is saved in the background
    finally:
        program.kill()
        program.wait()
    again, _ = machine.chat("What is my name?", "--resume", "last")
    known = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert again["usage"]["loaded_tokens"] >= known - 1  # there may have been more turns before it was killed


def test_mistakes_are_told_in_a_sentence(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "here", tmp_path)
    (tmp_path / "no.txt").write_text("not a store at all, but long enough to be taken for one" * 100)
    for arguments, code, sentence in (
        (("cache", "export", "last", "x"), 2, "No conversation is kept under 'last'"),
        (("cache", "import", "x"), 2, "x is not a file"),
        (("cache", "import", str(tmp_path / "no.txt")), 2, "not an exported conversation"),
        (("cache", "clear", "--tenant", "x", "--yes"), 2, "Nothing is kept of that model and tenant"),
    ):
        result = machine(*arguments)
        assert (result.returncode, result.stdout) == (code, "")
        assert sentence in result.stderr
        assert result.stderr.count("\n") == 1
    (tmp_path / "here" / "kv").rename(tmp_path / "away")
    (tmp_path / "here" / "kv").write_text("in the way")
    result = machine("cache", "show")
    assert (result.returncode, "cannot be used" in result.stderr) == (1, True)
