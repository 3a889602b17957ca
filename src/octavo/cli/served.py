"""The models of `octavo serve`: what they are called, what they take, and how they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.cli.load import loading
from octavo.cli.terminal import Terminal
from octavo.errors import InvalidRequest
from octavo.models import catalog
from octavo.models.loaded import Source

if TYPE_CHECKING:
    from octavo.server.engines import ServedEngine
    from octavo.server.places import Loading

_SHARE = 4, 5
"""Of the memory that is free at the start, which loaded models may take."""


def loadings(
    models: Sequence[str], options: dict[str, Any], max_loaded_bytes: int | None
) -> tuple[list[Loading[ServedEngine]], int]:
    """How each model is loaded, and the bytes that they may take together.

    Several models without a budget for their caches share half of that equally; `options` gets it.

    Raises:
        OctavoError: a model cannot be found, two have one name, or one does not fit.
    """
    import psutil

    from octavo.server.places import Loading

    sources = [catalog.resolve(model) for model in models]
    names = [source.name for source in sources]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidRequest(
            f"Several models are called {min(twice)!r}, which requests ask for. Give each file or folder a name of "
            "its own."
        )
    limit = max_loaded_bytes or psutil.virtual_memory().available * _SHARE[0] // _SHARE[1]
    if len(models) > 1 and options["kv_memory"] is None:
        options["kv_memory"] = limit // (2 * len(models))
    cache = options["kv_memory"] or 0
    found = []
    for model, source in zip(models, sources, strict=True):
        num_bytes = _weights(source) + cache
        if num_bytes > limit and (max_loaded_bytes or len(models) > 1):  # one alone is tried
            raise InvalidRequest(
                f"{source.name} needs about {num_bytes:,} bytes, {cache:,} of them for its cache, and loaded models "
                f"may take {limit:,}. Raise --max-loaded or lower --kv-memory."
            )
        found.append(Loading(source.name, num_bytes, partial(_make_engine, model, logs=True, **options)))
    return found, limit


def first_engine(model: str, options: dict[str, Any], terminal: Terminal) -> ServedEngine:
    """The engine of a model, in a process of its own, with bars while it loads; whoever gets it closes it.

    Raises:
        OctavoError: the model cannot be found or loaded; the message says what to do.
    """
    with loading(model, terminal) as bars:
        engine = _make_engine(model, progress=bars, meanwhile=_import_the_server, **options)
    for notice in engine.notices:
        terminal.remark(notice)
    return engine


def _make_engine(model: str, **options: Any) -> ServedEngine:
    from octavo.server.remote.engine import RemoteEngine

    return RemoteEngine(model, **options)


def _import_the_server() -> None:
    """What takes a second to import, and does not load torch."""
    from octavo.models.imports import scan_transformers_once

    scan_transformers_once()
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import octavo.server.app  # noqa: F401


def _weights(source: Source) -> int:
    """The bytes of a model's weights on disk; 0 while it is not on this machine."""
    if source.path is None:
        return 0
    if source.path.is_file():
        return source.path.stat().st_size
    return sum(file.stat().st_size for file in source.path.glob("*.safetensors"))
