"""A request on its way through the engine, and its sequences: one for each answer."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.engine.detokenizer import Detokenizer
from octavo.engine.lineage import Lineage
from octavo.engine.messages import (
    MAX_URGENCY,
    Choice,
    FinishReason,
    MemoryReport,
    Reply,
    Request,
    Timings,
    TokenLogprob,
    Usage,
    Why,
)
from octavo.engine.sampler import Sample, TokenSampler
from octavo.engine.speculation import Drafter
from octavo.kv.explain import Miss
from octavo.kv.storage.tier import Elsewhere
from octavo.kv.table import BlockTable

if TYPE_CHECKING:
    from octavo.engine.beams import BeamSearch
    from octavo.engine.edits import EditPlan

MAX_OVERTAKEN = 32
"""Later requests that may be taken in before one that waits; then it is next, whatever the others are."""


@dataclass(eq=False, slots=True)
class RequestState:
    """What the sequences of one request share.

    `miss` says why less than the whole prompt was reused. Of what was missing, a lower tier has the beginning
    `elsewhere`, and `num_expired_tokens` that are not served any more. `again` is from where on, and how many, tokens
    were computed once more after a preemption. `arrival` is its number in the queue, from 1 on.
    """

    request: Request
    namespace: bytes
    seed: int
    arrived_s: float = field(default_factory=time.perf_counter)
    arrival: int = 0
    num_overtaken: int = 0
    started_s: float | None = None
    first_token_s: float | None = None
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_computed_tokens: int = 0
    miss: Miss | None = None
    elsewhere: Elsewhere | None = None
    num_expired_tokens: int = 0
    num_approximate_tokens: int = 0
    again: tuple[int, int] | None = None
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    lineage: Lineage | None = None
    search: BeamSearch | None = None
    notes: list[str] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def is_scored(self) -> bool:
        """Whether nothing of the prompt has to be computed for its log-probabilities any more."""
        if self.request.prompt_logprobs is None:
            return True
        return len(self.prompt_logprobs) == self.num_prompt_tokens - 1

    @property
    def looks_up(self) -> bool:
        """Whether it takes what the cache has: not without one, and not of a prompt that is being scored."""
        return self.request.cache and self.is_scored

    @property
    def is_due(self) -> bool:
        """Whether it has waited for long enough while others were taken in."""
        return self.num_overtaken >= MAX_OVERTAKEN

    @property
    def urgency(self) -> int:
        """The request's, or more than any request's when it is due."""
        return MAX_URGENCY + 1 if self.is_due else self.request.urgency

    @property
    def finished(self) -> bool:
        params = self.request.params
        return len(self.choices) == (params.n if params.beams > 1 else params.width)

    @property
    def is_ranked(self) -> bool:
        """Whether some of its answers are left out in the end, so that nothing is told before."""
        return self.request.params.width > self.request.params.n or self.request.params.beams > 1

    def _prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """One a token of the prompt; None where it was not asked for, and for the first token."""
        if self.request.prompt_logprobs is None:
            return None
        return tuple(self.prompt_logprobs.get(position) for position in range(self.num_prompt_tokens))

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            computed_tokens=self.num_computed_tokens,
            loaded_tokens=self.num_loaded_tokens,
            approximate_tokens=self.num_approximate_tokens,
            drafted_tokens=self.num_drafted_tokens,
            accepted_tokens=self.num_accepted_tokens,
            completion_tokens=sum(len(choice.token_ids) for choice in self.choices.values()),
        )

    def timings(self) -> Timings:
        now = time.perf_counter()
        started = self.started_s or now
        first = self.first_token_s or now
        decoded = sum(max(0, len(choice.token_ids) - 1) for choice in self.choices.values())
        return Timings(
            queue_s=started - self.arrived_s,
            prefill_s=first - started,
            ttft_s=first - self.arrived_s,
            total_s=now - self.arrived_s,
            decode_tokens_per_s=decoded / (now - first) if decoded and now > first else 0.0,
        )

    def reply(self, memory: MemoryReport, why: Why | None, notes: SequenceOf[str], *, exact: bool) -> Reply:
        """What the finished request answers; `notes` come before its own."""
        return Reply(
            request_id=self.request.request_id,
            choices=tuple(self.choices[index] for index in sorted(self.choices)),
            usage=self.usage(),
            timings=self.timings(),
            memory=memory,
            seed=self.seed,
            why=why,
            notes=tuple(dict.fromkeys((*notes, *self.notes))),
            exact=exact,
            conversation=None if self.lineage is None else self.lineage.name,
            prompt_logprobs=self._prompt_logprobs(),
        )


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer: the prompt's tokens and those generated so far.

    `table` is None while nothing of it is in the cache: waiting, preempted, or between two steps of a
    request without cache. While it `waits_for_tier`, what a lower tier has of it is on the way. While it is
    `parked`, it has nothing to compute until other sequences of its request have come as far. It is a `suspect` if
    a step with it and others failed. `follows` is a sequence that computes what this one needs, up to so many tokens.
    """

    state: RequestState
    index: int
    token_ids: list[int]
    sampler: TokenSampler
    detokenizer: Detokenizer
    table: BlockTable | None = None
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    waits_for_tier: bool = False
    parked: bool = False
    suspect: bool = False
    num_preempted: int = 0
    num_given_up: int = 0
    told_s: float | None = None
    follows: tuple[Sequence, int] | None = None
    drafter: Drafter | None = None
    edit: EditPlan | None = None

    @property
    def rank(self) -> tuple[int, int, int]:
        """Lower goes first among those that run."""
        return -self.state.urgency, self.state.arrival, self.index

    @property
    def num_prompt_tokens(self) -> int:
        return self.state.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose keys and values have not been computed."""
        return len(self.token_ids) - (self.table.num_tokens if self.table else 0)

    @property
    def held_block_ids(self) -> list[int]:
        """The sealed blocks that it holds."""
        return [] if self.table is None else self.table.block_ids

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def awaits_forks(self) -> bool:
        """Whether this sequence still stands for the whole request, whose other answers fork from it."""
        return (
            self.index == 0
            and self.state.request.params.width > 1
            and len(self.token_ids) == self.num_prompt_tokens
        )

    @property
    def num_places(self) -> int:
        """Places among the running that it takes, those of its forks to come included."""
        return self.state.request.params.width if self.awaits_forks else 1

    def take(
        self, sample: Sample, *, eos_token_ids: frozenset[int], context: int
    ) -> tuple[str, FinishReason | None]:
        """Adds a sampled token; returns the text that it completes, and why the answer ends with it if it does."""
        params, token_id = self.state.request.params, sample.token_id
        self.token_ids.append(token_id)
        self.sampler.accept(token_id)
        self.logprobs += sample.logprobs
        if token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos):
            return "", "stop"
        text = self.detokenizer.push(token_id)
        if self.detokenizer.stopped is not None:
            return text, "stop"
        if (
            params.max_tokens is not None
            and len(self.token_ids) - self.num_prompt_tokens >= params.max_tokens
        ):
            return text, "length"
        if len(self.token_ids) >= context:
            self.state.notes.append(
                f"The answer ends here: the context window of {context:,} tokens is full."
            )
            return text, "length"
        return text, None

    def choice(self) -> Choice:
        """The answer as it is now."""
        assert self.finish_reason is not None
        generated = self.generated_ids
        stop: str | int | None = None
        if self.finish_reason == "stop":
            stop = self.detokenizer.stopped if self.detokenizer.stopped is not None else generated[-1]
        wants_logprobs = self.state.request.params.logprobs is not None or self.state.is_ranked
        return Choice(
            index=self.index,
            text=self.text,
            token_ids=tuple(generated),
            finish_reason=self.finish_reason,
            stop=stop,
            logprobs=tuple(self.logprobs) if wants_logprobs else None,
        )
