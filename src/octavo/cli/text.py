"""Text that people give: prompts, files, and turns of a script."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from octavo.errors import InvalidRequest


def read_prompt(prompt: str | None, model: str) -> str:
    """The prompt: the argument; if it is `-` or absent, standard input less one line break at its end.

    Raises:
        InvalidRequest: there is none, it is empty, or it is not text.
    """
    if prompt is None and sys.stdin.isatty():
        raise InvalidRequest(
            f'There is no prompt. Write one, as in `octavo run {model} "Hello"`, or pipe one in; '
            f"`octavo chat {model}` starts a conversation."
        )
    if prompt is None or prompt == "-":
        prompt = read_stdin()
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise InvalidRequest("The prompt is empty. Write at least one character.")
    return check_text(prompt)


def read_stdin() -> str:
    """All of standard input.

    Raises:
        InvalidRequest: it is not text.
    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(_not_text("Standard input", error)) from error


def read_file(path: Path, what: str) -> str:
    """A file's text.

    Raises:
        InvalidRequest: it cannot be read, or is not text; the message says which.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{what} {path} cannot be read: {error.strerror}. Check its name.") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(_not_text(f"{what} {path}", error)) from error


def check_text(text: str) -> str:
    """`text`, when it can be written as UTF-8.

    Raises:
        InvalidRequest: it holds bytes of the command line that are not text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"Character {error.start + 1} of the text is not valid Unicode. Write it in UTF-8."
        ) from error
    return text


def script_turns(lines: Iterable[str]) -> Iterator[str]:
    """The turns of a script, one a line; `unescaped` gives their text.

    Empty lines and lines that begin with # are left out. A line that ends with a backslash goes on with
    the next one.
    """
    begun: list[str] = []
    for line in lines:
        line = line.removesuffix("\n").removesuffix("\r")
        if not begun and (not line.strip() or line.startswith("#")):
            continue
        if line.endswith("\\"):
            begun.append(line[:-1])
            continue
        yield "\n".join([*begun, line])
        begun = []
    if begun:
        yield "\n".join(begun)


def unescaped(turn: str) -> str:
    """A turn without the space that keeps a / or # at its beginning from meaning something."""
    return turn[1:] if turn.startswith((" /", " #")) else turn


def _not_text(what: str, error: UnicodeDecodeError) -> str:
    return f"{what} is not UTF-8 text: byte {error.start:,} cannot be read. Convert it to UTF-8."


def names(text: str) -> list[str]:
    """The parts of a list with commas."""
    return [name.strip() for name in text.split(",")]


def numbers(option: str, text: str) -> tuple[int, ...]:
    """The whole numbers of a list with commas, which was given for `option`.

    Raises:
        InvalidRequest: one is not a whole number.
    """
    try:
        return tuple(int(number) for number in names(text))
    except ValueError:
        raise InvalidRequest(
            f"{option} is {text!r}; write whole numbers with commas between them, such as 512,2048."
        ) from None
