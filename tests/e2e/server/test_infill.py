"""llama.cpp's interface, spoken as editors' plugins do."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.models.load import load_model
from octavo.server.infill.prompt import FimPrompts, Gap
from octavo.server.infill.tokens import find_fim_tokens

from .conftest import Served, metrics, served

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from transformers import PreTrainedTokenizerFast
from typing_session import run, session

FILE = "".join(f"def function_{number}(value):\n    return value + {number}\n\n" for number in range(24))
MARKS = ["<|im_start|>", "<|im_end|>", "<pad>"]
VIM_FIELDS = [
    "content",
    *(f"timings/{kind}_{what}" for kind in ("prompt", "predicted") for what in ("n", "ms", "per_token_ms", "per_second")),
    "truncated",
    "tokens_cached",
]  # fmt: skip


@pytest.fixture(scope="module")
def coder(tiny: str) -> Iterator[Served]:
    with served("--fim-tokens", ",".join(MARKS), "--kv-disk", "0", model=tiny) as server:
        yield server
        assert server.stop() == 0
        assert [line for line in server.lines if line["level"] == "error"] == []


def vim(prefix: str, suffix: str, typed: str, extra: list[dict[str, Any]]) -> dict[str, Any]:
    """What llama.vim sends at a keystroke."""
    return {
        "id_slot": 0,
        "input_prefix": prefix,
        "input_suffix": suffix,
        "input_extra": extra,
        "prompt": typed,
        "n_predict": 8,
        "stop": [],
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.90,
        "samplers": ["top_k", "top_p", "infill"],
        "stream": False,
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": VIM_FIELDS,
        "model": "",
    }


def vim_warm(extra: list[dict[str, Any]]) -> dict[str, Any]:
    """What it sends when it has found another piece of the project."""
    return {
        "id_slot": 0,
        "input_prefix": "",
        "input_suffix": "",
        "input_extra": extra,
        "prompt": "",
        "n_predict": 0,
        "temperature": 0.0,
        "samplers": [],
        "stream": False,
        "cache_prompt": True,
        "t_max_prompt_ms": 1,
        "t_max_predict_ms": 1,
        "response_fields": [""],
    }


def vscode(prefix: str, suffix: str, typed: str, extra: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What llama.vscode sends."""
    return {
        "id_slot": 0,
        "input_prefix": prefix,
        "input_suffix": suffix,
        "input_extra": extra,
        "prompt": typed,
        "n_predict": 8,
        "n_cmpl": 1,
        "top_k": 40,
        "top_p": 0.99,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 2500,
        **more,
    }


def test_a_session_of_llama_vim_is_served_and_typing_costs_what_was_typed(coder: Served) -> None:
    extra = [{"text": "import os\n", "time": 17, "filename": "a.py"}]
    head, line, tail = FILE, "    return value * 2 + 1", "\n" + FILE[:400]
    with coder.http() as http:
        assert http.post("/infill", json=vim_warm(extra)).json() == {}
        costs = []
        for end in range(4, len(line) + 1):
            reply = http.post("/infill", json=vim(head, tail, line[:end], extra))
            assert reply.status_code == 200, reply.text
            said = reply.json()
            assert set(said) == set(VIM_FIELDS)
            assert isinstance(said["content"], str)
            costs.append(said["timings/prompt_n"])
        assert said["tokens_cached"] > 1000
        # a token of this tokenizer is a character, so each keystroke is one new token
        assert costs[0] > 1000
        assert max(costs[1:]) <= 1 + 1
        extra.append({"text": "import sys\n", "filename": "b.py"})
        assert http.post("/infill", json=vim_warm(extra)).json() == {}
        first = http.post("/infill", json=vim(head, tail, line, extra)).json()
        assert first["tokens_cached"] >= 32  # what the warm request has read


def test_the_typing_session_computes_what_no_earlier_request_had(coder: Served, tiny: str) -> None:
    loaded = load_model(tiny, dtype="fp32")
    tokens = find_fim_tokens(loaded.tokenizer, ("<|im_start|>", "<|im_end|>", "<pad>"))
    assert tokens is not None
    fim = FimPrompts(loaded.tokenizer, tokens)
    keystrokes = list(session(FILE, num_tokens=2))[:180]
    ids = [
        fim.infill(
            Gap(*(one.body[name] for name in ("input_prefix", "input_suffix", "prompt"))),
            room=4000,
            namespace="",
        )
        for one in keystrokes
    ]
    with coder.http() as http:
        figures = run(http, keystrokes, ids)
    assert figures["cold_tokens"] > 1000
    assert figures["within_32"] >= 0.95
    assert figures["computed_p50"] <= 2


def test_a_session_of_llama_vscode_is_served(coder: Served) -> None:
    extra = [{"text": "x = 1", "time": 1.5, "filename": "x.py"}]
    with coder.http() as http:
        warm = http.post("/infill", json=vscode("", "", "", extra, n_predict=0, samplers=[])).json()
        assert (warm["content"], warm["tokens_predicted"], warm["stop_type"]) == ("", 0, "limit")
        said = http.post("/infill", json=vscode(FILE, FILE, "def g(", extra, n_indent=4)).json()
        assert said["stop"]
        assert said["tokens_evaluated"] == said["timings"]["cache_n"] + said["timings"]["prompt_n"]
        assert said["tokens_predicted"] == said["timings"]["predicted_n"] <= 8
        assert said["generation_settings"]["top_p"] == 0.99
        assert said["prompt"].startswith("<s>") is False
        several = http.post("/infill", json=vscode(FILE, FILE, "def g(", extra, n_cmpl=3)).json()
        assert [one["index"] for one in several] == [0, 1, 2]


