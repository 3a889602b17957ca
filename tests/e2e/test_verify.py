"""`octavo verify` on the bundled model, and the text that it reads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from octavo.engine.verify import default_text
from octavo.models.load import load_model


@pytest.mark.bundled
def test_smollm2_loses_little_with_int8_and_more_with_int4() -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "verify", "smollm2", "--json"]
    command += ["--contexts", "512", "--windows", "1", "--batch", "1,2", "--formats", "int8,int4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    results = json.loads(line)["results"]
    assert [(r["batch"], r["format"]) for r in results] == [
        (1, "int8"),
        (1, "int4"),
        (2, "int8"),
        (2, "int4"),
    ]
    for alone, beside in zip(results[:2], results[2:], strict=True):
        assert {**alone, "batch": 2} == beside
    int8, int4 = results[:2]
    assert (int8["num_windows"], int8["num_tokens"]) == (1, 511)
    assert 0 < int8["mean_kld"] <= 0.0001
    assert int8["same_top"] >= 0.99
    assert int8["mean_kld"] * 10 < int4["mean_kld"] <= 0.015
    assert 0.25 < int8["size"] <= 0.28
    assert int4["size"] <= 0.17


@pytest.mark.bundled
def test_the_text_of_the_package_is_enough_for_batches_of_the_longest_context() -> None:
    text = default_text()
    assert len(text.encode()) <= 200_000
    assert len(load_model("smollm2", dtype="bf16").tokenizer.encode(text)) >= 4 * 8192


@pytest.mark.bundled
def test_reuse_behind_an_edit_saves_most_and_loses_little() -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "verify", "smollm2", "--edits", "--weights", "auto"]
    command += ["--contexts", "1200", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")
    scores = json.loads(result.stdout)["edits"]
    assert [(s["share"], s["recompute"]) for s in scores[:4]] == [
        (0.25, None),
        (0.25, 32),
        (0.25, 64),
        (0.25, 256),
    ]
    exact, little = scores[0], scores[1]
    assert exact["mean_kld"] == 0
    assert little["computed_tokens"] < exact["computed_tokens"] / 4
    assert 0 < little["mean_kld"] < 0.05
    assert little["same_top"] > 0.8
