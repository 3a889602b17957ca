"""`octavo verify --edits`: what approximate reuse behind an edit saves, and what it costs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from octavo.cli.terminal import Terminal

if TYPE_CHECKING:
    from octavo.config import WeightsChoice
    from octavo.engine.verify_edits import EditScore
    from octavo.models.loaded import Source

_MAX_TOKENS = 8000


def show_edits(
    terminal: Terminal,
    source: Source,
    text: str | None,
    num_tokens: int,
    kv_format: str,
    weights: WeightsChoice,
    *,
    json: bool,
) -> None:
    """Measures and prints, on a prompt of `num_tokens` tokens, 8,000 at most."""
    with terminal.bars() as bars:
        bars("start", 0, None)
        from octavo.engine.verify import default_text
        from octavo.engine.verify_edits import verify_edits
        from octavo.models.load import load_model
        from octavo.models.prepare import resolve_dtype

        loaded = load_model(
            source, dtype=resolve_dtype("auto", "cpu", weights), weights=weights, progress=bars
        )
        scores = verify_edits(
            loaded,
            default_text() if text is None else text,
            num_tokens=min(num_tokens, _MAX_TOKENS),
            kv_format=kv_format,
            progress=bars,
        )
    if json:
        edits = [asdict(score) for score in scores]
        terminal.print_json(
            {"model": loaded.name, "weights": weights, "kv_format": kv_format, "edits": edits}
        )
        return
    _print(scores)
    terminal.print(
        f"{loaded.name} read a prompt of {scores[0].num_tokens:,} tokens that was changed in one place ({kv_format}). "
        "The divergence (KLD) is that of its predictions behind the prompt from those of exact reuse, which computes "
        "everything behind the edit; the number is that of the tokens computed at the beginning of what is taken over."
    )


def _print(scores: list[EditScore]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("Edit at", "Reuse", "Computed", "First token", "KLD", "99 %", "Same top"):
        table.add_column(name, justify="left" if name == "Reuse" else "right", no_wrap=True)
    for score in scores:
        exact = score.recompute is None
        table.add_row(
            f"{score.share:.0%}".replace("%", " %") if exact else "",
            "exact" if exact else f"approximate, {score.recompute}",
            f"{score.computed_tokens:,}",
            f"{score.ttft_s:.2f} s",
            "" if exact else f"{score.mean_kld:.4f}",
            "" if exact else f"{score.p99_kld:.3f}",
            "" if exact else f"{score.same_top:.0%}".replace("%", " %"),
        )
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table, width=max(console.width, 80), crop=False)
