"""What outlives the server: chats, responses and conversations, until they are deleted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from .conftest import served

pytestmark = pytest.mark.bundled

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
BODY = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 8}
CHAT = "/v1/chat/completions"


def test_a_chat_goes_on_after_a_restart(tmp_path: Path, tiny: str) -> None:
    options = ("--kv-disk", "1GiB", "--kv-memory", "64MiB")
    messages = [{"role": "user", "content": "Once upon a time there was a small boat. " * 4}]
    ask = {**BODY, "model": "tiny", "temperature": 1, "seed": 3, "octavo": {"why": True}}
    known = 0
    for turn in range(2):
        with served(*options, model=tiny, OCTAVO_CACHE=str(tmp_path)) as server, server.http() as http:
            reply = http.post(CHAT, json={**ask, "messages": messages}).json()
            assert server.stop() == 0
        if turn:
            assert reply["octavo"]["history"] == "exact"
            # All full blocks are there; the rows behind them are, if the disk was told of them in time.
            assert known - 32 <= reply["usage"]["prompt_tokens_details"]["cached_tokens"] < known
        known = reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]


def test_responses_and_conversations_outlive_the_server_until_they_are_deleted(
    tmp_path: Path, tiny: str
) -> None:
    environment = {"OCTAVO_CACHE": str(tmp_path)}
    base = ("--kv-memory", "64MiB", "--api-key", "ada", "--api-key", "bob")
    ask = {"model": "tiny", "input": "Once upon a time. " * 6, "max_output_tokens": 5, "temperature": 0}
    ada, bob = ({"x-api-key": name} for name in ("ada", "bob"))

    @contextlib.contextmanager
    def running(disk: str) -> Iterator[httpx2.Client]:
        with served(*base, "--kv-disk", disk, model=tiny, **environment) as server, server.http() as http:
            yield http
            assert server.stop() == 0

    def post(http: httpx2.Client, path: str = "responses", **body: Any) -> dict[str, Any]:
        reply = http.post(f"/v1/{path}", json=body, headers=ada)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def status(http: httpx2.Client, path: str, headers: dict[str, str] = ada) -> int:
        return http.get(f"/v1/{path}", headers=headers).status_code

    with running("1GiB") as http:
        conversation = post(http, "conversations", items=[{"role": "user", "content": "I am a boat."}])
        made = {name: post(http, **ask) for name in ("first", "gone")}
        made["talk"] = post(http, **ask, conversation=conversation["id"])
        made["off disk"] = post(http, **ask, prompt_cache_retention="in_memory")
        made["not stored"] = post(http, **ask, store=False)
        assert http.delete(f"/v1/responses/{made['gone']['id']}", headers=ada).status_code == 200
        assert status(http, f"responses/{made['off disk']['id']}") == 200
    ids = {name: f"responses/{response['id']}" for name, response in made.items()}
    talk = f"conversations/{conversation['id']}"
    with running("1GiB") as http:
        assert {name: status(http, path) for name, path in ids.items()} == {
            **dict.fromkeys(("first", "talk"), 200),
            **dict.fromkeys(("gone", "off disk", "not stored"), 404),
        }
        assert http.get(f"/v1/{ids['first']}", headers=ada).json() == made["first"]
        assert [status(http, path, bob) for path in (ids["first"], talk)] == [404, 404]
        items = http.get(f"/v1/{talk}/items?order=asc", headers=ada).json()["data"]
        assert [item["role"] for item in items] == ["user", "user", "assistant"]
        after = {**ask, "input": "Go on.", "octavo": {"why": True}}
        for behind in ({"previous_response_id": made["first"]["id"]}, {"conversation": conversation["id"]}):
            assert post(http, **after, **behind)["octavo"]["history"] == "exact"
        assert http.delete(f"/v1/{talk}", headers=ada).status_code == 200
        assert status(http, talk) == 404
        kept = post(http, **ask)["id"]
        assert http.delete("/v1/octavo/kept", headers=bob).status_code == 200
        assert status(http, f"responses/{kept}") == 200
        cleared = subprocess.run(
            [sys.executable, "-m", "octavo.cli.main", "cache", "clear", "--yes"],
            env={**os.environ, **environment},
            capture_output=True,
        )
        assert cleared.returncode == 0
        assert [status(http, path) for path in (f"responses/{kept}", ids["first"])] == [404, 404]
        last = post(http, **ask)["id"]
        assert http.delete("/v1/octavo/kept", headers=ada).json()["responses"] == 1
    with running("1GiB") as http:
        assert [status(http, path) for path in (f"responses/{last}", ids["first"], talk)] == [404] * 3
        last = post(http, **ask)["id"]
    with running("0") as http:
        assert status(http, f"responses/{last}") == 404
        nowhere = post(http, **ask)["id"]
        assert status(http, f"responses/{nowhere}") == 200
    with running("1GiB") as http:
        assert [status(http, f"responses/{id_}") for id_ in (last, nowhere)] == [200, 404]


@pytest.mark.parametrize("drain", ["60", "0"])
def test_a_response_in_the_background_is_finished_or_told_as_failed_when_the_server_ends(
    tmp_path: Path, tiny: str, drain: str
) -> None:
    options = ("--kv-disk", "1GiB", "--kv-memory", "64MiB", "--drain", drain)
    ask = {
        "model": "tiny",
        "input": "Once upon a time.",
        "max_output_tokens": 500,
        "octavo": {"timeout_s": 3},
        "ignore_eos": True,
        "background": True,
    }
    with served(*options, model=tiny, OCTAVO_CACHE=str(tmp_path)) as server, server.http() as http:
        made = http.post("/v1/responses", json=ask).json()
        assert made["status"] in ("queued", "in_progress")
        assert server.stop() == 0
    with served(*options, model=tiny, OCTAVO_CACHE=str(tmp_path)) as server, server.http() as http:
        kept = http.get(f"/v1/responses/{made['id']}").json()
    if drain == "0":
        assert (kept["status"], kept["error"]["code"]) == ("failed", "server_error")
    else:
        assert kept["status"] == "incomplete"
        assert kept["output"]


def test_a_response_that_nobody_finished_is_told_as_failed(tmp_path: Path, tiny: str) -> None:
    """The process was killed while it was made."""
    options = ("--kv-disk", "1GiB", "--kv-memory", "64MiB")
    ask = {"model": "tiny", "input": "Hi", "max_output_tokens": 3000, "ignore_eos": True, "background": True}
    with served(*options, model=tiny, OCTAVO_CACHE=str(tmp_path)) as server, server.http() as http:
        made = http.post("/v1/responses", json=ask).json()
        time.sleep(1)  # the disk is written to behind the requests
        server.process.kill()
    with served(*options, model=tiny, OCTAVO_CACHE=str(tmp_path)) as server, server.http() as http:
        kept = http.get(f"/v1/responses/{made['id']}").json()
    assert (kept["status"], kept["error"]["message"]) == ("failed", "The server ended while it was made.")


def test_what_asks_to_be_kept_in_memory_reaches_the_disk_on_no_path(tmp_path: Path, tiny: str) -> None:
    options = ("--kv-disk", "1GiB", "--kv-memory", "64MiB")
    ask = {"model": "tiny", "input": "Hi", "max_output_tokens": 3, "prompt_cache_retention": "in_memory"}
    with served(*options, model=tiny, OCTAVO_CACHE=str(tmp_path)) as server, server.http() as http:
        talk = http.post("/v1/conversations", json={"items": [{"role": "user", "content": "I am a boat."}]})
        path = f"/v1/conversations/{talk.json()['id']}/items"
        assert http.post("/v1/responses", json={**ask, "conversation": talk.json()["id"]}).status_code == 200
        assert len(http.get(path).json()["data"]) == 3
        long = {**ask, "background": True, "max_output_tokens": 3000, "ignore_eos": True}
        made = http.post("/v1/responses", json=long).json()
        assert http.post(f"/v1/responses/{made['id']}/cancel").json()["status"] == "cancelled"
        assert server.stop() == 0
    with served(*options, model=tiny, OCTAVO_CACHE=str(tmp_path)) as server, server.http() as http:
        assert http.get(path).status_code == 404
        assert http.get(f"/v1/responses/{made['id']}").status_code == 404
