"""Models of the Hugging Face hub, with huggingface_hub's own cache, token and settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from octavo.errors import ModelNotFound, NetworkUnavailable, OctavoError
from octavo.models import folder
from octavo.models.loaded import ModelEntry, Progress

_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_ALLOW = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_IGNORE = ["*/*", "consolidated*"]
"""Subfolders hold other formats, and `consolidated` files the same weights once more."""


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `owner/name`."""
    return _ID.fullmatch(name) is not None and not name.endswith(".gguf")


def cached(repo_id: str) -> Path | None:
    """The model's folder in the hub's cache, if it can be loaded from there; the network is not used."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        path = Path(
            snapshot_download(repo_id, local_files_only=True, allow_patterns=_ALLOW, ignore_patterns=_IGNORE)
        )
        folder.read_folder(path)
    except (OSError, HFValidationError, OctavoError):  # an entry that is not there is an OSError too
        return None
    return path


def pull(repo_id: str, progress: Progress | None = None) -> Path:
    """The model's folder, brought up to date; without a network, the one in the hub's cache.

    Raises:
        ModelNotFound: there is no such model, or it cannot be had with the present token.
        NetworkUnavailable: it could not be downloaded and is not in the cache.
        InvalidModelFile, UnsupportedModel: it has no weights that can be loaded.
    """
    from huggingface_hub import snapshot_download

    bar = _progress_bar(progress)
    try:
        path = Path(
            snapshot_download(repo_id, allow_patterns=_ALLOW, ignore_patterns=_IGNORE, tqdm_class=bar)
        )
    except Exception as error:
        # The HTTP library differs by version of huggingface_hub, and so do the classes of its errors.
        refusal = _refusal(repo_id, error)
        kept = cached(repo_id) if isinstance(refusal, NetworkUnavailable) else None
        if kept is None:
            raise refusal from error
        return kept
    folder.read_folder(path)
    return path


def config_file(repo_id: str) -> Path:
    """The model's `config.json`, and nothing else of it.

    Raises:
        ModelNotFound, NetworkUnavailable: as `pull`.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo_id, folder.CONFIG))
    except Exception as error:  # see `pull`
        raise _refusal(repo_id, error) from error


def cached_models() -> list[ModelEntry]:
    """Models in the hub's cache that can be loaded, by name."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    found = []
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        path = cached(repository.repo_id) if repository.repo_type == "model" else None
        if path is not None:
            found.append(ModelEntry(repository.repo_id, "hub", path, repository.size_on_disk))
    return found


def _refusal(repo_id: str, error: Exception) -> OctavoError:
    """A sentence and a next step for what the hub, or the way to it, said."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    login = "set HF_TOKEN or run `hf auth login`"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return ModelNotFound(
            f"{repo_id} is gated on the hub. Accept its terms on its page there, {login}, and try again."
        )
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        return ModelNotFound(
            f"There is no folder {repo_id} here and no model of that id on the hub, or it is private. Check "
            f"the spelling; for a private model {login}."
        )
    if isinstance(error, HfHubHTTPError) and status in (401, 403):
        return ModelNotFound(
            f"The hub does not give {repo_id} to the present token (HTTP {status}). Please {login}."
        )
    said = " ".join(str(error).split())[:200]
    if isinstance(error, LocalEntryNotFoundError):
        known = isinstance(try_to_load_from_cache(repo_id, "config.json"), str)
        return NetworkUnavailable(
            f"{repo_id} is not {'complete ' if known else ''}in the hub's cache and the hub cannot be reached. "
            "Check the network "
            f"(and HF_HUB_OFFLINE) and run `octavo pull {repo_id}` again, or name a folder or file on this "
            "machine."
        )
    return NetworkUnavailable(
        f"{repo_id} could not be downloaded ({type(error).__name__}: {said}). Check the network and free "
        f"disk space, and run `octavo pull {repo_id}` again; what is downloaded already is kept."
    )


def _progress_bar(progress: Progress | None) -> type[Any]:
    """A silent progress bar that reports the bytes of all files."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Reporter(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            # Beside the bar of written bytes there is one of files, and one of bytes on the network.
            self._counts = options.get("unit") == "B" and options.get("desc") != "Downloading bytes"
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._counts and progress is not None:
                progress("download", int(self.n), int(self.total or self.n))
            return None

    return Reporter
