"""The process of a server ends when nobody can be answered any more."""

from __future__ import annotations

import threading

import pytest

from octavo.errors import EngineStopped
from octavo.server.serve import listen, serve
from octavo.server.settings import ServerSettings


async def app(scope, receive, send) -> None:
    raise AssertionError("nobody asks")


def test_it_ends_with_the_reason_when_the_engine_has_died() -> None:
    settings = ServerSettings(port=0)
    ready: list[bool] = []

    def check() -> None:
        if ready:
            raise EngineStopped("The engine does not run any more: its thread died of SystemError('gone').")

    listener, stopping = listen(settings), threading.Event()
    try:
        with pytest.raises(EngineStopped, match="gone"):
            serve(app, settings, listener, lambda: ready.append(True), stopping, check)
    finally:
        listener.close()
    assert ready == [True]
    assert stopping.is_set()
