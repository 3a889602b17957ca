"""`octavo bench model`: how fast the engine is with a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import EngineOptions, Model, Speculate, grouped
from octavo.cli.terminal import Terminal
from octavo.cli.text import numbers
from octavo.errors import InvalidRequest
from octavo.models import catalog

if TYPE_CHECKING:
    from octavo.cli.bench_workloads import Figure


@grouped
def model(
    name: Model,
    engine: EngineOptions,
    prefill: Annotated[
        str, typer.Option(metavar="TOKENS", help="Lengths of new prompts to compute; none with 0.")
    ] = "512,2048,7900",
    decode: Annotated[
        str, typer.Option(metavar="TOKENS", help="Contexts at which one sequence decodes.")
    ] = "0,512,2048,8000",
    sequences: Annotated[
        str, typer.Option(metavar="NUMBERS", help="How many sequences decode at once, 128 tokens in.")
    ] = "1,8,16,32",
    mixed: Annotated[
        str,
        typer.Option(metavar="NUMBERS", help="How many requests of mixed lengths come at once; none with 0."),
    ] = "16,32",
    again: Annotated[
        int, typer.Option(metavar="TOKENS", help="Length of the prompt that is asked twice; 0 leaves it out.")
    ] = 2048,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens that a sequence decodes.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(metavar="N", help="Measured rounds.", min=1)] = 5,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Measure prefill, decoding, batches, mixed requests, a repeated prompt and the start of a process.

    Prompts are random tokens and answers are greedy. A prompt that is to be computed is new in every round; one
    whose computing is not measured is reused. What does not fit the context window is left out.
    """
    lengths = [number for number in numbers("--prefill", prefill) if number]
    contexts, counts = numbers("--decode", decode), numbers("--sequences", sequences)
    requests = [number for number in numbers("--mixed", mixed) if number]
    if not lengths or min((*lengths, *contexts, *counts, *requests, again)) < 0 or 0 in counts:
        raise InvalidRequest("--prefill and --sequences take numbers from 1, --decode and --again from 0.")
    if engine.kv_disk is None:  # or else what an earlier run has computed would be found
        engine = replace(engine, kv_disk="0")
    engine = replace(
        engine, speculate=Speculate.off
    )  # answers to random prompts repeat themselves, and are no measure
    settings = engine.settings()
    terminal = Terminal(json=json)
    catalog.resolve(name)  # a mistake is told before torch is imported
    from octavo.cli.bench_engine import first_token_of_a_process, generator
    from octavo.cli.bench_machine import machine
    from octavo.cli.bench_workloads import BATCH_CONTEXT, MIXED_ANSWER, MIXED_PROMPT, take_turns, workloads
    from octavo.engine.engine import TokenEngine

    start = first_token_of_a_process(name, _arguments(engine), repeats)
    with TokenEngine(name, max_running=max(16, *counts, *requests), **settings) as llm:
        room = llm.context - tokens - 1
        if room < BATCH_CONTEXT:
            raise InvalidRequest(
                f"The context window of {llm.context:,} tokens is too short for {BATCH_CONTEXT} tokens and "
                f"{tokens + 1} more. Give a larger --context or fewer --tokens."
            )
        works = workloads(
            [length for length in lengths if length <= room],
            [context for context in contexts if context <= room],
            counts,
            tokens=tokens,
            vocab_size=len(llm.tokenizer),
            again=again if again <= room else 0,
            mixed=requests if sum(MIXED_PROMPT[1:] + MIXED_ANSWER[1:]) <= llm.context else [],
        )
        figures = take_turns({name: generator(llm)}, works, repeats, terminal.remark)[name]
    figures = [*figures, start]
    where = machine()
    if json:
        values = {"model": name, "machine": where, "tokens": tokens, "engine": _shown(engine)}
        terminal.print_json({**values, "figures": [figure.as_dict() for figure in figures]})
        return
    _print(name, figures, where)


def _arguments(engine: EngineOptions) -> list[str]:
    """The options that were given, as another process takes them."""
    arguments = []
    for field in fields(engine):
        value = getattr(engine, field.name)
        if value != field.default:
            option = "--" + field.name.replace("_", "-")
            arguments += [option] if value is True else [option, str(value)]
    return arguments


def _shown(engine: EngineOptions) -> dict[str, Any]:
    return {key: value for key, value in asdict(engine).items() if value is not None}


def _print(name: str, figures: Sequence[Figure], where: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in (name, "median", "", "spread"):
        table.add_column(column, justify="right" if column in ("median", "spread") else "left")
    for figure in figures:
        value = f"{figure.median:,.0f}" if figure.median >= 100 else f"{figure.median:,.2f}"
        table.add_row(figure.name, value, figure.unit, f"{figure.spread:.0%}")
    Console(highlight=False, markup=False).print(table)
    print(
        f"{where['cpu']}, {where['threads']} threads ({where['isa']}), memory read at {where['read_gbps']} GB/s, "
        f"octavo {where['octavo']}, torch {where['torch']}"
    )
