"""Promise 1 by bytes: a token's logits do not depend on how its prefix came into the cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cache_driver import CacheDriver
from families import FAMILIES, VOCAB, tiny_loaded

from octavo.models.load import load_model


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def uncached(driver: CacheDriver, token_ids: list[int], lengths: list[int]) -> dict[int, torch.Tensor]:
    """Logits of the last token of each prefix, each prefix computed whole and alone."""
    expected = {}
    for length in lengths:
        driver.manager.clear()
        table = driver.start(token_ids[:length])
        expected[length] = driver.step((table, token_ids[:length]))[0]
        driver.manager.free(table)
    driver.manager.clear()
    return expected


def assert_same_bytes(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert not logits.isnan().any()
    assert torch.equal(logits.view(torch.uint8), expected.view(torch.uint8))


def check_chunks(
    driver: CacheDriver, token_ids: list[int], chunks: tuple[int, ...], threads: tuple[int, ...]
) -> None:
    total = len(token_ids)
    ends = {chunk: [min(i + chunk, total) for i in range(0, total, chunk)] for chunk in chunks}
    lengths = sorted(
        {end for chunk in chunks if chunk > 2 for end in ends[chunk]} | {1, 2, 3, 31, 33, 63, 65, total}
    )
    expected = uncached(driver, token_ids, lengths)
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        for chunk in chunks:
            driver.manager.clear()
            table = driver.start(token_ids)
            for end, row in zip(ends[chunk], driver.feed(table, token_ids, chunk), strict=True):
                if end in expected:
                    assert_same_bytes(row, expected[end])
            driver.manager.free(table)


def check_warm(driver: CacheDriver, token_ids: list[int]) -> None:
    """Warm at every block boundary and one either side, with neighbours, forked, and truncated."""
    total = len(token_ids)
    lengths = sorted(
        {n for b in range(32, total, 32) for n in (b - 1, b, b + 1, b + 2)} & set(range(2, total + 1))
    )
    expected = uncached(driver, token_ids, [*lengths, total])
    for length in lengths:
        driver.manager.clear()
        first = driver.start(token_ids[: length - 1])
        driver.step((first, token_ids[: length - 1]))
        driver.manager.keep_tail(first)
        driver.manager.free(first)
        warm = driver.start(token_ids)
        assert warm.num_tokens == length - 1
        fork = driver.manager.fork(warm)
        logits = driver.step((warm, [token_ids[length - 1]]), (fork, token_ids[length - 1 :]))
        assert_same_bytes(logits[0], expected[length])
        assert_same_bytes(logits[1], expected[total])
        left = driver.manager.truncate(fork, length)
        assert length // 32 * 32 <= left <= length
        assert_same_bytes(driver.step((fork, token_ids[left:]))[0], expected[total])
        driver.manager.free(warm)
        driver.manager.free(fork)


def check_neighbours(driver: CacheDriver, token_ids: list[int]) -> None:
    total = len(token_ids)
    expected = uncached(driver, token_ids, [total])[total]
    vocab = int(driver.prepared.model.config.vocab_size)
    for num_others in (2, 7):
        tables = [driver.start(token_ids)]
        for i in range(num_others):
            other = torch.randint(
                5, vocab, (20 + 13 * i,), generator=torch.Generator().manual_seed(i)
            ).tolist()
            tables.append(driver.start(other))
            driver.step((tables[-1], other))
        for start in range(0, total, 50):
            parts = [
                (tables[0], token_ids[start : start + 50]),
                *((table, [7 + start]) for table in tables[1:]),
            ]
            logits = driver.step(*parts)
        assert_same_bytes(logits[0], expected)
        for table in tables:
            driver.manager.free(table)
        driver.manager.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, dtype: torch.dtype) -> None:
    driver = CacheDriver(tiny_loaded(family, dtype))
    token_ids = torch.randint(5, VOCAB, (101,), generator=torch.Generator().manual_seed(1)).tolist()
    check_chunks(driver, token_ids, (1, 7, 32, 101), (1, 2, 3))
    check_warm(driver, token_ids)
    check_neighbours(driver, token_ids)


@pytest.mark.bundled
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_smollm2(dtype: str) -> None:
    loaded = load_model("smollm2", dtype=dtype)
    text = "<|im_start|>user\nHow was paper made before machines, and who made it?<|im_end|>\n" * 5
    token_ids = loaded.tokenizer.encode(text)[:97]
    driver = CacheDriver(loaded, budget_bytes=512 << 20)
    check_chunks(driver, token_ids, (1, 2, 7, 32, 97), (1, 2, 3))
    check_neighbours(driver, token_ids)


def test_a_deliberate_violation_is_seen() -> None:
    """Attending to an earlier block raw where the rule says sealed must fail the comparison."""
    driver = CacheDriver(tiny_loaded("llama"))
    token_ids = torch.randint(5, VOCAB, (101,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = uncached(driver, token_ids, [101])[101]
    table = driver.start(token_ids)
    driver.step((table, token_ids[:64]))
    page = driver.runner.sealed.layers[0][driver.runner.sealed.offset(table.block_ids[1]) :]
    page[:4].view(torch.float32).mul_(1 + 2**-20)  # one key, by a few units in the last place
    logits = driver.step((table, token_ids[64:]))[0]
    with pytest.raises(AssertionError):
        assert_same_bytes(logits, expected)
