"""Opening an engine for a command."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.terminal import Terminal
from octavo.models import catalog

if TYPE_CHECKING:
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
    logging.getLogger("octavo").addHandler(logging.NullHandler())  # each reply says it, in its notes
    # What can go wrong with names, files and downloads is told before torch is imported, which takes seconds.
    source = catalog.resolve(model)
    with terminal.bars() as bars:
        bars("start", 0, None)
        if source.path is None or source.kind in ("bundled", "gguf"):
            catalog.pull(source, bars)
        with no_garbage_collection():
            engine = make_engine(model, progress=bars, **settings)
    for notice in engine.notices:
        terminal.remark(notice)
    return engine


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """What the libraries make while they are imported stays to the end, so it is never gone over: that takes 0.5 s
    at the start, and 0.2 s at the end or in the middle of an answer."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def make_engine(model: str, **settings: Any) -> Engine:
    scan_transformers_once()
    from octavo.sessions.engine import Engine

    return Engine(model, **settings)


def scan_transformers_once() -> None:
    """transformers goes through its models' files once for the package and once for `transformers.models`, and finds
    the same; once is enough, and saves 0.2 s. For a process of our own."""
    import transformers  # noqa: F401 (the first time)
    from transformers.utils import import_utils

    scan = getattr(import_utils, "create_import_structure_from_path", None)
    if scan is not None:
        import_utils.create_import_structure_from_path = lambda path: scan(
            Path(path).parent if Path(path).is_file() else path
        )
