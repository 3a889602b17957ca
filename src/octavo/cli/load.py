"""Opening an engine for a command."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.cli.terminal import Terminal
from octavo.models import catalog
from octavo.models.imports import no_garbage_collection, scan_transformers_once

if TYPE_CHECKING:
    from octavo.models.loaded import Progress
    from octavo.sessions.engine import Engine


@contextmanager
def opened(model: str, settings: dict[str, Any], terminal: Terminal) -> Iterator[Engine]:
    """The engine of a model, with bars while it loads; closed at the end.

    Raises:
        OctavoError: the model cannot be found or loaded; the message says what to do.
    """
    with loaded(model, settings, terminal) as engine:
        yield engine


def loaded(model: str, settings: dict[str, Any], terminal: Terminal) -> Engine:
    """The engine of a model, with bars while it loads; whoever gets it closes it.

    Raises:
        OctavoError: as `opened`.
    """
    with loading(model, terminal) as bars:
        engine = make_engine(model, progress=bars, **settings)
    for notice in engine.notices:
        terminal.remark(notice)
    return engine


@contextmanager
def loading(model: str, terminal: Terminal) -> Iterator[Progress]:
    """Gets the model if it is not there, and shows bars while it is loaded, which is to be done inside the block."""
    logging.getLogger("octavo").addHandler(logging.NullHandler())  # each reply says it, in its notes
    # What can go wrong with names, files and downloads is told before torch is imported, which takes seconds.
    source = catalog.resolve(model)
    with terminal.bars() as bars:
        bars("start", 0, None)
        if source.path is None or source.kind in ("bundled", "gguf"):
            catalog.pull(source, bars)
        with no_garbage_collection():
            yield bars


def make_engine(model: str, **settings: Any) -> Engine:
    scan_transformers_once()
    from octavo.sessions.engine import Engine

    return Engine(model, **settings)
