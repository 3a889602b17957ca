"""Every way in which a prompt can come into the cache. Each gives the bytes of computing it whole, alone, afresh.

A variant takes a driver whose cache is empty, and leaves it empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from cache_driver import CacheDriver

from octavo.engine.engine import computing_with
from octavo.models.packed import PackedEmbedding
from octavo.spec import BLOCK_SIZE

NAN = float("nan")


@dataclass(frozen=True)
class Prompt:
    """Token ids and the logits `[tokens, vocabulary]` that they have without a cache."""

    token_ids: list[int]
    logits: torch.Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    def check(self, start: int, logits: torch.Tensor) -> None:
        """Compares the logits of the tokens from `start` on, by bytes."""
        expected = self.logits[start : start + len(logits)]
        if not torch.equal(logits.view(torch.uint8), expected.view(torch.uint8)):
            wrong = (logits != expected).sum(dim=1)  # NaN is unequal
            first = int(wrong.nonzero()[0]) if wrong.any() else 0
            raise AssertionError(
                f"of a prompt of {len(self)} tokens, computed from token {start} on: token {start + first} has other "
                f"logits in {int(wrong[first])} of {logits.shape[1]} places, at most "
                f"{(logits[first] - expected[first]).abs().max():.3g} apart; {int(wrong.bool().sum())} tokens differ"
            )


def compute(driver: CacheDriver, token_ids: list[int]) -> Prompt:
    """What all variants are compared with: no cache, one step, no neighbours."""
    table = driver.start(token_ids, cache=False)
    (logits,) = driver.step_rows((table, token_ids))
    driver.manager.free(table)
    assert not logits.isnan().any()
    return Prompt(token_ids, logits)


def others(driver: CacheDriver, count: int) -> list[list[int]]:
    """Token ids that have nothing to do with a prompt; their lengths lie on both sides of blocks' ends."""
    vocabulary = int(driver.prepared.model.config.vocab_size)
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(5, vocabulary, (20 + 13 * i,), generator=generator).tolist() for i in range(count)]


@contextmanager
def emptied(driver: CacheDriver) -> Iterator[None]:
    """Nothing runs and nothing is reusable afterwards."""
    yield
    driver.manager.clear()
    driver.manager.check_integrity()
    assert not driver.manager.allocated_blocks()
    assert not driver.manager.allocated_slots()


def uncached(driver: CacheDriver, prompt: Prompt, lengths: Iterable[int]) -> None:
    """A prefix computed whole and without the cache, as each token is with `cache=False`."""
    with emptied(driver):
        for length in lengths:
            table = driver.start(prompt.token_ids, cache=False)
            prompt.check(length - 1, driver.step((table, prompt.token_ids[:length])))
            driver.manager.free(table)


def chunked(driver: CacheDriver, prompt: Prompt, chunk: int, first: int = 0) -> None:
    """Cold, in chunks of one size; the `first` tokens at once."""
    with emptied(driver):
        table = driver.start(prompt.token_ids)
        assert table.num_tokens == 0
        if first:
            driver.step((table, prompt.token_ids[:first]))
        for start in range(first, len(prompt), chunk):
            (rows,) = driver.step_rows((table, prompt.token_ids[start : start + chunk]))
            prompt.check(start, rows)
        driver.manager.free(table)


def warm(driver: CacheDriver, prompt: Prompt, lengths: Iterable[int]) -> None:
    """With a reused prefix of each length, ascending; behind one that ends with a block, more than a block."""
    with emptied(driver):
        for length in lengths:
            first = driver.start(prompt.token_ids[:length])
            driver.step((first, prompt.token_ids[first.num_tokens : length]))
            driver.manager.keep_tail(first)
            driver.manager.free(first)
            match = driver.manager.match_prefix(prompt.token_ids, namespace=first.namespace)
            assert match.num_tokens == length
            table = driver.manager.start(match, prompt.token_ids, publish=False)
            more = 2 if length % BLOCK_SIZE else BLOCK_SIZE + 2
            (rows,) = driver.step_rows((table, prompt.token_ids[length : length + more]))
            prompt.check(length, rows)
            driver.manager.free(table)


def boundaries(prompt: Prompt) -> list[int]:
    """Lengths of prefixes that end on a block's end and one token to either side, with a token left."""
    ends = range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)
    return sorted({n for end in ends for n in (end - 1, end, end + 1) if n < len(prompt)})


def batched(driver: CacheDriver, prompt: Prompt, size: int, chunk: int = 50) -> None:
    """In a batch of `size`: the others decode, token by token, while the prompt is computed."""
    with emptied(driver):
        table = driver.start(prompt.token_ids)
        neighbours = []
        for token_ids in others(driver, size - 1):
            neighbours.append(driver.start(token_ids))
            driver.step((neighbours[-1], token_ids))
        for start in range(0, len(prompt), chunk):
            part = prompt.token_ids[start : start + chunk]
            # The prompt's rows stand first, last and in between.
            parts = [(neighbour, [7 + start % 64]) for neighbour in neighbours]
            place = start // chunk % size
            logits = driver.step(*parts[:place], (table, part), *parts[place:])
            prompt.check(start + len(part) - 1, logits[place : place + 1])
        for each in (table, *neighbours):
            driver.manager.free(each)


