"""What cannot be run exactly is refused by name and with the reason, never run wrongly."""

from __future__ import annotations

import types
from unittest import mock

import pytest
import torch
from cache_driver import CacheDriver
from families import FAMILIES, tiny_loaded, tiny_model
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from octavo.engine.engine import TokenEngine
from octavo.errors import UnsupportedModel
from octavo.models import adapter
from octavo.models.prepare import prepare_model
from octavo.models.support import TESTED_FAMILIES, cache_spec, refuse_unsupported
from octavo.spec import PageShape

SMALL = FAMILIES["llama"]


def build(family, **changes):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **changes})).eval()


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic.*longest position"),
        ("phi3", {"sliding_window": None, "original_max_position_embeddings": 256, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 256}}, "longrope"),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2.0}}, "turns 2 of a head"),
        ("deepseek_v3", {"num_hidden_layers": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "MLA"),
        ("bloom", {}, "attention interface|ALiBi"),
        ("falcon_h1", {}, "layers|attention interface|hybrid|state"),
        ("gemma3_text", {"head_dim": 16, "use_bidirectional_attention": True, "sliding_window": 40}, "later tokens"),
        ("bert", {}, "later tokens"),
        ("qwen3_next", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}, "attention interface|linear_attention"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)  # fmt: skip
def test_refused_by_name_and_reason(family, changes, reason):
    try:
        model = build(family, **changes)
    except Exception as error:
        pytest.fail(f"the test could not build {family}: {error}")
    with pytest.raises(UnsupportedModel, match=rf"{family}.*({reason})"):
        refuse_unsupported(model)


def test_mrope_alibi_cross_attention_and_training_mode_are_refused():
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    with pytest.raises(UnsupportedModel, match="M-RoPE"):
        refuse_unsupported(model)
    for name, reason in (
        ("alibi", "ALiBi"),
        ("num_kv_shared_layers", "share keys"),
        ("add_cross_attention", "cross"),
    ):
        model = tiny_model("llama")
        setattr(model.config, name, 1)
        with pytest.raises(UnsupportedModel, match=reason):
            refuse_unsupported(model)
    with pytest.raises(UnsupportedModel, match="training mode"):
        refuse_unsupported(tiny_model("llama").train())


@torch.inference_mode()
def ask_once(model, **changes):
    """One step of a model whose attention is asked with other keywords than it gives."""
    loaded = tiny_loaded("llama")
    loaded.model = model
    driver = CacheDriver(loaded, fuse=False)
    ours = adapter._attention

    def changed(module, query, key, value, attention_mask, **kwargs):
        return ours(module, query, key, value, **{"attention_mask": attention_mask, **kwargs, **changes})

    with mock.patch.dict(AttentionInterface._global_mapping, {adapter.ATTENTION_NAME: changed}):
        driver.step((driver.start([5, 6, 7]), [5, 6, 7]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "'position_bias'"),
        ({"indices": torch.zeros(1)}, "'indices'"),
        ({"temperature": 2.0}, "'temperature'"),
        ({"is_causal": False}, "later tokens"),
        ({"sliding_window": 8}, "window of 8 tokens in a layer of full attention"),
        ({"attention_mask": torch.zeros(1)}, "mask of its own"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_attention_is_given_and_octavo_does_not_know_is_refused(changes, reason):
    ask_once(tiny_model("llama"), position_ids=torch.zeros(1), is_causal=True, output_attentions=False)
    with pytest.raises(UnsupportedModel, match=f"LlamaAttention.*{reason}"):
        ask_once(tiny_model("llama"), **changes)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("phimoe", {"sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2}, "does not say how wide"),
        ("nemotron", {}, "does not hand keywords on"),
        ("gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 4}, "other keys or values than its config tells"),
    ],
)  # fmt: skip
def test_a_model_whose_attention_is_not_what_its_config_says_is_refused(family, changes, reason):
    with pytest.raises(UnsupportedModel, match=f"(?i){family.replace('_', '')}.*{reason}"):
        ask_once(build(family, **changes))


def test_encoder_decoders_and_headless_models_are_refused():
    config = types.SimpleNamespace(model_type="t5", is_encoder_decoder=True)
    with pytest.raises(UnsupportedModel, match="t5.*encoder-decoder"):
        refuse_unsupported(types.SimpleNamespace(config=config, training=False))
    with pytest.raises(UnsupportedModel, match="head"):
        refuse_unsupported(tiny_model("llama").model)


def test_dtype_that_the_kernels_do_not_have_is_refused():
    with pytest.raises(UnsupportedModel, match=r"float16.*bf16 or fp32"):
        prepare_model(tiny_loaded("llama", torch.float16))


def test_cache_spec_reads_heads_and_dimensions():
    spec = cache_spec(tiny_model("qwen3"), "fp32")
    assert spec.group.page == PageShape(num_kv_heads=2, head_dim=32, v_head_dim=32)
    assert (spec.num_layers, spec.group.num_heads, spec.dtype) == (2, 4, "fp32")
    assert cache_spec(tiny_model("gpt2"), "bf16").raw_bytes_per_token == 2 * 2 * 4 * 16 * 2


def test_an_untested_family_is_compared_with_transformers_when_it_is_loaded(monkeypatch):
    def load(family, **changes):
        loaded = tiny_loaded("llama")
        loaded.model = build(family, **changes)
        return TokenEngine(loaded, kv_memory="64MiB")

    with load("olmo") as engine:
        cold = engine.generate([5, 6, 7], max_tokens=40, ignore_eos=True)
        bare = engine.generate([5, 6, 7], max_tokens=40, ignore_eos=True, cache=False)
        assert cold.token_ids == bare.token_ids
    wrong = adapter._attention
    monkeypatch.setitem(
        AttentionInterface._global_mapping,
        adapter.ATTENTION_NAME,
        lambda module, q, *args, **kwargs: wrong(module, q * 1.5, *args, **kwargs),
    )
    with pytest.raises(UnsupportedModel, match="olmo.*differ from transformers' own"):
        load("olmo", vocab_size=1000)


def test_every_tested_family_is_in_the_tests():
    assert {family.split("-")[0] for family in FAMILIES} == TESTED_FAMILIES
