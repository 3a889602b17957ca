"""Reuse behind an edit, approximately: what follows a changed place is taken over and not computed again.

A text behind an edit stands at other positions, and behind other text. Its keys are turned from the positions where
they were computed to the new ones, in float32; its values are taken as they are. Neither knows of the edit, so the
first tokens of each stretch that is taken over are computed, and the rest is an approximation. Nothing of it is shared
with other requests or written to disk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from octavo.engine.runner import Runner
from octavo.errors import InvalidRequest
from octavo.kv.manager import KVCacheManager
from octavo.kv.prefix import common_prefix
from octavo.kv.table import BlockTable, PrefixMatch
from octavo.models.prepare import PreparedModel
from octavo.spec import BLOCK_SIZE, cdiv

RECOMPUTED = 64
"""Tokens at the beginning of a stretch that are computed."""
_GRAM = 16
"""Tokens that have to agree before two places are taken for the same text."""
_MAX_PLACES = 8
_MIN_BLOCKS = 2
_MAX_CHAINS = 8
"""Earlier sequences that are looked at, the longest ones."""


@dataclass(frozen=True, slots=True)
class Splice:
    """Blocks of a new sequence, from token `start` on, whose tokens stand from `old_start` on in the earlier one."""

    start: int
    num_blocks: int
    old_start: int


@dataclass(slots=True)
class EditPlan:
    """What is taken over, and from where. `source` holds the earlier sequence's blocks."""

    source: BlockTable
    splices: list[Splice] = field(default_factory=list)


class Edits:
    """Takes stretches of earlier sequences over into others.

    Args:
        manager, runner: of the cache.
    """

    def __init__(self, manager: KVCacheManager, runner: Runner, prepared: PreparedModel) -> None:
        self._manager, self._runner = manager, runner
        self._format, self._page = prepared.page_format, prepared.spec.group.page
        self._fused = prepared.fused

    def check(self) -> None:
        """Raises InvalidRequest if the model's keys cannot be turned."""
        if self._fused is None or self._fused.turn(1) is None:
            raise InvalidRequest(
                "reuse is approximate, and keys of this model cannot be moved to other positions: its layers are not "
                "of a build that is known, or have several rotary embeddings. Leave reuse out."
            )

    def plan(
        self, table: BlockTable, token_ids: Sequence[int], recompute: int = RECOMPUTED
    ) -> EditPlan | None:
        """What a sequence that was just matched can take over; None if there is nothing.

        Args:
            recompute: tokens at the beginning of each stretch that are computed.
        """
        block = table.num_tokens // BLOCK_SIZE
        best: tuple[int, list[Splice], list[int]] = (0, [], [])
        first = block * BLOCK_SIZE
        for chain in self._manager.chains(table.parent(block), _MAX_CHAINS):
            old = self._token_ids(chain)
            spans = common_spans(old, token_ids[first:])
            found = [_splice(first, *span, recompute) for span in spans]
            splices = [
                one for one in found if one.num_blocks >= _MIN_BLOCKS and one.start >= table.num_tokens
            ]
            kept = sum(one.num_blocks for one in splices)
            if kept > best[0]:
                best = kept, splices, chain
        if not best[0]:
            return None
        block_ids = [*table.block_ids[:block], *best[2]]
        ids = [*table.token_ids[:first], *self._token_ids(best[2])]
        match = PrefixMatch(table.namespace, tuple(block_ids), None, 0)
        return EditPlan(self._manager.start(match, ids, publish=False), best[1])

    def advance(self, plan: EditPlan, table: BlockTable, token_ids: Sequence[int], count: int) -> int:
        """Takes over what is due; how many of the next `count` tokens are to be computed before the next stretch.

        0 if there is no room for what is due.
        """
        while plan.splices and plan.splices[0].start <= table.num_tokens:
            splice = plan.splices[0]
            if splice.start == table.num_tokens:
                block_ids = self._manager.adopt(table, splice.num_blocks)
                if block_ids is None:
                    return 0
                self._fill(plan.source, splice, block_ids)
                end = splice.start + splice.num_blocks * BLOCK_SIZE
                self._manager.commit(table, token_ids[splice.start : end])
            del plan.splices[0]
        if not plan.splices:
            return count
        return min(count, plan.splices[0].start - table.num_tokens)

    def drop(self, plan: EditPlan) -> None:
        """Lets go of the earlier sequence."""
        plan.splices.clear()
        self._manager.free(plan.source)

    def _token_ids(self, block_ids: Sequence[int]) -> list[int]:
        return [id_ for block_id in block_ids for id_ in self._manager.block_token_ids(block_id)]

    def _fill(self, source: BlockTable, splice: Splice, block_ids: Sequence[int]) -> None:
        """Turns and copies a stretch's keys and values, layer by layer."""
        assert self._fused is not None
        turn = self._fused.turn(splice.start - splice.old_start)
        assert turn is not None
        sealed, page = self._runner.sealed, self._page
        num_tokens = splice.num_blocks * BLOCK_SIZE
        first, shift = divmod(splice.old_start, BLOCK_SIZE)
        old_ids = source.block_ids[first : cdiv(splice.old_start + num_tokens, BLOCK_SIZE)]
        sealed.touch(block_ids)
        many = replace(page, num_kv_heads=page.num_kv_heads * len(old_ids))
        for layer in sealed.layers:
            pages = [layer[(at := sealed.offset(id_)) : at + sealed.page_bytes] for id_ in old_ids]
            keys, values = self._format.decode(torch.cat(pages), many)
            heads = (len(old_ids), page.num_kv_heads)
            # [heads, channels, tokens] and [heads, tokens, channels] of the stretch
            keys = (
                keys.view(*heads, -1, BLOCK_SIZE)
                .permute(1, 2, 0, 3)
                .flatten(2)[..., shift : shift + num_tokens]
            )
            values = (
                values.reshape(*heads, BLOCK_SIZE, -1)
                .transpose(0, 1)
                .flatten(1, 2)[:, shift : shift + num_tokens]
            )
            keys = _turned(keys, *turn)
            keys = keys.reshape(*keys.shape[:2], -1, BLOCK_SIZE).permute(2, 0, 1, 3).flatten(0, 1)
            values = (
                values.reshape(len(values), -1, BLOCK_SIZE, values.shape[2]).transpose(0, 1).flatten(0, 1)
            )
            encoded = self._format.encode(keys, values).view(len(block_ids), -1)
            for block_id, data in zip(block_ids, encoded, strict=True):
                at = sealed.offset(block_id)
                layer[at : at + sealed.page_bytes] = data


