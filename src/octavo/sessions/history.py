"""A conversation's turns, as the model saw and said them. Immutable: each change makes a new history.

The ids of a turn are kept when it is added and never derived again, so the next prompt always starts with
everything before it, whatever the template would now write. Where the template would write something
else, `difference` finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.engine.messages import FinishReason
from octavo.errors import InvalidConversation, InvalidRequest
from octavo.sessions.template import ChatTemplate, Message, Piece

_SNIPPET = 40


@dataclass(frozen=True, slots=True)
class TemplateDifference:
    """Where the template's own rendering of the conversation leaves what the model saw and said.

    Attributes:
        position: the first character that differs.
        token_index: the token of the conversation that holds it.
        expected: what the model saw or said from there on (the first characters of it).
        rendered: what the template would write instead.
        message: a sentence for a person.
    """

    position: int
    token_index: int
    expected: str
    rendered: str
    message: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message and the answer.

    Attributes:
        user: what the user said.
        piece: what the template wrote before the answer, and its ids.
        answer_ids: the generated ids, end token included if there was one.
        answer_text: the answer as it was shown.
        spoken: the text of all of `answer_ids`.
        finish_reason: why the answer ended.
    """

    user: str
    piece: Piece
    answer_ids: tuple[int, ...]
    answer_text: str
    spoken: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class History:
    """The system prompt, the tools and the turns of a conversation."""

    template: ChatTemplate
    system: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def ids(self) -> list[int]:
        """Everything the model saw and said, in order."""
        return [id_ for turn in self.turns for ids in (turn.piece.ids, turn.answer_ids) for id_ in ids]

    @property
    def messages(self) -> list[Message]:
        """The conversation as it was shown, system prompt first."""
        return [*self._system(), *_dialogue((turn.user, turn.answer_text) for turn in self.turns)]

    @property
    def leaves_out_tools(self) -> bool:
        """Whether the template writes the same with the tools as without them."""
        if not self.tools:
            return False
        messages = [*self._system(), _user("Hello")]
        return self.template.render(messages, self._tools()) == self.template.render(messages)

    def kept(self, num_turns: int) -> History:
        """The first `num_turns` turns."""
        return replace(self, turns=self.turns[:num_turns])

    def ask(self, user: str, *, drop: int = 0) -> Draft:
        """The prompt that asks `user` after all turns but the `drop` oldest; the system prompt stays.

        When turns are dropped, what comes before the first answer left is rendered anew, and no more.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        turns = self.turns[drop:]
        answers = _dialogue((turn.user, "") for turn in turns)
        head, tail = self.template.around([*self._system(), *answers, _user(user)], self._tools())
        if not turns:
            return Draft(replace(self, turns=()), user, self.template.piece(tail))
        if drop:
            turns = (replace(turns[0], piece=self.template.piece(head)), *turns[1:])
        last = turns[-1]
        piece = self.template.piece_after(last.answer_ids, last.answer_text, tail)
        return Draft(replace(self, turns=turns), user, piece)

    def _system(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _tools(self) -> list[dict[str, Any]] | None:
        return None if self.tools is None else list(self.tools)


@dataclass(frozen=True, slots=True)
class Draft:
    """A turn that waits for its answer."""

    history: History
    user: str
    piece: Piece

    @property
    def ids(self) -> list[int]:
        """The whole prompt."""
        return [*self.history.ids, *self.piece.ids]

    def answered(self, ids: Sequence[int], text: str, finish_reason: FinishReason) -> History:
        """The history with this turn added."""
        spoken = self.history.template.decode(ids)
        turn = Turn(self.user, self.piece, tuple(ids), text, spoken, finish_reason)
        return replace(self.history, turns=(*self.history.turns, turn))

    def difference(self) -> TemplateDifference | None:
        """Where the template, given the answers' texts, would write another prompt than this one."""
        history = self.history
        turns = history.turns
        if not turns:
            return None
        pieces = [*(turn.piece for turn in turns), self.piece]
        said = (
            turn.spoken.removesuffix(after.absorbed) for turn, after in zip(turns, pieces[1:], strict=True)
        )
        messages = [
            *history._system(),
            *_dialogue(zip((turn.user for turn in turns), said, strict=True)),
            _user(self.user),
        ]
        try:
            rendered = history.template.render(messages, history._tools())
        except InvalidRequest as error:  # a report must not end a conversation that goes on without it
            return TemplateDifference(0, 0, "", "", f"{error} The model's own tokens are kept.")
        parts: list[tuple[str, tuple[int, ...]]] = []
        for turn in turns:
            parts += [(turn.piece.text, turn.piece.ids), (turn.spoken, turn.answer_ids)]
        parts.append((self.piece.text, self.piece.ids))
        expected = "".join(text for text, _ in parts)
        if rendered == expected:
            return None
        position = common_length(expected, rendered)
        number, token_index = _locate(history.template, parts, position)
        where = f"{'answer' if number % 2 else 'prompt'} of turn {number // 2 + 1}"
        ours, theirs = expected[position:][:_SNIPPET], rendered[position:][:_SNIPPET]
        return TemplateDifference(
            position,
            token_index,
            ours,
            theirs,
            f"The chat template would now write the conversation differently from character {position:,} "
            f"(token {token_index:,}, in the {where}) on: {theirs!r} where the model has {ours!r}. "
            "The model's own tokens are kept, so nothing is computed again.",
        )


def turn_count(number: int) -> str:
    """`1 turn`, `2 turns`."""
    return f"{number} turn" if number == 1 else f"{number} turns"


def check_turn(number: int, num_turns: int) -> None:
    """Raises InvalidConversation unless turn `number`, counted from 1, exists."""
    if not 1 <= number <= num_turns:
        raise InvalidConversation(
            f"There is no turn {number}: the conversation has {turn_count(num_turns)}, counted from 1."
        )


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _dialogue(turns: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Messages of (user's text, answer) pairs."""
    pairs = [(_user(user), {"role": "assistant", "content": answer}) for user, answer in turns]
    return [message for pair in pairs for message in pair]


def _locate(
    template: ChatTemplate, parts: Sequence[tuple[str, tuple[int, ...]]], position: int
) -> tuple[int, int]:
    """Number of the part that holds character `position`, and the index of its token over all parts."""
    num_tokens = 0
    for number, (text, ids) in enumerate(parts):
        if position < len(text):
            return number, num_tokens + template.token_at(ids, position)
        position -= len(text)
        num_tokens += len(ids)
    return len(parts) - 1, num_tokens
