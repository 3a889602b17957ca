"""GGUF files made here, with llama.cpp's own conventions, against the models that they were made from."""

import subprocess
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from gguf_files import CONFIGS, TOKENS, T, logits, make_model, write_gguf

from octavo.errors import NotEnoughMemory
from octavo.models import catalog
from octavo.models import gguf as octavo_gguf
from octavo.models.dequant import dequantize_into
from octavo.models.gguf_header import TENSOR_TYPES, read_header
from octavo.models.load import load_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch, request):
    if "bundled" not in request.keywords:
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def llama(tmp_path):
    """A small GGUF file and the model in it."""
    model = make_model()
    return SimpleNamespace(path=write_gguf(tmp_path / "tiny.gguf", model), model=model)


@pytest.mark.parametrize("arch", CONFIGS)
def test_an_architecture_computes_what_the_original_computes(arch, tmp_path):
    model = make_model(arch)
    path = write_gguf(tmp_path / "tiny.gguf", model, arch)
    loaded = load_model(path, dtype="fp32")
    assert type(loaded.model) is type(model)
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.context_length == 128
    assert loaded.name == "tiny"
    assert not loaded.model.training
    assert all(type(weight) is torch.nn.Parameter for weight in loaded.model.parameters())
    assert not any(weight.requires_grad or weight.is_meta for weight in loaded.model.parameters())


def test_an_output_matrix_of_its_own_is_kept_apart(tmp_path):
    model = make_model(tie_word_embeddings=False)
    loaded = load_model(write_gguf(tmp_path / "untied.gguf", model), dtype="fp32")
    assert torch.equal(logits(loaded.model), logits(model))
    tied = load_model(write_gguf(tmp_path / "tied.gguf", make_model()), dtype="fp32")
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight
    assert loaded.weights_bytes - tied.weights_bytes == len(TOKENS) * 64 * 4


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "kind", [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_1], ids=lambda kind: kind.name
)
def test_weights_are_what_the_gguf_package_reads(kind, dtype, tmp_path):
    model = make_model()
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", model, kind=kind), dtype=dtype, weights=dtype)
    wanted = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    for (name, weight), original in zip(loaded.model.named_parameters(), model.parameters(), strict=True):
        packed = kind if original.ndim == 2 else T.F32
        expected = torch.from_numpy(dequantize(quantize(original.detach().numpy(), packed), packed))
        assert weight.dtype == wanted, name
        assert torch.equal(weight, expected.view(weight.shape).to(wanted)), name


def test_a_loaded_model_is_the_model_that_transformers_loads_from_its_dense_copy(tmp_path, llama):
    """Buffers that are in no file, such as rotary frequencies, and settings are the same too."""
    loaded = load_model(llama.path, dtype="bf16")
    loaded.model.save_pretrained(tmp_path / "dense")
    loaded.tokenizer.save_pretrained(tmp_path / "dense")
    dense = load_model(tmp_path / "dense", dtype="bf16")
    assert torch.equal(logits(dense.model), logits(loaded.model))
    for (name, buffer), other in zip(dense.model.named_buffers(), loaded.model.buffers(), strict=True):
        assert buffer.dtype == other.dtype, name
        assert torch.equal(buffer, other), name
    assert dense.weights_bytes == loaded.weights_bytes
    assert dense.tokenizer.encode("the  thé 12") == loaded.tokenizer.encode("the  thé 12")


@pytest.mark.parametrize("kind", TENSOR_TYPES.values(), ids=lambda kind: kind.name)
def test_every_type_is_unpacked_as_the_gguf_package_does(kind):
    assert tuple(gguf.GGML_QUANT_SIZES[T[kind.name]]) == (kind.block_size, kind.block_bytes)
    columns = max(kind.block_size * 2, 64)
    packed = np.random.default_rng(0).integers(0, 256, (700, kind.row_bytes(columns)), dtype=np.uint8)
    order = torch.randperm(700)
    with np.errstate(all="ignore"):
        stored = (
            packed if kind.block_size > 1 or kind.name == "BF16" else packed.view(f"<f{kind.block_bytes}")
        )
        expected = dequantize(stored, T[kind.name])[order]
    out = torch.empty(700, columns)
    with np.errstate(all="ignore"):
        dequantize_into(out, torch.from_numpy(packed).flatten(), T[kind.name].value, order)
    np.testing.assert_array_equal(out.numpy(), expected)


