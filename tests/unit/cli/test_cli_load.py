"""Opening an engine: what is saved on the way changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import models
from transformers.utils import import_utils

from octavo.models.imports import scan_transformers_once

NAME = "create_import_structure_from_path"


@pytest.mark.parametrize("place", ["", "llama"])
def test_a_package_scanned_as_a_folder_is_what_its_file_gives(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = getattr(import_utils, NAME)
    monkeypatch.setattr(import_utils, NAME, scan)  # restored at the end
    scan_transformers_once()
    file = Path(models.__file__).parent / place / "__init__.py"
    found = getattr(import_utils, NAME)(file)
    assert found
    assert getattr(import_utils, NAME) is not scan
    assert found == scan(file)
