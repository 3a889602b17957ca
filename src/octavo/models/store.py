"""The local model cache: files written atomically, and hashes of files remembered.

models/
├── bundled/   downloaded weights of bundled models
├── gguf/      one folder per GGUF content: config, tokenizer and tensor table
└── files/     one small record per hashed file: its identity and its SHA-256
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.errors import EngineError, InvalidModelFile
from octavo.models.loaded import Progress

_CHUNK = 1 << 22
_SETTLED_NS = 2_000_000_000
"""A file changed this shortly before it was hashed may change again within one tick of its clock."""
_ABANDONED_S = 24 * 3600


def model_cache(*parts: str) -> Path:
    """A folder of the model cache, made if need be; only its owner may look inside.

    Raises:
        EngineError: it cannot be made.
    """
    root = os.environ.get("OCTAVO_CACHE")
    if root is None:
        import platformdirs

        root = platformdirs.user_cache_dir("octavo")
    folder = Path(root, "models")
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for part in parts:
            folder = folder / part
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise EngineError(
            f"The model cache {folder} cannot be made: {error.strerror}. Set OCTAVO_CACHE to a folder you "
            "can write."
        ) from error
    return folder


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is either whole or not there."""
    handle, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        os.close(handle)
        Path(name).write_bytes(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends well, and else disappears.

    When another process made `path` in the meantime, theirs stays.
    """
    with temporary_folder(path.parent) as folder:
        yield folder
        try:
            folder.rename(path)
        except OSError:
            if not path.is_dir():
                raise


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder inside `parent`, removed when the block ends; so are those of processes that died."""
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=".tmp-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove temporary folders that nobody has changed for a day."""
    for folder in parent.glob(".tmp-*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What changes when a file's content does. Times are in nanoseconds."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        real = path.resolve()
        stat = real.stat()
        return cls(str(real), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    @property
    def record(self) -> Path:
        """Where this file's hash is remembered."""
        name = hashlib.blake2b(os.fsencode(self.path), digest_size=16).hexdigest()
        return model_cache("files") / f"{name}.json"

    @property
    def changed_ns(self) -> int:
        return max(self.mtime_ns, self.ctime_ns)


@dataclass(frozen=True, slots=True)
class FileHash:
    """A file's SHA-256 (hexadecimal), and when it was taken."""

    file: FileIdentity
    sha256: str
    taken_ns: int

    def remember(self) -> None:
        """Keep the hash, so that `hash_file` need not read an unchanged file again."""
        if _read_record(self.file.record) != self:
            write_atomically(self.file.record, json.dumps(asdict(self)).encode())


def remembered_hashes() -> list[FileHash]:
    """Hashes of files that are still what they were."""
    found = (_read_record(path) for path in model_cache("files").glob("*.json"))
    return [known for known in found if known is not None]


def _read_record(path: Path) -> FileHash | None:
    """The record, unless it cannot be read or its file has changed."""
    try:
        fields = json.loads(path.read_bytes())
        known = FileHash(FileIdentity(**fields["file"]), str(fields["sha256"]), int(fields["taken_ns"]))
        return known if FileIdentity.of(Path(known.file.path)) == known.file else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def hash_file(path: Path, progress: Progress | None = None) -> FileHash:
    """The SHA-256 of a file, from memory if the file has not changed since.

    Raises:
        InvalidModelFile: the file changed while it was read.
    """
    file = FileIdentity.of(path)
    known = _read_record(file.record)
    if known is not None and known.file == file and known.taken_ns - file.changed_ns > _SETTLED_NS:
        return known
    taken_ns = time.time_ns()
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    done = 0
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            done += count
            if progress is not None:
                progress("hash", done, file.size)
    if FileIdentity.of(path) != file:
        raise InvalidModelFile(
            f"{path} changed while it was read. Wait until its download or copy is complete."
        )
    fresh = FileHash(file, digest.hexdigest(), taken_ns)
    if known is not None:
        fresh.remember()
    return fresh


def hash_files(folder: Path, names: list[str], progress: Progress | None = None) -> bytes:
    """One SHA-256 (32 bytes) over the names and contents of some files of a folder; each is remembered."""
    digest = hashlib.sha256()
    for name in sorted(names):
        hashed = hash_file(folder / name, progress)
        hashed.remember()
        digest.update(f"{name} {hashed.sha256}\n".encode())
    return digest.digest()
