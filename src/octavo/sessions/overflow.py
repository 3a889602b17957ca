"""Making a prompt fit the context window, and saying what was done for it."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import OverflowChoice, SamplingParams
from octavo.engine.messages import Reply, Why
from octavo.errors import PromptTooLong
from octavo.sessions.history import Draft, History, common_length, turn_count


@dataclass(frozen=True, slots=True)
class Fitted:
    """A draft that fits the window, and what was dropped for it.

    Attributes:
        draft: the turn to be answered.
        num_dropped_turns: how many of the oldest turns it leaves out.
        num_dropped_tokens: how much shorter its prompt is for that.
        first_moved: the first prompt token that is not where it was before turns were dropped.
    """

    draft: Draft
    num_dropped_turns: int = 0
    num_dropped_tokens: int = 0
    first_moved: int = 0


def fit(
    history: History, user: str, *, context: int, params: SamplingParams, overflow: OverflowChoice
) -> Fitted:
    """The prompt that asks `user`, so that it fits a window of `context` tokens.

    With `drop-oldest`, whole oldest turns are dropped until there is room for an answer of `max_tokens`, or
    of a quarter of the window if that is less, or until no older turn is left.

    Raises:
        PromptTooLong: it does not fit; nothing has been computed.
        InvalidRequest: the template refuses the messages.
    """
    draft = whole = history.ask(user)
    num_dropped = 0
    if overflow == "drop-oldest":
        quarter = max(context // 4, 1)
        reserve = quarter if params.max_tokens is None else min(params.max_tokens, quarter)
        while len(draft.ids) + reserve > context and num_dropped < len(history.turns):
            num_dropped += 1
            draft = history.ask(user, drop=num_dropped)
    num_tokens = len(draft.ids)
    if num_tokens >= context:
        raise PromptTooLong(num_tokens, context, _advice(history, user, context, overflow))
    if not num_dropped:
        return Fitted(draft)
    return Fitted(draft, num_dropped, len(whole.ids) - num_tokens, common_length(whole.ids, draft.ids))


def dropped_note(fitted: Fitted, context: int) -> str:
    """The sentence about dropped turns; some must have been."""
    oldest = "oldest turn" if fitted.num_dropped_turns == 1 else f"{fitted.num_dropped_turns} oldest turns"
    return (
        f"Dropped the {oldest} ({fitted.num_dropped_tokens:,} tokens) to fit "
        f"the context window of {context:,} tokens."
    )


def dropped_why(fitted: Fitted, reply: Reply) -> Why:
    """Why the turns that are left were computed again after others were dropped."""
    kept = len(fitted.draft.history.ids) - fitted.first_moved
    return Why(
        "context_dropped",
        fitted.first_moved,
        max(0, min(kept, reply.usage.computed_tokens)),
        f"{turn_count(fitted.num_dropped_turns)} dropped to fit the context window, so what was left moved "
        f"and was computed again from token {fitted.first_moved:,} on.",
    )


def _advice(history: History, user: str, context: int, overflow: OverflowChoice) -> str:
    alone = history.ask(user, drop=len(history.turns))
    if overflow == "drop-oldest" or len(alone.ids) >= context:
        return "The message alone is too long, with the system prompt. Shorten it."
    return (
        "Rewind some turns, start a new conversation, or let the oldest turns go "
        "(overflow='drop-oldest', --overflow drop-oldest)."
    )
