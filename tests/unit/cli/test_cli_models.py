"""`octavo pull` and `octavo models`, and the program's own options."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import models, render
from octavo.errors import ModelNotFound, NetworkUnavailable
from octavo.models.loaded import ModelEntry, Source


def test_pull_says_whether_it_was_here(program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "toy.gguf"
    file.write_bytes(b"x" * 2048)
    found: list[Source] = [Source("bundled", "toy", None), Source("bundled", "toy", file)]
    monkeypatch.setattr(models.catalog, "resolve", lambda _: found.pop(0))
    monkeypatch.setattr(models.catalog, "pull", lambda *_: Source("bundled", "toy", file))
    assert program("pull", "toy").out == f"toy is ready: {file} (2.0 KiB).\n"
    result = program("pull", "toy")
    assert (result.code, result.out) == (0, f"toy is already here: {file} (2.0 KiB).\n")


def test_pull_of_a_folder_adds_its_files(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "sub" / "b").write_bytes(b"x" * 23)
    source = Source("folder", "mine", tmp_path)
    monkeypatch.setattr(models.catalog, "resolve", lambda _: source)
    monkeypatch.setattr(models.catalog, "pull", lambda source, _: source)
    assert program("pull", str(tmp_path)).out.endswith(f"{tmp_path} (123 B).\n")


def test_pull_shows_a_bar_on_a_terminal(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain: Any
) -> None:
    def pull(source: Source, progress: Any) -> Source:
        progress("download", 1 << 20, 2 << 20)
        progress("hash", 2 << 20, 2 << 20)
        return Source("bundled", "toy", tmp_path)

    monkeypatch.setattr(models.catalog, "resolve", lambda _: Source("bundled", "toy", None))
    monkeypatch.setattr(models.catalog, "pull", pull)
    assert program("pull", "toy").err == ""
    program.is_terminal = True
    result = program("pull", "toy")
    assert "1.0 MiB of 2.0 MiB" in plain(result.err)
    assert "Checking the file" in plain(result.err)
    assert "\x1b" not in result.out


@pytest.mark.parametrize(
    ("error", "code"), [(ModelNotFound("No such."), 2), (NetworkUnavailable("Cut off."), 1)]
)
def test_pull_that_fails(program: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int) -> None:
    def resolve(name: str) -> Source:
        raise error

    monkeypatch.setattr(models.catalog, "resolve", resolve)
    result = program("pull", "toy")
    assert (result.code, result.out, result.err) == (code, "", f"{error}\n")


def test_models_as_table_and_as_json(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        ModelEntry("smollm2", "bundled", None, 94 << 20),
        ModelEntry("owner/long-name", "hub", Path("/models/x"), 1500 << 20),
    ]
    monkeypatch.setattr(models.catalog, "list_models", lambda: entries)
    assert program("models").out == (
        "NAME             KIND        SIZE  PATH\n"
        "smollm2          bundled   94 MiB  (not here; octavo pull smollm2)\n"
        "owner/long-name  hub      1.5 GiB  /models/x\n"
    )
    lines = [json.loads(line) for line in program("models", "--json").out.splitlines()]
    assert lines == [
        {"name": "smollm2", "kind": "bundled", "size_bytes": 94 << 20, "path": None},
        {"name": "owner/long-name", "kind": "hub", "size_bytes": 1500 << 20, "path": "/models/x"},
    ]


def test_version_and_help(program: Any) -> None:
    assert program("--version").out == f"octavo {version('octavo')}\n"
    for arguments in ([], ["--help"], ["-h"]):
        result = program(*arguments)
        assert result.code == 0
        assert "Answer one prompt." in result.out
    result = program("chat", "--help")
    assert "--overflow" in result.out
    assert "--temperature" in result.out


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (10 << 10, "10 KiB"),
        (257 << 20, "257 MiB"),
        (3 << 29, "1.5 GiB"),
    ],
)
def test_sizes(number: int, text: str) -> None:
    assert render.size(number) == text


def test_durations() -> None:
    assert [render.duration(seconds) for seconds in (0.0412, 0.9994, 0.9996, 12.345)] == [
        "41 ms",
        "999 ms",
        "1.00 s",
        "12.35 s",
    ]


def test_what_needs_no_model_imports_no_model_library(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from octavo.cli.main import invoke\n"
        "lines = ('--help', '--version', 'chat -h', 'models', 'run /nonexistent x', 'run toy x --top-p 7')\n"
        "slow = {'torch', 'transformers', 'prompt_toolkit'}\n"
        "print([invoke(line.split()) for line in lines], slow & sys.modules.keys())\n"
    )
    environment = {"OCTAVO_CACHE": str(tmp_path), "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 2, 2] set()"
