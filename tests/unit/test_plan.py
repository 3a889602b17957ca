"""`octavo plan`: public configs against bytes worked out by hand, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.main import invoke
from octavo.errors import InvalidModelFile, UnsupportedModel
from octavo.formats.page_format import FORMATS
from octavo.kv.planner import (
    block_bytes_of,
    longest_context,
    most_users,
    plan_cache,
    sequence_bytes,
    slot_bytes_of,
)
from octavo.models.outline import outline, outline_of
from octavo.spec import CacheGroup, CacheSpec, PageShape

from .plan_configs import PUBLIC, Public

GIB = 1 << 30
SPEC = CacheSpec((CacheGroup("full_attention", 2, 4, PageShape(2, 64, 64)),), "fp32")


def run(capsys: pytest.CaptureFixture[str], config: dict[str, Any], folder: Path, *options: str) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    assert invoke(["plan", str(path), *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", PUBLIC)
def test_public_configs_keep_what_was_worked_out_by_hand(name: str) -> None:
    public: Public = PUBLIC[name]
    found = outline_of(public.config, name)
    spec = found.spec("bf16")
    assert block_bytes_of(spec, FORMATS["bf16"]) == 32 * public.bf16
    assert block_bytes_of(spec, FORMATS["int8"]) == 32 * public.int8
    assert sequence_bytes(spec, FORMATS["bf16"], 0) == 32 * public.bf16 + public.state
    assert (
        sequence_bytes(spec, FORMATS["int8"], 2000) == 62 * 32 * public.int8 + 32 * public.bf16 + public.state
    )
    assert found.refusal == "" if public.runs else found.refusal
    if public.parameters is not None:
        assert found.num_parameters == public.parameters
    weights = found.weights_bytes("bf16", "bf16")
    tied = weights - 2 * found.num_parameters
    assert tied in (0, 2 * public.config.get("vocab_size") * public.config.get("hidden_size", 768))
    assert 0.14 < found.weights_bytes("int4", "bf16") / weights < 1.0


def test_what_a_7b_of_llama_2_needs_and_why_llama_3_needs_a_quarter(capsys, tmp_path) -> None:
    options = ("--context", "2000", "--memory", "16GiB", "--kv-format", "bf16", "--weights", "bf16")
    text = run(capsys, PUBLIC["Llama-2-7B"].config, tmp_path, *options)
    assert "32 layers x 32 heads of 128 channels x (key 256, value 256 bytes) = 524,288 bytes a token" in text
    assert "Each of the 32 query heads has keys and values of its own" in text
    assert "would take a quarter" in text
    assert "bf16 524,288 B 1.0 GiB" in " ".join(
        text.split()
    )  # 1,048,576,000 bytes, and the rest of the block of 32
    text = run(capsys, PUBLIC["Llama-3-8B"].config, tmp_path, *options)
    assert "= 131,072 bytes a token" in text
    assert "32 query heads share 8 key-value heads (grouped queries): 1/4 of" in text
    assert " 252 MiB" in text


def test_what_does_not_run_is_planned_and_says_so(capsys, tmp_path) -> None:
    text = run(capsys, PUBLIC["DeepSeek-V3"].config, tmp_path, "--kv-format", "bf16", "--memory", "700GiB")
    assert "Octavo does not run it: its cache holds latents (MLA)" in text
    assert "61 layers x a latent of 576 channels (1152 bytes) = 70,272 bytes a token" in text
    text = run(capsys, PUBLIC["Jamba-v0.1"].config, tmp_path, "--memory", "200GiB")
    assert "28 layers x a state of 163,840 numbers x 4 bytes = 18,350,080 bytes a conversation" in text
    strange = {"model_type": "brand_new", "n_layer": 4, "n_head": 4, "n_embd": 64}
    text = run(capsys, strange, tmp_path, "--memory", "1GiB")
    assert "Octavo does not run it: the installed transformers cannot build brand_new models." in text
    assert "Weights  not known from the config alone" in text
    assert (
        "4 layers x 4 heads of 16 channels x (key 16 + 2, value 16 + 4 bytes of codes and scales) = 608 bytes"
        in text
    )
    whole = {
        "model_type": "gemma3",
        "text_config": PUBLIC["Gemma-3-1B"].config,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    assert "it takes more than text" in run(capsys, whole, tmp_path, "--memory", "8GiB")


def test_windows_are_told(capsys, tmp_path) -> None:
    config = PUBLIC["GPT-OSS-20B"].config
    values = json.loads(run(capsys, config, tmp_path, "--memory", "80GiB", "--context", "4096", "--json"))
    of_int8 = values["formats"]["int8"]
    block = 32 * PUBLIC["GPT-OSS-20B"].int8
    assert of_int8["sequence_bytes"]["4096"] - of_int8["windowed_bytes"]["4096"] == (128 - 5) * block // 2
    text = run(capsys, config, tmp_path, "--memory", "80GiB")
    assert "12 layers look at the last 128 tokens only." in text
    assert "Octavo keeps the blocks behind a window too; without them int8 would take" in text


def test_the_json_has_the_same_numbers(capsys, tmp_path) -> None:
    config = PUBLIC["Llama-3-8B"].config
    values = json.loads(
        run(
            capsys,
            config,
            tmp_path,
            "--json",
            "--memory",
            "24GiB",
            "--users",
            "8",
            "--context",
            "4096",
            "--weights",
            "bf16",
        )
    )
    spec = outline_of(config, "").spec("bf16")
    assert values["weights_bytes"] == 2 * PUBLIC["Llama-3-8B"].parameters
    assert values["kv_budget_bytes"] == 24 * GIB - values["weights_bytes"]
    assert values["needed_bytes"] == {
        "4096": values["weights_bytes"] + 8 * sequence_bytes(spec, FORMATS["int8"], 4096)
    }
    for name, item in values["formats"].items():
        budget = values["kv_budget_bytes"]
        assert item["longest_context"] == min(8192, longest_context(spec, FORMATS[name], budget, 8, 16))
        assert item["most_users"]["4096"] == most_users(spec, FORMATS[name], budget, 4096, 16)


@given(
    st.sampled_from(sorted(FORMATS)),
    st.integers(1 << 20, 1 << 30),
    st.integers(1, 3000),
    st.integers(1, 40),
)
def test_users_and_contexts_fit_as_the_engine_would_divide_the_budget(
    name: str, budget: int, num_tokens: int, users: int
) -> None:
    page_format = FORMATS[name]
    most = most_users(SPEC, page_format, budget, num_tokens, 16)
    if most:
        plan = plan_cache(SPEC, page_format, budget, max(most, 16))
        assert plan.num_blocks >= most * -(-(num_tokens + 1) // 32)
        assert most * sequence_bytes(SPEC, page_format, num_tokens) <= budget
    assert longest_context(SPEC, page_format, budget, most + 1, 16) < num_tokens
    longest = longest_context(SPEC, page_format, budget, users, 16)
    if longest:
        assert most_users(SPEC, page_format, budget, longest, 16) >= users
        assert (
            slot_bytes_of(SPEC) * users + longest // 32 * users * block_bytes_of(SPEC, page_format) <= budget
        )


def test_what_is_no_plan_is_refused(capsys, tmp_path) -> None:
    path = tmp_path / "config.json"
    for text, code, said in (
        ("{}", 2, "has no model_type"),
        ('{"model_type": "brand_new"}', 2, "does not say how wide its layers are"),
        ("[", 2, "is not JSON"),
    ):
        path.write_text(text)
        assert invoke(["plan", str(path)]) == code
        assert said in capsys.readouterr().err
    assert invoke(["plan", "nowhere-at-all"]) == 2
    assert invoke(["plan", str(path), "--memory", "much"]) == 2
    layers = {"model_type": "brand_new", "n_layer": 1, "n_head": 4, "n_embd": 64, "layer_types": ["strange"]}
    with pytest.raises(UnsupportedModel, match="strange"):
        outline_of(layers, "x")
    with pytest.raises(InvalidModelFile):
        outline_of({"model_type": "llama", "num_attention_heads": 0, "hidden_size": 0}, "x")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_that_cannot_be_held_so_are_refused_as_by_the_engine(weights, capsys, tmp_path) -> None:
    odd = {**PUBLIC["SmolLM2-135M"].config, "num_hidden_layers": 1, "intermediate_size": 1500}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    assert invoke(["plan", str(tmp_path), "--weights", weights]) == 2
    said = f"has 1,500 inputs, and {weights} weights need a multiple of 32. Load it with dense weights"
    assert said in " ".join(capsys.readouterr().err.split())


def header(path: Path, architecture: str, **values: int) -> Path:
    """A GGUF file of an architecture that is not read, with one matrix of 64 x 64 in F32."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in values.items():
        writer.add_uint32(f"{architecture}.{name.replace('__', '.')}", value)
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_of_any_architecture_is_planned_from_its_header(tmp_path, capsys) -> None:
    sizes = {"block_count": 27, "embedding_length": 2048, "context_length": 4096, "attention__head_count": 16}
    latent = {"attention__kv_lora_rank": 512, "rope__dimension_count": 64}
    path = header(tmp_path / "latent.gguf", "deepseek2", **sizes, **latent)
    found = outline(path)
    assert (found.model_type, found.context) == ("gguf-deepseek2", 4096)
    assert "deepseek2" in found.refusal
    assert block_bytes_of(found.spec("bf16"), FORMATS["bf16"]) == 32 * PUBLIC["DeepSeek-V2-Lite"].bf16
    assert found.weights_bytes("auto", "bf16") == 64 * 64 * 4
    heads = {"attention__head_count_kv": 4, "attention__key_length": 128, "attention__value_length": 128}
    found = outline(header(tmp_path / "heads.gguf", "cohere2", **sizes, **heads))
    assert block_bytes_of(found.spec("bf16"), FORMATS["bf16"]) == 32 * 27 * 4 * 256 * 2
    path = header(tmp_path / "state.gguf", "mamba", **sizes, ssm__state_size=16)
    assert invoke(["plan", str(path)]) == 2
    assert "Plan it from its config.json." in capsys.readouterr().err


def test_a_folder_needs_no_weights(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC["SmolLM2-135M"].config))
    assert outline(tmp_path).num_parameters == 134_515_008
