"""llama.cpp: its server for one sequence, with the times that the server itself takes; its own batched benchmark for
several. Options: `bin` (the folder of its programs), `model`, `threads`, `context`, `arguments` (more of them)."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from socket import socket

from protocol import options, serve

chosen = options()
programs, model = Path(chosen["bin"]), chosen["model"]
common = ["-m", model, "-t", str(chosen["threads"]), "-fa", "on", *chosen.get("arguments", [])]

with socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen(
    [programs / "llama-server", *common, "-c", str(chosen["context"]), "-np", "1", "--port", str(port)],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def wait():
    while True:
        try:
            return ask("/health")
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None:
                raise SystemExit("llama-server has ended") from None
            time.sleep(0.005)


def generate(prompts, tokens):
    return [one(prompts[0], tokens)] if len(prompts) == 1 else many(len(prompts), len(prompts[0]), tokens)


def one(prompt, tokens):
    body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": True}
    times = ask("/completion", body | {"temperature": 0, "samplers": ["top_k"], "top_k": 1})["timings"]
    if times["predicted_n"] != tokens:
        raise SystemExit(f"llama-server made {times['predicted_n']} of {tokens} tokens")
    first, rest = times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3
    return [first + rest * index / max(1, tokens - 1) for index in range(tokens)]


def many(sequences, length, tokens):
    command = [programs / "llama-batched-bench", *common, "--output-format", "jsonl"]
    command += ["-npp", str(length), "-ntg", str(tokens - 1), "-npl", str(sequences)]
    command += ["-c", str(sequences * (length + tokens)), "-b", "2048"]
    printed = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout
    (found,) = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return [
        [found["t_pp"] + found["t_tg"] * i / (tokens - 1) for i in range(tokens)] for _ in range(sequences)
    ]


wait()
try:
    told = subprocess.run([programs / "llama-server", "--version"], capture_output=True, text=True)
    version = (told.stdout + told.stderr).split("version:")[-1].split("\n")[0].strip()
    serve(generate, {"llama.cpp": version})
finally:
    server.terminate()
