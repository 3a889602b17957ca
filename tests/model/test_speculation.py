"""Drafts change no bit of an answer: the same tokens, log-probabilities and cache as without, whatever was drafted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import answers_at_once, tiny_loaded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine import speculation
from octavo.engine.engine import TokenEngine
from octavo.engine.speculation import Costs, Drafter
from octavo.kv.manager import KVCacheManager

FORMATS = ["fp32", "bf16", "int8", "k8v4", "int4"]
PROMPT = [random.Random(1).randrange(5, 260) for _ in range(61)]
VARIED = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.2, "seed": 4, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    {"frequency_penalty": 1.5},
    {"grammar": 'start: /[a-f]+( [0-9]{2,3})*/', "temperature": 0.5, "seed": 5},
]  # fmt: skip


def engine(family: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> TokenEngine:
    return TokenEngine(tiny_loaded(family, dtype), kv_memory="64MiB", debug_fill=True, **settings)


def all_of_it(self: Costs, num_sequences: int, probability: float, limit: int) -> int:
    return limit


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Drafts always, and as much as there is room for. With `answers`, the first tokens of a draft are right.

    Their number is random, and what comes behind is too.
    """
    oracle: dict[str, Any] = {"answers": [], "random": random.Random(0), "drafted": 0}

    def predicted(self: Drafter, limit: int, stops: Any = ()) -> list[int]:
        text = self._text.ids[: self._text.num_tokens].tolist()
        right = next((ids[len(text) :] for ids in oracle["answers"] if ids[: len(text)] == text), [])
        dice = oracle["random"]
        wrong = [dice.randrange(5, 260) for _ in range(dice.randrange(4))]
        found = [*right[: dice.randrange(12)], *wrong][: max(0, limit)]
        found = found[: next((i for i, id_ in enumerate(found) if id_ in stops), len(found))]
        oracle["drafted"] += len(found)
        return found

    monkeypatch.setattr(Drafter, "predicted", predicted)
    monkeypatch.setattr(Costs, "best", all_of_it)
    return oracle


