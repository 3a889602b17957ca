"""Turns of a thread that has time, beside one that has none.

Where every processor computes, a third thread takes a slice of some milliseconds from one of them, whatever its
priority is, and may be made to wait while it has the interpreter's lock. So the busy thread says when.
"""

from __future__ import annotations

import threading


class Turns:
    """A patient thread works in turns that a busy one gives it, or at will while that rests."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rests = True
        self._wanted = self._given = False

    @property
    def are_free(self) -> bool:
        """Whether the busy thread rests."""
        return self._rests

    def give(self, seconds: float) -> None:
        """From the busy thread: a turn if one is wanted, which is waited for, but not longer than this."""
        with self._changed:
            self._rests = False
            if not self._wanted:
                return
            self._given = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._given, seconds)

    def rest(self) -> None:
        """From the busy thread: until it gives a turn again there is time."""
        with self._changed:
            self._rests = True
            self._changed.notify_all()

    def take(self, seconds: float) -> None:
        """From the patient thread: waits for a turn, but not longer than this."""
        with self._changed:
            self._wanted = True
            self._changed.wait_for(lambda: self._rests or self._given, seconds)
            self._wanted = False

    def end(self) -> None:
        """From the patient thread: its turn is over, if it had one."""
        with self._changed:
            if self._given:
                self._given = False
                self._changed.notify_all()
