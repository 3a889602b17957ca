"""Decoding with and without drafts, in turns: code that is copied and edited, and plain chat.

    python bench/speculation.py smollm2 --repeats 3

The answers of both are compared token by token. Chat is sampled, so that it does not repeat itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from octavo import Engine

CODE = '''import json
from pathlib import Path


def load(path: Path) -> dict[str, str]:
    """Read a file of settings, one a line, with comments behind a hash sign."""
    settings = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"line {number} of {path} has no equals sign: {text!r}")
        settings[name.strip()] = value.strip()
    return settings


def save(path: Path, settings: dict[str, str]) -> None:
    """Write settings, sorted by name."""
    path.write_text("".join(f"{name} = {value}\\n" for name, value in sorted(settings.items())))


def as_json(settings: dict[str, str]) -> str:
    """The settings for other programs."""
    return json.dumps(settings, indent=2, sort_keys=True)
'''
EDITS = [
    f"Repeat the following code exactly, without any changes:\n\n```python\n{CODE}```",
    f"Rename the function load to read in this code, and print all of it again:\n\n```python\n{CODE}```",
    f"Add a comment at the top of this code that says # settings, and print the whole code:\n\n```python\n{CODE}```",
]
CHATS = [
    "Tell me about the history of Rome.",
    "Write a short story about a dog that finds a map in the forest.",
    "What should I think about before I move to another country?",
    "Explain how a steam engine works, as you would to a child.",
    "Give me some advice on learning to cook.",
    "Describe a walk through an old city at night.",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--kv-format", default="int8")
    arguments = parser.parse_args()
    options: dict[str, Any] = {"kv_disk": 0, "kv_format": arguments.kv_format}
    with (
        Engine(arguments.model, speculate="off", **options) as plain,
        Engine(arguments.model, **options) as drafting,
    ):
        for name, prompts, sampling in (
            ("edits", EDITS, {}),
            ("chat", CHATS, {"temperature": 0.9, "seed": 1}),
        ):
            ratios, speeds, drafted, accepted = [], [], 0, 0
            for turn in range(arguments.repeats):
                for prompt in prompts:
                    pair: list[Any] = [None, None]
                    for index in (0, 1) if turn % 2 else (1, 0):
                        engine = (plain, drafting)[index]
                        engine.clear()
                        messages = [{"role": "user", "content": prompt}]
                        pair[index] = engine.chat(messages, max_tokens=arguments.tokens, **sampling)
                    if pair[0].token_ids != pair[1].token_ids:
                        sys.exit(f"Drafts have changed an answer to {prompt[:40]!r}.")
                    seconds = [reply.timings.total_s - reply.timings.ttft_s for reply in pair]
                    ratios.append(seconds[0] / seconds[1])
                    speeds.append(
                        [(len(reply.token_ids) - 1) / s for reply, s in zip(pair, seconds, strict=True)]
                    )
                    drafted += pair[1].usage.drafted_tokens
                    accepted += pair[1].usage.accepted_tokens
            before, after = (statistics.median(one) for one in zip(*speeds, strict=True))
            total = statistics.mean(ratios)
            print(
                f"{name:6} {before:6.0f} -> {after:6.0f} tok/s, {statistics.median(ratios):.2f}x, mean {total:.2f}x "
                f"({min(ratios):.2f} to {max(ratios):.2f}); {accepted} of {drafted} drafted tokens accepted"
            )


if __name__ == "__main__":
    main()
