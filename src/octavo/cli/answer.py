"""One answer, streamed to the terminal. Ctrl-C stops it, and what was generated is kept."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.cli import render
from octavo.cli.terminal import Terminal
from octavo.engine.messages import Delta, Event, Progress, Reply
from octavo.errors import EngineStopped

if TYPE_CHECKING:
    from octavo.sessions.engine import Engine


def give_answer(
    engine: Engine, events: Iterator[Event], terminal: Terminal, sampling: dict[str, Any]
) -> Reply:
    """Prints the answer as it comes, then what there is to say about it.

    Raises:
        KeyboardInterrupt: Ctrl-C before the first token, or a second time before the engine has stopped.
        OctavoError: as the stream does.
    """
    try:
        reply = _stream(engine.abort, events, terminal)
    finally:
        terminal.end_answer()
    decode = _decoder(engine)
    if terminal.json:
        terminal.print_json(render.reply_object(reply, decode))
        return reply
    logprobs = reply.choices[0].logprobs
    if logprobs is not None:
        terminal.say("\n".join(render.logprob_lines(logprobs, decode)))
    for note in reply.notes:
        terminal.say(note)
    ending = render.ending(reply, sampling["max_tokens"])
    if ending is not None:
        terminal.remark(ending)
    # That nothing like a first prompt was known goes without saying.
    if reply.why is not None and reply.why.cause != "new":
        terminal.remark(reply.why.message)
    terminal.remark(render.summary(reply, temperature=sampling["temperature"]))
    return reply


def _stream(abort: Callable[[str], None], events: Iterator[Event], terminal: Terminal) -> Reply:
    stopper = _Stopper(abort)
    try:
        with terminal.bars() as bars, stopper.on_ctrl_c():
            for event in events:
                if isinstance(event, Progress):
                    bars("prompt", event.num_computed_tokens, event.num_prompt_tokens)
                elif isinstance(event, Delta):
                    bars.close()
                    stopper.request_id = event.request_id
                    terminal.answer(event.text)
                    if event.reply is not None:
                        return event.reply
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()
    raise EngineStopped("The engine ended the answer without a reply.")


class _Stopper:
    """What Ctrl-C does: it asks the engine to end the answer, which then still gives a reply.

    Before anything was generated, and when the engine does not follow, it interrupts as usual.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._asked = False
        self.request_id: str | None = None

    def _stop(self, *_: object) -> None:
        if self.request_id is None or self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._abort(self.request_id)

    @contextmanager
    def on_ctrl_c(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _decoder(engine: Engine) -> render.Decode:
    """The text of single tokens, those of a multi-token character as replacement characters."""
    return lambda token_id: str(engine.tokenizer.decode([token_id]))