@pytest.fixture(autouse=True)
def nothing_is_sealed_by_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is rolled back behind a step had not made a block full."""
    truncate = KVCacheManager.truncate

    def checked(self: KVCacheManager, table: Any, num_tokens: int) -> int:
        assert table.num_tokens // 32 == num_tokens // 32
        assert len(table.block_ids) == num_tokens // 32
        return truncate(self, table, num_tokens)

    monkeypatch.setattr(KVCacheManager, "truncate", checked)


def told(reply: Any) -> Any:
    return [
        (choice.token_ids, choice.text, choice.finish_reason, choice.stop, choice.logprobs)
        for choice in reply.choices
    ]


@pytest.mark.parametrize(
    ("family", "dtype", "kv_format"),
    [
        *(("llama", torch.float32, kv_format) for kv_format in FORMATS),
        *(("llama", torch.bfloat16, kv_format) for kv_format in FORMATS[1:]),
        ("gemma2", torch.float32, "int8"),
        ("gpt_oss", torch.float32, "int8"),
        ("mixtral", torch.bfloat16, "int8"),
        ("gpt2", torch.float32, "int4"),
    ],
)
def test_drafts_change_no_bit(
    always: dict[str, Any], family: str, dtype: torch.dtype, kv_format: str
) -> None:
    options = {"max_tokens": 90, "logprobs": 3, "ignore_eos": True}
    with engine(family, dtype, kv_format=kv_format, speculate="off") as plain:
        expected = [plain.generate(PROMPT, **options, **varied) for varied in VARIED]
        whole = [*PROMPT, *expected[0].token_ids, 5, 6]
        after = plain.generate(whole, max_tokens=8, logprobs=3, cache_namespace="new")
    always["answers"] = [[*PROMPT, *reply.token_ids] for reply in expected]
    with engine(family, dtype, kv_format=kv_format) as drafting:
        for varied, reply in zip(VARIED, expected, strict=True):
            said = drafting.generate(PROMPT, **options, **varied)
            assert told(said) == told(reply)
            assert said.usage.drafted_tokens >= said.usage.accepted_tokens > 0
            drafting.check_integrity()
        # what was sealed and kept beside drafts is what a computation without them makes
        again = drafting.generate(whole, max_tokens=8, logprobs=3)
        assert again.usage.cached_tokens >= len(whole) - 32
        assert told(again) == told(after)


def test_answers_in_one_batch_draft_beside_each_other(always: dict[str, Any]) -> None:
    prompts = [[*PROMPT, 5 + number] for number in range(5)]
    options = {"max_tokens": 70, "logprobs": 2}
    with engine(speculate="off") as plain:
        expected = [plain.generate(prompt, ignore_eos=True, **options) for prompt in prompts]
    always["answers"] = [[*prompt, *reply.token_ids] for prompt, reply in zip(prompts, expected, strict=True)]
    with engine() as drafting:
        for said, reply in zip(answers_at_once(drafting, prompts, **options), expected, strict=True):
            assert told(said) == told(reply)
        several = drafting.generate(prompts[0], n=3, temperature=0.8, seed=1, ignore_eos=True, **options)
        drafting.check_integrity()
    with engine(speculate="off") as plain:
        assert told(several) == told(
            plain.generate(prompts[0], n=3, temperature=0.8, seed=1, ignore_eos=True, **options)
        )
    assert always["drafted"] > 100


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    max_tokens=st.integers(1, 70), begin=st.integers(1, 60), width=st.integers(1, 3), seed=st.integers(0, 99)
)
def test_an_answer_ends_where_it_does_without_drafts(
    engines: tuple[TokenEngine, TokenEngine],
    always: dict[str, Any],
    max_tokens: int,
    begin: int,
    width: int,
    seed: int,
) -> None:
    """By its number of tokens, by a stop string in the middle of what was accepted, and by a stop token."""
    plain, drafting = engines
    free = plain.generate(PROMPT, max_tokens=80, ignore_eos=True)
    always["answers"] = [[*PROMPT, *free.token_ids]]
    always["random"].seed(seed)
    for end in (
        {"stop": free.text[begin : begin + width] or "x"},
        {"stop_token_ids": (free.token_ids[begin],)},
    ):
        options = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0, **end}
        said, reply = drafting.generate(PROMPT, **options), plain.generate(PROMPT, **options)
        assert told(said) == told(reply)
        assert said.usage.completion_tokens == reply.usage.completion_tokens
        drafting.check_integrity()


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[TokenEngine, TokenEngine]]:
    with engine(speculate="off") as plain, engine() as drafting:
        yield plain, drafting


def test_text_that_comes_again_is_drafted_of_a_tenant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "best", all_of_it)
    monkeypatch.setattr(speculation, "_MAX_MATCH", 8)
    with engine() as drafting:
        first = drafting.generate(
            PROMPT, max_tokens=60, temperature=2.0, seed=9, ignore_eos=True, cache_namespace="ada"
        )
        again = drafting.generate(
            PROMPT, max_tokens=60, temperature=2.0, seed=9, ignore_eos=True, cache_namespace="ada"
        )
        other = drafting.generate(
            PROMPT, max_tokens=60, temperature=2.0, seed=9, ignore_eos=True, cache_namespace="bob"
        )
        assert first.token_ids == again.token_ids == other.token_ids
        assert again.usage.accepted_tokens >= 45
        assert other.usage.accepted_tokens == first.usage.accepted_tokens < 20
        drafting.forget("ada")
        forgotten = drafting.generate(
            PROMPT, max_tokens=60, temperature=2.0, seed=9, ignore_eos=True, cache_namespace="ada"
        )
        assert forgotten.usage.accepted_tokens == first.usage.accepted_tokens
        assert forgotten.conversation is not None
        drafting.drop_conversation(forgotten.conversation, cache_namespace="ada")
        dropped = drafting.generate(
            PROMPT, max_tokens=60, temperature=2.0, seed=9, ignore_eos=True, cache_namespace="ada"
        )
        assert dropped.usage.accepted_tokens == first.usage.accepted_tokens
        uncached = drafting.generate(PROMPT, max_tokens=20, ignore_eos=True, cache=False)
        assert uncached.usage.drafted_tokens == 0
    with engine(speculate="off") as plain:
        assert plain.generate(PROMPT * 2, max_tokens=60, ignore_eos=True).usage.drafted_tokens == 0
