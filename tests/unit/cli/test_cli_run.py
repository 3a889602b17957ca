"""`octavo run`: what goes where, and what comes back."""

from __future__ import annotations

import gc
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import load
from octavo.engine.messages import Why
from octavo.errors import InvalidModelFile, NumericalError
from octavo.models.loaded import Source

USAGE = {
    "approximate_tokens",
    "accepted_tokens",
    "drafted_tokens",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "completion_tokens",
    "loaded_tokens",
}
TIMINGS = {"queue_s", "prefill_s", "ttft_s", "total_s", "decode_tokens_per_s"}
MEMORY = {
    "weights",
    "weights_bytes",
    "kv_used_bytes",
    "kv_reusable_bytes",
    "kv_allocated_bytes",
    "kv_budget_bytes",
    "kv_bytes_per_token",
    "workspace_bytes",
    "kv_format",
    "disk",
}
REPLY = {
    "text",
    "token_ids",
    "finish_reason",
    "usage",
    "why",
    "timings",
    "memory",
    "seed",
    "notes",
    "exact",
}


def test_answer_on_stdout_and_the_rest_on_stderr(program: Any) -> None:
    program.engine.answers = ["Paris."]
    result = program("run", "toy", "Capital?")
    assert (result.code, result.out) == (0, "Paris.\n")
    assert result.err == (
        "6 tokens · 12 of 13 prompt tokens reused · first token 41 ms · 58 tok/s · weights 257 MiB (Q4_1) · "
        "KV cache 12 MiB (int8, 46,080 B a token)\n"
    )
    assert program.engine.prompts == ["u:Capital?\x04a:"]
    assert program.engine.is_closed


def test_notices_of_loading_are_told_unless_quiet(program: Any) -> None:
    program.engine.answers = ["a", "a"]
    program.engine.notices = ("Some weights are unpacked.",)
    assert program("run", "toy", "x").err.startswith("Some weights are unpacked.\n")
    assert program("run", "toy", "x", "--quiet").err == ""


def test_an_answer_that_ends_its_line_gets_no_second_line_break(program: Any) -> None:
    program.engine.answers = ["a\nb\n"]
    assert program("run", "toy", "x").out == "a\nb\n"


def test_quiet_leaves_the_answer_and_the_notes(program: Any) -> None:
    program.engine.answers = ["Paris."]
    program.engine.notes = ("Dropped the oldest turn.",)
    program.engine.why = Why("evicted", 3, 4, "4 tokens have left memory.")
    result = program("run", "toy", "x", "--quiet")
    assert (result.out, result.err) == ("Paris.\n", "Dropped the oldest turn.\n")


def test_notes_why_and_the_cut_are_sentences(program: Any) -> None:
    program.engine.answers = ["abcdef"]
    program.engine.notes = ("A note.",)
    program.engine.why = Why("evicted", 3, 4, "4 tokens have left memory.")
    result = program("run", "toy", "x", "--max-tokens", "3")
    assert result.out == "abc\n"
    lines = result.err.splitlines()
    assert lines[:3] == [
        "A note.",
        "The answer was cut after 3 tokens (--max-tokens).",
        "4 tokens have left memory.",
    ]
    assert len(lines) == 4


def test_nothing_is_said_about_a_first_prompt_that_was_new(program: Any) -> None:
    program.engine.answers = ["a"]
    program.engine.why = Why("new", 0, 0, "Nothing like it was known.")
    assert "Nothing" not in program("run", "toy", "x").err


def test_json_is_one_line_with_exactly_these_fields(program: Any) -> None:
    program.engine.answers = ["Grüße\n2"]
    program.engine.notes = ("A note.",)
    program.engine.why = Why("evicted", 3, 4, "Left memory.")
    result = program("run", "toy", "x", "--json")
    assert result.code == 0
    assert result.err == ""
    assert result.out.count("\n") == 1
    assert "Grüße" in result.out
    reply = json.loads(result.out)
    assert set(reply) == REPLY
    assert reply["text"] == "Grüße\n2"
    assert reply["token_ids"] == [ord(character) for character in "Grüße\n2"]
    assert reply["finish_reason"] == "stop"
    assert set(reply["usage"]) == USAGE
    assert set(reply["timings"]) == TIMINGS
    assert set(reply["memory"]) == MEMORY
    assert reply["memory"]["weights_bytes"] == 257 << 20
    assert reply["why"] == {
        "cause": "evicted",
        "position": 3,
        "num_recomputed_tokens": 4,
        "message": "Left memory.",
        "cost_s": 0.0,
        "difference": None,
        "advice": None,
    }
    assert (reply["seed"], reply["notes"], reply["exact"]) == (7, ["A note."], True)


