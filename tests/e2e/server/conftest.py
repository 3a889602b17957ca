"""A real server process on the bundled model, and the clients that people have."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import openai
import pytest

PATIENCE_S = 240


@dataclass
class Served:
    """A server process. `lines` are those of its log, and `said` what else it says."""

    url: str
    process: subprocess.Popen[str]
    key: str = "none"
    lines: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def http(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    def openai(self, **options: Any) -> openai.OpenAI:
        """The SDK, which refuses answers that are not what it documents."""
        options = {"api_key": self.key, "_strict_response_validation": True, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, timeout=PATIENCE_S, **options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        options = {"api_key": self.key, "_strict_response_validation": True, **options}
        return anthropic.Anthropic(base_url=self.url, max_retries=0, timeout=PATIENCE_S, **options)

    def logged(self, request_id: str) -> dict[str, Any]:
        """The log's line of a request; it is written when the answer has been sent."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if line.get("request_id") == request_id and line["event"] == "request":
                    return line
            time.sleep(0.02)
        raise AssertionError(f"{request_id} is not in the log")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def served(*options: str, model: str = "smollm2", **environment: str) -> Iterator[Served]:
    """A server of its own; killed at the end if it has not been stopped."""
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "serve",
        model,
        "--port",
        "0",
        "--kv-memory",
        "512MiB",
    ]
    process = subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    server = Served("", process)
    listens = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if not line.startswith("{"):
                server.said.append(line)
                continue
            server.lines.append(json.loads(line))
            if server.lines[-1]["event"] == "serving":
                server.url = server.lines[-1]["url"]
                listens.set()
        listens.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert listens.wait(PATIENCE_S)
        assert server.url, f"the server has ended: {''.join(server.said)}"
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join(PATIENCE_S)


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """One server for all tests that need no settings. At the end nothing must have failed in it."""
    with served() as server:
        yield server
        assert server.stop() == 0
        assert [line for line in server.lines if line["level"] == "error"] == []


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random model with a chat template, which answers nonsense a hundred times as fast."""
    from families import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tiny_model("llama", max_position_embeddings=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


def metrics(server: Served) -> dict[str, float]:
    """The samples of `/metrics` by name and labels."""
    with server.http() as http:
        text = http.get("/metrics").text
    return {match[1]: float(match[2]) for match in re.finditer(r"^([^#\n][^\n]*) (\S+)$", text, re.M)}
