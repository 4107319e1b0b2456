"""Curves over the steps of a training: as lines of text, or with matplotlib as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import numpy.typing as npt

HEIGHT = 14
"""Lines of a text plot, without axis and legend."""

SCALE = 0.98
"""Share of the values that must fit the axis: a run's first steps may be far outside."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One value for each step."""

    name: str
    values: npt.NDArray[np.float64]


def text_plot(curves: Sequence[Curve], width: int, what: str, along: str) -> list[str]:
    """Lines of at most `width` characters, one letter for each curve; what is outside sticks to the border.

    Values that are not finite are left out; later curves are drawn first, so that the earlier ones are seen.
    """
    if not curves:
        return []
    low, high = _limits(curves)
    labels = [f"{value:+.2f}" for value in np.linspace(high, low, HEIGHT)]
    margin = max(map(len, labels))
    columns = max(10, width - margin - 3)
    grid = [[" "] * columns for _ in range(HEIGHT)]
    if low < 0 < high:
        grid[_row(0.0, low, high)] = ["-"] * columns
    for letter, curve in reversed(list(zip(_letters(len(curves)), curves, strict=True))):
        for column, piece in enumerate(_pieces(curve.values, columns)):
            kept = piece[np.isfinite(piece)]
            if len(kept):
                grid[_row(float(kept.mean()), low, high)][column] = letter
    shown = {0, HEIGHT // 2, HEIGHT - 1}
    lines = [f"{labels[i] if i in shown else '':>{margin}} |{''.join(row).rstrip()}" for i, row in enumerate(grid)]
    steps = str(max(len(curve.values) for curve in curves))
    axis = f"{'':>{margin}} +{'-' * columns}"
    below = f"{'':>{margin}}  1{along:^{max(0, columns - len(steps) - 1)}}{steps}"
    legend = [f"{letter}  {curve.name}" for letter, curve in zip(_letters(len(curves)), curves, strict=True)]
    return [what, *lines, axis, below.rstrip(), *legend]


def _letters(count: int) -> str:
    return (ascii_lowercase * -(-count // len(ascii_lowercase)))[:count]


def _pieces(values: npt.NDArray[np.float64], columns: int) -> list[npt.NDArray[np.float64]]:
    """The values that each column stands for; one of them where there are more columns."""
    borders = np.arange(columns + 1) * len(values) / columns
    starts = borders[:-1].astype(int)
    ends = np.maximum(borders[1:].astype(int), starts + 1)
    return [values[start:end] for start, end in zip(starts, ends, strict=True)]


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """An axis that holds zero and most values."""
    values = np.concatenate([curve.values for curve in curves])
    values = values[np.isfinite(values)]
    if not len(values):
        return -1.0, 1.0
    low, high = np.quantile(values, [1 - SCALE, SCALE])
    low, high = min(0.0, float(low)), max(0.0, float(high))
    return (low, high) if high > low else (low - 1, high + 1)


def _row(value: float, low: float, high: float) -> int:
    return int(np.clip(round((high - value) / (high - low) * (HEIGHT - 1)), 0, HEIGHT - 1))


def has_matplotlib() -> bool:
    """Whether a picture can be made."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def save_picture(curves: Sequence[Curve], path: str | Path, what: str, along: str) -> None:
    """Draw the curves into a file whose ending says its type, .png or .svg. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Any = figure.add_subplot()
    for curve in curves:
        axes.plot(np.arange(1, len(curve.values) + 1), curve.values, label=curve.name, linewidth=1.2)
    if curves:
        axes.set_ylim(*_limits(curves))
        axes.legend(frameon=False, fontsize="small")
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xlabel(along)
    axes.set_ylabel(what)
    figure.savefig(path)


__all__ = ["Curve", "has_matplotlib", "save_picture", "text_plot"]
