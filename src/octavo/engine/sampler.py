"""Choose the next token from one row of logits, so that nothing but the request can move the choice.

The order of operations, each step only if asked for:

1. `logit_bias` is added.
2. `repetition_penalty` divides the logits above zero, and multiplies those below, of every token of the
   prompt and of the answer so far.
3. `frequency_penalty` times the count, and `presence_penalty` once, are subtracted from the logits of the
   tokens of the answer so far. A grammar rules out every token that it does not allow here. What comes out, in
   float32, are the *adjusted* logits.
4. `temperature` 0 takes the largest adjusted logit. Otherwise they are divided by the temperature.
5. `top_k` keeps the k most likely tokens.
6. `top_p` keeps the fewest of what is left, most likely first, whose share of it reaches p: at least one.
7. `min_p` keeps those of what is left that are at least min_p times as likely as the most likely token.
8. One number in [0, 1), a function of (seed, sample index, position) alone, picks a token by inverse CDF
   over what is left, most likely first.

Wherever tokens are put in order, equal ones go by their id, lowest first.

Everything here is numpy on one row: it runs in one thread and does the same operations in the same order
whatever else is in the batch. torch splits its reductions over threads, and the tail of a thread's share
can get other last bits, so it decides nothing here.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from octavo.config import SamplingParams
from octavo.engine.messages import TokenLogprob
from octavo.errors import InvalidRequest, NumericalError

if TYPE_CHECKING:
    from octavo.engine.constraint import Constraint

_HEAD = 256
"""Tokens to put in order at first, when how many are needed is not known. Most draws end among them."""

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Sample:
    """A chosen token, and its log-probability if the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """What a reply tells of it: one, or none if none was asked for."""
        return () if self.logprob is None else (self.logprob,)


