"""Where things are printed: answers on standard output, everything else on standard error."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from octavo.cli.render import amount
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# A model may write control characters; a terminal must not obey them.
_UNPRINTABLE = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
for _kept in "\n\t":
    del _UNPRINTABLE[ord(_kept)]

_STAGES = {
    "start": "Starting",
    "download": "Downloading",
    "hash": "Checking the file",
    "load": "Loading the weights",
    "check": "Checking exactness",
    "prompt": "Reading the prompt",
    "batch": "Answering requests",
    "verify": "Comparing formats",
}


class Terminal:
    """Prints. With `json`, standard output has JSON lines only; with `quiet`, remarks are left out."""

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet
        self._line_is_open = False

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def answer(self, text: str) -> None:
        """Prints a piece of an answer at once."""
        if self.json or not text:
            return
        if sys.stdout.isatty():
            text = text.translate(_UNPRINTABLE)
        sys.stdout.write(text)
        sys.stdout.flush()
        self._line_is_open = not text.endswith("\n")

    def end_answer(self) -> None:
        """Ends the line that an answer has left open, if it has."""
        if self._line_is_open:
            self.answer("\n")

    def print(self, line: str) -> None:
        """Prints what a command was asked for, on standard output."""
        if sys.stdout.isatty():
            line = line.translate(_UNPRINTABLE)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def print_json(self, value: Mapping[str, Any]) -> None:
        """Prints one line of JSON, in ASCII where standard output cannot take all characters."""
        takes_all = (sys.stdout.encoding or "").lower().startswith("utf")
        self.print(json.dumps(value, ensure_ascii=not takes_all, allow_nan=False))

    def say(self, text: str) -> None:
        """Tells the person something."""
        self._tell(text)

    def remark(self, text: str) -> None:
        """Tells the person something that can be missed."""
        if not self.json and not self.quiet:
            self._tell(text, style="dim")

    def _tell(self, text: str, style: str | None = None) -> None:
        self.end_answer()
        self._console.print(text.translate(_UNPRINTABLE), style=style)

    def error(self, error: BaseException) -> None:
        """Tells what went wrong in a sentence, with the traceback when OCTAVO_DEBUG is set."""
        if os.environ.get("OCTAVO_DEBUG"):
            self.end_answer()
            traceback.print_exception(error)
        elif isinstance(error, OctavoError):
            self.say(str(error))
        else:
            said = " ".join(str(error).split())[:500]
            self.say(
                f"Octavo failed unexpectedly: {type(error).__name__}{f': {said}' if said else ''}. "
                "Run it with OCTAVO_DEBUG=1 for the traceback."
            )

    def bars(self) -> Bars:
        """Progress bars, on a terminal and unless quiet."""
        return Bars(sys.stderr.isatty() and not self.quiet)


class Bars:
    """A bar for each stage, made when it is first reported and gone at the end."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._progress: Progress | None = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Reports `done` of `total`, in tokens for the stage `prompt`, else in bytes."""
        if not self._shown:
            return
        if self._progress is None:
            self._progress = _make_progress()
            self._progress.start()
        shown = amount(stage, done, total)
        if stage not in self._tasks:
            for task in self._tasks.values():
                self._progress.update(task, visible=False)
            self._tasks[stage] = self._progress.add_task(_STAGES.get(stage, stage), total=total, amount=shown)
        self._progress.update(self._tasks[stage], completed=done, total=total, amount=shown, visible=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()


def _make_progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
