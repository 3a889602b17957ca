"""Starting an engine's process, and saying how it has ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from octavo.server.remote.wire import Channel

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start_worker() -> tuple[subprocess.Popen[bytes], Channel]:
    """A new process, and the channel to it. It imports what this one does, and writes to the same standard error."""
    here, there = socket.socketpair()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # Until it ignores them itself, a Ctrl-C for the server must not end it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        with there:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "octavo.server.remote.worker", str(there.fileno())],
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )
    except BaseException:
        here.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return process, Channel(here)


def how_it_ended(code: int) -> str:
    """A sentence about the exit code of the process, as `Popen` gives it."""
    if code >= 0:
        return f"The engine's process has ended with exit code {code}. Start the server again."
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        return (
            f"The engine's process was ended by {name}, which the system sends when memory runs out. Start the server "
            "again, with a lower --kv-memory if that was the cause."
        )
    return f"The engine's process was ended by {name}. Start the server again."
