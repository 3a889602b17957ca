"""Why a prompt could not reuse more: told from what is here now and a memory of what has left."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.kv.hashing import BlockHash
from octavo.kv.prefix import PrefixIndex, common_prefix
from octavo.kv.table import PrefixMatch
from octavo.kv.tails import RawTails, Tail
from octavo.spec import BLOCK_SIZE

MissCause = Literal[
    "new", "below_one_block", "changed_token", "dropped_text", "evicted", "expired", "cleared"
]

MAX_DEPARTED = 65_536
"""Hashes that are remembered of what has left, the newest ones; about 10 MB."""

_MAX_EARLIER = 4096
"""Tokens of an earlier sequence that are looked at behind the place where it differs."""

_ALIKE = 4
"""Tokens behind a difference count as the same as before if so many in a row are."""

_MIN_RESUMED, _RESUMED = 4, 8
"""A prompt goes on where an earlier one did if so many tokens agree: fewer where it has no more."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a prompt's reuse ended at `position`, its first token that has to be computed.

    `num_known_tokens`, from that position on, had been computed before and are not reusable now. The
    causes are those of `WhyCause`; with "changed_token" and "dropped_text", `position + num_known_tokens` is the
    position of the first token that differs from the most similar sequence, which went on with `earlier`.
    `num_dropped_tokens` of these are left out by the prompt, which then goes on alike, and `num_alike_tokens` of the
    prompt behind the difference are in `earlier` too.
    """

    cause: MissCause
    position: int
    num_known_tokens: int
    earlier: tuple[int, ...] = ()
    num_dropped_tokens: int = 0
    num_alike_tokens: int = 0


class Departed:
    """Why blocks and tails are not here any more, by hash; bounded, so the oldest are forgotten.

    Only keyed hashes are kept: what was cleared cannot be read back from here.
    """

    def __init__(self, hash_function: BlockHash, max_hashes: int = MAX_DEPARTED) -> None:
        self._hash = hash_function
        self._max_hashes = max_hashes
        self._causes: OrderedDict[bytes, MissCause] = OrderedDict()

    def add_block(self, block_hash: bytes, cause: MissCause) -> None:
        self._causes[block_hash] = cause
        self._causes.move_to_end(block_hash)
        if len(self._causes) > self._max_hashes:
            self._causes.popitem(last=False)

    def add_tail(self, tail: Tail, parent_hash: bytes, cause: MissCause) -> None:
        """Remember a tail under each of its beginnings, as any of them may be asked for."""
        for length in range(1, min(len(tail.token_ids), BLOCK_SIZE - 1) + 1):
            self.add_block(self._hash(tail.namespace, parent_hash, tail.token_ids[:length]), cause)

    def follow(
        self, namespace: bytes, parent_hash: bytes, token_ids: Sequence[int]
    ) -> tuple[int, MissCause | None]:
        """How many of `token_ids`, which continue a block with `parent_hash`, were here once.

        The cause is that of the first block or tail among them; None if there is none.
        """
        length, first = 0, None
        while length + BLOCK_SIZE <= len(token_ids):
            block_hash = self._hash(namespace, parent_hash, token_ids[length : length + BLOCK_SIZE])
            cause = self._causes.get(block_hash)
            if cause is None:
                break
            first = first or cause
            parent_hash = block_hash
            length += BLOCK_SIZE
        for end in range(min(length + BLOCK_SIZE - 1, len(token_ids)), length, -1):
            cause = self._causes.get(self._hash(namespace, parent_hash, token_ids[length:end]))
            if cause is not None:
                return end, first or cause
        return length, first


def explain(
    match: PrefixMatch, token_ids: Sequence[int], index: PrefixIndex, tails: RawTails, departed: Departed
) -> Miss | None:
    """Why `match` is shorter than the prompt without its last token; None if it is not."""
    reusable = len(token_ids) - 1
    if match.num_tokens >= reusable:
        return None
    start = len(match.block_ids) * BLOCK_SIZE
    parent = match.block_ids[-1] if match.block_ids else match.namespace

    wanted = token_ids[start : min(start + BLOCK_SIZE, reusable)]
    most_similar: tuple[int, ...] = ()
    follower: int | None = None
    num_shared = 0
    for block_id in index.children(parent):
        ids = index[block_id].token_ids
        if (length := common_prefix(ids, wanted)) > num_shared or not most_similar:
            num_shared, most_similar, follower = length, ids, block_id
    for slot in tails.continuing(parent):
        ids = tails[slot].token_ids
        if (length := common_prefix(ids, wanted)) > num_shared or not most_similar:
            num_shared, most_similar, follower = length, ids, None
    num_gone, cause = departed.follow(match.namespace, index.chain_hash(parent), token_ids[start:])

    known = min(start + max(num_shared, num_gone), reusable)
    if cause is not None and num_gone >= num_shared and known > match.num_tokens:
        return Miss(cause, match.num_tokens, known - match.num_tokens)
    if num_shared == len(wanted):
        return Miss("below_one_block", match.num_tokens, known - match.num_tokens)
    if len(most_similar) <= num_shared or known == 0:
        return Miss("new", match.num_tokens, known - match.num_tokens)
    earlier = (most_similar + _behind(follower, index, tails))[num_shared : num_shared + _MAX_EARLIER]
    num_dropped = _num_dropped(earlier, token_ids[known:])
    return Miss(
        "dropped_text" if num_dropped else "changed_token",
        match.num_tokens,
        known - match.num_tokens,
        earlier,
        num_dropped,
        _num_alike(earlier, token_ids[known:]),
    )


def _behind(block_id: int | None, index: PrefixIndex, tails: RawTails) -> tuple[int, ...]:
    """How a sequence went on behind a block; where several did, one of them."""
    ids: list[int] = []
    while block_id is not None and len(ids) < _MAX_EARLIER:
        parent, block_id = block_id, next(iter(index.children(block_id)), None)
        slots = tails.continuing(parent)
        if block_id is not None:
            ids += index[block_id].token_ids
        elif slots:
            ids += max((tails[slot] for slot in slots), key=lambda tail: len(tail.token_ids)).token_ids
    return tuple(ids)


def _num_alike(earlier: Sequence[int], rest: Sequence[int]) -> int:
    """How many tokens of `rest` lie in a run of at least `_ALIKE` that `earlier` has too."""
    runs = {tuple(earlier[i : i + _ALIKE]) for i in range(len(earlier) - _ALIKE + 1)}
    count, end = 0, 0
    for start in range(len(rest) - _ALIKE + 1):
        if tuple(rest[start : start + _ALIKE]) in runs:
            count += start + _ALIKE - max(start, end)
            end = start + _ALIKE
    return count


def _num_dropped(earlier: Sequence[int], rest: Sequence[int]) -> int:
    """How many tokens of `earlier` are left out where `rest` goes on as it did behind them; 0 if it does not."""
    resumed = tuple(rest[:_RESUMED])
    if len(resumed) >= _MIN_RESUMED:
        for start in range(1, len(earlier) - len(resumed) + 1):
            if earlier[start] == resumed[0] and tuple(earlier[start : start + len(resumed)]) == resumed:
                return start
    return 0