def test_a_file_with_k_quants_is_loaded(tmp_path):
    model = make_model(hidden_size=256)
    packed = np.random.default_rng(0).integers(0, 60, (96, 210), dtype=np.uint8)
    path = write_gguf(
        tmp_path / "k.gguf",
        model,
        tensors={"blk.0.ffn_gate.weight": (packed, T.Q6_K)},
        leave_out={"blk.0.ffn_gate.weight"},
    )
    weight = load_model(path, dtype="fp32", weights="fp32").model.model.layers[0].mlp.gate_proj.weight
    assert torch.equal(weight, torch.from_numpy(dequantize(packed, T.Q6_K)))


def test_rotary_factors_of_llama_3_are_applied(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    model = make_model(rope_parameters=rope)
    plain = 1.0 / 5000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert factors.max() > 2
    path = write_gguf(tmp_path / "llama3.gguf", model, tensors={"rope_freqs.weight": (factors, T.F32)})
    loaded = load_model(path, dtype="fp32")
    assert torch.allclose(logits(loaded.model, 100), logits(model, 100), atol=1e-5)
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_later_starts_read_neither_header_nor_content(llama, monkeypatch):
    first = load_model(llama.path, dtype="fp32")
    monkeypatch.setattr(octavo_gguf.store, "_SETTLED_NS", 0)
    monkeypatch.setattr(octavo_gguf.gguf_header, "read_header", lambda _: pytest.fail("read again"))
    stages = []
    second = load_model(llama.path, dtype="fp32", progress=lambda *call: stages.append(call[0]))
    assert set(stages) == {"load"}
    assert torch.equal(logits(first.model), logits(second.model))
    assert (first.fingerprint, first.eos_token_ids) == (second.fingerprint, second.eos_token_ids)


def test_a_file_that_changed_is_another_model(llama):
    first = load_model(llama.path, dtype="fp32")
    tensor = read_header(llama.path).tensors["blk.1.ffn_up.weight"]
    with llama.path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.float32(3.0).tobytes())
    second = load_model(llama.path, dtype="fp32")
    assert first.fingerprint != second.fingerprint
    assert second.model.model.layers[1].mlp.up_proj.weight[0, 0] == 3.0


def test_a_record_that_cannot_be_read_is_made_again(llama):
    record = octavo_gguf.prepare(llama.path)
    (record.folder / "tensors.json").write_text("{}")
    assert torch.equal(logits(load_model(llama.path, dtype="fp32").model), logits(llama.model))


def test_used_files_are_listed_and_pulled_files_are_ready(llama):
    assert [entry.kind for entry in catalog.list_models()] == ["bundled"]
    source = catalog.pull(llama.path)
    assert source.path == llama.path
    listed = {entry.path: entry.size_bytes for entry in catalog.list_models() if entry.kind == "gguf"}
    assert listed == {llama.path: llama.path.stat().st_size}


def test_the_tokenizer_has_specials_template_and_end_tokens(llama):
    loaded = load_model(llama.path, dtype="fp32")
    tokenizer = loaded.tokenizer
    assert tokenizer.encode("<|im_start|>the the") == [
        TOKENS.index(t) for t in ("<|im_start|>", "the", "Ġthe")
    ]
    assert tokenizer.decode(tokenizer.encode("the  thé\n12")) == "the  thé\n12"
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert turn == "<|im_start|>user\nthe<|im_end|>\n"
    assert loaded.eos_token_ids == {0, 2}
    assert len(tokenizer) == len(TOKENS)


def test_a_file_that_asks_for_a_beginning_token_gets_it(tmp_path):
    path = write_gguf(tmp_path / "bos.gguf", make_model(), tokenizer={"bos": True})
    assert load_model(path, dtype="fp32").tokenizer.encode("the") == [1, TOKENS.index("the")]


@pytest.mark.parametrize("kind", [3, 4])
def test_byte_level_tokens_keep_their_ids_and_their_own_spelling(kind, tmp_path):
    """Without an `<|endoftext|>`, and with control tokens that bytes are not spelled with."""
    odd = ["<｜User｜>", "<▁ a>"]
    tokens = ["<|begin|>", *TOKENS[1:], *odd]
    types = [3, 3, 3, *[1] * (len(tokens) - 5), kind, kind]
    model = make_model(vocab_size=len(tokens))
    path = write_gguf(tmp_path / "odd.gguf", model, tokenizer={"tokens": tokens, "types": types})
    tokenizer = load_model(path, dtype="fp32").tokenizer
    assert len(tokenizer) == len(tokens)
    assert [tokenizer.convert_tokens_to_ids(token) for token in tokens] == [*range(len(tokens))]
    text = f"the{odd[0]}the{odd[1]}"
    ids = tokenizer.encode(text)
    assert ids == [tokens.index(token) for token in ("the", odd[0], "the", odd[1])]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == ("thethe" if kind == 3 else text)


