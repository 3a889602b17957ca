"""`octavo compare`: its arithmetic and its plots; what it measures is run by tests/e2e/test_compare.py."""

from __future__ import annotations

import pytest

from octavo.cli import compare_plot
from octavo.cli.compare_plot import draw
from octavo.cli.compare_run import Generated, first_difference, summed
from octavo.cli.main import invoke
from octavo.models.outline import outline_of

from .plan_configs import PUBLIC


def test_a_plot_shows_its_lines() -> None:
    lines = draw("Time", {"flat": [(0, 1), (100, 1)], "steep": [(0, 0), (100, 10)]}, width=10, height=5)
    assert lines == [
        "Time",
        "      10 │        oo",
        "         │      oo",
        "         │    oo",
        "         │  oo",
        "       0 │**********",
        "         └──────────",
        "          0100 tokens",
        "          * flat   o steep",
    ] or lines[1:6] == [
        "      10 │        oo",
        "         │      oo",
        "         │    oo",
        "         │  oo",
        "       0 │oo********",
    ]


def test_seconds_are_summed_up_straight_between_the_lengths() -> None:
    assert summed([(10, 2.0), (20, 4.0)]) == [(10, 20.0), (20, 50.0)]
    assert summed([(4, 0.5)]) == [(4, 2.0)]


def test_where_two_texts_part() -> None:
    def text(*ids: int) -> Generated:
        return Generated("int8", ids, 1, {}, 1.0, 1)

    assert first_difference(text(1, 2, 3), text(1, 2, 3)) is None
    assert first_difference(text(1, 2, 3), text(1, 9, 3)) == 1


def test_operations_are_those_of_matrices_and_of_attention() -> None:
    found = outline_of(PUBLIC["SmolLM2-135M"].config, "")
    body = 30 * (576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536)
    head, pair = 576 * 49152, 30 * 9 * 2 * 64
    assert found.step_flops(0, 1) == 2 * (body + head + pair)
    assert found.step_flops(1023, 1) == 2 * (body + head + pair * 1024)
    assert found.step_flops(0, 1024) == 2 * (body * 1024 + head + pair * 1024 * 1025 / 2)
    expert = outline_of(PUBLIC["GPT-OSS-20B"].config, "")
    assert 3e9 < expert.step_flops(0, 1) / 2 < 4e9  # 3.6 billion of 21 are active
    assert (
        outline_of({"model_type": "brand_new", "n_layer": 1, "n_head": 1, "n_embd": 64}, "").step_flops(0, 1)
        == 0
    )


def test_a_plot_that_cannot_be_written_is_told_first(monkeypatch, capsys, tmp_path) -> None:
    for path in (tmp_path / "plot.jpg", tmp_path / "nowhere" / "plot.png"):
        assert invoke(["compare", "smollm2", "--plot", str(path)]) == 2
        assert "Name a .png file in a folder that exists." in capsys.readouterr().err
    monkeypatch.setattr(compare_plot, "find_spec", lambda _: None)
    assert invoke(["compare", "smollm2", "--plot", str(tmp_path / "plot.png")]) == 1
    assert "octavo[bench]" in capsys.readouterr().err


def test_a_png_is_written(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    line = [(0, 1.0), (10, 2.0)]
    compare_plot.save(
        tmp_path / "plot.png", "toy", [("A", "s", {"with": line}), ("B", "s", {"without": line})]
    )
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
