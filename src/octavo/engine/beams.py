"""Beam search: the likeliest answers instead of drawn ones, over sequences that share what they have in common.

At each step every live beam offers its likeliest next tokens, twice as many as there are beams. All offers are put
in order by the sum of their log-probabilities. Those among the first ones that end an answer leave the search with it;
the first others, as many as there are beams, are the next live beams. A beam that is continued twice is forked, one
that is not continued lets its blocks go. The search ends when as many answers have ended as there are beams and the
best live beam could not take the place of the last one. Answers are ranked by the sum divided by their number of
tokens to the power of `length_penalty`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from octavo.engine.messages import Choice, FinishReason, TokenLogprob
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence import RequestState, Sequence
from octavo.kv.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer that has left the search."""

    score: float
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason


class Step(NamedTuple):
    """A live beam's next token. `total` is the sum of the log-probabilities up to it."""

    parent: Sequence
    total: float
    token: TokenLogprob


class BeamSearch:
    """The search of one request, which begins with one sequence.

    Args:
        ends: tokens that end an answer.
        max_tokens: of an answer.
    """

    def __init__(self, sequence: Sequence, *, ends: frozenset[int], max_tokens: int) -> None:
        params = sequence.state.request.params
        self._width, self._penalty = params.beams, params.length_penalty
        self._logprobs = params.logprobs
        self._ends, self._max_tokens = ends, max_tokens
        self.indices = itertools.count(1)
        self._totals: dict[Sequence, float] = {sequence: 0.0}  # of the live beams, the best first
        self._offers: dict[Sequence, tuple[TokenLogprob, ...]] = {}
        self._ended: list[Ended] = []  # the best first

    def offer(self, sequence: Sequence, logits: torch.Tensor) -> bool:
        """Notes how a live beam could go on; whether all of them have said so.

        Raises:
            NumericalError, InvalidRequest: see `TokenSampler.sample`.
        """
        self._offers[sequence] = sequence.sampler.likeliest(logits, len(sequence.token_ids), 2 * self._width)
        return len(self._offers) == len(self._totals)

    def choose(self) -> tuple[list[Step], list[tuple[Sequence, Ended]]]:
        """The next live beams, the best first, and the answers that ended now; no beams when the search is over."""
        steps = [
            Step(beam, total + token.logprob, token)
            for beam, total in self._totals.items()
            for token in self._offers[beam]
        ]
        steps.sort(key=lambda step: -step.total)  # equal ones as the beams are, then as their tokens
        self._offers.clear()
        beams: list[Step] = []
        ended: list[tuple[Sequence, Ended]] = []
        for rank, step in enumerate(steps[: 2 * self._width]):
            if step.token.token_id in self._ends:
                if rank < self._width:
                    ended.append((step.parent, self._end(step, "stop")))
            elif len(beams) < self._width:
                beams.append(step)
        length = 1 + len(next(iter(self._totals)).generated_ids)
        if length >= self._max_tokens:
            ended += [(step.parent, self._end(step, "length")) for step in beams]
            beams = []
        self._ended = sorted([*self._ended, *(one for _, one in ended)], key=lambda one: -one.score)
        del self._ended[self._width :]
        full = len(self._ended) == self._width
        if beams and full and self._score(beams[0].total, length) <= self._ended[-1].score:
            beams = []
        return beams, ended

    def went_on(self, beams: list[tuple[Sequence, float]]) -> None:
        """These are the live beams now, with the sums of their log-probabilities, the best first."""
        self._totals = dict(beams)

    def is_best(self, ended: Ended) -> bool:
        return self._ended[0] is ended

    def stop(self, reason: FinishReason) -> None:
        """The search ends now: what the live beams have counts as answers."""
        for beam, total in self._totals.items():
            generated, logprobs = tuple(beam.generated_ids), tuple(beam.logprobs)
            self._ended.append(Ended(self._score(total, len(generated)), generated, logprobs, reason))
        self._ended.sort(key=lambda one: -one.score)

    def answers(self, number: int) -> list[Ended]:
        """The best ones."""
        return self._ended[:number]

    def taken(self, step: Step) -> TokenLogprob:
        """What a reply tells of a step's token."""
        return replace(step.token, top=step.token.top[: self._logprobs or 0])

    def _end(self, step: Step, reason: FinishReason) -> Ended:
        generated = (*step.parent.generated_ids, step.token.token_id)
        logprobs = (*step.parent.logprobs, self.taken(step))
        return Ended(self._score(step.total, len(generated)), generated, logprobs, reason)

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(max(length, 1), self._penalty)


