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

MissCause = Literal["new", "below_one_block", "changed_token", "evicted", "cleared"]

MAX_DEPARTED = 65_536
"""Hashes that are remembered of what has left, the newest ones; about 10 MB."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a prompt's reuse ended at `position`, its first token that has to be computed.

    `num_known_tokens`, from that position on, had been computed before and are not reusable now. The
    causes are those of `WhyCause`; with "changed_token", `position + num_known_tokens` is the position of
    the first token that differs from the most similar sequence.
    """

    cause: MissCause
    position: int
    num_known_tokens: int


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
    here = [index[block_id].token_ids for block_id in index.children(parent)]
    here += [tails[slot].token_ids for slot in tails.continuing(parent)]
    num_shared, num_there = max(((common_prefix(ids, wanted), len(ids)) for ids in here), default=(0, 0))
    num_gone, cause = departed.follow(match.namespace, index.chain_hash(parent), token_ids[start:])

    known = min(start + max(num_shared, num_gone), reusable)
    if cause is None or num_gone < num_shared or known == match.num_tokens:
        if num_shared == len(wanted):
            cause = "below_one_block"
        elif num_there > num_shared and known > 0:
            cause = "changed_token"
        else:
            cause = "new"
    return Miss(cause, match.num_tokens, known - match.num_tokens)
