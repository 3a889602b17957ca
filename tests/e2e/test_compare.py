"""`octavo compare` on the bundled model: the same tokens, less work, and both plots."""

from __future__ import annotations

import json

import pytest

from octavo.cli.main import invoke


@pytest.mark.bundled
def test_the_cache_saves_work_and_changes_no_token(capsys, tmp_path) -> None:
    plot = tmp_path / "plot.png"
    assert invoke(["compare", "smollm2", "--tokens", "170", "--plot", str(plot), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["same_tokens"] is True
    assert values["num_tokens"] == 170
    assert [point["length"] for point in values["points"]] == [32, 64, 128]
    prompt = values["num_prompt_tokens"]
    for point in values["points"]:
        length = point["length"]
        assert point["computed"] == [1, length]
        assert point["total_computed"] == [length, sum(range(prompt, length + 1))]
        assert point["kv_bytes"]["fp32"] > point["kv_bytes"]["int8"]
        assert point["saved_work"] > 0.9
        assert point["flops"][1] > length / 2 * point["flops"][0] * 0.5
    assert set(values["formats"]) == {"int8", "fp32"}
    assert plot.stat().st_size > 10_000


@pytest.mark.bundled
def test_it_is_shown_to_a_person(capsys) -> None:
    assert invoke(["compare", "smollm2", "--tokens", "64"]) == 0
    shown = capsys.readouterr()
    assert "Both made the same tokens" in shown.out
    assert "Time of one more token, ms" in shown.out
    assert "without the cache: one token behind 32" in shown.err