class TokenSampler:
    """Chooses the tokens of one answer.

    `sample` changes nothing, so the same logits, position and history give the same token; `accept` adds
    a token to the history.

    Args:
        params: how to choose.
        seed: of the noise; any integer.
        sample_index: which of the request's answers this is.
        prompt_token_ids: the prompt, for the repetition penalty.
        vocab_size: logits in a row.
        constraint: the grammar of this answer, moved on by `accept`.

    Raises:
        InvalidRequest: a `logit_bias` is for a token that does not exist, or is positive infinity.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        sample_index: int,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        for token_id, bias in params.logit_bias.items():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"logit_bias names the token {token_id}; the model has tokens from 0 to {vocab_size - 1}."
                )
            if bias == math.inf:
                raise InvalidRequest(
                    f"logit_bias of the token {token_id} is infinite; write a finite number, for example 100."
                )
        self._params = params
        self._seed = seed
        self._sample_index = sample_index
        self._vocab_size = vocab_size
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp)
        self._bias = np.fromiter(params.logit_bias.values(), np.float64)
        self._counts_tokens = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._penalises = params.repetition_penalty != 1 or self._counts_tokens
        self._adjusts = self._penalises or bool(params.logit_bias)
        self._constraint = constraint
        self._history = _History(prompt_token_ids if params.repetition_penalty != 1 else ())

    def accept(self, token_id: int) -> None:
        """Add a generated token to the history that the penalties and the grammar look at."""
        if self._constraint is not None:
            self._constraint.accept(token_id)
        if self._penalises:
            self._history.add(token_id)

    def sample(self, logits: torch.Tensor, position: int) -> Sample:
        """Choose a token.

        The log-probabilities are those of the adjusted logits: after bias and penalties, before the
        temperature and the filters. The `logprobs` alternatives are the most likely tokens, the chosen one
        among them if it is one of these; tokens of probability zero are left out.

        Args:
            logits: float32 [vocab_size], on any device; not changed. Minus infinity rules a token out.
            position: of the chosen token in the sequence.

        Raises:
            NumericalError: a logit is NaN or plus infinity, or all are minus infinity.
            InvalidRequest: `logit_bias` and the penalties rule every token out, or leave the number range.
        """
        row, best = self._row(logits, position)
        params = self._params
        token_id = best if params.temperature == 0 else self._draw(row, row[best], position)
        if params.logprobs is None:
            return Sample(token_id)
        return Sample(token_id, _logprob(row, token_id, row[best], params.logprobs))

    def likeliest(self, logits: torch.Tensor, position: int, count: int) -> tuple[TokenLogprob, ...]:
        """The `count` likeliest tokens, those of probability zero left out; arguments and errors as for `sample`.

        The alternatives of each are the same tokens.
        """
        row, best = self._row(logits, position)
        top = _logprob(row, best, row[best], count).top
        return tuple(TokenLogprob(token_id, logprob, top) for token_id, logprob in top)

    def fork(self) -> TokenSampler:
        """Another one with the same history, which goes on by itself."""
        other = copy.copy(self)
        other._history = self._history.fork()
        other._constraint = None if self._constraint is None else self._constraint.copy()
        return other

    def _row(self, logits: torch.Tensor, position: int) -> tuple[Floats, int]:
        """The adjusted logits, and the likeliest token."""
        row: Floats = logits.detach().to("cpu", torch.float32).numpy()
        if row.shape != (self._vocab_size,):
            raise ValueError(f"The logits have the shape {row.shape}; a row of {self._vocab_size} is wanted.")
        best = int(row.argmax())
        # argmax takes the first NaN if there is one, so the largest value tells of NaN and both infinities.
        if not math.isfinite(row[best]):
            raise NumericalError(
                f"The largest logit for position {position} is {row[best]}, so no token can be chosen. Load "
                "the model with dtype fp32; if that does not help, its weights are damaged."
            )
        if self._adjusts or self._constraint is not None:
            if self._adjusts:
                row = self._adjusted(row)
            if self._constraint is not None:
                row = np.where(self._constraint.mask(), row, np.float32(-math.inf))
            best = int(row.argmax())
            if not math.isfinite(row[best]):
                raise InvalidRequest(
                    f"logit_bias, the penalties and the grammar leave no token to choose at position {position}. "
                    "Rule out fewer tokens, or use smaller numbers."
                )
        return row, best

    def _adjusted(self, row: Floats) -> Floats:
        """A copy of `row` with bias and penalties, which are worked out in float64."""
        params, history = self._params, self._history
        row = row.copy()
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks at what comes out
            if params.logit_bias:
                row[self._bias_ids] = row[self._bias_ids] + self._bias
            if self._penalises:
                values = row[history.ids].astype(np.float64)
                if params.repetition_penalty != 1:
                    penalty = params.repetition_penalty
                    values = np.where(values < 0, values * penalty, values / penalty)
                if self._counts_tokens:
                    values -= params.frequency_penalty * history.counts
                    values -= params.presence_penalty * (history.counts > 0)
                row[history.ids] = values
        return row

    def _draw(self, row: Floats, top: np.float32, position: int) -> int:
        params = self._params
        noise = uniform(self._seed, self._sample_index, position)
        if params.top_k:
            ids = _most_likely(row, params.top_k)
            weights = _weights(row[ids], top, params.temperature)
            cumulative = np.cumsum(weights)
            mass = cumulative[-1]
        else:
            all_weights = _weights(row, top, params.temperature)
            mass = all_weights.sum()
            # Only a head of the vocabulary is put in order. Where its length is not known beforehand, it
            # grows until it holds the probability that is needed.
            if params.min_p:
                limit = count = int(np.count_nonzero(all_weights >= params.min_p))
            else:
                limit, count = self._vocab_size, min(_HEAD, self._vocab_size)
            needed = mass * (params.top_p if params.top_p < 1 else noise)
            while True:
                ids = _most_likely(row, count)
                weights = all_weights[ids]
                cumulative = np.cumsum(weights)
                if count == limit or cumulative[-1] > needed:
                    break
                count = min(16 * count, limit)
        kept = ids.size
        if params.top_p < 1:
            kept = min(kept, int(np.searchsorted(cumulative, params.top_p * mass)) + 1)
        if params.min_p:
            kept = min(kept, int(np.count_nonzero(weights >= params.min_p)))
        if params.top_p < 1 or params.min_p:
            mass = cumulative[kept - 1]
        drawn = int(np.searchsorted(cumulative, noise * mass, side="right"))
        # A mass summed in another order can be a little larger: then the last token with a weight is meant.
        last = int(np.searchsorted(cumulative, cumulative[kept - 1]))
        return int(ids[min(drawn, last)])


class _History:
    """Distinct tokens seen so far, and how often each was generated, as arrays that grow by doubling."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, np.intp))
        self._index = {token_id: index for index, token_id in enumerate(distinct.tolist())}
        room = max(64, 2 * distinct.size)
        self._ids = np.zeros(room, np.intp)
        self._ids[: distinct.size] = distinct
        self._counts = np.zeros(room, np.int64)

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return self._counts[: len(self._index)]

    def fork(self) -> _History:
        """A copy."""
        other = copy.copy(self)
        other._index, other._ids, other._counts = dict(self._index), self._ids.copy(), self._counts.copy()
        return other

    def add(self, token_id: int) -> None:
        index = self._index.setdefault(token_id, len(self._index))
        if index == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += 1


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) of 53 random bits that is a function of the three alone."""
    counter = f"{seed}/{sample_index}/{position}".encode()
    digest = blake2b(counter, digest_size=8, person=b"octavo.sampler").digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def draw_seed() -> int:
    """A seed for a request that brings none: 32 bits, short enough to be typed again."""
    return secrets.randbits(32)


def _weights(row: Floats, top: np.float32, temperature: float) -> Doubles:
    """Unnormalised probabilities, 1.0 for the most likely token."""
    weights = row.astype(np.float64)
    weights -= top
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: minus infinity, weight 0
        weights /= temperature
        return np.exp(weights, out=weights)


def _most_likely(row: Floats, count: int) -> Ids:
    """Ids of the `count` largest values of `row`, largest first, equal ones by id."""
    if count < row.size:
        cut = np.partition(row, row.size - count)[row.size - count]
        ids = np.flatnonzero(row >= cut)
    else:
        ids = np.arange(row.size)
    # One integer per token that sorts by falling value, then by id: seven times as fast as a stable sort.
    # The bits of a float, as an integer, sort like the float once those of a negative one are turned over;
    # adding 0.0 makes -0.0 the same as 0.0.
    bits = (row[ids] + np.float32(0.0)).view(np.int32).astype(np.int64)
    bits ^= (bits >> 63) & 0x7FFFFFFF
    keys = (-bits << 32) | ids
    keys.sort()
    return (keys[:count] & 0xFFFFFFFF).astype(np.intp, copy=False)


def logprob_of(row: Floats, token_id: int, num_alternatives: int) -> TokenLogprob:
    """Log-probability of a token in a row of logits that nothing was done to."""
    return _logprob(row, token_id, row.max(), num_alternatives)


def _logprob(row: Floats, token_id: int, top: np.float32, num_alternatives: int) -> TokenLogprob:
    norm = float(top) + math.log(_weights(row, top, 1.0).sum())
    alternatives = _most_likely(row, min(num_alternatives, row.size)).tolist() if num_alternatives else []
    return TokenLogprob(
        token_id,
        float(row[token_id]) - norm,
        tuple((other, float(row[other]) - norm) for other in alternatives if row[other] > -math.inf),
    )
