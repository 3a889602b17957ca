"""Somebody types in a file, and a plugin asks at every keystroke: what each request computes, and how long it takes.

    octavo serve smollm2 --fim-tokens "<issue_start>,<issue_comment>,<issue_closed>" --kv-disk 0
    python bench/typing_session.py --url http://127.0.0.1:8000 --count smollm2

The session is the project's own: 300 keystrokes in a file of about 3,000 tokens, with cursor moves, undo, and accepted
suggestions, sent as llama.vim would. With `--count MODEL` the prompts are tokenised here too, to say how many of a
prompt's tokens no earlier request had. `--url` may be a llama-server; then only its own figures are told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

FILE = Path(__file__).parents[1] / "src/octavo/engine/sampler.py"
NUM_LINES_BEFORE, NUM_LINES_BEHIND = 256, 64
SESSION: tuple[tuple[str, Any], ...] = (
    ("goto", 0.45),
    ("type", "        if self._counts_tokens and not history.ids.size:\n            return row\n"),
    ("erase", 12),
    ("type", "return rwo"),
    ("undo", 2),
    ("type", "ow.copy()\n"),
    ("move", -4),
    ("type", "        # nothing was generated yet\n"),
    ("goto", 0.8),
    ("accept", "def entropy(row: Floats) -> float:\n"),
    ("type", '    """Of the distribution, in nats."""\n    weights = _weights(row, row.max(), 1.0)\n'),
    ("accept", "    shares = weights / weights.sum()\n"),
    ("undo", 1),
    ("type", "    p = weights / mass\n    return float(-(p * np"),
    ("erase", 3),
    ("accept", ".log(p)).sum())\n"),
    ("goto", 0.3),
    ("type", "from functools import cache\n"),
)
"""`goto` a share of the file, `move` lines, `type` and `erase` characters, `undo` steps, `accept` a text."""


@dataclass(frozen=True, slots=True)
class Keystroke:
    """A request, and how many characters it has more than the one before, if it only has more."""

    body: dict[str, Any]
    kind: str


class Editor:
    """A buffer with a cursor and a history."""

    def __init__(self, text: str) -> None:
        self.text, self.cursor = text, 0
        self._history: list[tuple[str, int]] = []

    def put(self, text: str) -> None:
        self._history.append((self.text, self.cursor))
        self.text = self.text[: self.cursor] + text + self.text[self.cursor :]
        self.cursor += len(text)

    def erase(self) -> None:
        self._history.append((self.text, self.cursor))
        self.text = self.text[: self.cursor - 1] + self.text[self.cursor :]
        self.cursor -= 1

    def undo(self) -> None:
        self.text, self.cursor = self._history.pop()

    def line(self, number: int) -> None:
        """Goes to the beginning of a line."""
        lines = self.text.splitlines(keepends=True)
        self.cursor = sum(map(len, lines[: max(0, min(number, len(lines)))]))

    def request(self, num_tokens: int) -> dict[str, Any]:
        """What llama.vim would send."""
        before, behind = self.text[: self.cursor], self.text[self.cursor :]
        begin = before.rfind("\n") + 1
        return {
            "id_slot": 0,
            "input_prefix": "".join(before[:begin].splitlines(keepends=True)[-NUM_LINES_BEFORE:]),
            "input_suffix": "".join(behind.splitlines(keepends=True)[: NUM_LINES_BEHIND + 1]),
            "input_extra": [],
            "prompt": before[begin:],
            "n_predict": num_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "stream": True,
            "cache_prompt": True,
            "t_max_prompt_ms": 500,
            "t_max_predict_ms": 250,
        }


def session(text: str, num_tokens: int = 8) -> Iterator[Keystroke]:
    """The requests, one a keystroke."""
    editor = Editor(text)
    for kind, value in SESSION:
        if kind == "goto":
            editor.line(int(value * editor.text.count("\n")))
        elif kind == "move":
            editor.line(editor.text.count("\n", 0, editor.cursor) + value)
        elif kind == "accept":
            editor.put(value)
        for step in value if kind == "type" else range(value) if kind in ("erase", "undo") else (None,):
            if kind == "type":
                editor.put(step)
            elif kind == "erase":
                editor.erase()
            elif kind == "undo":
                editor.undo()
            yield Keystroke(editor.request(num_tokens), kind)


def ask(http: httpx2.Client, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds until the first piece, and what is told at the end."""
    started = time.perf_counter()
    first, last = 0.0, {}
    with http.stream("POST", "/infill", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                first = first or time.perf_counter() - started
                last = json.loads(line[6:])
    if "timings" not in last:
        sys.exit(f"The server answered {reply.status_code}: {last}")
    return first, last


def common(one: list[int], two: list[int]) -> int:
    """Tokens that two prompts begin with alike."""
    count = min(len(one), len(two))
    return next((index for index in range(count) if one[index] != two[index]), count)


def run(http: httpx2.Client, keystrokes: list[Keystroke], ids: list[list[int]] | None) -> dict[str, float]:
    """Sends the session; figures of it."""
    times, computed, typed, close = [], [], [], 0
    for number, keystroke in enumerate(keystrokes):
        first_s, last = ask(http, keystroke.body)
        times.append(first_s)
        computed.append(last["timings"]["prompt_n"])
        if keystroke.kind == "type" and number:
            typed.append(computed[-1])
        if ids is not None:
            assert len(ids[number]) == last["tokens_evaluated"], "the prompt was laid out in another way"
            known = max((common(ids[number], earlier) for earlier in ids[:number]), default=0)
            close += computed[-1] <= len(ids[number]) - known + 32
    figures = {
        "keystrokes": len(keystrokes),
        "cold_tokens": computed[0],
        "cold_s": times[0],
        "p50_s": statistics.median(times[1:]),
        "p95_s": sorted(times[1:])[int(0.95 * (len(times) - 1))],
        "computed_p50": statistics.median(computed[1:]),
        "computed_mean": statistics.mean(computed[1:]),
        "per_typed_character": statistics.mean(typed),
    }
    if ids is not None:
        figures["within_32"] = close / len(keystrokes)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True)
    parser.add_argument("--count", metavar="MODEL", help="tokenise as this model does, which the server has")
    parser.add_argument("--fim-tokens", default="<issue_start>,<issue_comment>,<issue_closed>")
    parser.add_argument("--fim-order")
    parser.add_argument("--keystrokes", type=int, default=10_000, help="send the first ones only")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--file", type=Path, default=FILE)
    arguments = parser.parse_args()
    keystrokes = list(session(arguments.file.read_text(), arguments.tokens))[: arguments.keystrokes]
    ids = None
    if arguments.count:
        from octavo.models.load import load_model
        from octavo.server.infill.prompt import FimPrompts, Gap
        from octavo.server.infill.tokens import find_fim_tokens

        loaded = load_model(arguments.count, dtype="fp32")
        tokens = find_fim_tokens(loaded.tokenizer, arguments.fim_tokens.split(","), arguments.fim_order)
        assert tokens is not None
        fim = FimPrompts(loaded.tokenizer, tokens)
        room = loaded.context_length - 1 - arguments.tokens
        gaps = [
            Gap(*(one.body[name] for name in ("input_prefix", "input_suffix", "prompt")))
            for one in keystrokes
        ]
        ids = [fim.infill(gap, room=room, namespace="") for gap in gaps]
    anew = httpx2.Limits(max_keepalive_connections=0)  # each time, as the plugin does, which calls curl
    with httpx2.Client(base_url=arguments.url, timeout=240, limits=anew) as http:
        figures = run(http, keystrokes, ids)
    for name, value in figures.items():
        print(f"{name:20} {value:10.3f}")
    print(f"first token, of cold  {figures['p50_s'] / figures['cold_s']:9.3f}")


if __name__ == "__main__":
    main()
