"""What the server and an engine's process send each other: pickles, with their length before them, over a socket pair.

Unpickling can do anything, so nobody else may write to the socket: it has no name, and only these two have its ends.
"""

from __future__ import annotations

import builtins
import pickle
import socket
import struct
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from octavo.engine.messages import Delta, Event, Failure
from octavo.errors import OctavoError

_LENGTH = struct.Struct("<Q")
_SOCKET_BYTES = 1 << 20


class Ended(Exception):
    """The other side is gone."""


class Channel:
    """One end. Any thread may send, and one receives."""

    def __init__(self, end: socket.socket) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        self._end = end
        self._sending = threading.Lock()
        self._reader = end.makefile("rb", buffering=1 << 16)

    def send(self, *message: object) -> None:
        """Raises Ended if nobody will receive it."""
        body = pickle.dumps(message, protocol=5)
        try:
            with self._sending:
                self._end.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise Ended from error

    def receive(self) -> tuple[Any, ...]:
        """The next message; raises Ended when there are no more."""
        try:
            head = self._reader.read(_LENGTH.size)
            if len(head) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                body = self._reader.read(length)
                if len(body) == length:
                    message: tuple[Any, ...] = pickle.loads(body)
                    return message
        except (OSError, ValueError) as error:  # it was closed here
            raise Ended from error
        raise Ended

    def close(self) -> None:
        """Lets the other side read that there are no more messages, and reads none itself."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def pack_event(event: Event) -> object:
    """An event as it is sent. Nearly all are deltas without a reply, which cost a tenth as plain values."""
    if isinstance(event, Delta) and event.reply is None:
        return (
            event.request_id,
            event.index,
            event.text,
            event.token_ids,
            event.logprobs,
            event.finish_reason,
            None,
            event.stop,
            event.num_cached_tokens,
        )
    if isinstance(event, Failure):
        return Failure(event.request_id, portable(event.error))
    return event


def unpack_events(packed: Iterable[Any]) -> list[Event]:
    """The events that `pack_event` was given."""
    return [Delta(*item) if type(item) is tuple else item for item in packed]


def portable(error: BaseException) -> Exception:
    """An error that means the same in the other process. Where it came from stands in its notes, for the log."""
    if isinstance(error, OctavoError):
        found: Exception = error
    elif isinstance(error, Exception) and vars(builtins).get(type(error).__name__) is type(error):
        found = error
    else:  # its class may be of a library that the other process does not load
        found = RuntimeError(f"{type(error).__name__}: {error}")
    try:
        pickle.loads(pickle.dumps(found))
    except Exception:
        found = RuntimeError(f"{type(error).__name__}: {error}")
    if not getattr(found, "__notes__", None) and (error.__traceback__ or error.__cause__):
        found.add_note("In the engine's process:\n" + "".join(traceback.format_exception(error)).rstrip())
    return found
