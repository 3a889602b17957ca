"""What a name of a model stands for, and what is said when it stands for nothing."""

import json
import os
import subprocess
import sys

import pytest

from octavo.errors import InvalidModelFile, ModelNotFound, NotEnoughMemory, UnsupportedModel
from octavo.models import catalog, folder
from octavo.models.load import load_model
from octavo.models.loaded import Source


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("octavo.models.hub.cached", lambda _: None)
    monkeypatch.setattr("octavo.models.hub.cached_models", list)


def safetensors(path, shape=(2, 3), size=None, **header):
    header = header or {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 24]}}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(24)
    path.write_bytes(content[:size])


@pytest.fixture
def model_folder(tmp_path):
    path = tmp_path / "tiny-llama"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    safetensors(path / "model.safetensors")
    return path


def test_names_files_folders_and_hub_ids_are_told_apart(model_folder, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "b").write_bytes(b"GGUF more")
    assert catalog.resolve("smollm2") == Source("bundled", "smollm2", None)
    assert catalog.resolve(model_folder) == Source("folder", "tiny-llama", model_folder)
    assert catalog.resolve(tmp_path / "a.gguf") == Source("gguf", "a", tmp_path / "a.gguf")
    assert catalog.resolve(str(tmp_path / "b")) == Source("gguf", "b", tmp_path / "b")
    assert catalog.resolve("owner/some-model.v1") == Source("hub", "owner/some-model.v1", None)


def test_a_bundled_name_wins_unless_it_is_written_as_a_path(model_folder, monkeypatch):
    monkeypatch.chdir(model_folder.parent)
    model_folder.rename("smollm2")
    assert catalog.resolve("smollm2").kind == "bundled"
    assert catalog.resolve("./smollm2").kind == "folder"


@pytest.mark.parametrize(
    "name", ["/nonexistent", "nonexistent", "a/b.gguf", "./a/b", "a/b/c", "", "~/nonexistent"]
)
def test_a_name_for_nothing_is_told_what_is_accepted(name):
    with pytest.raises(
        ModelNotFound, match=r"There is no model .* A model is a bundled name \(smollm2\), a folder"
    ):
        catalog.resolve(name)


def test_close_names_are_suggested(model_folder):
    with pytest.raises(ModelNotFound, match=r"Did you mean smollm2\?"):
        catalog.resolve("smolm2")
    with pytest.raises(ModelNotFound, match=rf"Did you mean {model_folder}\?"):
        catalog.resolve(model_folder.parent / "tiny-lama")


def test_a_file_of_another_kind_is_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("Hello")
    with pytest.raises(InvalidModelFile, match=r"notes.txt is not a model"):
        catalog.resolve(tmp_path / "notes.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="everything can be read by root")
def test_a_file_that_must_not_be_read_is_a_sentence(tmp_path):
    (tmp_path / "secret").write_text("Hello")
    (tmp_path / "secret").chmod(0)
    with pytest.raises(InvalidModelFile, match="cannot be read: Permission denied"):
        catalog.resolve(tmp_path / "secret")


BROKEN = {
    "no config": (InvalidModelFile, "has no config.json", lambda path: (path / "config.json").unlink()),
    "no json": (InvalidModelFile, "is not JSON", lambda path: (path / "config.json").write_text("{")),
    "a list": (InvalidModelFile, "not a JSON object", lambda path: (path / "config.json").write_text("[]")),
    "nested": (InvalidModelFile, "is not JSON", lambda path: (path / "config.json").write_text("[" * 99_999)),
    "no type": (InvalidModelFile, "no model_type", lambda path: (path / "config.json").write_text("{}")),
    "no weights": (
        InvalidModelFile,
        "has no model.safetensors",
        lambda path: (path / "model.safetensors").unlink(),
    ),
    "short": (
        InvalidModelFile,
        "cut short: it has 9",
        lambda path: safetensors(path / "model.safetensors", size=-1),
    ),
    "shorter": (
        InvalidModelFile,
        "cut short or not",
        lambda path: safetensors(path / "model.safetensors", size=40),
    ),
    "empty": (
        InvalidModelFile,
        "cut short or not|not a",
        lambda path: (path / "model.safetensors").write_bytes(b""),
    ),
    "text": (
        InvalidModelFile,
        "cut short or not",
        lambda path: (path / "model.safetensors").write_bytes(b"x" * 99),
    ),
    "odd": (InvalidModelFile, "not a safetensors", lambda path: safetensors(path / "model.safetensors", w=3)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_is_not_whole_is_refused(case, model_folder):
    kind, words, damage = BROKEN[case]
    damage(model_folder)
    with pytest.raises(kind, match=words):
        catalog.resolve(model_folder)


def test_a_folder_with_gguf_files_says_to_name_one(tmp_path):
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidModelFile, match=r"for example .*some.gguf"):
        catalog.resolve(tmp_path)


def test_pickled_weights_are_never_loaded(model_folder):
    (model_folder / "model.safetensors").rename(model_folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pickled weights only \(pytorch_model.bin\)"):
        catalog.resolve(model_folder)


def test_code_from_the_folder_is_never_run(model_folder):
    config = {"model_type": "brand_new", "auto_map": {"AutoConfig": "code.Config"}}
    (model_folder / "config.json").write_text(json.dumps(config))
    (model_folder / "code.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(UnsupportedModel, match="'brand_new', which needs Python code"):
        catalog.resolve(model_folder)


def test_weights_quantised_by_another_library_are_refused(model_folder):
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    (model_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quantised with gptq"):
        catalog.resolve(model_folder)


def test_weights_in_several_files_are_counted_and_all_have_to_be_there(model_folder):
    (model_folder / "model.safetensors").rename(model_folder / "model-1.safetensors")
    safetensors(model_folder / "model-2.safetensors", shape=(1, 6))
    index = {
        "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    }
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    content = folder.read_folder(model_folder)
    assert content.files == ("config.json", "model-1.safetensors", "model-2.safetensors")
    assert content.num_parameters == 12
    (model_folder / "model-2.safetensors").unlink()
    with pytest.raises(
        InvalidModelFile, match=r"1 of 2 weight files are missing, the first is model-2.safetensors"
    ):
        catalog.resolve(model_folder)


def test_memory_is_asked_for_before_anything_is_loaded(model_folder):
    header = {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 24]}}
    safetensors(model_folder / "model.safetensors", **header)
    with pytest.raises(
        NotEnoughMemory, match=r"of tiny-llama need 2,199,023.3 MB, and .* MB of memory is free"
    ):
        load_model(model_folder, dtype="bf16")


def test_wrong_names_import_no_model_library():
    script = (
        "import sys\n"
        "from octavo.errors import ModelNotFound\n"
        "from octavo.models import catalog, load\n"
        "try:\n"
        "    catalog.resolve('/nonexistent')\n"
        "except ModelNotFound:\n"
        "    print(sorted({'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