def test_logprobs_in_json_and_as_lines(program: Any) -> None:
    program.engine.answers = ["ab", "ab"]
    reply = json.loads(program("run", "toy", "x", "--json", "--logprobs", "2").out)
    assert set(reply) == REPLY | {"logprobs"}
    first = reply["logprobs"][0]
    assert (first["token_id"], first["text"], first["logprob"]) == (97, "a", -0.5)
    assert first["top"][1] == {"token_id": 122, "text": "z", "logprob": None}
    result = program("run", "toy", "x", "--logprobs", "2")
    assert result.out == "ab\n"
    assert "'a'                -0.500  'a' -0.500  'z' -inf" in result.err.splitlines()


def test_seed_is_shown_when_there_is_noise(program: Any) -> None:
    program.engine.answers = ["a", "a"]
    assert "seed 7" in program("run", "toy", "x", "--temperature", "0.7").err
    assert "seed" not in program("run", "toy", "x").err


def test_no_cache_says_what_was_computed(program: Any) -> None:
    program.engine.answers = ["abc"]
    program.engine.why = Why("no_cache", 0, 0, "The cache is switched off.")
    result = program("run", "toy", "x", "--no-cache")
    assert program.engine.settings["cache"] is False
    assert "no cache, 1 computed for 6 of the prompt" in result.err
    assert "reused" not in result.err


def test_prompt_from_stdin(program: Any) -> None:
    program.engine.answers = ["a", "a", "a"]
    program.stdin = "line 1\nline 2\n\n"
    program("run", "toy", "-", "--raw")
    program("run", "toy", "--raw")
    program.stdin = "x\r\n"
    program("run", "toy", "--raw")
    assert program.engine.prompts == ["line 1\nline 2\n", "line 1\nline 2\n", "x"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (["run", "toy"], None, "There is no prompt."),
        (["run", "toy", ""], None, "The prompt is empty."),
        (["run", "toy"], "\n", "The prompt is empty."),
        (["run", "toy", "\udcff"], None, "Character 1 of the text is not valid Unicode."),
        (["run", "toy", "x", "--raw", "--system", "s"], None, "--raw sends the prompt as it is"),
        (["run", "toy", "x", "--temperature", "-1"], None, "temperature is -1.0; it must be 0 or more."),
        (["run", "toy", "x", "--stop", ""], None, "A stop string is empty"),
        (["run", "toy", "x", "--context", "0"], None, "context is 0; it must be at least 1."),
        (["run", "toy", "x", "--kv-disk", "-1"], None, "'-1' is not a size."),
        (["run", "toy", "x", "--kv-memory", "lots"], None, "'lots' is not a size."),
        (["run", "toy", "x" * 2000], None, "The prompt has 2,005 tokens and the context window holds 2,000"),
        (["run", "toy", "x", "--dtype", "int8"], None, "Invalid value for '--dtype'"),
        (["run", "toy", "x", "--weights", "int3"], None, "Invalid value for '--weights'"),
        (
            ["run", "toy", "x", "--weights", "bf16", "--dtype", "fp32"],
            None,
            "weights is bf16 and dtype is fp32",
        ),
        (
            ["run", "toy", "x", "--weights", "int4", "--device", "meta"],
            None,
            "weights is int4 and device is meta",
        ),
        (["run", "toy", "x", "--kv-format", "auto"], None, "Invalid value for '--kv-format'"),
        (["run", "toy", "x", "--nonsense"], None, "No such option: --nonsense"),
        (["run"], None, "Missing argument 'MODEL'. Run `octavo run --help`"),
        (["rum"], None, "No such command 'rum'."),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    program: Any, arguments: list[str], stdin: str | None, sentence: str
) -> None:
    program.stdin = stdin
    result = program(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert sentence in result.err
    assert "Traceback" not in result.err
    assert result.err.count("\n") == 1
    assert program.engine.prompts == []


def test_options_reach_the_engine(program: Any) -> None:
    program.engine.answers = ["a"]
    program("run", "toy", "x",
            "--dtype", "fp32", "--weights", "fp32", "--kv-memory", "2MiB", "--kv-disk", "3MiB", "--kv-format", "raw",
            "--context", "99",
            "--device", "meta", "--speculate", "off", "--threads", "3", "--max-tokens", "5", "--temperature", "0.5", "--top-k", "4",
            "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty", "0.2",
            "--frequency-penalty", "0.3", "--seed", "11", "--stop", "END", "--stop", "\n", "--logprobs", "0",
            "--system", "Be brief.")  # fmt: skip
    assert program.engine.settings == {
        "kv_memory": 2 << 20,
        "kv_disk": 3 << 20,
        "dtype": "fp32",
        "weights": "fp32",
        "kv_format": "raw",
        "context": 99,
        "cache": True,
        "speculate": "off",
        "device": "meta",
        "threads": 3,
    }
    params = program.engine.params[0]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (5, 0.5, 4, 0.9)
    assert (params.min_p, params.repetition_penalty, params.presence_penalty) == (0.1, 1.1, 0.2)
    assert (params.frequency_penalty, params.seed, params.logprobs) == (0.3, 11, 0)
    assert params.stop == ("END", "\n")
    assert program.engine.prompts == ["s:Be brief.\x04u:x\x04a:"]


def test_answers_can_be_repeated_by_default(program: Any) -> None:
    program.engine.answers = ["a"]
    program("run", "toy", "x")
    assert program.engine.params[0].temperature == 0
    assert program.engine.params[0].max_tokens is None
    assert program.engine.settings["kv_format"] == "int8"


def test_without_a_template_the_prompt_goes_as_it_is(program: Any) -> None:
    program.engine.answers = ["a"]
    program.engine.tokenizer.chat_template = None
    assert program("run", "toy", "Once upon").code == 0
    result = program("run", "toy", "x", "--system", "s")
    assert (result.code, program.engine.prompts) == (2, ["Once upon"])
    assert "toy has no chat template" in result.err


def test_ctrl_c_prints_what_there_is(program: Any) -> None:
    def interrupt(number: int) -> None:
        if number == 3:
            signal.raise_signal(signal.SIGINT)

    program.engine.answers = ["abcdef", "abcdef"]
    program.engine.before_token = interrupt
    result = program("run", "toy", "x")
    assert (result.code, result.out) == (130, "abc\n")
    assert "Stopped after 3 tokens." in result.err
    assert "prompt tokens reused" in result.err
    result = program("run", "toy", "x", "--json")
    assert result.code == 130
    assert json.loads(result.out)["finish_reason"] == "abort"


def test_ctrl_c_before_the_first_token_and_a_second_one_interrupt_at_once(program: Any) -> None:
    def interrupt(number: int) -> None:
        if number >= first:
            signal.raise_signal(signal.SIGINT)

    program.engine.answers = ["abcdef", "abcdef"]
    program.engine.before_token = interrupt
    program.engine.follows_aborts = False
    first = 0
    result = program("run", "toy", "x")
    assert (result.code, result.out, result.err) == (130, "", "")
    first = 2
    result = program("run", "toy", "x")
    assert (result.code, result.out, result.err) == (130, "abc\n", "")
    assert program.engine.is_closed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("source", "is_pulled"),
    [
        (Source("bundled", "toy", None), True),
        (Source("hub", "a/b", None), True),
        (Source("gguf", "toy", Path("toy.gguf")), True),
        (Source("hub", "a/b", Path("cache")), False),
        (Source("folder", "toy", Path("toy")), False),
    ],
)
def test_a_broken_file_is_told_before_the_engine_is_made(
    program: Any, monkeypatch: pytest.MonkeyPatch, source: Source, is_pulled: bool
) -> None:
    def pull(asked: Source, progress: Any) -> Source:
        assert asked is source
        raise InvalidModelFile("It is cut short.")

    monkeypatch.setattr(load.catalog, "resolve", lambda _: source)
    monkeypatch.setattr(load.catalog, "pull", pull)
    program.engine.answers = ["a"]
    result = program("run", "toy", "x")
    assert result.code == (2 if is_pulled else 0)
    assert bool(program.engine.prompts) is not is_pulled


