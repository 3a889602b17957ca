"""Folders of config, safetensors and tokenizer, loaded by transformers: what is taken over and refused."""

import json
import shutil

import pytest
import torch
import transformers
from gguf_files import SPECIAL, TEMPLATE, TOKENS, logits, make_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from octavo.errors import InvalidModelFile, OctavoError, UnsupportedModel
from octavo.models.load import load_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small model saved by transformers; not to be changed."""
    path = tmp_path_factory.mktemp("saved") / "tiny"
    model = make_model()
    model.generation_config.eos_token_id = [5, 7]
    model.save_pretrained(path)
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[2], chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "tiny")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def test_a_folder_is_loaded_as_it_was_saved(saved, capfd):
    loaded = load_model(saved, dtype="fp32")
    assert torch.equal(logits(loaded.model), logits(make_model()))
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert (loaded.name, loaded.context_length, loaded.source) == ("tiny", 128, str(saved))
    assert loaded.eos_token_ids == {5, 7, 2}
    assert loaded.tokenizer.chat_template == TEMPLATE
    assert loaded.weights_bytes >= sum(weight.nbytes for weight in loaded.model.parameters())
    assert {weight.dtype for weight in load_model(saved, dtype="bf16").model.parameters()} == {torch.bfloat16}
    assert capfd.readouterr() == ("", "")


def test_the_fingerprint_is_of_weights_and_config_wherever_they_lie(saved, folder):
    fingerprint = load_model(saved, dtype="fp32").fingerprint
    assert len(fingerprint) == 32
    assert load_model(folder, dtype="bf16").fingerprint == fingerprint
    edit_config(folder, rope_theta=9.0)
    assert load_model(folder, dtype="fp32").fingerprint != fingerprint
    shutil.copy(saved / "config.json", folder)
    edit_weights(folder, lambda weights: {name: -weight for name, weight in weights.items()})
    assert load_model(folder, dtype="fp32").fingerprint != fingerprint


def test_weights_in_several_files_are_loaded(tmp_path, saved):
    folder = shutil.copytree(saved, tmp_path / "sharded", ignore=shutil.ignore_patterns("*.safetensors"))
    make_model().save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert torch.equal(logits(load_model(folder, dtype="fp32").model), logits(make_model()))


def without_up_proj(weights):
    return {name: weight for name, weight in weights.items() if "up_proj" not in name}


def index_instead(folder, names):
    (folder / "model.safetensors").unlink()
    weight_map = {f"weight {number}": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


REFUSED = {
    "index of no names": (
        InvalidModelFile,
        "names a weight file by something else than a string",
        lambda folder: index_instead(folder, ["a.safetensors", 1]),
    ),
    "index of lists": (
        InvalidModelFile,
        "names a weight file by something else than a string",
        lambda folder: index_instead(folder, [["a.safetensors"]]),
    ),
    "weights missing": (
        InvalidModelFile,
        r"lacks 2 weights .* first is model.layers.0.mlp.up_proj.weight",
        lambda folder: edit_weights(folder, without_up_proj),
    ),
    "other shapes": (
        InvalidModelFile,
        "could not be loaded",
        lambda folder: edit_config(folder, intermediate_size=88),
    ),
    "unknown type": (UnsupportedModel, "type 'foo'", lambda folder: edit_config(folder, model_type="foo")),
    "not a decoder": (UnsupportedModel, "type 't5'", lambda folder: edit_config(folder, model_type="t5")),
    "no tokenizer": (
        InvalidModelFile,
        "could not be loaded",
        lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
    ),
    "broken tokenizer": (
        InvalidModelFile,
        "could not be loaded",
        lambda folder: (folder / "tokenizer.json").write_text("{"),
    ),
    "odd setting": (
        InvalidModelFile,
        "could not be loaded",
        lambda folder: edit_config(folder, hidden_size="wide"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_loaded_is_a_sentence(case, folder, capfd):
    kind, words, damage = REFUSED[case]
    damage(folder)
    with pytest.raises(OctavoError, match=words) as caught:
        load_model(folder, dtype="fp32")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
