"""The hub: its cache is read for real, its answers are made up."""

import json
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from huggingface_hub import errors

from octavo.errors import InvalidModelFile, ModelNotFound, NetworkUnavailable, UnsupportedModel
from octavo.models import catalog, hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def hub_cache(tmp_path, monkeypatch):
    """An empty cache of the hub, in its own layout."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "hub"
    path.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return path


def add_to_cache(hub_cache, repo_id, *, weights="model.safetensors", kind="models"):
    repository = hub_cache / f"{kind}--{repo_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for path in (repository / "refs", repository / "blobs", snapshot):
        path.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    header = json.dumps({"w": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}).encode()
    blobs = {
        "config.json": b'{"model_type": "llama"}',
        weights: len(header).to_bytes(8, "little") + header + bytes(24),
    }
    for number, (name, content) in enumerate(blobs.items()):
        (repository / "blobs" / str(number)).write_bytes(content)
        (snapshot / name).symlink_to(repository / "blobs" / str(number))
    return snapshot


def test_a_cached_model_is_found_without_the_network(hub_cache):
    snapshot = add_to_cache(hub_cache, "owner/tiny")
    assert catalog.resolve("owner/tiny").path == snapshot
    assert hub.pull("owner/tiny") == snapshot
    assert catalog.resolve("owner/other").path is None


def test_only_models_that_can_be_loaded_are_listed(hub_cache):
    snapshot = add_to_cache(hub_cache, "owner/tiny")
    add_to_cache(hub_cache, "owner/pickled", weights="pytorch_model.bin")
    add_to_cache(hub_cache, "owner/texts", kind="datasets")
    listed = [entry for entry in catalog.list_models() if entry.kind == "hub"]
    size = sum(path.stat().st_size for path in snapshot.iterdir())
    assert [(entry.name, entry.path, entry.size_bytes) for entry in listed] == [
        ("owner/tiny", snapshot, size)
    ]


def test_no_cache_is_an_empty_list(hub_cache):
    hub_cache.rmdir()
    assert [entry.kind for entry in catalog.list_models()] == ["bundled"]


def test_an_incomplete_download_is_not_taken_for_the_model(hub_cache):
    snapshot = add_to_cache(hub_cache, "owner/tiny")
    (snapshot / "model.safetensors").unlink()
    assert catalog.resolve("owner/tiny").path is None
    with pytest.raises(InvalidModelFile, match=r"has no model.safetensors"):
        hub.pull("owner/tiny")


def test_a_cached_model_that_cannot_be_read_is_passed_over(hub_cache, monkeypatch):
    add_to_cache(hub_cache, "owner/tiny")

    def read_folder(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(hub.folder, "read_folder", read_folder)
    assert hub.cached("owner/tiny") is None
    assert [entry.kind for entry in catalog.list_models()] == ["bundled"]


def test_a_model_that_is_nowhere_needs_a_network():
    with pytest.raises(
        NetworkUnavailable,
        match=r"owner/tiny is not in the hub's cache and.*cannot be reached.*HF_HUB_OFFLINE.*"
        r"`octavo pull owner/tiny` again",
    ):
        hub.pull("owner/tiny")


def test_a_download_that_was_cut_off_needs_a_network(hub_cache, monkeypatch):
    add_to_cache(hub_cache, "owner/tiny", weights="other.bin")
    answers(monkeypatch, errors.LocalEntryNotFoundError("offline"))
    with pytest.raises(NetworkUnavailable, match=r"owner/tiny is not complete in the hub's cache and"):
        hub.pull("owner/tiny")


def answers(monkeypatch, error):
    def snapshot_download(repo_id, *, local_files_only=False, **_):
        raise errors.LocalEntryNotFoundError("not cached") if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def http(kind, status):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    error = kind.__new__(kind)
    Exception.__init__(error, f"{status} Client Error")
    error.response = response
    return error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            http(errors.RepositoryNotFoundError, 401),
            ModelNotFound,
            "no model of that id on the hub, or it is private",
        ),
        (http(errors.GatedRepoError, 403), ModelNotFound, "is gated on the hub. Accept its terms"),
        (http(errors.HfHubHTTPError, 401), ModelNotFound, r"\(HTTP 401\)\. Please set HF_TOKEN"),
        (http(errors.HfHubHTTPError, 503), NetworkUnavailable, "HfHubHTTPError: 503 Client Error"),
        (errors.HFValidationError("bad id"), ModelNotFound, "Check the spelling"),
        (errors.LocalEntryNotFoundError("offline"), NetworkUnavailable, "cannot be reached"),
        (ConnectionError("proxy\nrefused"), NetworkUnavailable, r"ConnectionError: proxy refused\)"),
        (
            OSError(28, "No space left on device"),
            NetworkUnavailable,
            "No space left on device.*free disk space",
        ),
    ],
)
def test_what_the_hub_says_becomes_a_sentence_with_a_next_step(error, kind, words, monkeypatch):
    answers(monkeypatch, error)
    with pytest.raises(kind, match=words) as caught:
        catalog.pull("owner/tiny")
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)


def test_progress_counts_the_bytes_of_all_files(hub_cache, monkeypatch, capfd):
    snapshot = add_to_cache(hub_cache, "owner/tiny")
    asked = {}

    def snapshot_download(repo_id, *, tqdm_class, **options):
        asked.update(options)
        network = tqdm_class(desc="Downloading bytes", total=0, unit="B", unit_scale=True)
        bytes_bar = tqdm_class(desc="Reconstructing", total=0, initial=0, unit="B", unit_scale=True)
        bytes_bar.total += 100
        for _ in tqdm_class([1, 2], desc="Fetching 2 files"):
            network.update(7)
            bytes_bar.update(50)
            bytes_bar.set_postfix_str(str(bytes_bar.format_dict.get("rate")), refresh=False)
        bytes_bar.set_description("complete")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    calls = []
    assert hub.pull("owner/tiny", lambda *call: calls.append(call)) == snapshot
    assert calls == [("download", 50, 100), ("download", 100, 100)]
    assert hub.pull("owner/tiny") == snapshot
    assert capfd.readouterr() == ("", "")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


def test_a_model_with_pickled_weights_only_is_refused_after_its_download(hub_cache, monkeypatch):
    snapshot = add_to_cache(hub_cache, "owner/tiny", weights="pytorch_model.bin")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    with pytest.raises(UnsupportedModel, match="pickled"):
        hub.pull("owner/tiny")


@pytest.mark.parametrize(
    ("name", "is_id"), [("a/b", True), ("a", False), ("/a", False), ("a/b/c", False), ("a/b.gguf", False)]
)
def test_hub_ids_have_an_owner_and_a_name(name, is_id):
    assert hub.is_hub_id(name) is is_id
