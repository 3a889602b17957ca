"""Reading calls from an answer while it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.engine.stops import StopStrings, begin_of_partial
from octavo.server.tools.formats import ToolFormat


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The name of a call is known; `number` counts the calls of an answer."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """More of the JSON text of a call's arguments."""

    number: int
    text: str


Read = str | CallBegun | ArgumentsText
_State = Callable[[list[Read]], bool]
"""A step of reading: adds what it finds, and tells whether the next step may go on at once."""


class CallReader:
    """Tells text, calls and arguments apart in the text of one answer.

    The answer follows the grammar of `call_grammar`; it may end anywhere. White space in front of a call is no
    part of the text, but a stop string in it ends the answer.

    Args:
        stops: strings that end the answer; looked for in its text alone, so that calls are whole.

    Attributes:
        stopped: the one that ended it. What is pushed afterwards is passed over.
    """

    def __init__(self, tool_format: ToolFormat, stops: Sequence[str] = ()) -> None:
        self._stops = StopStrings(stops)
        self._format = tool_format
        self._number = -1
        self._buffer = ""
        self._state: _State = self._text
        self._depth = 0
        self._in_string = self._escaped = False
        self._said_text = False

    @property
    def stopped(self) -> str | None:
        return self._stops.stopped

    def push(self, text: str) -> list[Read]:
        """What `text` adds to the answer."""
        self._buffer += text
        found: list[Read] = []
        while self.stopped is None and self._state(found):
            pass
        return found

    def finish(self) -> list[Read]:
        """The text that was held back because a call or a stop string could have begun with it."""
        found: list[Read] = []
        if self.stopped is None and self._state == self._text:
            self._say(self._buffer, found, last=True)
        return found

    def _text(self, found: list[Read]) -> bool:
        first = self._format.begin + (self._format.before_name if not self._format.anywhere else "")
        buffer = self._buffer
        if not self._format.anywhere:
            buffer = self._buffer = buffer.removeprefix(self._format.optional)
            if not self._said_text and buffer.startswith(first):
                self._buffer = buffer[len(first) :]
                self._state = self._name
                return True
            waits = not self._said_text and (
                first.startswith(buffer) or self._format.optional.startswith(buffer)
            )
            place = 0 if waits else len(buffer)
        else:
            place = buffer.find(first)
            if place >= 0:
                self._say(buffer[:place], found, last=True)
                self._buffer = buffer[place + len(first) :]
                self._state = self._before_name
                return True
            place = begin_of_partial(buffer, [first])
        self._say(buffer[:place], found)
        self._buffer = buffer[place:]
        return False

    def _say(self, text: str, found: list[Read], *, last: bool = False) -> None:
        """Gives out text up to a stop string, or to what may become one unless it is the last text.

        White space at the end waits too where a call may follow, and is left out at the last.
        """
        self._said_text |= bool(text)
        said = self._stops.release(text, last=last, holds_space=self._format.anywhere)
        if said:
            found.append(said)

    def _before_name(self, _: list[Read]) -> bool:
        return self._skip(self._format.before_name, self._name)

    def _name(self, found: list[Read]) -> bool:
        name, after, rest = self._buffer.partition(self._format.after_name)
        if not after:
            return False
        self._number += 1
        found.append(CallBegun(self._number, name))
        self._buffer = rest
        self._depth, self._in_string, self._escaped = 0, False, False
        self._state = self._arguments
        return True

    def _arguments(self, found: list[Read]) -> bool:
        for place, char in enumerate(self._buffer):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    found.append(ArgumentsText(self._number, self._buffer[: place + 1]))
                    self._buffer = self._buffer[place + 1 :]
                    self._state = self._after_call
                    return True
        if self._buffer:
            found.append(ArgumentsText(self._number, self._buffer))
            self._buffer = ""
        return False

    def _after_call(self, _: list[Read]) -> bool:
        return self._skip(self._format.after_call, self._between)

    def _between(self, _: list[Read]) -> bool:
        return bool(self._buffer) and self._skip(self._format.between, self._before_name)

    def _skip(self, expected: str, then: _State) -> bool:
        if not self._buffer.startswith(expected):
            return False
        self._buffer = self._buffer[len(expected) :]
        self._state = then
        return True
