"""`octavo verify`: what it takes, prints and recommends. The figures are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.engine import verify as engine_verify
from octavo.engine.verify import FormatScore, VerifySettings, default_text
from octavo.models import load


def score(name: str, context: int = 512, batch: int = 1, **figures: Any) -> FormatScore:
    size, kld = {"bf16": (0.5, 1e-5), "int8": (0.273, 3e-5), "int4": (0.156, 0.00704)}[name]
    made: dict[str, Any] = {
        "bytes_per_token": round(46080 * size),
        "size": size,
        "num_windows": 4096 // context,
        "num_tokens": 4092,
        "perplexity": 11.61 + kld,
        "reference_perplexity": 11.61,
        "mean_kld": kld,
        "p999_kld": 20 * kld,
        "same_top": 1 - kld,
    }
    return FormatScore(name, context, batch, **{**made, **figures})


class Comparison:
    """Stands for loading a model and comparing: returns `scores`, and keeps what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scores: list[FormatScore] = [
            score(name, context, batch)
            for context in (512, 2048)
            for batch in (1, 4)
            for name in ("bf16", "int8", "int4")
        ]
        self.loaded: list[str] = []
        self.text = ""
        self.settings: VerifySettings | None = None
        monkeypatch.setattr(load, "load_model", self._load)
        monkeypatch.setattr(engine_verify, "verify", self._verify)

    def _load(self, source: Any, *, dtype: str, weights: str, progress: Any) -> Any:
        progress("load", 1, 2)
        self.loaded.append(f"{dtype} {weights}")
        return SimpleNamespace(name="toy", context_length=4096)

    def _verify(
        self, _: Any, text: str, settings: VerifySettings, progress: Callable[[str, int, int], None]
    ) -> list[FormatScore]:
        self.text, self.settings = text, settings
        progress("verify", 1, 2)
        return self.scores


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    return Comparison(monkeypatch)


def test_a_table_and_a_recommendation(program: Any, comparison: Comparison) -> None:
    result = program("verify", "toy", "--contexts", "512,2048")
    assert (result.code, result.err) == (0, "")
    assert comparison.loaded == ["fp32 fp32"]
    assert comparison.text == default_text()
    lines = [line.rstrip() for line in result.out.splitlines()]
    table = lines[: lines.index("toy read 8 windows of 512 tokens, 2 windows of 2,048 tokens, in float32 arithmetic; "
                                "fp32 is the unquantised cache.")]  # fmt: skip
    assert max(map(len, table)) <= 79
    rows = [line.split() for line in table if "%" in line]
    assert rows[0] == ["Context", "Batch", "Format", "Size", "Perplexity", "KLD", "99.9", "%", "Same", "top"]
    assert rows[1] == ["512", "1,", "4", "fp32", "100", "%", "11.610"]
    assert rows[3] == ["int8", "27.3", "%", "11.610", "+0.000", "%", "0.00003", "0.0006", "100.00", "%"]
    assert rows[4] == ["int4", "15.6", "%", "11.617", "+0.061", "%", "0.00704", "0.1408", "99.30", "%"]
    assert rows[5][:4] == ["2,048", "1,", "4", "fp32"]
    assert len(rows) == 1 + 2 * 4
    said = "\n".join(lines)
    assert "Batches of 1 and 4 gave the same figures in every bit." in said
    assert "independent of the precision of the weights" in said
    assert lines[-1].startswith("Recommended: --kv-format int8, 12,580 B a token")


def test_how_much_a_recommended_format_may_diverge(program: Any, comparison: Comparison) -> None:
    def recommended(*options: str) -> Any:
        return json.loads(program("verify", "toy", "--json", *options).out)["recommended"]

    assert recommended() == "int8"
    assert recommended("--max-kld", "0.01") == "int4"
    assert recommended("--max-kld", "0.00001") == "bf16"
    assert recommended("--max-kld", "0") is None
    said = program("verify", "toy", "--max-kld", "0").out
    assert "No format keeps the mean KLD at or under 0 in every context. Use --kv-format fp32" in said


def test_figures_that_differ_between_batches_are_shown_and_said(program: Any, comparison: Comparison) -> None:
    comparison.scores = [score("int8"), score("int8", batch=4, mean_kld=0.5)]
    out = program("verify", "toy").out
    assert "0.00003" in out
    assert "0.50000" in out
    assert "The figures differ between batches, which they must not" in out
    assert "same figures" not in out


def test_json_is_one_line(program: Any, comparison: Comparison) -> None:
    comparison.scores = [score("int8"), score("int4", mean_kld=float("inf"))]
    result = program("verify", "toy", "--json", "--contexts", "9000")
    assert (result.code, result.err) == (0, "")
    (line,) = result.out.splitlines()
    value = json.loads(line)
    assert (value["model"], value["max_kld"], value["recommended"]) == ("toy", 0.002, "int8")
    assert value["results"][0]["mean_kld"] == 3e-5
    assert value["results"][1]["mean_kld"] is None


def test_a_context_longer_than_the_window_is_remarked(program: Any, comparison: Comparison) -> None:
    assert "own window has 4,096 tokens" in program("verify", "toy", "--contexts", "512,8192").err


def test_options_reach_the_comparison(program: Any, comparison: Comparison, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Words of my own.")
    program("verify", "toy", "--text", str(file), "--formats", "int8, int4", "--contexts", "64,100",
            "--batch", "2", "--windows", "3", "--weights", "auto")  # fmt: skip
    assert comparison.text == "Words of my own."
    assert comparison.loaded == ["fp32 auto"]
    assert comparison.settings == VerifySettings(("int8", "int4"), (64, 100), (2,), 3)


def test_the_defaults_are_those_of_the_comparison(program: Any, comparison: Comparison) -> None:
    program("verify", "toy")
    assert comparison.settings == VerifySettings()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--contexts", "512,2k"], "--contexts is '512,2k'; write whole numbers with commas between them"),
        (["--batch", ""], "--batch is ''"),
        (["--batch", "0"], "A batch size is 0"),
        (["--formats", "int8,q4"], "no cache format 'q4'"),
        (["--max-kld", "-1"], "--max-kld is -1.0; it must be 0 or more"),
        (["--max-kld", "nan"], "--max-kld is nan"),
        (["--text", "/nonexistent"], "The text /nonexistent cannot be read"),
    ],
)
def test_a_mistake_is_told_before_the_model_is_loaded(
    program: Any, comparison: Comparison, options: list[str], said: str
) -> None:
    result = program("verify", "toy", *options)
    assert (result.code, result.out) == (2, "")
    assert said in result.err
    assert comparison.loaded == []
