"""Why a prompt was not reused whole, as a sentence for a person."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.engine.messages import Advice, Difference, Why
from octavo.kv.explain import Miss
from octavo.kv.prefix import common_prefix
from octavo.kv.storage.tier import Elsewhere
from octavo.spec import BLOCK_SIZE

_SHOWN = 12
"""Tokens of text shown on each side of a difference."""

_MIN_ALIKE = 2 * BLOCK_SIZE
"""Tokens that advice must save."""

_GRAM = 16
_MAX_LOOKED_AT = 4096

_SETTINGS = {
    "model": "another model",
    "weights": "weights held as {}",
    "dtype": "compute dtype {}",
    "format": "cache format {}",
    "path": "{} layers",
    "kernels": "{} kernels",
    "kernel_version": "kernels of version {}",
    "cpu": "another instruction set ({})",
    "device": "the device {}",
    "torch": "torch {}",
    "transformers": "transformers {}",
    "rope": "other rotary settings",
    "block_size": "blocks of {}",
}
"""What another namespace was computed with, by the field that differs."""

_SHORT = ("weights", "dtype", "format", "torch", "transformers")

Decode = Callable[[Sequence[int]], str]


def tell_why(
    miss: Miss | None,
    token_ids: Sequence[int],
    *,
    token_s: float,
    decode: Decode | None,
    elsewhere: Elsewhere | None = None,
) -> Why | None:
    """The reason in a reply, or None when all that could be known was reused.

    Args:
        token_ids: of the prompt.
        token_s: seconds in which a token of a prompt is computed.
        decode: makes text of the tokens around a difference; None shows none.
        elsewhere: where else the prompt's first block is kept.
    """
    if miss is None:
        return None
    if miss.cause == "new":
        if miss.position > 0:
            return None
        if elsewhere:
            return Why("other_settings", 0, 0, _told_settings(elsewhere), len(token_ids) * token_s)
    position, known = miss.position, miss.num_known_tokens
    tokens = f"{known:,} token{'s' if known != 1 else ''}"
    place = position + known
    lie = (
        f"; the {tokens} before it, from position {position:,}, lie in the block that changed"
        if known
        else ""
    )
    message = {
        "new": "Nothing that begins like this prompt was computed before.",
        "below_one_block": f"{tokens} from position {position:,} were computed before, but a block of {BLOCK_SIZE} "
        "is shared only when it is full, and the raw rows of its beginning have left memory.",
        "changed_token": f"The prompt differs from the most similar earlier one at position {place:,}{lie}.",
        "dropped_text": f"The prompt leaves out {miss.num_dropped_tokens:,} tokens that the most similar earlier one "
        f"has at position {place:,}, and then goes on alike, as when a chat template or a client drops the reasoning "
        f"of earlier turns{lie}.",
        "evicted": f"{tokens} from position {position:,} were computed before and have left memory for others.",
        "expired": f"{tokens} from position {position:,} were computed before and were kept for as long as was asked "
        "(ttl_s).",
        "cleared": f"{tokens} from position {position:,} were computed before the cache was cleared.",
    }[miss.cause]
    if miss.num_alike_tokens:
        message += (
            f" {miss.num_alike_tokens:,} tokens behind it are as before, and were computed again because they follow "
            "it."
        )
    differs = miss.cause in ("changed_token", "dropped_text")
    difference = None
    if differs and decode is not None:
        difference = Difference(
            place,
            decode(token_ids[max(0, place - _SHOWN) : place]),
            decode(miss.earlier[:_SHOWN]),
            decode(token_ids[place : place + _SHOWN]),
        )
    advice = _advise(miss.earlier, token_ids[place:], token_s) if miss.cause == "changed_token" else None
    cost_s = (known + miss.num_alike_tokens) * token_s
    return Why(miss.cause, position, known, message, cost_s, difference, advice)


def _advise(earlier: Sequence[int], rest: Sequence[int], token_s: float) -> Advice | None:
    """What laying the prompt out in another way would save, where text that changed stands before text that did not."""
    num_changed, num_alike = _resumed(earlier, rest)
    if num_alike < max(_MIN_ALIKE, num_changed):
        return None
    return Advice(
        num_alike,
        num_alike * token_s,
        f"The text that changed ({num_changed:,} token{'s' if num_changed != 1 else ''}) stands before "
        f"{num_alike:,} that did not. If it changes often, as a date, a counter or the open files do, put it behind "
        "them: they would be reused.",
    )


def _resumed(earlier: Sequence[int], rest: Sequence[int]) -> tuple[int, int]:
    """After how many tokens `rest` goes on as `earlier` does somewhere, and how far; of several places the longest."""
    starts = range(0, len(earlier) - _GRAM + 1, _GRAM)
    places = {tuple(earlier[at : at + _GRAM]): at for at in reversed(starts)}  # the first one of each
    best = (0, 0)
    at = num_found = 0
    while at + _GRAM <= min(len(rest), _MAX_LOOKED_AT):
        place = places.get(tuple(rest[at : at + _GRAM]))
        if place is not None:
            num_found += 1
            back = 0  # where it began before the place that was looked up
            while back < min(at, place) and earlier[place - back - 1] == rest[at - back - 1]:
                back += 1
            length = common_prefix(earlier[place:], rest[at:]) + back
            if length > best[1]:
                best = at - back, length
        at += 1
        if (
            num_found == _GRAM
        ):  # so many in a row: in a text that repeats itself, too, the right one was among them
            num_found, at = 0, max(at, sum(best))
    return best


def preempted(position: int, num_tokens: int, token_s: float) -> Why:
    """The reason where a request gave its place up, and not all that it had computed was still there afterwards."""
    tokens = f"{num_tokens:,} token{'s' if num_tokens != 1 else ''}"
    return Why(
        "preempted",
        position,
        num_tokens,
        f"The request gave its place up to others while memory was short, and {tokens} from position {position:,} on "
        "were computed once more. A larger cache (kv_memory, --kv-memory) avoids that.",
        num_tokens * token_s,
    )


def no_cache(cost_s: float) -> Why:
    """The reason where the cache is off."""
    return Why(
        "no_cache",
        0,
        0,
        "The cache is switched off: every token is computed at every step.",
        cost_s,
    )


def other_tenant(num_tokens: int, token_s: float) -> Why:
    """The reason, for the eyes of who runs the engine, where somebody else has computed the same."""
    return Why(
        "other_tenant",
        0,
        num_tokens,
        f"{num_tokens:,} tokens from position 0 were computed for another tenant; nothing is reused across tenants.",
        num_tokens * token_s,
    )


def _told_settings(elsewhere: Elsewhere) -> str:
    if "model" in elsewhere.fields:
        return (
            f"Another model ({elsewhere.model}) has computed this prompt; what one model computes is of no use to "
            "another."
        )
    parts = [
        _SETTINGS.get(name, f"{name} {{}}").format(theirs) + (f" (now {ours})" if name in _SHORT else "")
        for name, (theirs, ours) in elsewhere.fields.items()
    ]
    before = " and ".join(parts)
    return f"This prompt was computed before with {before}; that can change a bit, so it was computed again."
