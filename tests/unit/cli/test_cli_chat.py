"""`octavo chat`: scripts, commands, and what a failed or stopped turn leaves."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import editor
from octavo.errors import EngineStopped, InvalidRequest, NumericalError


@pytest.fixture
def keyboard(program: Any, monkeypatch: pytest.MonkeyPatch) -> list[str | BaseException]:
    """What is typed, line by line; an exception is raised. The end of the list is Ctrl-D."""
    typed: list[str | BaseException] = []

    class TypedEditor:
        def __init__(self, commands: list[str]) -> None:
            assert "/help" in commands
            self._lines: Iterator[str | BaseException] = iter(typed)

        def read(self, prompt: str) -> str | None:
            line = next(self._lines, None)
            if isinstance(line, BaseException):
                raise line
            return line

    monkeypatch.setattr(editor, "Editor", TypedEditor)
    return typed


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "turns.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


def said(program: Any) -> list[str]:
    """The latest user message of each prompt."""
    return [prompt.split("u:")[-1].removesuffix("\x04a:") for prompt in program.engine.prompts]


def test_a_script_is_a_turn_a_line(program: Any, tmp_path: Path) -> None:
    program.engine.answers = ["A.", "B.", "C."]
    script = write(tmp_path, "# a comment\none\n\n  \ntwo \\\nmore\r\n # three\n")
    result = program("chat", "toy", "--script", script)
    assert (result.code, result.out) == (0, "A.\nB.\nC.\n")
    assert said(program) == ["one", "two \nmore", "# three"]
    assert program.engine.prompts[1].startswith("u:one\x04a:A.")
    assert "> one\n" in result.err


def test_a_script_from_standard_input(program: Any) -> None:
    program.engine.answers = ["A.", "B."]
    program.stdin = "one\ntwo"
    assert program("chat", "toy").out == "A.\nB.\n"
    program.engine.answers = ["C."]
    program.stdin = "three\n"
    assert program("chat", "toy", "--script", "-").out == "C.\n"


def test_json_of_a_script_is_an_object_a_reply(program: Any, tmp_path: Path) -> None:
    program.engine.answers = ["A.", "B."]
    result = program("chat", "toy", "--script", write(tmp_path, "one\ntwo\n"), "--json")
    assert result.err == ""
    assert [json.loads(line)["text"] for line in result.out.splitlines()] == ["A.", "B."]


def test_the_first_failure_ends_a_script(program: Any, tmp_path: Path) -> None:
    program.engine.answers = ["A.", "C."]
    script = write(tmp_path, f"one\n{'x' * 2000}\nthree\n")
    result = program("chat", "toy", "--script", script, "--json")
    assert result.code == 2
    assert len(result.out.splitlines()) == 1
    assert result.err.startswith("The prompt has 2,")
    assert result.err.count("\n") == 1
    program.engine.answers = [NumericalError("NaN.")]
    assert program("chat", "toy", "--script", script).code == 1


def test_commands_in_a_script(program: Any, tmp_path: Path) -> None:
    program.engine.answers = ["A.", "B."]
    result = program("chat", "toy", "--script", write(tmp_path, "one\n/clear\ntwo\n/quit\nthree\n"))
    assert (result.code, program.engine.num_clears, said(program)) == (0, 1, ["one", "two"])
    assert "12 MiB went back to the system" in result.err
    result = program("chat", "toy", "--script", write(tmp_path, "/claer\n"))
    assert result.code == 2
    assert "There is no command /claer. Did you mean /clear?" in result.err


def test_ctrl_c_ends_a_script(program: Any, tmp_path: Path) -> None:
    program.engine.answers = ["abcdef", "B."]
    program.engine.before_token = lambda number: signal.raise_signal(signal.SIGINT) if number == 3 else None
    result = program("chat", "toy", "--script", write(tmp_path, "one\ntwo\n"))
    assert (result.code, result.out) == (130, "abc\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--script", "/nowhere/turns.txt"], "The script /nowhere/turns.txt cannot be read: No such file"),
        (
            ["--load", "/nowhere/chat.json"],
            "The conversation /nowhere/chat.json cannot be read: No such file",
        ),
        (["--load", "{text}"], "is not a saved conversation"),
        (["--load", "{list}"], "is not a saved conversation"),
        (["--load", "{other}"], "This is not a saved conversation."),
        (["--script", "{bytes}"], "is not UTF-8 text: byte 1 cannot be read."),
        (["--load", "{other}", "--system", "x"], "--load takes no --system"),
        (["--overflow", "wrap"], "Invalid value for '--overflow'"),
    ],
)
def test_mistakes_exit_with_2(program: Any, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    files = {"text": b"hello", "list": b"[1]", "other": b"{}", "bytes": b"a\xff\xfe"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    filled = [argument.format(**{name: tmp_path / name for name in files}) for argument in arguments]
    result = program("chat", "toy", *filled)
    assert result.code == 2
    assert sentence in result.err
    assert result.err.count("\n") == 1


def test_a_failed_turn_is_told_and_the_chat_goes_on(program: Any, keyboard: list[Any]) -> None:
    program.engine.answers = ["A.", NumericalError("NaN."), ValueError("odd"), "B."]
    keyboard += ["one", "x" * 2000, "/nonsense", "two", "three", "four"]
    result = program("chat", "toy")
    assert result.code == 0
    assert result.out == "A.\npart\npart\nB.\n"
    for sentence in ("The prompt has 2,", "There is no command /nonsense.", "NaN.", "ValueError: odd."):
        assert sentence in result.err
    assert said(program) == ["one", "two", "three", "four"]


def test_a_dead_engine_ends_the_chat(program: Any, keyboard: list[Any]) -> None:
    program.engine.answers = [EngineStopped("It died."), "B."]
    keyboard += ["one", "two"]
    result = program("chat", "toy")
    assert (result.code, said(program)) == (1, ["one"])
    assert "It died." in result.err


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(program: Any, keyboard: list[Any]) -> None:
    stops = [2, 0]

    def interrupt(number: int) -> None:
        if stops and number == stops[0]:
            stops.pop(0)
            signal.raise_signal(signal.SIGINT)

    program.engine.answers = ["abcdef", "ghi", "B."]
    program.engine.before_token = interrupt
    keyboard += ["one", "two", KeyboardInterrupt(), "", "  ", "three"]
    result = program("chat", "toy")
    assert (result.code, result.out) == (0, "ab\nB.\n")
    assert "Stopped after 2 tokens." in result.err
    assert "Ctrl-D or /quit ends the chat." in result.err
    # The half answer is kept, the turn without an answer is not.
    assert program.engine.prompts[-1] == "u:one\x04a:ab\x04u:three\x04a:"


def test_fork_branch_and_rewind(program: Any, keyboard: list[Any]) -> None:
    program.engine.answers = ["A.", "B.", "C.", "D.", "E."]
    keyboard += ["one", "/fork", "two", "/branch 1", "three", "/branch", "/branch 2", "/rewind", "four"]
    result = program("chat", "toy")
    one = "u:one\x04a:A.\x04"
    assert program.engine.prompts == [
        "u:one\x04a:",
        f"{one}u:two\x04a:",
        f"{one}u:three\x04a:",
        f"{one}u:four\x04a:",
    ]
    assert "This is branch 2, with 1 turn so far. /branch 1 goes back to the one before." in result.err
    assert "* 1  2 turns: three\n  2  2 turns: two\n" in result.err
    assert "Took back 1 turn; the conversation has 1 turn now." in result.err


def test_commands_that_cannot_be_done(program: Any, keyboard: list[Any]) -> None:
    keyboard += ["/rewind 3", "/rewind x", "/branch 2", "/branch two", "/memory now"]
    result = program("chat", "toy", "--quiet")
    assert result.err.splitlines() == [
        "The conversation has 0 turns, so 3 cannot be rewound.",
        "'x' is not a number; /rewind takes a number of turns, such as /rewind 2.",
        "There is no branch 2; there are 1 to 1.",
        "'two' is not a number; /branch takes the number of a branch, from 1 to 1.",
        "/memory takes nothing after it. Write /memory alone.",
    ]


def test_help_memory_and_clear(program: Any, keyboard: list[Any]) -> None:
    keyboard += ["/help", "/memory", "/clear", "/exit", "not said"]
    result = program("chat", "toy")
    assert result.code == 0
    for line in (
        "/rewind [N]   take back the last turn, or the last N",
        "/quit         end the chat (also Ctrl-D)",
    ):
        assert line in result.err.splitlines()
    assert "Weights       257 MiB  Q4_1" in result.err
    assert "KV cache       12 MiB  of at most 1.0 GiB" in result.err
    assert "  reusable    4.0 MiB  kept so that it is not computed again" in result.err
    assert "  a token    46,080 B" in result.err
    assert (
        "The KV cache is cleared, in memory and on disk: 12 MiB went back to the system, 0 B are held."
        in result.err
    )
    assert program.engine.prompts == []


def test_a_space_makes_a_command_text(program: Any, keyboard: list[Any]) -> None:
    program.engine.answers = ["A.", "B."]
    keyboard += [" /etc/passwd?", "  indented"]
    program("chat", "toy")
    assert said(program) == ["/etc/passwd?", "  indented"]


def test_save_and_load(program: Any, keyboard: list[Any], tmp_path: Path) -> None:
    file, taken = tmp_path / "chat.json", tmp_path / "notes.txt"
    taken.write_text("mine")
    program.engine.answers = ["A.", "B."]
    keyboard += ["one", f"/save {file}", "two", f"/save {taken}", f"/save {tmp_path}/no/where", "/save"]
    result = program("chat", "toy", "--system", "Be brief.")
    assert f"Saved 1 turn to {file}. Go on later with: octavo chat toy --load {file}" in result.err
    assert f"Saved 2 turns to {file}." in result.err
    assert f"{taken} exists already and is not replaced." in result.err
    assert "where cannot be written: No such file or directory." in result.err
    assert taken.read_text() == "mine"
    assert file.stat().st_mode & 0o077 == 0
    assert len(list(tmp_path.iterdir())) == 2

    keyboard.clear()
    keyboard.append("three")
    program.engine.answers = ["C."]
    result = program("chat", "toy", "--load", str(file))
    assert program.engine.prompts[-1] == "s:Be brief.\x04u:one\x04a:A.\x04u:two\x04a:B.\x04u:three\x04a:"
    assert "The conversation goes on after 2 turns." in result.err


def test_save_without_a_name(
    program: Any, keyboard: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program.engine.answers = ["A."]
    keyboard += ["one", "/save"]
    program("chat", "toy")
    (file,) = tmp_path.glob("octavo-chat-*.json")
    assert json.loads(file.read_text())["turns"][0]["user"] == "one"


def test_overflow_drops_turns_and_says_so(program: Any, keyboard: list[Any], tmp_path: Path) -> None:
    program.engine.answers = ["A.", "B.", "C."]
    file = tmp_path / "chat.json"
    keyboard += ["x" * 1200, "y" * 1200, f"/save {file}"]
    result = program("chat", "toy", "--overflow", "drop-oldest", "--max-tokens", "9", "--quiet")
    assert "Dropped the oldest turn (1,2" in result.err
    # A saved conversation keeps its choice, and the option overrides it.
    keyboard[:] = ["z" * 1200]
    program("chat", "toy", "--load", str(file), "--quiet")
    assert said(program)[-1] == "z" * 1200
    result = program("chat", "toy", "--load", str(file), "--overflow", "stop", "--quiet")
    assert result.err.startswith("The prompt has 2,4")


def test_the_chat_greets_with_what_it_holds(program: Any, keyboard: list[Any]) -> None:
    assert (
        "toy · 2,000 tokens of context · weights 257 MiB (Q4_1) · /help for help"
        in program("chat", "toy").err
    )
    assert program("chat", "toy", "--quiet").err == ""
    assert program("chat", "toy", "--json").out == ""


def test_a_system_prompt_that_is_refused_ends_before_the_first_turn(
    program: Any, keyboard: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise InvalidRequest("The model's chat template refuses these messages: no system.")

    monkeypatch.setattr(program.engine, "conversation", refuse)
    assert program("chat", "toy", "--system", "x").code == 2
    assert program.engine.is_closed
