"""`octavo bench chat`: conversations over HTTP, with this engine's server or any other of the same interface."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.terminal import Terminal
from octavo.cli.text import numbers
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.cli.bench_client import ChatFigure


def chat(
    url: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]URL",
            help="A server's address, such as http://127.0.0.1:8000; several take turns within each round.",
        ),
    ],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Without it, the first that a server lists.")
    ] = None,
    chats: Annotated[str, typer.Option(metavar="NUMBERS", help="Conversations at once.")] = "1,4,8",
    turns: Annotated[int, typer.Option(metavar="N", help="Turns of a conversation.", min=1)] = 10,
    words: Annotated[
        int, typer.Option(metavar="N", help="Words of a message, about a token and a third each.", min=1)
    ] = 75,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of an answer at most.", min=1)] = 48,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of exactly that length, where servers can.")
    ] = False,
    repeats: Annotated[int, typer.Option(metavar="N", help="Measured rounds.", min=1)] = 5,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Measure conversations of several turns over any OpenAI-compatible server.

    Every turn sends the whole history, as clients do. The key is read from OPENAI_API_KEY.
    """
    counts = numbers("--chats", chats)
    if min(counts) < 1:
        raise InvalidRequest(f"--chats is {chats!r}; it takes numbers from 1.")
    terminal = Terminal(json=json)
    from octavo.cli.bench_client import ChatSettings, measure

    settings = ChatSettings(model, turns, words, max_tokens, ignore_eos)
    servers = dict(_named(address) for address in url)
    figures = asyncio.run(measure(servers, counts, settings, repeats, terminal.remark))
    if json:
        terminal.print_json(
            {"settings": asdict(settings), "figures": [figure.as_dict() for figure in figures]}
        )
        return
    _print(figures, turns)


def _named(address: str) -> tuple[str, str]:
    name, equals, url = address.partition("=")
    if not equals or "/" in name:
        name, url = address, address
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"--url is {address!r}; it must be like http://127.0.0.1:8000 or name=http://..."
        )
    return name, url.rstrip("/").removesuffix("/v1")


def _print(figures: list[ChatFigure], turns: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in (
        "server",
        "chats",
        "output tok/s",
        "spread",
        "first token, turn 1",
        f"turns 2-{turns}",
        "cached",
    ):
        table.add_column(column, justify="left" if column == "server" else "right")
    for figure in figures:
        first, later, cached = figure.first_ms, figure.later_ms, figure.cached_share
        table.add_row(
            figure.server,
            str(figure.chats),
            f"{figure.tokens_per_s.median:.1f}",
            f"{figure.tokens_per_s.spread:.0%}",
            f"{first:.0f} ms",
            "" if later is None else f"{later:.0f} ms",
            "not told" if cached is None else f"{cached:.0%}",
        )
    Console(highlight=False, markup=False).print(table)
