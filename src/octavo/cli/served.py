"""The models of `octavo serve`: what they are called, what they take, and how they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.cli.load import make_engine
from octavo.errors import InvalidRequest
from octavo.models import catalog
from octavo.models.loaded import Source

if TYPE_CHECKING:
    from octavo.server.places import Loading
    from octavo.sessions.engine import Engine

_SHARE = 4, 5
"""Of the memory that is free at the start, which loaded models may take."""


def loadings(
    models: Sequence[str], options: dict[str, Any], max_loaded_bytes: int | None
) -> tuple[list[Loading[Engine]], int]:
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
        found.append(Loading(source.name, num_bytes, partial(make_engine, model, **options)))
    return found, limit


def _weights(source: Source) -> int:
    """The bytes of a model's weights on disk; 0 while it is not on this machine."""
    if source.path is None:
        return 0
    if source.path.is_file():
        return source.path.stat().st_size
    return sum(file.stat().st_size for file in source.path.glob("*.safetensors"))
