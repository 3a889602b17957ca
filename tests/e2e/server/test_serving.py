"""What a server does around its answers: who may ask, how much, what it logs, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from .conftest import PATIENCE_S, Served, metrics, served

pytestmark = pytest.mark.bundled

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
BODY = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 8}
LONG = {**BODY, "max_tokens": 2000, "stream": True, "logit_bias": {"2": -100, "0": -100}}
CHAT = "/v1/chat/completions"
ORIGIN = "http://localhost:3000"
WARM = "You are a friendly helper of the harbour office. Answer questions about ships, tides and berths, briefly."


def octavo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two keys by name, and their file."""
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    made = {name: octavo("key", name, "--file", str(file)).stdout.strip() for name in ("ada", "bob")}
    return {**made, "file": str(file)}


@pytest.fixture(scope="module")
def locked(keys: dict[str, str]) -> Iterator[Served]:
    """A server with keys and small limits."""
    prompt = Path(keys["file"]).with_name("prompt.txt")
    prompt.write_text(WARM)
    limits = ("--max-body", "100KiB", "--max-requests", "4", "--rate", "1000")
    options = ("--api-key-file", keys["file"], *limits, "--origin", ORIGIN, "--warm", str(prompt))
    with served(*options, OCTAVO_API_KEY="from-the-environment") as server:
        yield server
        assert server.stop() == 0
        text = json.dumps(server.lines)
        assert [line for line in server.lines if line["level"] == "error"] == []
        assert not any(key in text for key in ("from-the-environment", keys["ada"], keys["bob"]))


def test_keys_are_stored_as_hashes_in_a_file_for_the_owner_alone(keys: dict[str, str]) -> None:
    file = Path(keys["file"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert keys["ada"] not in file.read_text()
    again = octavo("key", "ada", "--file", str(file))
    assert again.returncode == 2
    assert "'ada' already" in again.stderr


def test_only_who_has_a_key_gets_an_answer(locked: Served, keys: dict[str, str]) -> None:
    with locked.http() as http:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"x-api-key": "wrong"},
            {"Authorization": "Basic x"},
        ):
            for path in (CHAT, "/v1/models", "/openapi.json", "/nonsense"):
                reply = http.request("POST" if path == CHAT else "GET", path, headers=headers)
                assert reply.status_code == 401, path
                assert reply.json()["error"]["code"] == "invalid_api_key"
        for headers in (
            {"Authorization": f"Bearer {keys['ada']}"},
            {"x-api-key": keys["bob"]},
            {"authorization": "bearer from-the-environment"},
        ):
            assert http.post(CHAT, json=BODY, headers=headers).status_code == 200
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json() == {"status": "ok"}
        reply = http.post(CHAT, json=BODY, headers={"x-api-key": keys["ada"]})
    assert locked.logged(reply.headers["x-request-id"])["tenant"] == "ada"


def test_tenants_reuse_nothing_of_each_other(locked: Served, keys: dict[str, str]) -> None:
    messages = [{"role": "user", "content": "A secret: the treasure lies under the old oak tree. " * 8}]
    cached = {}
    for name in ("ada", "bob", "ada"):
        with locked.openai(api_key=keys[name]) as client:
            reply = client.chat.completions.create(
                **{**BODY, "messages": messages}, extra_body={"octavo": {"why": True}}
            )
            cached.setdefault(name, []).append(reply.usage.prompt_tokens_details.cached_tokens)
    # Each has what the server was told to read for it beforehand, which begins with the same few tokens.
    assert cached["bob"][0] == cached["ada"][0] < 10
    assert cached["ada"][1] == reply.usage.prompt_tokens - 1
    with locked.http() as http:
        for name, numbers in (("ada", cached["ada"][::-1]), ("bob", cached["bob"])):
            told = http.get("/v1/octavo/requests", headers={"x-api-key": keys[name]})
            records = told.json()["data"][: len(numbers)]
            assert [record["memory_tokens"] + record["disk_tokens"] for record in records] == numbers
            assert "other_tenant" not in told.text
    said = [{"role": "user", "content": "Only Ada says this."}]
    with locked.openai(api_key=keys["ada"]) as client:
        answer = client.chat.completions.create(**{**BODY, "messages": said}).choices[0].message
    again = [*said, answer, {"role": "user", "content": "Where?"}]
    for name, history in (("bob", "retokenised"), ("ada", "exact")):
        # Bob has not generated this conversation, although Ada has.
        with locked.openai(api_key=keys[name]) as client:
            options = {"octavo": {"why": True}}
            other = client.chat.completions.create(**{**BODY, "messages": again}, extra_body=options)
            assert other.octavo["history"] == history