def test_no_garbage_is_looked_for_while_the_libraries_are_loaded(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled: list[bool] = []
    make_engine = load.make_engine

    def observed(*arguments: Any, **settings: Any) -> Any:
        enabled.append(gc.isenabled())
        return make_engine(*arguments, **settings)

    monkeypatch.setattr(load, "make_engine", observed)
    program.engine.answers = ["a"]
    try:
        assert program("run", "toy", "x").code == 0
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert enabled == [False]
    assert gc.isenabled()


def test_failures_of_the_engine_exit_with_1(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program.engine.answers = [
        NumericalError("The model produced NaN."),
        RuntimeError("bad\nthing"),
        RuntimeError("x"),
    ]
    result = program("run", "toy", "x")
    assert (result.code, result.out, result.err) == (1, "part\n", "The model produced NaN.\n")
    result = program("run", "toy", "x")
    assert result.code == 1
    assert result.err == (
        "Octavo failed unexpectedly: RuntimeError: bad thing. Run it with OCTAVO_DEBUG=1 for the traceback.\n"
    )
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    result = program("run", "toy", "x")
    assert result.code == 1
    assert "Traceback" in result.err


def test_a_terminal_is_not_obeyed_by_the_model(program: Any) -> None:
    program.engine.answers = ["a\x1b[2Jb\tc\r\n\x9bd", "a\x1b[2Jb"]
    program.is_terminal = True
    assert program("run", "toy", "x").out == "a[2Jb\tc\nd\n"
    program.is_terminal = False
    assert program("run", "toy", "x").out == "a\x1b[2Jb\n"


def test_bars_and_colours_are_for_terminals(program: Any, plain: Any) -> None:
    program.engine.answers = ["a"] * 3
    assert "\x1b" not in program("run", "toy", "x").err
    program.is_terminal = True
    result = program("run", "toy", "x")
    assert "\x1b[2m" in result.err
    assert "Reading the prompt" in plain(result.err)
    assert "\x1b" not in result.out
    assert program("run", "toy", "x", "--quiet").err == ""
