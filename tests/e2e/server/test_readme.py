"""The requests that the README and the pages show, sent to a server: the answers are those shown."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from .conftest import Served

ROOT = Path(__file__).parents[3]
SHOWN = [
    found
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for found in re.findall(r"^\$ (curl .*)\n(.*)\n", page.read_text(encoding="utf-8"), re.M)
]
CHANGES = {"id", "created", "system_fingerprint", "cached_tokens", "cache_write_tokens", "octavo"}
"""Fields that differ from one time to the next; what was reused depends on who asked before."""


def fixed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: "#" if name in CHANGES else fixed(item) for name, item in value.items()}
    return [fixed(item) for item in value] if isinstance(value, list) else value


@pytest.mark.bundled
@pytest.mark.parametrize(("command", "answer"), SHOWN)
def test_a_shown_request_gets_the_shown_answer(server: Served, command: str, answer: str) -> None:
    words = shlex.split(command)[1:]
    url = next(word for word in words if word.startswith("http"))
    body = words[words.index("-d") + 1]
    headers = dict(words[at + 1].split(": ") for at, word in enumerate(words) if word == "-H")
    with server.http() as http:
        reply = http.post(url.replace("http://127.0.0.1:8000", ""), content=body, headers=headers)
    assert fixed(reply.json()) == fixed(json.loads(answer))
    assert list(reply.json()) == list(json.loads(answer))


def test_there_is_one() -> None:
    assert SHOWN
