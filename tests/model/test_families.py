"""Every family: logits through our cache equal transformers' own uncached forward."""

from __future__ import annotations

import pytest
import torch
from cache_driver import CacheDriver
from families import FAMILIES, FUSED, VOCAB, tiny_loaded, tiny_model

from octavo.models.load import load_model

BOUND = 1e-4


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(5, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def plain(model, token_ids):
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def assert_close(ours, theirs):
    assert (ours - theirs).abs().max().item() <= BOUND


WAYS = [(family, way) for family in FAMILIES for way in ("native", "reference")]


@pytest.mark.parametrize(("family", "way"), [*((family, "fused") for family in FUSED), *WAYS])
def test_equals_transformers_uncached(family, way):
    theirs = tiny_model(family)
    driver = CacheDriver(tiny_loaded(family), kernels="auto" if way == "fused" else way, fuse=way == "fused")
    assert (driver.prepared.fused is not None) == (way == "fused")
    first, second = random_ids(150, 1), random_ids(75, 2)
    expected = plain(theirs, first + second)
    other = random_ids(40, 3)
    expected_other = plain(theirs, other)

    # Every chunk size, several turns
    for chunk in (1, 7, 32, 33, 225):
        driver.manager.clear()
        table = driver.start(first)
        assert table.num_tokens == 0
        logits = driver.feed(table, first + second, chunk)
        ends = [min(i + chunk, 225) - 1 for i in range(0, 225, chunk)]
        assert_close(logits, expected[ends])
        driver.manager.keep_tail(table)
        driver.manager.free(table)

    # The next turn is served from the cache
    third = random_ids(20, 4)
    expected_third = plain(theirs, first + second + third)
    table = driver.start(first + second + third)
    assert table.num_tokens == 225
    assert_close(driver.feed(table, third, 5), expected_third[[229, 234, 239, 244]])

    # Fork, and go on differently in one ragged batch with an unrelated sequence
    fork = driver.manager.fork(table)
    unrelated = driver.start(other)
    logits = driver.step((table, random_ids(9, 5)), (unrelated, other), (fork, random_ids(1, 6)))
    assert_close(logits[0], plain(theirs, first + second + third + random_ids(9, 5))[-1])
    assert_close(logits[1], expected_other[-1])
    assert_close(logits[2], plain(theirs, first + second + third + random_ids(1, 6))[-1])

    # Truncate into the open block, into a sealed one, and to nothing
    for length in (244, 100, 0):
        left = driver.manager.truncate(fork, length)
        assert left == (length if length in (244, 0) else 96)
        rest = random_ids(12, length)
        logits = driver.feed(fork, rest, 12)
        assert_close(logits[-1], plain(theirs, (first + second + third)[:left] + rest)[-1])


@pytest.mark.bundled
def test_the_bundled_model_equals_transformers_uncached():
    loaded = load_model("smollm2", dtype="fp32", weights="fp32")
    token_ids = loaded.tokenizer.encode(
        "The history of the book begins with clay tablets, then papyrus rolls. " * 8
    )
    expected = plain(loaded.model, token_ids)
    driver = CacheDriver(loaded, budget_bytes=256 << 20)
    logits = driver.feed(driver.start(token_ids), token_ids, 50)
    ends = [min(i + 50, len(token_ids)) - 1 for i in range(0, len(token_ids), 50)]
    assert_close(logits, expected[ends])
