"""`octavo run`: one answer to one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.answer import give_answer
from octavo.cli.load import opened
from octavo.cli.options import EngineOptions, Model, OutputOptions, SamplingOptions, System, grouped
from octavo.cli.terminal import Terminal
from octavo.cli.text import check_text, read_prompt
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.engine.messages import Event
    from octavo.sessions.engine import Engine

INTERRUPTED = 130


@grouped
def run(
    model: Model,
    engine: EngineOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            show_default=False,
            help="What to answer. With - or without it, standard input, less one line break at its end.",
        ),
    ] = None,
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the model's chat template.")
    ] = False,
) -> int:
    """Answer one prompt.

    The prompt is written in the model's chat template, if it has one. The answer goes to standard output
    as it comes, and everything else to standard error.
    """
    settings, params = engine.settings(), sampling.settings()
    if raw and system is not None:
        raise InvalidRequest(
            "--raw sends the prompt as it is, so it takes no --system. Leave one of them out."
        )
    if system is not None:
        check_text(system)
    text = read_prompt(prompt, model)
    terminal = Terminal(json=output.json, quiet=output.quiet)
    with opened(model, settings, terminal) as llm:
        events = _events(llm, text, params, raw=raw, system=system)
        reply = give_answer(llm, events, terminal, params)
    return INTERRUPTED if reply.finish_reason == "abort" else 0


def _events(
    engine: Engine, text: str, params: dict[str, Any], *, raw: bool, system: str | None
) -> Iterator[Event]:
    if not raw and engine.tokenizer.chat_template:
        return engine.conversation(system=system, **params).say(text)
    if system is not None:
        raise InvalidRequest(
            f"{engine.name} has no chat template, so it takes no --system. Write everything into the prompt."
        )
    return engine.stream(text, **params)
