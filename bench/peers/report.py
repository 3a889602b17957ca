"""What a sitting found: a table, JSON, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.cli.bench_workloads import Figure, Found


def ratio(first: Figure, other: Figure) -> float:
    """How many times as good the first figure is; above 1 is better, in rates and in times."""
    quotient = first.median / other.median
    return quotient if first.unit == "tok/s" else 1 / quotient


def table(figures: Found) -> str:
    """Markdown: medians with half the spread, then how the first engine compares with each other one and the best."""
    first, *others = figures
    rows = _rows(figures)
    lines = _markdown(
        ["", "unit", *figures],
        [
            [name, unit, *(_cell(found[engine]) if engine in found else "" for engine in figures)]
            for (name, unit), found in rows.items()
        ],
    )
    if others:
        lines += ["", f"{first}, times as good as", ""]
        lines += _markdown(
            ["", *others, "the best of them"],
            [
                [name, *_ratios(found, first, others)]
                for (name, _), found in rows.items()
                if first in found and len(found) > 1
            ],
        )
    return "\n".join(lines)


def as_json(figures: Found, about: dict[str, Any]) -> dict[str, Any]:
    return {**about, "engines": {name: [f.as_dict() for f in found] for name, found in figures.items()}}


def plot(figures: Found, path: Path) -> None:
    """Bars of every figure over the best engine's, so that 1 is the best and all fit one scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = _rows(figures)
    width = 0.8 / len(figures)
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.1 * len(rows), 4.5))
    for index, engine in enumerate(figures):
        places, heights, labels = [], [], []
        for place, found in enumerate(rows.values()):
            if engine in found:
                places.append(place + index * width)
                heights.append(min(ratio(found[engine], other) for other in found.values()))
                labels.append(_number(found[engine].median))
        bars = axes.bar(places, heights, width, label=engine)
        axes.bar_label(bars, labels, fontsize=6, rotation=90, padding=2)
    axes.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(rows))],
        [f"{name}\n({unit})" for name, unit in rows],
        fontsize=7,
        rotation=30,
        ha="right",
    )
    axes.set_ylabel("share of the best")
    axes.set_ylim(0, 1.2)
    axes.legend(fontsize=7, ncols=len(figures), loc="upper center", bbox_to_anchor=(0.5, 1.12), frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _rows(figures: Found) -> dict[tuple[str, str], dict[str, Figure]]:
    """By name and unit the engines' figures, in the order of the engine that has most."""
    rows: dict[tuple[str, str], dict[str, Figure]] = {}
    for engine in sorted(figures, key=lambda name: -len(figures[name])):
        for figure in figures[engine]:
            rows.setdefault((figure.name, figure.unit), {})[engine] = figure
    return rows


def _ratios(found: dict[str, Figure], first: str, others: Sequence[str]) -> list[str]:
    each = {name: ratio(found[first], found[name]) for name in others if name in found}
    return [f"{each[name]:.2f}" if name in each else "" for name in others] + [
        f"**{min(each.values()):.2f}**"
    ]


def _cell(figure: Figure) -> str:
    return f"{_number(figure.median)} ±{figure.spread / 2:.0%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
