"""`octavo doctor`: what it finds on this machine, and on others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model, tiny_tokenizer

from octavo.cli import doctor
from octavo.cli.main import invoke
from octavo.kernels.linear import PackedMatrix

SUBJECTS = {
    *(
        "versions",
        "system",
        "memory",
        "huge_pages",
        "model_cache",
        "disk_tier",
        "cpu",
        "dtype",
        "threads",
        "kernels",
        "openmp",
    ),
    *("exactness", "problems", "advice"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = invoke(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_a_process_of_its_own_finds_nothing_wrong(cache: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OCTAVO_ISA": "generic"},
    )
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert set(found) == SUBJECTS
    assert found["problems"] == []
    assert found["kernels"] == {"isa": "generic", "OCTAVO_ISA": "generic"}
    assert len(found["openmp"]) == 1
    assert "libgomp" in found["openmp"][0]
    assert found["versions"]["torch"] == torch.__version__
    assert 0 < found["memory"]["free_bytes"] < found["memory"]["total_bytes"]
    assert found["model_cache"]["path"] == str(cache / "models")
    assert found["exactness"] == {"model": None, "exact": None, "parts": []}


def test_a_model_is_measured_and_then_remembered(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, found = report(capsys, model)
    assert (code, found["problems"]) == (0, [])
    assert (found["exactness"]["model"], found["exactness"]["exact"]) == ("tiny", True)
    parts = found["exactness"]["parts"]
    assert len(parts) == 5  # sizes of linear layers
    assert not any(part["num_differing"] for part in parts)
    code, later = report(capsys)
    assert code == 0
    assert sorted(later["exactness"]["parts"], key=str) == sorted(parts, key=str)
    assert invoke(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("Exactness    remembered: 5 parts, ") for line in lines)
    assert lines[-1] == "Nothing is wrong."


def test_a_model_that_is_not_exact_is_wrong(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report(capsys, model)[0] == 0
    multiply = PackedMatrix.multiply

    def broken(self: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
        return multiply(self, x) * (1 if len(x) != 5 else 1.01)

    monkeypatch.setattr(PackedMatrix, "multiply", broken)
    code, found = report(capsys, model)  # what is remembered does not count
    assert (code, found["exactness"]["exact"]) == (1, False)
    (problem,) = found["problems"]
    assert "with 5 rows at once or more" in problem
    assert invoke(["doctor"]) == 1
    assert f"Wrong: {problem}" in capsys.readouterr().out.splitlines()


def test_other_machines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    setting, maps = cache / "enabled", cache / "maps"
    setting.write_text("always madvise [never]\n")
    maps.write_text(
        "7f00-7f01 r-xp 00000000 00:00 1   /a/libgomp-24e2ab19.so.1.0.0\n"
        "7f01-7f02 r--p 00000000 00:00 1   /a/libgomp-24e2ab19.so.1.0.0\n"
        "7f02-7f03 r-xp 00000000 00:00 2   /b/my libs/libiomp5.so\n"
        "7f02-7f03 r-xp 00000000 00:00 2   /c/other.libs/libgomp-6a29c32d.so.1.0.0\n"
        "7f03-7f04 r-xp 00000000 00:00 3   /b/libcompute.so\n7f04-7f05 rw-p 00000000 00:00 0\n"
    )
    monkeypatch.setattr(doctor, "_HUGE_PAGES", setting)
    monkeypatch.setattr(doctor, "_MAPS", maps)
    monkeypatch.setattr(doctor, "_PACKAGES", (*doctor._PACKAGES, "no-such-package"))
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: set())
    code, found = report(capsys)
    assert code == 1
    assert found["openmp"] == [
        "/a/libgomp-24e2ab19.so.1.0.0",
        "/b/my libs/libiomp5.so",
        "/c/other.libs/libgomp-6a29c32d.so.1.0.0",  # one package's own
    ]
    assert [problem.partition(".")[0] for problem in found["problems"]] == [
        "The package no-such-package is not installed",
        "There must be one OpenMP runtime in the process and there are 2 (/a/libgomp-24e2ab19",
    ]
    assert [advice.partition(",")[0] for advice in found["advice"]] == [
        "Transparent huge pages are switched off",
        f"There are {found['threads']['used']} threads for 0 CPUs",
    ]
    assert f"echo madvise | sudo tee {setting}" in found["advice"][0]


def test_mistakes_of_the_user(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert invoke(["doctor", "/nonexistent"]) == 2
    assert "/nonexistent" in capsys.readouterr().err
    monkeypatch.setenv("OCTAVO_ISA", "banana")
    code, found = report(capsys)
    assert code == 1
    assert "OCTAVO_ISA is 'banana'" in found["problems"][0]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    assert invoke(["doctor"]) == 1
    assert "Set OCTAVO_CACHE to a folder you can write." in capsys.readouterr().out


def test_the_disk_tier_is_looked_at_and_left_as_it_is(
    capsys: pytest.CaptureFixture[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.kv.storage.disk import DiskStore
    from octavo.kv.storage.file import store_path

    monkeypatch.setenv("OCTAVO_KV_DISK", "1MiB")
    _, found = report(capsys)
    assert (found["disk_tier"]["used_bytes"], found["disk_tier"]["budget_bytes"]) == (0, 1 << 20)
    assert not store_path().exists()
    DiskStore(store_path()).close()
    _, found = report(capsys)
    assert found["disk_tier"]["used_bytes"] > 0
    assert (found["disk_tier"]["records"], found["disk_tier"]["fault"]) == (0, "")
    assert invoke(["doctor"]) == 0
    assert "0 records, 0 documents, sound" in capsys.readouterr().out
    data = bytearray(store_path().read_bytes())
    data[100:4000] = bytes(3900)
    store_path().write_bytes(data)
    code, found = report(capsys)
    assert code == 1
    assert found["disk_tier"]["fault"]
    assert any("octavo cache verify" in problem for problem in found["problems"])
    assert store_path().read_bytes() == data
    monkeypatch.setenv("OCTAVO_KV_DISK", "1000TiB")
    assert any("The disk has" in advice for advice in report(capsys)[1]["advice"])
    monkeypatch.setenv("OCTAVO_KV_DISK", "plenty")
    assert any("is not a size" in problem for problem in report(capsys)[1]["problems"])