class BeamSearches:
    """The searches of an engine: what they do to its sequences.

    Args:
        sequences: those of each request, by its id; kept up to date.
        settle: called with a sequence whose computed tokens are those of the best answer so far.
        eos_token_ids: of the model.
        context: tokens of its window.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        scheduler: Scheduler,
        sequences: dict[str, list[Sequence]],
        settle: Callable[[Sequence], None],
        *,
        eos_token_ids: frozenset[int],
        context: int,
    ) -> None:
        self._manager, self._scheduler, self._sequences = manager, scheduler, sequences
        self._settle = settle
        self._eos, self._context = eos_token_ids, context

    def advance(self, sequence: Sequence, logits: torch.Tensor) -> bool:
        """A live beam is computed: it waits for the others, and the last one moves the search on.

        Returns:
            Whether the search is over.

        Raises:
            NumericalError, InvalidRequest: see `TokenSampler.sample`.
        """
        search = self._search_of(sequence)
        if not sequence.state.request.cache:
            self._scheduler.forget_blocks(sequence)
        sequence.parked = True
        if not search.offer(sequence, logits):
            return False
        beams, ended = search.choose()
        for parent, answer in ended:
            if search.is_best(answer):
                self._settle(parent)
        if not beams:
            return True
        search.went_on(self._grow(sequence.state, search, beams))
        return False

    def stop(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends the search of a request; `sequence` is one of its."""
        self._search_of(sequence).stop(reason)

    def take(self, state: RequestState, text_of: Callable[[tuple[int, ...]], str]) -> list[Choice]:
        """The answers of a search that is over; its sequences let go of everything.

        Args:
            text_of: the text of tokens, without one that ended them.
        """
        for sequence in self._sequences[state.request.request_id]:
            self._scheduler.release(sequence, keep_tail=False)
        assert state.search is not None
        choices = []
        for index, one in enumerate(state.search.answers(state.request.params.n)):
            stops = one.reason == "stop"
            shown = one.token_ids[:-1] if stops else one.token_ids
            stop = one.token_ids[-1] if stops else None
            choices.append(
                Choice(index, text_of(shown), one.token_ids, one.reason, stop, one.logprobs, one.score)
            )
        return choices

    def _search_of(self, sequence: Sequence) -> BeamSearch:
        state = sequence.state
        if state.search is None:
            params = state.request.params
            ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
            room = self._context - state.num_prompt_tokens
            max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
            state.search = BeamSearch(sequence, ends=ends, max_tokens=max_tokens)
        return state.search

    def _grow(
        self, state: RequestState, search: BeamSearch, steps: list[Step]
    ) -> list[tuple[Sequence, float]]:
        """Gives each step a sequence: its parent, or a fork of it from the second time on."""
        forks: list[Sequence] = []
        chosen: list[Sequence] = []
        for step in steps:
            beam = step.parent
            if beam in chosen:
                beam = self._fork(beam, next(search.indices))
                forks.append(beam)
            chosen.append(beam)
        for beam, step in zip(chosen, steps, strict=True):
            beam.token_ids.append(step.token.token_id)
            beam.sampler.accept(step.token.token_id)
            beam.logprobs.append(search.taken(step))
            beam.parked = False
        sequences = self._sequences[state.request.request_id]
        for beam in sequences:
            if beam not in chosen:
                self._scheduler.release(beam, keep_tail=False)
        sequences[:] = chosen
        self._scheduler.add_forks(forks)
        return [(beam, step.total) for beam, step in zip(chosen, steps, strict=True)]

    def _fork(self, beam: Sequence, index: int) -> Sequence:
        return Sequence(
            state=beam.state,
            index=index,
            token_ids=list(beam.token_ids),
            sampler=beam.sampler.fork(),
            detokenizer=beam.detokenizer,  # nobody reads a beam before its end
            table=None if beam.table is None else self._manager.fork(beam.table),
            logprobs=list(beam.logprobs),
            num_preempted=beam.num_preempted,
        )


def ranked(choices: list[Choice], number: int) -> list[Choice]:
    """The best of drawn answers, by the mean log-probability of their tokens; equal ones as they were drawn."""

    def score(choice: Choice) -> float:
        assert choice.logprobs is not None
        values = [token.logprob for token in choice.logprobs]
        return sum(values) / len(values) if values else float("-inf")

    best = sorted(((score(choice), choice) for choice in choices), key=lambda pair: -pair[0])[:number]
    return [replace(choice, index=index, score=value) for index, (value, choice) in enumerate(best)]
