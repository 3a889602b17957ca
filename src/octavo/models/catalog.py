"""Names of models: what they stand for, what is there, and how to get what is not."""

from __future__ import annotations

import difflib
import os
from contextlib import suppress
from pathlib import Path

from octavo.errors import InvalidModelFile, ModelNotFound, OctavoError
from octavo.models import bundled, folder, gguf, hub
from octavo.models.loaded import ModelEntry, Progress, Source

_ACCEPTED = (
    f"A model is a bundled name ({', '.join(bundled.MODELS)}), a folder with config.json and safetensors, a "
    ".gguf file, or a hub id such as owner/name."
)


def resolve(name: str | os.PathLike[str]) -> Source:
    """What a name stands for. Nothing is downloaded.

    A bundled name comes first (write `./smollm2` for a folder of that name), then a folder or a file, then a
    hub id.

    Raises:
        ModelNotFound: it is none of these.
        InvalidModelFile: it is a file or folder that holds no model.
    """
    text = os.fspath(name)
    if text in bundled.MODELS:
        model = bundled.MODELS[text]
        return Source("bundled", text, model.path if model.is_pulled else None)
    path = Path(text).expanduser()
    try:
        if text and path.is_dir():
            folder.read_folder(path)
            return Source("folder", path.resolve().name, path)
        if path.is_file():
            if gguf.is_gguf(path):
                return Source("gguf", path.stem, path)
            raise InvalidModelFile(f"{path} is not a model. {_ACCEPTED}")
    except OSError as error:
        raise InvalidModelFile(f"{path} cannot be read: {error.strerror}. Check its permissions.") from error
    if hub.is_hub_id(text):
        return Source("hub", text, hub.cached(text))
    raise ModelNotFound(f"There is no model {text!r}.{_suggestion(path)} {_ACCEPTED}")


def pull(name: str | os.PathLike[str] | Source, progress: Progress | None = None) -> Source:
    """Get a model onto this machine, and do the slow reading that a first use would do. Safe to repeat.

    Raises:
        OctavoError: as `resolve`, and what can go wrong on the way; the message says what to do.
    """
    source = name if isinstance(name, Source) else resolve(name)
    if source.kind == "bundled":
        source = Source("bundled", source.name, bundled.pull(bundled.MODELS[source.name], progress))
    if source.kind == "hub":
        source = Source("hub", source.name, hub.pull(source.name, progress))
    if source.kind in ("bundled", "gguf"):
        gguf.prepare(local_path(source), progress)
    return source


def local_path(source: Source) -> Path:
    """Where the model lies on this machine.

    Raises:
        ModelNotFound: it has not been pulled.
    """
    if source.path is None:
        raise ModelNotFound(f"{source.name} is not on this machine. Run `octavo pull {source.name}` first.")
    return source.path


def list_models() -> list[ModelEntry]:
    """Bundled models (pulled or not), GGUF files that were used before, and models in the hub's cache."""
    entries = []
    for model in bundled.MODELS.values():
        entries.append(ModelEntry(model.name, "bundled", model.path if model.is_pulled else None, model.size))
    known = {entry.path.resolve() for entry in entries if entry.path is not None}
    for path in gguf.seen():
        if path not in known:
            entries.append(ModelEntry(str(path), "gguf", path, path.stat().st_size))
    return entries + hub.cached_models()


def _suggestion(path: Path) -> str:
    """The names that are closest to one that does not exist, in a sentence."""
    names = list(bundled.MODELS)
    with suppress(OctavoError):
        names += map(str, gguf.seen())
    close = difflib.get_close_matches(str(path), names, n=2)
    try:
        neighbours = [
            entry.name for entry in path.parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf"
        ]
    except OSError:
        neighbours = []
    close += [str(path.parent / match) for match in difflib.get_close_matches(path.name, neighbours, n=2)]
    return f" Did you mean {' or '.join(dict.fromkeys(close))}?" if close else ""
