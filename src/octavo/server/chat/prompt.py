"""From messages to token ids: what the model said itself is read as it said it, everything else as the template
writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.errors import InvalidRequest
from octavo.server.chat.messages import ChatMessage, MessageKeys, Tool
from octavo.server.chat.transcripts import Transcript, TranscriptStore
from octavo.server.tools.formats import ToolFormat, Written
from octavo.sessions.template import ChatTemplate, Segment

HistoryKind = Literal["exact", "retokenised"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is sent.

    Attributes:
        ids: of all messages, up to where the answer begins.
        history: `exact` if every answer among the messages was found as it was generated (or there is none),
            else `retokenised`.
        num_exact_tokens: how many of the first ids are those of a kept prompt and answer.
    """

    ids: tuple[int, ...]
    history: HistoryKind
    num_exact_tokens: int


class ChatHistory:
    """The messages of one request, and the names under which their answers are kept.

    Args:
        namespace: the tenant's.
        scope: the model; see `MessageKeys`.
        store: None switches exact histories off: the template's text is tokenised.
    """

    def __init__(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        *,
        template: ChatTemplate,
        tool_format: ToolFormat,
        namespace: str,
        scope: str,
        store: TranscriptStore | None,
    ) -> None:
        self._messages = messages
        self._template = template
        self._format = tool_format
        self._tools = tools
        self._namespace = namespace
        self._store = store
        self._keys = MessageKeys(f"{scope}\n{tool_format.name}", tools)
        self._names = [self._keys.add(message) for message in messages]

    def prompt(self, prefill: str = "") -> Prompt:
        """The prompt. `prefill` is the beginning of the answer, where the caller has written one.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        written = self._format.written(self._messages, self._tools)
        answers = [index for index, message in enumerate(self._messages) if message.role == "assistant"]
        found = self._latest(answers)
        if found is not None:
            index, transcript = found
            tail = self._tail(written, index)
            if tail is not None:
                piece = self._template.piece_after(
                    list(transcript.answer_ids), transcript.text, self._with(tail, prefill)
                )
                return Prompt(
                    (*transcript.ids, *piece.ids),
                    "exact" if index == answers[-1] else "retokenised",
                    len(transcript.ids),
                )
        segment = self._template.segment(written.messages, written.tools)
        piece = self._template.piece(self._with(segment, prefill))
        return Prompt(piece.ids, "retokenised" if answers else "exact", 0)

    def keep(
        self, prompt: Prompt, answer: ChatMessage, ids: Sequence[int], text: str, *, disk: bool
    ) -> bytes:
        """Remembers an answer: its ids, and its text as it was shown, calls included; returns the name for it."""
        key = self._keys.after(answer)
        if self._store is not None:
            transcript = Transcript((*prompt.ids, *ids), len(ids), text)
            self._store.put(self._namespace, key, transcript, disk=disk)
        return key

    def _latest(self, answers: Sequence[int]) -> tuple[int, Transcript] | None:
        """The latest answer that is kept, with the index of its message."""
        if self._store is None:
            return None
        for index in reversed(answers):
            transcript = self._store.get(self._namespace, self._names[index])
            if transcript is not None:
                return index, transcript
        return None

    def _tail(self, written: Written, index: int) -> Segment | None:
        """What the template writes behind an answer; None if it cannot be told apart from the answer."""
        try:
            return self._template.after(written.messages, written.places[index], written.tools)
        except InvalidRequest:
            return None

    def _with(self, segment: Segment, prefill: str) -> Segment:
        if not prefill:
            return segment
        first, *rest = self._template.cut(prefill)
        return (*segment[:-1], segment[-1] + first, *rest)
