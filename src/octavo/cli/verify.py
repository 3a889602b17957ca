"""`octavo verify`: what each cache format costs in quality, and the smallest one that costs little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import Model, Weights
from octavo.cli.render import count
from octavo.cli.terminal import Terminal
from octavo.cli.text import names, numbers, read_file
from octavo.cli.verify_edits import show_edits
from octavo.config import check_weights
from octavo.errors import InvalidRequest
from octavo.models import catalog

if TYPE_CHECKING:
    from rich.table import Table

    from octavo.engine.lockstep import FormatScore

_MAX_KLD = 0.002
_FORMATS = "bf16,int8,k8v4,int4"


def verify(
    model: Model,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text to read. Without it, chapters of a novel that Octavo carries."
        ),
    ] = None,
    formats: Annotated[
        str, typer.Option(metavar="NAMES", help="Formats to compare with unquantised keys and values.")
    ] = _FORMATS,
    contexts: Annotated[
        str, typer.Option(metavar="TOKENS", help="Tokens of a window; at most the model's own are read.")
    ] = "512,2048,8192",
    batch: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Sequences in a step. They change no figure, as is shown.")
    ] = "1,4",
    windows: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Windows of each context. Without it, 4,096 tokens or a whole window."
        ),
    ] = None,
    weights: Annotated[
        Weights,
        typer.Option(
            help="How weights are held, as for run; by default as float32 numbers, so that the format is all that "
            "differs from the most exact arithmetic."
        ),
    ] = Weights.fp32,
    max_kld: Annotated[
        float, typer.Option(metavar="X", help="Mean divergence that a recommended format may have.")
    ] = _MAX_KLD,
    edits: Annotated[
        bool,
        typer.Option(
            "--edits",
            help="Measure approximate reuse behind an edit instead: a prompt of the longest of --contexts is changed "
            "in one place and read exactly and approximately, in the first of --formats.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on one line; nothing else.")] = False,
) -> None:
    """Measure what each cache format costs a model in quality, and recommend one.

    The model reads a text in float32 arithmetic with unquantised keys and values and with each format, and is
    told every next token. The divergence (KLD) says how far its predictions move: 0.001 is about what
    computing in bf16 instead of float32 moves those of smollm2.
    """
    if not max_kld >= 0:
        raise InvalidRequest(f"--max-kld is {max_kld}; it must be 0 or more.")
    check_weights(weights.value, "fp32")
    lengths, batches = numbers("--contexts", contexts), numbers("--batch", batch)
    given = None if text is None else read_file(text, "The text")
    terminal = Terminal(json=json)
    source = catalog.resolve(model)
    if edits:
        chosen = "int8" if formats == _FORMATS else names(formats)[0]
        show_edits(terminal, source, given, max(lengths), chosen, weights.value, json=json)
        return
    with terminal.bars() as bars:
        bars("start", 0, None)
        from octavo.engine.verify import VerifySettings, default_text, recommend
        from octavo.engine.verify import verify as compare
        from octavo.models.load import load_model

        settings = VerifySettings(tuple(names(formats)), lengths, batches, windows)
        loaded = load_model(source, dtype="fp32", weights=weights.value, progress=bars)
        scores = compare(loaded, default_text() if given is None else given, settings, bars)
    if max(lengths) > loaded.context_length:
        terminal.remark(
            f"The model's own window has {loaded.context_length:,} tokens; longer ones are cut to it."
        )
    best = recommend(scores, max_kld)
    if json:
        terminal.print_json(_as_json(loaded.name, weights, scores, max_kld, best))
        return
    name = loaded.name if weights is Weights.fp32 else f"{loaded.name} (--weights {weights.value})"
    _print(terminal, name, scores, max_kld, best)


def _as_json(
    name: str, weights: Weights, scores: Sequence[FormatScore], max_kld: float, best: str | None
) -> dict[str, Any]:
    # JSON has no infinity.
    results = [
        {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(score).items()
        }
        for score in scores
    ]
    return {
        "model": name,
        "weights": weights.value,
        "max_kld": max_kld,
        "recommended": best,
        "results": results,
    }


def _print(
    terminal: Terminal, name: str, scores: Sequence[FormatScore], max_kld: float, best: str | None
) -> None:
    from rich.console import Console

    batches = list(dict.fromkeys(score.batch for score in scores))
    alike = _alike(scores)
    table = _table(scores, ", ".join(map(str, batches)) if alike else None)
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table, width=max(console.width, 80), crop=False)
    read = {score.context: score.num_windows for score in scores}
    windows = ", ".join(
        f"{count(number, 'window')} of {context:,} tokens" for context, number in read.items()
    )
    terminal.print(f"{name} read {windows}, in float32 arithmetic; fp32 is the unquantised cache.")
    if not alike:
        terminal.print(
            "The figures differ between batches, which they must not: a cached token is not exact here. "
            "Run octavo doctor."
        )
    elif len(batches) > 1:
        terminal.print(f"Batches of {' and '.join(map(str, batches))} gave the same figures in every bit.")
    terminal.print(
        "The size is the cache's, scales included, and independent of the precision of the weights."
    )
    terminal.print(_advice(scores, max_kld, best))


def _alike(scores: Sequence[FormatScore]) -> bool:
    """Whether each context's figures are equal in all batches, to the last bit."""
    figures = {(score.context, score.format, _figures(score)) for score in scores}
    return len(figures) == len({(score.context, score.format) for score in scores})


def _figures(score: FormatScore) -> tuple[float, ...]:
    return score.perplexity, score.reference_perplexity, score.mean_kld, score.p999_kld, score.same_top


def _table(scores: Sequence[FormatScore], batches: str | None) -> Table:
    """With `batches` one section a context, else one for each of its batch sizes."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("Context", "Batch", "Format", "Size", "Perplexity", "", "KLD", "99.9 %", "Same top"):
        table.add_column(name, justify="left" if name == "Format" else "right", no_wrap=True)
    seen = set()
    for (context, batch), group in groupby(scores, key=lambda score: (score.context, score.batch)):
        if batches is not None and context in seen:
            continue
        seen.add(context)
        section = list(group)
        whole = f"{section[0].reference_perplexity:.3f}"
        table.add_row(f"{context:,}", batches or str(batch), "fp32", "100 %", whole, "", "", "", "")
        for score in section:
            change = score.perplexity / score.reference_perplexity - 1
            table.add_row(
                *("", "", score.format, f"{score.size:.1%}".replace("%", " %"), f"{score.perplexity:.3f}"),
                *(f"{change:+.3%}".replace("%", " %"), f"{score.mean_kld:.5f}", f"{score.p999_kld:.4f}"),
                f"{score.same_top:.2%}".replace("%", " %"),
            )
        table.add_section()
    return table


def _advice(scores: Sequence[FormatScore], max_kld: float, best: str | None) -> str:
    if best is None:
        return (
            f"No format keeps the mean KLD at or under {max_kld:g} in every context. Use --kv-format fp32, or "
            "allow more with --max-kld."
        )
    num_bytes = next(score.bytes_per_token for score in scores if score.format == best)
    return (
        f"Recommended: --kv-format {best}, {num_bytes:,} B a token, the smallest whose mean KLD is at most "
        f"{max_kld:g} in every context."
    )
