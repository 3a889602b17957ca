"""API keys and whose they are. Only hashes of keys are held, in memory and in files."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from octavo.errors import InvalidRequest

_LINE = re.compile(r"(?P<name>[\w.@-]{1,64}) sha256:(?P<digest>[0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks: requests of different namespaces share nothing that was computed or kept."""

    name: str
    namespace: str


NOBODY = Tenant("", "")
"""Everybody, where no keys are set."""

METRICS = Tenant("metrics", "")
"""Who may read the metrics, and what the dashboard shows."""


class Keys:
    """The API keys that are accepted.

    Args:
        keys: in clear; they are hashed at once.
        files: lines of `NAME sha256:DIGEST`; `new_key` writes them.
        metrics_key: opens the metrics and what the dashboard shows, and nothing else.

    Raises:
        InvalidRequest: a key is empty, or a file cannot be read or has another line in it.
    """

    def __init__(
        self, keys: Iterable[str] = (), files: Iterable[Path] = (), metrics_key: str | None = None
    ) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._metrics = None if metrics_key is None else _digest(metrics_key)
        for key in keys:
            if not key.strip():
                raise InvalidRequest("An API key is empty. Write one, or leave the option out.")
            digest = _digest(key)
            self._add(digest[:8], digest)
        for path in files:
            for name, digest in _read(path):
                self._add(name, digest)

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def tenants(self) -> list[Tenant]:
        """All who have a key, or `NOBODY` where none are set."""
        return list(self._tenants.values()) or [NOBODY]

    def find(self, key: str) -> Tenant | None:
        """Whose key this is."""
        digest = _digest(key)
        return METRICS if digest == self._metrics else self._tenants.get(digest)

    def _add(self, name: str, digest: str) -> None:
        # The namespace comes from the key and not from the name, so that a key that is replaced starts anew.
        self._tenants[digest] = Tenant(name, f"key:{digest[:32]}")


def new_key(name: str, file: Path) -> str:
    """Makes a key, appends its hash to `file` (made readable by its owner alone), and returns the key.

    Raises:
        InvalidRequest: the name is taken or has odd characters, or the file is not a file of keys or cannot be
            written.
    """
    if not _LINE.fullmatch(f"{name} sha256:{'0' * 64}"):
        raise InvalidRequest(f"{name!r} is no name: use up to 64 letters, digits, and . _ - @.")
    if file.exists() and any(name == other for other, _ in _read(file)):
        raise InvalidRequest(f"{file} has a key of the name {name!r} already. Take another name.")
    key = f"oct-{secrets.token_urlsafe(32)}"
    try:
        file.touch(mode=0o600)
        data = file.read_bytes()
        with file.open("a", encoding="utf-8") as lines:
            lines.write("\n" if data and not data.endswith(b"\n") else "")
            lines.write(f"{name} sha256:{_digest(key)}\n")
    except OSError as error:
        raise InvalidRequest(f"The file of keys {file} cannot be written: {error}.") from error
    return key


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The file of keys {path} cannot be read: {error}.") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise InvalidRequest(
                f"Line {number} of {path} is not 'NAME sha256:DIGEST'. `octavo key` writes such lines."
            )
        found.append((match["name"], match["digest"]))
    return found


def _digest(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