@pytest.mark.parametrize(
    ("pre", "whole", "begins"),
    [("llama-bpe", True, True), ("tekken", True, True), ("falcon3", True, False), ("qwen2", False, False)],
)
def test_words_are_whole_and_texts_begin_as_the_pre_tokenizer_has_it(pre, whole, begins, tmp_path):
    """A word in the vocabulary that no merges lead to, in a file that does not say whether texts begin with a token."""
    tokens = [*TOKENS, "hat"]
    settings = {"pre": pre, "tokens": tokens, "bos": None}
    path = write_gguf(tmp_path / "words.gguf", make_model(vocab_size=len(tokens)), tokenizer=settings)
    ids = load_model(path, dtype="fp32").tokenizer.encode("hat")
    assert [tokens[i] for i in ids] == [tokens[1]] * begins + (["hat"] if whole else ["h", "a", "t"])


def test_digits_are_split_off_before_spaces_are_joined(tmp_path):
    """In `a  1` the spaces are one token then; as GPT-2 splits, the second one belongs to the digit."""
    for pre, pieces in (("smollm", ["a", "ĠĠ", "1"]), ("gpt-2", ["a", "Ġ", "Ġ", "1"])):
        path = write_gguf(tmp_path / f"{pre}.gguf", make_model(), tokenizer={"pre": pre})
        ids = load_model(path, dtype="fp32").tokenizer.encode("a  1")
        assert [TOKENS[i] for i in ids] == pieces


@pytest.mark.parametrize("pre", ["default", None])
def test_gpt2_splits_its_own_way_where_the_file_does_not_say(pre, tmp_path):
    path = write_gguf(tmp_path / "old.gguf", make_model("gpt2"), "gpt2", tokenizer={"pre": pre})
    ids = load_model(path, dtype="fp32").tokenizer.encode("a  1")
    assert [TOKENS[i] for i in ids] == ["a", "Ġ", "Ġ", "1"]


def test_memory_is_asked_for_before_anything_is_loaded(llama, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100_000))
    with pytest.raises(NotEnoughMemory, match=r"need 0\.3 MB, and 0\.1 MB of memory is free"):
        load_model(llama.path, dtype="fp32")


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2", dtype="bf16", weights="bf16")


@pytest.mark.bundled
def test_the_bundled_model_is_what_the_gguf_package_reads(smollm2):
    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2.source).tensors}
    weights = dict(smollm2.model.named_parameters())
    for stem, name in (
        ("ffn_down", "mlp.down_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_norm", "input_layernorm"),
    ):
        for layer in (0, 17):
            tensor = packed[f"blk.{layer}.{stem}.weight"]
            expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            assert torch.equal(weights[f"model.layers.{layer}.{name}.weight"], expected.to(torch.bfloat16))
    assert (smollm2.name, smollm2.context_length, smollm2.weights_bytes) == ("smollm2", 8192, 269_030_272)
    assert smollm2.fingerprint.hex().startswith("b179c952")


@pytest.mark.bundled
def test_the_bundled_model_answers(smollm2):
    tokenizer = smollm2.tokenizer
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = smollm2.model.generate(
        **prompt, max_new_tokens=12, do_sample=False, eos_token_id=[*smollm2.eos_token_ids]
    )
    assert (
        tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
        == "The capital of France is Paris.<|im_end|>"
    )


@pytest.mark.bundled
def test_an_error_or_a_second_start_imports_no_more_than_it_needs(smollm2):
    """In a process of its own: a wrong name needs no torch, a known file no gguf package."""
    script = (
        "import sys\n"
        "from octavo.errors import ModelNotFound\n"
        "from octavo.models import catalog, load\n"
        "try:\n"
        "    catalog.resolve('/nonexistent')\n"
        "except ModelNotFound:\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules)\n"
        "loaded = load.load_model('smollm2', dtype='bf16')\n"
        "print('gguf' in sys.modules, loaded.fingerprint.hex())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False", smollm2.fingerprint.hex()]
