"""Promise 1 by bytes, at length: hundreds of prompts through the bundled model, each in every way there is.

`make exact` runs it, in about half an hour on two cores; `make exact PROMPTS=20` takes the first 20 prompts only.
Every prompt is computed with the default format and the file's packed weights, and a share of them in each other
format, with dense weights and in float32.
"""

from __future__ import annotations

import os
import random
from functools import cache
from pydoc_data.topics import topics

import pytest
from cache_driver import CacheDriver
from variants import chunked, compute, every_variant, uncached

from octavo.models.load import load_model

NUM_PROMPTS = int(os.environ.get("OCTAVO_EXACT_PROMPTS", "200"))
PROMPTS_PER_TEST = 10
LONGEST = 700
MOST_SINGLE = 96  # tokens of a long prompt that are computed one by one: its last ones
# Compute dtype, weights, format, and the prompts they get: every `step`-th from `first` on.
SETTINGS = {
    ("bf16", "auto", "int8"): (0, 1),
    ("bf16", "auto", "bf16"): (0, 10),
    ("bf16", "auto", "k8v4"): (1, 10),
    ("bf16", "auto", "int4"): (2, 10),
    ("bf16", "auto", "fp32"): (3, 10),
    ("bf16", "bf16", "int8"): (5, 10),
    ("fp32", "auto", "int8"): (4, 25),
    ("fp32", "auto", "fp32"): (2, 25),
    ("fp32", "fp32", "int4"): (3, 25),
}
CASES = [
    (setting, indices[at : at + PROMPTS_PER_TEST])
    for setting, (first, step) in SETTINGS.items()
    for indices in [range(first, NUM_PROMPTS, step)]
    for at in range(0, len(indices), PROMPTS_PER_TEST)
]


@cache
def text_ids(tokenizer: object) -> list[int]:
    """A text that every Python carries."""
    return tokenizer.encode("\n\n".join(topics[key] for key in sorted(topics)))


def make_prompt(tokenizer: object, index: int) -> list[int]:
    """Text, every fourth time any token ids. Short lengths are as frequent as long ones on a logarithmic scale."""
    chance = random.Random(index)
    length = round(LONGEST ** chance.random())
    if index % 2:  # about a block's end
        length = min(LONGEST, max(1, (length + 31) // 32 * 32 + chance.choice((-1, 0, 1))))
    if index % 4 == 3:
        return [chance.randrange(20, len(tokenizer)) for _ in range(length)]
    ids = text_ids(tokenizer)
    start = chance.randrange(len(ids) - length)
    return ids[start : start + length]


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> tuple[CacheDriver, object]:
    """A driver for a compute dtype, weights and a format, and its tokenizer."""
    dtype, weights, kv_format = request.param
    loaded = load_model("smollm2", dtype=dtype, weights=weights)
    return CacheDriver(loaded, kv_format=kv_format, budget_bytes=256 << 20), loaded.tokenizer


@pytest.mark.parametrize(
    ("engine", "indices"),
    CASES,
    indirect=["engine"],
    ids=[f"{'-'.join(setting)}-{indices[0]}..{indices[-1]}" for setting, indices in CASES],
)
def test_every_way_gives_the_same_bytes(engine: tuple[CacheDriver, object], indices: range) -> None:
    driver, tokenizer = engine
    for index in indices:
        prompt = compute(driver, make_prompt(tokenizer, index))
        chance = random.Random(index)
        variants = {
            "prefixes by themselves": lambda d, p: uncached(d, p, {1, len(p), chance.randint(1, len(p))}),  # noqa: B023
            "chunks of 1": lambda d, p: chunked(d, p, 1, max(0, len(p) - MOST_SINGLE)),
            **every_variant(prompt),
        }
        for name, variant in variants.items():
            try:
                variant(driver, prompt)
            except AssertionError as error:
                error.add_note(f"prompt {index}, {name}")
                raise
