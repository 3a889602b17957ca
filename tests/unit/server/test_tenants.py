"""Files of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import InvalidRequest
from octavo.server.tenants import _read, new_key


def test_a_key_is_added_behind_a_line_without_an_end(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    new_key("ada", file)
    file.write_text(file.read_text().rstrip("\n"))
    new_key("bob", file)
    assert [name for name, _ in _read(file)] == ["ada", "bob"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be written"):
        new_key("ada", tmp_path / "none" / "keys.txt")
