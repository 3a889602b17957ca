"""Drafts of what an answer goes on with, taken from earlier text, so that one step can yield several tokens.

A drafter follows the text: while the last tokens stand somewhere in the conversation or in what its tenant had
generated or sent before, the tokens behind that place are what it predicts. It keeps score whether they were drafted or
not, so that learning costs nothing. A draft is as long as pays, by that score and by what rows of a step cost here, and
empty where none does.

Nothing here decides a token. The engine computes the drafted rows in one step, and keeps those whose token the sampler
would have chosen anyway. See `Answers.verify`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.spec import BLOCK_SIZE

if TYPE_CHECKING:
    from octavo.engine.sequence import Sequence

MIN_MATCH = 3
"""Tokens that have to agree before a place is followed."""
POOL_MATCH = 5
"""The same for other requests of the tenant."""
_MAX_MATCH = 24
_POOL_TOKENS = 1 << 15
_POOL_BITS = 16
_MIX = 0x9E3779B97F4A7C15
_64_BITS = (1 << 64) - 1
_MAX_POOLS = 64
_MATCHES = (4, 6, 10, 18)
"""Matches are scored by length: shorter than 4, than 6, than 10, than 18, and others."""
_PRIORS = (0.4, 0.5, 0.65, 0.8, 0.9)
"""How often a prediction comes true, before anything is known of an answer."""
_PRIOR_WEIGHT = 4.0
_MEMORY = 0.97
_MARGIN = 1.03
"""What a draft must gain by expectation, so that errors of the estimates do not cost."""
_ROW_SHARE = 0.08
"""What one more row costs, of a step of one row, before it was measured."""
_FORGETS = 0.01

Ids = npt.NDArray[np.int32]


class Text:
    """Token ids that only grow. An array that was read from it stays as it was."""

    def __init__(self, token_ids: SequenceOf[int] = ()) -> None:
        self.num_tokens = len(token_ids)
        self.ids: Ids = np.empty(max(256, 2 * self.num_tokens), np.int32)
        self.ids[: self.num_tokens] = token_ids

    def append(self, token_ids: SequenceOf[int]) -> None:
        end = self.num_tokens + len(token_ids)
        if end > self.ids.size:
            grown: Ids = np.empty(2 * end, np.int32)
            grown[: self.num_tokens] = self.ids[: self.num_tokens]
            self.ids = grown
        self.ids[self.num_tokens : end] = token_ids
        self.num_tokens = end


class Pool:
    """The latest texts of one tenant, one behind the other, with -1 between them.

    A table of hashes leads from `POOL_MATCH` tokens to the place behind where they were last; whether they are the
    same is for the reader to see.
    """

    def __init__(self) -> None:
        self.text = Text()
        self._places: Ids = np.zeros(1 << _POOL_BITS, np.int32)

    def add(self, token_ids: SequenceOf[int]) -> None:
        """Adds a text; the oldest ones go when there are too many tokens."""
        kept = token_ids[1 - _POOL_TOKENS // 2 :]
        if self.text.num_tokens + len(kept) > _POOL_TOKENS:
            last = self.text.ids[self.text.num_tokens - _POOL_TOKENS // 2 : self.text.num_tokens]
            self.text = Text(last.tolist())
            self._places[:] = 0
            self._enter(0)
        begin = self.text.num_tokens
        self.text.append([*kept, -1])
        self._enter(begin)

    def place(self, last: Ids) -> int:
        """Where these `POOL_MATCH` tokens may have been last: the place behind, or 0."""
        mixed = 0
        for token_id in last.tolist():  # as in `_hashes`, which is slow for one
            mixed = (mixed + token_id) * _MIX & _64_BITS
        mixed = (mixed ^ mixed >> 32) * _MIX & _64_BITS
        return int(self._places[mixed >> 64 - _POOL_BITS])

    def _enter(self, begin: int) -> None:
        ids = self.text.ids[begin : self.text.num_tokens]
        if ids.size >= POOL_MATCH:
            hashes = _hashes(ids)
            self._places[hashes] = np.arange(begin + POOL_MATCH, begin + POOL_MATCH + hashes.size)


def _hashes(ids: Ids) -> npt.NDArray[np.uint64]:
    """A number below `2 ** _POOL_BITS` for each `POOL_MATCH` tokens in a row."""
    wide = ids.astype(np.uint64)
    mixed = np.zeros(ids.size - POOL_MATCH + 1, np.uint64)
    for offset in range(POOL_MATCH):
        mixed = (mixed + wide[offset : offset + mixed.size]) * np.uint64(_MIX)
    # Up to here it is linear, so that tokens at equal distances would meet in few places.
    mixed = (mixed ^ mixed >> np.uint64(32)) * np.uint64(_MIX)
    return mixed >> np.uint64(64 - _POOL_BITS)


class Costs:
    """What a step takes, and what each drafted row adds, measured while the engine decodes."""

    def __init__(self) -> None:
        self._plain_s: dict[int, float] = {}
        self._row_share = _ROW_SHARE

    def stepped(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """A step of decodes alone took so long."""
        plain_s = self._plain_s.get(num_sequences)
        if not num_drafted:
            self._plain_s[num_sequences] = seconds if plain_s is None else plain_s + 0.1 * (seconds - plain_s)
            self._row_share += _FORGETS * (_ROW_SHARE - self._row_share)
        elif plain_s is not None:
            share = max(0.0, seconds / plain_s - 1) / num_drafted
            self._row_share += 0.2 * (min(share, 1.0) - self._row_share)

    def best(self, num_sequences: int, probability: float, limit: int) -> int:
        """How many tokens to draft in a step of `num_sequences`, each of which comes true if the one before has."""
        if num_sequences not in self._plain_s:
            return 0
        best, best_gain = 0, _MARGIN
        expected, chance = 0.0, 1.0
        for count in range(1, limit + 1):
            chance *= probability
            expected += chance
            gain = (1 + expected / num_sequences) / (1 + self._row_share * count)
            if gain > best_gain:
                best, best_gain = count, gain
        return best


class Drafter:
    """Follows one answer.

    Args:
        token_ids: the prompt and what is generated already.
        pool: of the tenant.
    """

    def __init__(self, token_ids: SequenceOf[int], pool: Pool) -> None:
        self._text = Text(token_ids)
        self._pool = pool
        self._source: Ids | None = None
        self._next = self._end = self._match = 0
        self._hits = [_PRIOR_WEIGHT * prior for prior in _PRIORS]
        self._tries = [_PRIOR_WEIGHT] * len(_PRIORS)
        self._look_up()

    @property
    def num_tokens(self) -> int:
        """Tokens that it has seen."""
        return self._text.num_tokens

    @property
    def probability(self) -> float:
        """How often the next token of such a match has come true."""
        kind = bisect_right(_MATCHES, self._match)
        return self._hits[kind] / self._tries[kind]

    def follow(self, token_ids: SequenceOf[int]) -> None:
        """The answer has gone on with these."""
        for token_id in token_ids:
            if self._source is not None:
                hit = bool(self._source[self._next] == token_id)
                kind = bisect_right(_MATCHES, self._match)
                self._hits[kind] = _MEMORY * self._hits[kind] + hit
                self._tries[kind] = _MEMORY * self._tries[kind] + 1
                if hit:
                    self._next += 1
                    self._match += 1
                if not hit or self._next >= self._end or self._source[self._next] < 0:
                    self._source = None
        self._text.append(token_ids)
        if self._source is None:
            self._look_up()

    def predicted(self, limit: int, stops: Collection[int] = ()) -> list[int]:
        """At most `limit` tokens that it expects next, up to one of `stops`."""
        if self._source is None or limit < 1:
            return []
        found: list[int] = []
        for token_id in self._source[self._next : min(self._end, self._next + limit)].tolist():
            if token_id < 0 or token_id in stops:
                break
            found.append(token_id)
        return found

    def _look_up(self) -> None:
        """Finds the latest of the longest matches in the conversation, or a longer one in the tenant's pool."""
        ids, count = self._text.ids, self._text.num_tokens
        last = ids[max(0, count - _MAX_MATCH) : count][::-1]
        at, match = _longest_match(ids, count - 1, last)
        if match >= MIN_MATCH:
            self._source, self._next, self._end, self._match = ids, at, count, match
        if match < _MAX_MATCH and count >= POOL_MATCH:
            at = self._pool.place(ids[count - POOL_MATCH : count])
            pooled = self._pool.text.ids
            others = _agreeing(pooled[max(0, at - _MAX_MATCH) : at][::-1], last) if at else 0
            if others >= POOL_MATCH and others > match and pooled[at] >= 0:
                self._source, self._next, self._end = pooled, at, self._pool.text.num_tokens
                self._match = others


