"""What a line of a chat does: a turn for the model, or a command that begins with a slash."""

from __future__ import annotations

import difflib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli import render, why
from octavo.cli.answer import give_answer
from octavo.cli.render import count, size
from octavo.cli.terminal import Terminal
from octavo.cli.text import unescaped
from octavo.engine.messages import Reply
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.sessions.conversation import Conversation
    from octavo.sessions.engine import Engine


class Chat:
    """A conversation and its branches. `ended` is set by /quit."""

    def __init__(
        self,
        engine: Engine,
        terminal: Terminal,
        conversation: Conversation,
        sampling: dict[str, Any],
        file: Path | None = None,
    ) -> None:
        """Args: `file` is where the conversation came from and where /save writes it by default."""
        self.engine = engine
        self.terminal = terminal
        self.branches = [conversation]
        self.number = 1  # of the branch that is talked in, counted from 1
        self.sampling = sampling
        self.file = file
        self.kept_id: str | None = None  # under which it is kept on disk after each change
        self.ended = False

    @property
    def conversation(self) -> Conversation:
        return self.branches[self.number - 1]

    @property
    def prompt(self) -> str:
        """What stands before a turn."""
        return "> " if len(self.branches) == 1 else f"{self.number}> "

    def take(self, line: str) -> Reply | None:
        """Gives the reply to a turn, or does what a command says.

        Raises:
            OctavoError: the turn or the command cannot be done; the conversation is as it was.
        """
        if not line.startswith("/"):
            text = unescaped(line)
            try:
                return give_answer(self.engine, self.conversation.say(text), self.terminal, self.sampling)
            finally:
                self._keep()
        name, _, argument = line[1:].strip().partition(" ")
        command = _COMMANDS.get(_ALIASES.get(name, name))
        if command is None:
            raise InvalidRequest(_unknown(name))
        argument = argument.strip()
        if argument and not command.argument:
            raise InvalidRequest(f"/{name} takes nothing after it. Write /{name} alone.")
        command.run(self, argument)
        self._keep()
        return None

    def _keep(self) -> None:
        if self.kept_id is not None:
            self.engine.keep(self.conversation, self.kept_id)


def _help(chat: Chat, _: str) -> None:
    rows = [(f"/{name} {command.argument}".rstrip(), command.help) for name, command in _COMMANDS.items()]
    width = max(len(usage) for usage, _ in rows)
    chat.terminal.say("\n".join(f"{usage:<{width}}  {text}" for usage, text in rows))
    chat.terminal.say(
        "Alt-Enter, or a backslash at the end of a line, starts a new line. Ctrl-C stops an answer, and a "
        "space before the slash says a line to the model."
    )


def _memory(chat: Chat, _: str) -> None:
    chat.terminal.say("\n".join(render.memory_lines(chat.engine.memory())))


def _why(chat: Chat, argument: str) -> None:
    number = _number(argument or "1", "/why takes a number of answers, such as /why 3")
    records = chat.engine.recent(max(number, 1), tenant=chat.conversation.cache_namespace)
    if not records:
        chat.terminal.say("No answer has been given yet.")
    for record in records:
        chat.terminal.say("\n".join(why.lines(record.as_dict())))


def _clear(chat: Chat, _: str) -> None:
    given_back = chat.engine.clear()
    held = chat.engine.memory().kv_allocated_bytes
    chat.terminal.say(
        f"The KV cache is cleared, in memory and on disk: {size(given_back)} went back to the system, "
        f"{size(held)} are held. The model and the conversation stay; the next answer computes the conversation again."
    )


def _fork(chat: Chat, _: str) -> None:
    old, fork = chat.number, chat.conversation.fork()
    chat.branches.append(fork)
    chat.number = len(chat.branches)
    chat.terminal.say(
        f"This is branch {chat.number}, with {count(fork.num_turns, 'turn')} so far. "
        f"/branch {old} goes back to the one before."
    )


def _branch(chat: Chat, argument: str) -> None:
    if argument:
        number = _number(argument, f"/branch takes the number of a branch, from 1 to {len(chat.branches)}")
        if not 1 <= number <= len(chat.branches):
            raise InvalidRequest(f"There is no branch {number}; there are 1 to {len(chat.branches)}.")
        chat.number = number
    for number, conversation in enumerate(chat.branches, 1):
        mark = "*" if number == chat.number else " "
        turns = conversation.history.turns
        last = f": {_shortened(turns[-1].user)}" if turns else ""
        chat.terminal.say(f"{mark} {number}  {count(len(turns), 'turn')}{last}")


def _rewind(chat: Chat, argument: str) -> None:
    number = _number(argument or "1", "/rewind takes a number of turns, such as /rewind 2")
    chat.conversation.rewind(number)
    left = count(chat.conversation.num_turns, "turn")
    chat.terminal.say(f"Took back {count(number, 'turn')}; the conversation has {left} now.")


def _save(chat: Chat, argument: str) -> None:
    path = Path(argument).expanduser() if argument else chat.file
    if path is None:
        path = Path(time.strftime("octavo-chat-%Y%m%d-%H%M%S.json"))
    if path != chat.file and path.exists():
        raise InvalidRequest(f"{path} exists already and is not replaced. Give another name.")
    data = json.dumps(chat.conversation.to_dict(), ensure_ascii=False, indent=1)
    try:
        _write(path, data)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}. Give another name.") from error
    chat.file = path
    chat.terminal.say(
        f"Saved {count(chat.conversation.num_turns, 'turn')} to {path}. "
        f"Go on later with: octavo chat {chat.engine.name} --load {path}"
    )


def _quit(chat: Chat, _: str) -> None:
    chat.ended = True


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Chat, str], None]
    argument: str
    help: str


_COMMANDS = {
    "help": _Command(_help, "", "this list"),
    "memory": _Command(_memory, "", "memory of the weights and of the KV cache"),
    "why": _Command(_why, "[N]", "what the last answer reused, and why not more; or the last N"),
    "clear": _Command(
        _clear,
        "",
        "forget all keys and values of the model, in memory and on disk; model and conversation stay",
    ),
    "fork": _Command(_fork, "", "go on in a second branch from here"),
    "branch": _Command(_branch, "[N]", "list the branches, or go to branch N"),
    "rewind": _Command(_rewind, "[N]", "take back the last turn, or the last N"),
    "save": _Command(_save, "[FILE]", "write the conversation to a file, for --load"),
    "quit": _Command(_quit, "", "end the chat (also Ctrl-D)"),
}
_ALIASES = {"exit": "quit"}
NAMES = [f"/{name}" for name in _COMMANDS]


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, _COMMANDS, n=2, cutoff=0.5)
    advice = (
        f"Did you mean {' or '.join(f'/{match}' for match in close)}?" if close else "/help lists them all."
    )
    return f"There is no command /{name}. {advice} A space before the slash says the line to the model."


def _number(text: str, wanted: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(f"{text!r} is not a number; {wanted}.") from None


def _shortened(text: str, length: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _write(path: Path, data: str) -> None:
    """Writes a file whole or not at all; only its owner can read it."""
    handle, temporary = tempfile.mkstemp(prefix=".octavo-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