def common_spans(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int, int]]:
    """Stretches of `new` that stand in `old`: where they begin in both, and how long they are; in `new`'s order.

    Where a stretch stands in several places, the longest of those near the end of the stretch before it is taken.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for at in range(len(old) - _GRAM + 1):
        places.setdefault(tuple(old[at : at + _GRAM]), []).append(at)
    spans = []
    at = expected = 0
    while at <= len(new) - _GRAM:
        found = places.get(tuple(new[at : at + _GRAM]))
        if found is None:
            at, expected = at + 1, expected + 1
            continue
        middle = bisect_left(found, expected)
        near = found[max(0, middle - _MAX_PLACES // 2) : middle + _MAX_PLACES // 2]
        length, place = max(
            (common_prefix(old[place:], new[at:]), -abs(place - expected), place) for place in near
        )[::2]
        spans.append((at, place, length))
        at, expected = at + length, place + length
    return spans


def _splice(first: int, at: int, place: int, length: int, recompute: int) -> Splice:
    """The whole blocks of a stretch behind its first tokens; the prompt's last token is never among them."""
    start = cdiv(first + at + recompute, BLOCK_SIZE) * BLOCK_SIZE
    num_blocks = max(0, first + at + length - 1 - start) // BLOCK_SIZE
    return Splice(start, num_blocks, first + place + start - first - at)


def _turned(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Keys `[heads, channels, tokens]` turned further by angles `[half of the channels that turn]`."""
    half = len(cos)
    one, other = keys[:, :half], keys[:, half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((one * cos - other * sin, other * cos + one * sin, keys[:, 2 * half :]), dim=1)
