"""`octavo bench`: measurements of the engine and of its parts."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from octavo.cli.bench_chat import chat
from octavo.cli.bench_model import model
from octavo.cli.options import EngineOptions, Model, grouped
from octavo.cli.terminal import Terminal

bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure the engine or a part of it.")


@bench.callback()
def _bench() -> None:
    """Measure the engine or a part of it."""


bench.command()(model)
bench.command()(chat)


@bench.command()
def attention(
    context: Annotated[int, typer.Option(help="Tokens of history.", min=32)] = 8192,
    repeats: Annotated[int, typer.Option(help="Measured rounds.", min=1)] = 9,
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 2,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Decode attention alone: one sequence, smollm2's shape, all layers, every format."""
    from octavo.cli.bench_attention import run
    from octavo.formats import FORMATS

    figures = run(list(FORMATS), context, repeats, threads)
    if json_:
        print(json.dumps({"context": context, "threads": threads, "figures": [f.as_dict() for f in figures]}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"Decode attention, {context:,} tokens, {threads} threads, all layers of smollm2's shape"
    )
    for column in ("format", "ms", "spread ms", "GB/s", "read GB/s", "of read"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for figure in figures:
        known = figure.read_gbps == figure.read_gbps
        table.add_row(
            figure.name,
            f"{figure.ms:.2f}",
            f"{figure.spread_ms:.2f}",
            f"{figure.gbps:.1f}",
            f"{figure.read_gbps:.1f}" if known else "",
            f"{figure.of_read:.0%}" if known else "",
        )
    Console(file=sys.stdout).print(table)


@bench.command()
@grouped
def step(
    model: Model,
    tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 2048,
    sequences: Annotated[int, typer.Option(help="Sequences that decode together.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Measured decode steps.", min=1)] = 32,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time of a step goes.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    *,
    engine: EngineOptions,
) -> None:
    """Prefill and decode of random prompts, beside the time that reading weights and cache alone would take."""
    from octavo.cli import bench_step

    settings = engine.settings()
    terminal = Terminal(json=json_)
    result = bench_step.measure(model, settings, terminal, tokens=tokens, sequences=sequences, steps=steps)
    if json_:
        terminal.print_json(result.as_dict())
    else:
        bench_step.show(result, profile)
