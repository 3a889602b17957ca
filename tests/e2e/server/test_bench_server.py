"""The benchmarks of the server run to their end, small. None of their figures is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PATIENCE_S

BENCH = Path(__file__).parents[3] / "bench"


def bench(file: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCH / file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("what", "said"), [("overhead", "over HTTP"), ("keys", "one's own against cold")])
def test_what_the_server_adds_and_tells(tiny: str, what: str, said: str) -> None:
    small = ("--streams", "2", "--tokens", "4", "--repeats", "1", "--samples", "3")
    assert said in bench("server.py", what, "--model", tiny, *small)


def test_servers_beside_each_other(tiny: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", tiny, "--port", "{port}", "--kv-disk", "0"]
    sitting = tmp_path / "sitting.toml"
    tables = [
        f"[{name}]\ncommand = {json.dumps([*command, '--kv-memory', '32MiB'])}\n" for name in ("one", "other")
    ]
    sitting.write_text("".join(tables))
    small = ("--chats", "1,2", "--turns", "2", "--words", "5", "--max-tokens", "4")
    told = bench("servers.py", str(sitting), *small, "--results", str(tmp_path), "--name", "small")
    assert told.count("| other |") == 2
    figures = json.loads((tmp_path / "small.json").read_text())["figures"]
    assert [(figure["server"], figure["chats"]) for figure in figures] == [
        ("one", 1),
        ("other", 1),
        ("one", 2),
        ("other", 2),
    ]
