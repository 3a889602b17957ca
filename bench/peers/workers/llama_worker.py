"""llama.cpp: its server for one sequence, with the times that the server itself takes; its own batched benchmark for
several that are alike, and its server with 16 slots for mixed ones. Options: `bin` (the folder of its programs),
`model`, `threads`, `context`, `arguments` (more of them)."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import socket

from protocol import options, serve

chosen = options()
programs, model = Path(chosen["bin"]), chosen["model"]
common = ["-m", model, "-t", str(chosen["threads"]), "-fa", "on", *chosen.get("arguments", [])]

SLOTS, SLOT_TOKENS = 16, 2048


class Server:
    """A llama-server that is ready."""

    def __init__(self, slots, tokens):
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{free.getsockname()[1]}"
            port = str(free.getsockname()[1])
        self._process = subprocess.Popen(
            [programs / "llama-server", *common, "-c", str(tokens), "-np", str(slots), "--port", port],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while True:
            try:
                self._ask("/health")
                break
            except (urllib.error.URLError, ConnectionError):
                if self._process.poll() is not None:
                    raise SystemExit("llama-server has ended") from None
                time.sleep(0.005)

    def close(self):
        self._process.terminate()

    def complete(self, prompt, tokens):
        """The server's own times of one answer."""
        body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": True}
        greedy = {"temperature": 0, "samplers": ["top_k"], "top_k": 1}
        times = self._ask("/completion", body | greedy)["timings"]
        if times["predicted_n"] != tokens:
            raise SystemExit(f"llama-server made {times['predicted_n']} of {tokens} tokens")
        return times

    def _ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)


def generate(prompts, tokens):
    if len(prompts) == 1:
        return [one(prompts[0], tokens[0])]
    if len(set(tokens)) == 1:
        return many(len(prompts), len(prompts[0]), tokens[0])
    return mixed(prompts, tokens)


def one(prompt, tokens):
    times = server.complete(prompt, tokens)
    first, rest = times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3
    return [first + rest * index / max(1, tokens - 1) for index in range(tokens)]


def mixed(prompts, tokens):
    """All that is known of an answer is when it was there."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        slots = Server(SLOTS, SLOTS * SLOT_TOKENS)
        start = time.perf_counter()

        def answer(prompt, number):
            slots.complete(prompt, number)
            return [time.perf_counter() - start] * number

        try:
            return list(pool.map(answer, prompts, tokens))
        finally:
            slots.close()


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


server = Server(1, chosen["context"])
try:
    told = subprocess.run([programs / "llama-server", "--version"], capture_output=True, text=True)
    version = (told.stdout + told.stderr).split("version:")[-1].split("\n")[0].strip()
    serve(generate, {"llama.cpp": version})
finally:
    server.close()
