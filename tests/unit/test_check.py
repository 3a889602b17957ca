"""The start-up check: what differs is found and told, what was found is remembered."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_loaded
from torch import nn

from octavo.engine.engine import TokenEngine
from octavo.kernels.linear import PackedMatrix
from octavo.models import check
from octavo.models.exact import ExactLinear
from octavo.models.prepare import PreparedModel, prepare_model

MAX_ROWS = 300  # more than the rows that are compared


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path / "models" / "checks"


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def prepared(request: pytest.FixtureRequest) -> PreparedModel:
    return prepare_model(tiny_loaded("llama", request.param), fuse=False)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts that are measured rather than remembered."""
    names: list[str] = []
    measure = check._measure

    def record(parts: list[Any], *arguments: Any) -> Any:
        names.extend(part.name for part in parts)
        return measure(parts, *arguments)

    monkeypatch.setattr(check, "_measure", record)
    return names


def break_linear(monkeypatch: pytest.MonkeyPatch, where: Callable[[ExactLinear, int], bool]) -> None:
    """The last element of the last row comes out one unit in the last place off, for some numbers of rows."""
    forward = ExactLinear.forward

    def broken(self: ExactLinear, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        if where(self, x.numel() // self.in_features):
            out.view(torch.int16 if out.dtype == torch.bfloat16 else torch.int32)[..., -1, -1] += 1
        return out

    monkeypatch.setattr(ExactLinear, "forward", broken)


def test_a_model_is_exact_and_each_distinct_part_is_checked_once(prepared: PreparedModel) -> None:
    result = check.check_exactness(prepared, max_rows=MAX_ROWS)
    assert result.exact
    assert (result.reason, result.notes) == ("", ())
    names = [part.name.rpartition(" ")[0] for part in result.parts]
    assert sorted(names) == sorted(
        [
            *(
                "linear 64 -> 64",
                "linear 64 -> 32",
                "linear 64 -> 128",
                "linear 128 -> 64",
                "linear 64 -> 320",
            ),
            *("activation silu", "LlamaRMSNorm 64"),
        ]
    )
    rows = len(check.BATCH_SIZES) * check.NUM_ROWS + MAX_ROWS
    assert {part.name: part.num_compared for part in result.parts}[result.parts[-1].name] == rows * 320


def test_a_linear_that_differs_by_one_ulp_at_17_rows_is_found(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_linear(monkeypatch, lambda linear, rows: rows == 17 and linear.out_features == 32)
    result = check.check_exactness(prepared, max_rows=MAX_ROWS)
    (bad,) = [part for part in result.parts if part.num_differing]
    assert bad.name.startswith("linear 64 -> 32 ")
    assert (bad.num_differing, bad.batch_size) == (check.NUM_ROWS // 17, 17)
    assert not result.exact
    assert result.reason.startswith(
        f"Exactness is not promised on this machine: {bad.name} differed in 15 of {bad.num_compared:,} elements, "
        "with 17 rows at once or more."
    )


def test_the_far_end_of_a_full_chunk_is_looked_at(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_linear(monkeypatch, lambda _, rows: rows == MAX_ROWS)
    result = check.check_exactness(prepared, max_rows=MAX_ROWS)
    assert [part.batch_size for part in result.parts if part.num_differing] == [MAX_ROWS] * 5
    assert "4 more of 7 parts differed too." in result.reason


def test_results_are_remembered_for_the_same_settings(
    prepared: PreparedModel, measured: list[str], cache: Path
) -> None:
    first = check.check_exactness(prepared, max_rows=MAX_ROWS)
    assert len(measured) == 7
    assert check.check_exactness(prepared, max_rows=MAX_ROWS) == first
    assert sorted(check.remembered(MAX_ROWS), key=str) == sorted(first.parts, key=str)
    assert len(measured) == 7
    check.check_exactness(prepared, max_rows=MAX_ROWS, fresh=True)
    assert len(measured) == 14
    check.check_exactness(prepared, max_rows=MAX_ROWS + 1)
    assert len(measured) == 21
    assert len(list(cache.iterdir())) == 2
    torch.set_num_threads(threads := torch.get_num_threads() + 1)
    try:
        check.check_exactness(prepared, max_rows=MAX_ROWS)
    finally:
        torch.set_num_threads(threads - 1)
    assert len(measured) == 28


def test_only_parts_that_are_not_known_are_measured(prepared: PreparedModel, measured: list[str]) -> None:
    check.check_exactness(prepared, max_rows=MAX_ROWS)
    measured.clear()
    dtype = next(prepared.model.parameters()).dtype
    other = prepare_model(tiny_loaded("llama", dtype, intermediate_size=96), fuse=False)
    check.check_exactness(other, max_rows=MAX_ROWS)
    assert [name.rpartition(" ")[0] for name in measured] == ["linear 64 -> 96", "linear 96 -> 64"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"environment": 1, "parts": {}}', None])
def test_a_damaged_record_is_measured_anew(
    prepared: PreparedModel, measured: list[str], cache: Path, text: str | None
) -> None:
    check.check_exactness(prepared, max_rows=MAX_ROWS)
    (record,) = cache.iterdir()
    if text is None:
        text = json.dumps({**json.loads(record.read_text()), "parts": {"linear": ["x"]}})
    record.write_text(text)
    assert check.check_exactness(prepared, max_rows=MAX_ROWS).exact
    assert len(measured) == 14
    assert len(json.loads(record.read_text())["parts"]) == 7


def test_a_cache_that_cannot_be_written_is_done_without(
    prepared: PreparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    assert check.check_exactness(prepared, max_rows=MAX_ROWS).exact


def test_progress_is_told_when_something_is_measured(prepared: PreparedModel) -> None:
    calls: list[tuple[str, int, int]] = []
    for _ in range(2):
        check.check_exactness(prepared, max_rows=MAX_ROWS, progress=lambda *call: calls.append(call))
    assert calls == sorted(calls)
    assert {stage for stage, _, _ in calls} == {"check"}
    assert calls[0][1] == 0
    assert calls[-1][1] == calls[-1][2]
    assert [done for _, done, _ in calls].count(0) == 1


def test_linears_of_torch_that_were_left_are_checked_too(prepared: PreparedModel) -> None:
    class Other(nn.Linear):
        pass

    prepared.model.extra = Other(64, 8).to(next(prepared.model.parameters()).dtype)
    try:
        result = check.check_exactness(prepared, max_rows=MAX_ROWS)
    finally:
        del prepared.model.extra
    assert any(part.name.startswith("Other linear 64 -> 8 with bias") for part in result.parts)


def test_norms_are_checked_with_and_without_weights() -> None:
    class PerHeadLayerNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 16))

    class OddLayerNorm(nn.Module):
        """Has neither weights nor a shape."""

    norms = (nn.LayerNorm(24), nn.LayerNorm(8, elementwise_affine=False), PerHeadLayerNorm(), OddLayerNorm())
    assert set(check._parts(nn.ModuleList(norms), "fp32")) == {"LayerNorm 24 fp32", "LayerNorm 8 fp32"}


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mixtral"])
def test_other_families(family: str) -> None:
    result = check.check_exactness(prepare_model(tiny_loaded(family), fuse=False), max_rows=64)
    names = {part.name for part in result.parts}
    assert result.exact
    assert (
        names
        >= {
            "gpt2": {"linear 64 -> 192 with bias fp32", "activation gelu_tanh fp32", "LayerNorm 64 fp32"},
            "qwen3": {"Qwen3RMSNorm 32 fp32", "Qwen3RMSNorm 64 fp32"},
            "mixtral": {"linear 64 -> 32 fp32", "MixtralTopKRouter 64 -> 4 fp32", "MixtralRMSNorm 64 fp32"},
        }[family]
    )


def test_a_fused_decoder_has_its_linear_layers_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = prepare_model(tiny_loaded("llama"))
    result = check.check_exactness(fused, max_rows=64)
    sizes = ("64 -> 64", "64 -> 32", "64 -> 128", "128 -> 64", "64 -> 320")
    assert result.exact
    assert {part.name for part in result.parts} == {f"native linear {size} fp32" for size in sizes}

    multiply = PackedMatrix.multiply

    def broken(self: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
        out = multiply(self, x)
        if len(x) == 17 and self.num_outputs == 320:
            out.view(torch.int32)[-1, -1] += 1
        return out

    monkeypatch.setattr(PackedMatrix, "multiply", broken)
    assert check.check_exactness(fused, max_rows=64).exact  # it is remembered
    result = check.check_exactness(fused, max_rows=64, fresh=True)
    assert not result.exact
    assert "native linear 64 -> 320 fp32 differed" in result.reason


def test_replies_of_an_engine_that_is_not_exact_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_linear(monkeypatch, lambda linear, rows: rows == 17 and linear.out_features == 320)
    with (
        caplog.at_level(logging.WARNING, "octavo"),
        TokenEngine(tiny_loaded("llama"), kv_memory="64MiB", fuse=False) as engine,
    ):
        replies = [engine.generate(range(10, 15), max_tokens=2) for _ in range(2)]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "linear 64 -> 320 fp32 differed" in said
    assert [(reply.exact, reply.notes) for reply in replies] == [(False, (said,))] * 2


def test_an_exact_engine_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with TokenEngine(tiny_loaded("llama"), kv_memory="64MiB", threads=3) as engine:
        reply = engine.generate(range(10, 15), max_tokens=2)
    assert (reply.exact, reply.notes, caplog.records) == (True, (), [])
    (record,) = check.model_cache("checks").iterdir()
    assert json.loads(record.read_text())["environment"]["threads"] == 3


def test_the_reference_kernels_promise_nothing(measured: list[str]) -> None:
    with TokenEngine(tiny_loaded("llama"), kv_memory="64MiB", kernels="reference") as engine:
        reply = engine.generate(range(10, 15), max_tokens=2)
    assert not reply.exact
    assert "reference kernels on cpu" in reply.notes[0]
    assert measured == []
