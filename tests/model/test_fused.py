"""Whole decoders as one native call: which models run so, and that those which only look alike do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cache_driver import CacheDriver
from families import FUSED, VOCAB, tiny_loaded, tiny_model
from transformers.models.llama.modeling_llama import LlamaMLP

from octavo.models import prepare
from octavo.models.fused import PHASES

UNFUSED = {
    "gpt2": "in `model`",
    "gpt_neox": "in `model`",
    "starcoder2": "Starcoder2MLP has no linear",
    "mixtral": "no linear gate_up_proj",
    "gpt_oss": "no linear gate_up_proj",
    "qwen3_moe": "no linear gate_up_proj",
}
TOKENS = [(i * 7919 + 13) % VOCAB for i in range(70)]


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_known_structure_runs_as_one_call(family: str, dtype: torch.dtype) -> None:
    theirs = tiny_model(family, dtype)
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0].float()
    driver = CacheDriver(tiny_loaded(family, dtype))
    assert driver.prepared.fused is not None, driver.prepared.unfused_reason
    assert driver.prepared.identity["path"] == "fused"
    (ours,) = driver.step_rows((driver.start(TOKENS), TOKENS))
    bound = 1e-4 if dtype == torch.float32 else 0.05 * expected.abs().max().item()
    assert (ours - expected).abs().max().item() <= bound


@pytest.mark.parametrize("family", UNFUSED)
def test_another_structure_runs_module_by_module_and_says_why(family: str) -> None:
    prepared = prepare.prepare_model(tiny_loaded(family))
    assert prepared.fused is None
    assert UNFUSED[family] in prepared.unfused_reason
    assert prepared.identity["path"] == "unfused"


def test_more_rotary_channels_than_a_head_has_are_never_run_natively() -> None:
    loaded = tiny_loaded("llama")
    rotary = loaded.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.repeat(2)
    prepared = prepare.prepare_model(loaded)
    assert prepared.fused is None
    assert "rotates 32 of the 16 channels" in prepared.unfused_reason


def test_it_can_be_turned_off() -> None:
    prepared = prepare.prepare_model(tiny_loaded("llama"), fuse=False)
    assert prepared.fused is None
    assert prepared.identity["path"] == "unfused"


@pytest.mark.parametrize("biases", [True, False])
def test_biases_are_added(biases: bool) -> None:
    changes = {"attention_bias": biases, "mlp_bias": biases}
    theirs = tiny_model("llama", **changes)
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0]
    driver = CacheDriver(tiny_loaded("llama", **changes))
    assert driver.prepared.fused is not None
    (ours,) = driver.step_rows((driver.start(TOKENS), TOKENS))
    assert (ours - expected).abs().max().item() <= 1e-4


@pytest.mark.parametrize("swapped", [True, False])
def test_an_unknown_family_is_compared_before_its_layers_go(
    monkeypatch: pytest.MonkeyPatch, swapped: bool
) -> None:
    monkeypatch.setattr(prepare, "TESTED_FAMILIES", frozenset())
    if swapped:  # the same parts, put together in another way
        monkeypatch.setattr(
            LlamaMLP,
            "forward",
            lambda self, x: self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x))),
        )
    theirs = tiny_model("llama")
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0]
    driver = CacheDriver(tiny_loaded("llama"))
    assert (driver.prepared.fused is None) == swapped
    if swapped:
        assert "computes something else" in driver.prepared.unfused_reason
    (ours,) = driver.step_rows((driver.start(TOKENS), TOKENS))
    assert (ours - expected).abs().max().item() <= 1e-4


def test_only_asked_for_rows_get_logits_and_the_clock_is_read_when_asked() -> None:
    driver = CacheDriver(tiny_loaded("llama"))
    fused = driver.prepared.fused
    assert fused is not None
    fused.phase_s = np.zeros(len(PHASES))
    (rows,) = driver.step_rows((driver.start(TOKENS, cache=False), TOKENS))
    assert all(fused.phase_s > 0)
    last = driver.step((driver.start(TOKENS, cache=False), TOKENS))
    assert torch.equal(last[0], rows[-1])


def test_weights_are_held_once() -> None:
    loaded = tiny_loaded("llama")
    numbers = sum(parameter.numel() for parameter in loaded.model.parameters())
    prepared = prepare.prepare_model(loaded)
    assert prepared.weights_bytes == pytest.approx(4 * numbers, rel=0.02)
    kept = sum(parameter.numel() for parameter in loaded.model.parameters())
    assert kept == VOCAB * 64 + 64  # the embedding and the last norm
