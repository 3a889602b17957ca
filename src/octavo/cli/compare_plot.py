"""Plots of `octavo compare`: in the terminal, and as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from octavo.errors import EngineError, InvalidRequest

Series = Sequence[tuple[float, float]]
_MARKS = "*o+"


def draw(title: str, series: dict[str, Series], *, width: int = 64, height: int = 12) -> list[str]:
    """Lines over each other as text; the y axis begins at 0."""
    most_x = max(x for points in series.values() for x, _ in points)
    most_y = max(y for points in series.values() for _, y in points) or 1.0
    rows = [[" "] * width for _ in range(height)]
    for mark, points in zip(_MARKS, series.values(), strict=False):
        for column in range(width):
            y = _at(points, most_x * (column + 0.5) / width)
            if y is not None:
                rows[height - 1 - min(int(y / most_y * height), height - 1)][column] = mark
    label = f"{most_y:,.3g}"
    lines = [title]
    for number, row in enumerate(rows):
        left = label if number == 0 else "0" if number == height - 1 else ""
        lines.append(f"{left:>8} │{''.join(row).rstrip()}")
    lines.append(f"{'':>8} └{'─' * width}")
    lines.append(f"{'':>9} 0{f'{most_x:,.0f} tokens':>{width - 1}}")
    keys = "   ".join(f"{mark} {name}" for mark, name in zip(_MARKS, series, strict=False))
    return [*lines, f"{'':>10}{keys}"]


def check(path: Path) -> None:
    """Checks, before anything is measured, that a PNG can be drawn there.

    Raises:
        EngineError: matplotlib is not installed.
        InvalidRequest: the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise EngineError(
            "Drawing a PNG needs matplotlib. Install it with pip install 'octavo[bench]', or leave --plot out."
        )
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise InvalidRequest(
            f"The plot cannot be written to {path}. Name a .png file in a folder that exists."
        )


def save(path: Path, model: str, plots: Sequence[tuple[str, str, dict[str, Series]]]) -> None:
    """Writes plots (title, unit of y, lines) side by side into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(plots), figsize=(5.5 * len(plots), 4), constrained_layout=True)
    for axis, (title, unit, series) in zip(axes, plots, strict=True):
        for (name, points), colour in zip(series.items(), ("#0b6e99", "#c2410c", "#4d7c0f"), strict=False):
            axis.plot(*zip(*points, strict=True), label=name, color=colour, linewidth=2)
        axis.set(title=title, xlabel="tokens of the text", ylabel=unit)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.legend()
    figure.suptitle(model)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _at(points: Series, x: float) -> float | None:
    """The line's height, straight between its points; None outside of them."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None
