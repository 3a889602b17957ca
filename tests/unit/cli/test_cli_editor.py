"""The line editor, with keys typed into it as a terminal sends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from octavo.cli import editor
from octavo.cli.editor import Editor

ENTER, ALT_ENTER, UP, PASTE = "\r", "\x1b\r", "\x1b[A", "\x1b[200~{}\x1b[201~"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PipeInput]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(editor, "create_output", lambda **_: DummyOutput())
    with create_pipe_input() as pipe, create_app_session(input=pipe):
        yield pipe


@pytest.mark.parametrize(
    ("typed", "turn"),
    [
        (f"hello{ENTER}", "hello"),
        (f"one{ALT_ENTER}two{ENTER}", "one\ntwo"),
        (f"one\\{ENTER}two{ENTER}", "one\ntwo"),
        (PASTE.format("one\r\ntwo\n") + ENTER, "one\ntwo\n"),
        ("\x04", None),
    ],
)
def test_what_is_typed(keys: PipeInput, typed: str, turn: str | None) -> None:
    keys.send_text(typed)
    assert Editor(["/memory", "/clear"]).read("> ") == turn


def test_ctrl_c_raises(keys: PipeInput) -> None:
    keys.send_text("half\x03")
    with pytest.raises(KeyboardInterrupt):
        Editor([]).read("> ")


def test_history_outlives_the_chat_and_is_its_owners_alone(keys: PipeInput, tmp_path: Path) -> None:
    keys.send_text(f"first{ENTER}")
    Editor([]).read("> ")
    keys.send_text(f"{UP}{ENTER}")
    assert Editor([]).read("> ") == "first"
    (file,) = (tmp_path / "octavo").iterdir()
    assert file.stat().st_mode & 0o077 == 0


def test_history_that_cannot_be_written_is_kept_for_the_chat(
    keys: PipeInput, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    reader = Editor([])
    keys.send_text(f"first{ENTER}")
    reader.read("> ")
    keys.send_text(f"{UP}{ENTER}")
    assert reader.read("> ") == "first"