def forked(driver: CacheDriver, prompt: Prompt, at: int) -> None:
    """Two branches from token `at`, one token by itself and all that is left, then the other way round."""
    with emptied(driver):
        table = driver.start(prompt.token_ids)
        if at:
            driver.step((table, prompt.token_ids[:at]))
        fork = driver.manager.fork(table)
        logits = driver.step((table, prompt.token_ids[at : at + 1]), (fork, prompt.token_ids[at:]))
        prompt.check(at, logits[:1])
        prompt.check(len(prompt) - 1, logits[1:])
        driver.manager.free(fork)
        if at + 1 < len(prompt):
            (rows,) = driver.step_rows((table, prompt.token_ids[at + 1 :]))
            prompt.check(at + 1, rows)
        driver.manager.free(table)


def truncated(driver: CacheDriver, prompt: Prompt, at: int) -> None:
    """Rolled back to token `at` after other tokens were there, and continued."""
    with emptied(driver):
        (wrong,) = others(driver, 1)
        table = driver.start(prompt.token_ids)
        if at:
            driver.step((table, prompt.token_ids[:at]))
            driver.manager.keep_tail(table)
        driver.step((table, wrong))
        left = driver.manager.truncate(table, at)
        assert left == at  # the tail gives the raw rows back
        (rows,) = driver.step_rows((table, prompt.token_ids[left:]))
        prompt.check(left, rows)
        middle = len(prompt) // 2  # without a tail: back to a block's start
        left = driver.manager.truncate(table, middle)
        assert middle // BLOCK_SIZE * BLOCK_SIZE <= left <= middle
        (rows,) = driver.step_rows((table, prompt.token_ids[left:]))
        prompt.check(left, rows)
        driver.manager.free(table)


def beside_aborted(driver: CacheDriver, prompt: Prompt, at: int) -> None:
    """A neighbour goes while its step is under way, another after its step; a third takes their pages."""
    with emptied(driver):
        first, second, third = others(driver, 3)
        table, one, two = (driver.start(ids) for ids in (prompt.token_ids, first, second))
        logits = driver.step((one, first), (table, prompt.token_ids[: at + 1]), (two, second))
        prompt.check(at, logits[1:2])
        driver.allocate((one, third))
        for neighbour in (one, two):
            driver.manager.free(neighbour)
        driver.manager.clear()
        three = driver.start(third)
        if at + 1 < len(prompt):
            logits = driver.step((three, third), (table, prompt.token_ids[at + 1 :]))
            prompt.check(len(prompt) - 1, logits[1:])
        for each in (table, three):
            driver.manager.free(each)


@contextmanager
def nan_embedding(driver: CacheDriver, token: int) -> Iterator[None]:
    """A token's embedding is NaN inside the block."""
    embedding = driver.prepared.model.get_input_embeddings()
    if isinstance(embedding, PackedEmbedding):
        rows = embedding.rows
        with mock.patch.object(
            embedding, "rows", lambda ids: rows(ids).masked_fill((ids == token)[:, None], NAN)
        ):
            yield
        return
    kept = embedding.weight[token].clone()
    embedding.weight[token] = NAN
    yield
    embedding.weight[token] = kept


def beside_nan(driver: CacheDriver, prompt: Prompt, chunk: int = 50) -> None:
    """Neighbours whose keys, values and logits are NaN; then the prompt takes the pages that they left."""
    token = 4
    with emptied(driver), nan_embedding(driver, token):
        table, early, late = (driver.start(ids) for ids in (prompt.token_ids, [token], [token]))
        for start in range(0, len(prompt), chunk):
            part = prompt.token_ids[start : start + chunk]
            logits = driver.step((early, [token] * 40), (table, part), (late, [token]))
            assert logits[0].isnan().all()
            assert logits[2].isnan().all()
            prompt.check(start + len(part) - 1, logits[1:2])
        for each in (table, early, late):
            driver.manager.free(each)
    with emptied(driver):
        table = driver.start(prompt.token_ids)
        (rows,) = driver.step_rows((table, prompt.token_ids))
        prompt.check(0, rows)
        driver.manager.free(table)


def chunks_with_threads(driver: CacheDriver, prompt: Prompt, number: int, chunk: int) -> None:
    with computing_with(number):
        chunked(driver, prompt, chunk)


def middle(prompt: Prompt, shift: int = 0) -> int:
    """A token inside the prompt that is no block's first where it can be helped."""
    return (len(prompt) * 5 // 8 + shift) % len(prompt)


def every_variant(prompt: Prompt) -> dict[str, Callable[[CacheDriver, Prompt], None]]:
    """All of them by name, but for chunks of one token, which take long, and prefixes computed by themselves."""
    length = len(prompt)
    return {
        **{f"chunks of {n}": lambda d, p, n=n: chunked(d, p, n) for n in (7, 32, 100)},
        "all at once": lambda d, p: chunked(d, p, length),
        "warm at blocks' ends": lambda d, p: warm(d, p, boundaries(p)),
        **{f"batch of {n}": lambda d, p, n=n: batched(d, p, n) for n in (1, 3, 8)},
        "forked": lambda d, p: forked(d, p, middle(p)),
        "truncated": lambda d, p: truncated(d, p, middle(p, 3)),
        "beside an aborted one": lambda d, p: beside_aborted(d, p, middle(p, 5)),
        "beside NaN": beside_nan,
        **{f"{n} threads": lambda d, p, n=n: chunks_with_threads(d, p, n, 100) for n in (1, 2, 3, 5)},
    }
