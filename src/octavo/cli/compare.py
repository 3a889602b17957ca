"""`octavo compare`: what the cache saves and what it costs, measured on one text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import compare_plot
from octavo.cli.options import Model, Weights, WeightsOption
from octavo.cli.render import duration, size, table
from octavo.cli.terminal import Terminal
from octavo.errors import InvalidRequest
from octavo.models import catalog

if TYPE_CHECKING:
    from octavo.cli.compare_plot import Series
    from octavo.cli.compare_run import Generated, Point

_LENGTHS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_FORMATS = ("int8", "fp32")
_LEAST = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """The text in each format, and steps without the cache beside those of the first.

    `is_same` says that the beginning came out alike when each step computed the whole text again.
    """

    texts: list[Generated]
    points: list[Point]
    is_same: bool


def compare(
    model: Model,
    tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of the text, prompt included.", min=_LEAST)
    ] = 2080,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the plots into a PNG too; needs matplotlib.")
    ] = None,
    weights: WeightsOption = Weights.auto,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads to compute with. Without it, torch's own number.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on one line.")] = False,
) -> None:
    """Show what the cache saves: one text, made with it and without it, in time, in operations and in memory.

    A token's time is measured at some lengths, three times each: with the cache over 24 tokens, without it over the one
    step that computes the whole text again. What lies between is drawn straight.
    """
    catalog.resolve(model)
    if plot is not None:
        compare_plot.check(plot)
    terminal = Terminal(json=json)
    done = _measure(model, tokens, weights.value, threads, terminal)
    plots = _plots(done)
    if plot is not None:
        compare_plot.save(plot, model, plots)
    if json:
        terminal.print_json(_values(model, done))
        return
    _print(terminal, model, done, plots)
    if plot is not None:
        terminal.print(f"The plots are in {plot}.")


def _measure(model: str, tokens: int, weights: str, threads: int | None, terminal: Terminal) -> Measured:
    with terminal.bars() as bars:
        bars("start", 0, None)
        from octavo.cli.compare_run import PROMPT, generate, points, same_beginning
        from octavo.engine.engine import TokenEngine
        from octavo.formats.page_format import FORMATS
        from octavo.kv.planner import sequence_bytes
        from octavo.models.outline import outline

        found = outline(model)
    texts: list[Generated] = []
    measured: list[Point] = []
    is_same = False
    for name in _FORMATS:
        with terminal.bars() as bars:
            llm = TokenEngine(
                model,
                kv_format=name,
                kv_disk=0,
                weights=weights,
                threads=threads,
                speculate="off",
                progress=bars,
            )
        with llm:
            length = min(tokens, llm.context - 1)
            if length < _LEAST:
                raise InvalidRequest(
                    f"The context window of {model} has {llm.context:,} tokens; a comparison takes {_LEAST} at least."
                )
            texts.append(generate(llm, PROMPT, [n for n in _LENGTHS if n < length], length, terminal.remark))
            if measured:
                continue
            is_same = same_beginning(llm, texts[0])
            spec = llm._core.prepared.spec
            measured = points(
                llm,
                texts[0],
                found,
                lambda n: {name: sequence_bytes(spec, FORMATS[name], n) for name in _FORMATS},  # noqa: B023
                terminal.remark,
            )
    return Measured(texts, measured, is_same)


def _values(model: str, done: Measured) -> dict[str, Any]:
    from octavo.cli.compare_run import first_difference

    return {
        "model": model,
        "num_prompt_tokens": done.texts[0].num_prompt,
        "num_tokens": len(done.texts[0].token_ids),
        "same_tokens": done.is_same and all(point.is_same for point in done.points),
        "points": [point.as_dict() for point in done.points],
        "formats": {
            text.format: {
                "total_s": text.total_s,
                "kv_allocated_bytes": text.kv_bytes,
                "token_s": {str(length): seconds for length, seconds in text.token_s.items()},
            }
            for text in done.texts
        },
        "first_difference": first_difference(*done.texts),
    }


def _plots(done: Measured) -> list[tuple[str, str, dict[str, Series]]]:
    from octavo.cli.compare_run import summed

    without = [(point.length, point.without_s) for point in done.points]
    kept = [(point.length, point.with_s) for point in done.points]
    return [
        (
            "Time of one more token",
            "ms",
            {
                name: [(x, y * 1e3) for x, y in line]
                for name, line in (("with the cache", kept), ("without", without))
            },
        ),
        (
            "Time of the whole text: linear, and quadratic",
            "s",
            {"with the cache": summed(kept), "without": summed(without)},
        ),
        (
            "What the cache takes, by its format",
            "MiB",
            {
                text.format: [(point.length, point.kv_bytes[text.format] / 2**20) for point in done.points]
                for text in done.texts
            },
        ),
    ]


def _print(
    terminal: Terminal, model: str, done: Measured, plots: list[tuple[str, str, dict[str, Series]]]
) -> None:
    from octavo.cli.compare_run import first_difference, summed

    first, second = done.texts
    for title, unit, series in plots:
        terminal.print("\n".join(["", *compare_plot.draw(f"{title}, {unit}", series)]))
    rows: list[tuple[str, ...]] = [
        ("LENGTH", "WITH", "WITHOUT", "TIME SAVED", "COMPUTED", "WITHOUT", "WORK SAVED", "GFLOP", "WITHOUT")
    ]
    rows += [
        (
            f"{point.length:,}",
            duration(point.with_s) if point.with_s >= 0.01 else f"{point.with_s * 1e3:.1f} ms",
            duration(point.without_s),
            f"{point.saved_time:.1%}",
            f"{point.total_computed[0]:,}",
            f"{point.total_computed[1]:,}",
            f"{point.saved_work:.1%}",
            f"{point.flops[0] / 1e9:.2f}",
            f"{point.flops[1] / 1e9:,.1f}",
        )
        for point in done.points
    ]
    terminal.print(
        f"\n{model}, the cache in {first.format}. Times and GFLOP are of one more token, computed tokens of the "
        "whole text up to it:"
    )
    terminal.print("\n".join(table(rows, right=range(len(rows[0])))))
    whole = summed([(point.length, point.without_s) for point in done.points])[-1]
    terminal.print(
        f"The text of {len(first.token_ids):,} tokens took {duration(first.total_s)} with the cache. Without it, "
        f"{duration(whole[1])} up to token {whole[0]:,}, worked out from steps measured at {len(done.points)} lengths."
    )
    is_same = done.is_same and all(point.is_same for point in done.points)
    terminal.print(
        "Both made the same tokens: the first ones step by step, and the next one at each length of the table."
        if is_same
        else "They made different tokens, which must not be. Run octavo doctor with this model."
    )
    rows = [("CACHE IN", *(f"{point.length:,}" for point in done.points[2::3]))]
    for text in done.texts:
        memory = (size(point.kv_bytes[text.format]) for point in done.points[2::3])
        times = (f"{text.token_s[point.length] * 1e3:.1f} ms" for point in done.points[2::3])
        rows += [(f"{text.format}, memory", *memory), ("  one more token", *times)]
    terminal.print("\nWhat it costs, and what another format changes, by length:")
    terminal.print("\n".join(table(rows, right=range(1, len(rows[0])))))
    differs = first_difference(first, second)
    terminal.print(
        f"{first.format} and {second.format} made "
        + ("the same tokens." if differs is None else f"the same tokens up to position {differs:,}.")
        + " What a format costs in quality, octavo verify measures."
    )