def test_completion_streams_what_it_answers_whole(coder: Served) -> None:
    body = {"prompt": FILE[:300], "n_predict": 12, "temperature": 0, "ignore_eos": True}
    with coder.http() as http:
        whole = http.post("/completion", json={**body, "return_tokens": True}).json()
        assert (whole["stop_type"], len(whole["tokens"]), whole["truncated"]) == ("limit", 12, False)
        with http.stream("POST", "/completion", json={**body, "stream": True}) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]
        assert "".join(event["content"] for event in events) == whole["content"]
        assert [id_ for event in events for id_ in event["tokens"]] == whole["tokens"]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1]["timings"]["cache_n"] > 0
        ids = http.post("/completion", json={**body, "prompt": [5, 6, "abc", 7]}).json()
        assert ids["tokens_evaluated"] == 6
        two = http.post("/completion", json={**body, "prompt": ["abc", [5, 6]]}).json()
        assert [one["tokens_evaluated"] for one in two] == [3, 2]
        scored = http.post("/completion", json={**body, "n_probs": 2}).json()["completion_probabilities"]
        assert len(scored) == 12
        assert len(scored[0]["top_logprobs"]) == 2
        word = http.post("/completion", json={**body, "stop": [whole["content"][2:4]]}).json()
        assert (word["stop_type"], word["stopping_word"]) == ("word", whole["content"][2:4])


def test_a_suffix_and_marks_written_out_are_one_prompt(coder: Served) -> None:
    with coder.http() as http:
        options = {"model": "tiny", "max_tokens": 8, "temperature": 0}
        asked = http.post("/v1/completions", json={**options, "prompt": "a\nbc", "suffix": "\nd"}).json()
        assert asked["usage"]["prompt_tokens"] == 3 + 6
        raw = {"n_predict": 8, "temperature": 0, "prompt": "<|im_start|>a\n<|im_end|>\nd<pad>bc"}
        said = http.post("/completion", json=raw).json()
        assert said["tokens_evaluated"] == 9
        assert said["tokens_cached"] == 8


def test_what_is_wrong_is_told(coder: Served, server: Served) -> None:
    with coder.http() as http:
        for body, word in (
            ({"input_prefix": "a"}, "input_suffix"),
            ({"input_prefix": "a", "input_suffix": "b", "grammar": "root ::= x"}, "json_schema"),
            ({"input_prefix": "a", "input_suffix": "b", "model": "other"}, "other"),
        ):
            reply = http.post("/infill", json=body)
            assert reply.status_code in (400, 404)
            assert word in reply.json()["error"]["message"]
    with server.http() as http:
        reply = http.post("/infill", json=vscode("a", "b", "", []))
        assert reply.status_code == 400
        assert "--fim-tokens" in reply.json()["error"]["message"]


def test_a_keystroke_ends_the_request_before_it_and_keeps_its_prefix(coder: Served, tiny: str) -> None:
    text = "q" * 1500 + "\n"
    # A long answer: hot, as it would be drafted and be there at once if it repeated itself, and without marks, which end it.
    marks = PreTrainedTokenizerFast.from_pretrained(tiny).convert_tokens_to_ids(MARKS)
    long = {"samplers": ["temperature"], "temperature": 9.0, "logit_bias": [[mark, False] for mark in marks]}
    body = {**vscode(text, "", "r", []), "n_predict": 2000, "stream": True, "ignore_eos": True, **long}
    del body["t_max_predict_ms"]
    with coder.http() as http:
        with http.stream("POST", "/infill", json=body) as reply:
            next(line for line in reply.iter_lines() if line.startswith("data: "))
        for _ in range(200):
            if metrics(coder)['octavo_sequences{model="tiny",state="running"}'] == 0:
                break
            threading.Event().wait(0.05)
        said = http.post("/infill", json=vscode(text, "", "rs", [])).json()
        assert said["timings"]["prompt_n"] <= 2
        assert coder.logged(reply.headers["x-request-id"])["gone"]


def test_text_behind_an_edit_is_taken_over_where_that_is_asked_for(coder: Served) -> None:
    options = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    text = FILE[:1400]
    changed = text[:500] + "# an edit\n" + text[520:]
    messages = [[{"role": "user", "content": said}] for said in (text, changed)]
    about = {"octavo": {"reuse": "approximate"}}
    with coder.http() as http:
        http.post("/v1/completions", json={**options, "prompt": text}).raise_for_status()
        said = http.post("/v1/completions", json={**options, "prompt": changed, **about}).json()["octavo"][0]
        assert said["approximate_tokens"] > 400
        assert not said["exact"]
        http.post("/v1/chat/completions", json={**options, "messages": messages[0]}).raise_for_status()
        said = http.post("/v1/chat/completions", json={**options, "messages": messages[1], **about}).json()[
            "octavo"
        ]
        assert said["approximate_tokens"] > 400
        exact = {"octavo": {"why": True}}
        said = http.post("/v1/chat/completions", json={**options, "messages": messages[1], **exact}).json()[
            "octavo"
        ]
        assert (said["approximate_tokens"], said["exact"]) == (0, True)
