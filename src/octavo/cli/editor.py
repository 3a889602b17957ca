"""The line editor of a chat: history, several lines, completion of commands."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output


class Editor:
    """Reads turns from the keyboard. It draws where the terminal is, so that standard output can be piped."""

    def __init__(self, commands: list[str]) -> None:
        """Args: `commands` are completed with Tab at the beginning of a turn."""
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            multiline=True,
            key_bindings=_keys(),
            completer=WordCompleter(commands, sentence=True),
            complete_while_typing=Condition(lambda: False),
            prompt_continuation=lambda width, *_: " " * width,
            output=create_output(always_prefer_tty=True),
        )

    def read(self, prompt: str) -> str | None:
        """The next turn, or None at Ctrl-D.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was typed is gone.
        """
        try:
            return self._session.prompt(prompt)
        except EOFError:
            return None


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """What was typed in earlier chats, in a file that only its owner can read; if that fails, this chat's."""
    path = Path(platformdirs.user_state_dir("octavo")) / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
