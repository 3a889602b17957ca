"""A conversation with a model: each turn goes on from exactly the tokens of the turns before."""

from __future__ import annotations

import copy
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol, Self

from octavo.config import OverflowChoice, Retention, SamplingParams
from octavo.engine.engine import make_params
from octavo.engine.messages import Delta, Event, FinishReason, Reply
from octavo.errors import EngineStopped, InvalidConversation, InvalidRequest
from octavo.sessions import saved
from octavo.sessions.history import History, TemplateDifference, check_turn, turn_count
from octavo.sessions.overflow import Fitted, dropped_note, dropped_why, fit
from octavo.sessions.template import ChatTemplate, Message


class ChatEngine(Protocol):
    """What a conversation needs of an engine."""

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def chat_template(self) -> ChatTemplate: ...
    def stream(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Iterator[Event]: ...
    def unpin(self, name: str, *, cache_namespace: str = "") -> bool: ...
    def forget(self, cache_namespace: str, *, on_disk: bool = True) -> int: ...


class Conversation:
    """Turns of a user and the model. Made by `Engine.conversation`.

    One answer is streamed at a time. An answer is added to the history when it ends, also when it is
    stopped early: by closing the iterator, by Ctrl-C, or by a failure after its first token. When nothing
    was generated, the history stays as it was.
    """

    def __init__(
        self,
        engine: ChatEngine,
        *,
        system: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        overflow: OverflowChoice = "stop",
        cache_namespace: str = "",
        ephemeral: bool = False,
        pin: bool = False,
        ttl_s: float | None = None,
        priority: int = 0,
        **sampling: Any,
    ) -> None:
        """Starts a conversation.

        Args:
            engine: answers the prompts.
            system: the system prompt; `None` leaves it to the template, which may write one of its own.
            tools: JSON schemas of functions, given to the template; see `leaves_out_tools`.
            overflow: what to do when a prompt does not fit the context window: `stop` refuses it,
                `drop-oldest` drops whole oldest turns and says so in the reply's notes.
            cache_namespace: nothing is shared with requests of another namespace.
            ephemeral: nothing of it reaches the disk, nothing is shared with others, and what it has computed is
                discarded when it is closed.
            pin: hold what it has computed in memory until it is closed.
            ttl_s, priority: see `Retention`.
            **sampling: fields of `SamplingParams`, the defaults of every turn.

        Raises:
            InvalidRequest: a parameter is invalid, or the template refuses the system prompt or the tools.
        """
        if overflow not in ("stop", "drop-oldest"):
            raise InvalidRequest(f"overflow is {overflow!r}; it must be 'stop' or 'drop-oldest'.")
        self._engine = engine
        self._overflow = overflow
        self._cache_namespace = cache_namespace
        self._sampling = sampling
        self._ephemeral = ephemeral
        if ephemeral:
            self._cache_namespace += f"/ephemeral-{secrets.token_hex(16)}"
        self._pin = f"conversation-{secrets.token_hex(16)}" if pin else None
        retention = Retention(self._pin, ttl_s, priority)
        self._keeping: dict[str, Any] = {} if not ephemeral else {"disk": False}
        if retention != Retention():
            self._keeping.update(pin=self._pin, ttl_s=ttl_s, priority=priority)
        self._params({})
        frozen = None if tools is None else tuple(copy.deepcopy(tools))
        self._history = History(engine.chat_template, system, frozen)
        if system is not None or tools is not None:
            self._history.ask(
                "Hello"
            )  # a template without room for them refuses them here, not at the first turn
        self._seen: list[int] = []  # what the engine was sent and answered, to check the next prompt against
        self._difference: TemplateDifference | None = None
        self._untold: list[str] = []  # notes of answers that were stopped and so had no reply
        self._closed = False
        self._streaming = threading.Lock()

    @property
    def messages(self) -> list[Message]:
        """The conversation as it was shown: a list of `{"role": ..., "content": ...}`."""
        return self._history.messages

    @property
    def history(self) -> History:
        """The turns so far, with their ids and finish reasons: a value that does not change."""
        return self._history

    @property
    def cache_namespace(self) -> str:
        """Whose it is: nothing is shared with requests of another namespace."""
        return self._cache_namespace

    @property
    def is_ephemeral(self) -> bool:
        """Whether nothing of it may be kept."""
        return self._ephemeral

    @property
    def num_turns(self) -> int:
        return len(self._history.turns)

    @property
    def token_ids(self) -> list[int]:
        """Everything the model saw and said, in order. The next prompt starts with it."""
        return self._history.ids

    @property
    def difference(self) -> TemplateDifference | None:
        """Where the template would have written the latest prompt otherwise, if it would."""
        return self._difference

    @property
    def leaves_out_tools(self) -> bool:
        """Whether the template writes nothing of the conversation's tools, so that the model cannot know them.

        The first reply has a note about it.
        """
        return self._history.leaves_out_tools

    def say(self, text: str, **sampling: Any) -> Iterator[Event]:
        """Streams the answer to `text`. The last `Delta` carries the reply.

        Nothing happens before the first event is asked for.

        Raises (at the first event):
            PromptTooLong: the prompt does not fit the context window.
            InvalidRequest: the template refuses the message.
            InvalidConversation: the conversation is closed, or an answer is still being streamed.
        """
        return self._stream(None, text, self._params(sampling))

    def ask(self, text: str, **sampling: Any) -> Reply:
        """The whole answer to `text`. Raises as `say` does."""
        return _last_reply(self.say(text, **sampling))

    def edit(self, turn: int, text: str, **sampling: Any) -> Iterator[Event]:
        """Says `text` in place of turn `turn`, counted from 1; that turn and all later ones are dropped.

        They are dropped when the new answer begins, so a prompt that is refused changes nothing.

        Raises:
            InvalidConversation: there is no such turn. At the first event, as `say` does.
        """
        check_turn(turn, self.num_turns)
        return self._stream(turn, text, self._params(sampling))

    def rewind(self, num_turns: int = 1) -> None:
        """Drops the latest `num_turns` turns.

        Raises:
            InvalidConversation: there are not so many, an answer is being streamed, or it is closed.
        """
        with self._exclusive():
            if not 1 <= num_turns <= self.num_turns:
                raise InvalidConversation(
                    f"The conversation has {turn_count(self.num_turns)}, so {num_turns} cannot be rewound."
                )
            self._set(self._history.kept(self.num_turns - num_turns))

    def fork(self) -> Conversation:
        """An independent conversation with the same turns; what is computed is shared.

        An answer that is being streamed is not part of it.

        Raises:
            InvalidConversation: the conversation is closed.
        """
        self._check_open()
        other = copy.copy(self)
        other._streaming = threading.Lock()
        if self._pin is not None:
            other._pin = f"conversation-{secrets.token_hex(16)}"
            other._keeping = {**self._keeping, "pin": other._pin}
        return other

    def close(self) -> None:
        """Ends the conversation. Its tokens stay in the cache, to be reused or evicted, unless it is ephemeral.

        An answer that is being streamed goes on; what was held of it is let go when it ends.
        """
        if self._closed:
            return
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        """Nothing is held of it any more, and nothing is left of it if it is ephemeral."""
        with suppress(EngineStopped):  # then nothing is left of it anyway
            if self._pin is not None:
                self._engine.unpin(self._pin, cache_namespace=self._cache_namespace)
            if self._ephemeral:
                self._engine.forget(self._cache_namespace, on_disk=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def to_dict(self) -> dict[str, Any]:
        """The conversation as JSON values, for `from_dict`; without sampling defaults and namespace."""
        return saved.dump(
            self._history, self._overflow, model=self._engine.name, tokenizer=self._engine.tokenizer
        )

    @classmethod
    def from_dict(cls, engine: ChatEngine, data: Mapping[str, Any], **options: Any) -> Self:
        """The conversation that `to_dict` wrote, token for token.

        Args:
            engine: goes on with it.
            data: what `to_dict` wrote.
            **options: as for a new conversation; `system` and `tools` stay those of `data`, and so does `overflow`
                unless it is given.

        Raises:
            InvalidConversation: `data` is damaged, or was written with another tokenizer.
        """
        history, overflow = saved.load(
            data, engine.chat_template, model=engine.name, tokenizer=engine.tokenizer
        )
        conversation = cls(engine, **{"overflow": overflow, **options})
        conversation._set(history)
        return conversation

    def _params(self, sampling: Mapping[str, Any]) -> SamplingParams:
        params = make_params({**self._sampling, **sampling})
        if params.n != 1:
            raise InvalidRequest(
                f"n is {params.n}, but a conversation goes on from one answer. For several answers use "
                f"chat(messages, n={params.n}) or generate(prompt, n={params.n})."
            )
        return replace(params, stop=(*params.stop, *self._engine.chat_template.stop))

    def _stream(self, turn: int | None, text: str, params: SamplingParams) -> Iterator[Event]:
        with self._exclusive():
            before = self._history
            if turn is not None:
                check_turn(turn, self.num_turns)
                before = before.kept(turn - 1)
            fitted = fit(before, text, context=self._engine.context, params=params, overflow=self._overflow)
            draft = fitted.draft
            prompt = draft.ids
            if turn is None and not fitted.num_dropped_turns:
                assert prompt[: len(self._seen)] == self._seen, (
                    "a prompt does not start with the turns before"
                )
            difference = draft.difference()
            notes = [*self._untold, *self._notes(fitted, difference)]
            ids: list[int] = []
            shown: list[str] = []
            ended: FinishReason | None = "abort"  # None once the reply has come
            events = self._engine.stream(
                prompt, params, cache_namespace=self._cache_namespace, **self._keeping
            )
            try:
                for event in events:
                    if isinstance(event, Delta):
                        ids += event.token_ids
                        shown.append(event.text)
                        if event.reply is not None:
                            ended, self._untold = None, []
                            reply = replace(event.reply, notes=(*notes, *event.reply.notes))
                            if fitted.num_dropped_turns:
                                reply = replace(reply, why=dropped_why(fitted, reply))
                            self._set(
                                draft.answered(reply.token_ids, reply.text, reply.finish_reason), difference
                            )
                            event = replace(event, reply=reply)
                    yield event
            except Exception:
                ended = ended and "error"
                raise
            finally:
                if ended is not None and ids:
                    self._set(draft.answered(ids, "".join(shown), ended), difference)
                    self._untold = notes
                close = getattr(events, "close", None)
                if close is not None:
                    close()
                if self._closed:  # meanwhile: what this answer has left is not held either
                    self._let_go()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._check_open()
        if not self._streaming.acquire(blocking=False):
            raise InvalidConversation(
                "An answer is still being streamed. Read it to its end or close its iterator first; "
                "fork() makes a second conversation that can answer at the same time."
            )
        try:
            yield
        finally:
            self._streaming.release()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidConversation("The conversation is closed; start a new one.")

    def _set(self, history: History, difference: TemplateDifference | None = None) -> None:
        self._history = history
        self._seen = history.ids
        self._difference = difference

    def _notes(self, fitted: Fitted, difference: TemplateDifference | None) -> list[str]:
        """What there is to say before the answer; a difference is told once, not at every turn."""
        notes = []
        if fitted.num_dropped_turns:
            notes.append(dropped_note(fitted, self._engine.context))
        template = self._engine.chat_template
        if template.note is not None and not self._history.turns:
            notes.append(template.note)
        if not self._history.turns and self._history.leaves_out_tools:
            notes.append(
                "The model's chat template has no place for tools, so the model does not know of those given. "
                "Describe them in the system prompt, or take a model whose template writes them."
            )
        known = self._difference
        if difference is not None and (known is None or known.position != difference.position):
            notes.append(difference.message)
        return notes


def _last_reply(events: Iterator[Event]) -> Reply:
    reply = None
    for event in events:
        if isinstance(event, Delta) and event.reply is not None:
            reply = event.reply
    assert reply is not None, "a stream ended without a reply"
    return reply
