"""Chat templates, rendered so that the model's own tokens are never tokenised again.

A template turns a list of messages into text. What the model generated is kept as token ids, so only the
text *around* the answers is taken from the template: the messages are rendered with a placeholder in place
of each answer, and the text before the first placeholder and after the last one is tokenised. Placeholders
survive templates that trim or move contents.

Text written by people must not act as a control token: a user who types `<|im_end|>` does not end the turn.
Contents are rendered and tokenised together with the template, which gives the ids that the model was
trained on, except where a content spells a control token: there the text is cut after the token's first
character and the two sides are tokenised apart. Ordinary text is therefore tokenised exactly as the
template's plain rendering is. Control tokens are the special tokens, the end tokens, and added tokens of
markup (`<tool_response>`) that the template itself writes; the last kind is not guarded in assistant
messages, where templates look for them (`</think>`). Tools are the developer's text and are not guarded.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import InvalidRequest

Message = Mapping[str, Any]
Segment = tuple[str, ...]
"""Text cut where it may not be tokenised across."""

_MARKUP = re.compile(r"\w[^\w\s]|[^\w\s]\w")  # unlike added tokens for runs of spaces or line ends
_ROLE = re.compile(r"[A-Za-z_]+")

FALLBACK = """{{ prefix }}{% for message in messages %}\
{% if message.role == 'assistant' %}\
Assistant:{{ '' if message.content[:1].isspace() else ' ' }}{{ message.content }}{{ '\n' }}\
{% elif message.role == 'user' %}User: {{ message.content }}{{ '\n' }}\
{% else %}{{ message.content }}{{ '\n\n' }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
"""For tokenizers without a chat template, which are mostly those of base models."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What the template writes before an answer, as sent to the model.

    Attributes:
        text: the text that `ids` stand for.
        absorbed: the beginning of the template's text that the answer before had already said itself (its
            end-of-turn token, or a stop string) and that `text` and `ids` therefore leave out.
    """

    text: str
    ids: tuple[int, ...]
    absorbed: str = ""


class ChatTemplate:
    """A tokenizer's chat template.

    Attributes:
        note: a sentence for the user when the model has no template of its own, else `None`.
        stop: stop strings that this template needs, because nothing else ends an answer.
        source: the template itself, in Jinja.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> None:
        """Takes a fast tokenizer of transformers, and the ids that end an answer."""
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._nonce = f"\ue000{secrets.token_hex(12)}"  # nobody can write it into a message
        self._options: dict[str, Any] = {}
        self.note: str | None = None
        self.stop: tuple[str, ...] = ()
        source = tokenizer.chat_template
        if not source:
            source = FALLBACK
            # Base models that expect a BOS token get it from the tokenizer's own rule.
            starts = list(tokenizer.encode(""))[:1] == [tokenizer.bos_token_id]
            self._options = {"chat_template": FALLBACK, "prefix": tokenizer.bos_token if starts else ""}
            self.note = (
                "This model has no chat template, so messages are written as 'User: ...' and "
                "'Assistant: ...'."
            )
            self.stop = ("\nUser:",)
        sources = self.source = "".join(source.values()) if isinstance(source, dict) else str(source)
        added = tokenizer.added_tokens_decoder
        special = {
            str(token.content) for id_, token in added.items() if token.special or id_ in self._eos_token_ids
        }
        written = {
            str(token.content)
            for token in added.values()
            if str(token.content) in sources and _MARKUP.search(str(token.content))
        }
        self._special = _any_of(special)
        self._control = _any_of(special | written)
        # Text that continues a sequence is tokenised behind a special token, so that tokenizers which put a
        # space before the first word of a text do not put one in the middle of a conversation.
        plain = (
            (id_, str(token.content))
            for id_, token in sorted(added.items())
            if token.special and not (token.lstrip or token.rstrip or token.single_word)
        )
        self._anchor: tuple[int, str] | None = next(plain, None)

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """The template's text of `messages`, up to where the next answer begins.

        Raises:
            InvalidRequest: a message is malformed, or the template refuses the messages.
        """
        _check(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except Exception as error:  # a template is foreign code, which may raise anything
            reason = str(error).rstrip(".") or type(error).__name__
            raise InvalidRequest(f"The model's chat template refuses these messages: {reason}.") from error
        return str(text)

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> Piece:
        """The prompt of a whole list of messages; assistant messages are tokenised as text.

        Raises:
            InvalidRequest: a message is malformed, or the template refuses the messages.
        """
        return self.piece(self.segment(messages, tools))

    def segment(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> Segment:
        """The text of a whole list of messages, up to where the next answer begins.

        Raises:
            InvalidRequest: a message is malformed, or the template refuses the messages.
        """
        _check(messages)
        return self._segment(self.render([self._guard(message) for message in messages], tools))

    def cut(self, answer: str) -> Segment:
        """The text of an answer, cut where it spells a control token."""
        return self._segment(self._guard({"role": "assistant", "content": answer})["content"])

    def around(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> tuple[Segment, Segment]:
        """The text before the first answer and the text after the last one.

        Every assistant message stands for an answer that is kept as ids; its content is not looked at.
        Without one, both are the whole text.

        Raises:
            InvalidRequest: a message is malformed, or the template refuses the messages, or it leaves out
                an answer, so that nothing can be put in its place.
        """
        _check(messages)
        guarded = []
        places: list[str] = []
        for message in messages:
            if message["role"] == "assistant":
                places.append(f"{self._nonce}:{len(places)}\ue001")
                guarded.append({**message, "content": places[-1]})
            else:
                guarded.append(self._guard(message))
        text = self.render(guarded, tools)
        if not places:
            return self._segment(text), self._segment(text)
        if text.count(places[0]) != 1 or text.count(places[-1]) != 1:
            raise InvalidRequest(
                "The model's chat template does not write every answer exactly once, so a conversation "
                "cannot keep the model's own tokens. Use chat() with the whole list of messages instead."
            )
        return self._segment(text.partition(places[0])[0]), self._segment(text.partition(places[-1])[2])

    def after(
        self, messages: Sequence[Message], index: int, tools: list[dict[str, Any]] | None = None
    ) -> Segment:
        """The text behind the answer `messages[index]`, which is kept as ids and not looked at.

        Raises:
            InvalidRequest: as `around` does.
        """
        _check(messages)
        place = f"{self._nonce}:0\ue001"
        text = self.render(
            [
                {"role": "assistant", "content": place} if number == index else self._guard(message)
                for number, message in enumerate(messages)
            ],
            tools,
        )
        if text.count(place) != 1:
            raise InvalidRequest("The model's chat template does not write this answer exactly once.")
        return self._segment(text.partition(place)[2])

    def piece(self, segment: Segment) -> Piece:
        """`segment` as the beginning of a sequence."""
        ids = list(self._encode(segment[0]))
        ids += self._continue(segment[1:])
        return Piece("".join(segment), tuple(ids))

    def piece_after(self, answer_ids: Sequence[int], answer_text: str, segment: Segment) -> Piece:
        """`segment` as what follows an answer of `answer_ids`, of which `answer_text` was shown.

        What the answer's ids say already is not said twice: an end-of-turn token that the template writes
        too, or the stop string that ended the answer.
        """
        text = "".join(segment)
        if answer_ids and answer_ids[-1] in self._eos_token_ids:
            end = self.decode(answer_ids[-1:])
            ids = self._continue(segment)
            blank = len(text) - len(text.lstrip())
            if text.startswith(end, blank) and answer_ids[-1] in ids:
                cut = ids.index(answer_ids[-1]) + 1
                return Piece(text[blank + len(end) :], tuple(ids[cut:]), absorbed=end)
            return Piece(text, tuple(ids))
        spoken = self._decode(answer_ids)
        rest = spoken[len(answer_text) :] if spoken.startswith(answer_text) else ""
        if rest and segment[0].startswith(rest):
            segment = (segment[0][len(rest) :], *segment[1:])
            return Piece("".join(segment), tuple(self._continue(segment)), absorbed=rest)
        return Piece(text, tuple(self._continue(segment)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` in the middle of a sequence, special tokens included."""
        if self._anchor is None:
            return self._decode(ids)
        return self._decode([self._anchor[0], *ids])[len(self._anchor[1]) :]

    def token_at(self, ids: Sequence[int], offset: int) -> int:
        """Index of the first of `ids` whose text goes past character `offset`."""
        low, high = 0, max(len(ids) - 1, 0)
        while low < high:
            middle = (low + high) // 2
            if len(self.decode(ids[: middle + 1])) > offset:
                high = middle
            else:
                low = middle + 1
        return low

    def _guard(self, message: Message) -> dict[str, Any]:
        """`message` with a mark after the first character of each control token in its content and calls."""
        pattern = self._special if message["role"] == "assistant" else self._control
        mark = f"{self._nonce}\ue001"

        def guarded(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(lambda match: match[0] + mark, value)
            if isinstance(value, Mapping):
                return {guarded(key): guarded(item) for key, item in value.items()}
            return [guarded(item) for item in value] if isinstance(value, list) else value

        calls = {"tool_calls": guarded(message["tool_calls"])} if message.get("tool_calls") else {}
        return {**message, "content": guarded(message["content"]), **calls}

    def _segment(self, text: str) -> Segment:
        return tuple(text.split(f"{self._nonce}\ue001"))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _continue(self, segment: Segment) -> list[int]:
        """Ids of `segment` in the middle of a sequence."""
        if self._anchor is None:
            return [id_ for text in segment for id_ in self._encode(text)]
        return [id_ for text in segment for id_ in self._encode(self._anchor[1] + text)[1:]]

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each of `tokens`, also where two of them overlap."""
    spelled = "|".join(map(re.escape, sorted(tokens)))
    return re.compile(f"(?={spelled}).", re.DOTALL) if spelled else re.compile(r"(?!)")


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidRequest(
            "There are no messages; give at least one, for example {'role': 'user', 'content': 'Hi'}."
        )
    for number, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
            raise InvalidRequest(
                f"Message {number} has the role {role!r}; write 'system', 'user' or 'assistant'."
            )
        if not isinstance(content, str):
            raise InvalidRequest(
                f"The content of message {number} is a {type(content).__name__}; it must be text."
            )
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The content of message {number} is not valid Unicode: character {error.start} is half of a "
                "surrogate pair. Decode the text with errors='replace' before sending it."
            ) from error
