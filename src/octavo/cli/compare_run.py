"""The measurements of `octavo compare`: one text, generated with the cache and without."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.engine.engine import TokenEngine
from octavo.models.outline import Outline

PROMPT = "The history of the book begins with clay, and"
_CHECKED = 48
_TIMED = 24
"""Tokens after a length over which a token's time is taken."""
_REPEATS = 3

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Generated:
    """A text with the cache: all its token ids, `num_prompt` of them given.

    Attributes:
        token_s: seconds of one more token, by the text's length.
        total_s: of the whole text, from its prompt on.
        kv_bytes: that the cache holds from the system at the end.
    """

    format: str
    token_ids: tuple[int, ...]
    num_prompt: int
    token_s: dict[int, float]
    total_s: float
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Point:
    """Making the next token of a text of `length` tokens, with the cache and without.

    `computed` and `flops` are of this token, `total_` of all tokens up to it; `is_same` says that both made the same.
    """

    length: int
    with_s: float
    without_s: float
    is_same: bool
    computed: tuple[int, int]
    total_computed: tuple[int, int]
    flops: tuple[float, float]
    kv_bytes: dict[str, int]

    @property
    def saved_time(self) -> float:
        return 1 - self.with_s / self.without_s

    @property
    def saved_work(self) -> float:
        """The share of all computed tokens up to here."""
        return 1 - self.total_computed[0] / self.total_computed[1]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "saved_time": self.saved_time, "saved_work": self.saved_work}


def generate(llm: TokenEngine, prompt: str, lengths: Sequence[int], num_tokens: int, tell: Tell) -> Generated:
    """Makes a text of `num_tokens` tokens, in pieces, and at each of the lengths some more tokens that are timed."""
    ids = llm.encode(prompt)
    num_prompt = len(ids)
    llm.generate(ids[:-1], max_tokens=4, ignore_eos=True)  # warms everything up
    llm.clear()
    token_s, total_s = {}, 0.0
    for end in sorted({*(n for n in lengths if n > num_prompt), num_tokens}):
        reply = llm.generate(ids, max_tokens=end - len(ids), ignore_eos=True)
        total_s += reply.timings.total_s
        ids += reply.token_ids
        if end in lengths:
            speeds = [
                llm.generate(ids, max_tokens=_TIMED + 1, ignore_eos=True).timings.decode_tokens_per_s
                for _ in range(_REPEATS)
            ]
            token_s[end] = 1 / statistics.median(speeds)
            tell(f"{llm.config.kv_format}, with the cache: {end:,} of {num_tokens:,} tokens")
    memory = llm.memory()
    return Generated(
        llm.config.kv_format, tuple(ids), num_prompt, token_s, total_s, memory.kv_allocated_bytes
    )


def same_beginning(llm: TokenEngine, text: Generated) -> bool:
    """Whether the first tokens come out alike when each step computes the whole text again."""
    count = min(_CHECKED, len(text.token_ids) - text.num_prompt)
    reply = llm.generate(text.token_ids[: text.num_prompt], max_tokens=count, ignore_eos=True, cache=False)
    return reply.token_ids == text.token_ids[text.num_prompt : text.num_prompt + count]


def points(
    llm: TokenEngine,
    text: Generated,
    found: Outline,
    sizes: Callable[[int], dict[str, int]],
    tell: Tell,
) -> list[Point]:
    """Steps without the cache at the text's lengths, beside those with it; `sizes` gives the cache's bytes at one."""
    result = []
    for length, with_s in text.token_s.items():
        tell(f"without the cache: one token behind {length:,}")
        times, same = [], True
        for _ in range(_REPEATS):
            reply = llm.generate(text.token_ids[:length], max_tokens=1, ignore_eos=True, cache=False)
            times.append(reply.timings.ttft_s)
            same = same and reply.token_ids[0] == text.token_ids[length]
        num_made = length - text.num_prompt + 1
        result.append(
            Point(
                length,
                with_s,
                statistics.median(times),
                same,
                (1, length),
                (length, sum(range(length - num_made + 1, length + 1))),
                (found.step_flops(length - 1, 1), found.step_flops(0, length)),
                sizes(length),
            )
        )
    return result


def summed(pairs: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Seconds of all tokens up to each length, from those of single tokens at some lengths, straight between them."""
    total, result = 0.0, []
    last_x, last_y = 0, pairs[0][1]
    for x, y in pairs:
        total += (x - last_x) * (y + last_y) / 2
        result.append((x, total))
        last_x, last_y = x, y
    return result


def first_difference(one: Generated, other: Generated) -> int | None:
    """The position of the first token that differs; None if there is none."""
    pairs = zip(one.token_ids, other.token_ids, strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), None)