def _agreeing(one: Ids, other: Ids) -> int:
    """How many tokens two texts begin with alike."""
    count = min(one.size, other.size)
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if differ.size else count


def _longest_match(ids: Ids, end: int, last: Ids) -> tuple[int, int]:
    """Where `last`, newest first, stands in `ids[:end]`: the place behind it, and how many tokens agree."""
    if end < 1 or not last.size:
        return 0, 0
    at = np.flatnonzero(ids[:end] == last[0])
    match = 1 if at.size else 0
    while at.size and match < last.size:
        longer = at[at >= match]
        longer = longer[ids[longer - match] == last[match]]
        if not longer.size:
            break
        at, match = longer, match + 1
    return (int(at[-1]) + 1 if at.size else 0), match


class Speculator:
    """Drafts for the answers of an engine.

    Args:
        context: tokens of the window.
        eos_token_ids: end an answer, so nothing is drafted behind them.
    """

    def __init__(self, context: int, eos_token_ids: frozenset[int]) -> None:
        self.costs = Costs()
        self._context = context
        self._eos = eos_token_ids
        self._pools: OrderedDict[bytes, Pool] = OrderedDict()

    def draft(self, sequence: Sequence, room: int, num_sequences: int) -> list[int]:
        """Tokens to compute behind the one that is due, at most `room`, in a step of `num_sequences`.

        They stay inside its block and leave its last row free: a draft never seals.
        """
        state, table = sequence.state, sequence.table
        num_generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        if (
            not state.request.cache
            or table is None
            or num_generated < 1
            or sequence.num_remaining_tokens != 1
        ):
            return []
        drafter = sequence.drafter
        if drafter is None:
            drafter = sequence.drafter = Drafter(sequence.token_ids, self._pool(state.namespace))
        else:
            drafter.follow(sequence.token_ids[drafter.num_tokens :])
        params = state.request.params
        limit = min(
            room,
            BLOCK_SIZE - 2 - table.num_tokens % BLOCK_SIZE,
            self._context - len(sequence.token_ids) - 1,
            room if params.max_tokens is None else params.max_tokens - num_generated - 1,
        )
        predicted = drafter.predicted(limit, self._eos.union(params.stop_token_ids))
        return predicted[: self.costs.best(num_sequences, drafter.probability, len(predicted))]

    def finished(self, sequence: Sequence) -> None:
        """An answer has ended: what is new of its text is remembered for its tenant."""
        request = sequence.state.request
        if request.cache and not request.ephemeral:
            known = sequence.state.num_cached_tokens if sequence.index == 0 else sequence.num_prompt_tokens
            self._pool(sequence.state.namespace).add(sequence.token_ids[known:])

    def forget(self, namespace: bytes | None = None) -> None:
        """Forgets the texts of a tenant, or all."""
        if namespace is None:
            self._pools.clear()
        else:
            self._pools.pop(namespace, None)

    def _pool(self, namespace: bytes) -> Pool:
        """The texts of a tenant; those of the tenant that was not there for longest are forgotten."""
        pool = self._pools.setdefault(namespace, Pool())
        self._pools.move_to_end(namespace)
        if len(self._pools) > _MAX_POOLS:
            self._pools.popitem(last=False)
        return pool
