"""Weights that stay packed or are quantised when loaded: what they compute, what they take, what is refused."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import tiny_loaded, tiny_model, tiny_tokenizer
from gguf.quants import dequantize
from gguf_files import CONFIGS, TOKENS, T, logits, make_model, write_gguf
from packed_files import WIDE, pack, save_folder, write_packed

from octavo.engine.engine import TokenEngine
from octavo.errors import InvalidRequest, NotEnoughMemory
from octavo.models.load import load_model
from octavo.models.packed import PACKED_TYPES, PackedEmbedding, PackedLinear
from octavo.models.prepare import prepare_model

KINDS = [T[name] for name in sorted(PACKED_TYPES)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch, request):
    if "bundled" not in request.keywords:
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


def assert_close(packed, dense, share):
    """Logits differ by no more than a share of their spread, root mean square."""
    difference = (packed.float() - dense.float()).square().mean().sqrt()
    assert difference > 0, "nothing was packed"
    assert difference < share * dense.float().std()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_packed_layer_multiplies_what_the_gguf_package_reads(kind, tmp_path):
    """Inputs are rounded to 8 bits in groups of 32, which bounds the difference; nothing else is lost."""
    values = np.random.default_rng(0).normal(0, 0.1, (512, 256)).astype(np.float32)
    rows = pack(values, kind)
    path = write_gguf(
        tmp_path / "tiny.gguf",
        make_model("phi3", **WIDE),
        "phi3",
        tensors={"blk.1.attn_qkv.weight": (rows, kind)},
        leave_out={"blk.1.attn_qkv.weight"},
    )
    layer = load_model(path, dtype="fp32").model.model.layers[1].self_attn.qkv_proj
    assert isinstance(layer, PackedLinear)
    assert (layer.kind, layer.in_features, layer.out_features, layer.bias) == (kind.name, 256, 512, None)
    weight = torch.from_numpy(dequantize(rows, kind)).double()
    x = torch.randn(1, 40, 256, generator=torch.Generator().manual_seed(0))
    step = x.view(1, 40, 8, 32).abs().amax(-1).repeat_interleave(32, -1).double() / 127
    exact = x.double() @ weight.T
    bound = 0.501 * step @ weight.abs().T
    assert ((layer(x).double() - exact).abs() <= bound + 1e-5).all()
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_packed_model_computes_what_its_dense_weights_do(kind, dtype, tmp_path):
    path = write_packed(tmp_path / "tiny.gguf", kind)
    packed, dense = load_model(path, dtype=dtype), load_model(path, dtype="fp32", weights="fp32")
    assert_close(logits(packed.model), logits(dense.model), 0.03 if dtype == "fp32" else 0.05)
    linears = [module for module in packed.model.modules() if isinstance(module, PackedLinear)]
    assert len(linears) == 2 * 7 + 1
    assert {module.kind for module in linears} == {kind.name}
    ids = torch.tensor([[0, 5, 9], [5, 0, len(TOKENS) - 1]])
    embedding = packed.model.get_input_embeddings()
    assert isinstance(embedding, PackedEmbedding)
    expected = dense.model.get_input_embeddings()(ids)
    assert torch.equal(embedding(ids), expected.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]))
    assert torch.equal(embedding.rows(ids[0]), expected[0])


@pytest.mark.parametrize("arch", CONFIGS)
def test_every_architecture_can_stay_packed(arch, tmp_path):
    """Transposed, interleaved, joined and biased layers too."""
    path = write_packed(tmp_path / "tiny.gguf", T.Q8_0, arch)
    packed, dense = load_model(path, dtype="fp32"), load_model(path, dtype="fp32", weights="fp32")
    assert not any(type(m).__name__ in ("Linear", "Conv1D", "Embedding") for m in packed.model.modules())
    assert_close(logits(packed.model), logits(dense.model), 0.025 * packed.model.config.num_hidden_layers)
    assert {p.ndim for p in packed.model.parameters()} == {1}
    assert packed.weights_bytes < 0.5 * dense.weights_bytes


def test_an_output_matrix_of_its_own_stays_packed_too(tmp_path):
    path = write_packed(tmp_path / "tiny.gguf", T.Q4_1, tie_word_embeddings=False)
    packed, dense = load_model(path, dtype="fp32"), load_model(path, dtype="fp32", weights="fp32")
    assert isinstance(packed.model.lm_head, PackedLinear)
    assert_close(logits(packed.model), logits(dense.model), 0.03)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("source", ["folder", "gguf", "gpt2"])
def test_dense_weights_are_quantised_when_asked(kind, source, tmp_path):
    changes = {"tie_word_embeddings": True} if source == "folder" else {}
    if source == "folder":
        path = save_folder(tmp_path / "tiny", **changes)
    else:
        arch = "gpt2" if source == "gpt2" else "llama"
        path = write_gguf(tmp_path / "tiny.gguf", make_model(arch), arch, T.F16)
    dense = load_model(path, dtype="fp32")
    loaded = load_model(path, dtype="fp32", weights=kind)
    assert_close(logits(loaded.model), logits(dense.model), {"int8": 0.02, "int4": 0.2}[kind])
    kinds = {module.kind for module in loaded.model.modules() if isinstance(module, PackedLinear)}
    assert kinds == {kind}
    assert torch.equal(loaded.model.get_input_embeddings().weight, dense.model.get_input_embeddings().weight)
    assert loaded.weights_bytes < dense.weights_bytes
    assert loaded.notices == ()


def test_what_is_packed_already_is_not_quantised_again(tmp_path):
    """Of a file with a dense layer, that layer alone."""
    weight = np.random.default_rng(0).normal(0, 0.1, (96, 64)).astype(np.float16)
    model = make_model()
    path = write_gguf(
        tmp_path / "tiny.gguf",
        model,
        kind=T.Q4_1,
        tensors={"blk.0.ffn_up.weight": (weight, T.F16)},
        leave_out={"blk.0.ffn_up.weight"},
    )
    mlp = load_model(path, dtype="fp32", weights="int8").model.model.layers[0].mlp
    assert (mlp.up_proj.kind, mlp.gate_proj.kind) == ("int8", "Q4_1")
    mlp = load_model(path, dtype="bf16").model.model.layers[0].mlp
    assert torch.equal(mlp.up_proj.weight, torch.from_numpy(weight).bfloat16())
    assert mlp.gate_proj.kind == "Q4_1"


@pytest.mark.parametrize("kind", [T.Q2_K, T.IQ4_NL], ids=lambda kind: kind.name)
def test_other_types_are_unpacked_with_a_notice(kind, tmp_path):
    path = write_packed(tmp_path / "tiny.gguf", kind)
    loaded = load_model(path, dtype="bf16")
    (notice,) = loaded.notices
    assert f"15 of 15 weight matrices of tiny are of type {kind.name}," in notice
    assert "unpacked to bf16" in notice
    assert load_model(path, dtype="bf16", weights="bf16").notices == ()
    assert all(p.dtype == torch.bfloat16 for p in loaded.model.parameters())
    dense = load_model(path, dtype="fp32", weights="fp32")
    assert_close(logits(loaded.model), logits(dense.model), 0.05)


def test_how_weights_are_held_is_told_and_is_part_of_the_key(tmp_path):
    path = write_packed(tmp_path / "tiny.gguf", T.Q4_1)
    identities = {}
    for weights in ("auto", "bf16", "int8"):
        loaded = load_model(path, dtype="bf16", weights=weights)
        kept = loaded.weights_bytes
        prepared = prepare_model(loaded)
        assert prepared.weights_bytes >= kept
        identities[weights] = prepared.identity["weights"]
    assert identities == {"auto": "Q4_1", "bf16": "bf16", "int8": "Q4_1"}
    folder = save_folder(tmp_path / "folder")
    assert prepare_model(load_model(folder, dtype="fp32", weights="int8")).identity["weights"] == "int8"


@pytest.mark.parametrize(
    ("weights", "dtype", "words"),
    [
        ("int3", "bf16", "weights is 'int3'; it must be auto, bf16, fp32, int8 or int4"),
        ("bf16", "fp32", "weights is bf16 and dtype is fp32"),
        ("fp32", "bf16", "weights is fp32 and dtype is bf16"),
    ],
)
def test_weights_that_cannot_be_had_are_refused(weights, dtype, words):
    with pytest.raises(InvalidRequest, match=words):
        load_model("smollm2", dtype=dtype, weights=weights)


def test_experts_stay_dense_and_a_notice_says_so(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "moe")
    tiny_tokenizer().save_pretrained(tmp_path / "moe")
    loaded = load_model(tmp_path / "moe", dtype="fp32", weights="int8")
    assert loaded.notices == ("The experts of moe stay in fp32: int8 is for linear layers.",)
    assert {p.ndim for p in loaded.model.parameters()} == {1, 2, 3}
    with TokenEngine(loaded, kv_memory="8MiB") as engine:
        assert engine.generate([5, 6, 7], max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


def test_a_loaded_model_takes_no_other_weights():
    with pytest.raises(
        InvalidRequest, match="tiny-llama is loaded already, so its weights cannot be held as int8"
    ):
        TokenEngine(tiny_loaded("llama"), weights="int8")


def test_rows_that_are_no_whole_groups_cannot_be_quantised(tmp_path):
    path = save_folder(tmp_path / "odd", intermediate_size=72)
    with pytest.raises(InvalidRequest, match="has 72 inputs, and int4 weights need a multiple of 32"):
        load_model(path, dtype="fp32", weights="int4")


def test_packed_weights_need_less_memory_to_be_loaded(tmp_path, monkeypatch):
    path = write_packed(tmp_path / "tiny.gguf", T.Q4_1, tie_word_embeddings=False)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100_000))
    load_model(path, dtype="fp32")
    with pytest.raises(NotEnoughMemory):
        load_model(path, dtype="fp32", weights="fp32")


@pytest.mark.bundled
def test_loading_takes_no_more_memory_than_the_file():
    """Pages of the mapped file do not count: the system can drop them."""
    script = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "def held():\n"
        "    return int(re.search(r'RssAnon:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]) * 1024\n"
        "from octavo import Engine\n"
        "import torch, transformers, transformers.models.llama.modeling_llama\n"
        "from octavo.models.load import load_model\n"
        "before = held()\n"
        "loaded = load_model('smollm2', dtype='bf16')\n"
        "print(held() - before, Path(loaded.source).stat().st_size, loaded.weights_bytes)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    added, size, weights_bytes = map(int, done.stdout.split())
    assert added < 1.3 * size
    assert weights_bytes < 1.05 * size
