"""Reuse behind an edit: close to exact, told as what it is, and kept from everybody else."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from core_driver import CoreDriver
from families import FUSED, tiny_loaded
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.edits import common_spans
from octavo.engine.engine import TokenEngine
from octavo.engine.verify_edits import SHARES, verify_edits
from octavo.errors import InvalidRequest
from octavo.spec import BLOCK_SIZE

TURNABLE = [family for family in FUSED if family != "gemma3_text"]  # whose layers turn in two ways
TEXT = [random.Random(2).randrange(5, 260) for _ in range(420)]


def engine(family: str = "llama", *, changes: dict[str, Any] | None = None, **settings: Any) -> TokenEngine:
    options = {"kv_memory": "64MiB", "debug_fill": True, "dtype": "fp32", **settings}
    return TokenEngine(tiny_loaded(family, **(changes or {})), **options)


def edited(at: int, removed: int, inserted: int) -> list[int]:
    return [*TEXT[:at], *[7 + index % 200 for index in range(inserted)], *TEXT[at + removed :]]


def logprobs(reply: Any) -> dict[int, float]:
    return dict(reply.choices[0].logprobs[0].top)


@pytest.mark.parametrize("family", TURNABLE)
@pytest.mark.parametrize(("removed", "inserted"), [(3, 11), (40, 3), (5, 5), (0, 64)])
def test_with_one_layer_keys_that_are_turned_are_those_computed_there(
    family: str, removed: int, inserted: int
) -> None:
    """Keys and values of the first layer depend on token and position alone, so all that counts is the turning."""
    changes = {"num_hidden_layers": 1}
    if family == "gemma2":
        changes["layer_types"] = ["full_attention"]  # type: ignore[assignment]
    with engine(family, changes=changes, kv_format="fp32", max_step_tokens=100) as llm:
        llm.generate(TEXT, max_tokens=1)
        prompt = edited(70, removed, inserted)
        options = {"max_tokens": 1, "logprobs": 20, "ignore_eos": True}
        said = llm.generate(prompt, reuse="approximate", **options)
        exact = llm.generate(prompt, **options)
        assert said.usage.approximate_tokens >= 160
        assert said.usage.cached_tokens == 64
        mine, right = logprobs(said), logprobs(exact)
        assert mine == pytest.approx(right, abs=2e-3)


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "int8", "k8v4", "int4"])
def test_it_is_told_and_kept_from_everybody(
    kv_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    prompt = edited(100, 4, 9)
    options = {"max_tokens": 12, "logprobs": 3, "ignore_eos": True}
    with engine(kv_format=kv_format) as fresh:
        right = fresh.generate(prompt, **options)
    with engine(kv_format=kv_format, kv_disk="64MiB") as llm:
        llm.generate(TEXT, max_tokens=1)
        assert llm.flush()
        before = llm.memory()
        said = llm.generate(prompt, reuse="approximate", **options)
        usage = said.usage
        assert usage.approximate_tokens >= 192
        assert usage.cached_tokens + usage.computed_tokens + usage.approximate_tokens == len(prompt)
        assert not said.exact
        assert "approximate" in " ".join(said.notes)
        assert llm.flush()
        after = llm.memory()
        assert (after.kv_used_bytes, after.kv_reusable_bytes) == (0, before.kv_reusable_bytes)
        assert after.disk.used_bytes == before.disk.used_bytes
        llm.check_integrity()
        exact = llm.generate(prompt, **options)
        assert exact.exact
        assert exact.usage.approximate_tokens == 0
        assert exact.usage.cached_tokens == 96
        assert exact.choices == right.choices
        other = llm.generate(prompt, reuse="approximate", cache_namespace="bob", **options)
        assert other.usage.approximate_tokens == other.usage.cached_tokens == 0
        assert other.exact


def test_the_earlier_text_is_held_until_it_is_taken_over_and_no_longer() -> None:
    with engine(kv_memory="2MiB", max_step_tokens=32) as llm:
        llm.generate(TEXT, max_tokens=1)
        stream = llm.stream(edited(100, 4, 9), reuse="approximate", max_tokens=400, ignore_eos=True)
        next(stream)
        llm.check_integrity()
        stream.close()
        done = threading.Event()
        for _ in range(100):
            if llm.memory().kv_used_bytes == 0:
                done.set()
                break
        assert done.is_set()
        llm.check_integrity()


def test_the_earlier_text_makes_room_for_the_answer() -> None:
    driver = CoreDriver(480 << 10, max_step_tokens=64)
    old = TEXT[: 10 * BLOCK_SIZE]
    driver.add("old", old, max_tokens=1)
    driver.run()
    driver.add("new", [*old[:100], 7, 8, 9, *old[104:]], reuse="approximate")
    while not driver.tokens["new"][0]:
        driver.step()
    table = driver.scheduler.running[0].table
    assert driver.manager.num_used_blocks == len(table.block_ids), "all is taken over"
    driver.run()
    assert driver.replies["new"].usage.approximate_tokens
    assert driver.is_clean()


@pytest.mark.parametrize("others", [0, 1, 2])
def test_without_room_for_both_texts_it_is_computed(others: int) -> None:
    driver = CoreDriver(480 << 10)
    num_tokens = driver.core._cache.plan.num_blocks * 5 // 8 * BLOCK_SIZE
    old = [7 * index * index % 251 + 5 for index in range(num_tokens)]
    driver.add("old", old, max_tokens=1)
    driver.run()
    new = [*old[:100], 7, 8, 9, *old[104:]]
    driver.add("new", new, reuse="approximate", max_tokens=9)
    for number in range(others):
        driver.add(f"other {number}", [*new[: -number - 9], 5], reuse="approximate", max_tokens=9)
    driver.run()
    assert {len(tokens[0]) for name, tokens in driver.tokens.items() if name != "old"} == {9}
    assert driver.is_clean()


def test_what_cannot_be_is_refused() -> None:
    for family in ("gpt2", "gemma3_text"):
        with engine(family) as llm, pytest.raises(InvalidRequest, match="cannot be moved"):
            llm.generate(TEXT[:40], reuse="approximate")
    with engine() as llm:
        with pytest.raises(InvalidRequest, match="exact or approximate"):
            llm.generate(TEXT[:40], reuse="about")
        with pytest.raises(InvalidRequest, match="keeps nothing"):
            llm.generate(TEXT[:40], reuse="approximate", pin="a")


@given(st.lists(st.integers(0, 2), max_size=80), st.lists(st.integers(0, 2), max_size=80))
def test_spans_are_alike_and_in_order(old: list[int], new: list[int]) -> None:
    end = 0
    for at, place, length in common_spans(old, new):
        assert at >= end
        assert length >= 16
        assert new[at : at + length] == old[place : place + length]
        end = at + length


@given(st.integers(0, 300), st.integers(0, 20), st.integers(0, 20))
def test_all_behind_an_edit_is_found(at: int, removed: int, inserted: int) -> None:
    old = list(range(400))
    new = [*old[:at], *range(1000, 1000 + inserted), *old[at + removed :]]
    covered = {index for start, _, length in common_spans(old, new) for index in range(start, start + length)}
    assert covered >= set(range(at + inserted, len(new)))


def test_in_a_text_that_repeats_itself_a_stretch_goes_on_where_it_was() -> None:
    lines = [
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 100 + number] for number in range(60)
    ]
    old = [id_ for line in lines for id_ in line]
    new = [*old[:200], 900, 901, *old[215:]]
    spans = common_spans(old, new)
    assert max(length for _, _, length in spans) > 800
    assert all(place == at or place == at + 13 for at, place, length in spans if length > 40)


def test_verify_compares_both_ways() -> None:
    loaded = tiny_loaded("llama", max_position_embeddings=1024)
    loaded.context_length = 1024
    chance = random.Random(3)
    text = "".join(chance.choice("abcdefgh ") for _ in range(1100))
    scores = verify_edits(loaded, text, num_tokens=900, recomputes=(32, 200), kv_format="fp32")
    assert [(score.share, score.recompute) for score in scores] == [
        (share, way) for share in SHARES for way in (None, 32, 200)
    ]
    for exact, little, much in zip(*[iter(scores)] * 3, strict=True):
        assert exact.mean_kld == 0
        assert exact.same_top == 1
        assert exact.computed_tokens >= much.computed_tokens >= little.computed_tokens
        assert little.mean_kld >= 0
    assert scores[1].computed_tokens < scores[0].computed_tokens / 4
    other = tiny_loaded("llama", max_position_embeddings=1024)
    with pytest.raises(InvalidRequest, match="too short to be edited"):
        verify_edits(other, text)
    other.context_length = 1024
    with pytest.raises(InvalidRequest, match="longer text"):
        verify_edits(other, "short")
