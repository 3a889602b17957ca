"""What goes into the engine and what comes out: plain values, nothing shared with the caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from octavo.config import Retention, SamplingParams
from octavo.kv.storage.tier import TierReport

if TYPE_CHECKING:
    from octavo.engine.constraint import Constraint

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]

MAX_URGENCY = 4
"""Urgencies go from its negative up to it."""

WhyCause = Literal[
    "new",  # nothing like it was computed before
    "below_one_block",  # the shared part ends inside a block whose raw tail is gone
    "changed_token",  # an earlier sequence shares the beginning, then differs
    "dropped_text",  # an earlier sequence has more at this place, and then goes on alike
    "evicted",  # it was there and left memory
    "expired",  # it was there for as long as it was to be kept (ttl_s)
    "cleared",  # the cache was cleared since
    "other_settings",  # it is kept for another model, or for other settings or versions
    "other_tenant",  # it was computed for somebody else; told by `Engine.recent` only, never to a tenant
    "no_cache",  # the cache is switched off
    "preempted",  # computed, given up under pressure, computed again
    "context_dropped",  # whole turns were dropped to fit the window
]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be answered.

    Attributes:
        cache_namespace: separates tenants: nothing is shared across it.
        cache: whether what is known is used, and what is computed kept.
        ephemeral: nothing that it computes is kept when it has ended, in memory or on disk.
        disk: whether what it computes may go to disk.
        retention: how long what it computes is worth keeping.
        reuse: `approximate` takes text behind an edit over without computing it again; see `octavo.engine.edits`.
        constraint: the grammar that the answer follows.
        shown_specials: special tokens whose text is part of the answer's text.
        prompt_logprobs: how many alternatives to report for each token of the prompt; every token is computed for it,
            and can be reused afterwards.
        urgency: from -4 to 4. The more urgent request gets the next place, and gives its own up last. Whoever
            was overtaken by 32 later requests is next whatever their urgency is.
        timeout_s: seconds from its arrival after which it ends with what it has, and finish reason `timeout`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_namespace: str = ""
    cache: bool = True
    ephemeral: bool = False
    disk: bool = True
    retention: Retention = field(default_factory=Retention)
    reuse: Literal["exact", "approximate"] = "exact"
    constraint: Constraint | None = None
    shown_specials: tuple[str, ...] = ()
    prompt_logprobs: int | None = None
    urgency: int = 0
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt differs from the most similar earlier one of its tenant, as text.

    `position` is that of the first token that differs, `before` the end of what both have up to there, and
    `earlier` and `now` what each has from there on, some words of it.
    """

    position: int
    before: str
    earlier: str
    now: str


@dataclass(frozen=True, slots=True)
class Advice:
    """How the prompt could have been laid out to be reused.

    `num_tokens` behind the place where it differs are those of the earlier prompt too. With what changed behind them
    and not before, they would not have been computed again, which took about `saved_s`.
    """

    num_tokens: int
    saved_s: float
    message: str


@dataclass(frozen=True, slots=True)
class Why:
    """Why less than every earlier token was reused.

    `position` is the first prompt token that had to be computed again although it, or a token in its
    place, had been computed before; `num_recomputed_tokens` counts those that were known and computed again.
    `cost_s` is how long computing what could have been reused took, its share of the time in which the prompt was
    read; for a changed or dropped token that includes what is behind it and as it was before.
    """

    cause: WhyCause
    position: int
    num_recomputed_tokens: int
    message: str
    cost_s: float = 0.0
    difference: Difference | None = None
    advice: Advice | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `prompt_tokens == cached_tokens + computed_tokens` with the cache on.

    Without the cache `computed_tokens` counts every token of every step. Of the cached tokens, `loaded_tokens`
    came from the disk. With `reuse="approximate"`, `approximate_tokens` of the prompt were neither cached nor
    computed, but taken over from behind an edit. Of `drafted_tokens`, which were guessed from earlier text and
    computed beside the answer's own, `accepted_tokens` are part of the answer.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    loaded_tokens: int = 0
    approximate_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, and decoded tokens a second (0.0 when a single token was generated)."""

    queue_s: float
    prefill_s: float
    ttft_s: float
    total_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes: weights apart from the key-value cache.

    `kv_allocated_bytes` is held from the system; `kv_used_bytes` belongs to running sequences;
    `kv_reusable_bytes` is kept for later hits; `kv_budget_bytes` is never passed. `kv_format` is how full
    blocks are encoded, which `kv_bytes_per_token` follows from. `workspace_bytes` includes the disk tier's.
    `weights` is how the weights of linear layers are held, those that take most first: `Q4_1, Q8_0`.
    """

    weights_bytes: int
    kv_used_bytes: int
    kv_reusable_bytes: int
    kv_allocated_bytes: int
    kv_budget_bytes: int
    kv_bytes_per_token: int
    workspace_bytes: int
    kv_format: str
    disk: TierReport = field(default_factory=TierReport)
    weights: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token's natural-log probability and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt. `stop` is the stop string or token id that ended it.

    `score` is what answers were ranked by, with `best_of` or `beams`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The whole answer, sent once when the last choice has finished.

    `notes` are sentences for a person: what was dropped, why the answer ended early, why it is not `exact`.

    `exact` says that the start-up check found this machine to keep the promise that no bit of an answer
    depends on what was reused or computed beside it.

    `conversation` names the requests that this one goes on from, as `Snapshot` lists them; None if nothing of it is
    kept.

    `prompt_logprobs` has one entry a token of the prompt, the first one None, if the request asked for them.
    """

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    memory: MemoryReport
    seed: int
    why: Why | None = None
    notes: tuple[str, ...] = ()
    exact: bool = True
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    conversation: str | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly generated text of one choice; whole characters only.

    The last delta of a choice has its `finish_reason` and `stop` (see `Choice`), and the last one of a request
    carries the `reply`. `num_cached_tokens` is that of the prompt, in every delta. A delta may have tokens and no
    text yet (a character is still incomplete, or the text may turn out to be a stop string).
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    reply: Reply | None = None
    stop: str | int | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long prefill has got, in prompt tokens."""

    request_id: str
    num_computed_tokens: int
    num_prompt_tokens: int

    @property
    def text(self) -> str:
        """Nothing is generated yet; so the `text` of every event of a stream can be printed."""
        return ""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that could not be finished; the others go on."""

    request_id: str
    error: Exception


Event = Delta | Progress | Failure


def is_last(event: Event) -> bool:
    """Whether its request gets no more events."""
    return isinstance(event, Failure) or (isinstance(event, Delta) and event.reply is not None)
