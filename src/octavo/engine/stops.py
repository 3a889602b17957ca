"""Strings that end an answer, looked for in its text as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class StopStrings:
    """Gives out text as soon as it cannot belong to a stop string.

    The stop string that begins first wins, and of two that begin together the shorter one. So with `bc` and `abcd`,
    `abc` is held back until it is seen whether a `d` follows. The choice depends on the text alone, not on where its
    pieces end.

    Args:
        stops: none of them empty.

    Attributes:
        stopped: the one that ended the text, once one has.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def release(self, text: str, *, last: bool = False, holds_space: bool = False) -> str:
        """Takes up text, and gives out what is decided: all up to a stop string, if it is the `last`.

        With `holds_space`, white space at the end waits for what follows it, and is never given out if nothing does.
        """
        text = self._held + text
        end = len(text) if last else begin_of_partial(text, self._stops)
        found = [(begin, len(stop), stop) for stop in self._stops if (begin := text.find(stop)) != -1]
        if found:
            begin, _, stop = min(found)
            if begin <= end:
                self.stopped, self._held = stop, ""
                return text[:begin]
        if holds_space:
            end = min(end, len(text.rstrip()))
        self._held = text[end:]
        return text[:end]


def begin_of_partial(text: str, wholes: Iterable[str]) -> int:
    """Where the earliest of some strings begins that `text` holds a part of, at its end; else its length."""
    earliest = len(text)
    for whole in wholes:
        begin = text.find(whole[0], max(0, len(text) - len(whole) + 1), earliest)
        while begin != -1 and not whole.startswith(text[begin:]):
            begin = text.find(whole[0], begin + 1, earliest)
        if begin != -1:
            earliest = begin
    return earliest
