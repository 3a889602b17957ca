"""Several models in one server: loaded on demand, within a limit, unloaded when idle."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from .conftest import PATIENCE_S, Served, metrics, served

CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 3000, "stream": True, "ignore_eos": True}
KV = 32 << 20


@pytest.fixture(scope="module")
def folders(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tiny model, a second one, and one that cannot be loaded although it looks whole."""
    root = tmp_path_factory.mktemp("models")
    found = {"tiny": tiny}
    for name in ("second", "broken"):
        found[name] = str(shutil.copytree(tiny, root / name))
    config = Path(found["broken"], "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 7}))
    return found


@pytest.fixture(scope="module")
def server(folders: dict[str, str]) -> Iterator[Served]:
    weights = sum(file.stat().st_size for file in Path(folders["tiny"]).glob("*.safetensors"))
    limit = str(int(1.5 * (weights + KV)))  # one of them, not two
    options = ("--kv-memory", str(KV), "--kv-disk", "0", "--max-loaded", limit)
    with served(folders["second"], folders["broken"], *options, model=folders["tiny"]) as server:
        yield server
        assert server.stop() == 0


def ask(http: httpx2.Client, model: str, **options: Any) -> httpx2.Response:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0, **options}
    return http.post(CHAT, json=body)


def loaded(http: httpx2.Client) -> list[str]:
    return [model["id"] for model in http.get("/v1/models").json()["data"] if model["loaded"]]


def test_models_are_listed_and_make_room_for_each_other(server: Served) -> None:
    with server.http() as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [
            "tiny",
            "second",
            "broken",
        ]
        assert loaded(http) == ["tiny"]
        assert http.get("/v1/models/second").json()["max_context_tokens"] is None
        first = ask(http, "tiny").json()
        second = ask(http, "second")
        assert (second.status_code, second.json()["model"]) == (200, "second")
        assert loaded(http) == ["second"]
        assert http.get("/v1/models/second").json()["max_context_tokens"] == 4096
        again = ask(http, "tiny").json()
        assert again["choices"] == first["choices"]
        assert loaded(http) == ["tiny"]
        assert ask(http, "third").status_code == 404
        assert http.get("/ready").status_code == 200
    assert not any('model="second"' in name for name in metrics(server) if name.startswith("octavo_memory"))


def test_a_model_that_answers_is_not_unloaded_for_another(server: Served) -> None:
    with server.http() as http:
        assert ask(http, "tiny").status_code == 200
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], **LONG}
        with http.stream("POST", CHAT, json=body) as stream:
            chunks = stream.iter_lines()
            next(chunks)
            refused = ask(http, "second")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert "tiny, which is answering" in refused.json()["error"]["message"]
            next(chunks)
        deadline = time.monotonic() + PATIENCE_S
        while ask(http, "second").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_own_requests(server: Served) -> None:
    with server.http() as http:
        for _ in range(2):
            refused = ask(http, "broken")
            assert refused.status_code in (400, 503)
            assert refused.json()["error"]["message"]
        assert ask(http, "tiny").status_code == 200


def test_an_idle_model_is_unloaded_and_comes_back(folders: dict[str, str]) -> None:
    options = ("--kv-memory", "32MiB", "--keep-alive", "0.2", "--kv-disk", "0")
    with served(*options, model=folders["tiny"]) as server, server.http() as http:
        first = ask(http, "tiny").json()
        deadline = time.monotonic() + PATIENCE_S
        while loaded(http):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert ask(http, "tiny").json()["choices"] == first["choices"]
        assert [line["event"] for line in server.lines if line["event"] in ("loaded", "unloaded")][:2] == [
            "unloaded",
            "loaded",
        ]


def test_models_that_cannot_be_served_together_are_refused_at_the_start(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    from octavo.cli.main import invoke

    assert invoke(["serve", folders["tiny"], folders["tiny"]]) == 2
    assert "Several models are called 'tiny'" in capsys.readouterr().err
    assert invoke(["serve", folders["tiny"], "--max-loaded", "1MiB", "--kv-memory", "8MiB"]) == 2
    assert "Raise --max-loaded" in capsys.readouterr().err
