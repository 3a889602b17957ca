"""`octavo batch`: requests from a file."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.load import opened
from octavo.cli.options import EngineOptions, Model, grouped
from octavo.cli.render import count
from octavo.cli.terminal import Terminal
from octavo.errors import InvalidRequest


@grouped
def batch(
    model: Model,
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            show_default=False,
            help="Requests, an object a line with custom_id, url and body.",
        ),
    ],
    engine: EngineOptions,
    answers: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Where answers go, a line each as they come. Without it, FILE with .answers before its ending.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Answer the requests of a file.

    The lines are those of OpenAI's batches. Requests that begin alike are answered one after the other, so that
    what they share is computed once; so the answers come in another order. When it is started again, it goes on
    behind the answers that are there, and tries those again that were errors. The exit code is 1 if there are errors.
    """
    settings = engine.settings()
    from octavo.server.batch import answer_batch, answered, read_batch

    lines = read_batch(requests)
    path = answers or requests.with_name(f"{requests.stem}.answers{requests.suffix or '.jsonl'}")
    if path.resolve() == requests.resolve():
        raise InvalidRequest(
            f"The answers would take the place of the requests in {path}. Name another file."
        )
    done = answered(path)
    left = [line for line in lines if line.custom_id not in done]
    terminal = Terminal()
    if not left:
        terminal.say(f"All {len(lines)} requests are answered already, in {path}.")
        return 0
    try:
        output = path.open("a", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"The answers cannot be written to {path}: {error}.") from error
    with output, opened(model, settings, terminal) as llm:
        from octavo.server.app import create_app
        from octavo.server.models import Models
        from octavo.server.settings import ServerSettings
        from octavo.server.tenants import Keys

        logging.getLogger("octavo.server").setLevel(logging.ERROR)
        server = ServerSettings(max_body_bytes=1 << 40)
        app = create_app(Models([llm], server), server, Keys())
        with terminal.bars() as bars:

            def told(number: int, _: bool) -> None:
                bars("batch", number, len(left))

            running = llm.config.max_running
            num_failed = asyncio.run(answer_batch(app, left, output, max_running=running, told=told))
    skipped = f", {len(lines) - len(left)} were there" if len(left) < len(lines) else ""
    failed = f", {num_failed} of them errors" if num_failed else ""
    terminal.say(f"{count(len(left), 'request')} answered{failed}{skipped}. The answers are in {path}.")
    return 1 if num_failed else 0
