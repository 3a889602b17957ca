"""Every benchmark runs to its end, small. None of their times is judged."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from families import tiny_model, tiny_tokenizer

from octavo.cli.main import invoke

ROOT = Path(__file__).parents[2]
SMALL = [
    "--prefill",
    "33",
    "--decode",
    "0",
    "--sequences",
    "2",
    "--mixed",
    "0",
    "--again",
    "40",
    "--tokens",
    "3",
    "--repeats",
    "1",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_bench_model(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "model", str(tiny), *SMALL, "--threads", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [figure["name"] for figure in found["figures"]] == [
        "prefill 33",
        "decode at 0",
        "2 sequences at 128",
        "40 tokens again, first token",
        "process start to first token",
    ]
    assert all(figure["median"] > 0 and len(figure["values"]) == 1 for figure in found["figures"])
    assert found["machine"]["read_gbps"] > 0


def test_bench_step(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--tokens", "40", "--steps", "3", "--sequences", "2", "--threads", "2"]
    assert invoke(["bench", "step", str(tiny), *small, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(figure["kind"], figure["tokens"]) for figure in found["figures"]] == [
        ("prefill", 80),
        ("decode", 6),
    ]
    for figure in found["figures"]:
        assert sum(figure["phases_ms"].values()) == pytest.approx(figure["total_ms"])
    assert invoke(["bench", "step", str(tiny), *small, "--profile"]) == 0
    assert "lm_head" in capsys.readouterr().out


def test_bench_model_leaves_out_what_does_not_fit(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = [
        "--prefill",
        "33,7900",
        "--decode",
        "0,8000",
        "--sequences",
        "1",
        "--mixed",
        "2",
        "--tokens",
        "2",
        "--repeats",
        "1",
    ]
    assert invoke(["bench", "model", str(tiny), *long]) == 0
    printed = capsys.readouterr().out
    assert "prefill 33" in printed
    assert "7,900" not in printed
    assert "8,000" not in printed
    assert "again" not in printed
    assert "mixed" not in printed


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--prefill", "x"], "'x'"), (["--sequences", "0"], "from 1"), (["--decode", "-1"], "from 0")],
)
def test_bench_model_refuses_what_is_no_number(
    tiny: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert invoke(["bench", "model", str(tiny), *arguments]) == 2
    assert word in capsys.readouterr().err


class Server(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that answers `word word` and counts a token a word."""

    tells_usage = True
    asked: list[list[dict[str, str]]]

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "toy"}]}), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "toy"
        assert body["stream_options"] == {"include_usage": True}
        self.asked.append(body["messages"])
        words = sum(len(message["content"].split()) for message in body["messages"])
        usage: dict[str, Any] = {"prompt_tokens": words, "completion_tokens": 2}
        usage["prompt_tokens_details"] = {"cached_tokens": words // 2}
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"delta": {"content": text}}]} for text in ("word ", "word")]
        chunks.append({"choices": [], "usage": usage if self.tells_usage else None})
        lines = [*(f"data: {json.dumps(chunk)}" for chunk in chunks), ": a comment", "data: [DONE]", ""]
        self._send("\n\n".join(lines), "text/event-stream")

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, text: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server() -> Iterator[tuple[str, type[Server]]]:
    handler = type("Handler", (Server,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", handler
        http.shutdown()


def test_bench_chat(server: tuple[str, type[Server]], capsys: pytest.CaptureFixture[str]) -> None:
    url, handler = server
    arguments = [
        "--url",
        f"one={url}",
        "--url",
        f"{url}/v1",
        "--chats",
        "1,2",
        "--turns",
        "3",
        "--words",
        "5",
    ]
    assert invoke(["bench", "chat", *arguments, "--repeats", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [(figure["server"], figure["chats"]) for figure in figures] == [
        ("one", 1),
        (f"{url}/v1", 1),
        ("one", 2),
        (f"{url}/v1", 2),
    ]
    for figure in figures:
        assert figure["tokens_per_s"]["median"] > 0
        assert 0 < figure["cached_share"] < 1
    # A warm-up and a round, two servers, three chats of three turns: each turn sends all that was said.
    assert len(handler.asked) == 2 * 2 * 3 * 3
    longest = max(handler.asked, key=len)
    assert [message["role"] for message in longest] == ["user", "assistant", "user", "assistant", "user"]
    assert longest[1]["content"] == "word word"


def test_bench_chat_says_what_a_server_lacks(
    server: tuple[str, type[Server]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    handler.tells_usage = False
    assert invoke(["bench", "chat", "--url", url, "--turns", "1", "--chats", "1"]) == 1
    assert "does not tell usage" in capsys.readouterr().err
    assert invoke(["bench", "chat", "--url", "http://127.0.0.1:9", "--turns", "1"]) == 1
    assert "Is the server up?" in capsys.readouterr().err
    assert invoke(["bench", "chat", "--url", "127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:8000" in capsys.readouterr().err


def test_a_sitting_with_a_peer(tiny: Path, tmp_path: Path) -> None:
    skipped = 'skip = ["2 sequences", "40 tokens again"]\nrestart = false'
    (tmp_path / "sitting.toml").write_text(
        f'[octavo]\nkind = "octavo"\nmodel = "{tiny}"\nthreads = 2\n'
        f'[transformers]\nkind = "transformers"\nmodel = "{tiny}"\nthreads = 2\n{skipped}\n'
    )
    command = [sys.executable, "-m", "bench.peers", str(tmp_path / "sitting.toml"), *SMALL]
    command += ["--plot", "--vocab-size", "300"]
    results = tmp_path / "results"
    command += ["--results", str(results), "--name", "small", "--lock", str(tmp_path / "lock")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((results / "small.json").read_text())
    names = {engine: [figure["name"] for figure in figures] for engine, figures in found["engines"].items()}
    assert names["octavo"] == [
        "prefill 33",
        "decode at 0",
        "2 sequences at 128",
        "40 tokens again, first token",
        "start to first token",
    ]
    assert names["transformers"] == ["prefill 33", "decode at 0", "start to first token"]
    assert (results / "small.png").read_bytes().startswith(b"\x89PNG")
    table = (results / "small.md").read_text()
    assert table in done.stdout
    assert "| prefill 33 | tok/s |" in table
    assert str(tmp_path) not in table + (results / "small.json").read_text()


def test_a_sitting_says_which_engine_died(tmp_path: Path) -> None:
    (tmp_path / "sitting.toml").write_text('[gone]\nkind = "octavo"\nmodel = "/nonexistent"\n')
    command = [
        sys.executable,
        "-m",
        "bench.peers",
        str(tmp_path / "sitting.toml"),
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert f"gone has ended with code 1; see {tmp_path / 'gone.log'}" in done.stderr
    assert "There is no model '/nonexistent'" in (tmp_path / "gone.log").read_text()


def test_an_engine_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    engines = importlib.import_module("bench.peers.engines")
    monkeypatch.setattr(engines, "WORKERS", tmp_path)
    (tmp_path / "deaf_worker.py").write_text("import time; time.sleep(60)")
    with pytest.raises(engines.EngineDied, match=r"deaf has said nothing for 1 s; see .*deaf\.log"):
        engines.EngineProcess("deaf", {"kind": "deaf"}, tmp_path / "deaf.log", engines.Exclusive(), 1.0)


def test_agents(tiny: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "bench/agents.py",
        str(tiny),
        "--agents",
        "2",
        "--steps",
        "3",
        "--scale",
        "0.0001",
    ]
    environment = {**os.environ, "OCTAVO_CACHE": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"by value, disk  computed +[\d,]+ for", done.stdout)
    assert re.search(r"LRU, no disk    computed +[\d,]+ for", done.stdout)


def test_many(tiny: Path) -> None:
    command = [sys.executable, "bench/many.py", "--model", str(tiny)]
    command += ["--conversations", "3", "--turns", "2", "--memory-for", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"6 answers in \d+ s, 0 other than alone", done.stdout)
    assert "held by running sequences afterwards: 0 bytes" in done.stdout


def test_eviction() -> None:
    command = [sys.executable, "bench/eviction.py", "--no-bound"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ratios = re.findall(r"^ +\d+%(?: +[\d,]+){2} +([\d.]+)", done.stdout, re.MULTILINE)
    assert len(ratios) == 3
    assert all(float(ratio) <= 0.85 for ratio in ratios), done.stdout
