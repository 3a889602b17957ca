"""Importing the model libraries quickly, in a process of our own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