def test_a_warm_prompt_is_read_before_it_is_asked_for(locked: Served, keys: dict[str, str]) -> None:
    messages = [{"role": "system", "content": WARM}, {"role": "user", "content": "When is high tide?"}]
    for name in ("ada", "bob"):
        (warmed,) = [
            line["tokens"] for line in locked.lines if line["event"] == "warmed" and line["tenant"] == name
        ]
        with locked.openai(api_key=keys[name]) as client:
            usage = client.chat.completions.create(**{**BODY, "messages": messages}).usage
        assert usage.prompt_tokens_details.cached_tokens == warmed > 20


def test_a_shared_prompt_is_read_once_for_all_keys(tmp_path: Path, tiny: str) -> None:
    file = tmp_path / "shared.txt"
    file.write_text(WARM)
    options = ("--kv-memory", "64MiB", "--kv-disk", "0", "--api-key", "ada", "--api-key", "bob")
    messages = [{"role": "system", "content": WARM}, {"role": "user", "content": "When is high tide? " * 20}]
    with served(*options, "--shared-prefix", str(file), model=tiny) as server:
        (shared,) = [line["tokens"] for line in server.lines if line["event"] == "shared"]
        assert shared > 64
        for key in ("ada", "bob"):
            with server.http(headers={"x-api-key": key}) as http:
                for cached in (shared // 32 * 32, None):
                    usage = http.post(CHAT, json={**BODY, "model": "tiny", "messages": messages}).json()[
                        "usage"
                    ]
                    found = usage["prompt_tokens_details"]["cached_tokens"]
                    assert found == (usage["prompt_tokens"] - 1 if cached is None else cached)
        assert server.stop() == 0


def test_pages_of_a_named_origin_may_read_answers(locked: Served, keys: dict[str, str]) -> None:
    with locked.http() as http:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        allowed = http.options(CHAT, headers={"Origin": ORIGIN, **asked})
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
        other = http.options(CHAT, headers={"Origin": "http://evil.example", **asked})
        assert "access-control-allow-origin" not in other.headers


def test_pages_of_no_origin_may_read_answers_by_default(server: Served) -> None:
    with server.http() as http:
        assert "access-control-allow-origin" not in http.get("/v1/models", headers={"Origin": ORIGIN}).headers


def test_what_is_kept_can_be_deleted(locked: Served, keys: dict[str, str]) -> None:
    messages = [{"role": "user", "content": "The old lighthouse keeper counted his steps every night. " * 8}]
    cached, kept = {}, {}
    for name in ("ada", "bob"):
        with locked.openai(api_key=keys[name]) as client:
            client.chat.completions.create(**{**BODY, "messages": messages})
            kept[name] = client.responses.create(model="smollm2", input="Hi", max_output_tokens=2).id
    with locked.http(headers={"x-api-key": keys["ada"]}) as http:
        gone = http.delete("/v1/octavo/kept").json()
        assert gone["responses"] >= 1
        assert gone["transcripts"] >= 1
        assert gone["cache_bytes"] > 0
        assert http.delete("/v1/octavo/kept").json()["responses"] == 0
        assert http.get(f"/v1/responses/{kept['ada']}").status_code == 404
    for name in ("ada", "bob"):
        with locked.openai(api_key=keys[name]) as client:
            reply = client.chat.completions.create(
                **{**BODY, "messages": messages}, extra_body={"octavo": {"why": True}}
            )
            cached[name] = reply.usage.prompt_tokens_details.cached_tokens
            if name == "ada":
                assert reply.octavo["why"]["cause"] == "cleared"
    assert cached == {"ada": 0, "bob": reply.usage.prompt_tokens - 1}
    with locked.openai(api_key=keys["bob"]) as client:
        assert client.responses.retrieve(kept["bob"]).id == kept["bob"]


def test_bodies_and_requests_are_limited(locked: Served, keys: dict[str, str]) -> None:
    headers = {"x-api-key": keys["ada"]}
    with locked.http(headers=headers) as http:
        large = http.post(CHAT, json={**BODY, "messages": [{"role": "user", "content": "x" * 200_000}]})
        assert large.status_code == 413
        assert "102,400 bytes" in large.json()["error"]["message"]

        def pieces() -> Iterator[bytes]:  # of a length that is not told beforehand
            for _ in range(200):
                yield b" " * 1000

        assert http.post(CHAT, content=pieces()).status_code == 413
        streams = [http.stream("POST", CHAT, json=LONG) for _ in range(4)]
        for stream in streams:
            assert stream.__enter__().status_code == 200
        busy = http.post(CHAT, json=BODY)
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        for stream in streams:
            stream.__exit__(None, None, None)
        until(lambda: http.post(CHAT, json=BODY).status_code == 200)


def until(true: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "said"),
    [
        ("GET", "/nothing", None, 404, "no such path"),
        ("GET", CHAT, None, 405, "does not take this method"),
        ("POST", CHAT, b"{", 400, "not valid JSON"),
        ("POST", CHAT, b"", 400, "body is missing"),
        ("POST", CHAT, b"[1]", 400, "JSON object"),
        ("POST", CHAT, b"\xff\xfe", 400, ""),
        ("POST", CHAT, b"[" * 50_000, 400, ""),
        ("POST", CHAT, b'{"seed": ' + b"9" * 5000 + b"}", 400, ""),
        ("POST", CHAT, b'{"model": "smollm2", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "content"),
        ("POST", CHAT, b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}', 404, "no model"),
        ("POST", CHAT, b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404, "no model 'other'"),
    ],
)  # fmt: skip
def test_a_broken_request_gets_an_error_in_the_right_shape(
    server: Served, method: str, path: str, content: bytes | None, status: int, said: str
) -> None:
    with server.http() as http:
        reply = http.request(method, path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"]


def test_a_form_of_a_web_page_is_no_request(server: Served) -> None:
    """Browsers send these to any address without asking it first."""
    with server.http() as http:
        reply = http.post(CHAT, content=json.dumps(BODY), headers={"Content-Type": "text/plain"})
        assert reply.status_code == 400
        assert "application/json" in reply.json()["error"]["message"]
        other = http.get("/v1/models", headers={"Host": "evil.example:8000"})
        assert (other.status_code, other.json()["error"]["code"]) == (403, "wrong_host")


def test_the_log_tells_what_was_reused_and_nothing_that_was_said(server: Served) -> None:
    with server.http() as http:
        reply = http.post(CHAT, json={**BODY, "messages": [{"role": "user", "content": "Xylophone?"}]})
    line = server.logged(reply.headers["x-request-id"])
    assert (line["status"], line["path"], line["model"], line["level"]) == (200, CHAT, "smollm2", "info")
    assert line["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"]
    assert line["completion_tokens"] == reply.json()["usage"]["completion_tokens"]
    assert line["duration_ms"] >= line["ttft_ms"] > 0
    assert "Xylophone" not in json.dumps(server.lines)


def test_clients_that_go_leave_nothing_behind(server: Served) -> None:
    """Connections cut at any moment: while the request is sent, waits, is read or is answered."""
    chance = random.Random(7)
    until(lambda: is_idle(server))
    before = metrics(server)
    address = httpx2.URL(server.url)
    for number in range(int(os.environ.get("OCTAVO_FUZZ_CLIENTS", "40"))):
        body = {**LONG, "stream": number % 3 != 0}
        body["messages"] = [
            {"role": "user", "content": f"Number {number}. " + "word " * chance.randrange(400)}
        ]
        payload = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        data = f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload
        with socket.create_connection((address.host, address.port)) as connection:
            if number % 5 == 0:
                connection.sendall(data[: chance.randrange(len(data))])
            else:
                connection.sendall(data)
                end = time.monotonic() + chance.choice((0.001, 0.02, 0.1, 0.3))
                with contextlib.suppress(TimeoutError):
                    while (left := end - time.monotonic()) > 0:
                        connection.settimeout(left)
                        connection.recv(4096)
    until(lambda: is_idle(server))
    after = metrics(server)
    assert after["octavo_tasks"] <= before["octavo_tasks"]
    assert after["octavo_requests_gone_total"] > before["octavo_requests_gone_total"]


def is_idle(server: Served) -> bool:
    """No request, sequence or block in use; the reading of the metrics itself is one request."""
    now = metrics(server)
    return now["octavo_requests_open"] == 1 and not any(
        now[f'octavo_{what}"smollm2",{rest}']
        for what, rest in (
            ("sequences{model=", 'state="running"}'),
            ("sequences{model=", 'state="waiting"}'),
            ("memory_bytes{model=", 'of="kv_used"}'),
        )
    )


def test_running_answers_are_finished_before_the_server_ends() -> None:
    with served() as server, server.openai() as client:
        stream = client.chat.completions.create(**{**BODY, "max_tokens": 40, "stream": True})
        text = next(iter(stream)).choices[0].delta.content
        server.process.send_signal(signal.SIGTERM)
        refused = False
        ends = []
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            ends.append(chunk.choices[0].finish_reason)
            if not refused:
                time.sleep(0.3)
                with pytest.raises(openai.APIConnectionError), server.openai() as other:
                    other.models.list()
                refused = True
        assert "Paris" in text
        assert ends[-1] == "stop"
        assert server.process.wait(PATIENCE_S) == 0
        assert [line["event"] for line in server.lines if line["event"] in ("stopping", "stopped")] == [
            "stopping",
            "stopped",
        ]


def test_the_server_is_not_opened_to_others_by_accident(tmp_path: Path) -> None:
    refused = octavo("serve", "smollm2", "--host", "0.0.0.0")
    assert refused.returncode == 2
    assert "--api-key" in refused.stderr
    assert "--without-key" in refused.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = octavo("serve", "smollm2", "--port", port)
    assert result.returncode == 2
    assert f"port {port}" in result.stderr
    file = tmp_path / "keys"
    file.write_text("ada my-secret-key\n")
    result = octavo("serve", "smollm2", "--api-key-file", str(file))
    assert (result.returncode, "my-secret-key" in result.stderr) == (2, False)
    assert "Line 1" in result.stderr


def test_a_batch_is_answered_and_goes_on_where_it_was_stopped(tmp_path: Path, tiny: str) -> None:
    file = tmp_path / "batch.jsonl"
    bodies = [{**BODY, "model": "tiny", "max_tokens": 3} for _ in range(4)]
    bodies[3] = {"model": "nobody", "messages": QUESTION}
    lines = [
        json.dumps({"custom_id": f"r{number}", "url": CHAT, "body": body})
        for number, body in enumerate(bodies)
    ]
    file.write_text("\n".join(lines))
    made = octavo("batch", tiny, str(file), "--kv-memory", "64MiB")
    assert made.returncode == 1, made.stderr
    assert "4 requests answered, 1 of them errors" in made.stderr
    output = tmp_path / "batch.answers.jsonl"
    answers = {
        answer["custom_id"]: answer["response"] for answer in map(json.loads, output.read_text().splitlines())
    }
    assert {name: answer["status_code"] for name, answer in answers.items()} == {
        "r0": 200,
        "r1": 200,
        "r2": 200,
        "r3": 404,
    }
    assert answers["r0"]["body"]["usage"]["completion_tokens"] == 3
    with output.open("a") as cut_off:
        cut_off.write('{"custom_id": "cut')
    file.write_text(file.read_text().replace("nobody", "tiny"))
    again = octavo("batch", tiny, str(file), "--kv-memory", "64MiB")
    assert again.returncode == 0, again.stderr
    assert "1 request answered, 3 were there" in again.stderr
    assert len(output.read_text().splitlines()) == 4
    refused = octavo("batch", tiny, str(file), "--output", str(tmp_path / "none" / "x"))
    assert (refused.returncode, "cannot be written" in refused.stderr) == (2, True)
