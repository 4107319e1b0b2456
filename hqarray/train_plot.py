"""Curves over the steps of a training: as lines of text, or with matplotlib as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from string import ascii_lowercase
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .drawing import LINK, STYLES, colors, own_axes, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 14
"""Lines of a text plot, without axis and legend."""

SCALE = 0.98
"""Share of the values that must fit the axis: a run's first steps may be far outside."""

MARKS = 10
"""Markers on a curve, about; each curve has them at other steps."""

EDGE = 0.05
"""Of the range of curves, above and below it: what is beyond the range is drawn there."""


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
    values = np.concatenate([np.empty(0), *(curve.values for curve in curves)])
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


def plot_curves(curves: Sequence[Curve], what: str, along: str, *, ax: Axes | None = None) -> Axes:
    """Draw curves over the steps of a training, the first step as 1, with a grey line at zero.

    The axis holds zero and most values, as that of the plot in a terminal; what is beyond lies at its edge, and the
    label says so. Values that are NaN are gaps.
    """
    ax = own_axes(ax, (8, 4.5))
    ax.axhline(0, color=LINK, linewidth=0.8, zorder=1)
    low, high = _limits(curves)
    low, high = low - EDGE * (high - low), high + EDGE * (high - low)
    beyond = False
    for i, (curve, (dash, marker), color) in enumerate(zip(curves, cycle(STYLES), colors(len(curves)), strict=False)):
        beyond = beyond or bool(((curve.values < low) | (curve.values > high)).any())
        every = max(1, len(curve.values) // MARKS)
        ax.plot(np.arange(1, len(curve.values) + 1), np.clip(curve.values, low, high), dash, marker=marker,
                markevery=(i * every // len(curves), every), markersize=4, linewidth=1.2, color=color,
                label=curve.name, clip_on=False)
    ax.set_ylim(low, high)
    ax.set(xlabel=along, ylabel=what + " (at the edge: beyond it)" * beyond)
    whole_ticks(ax.xaxis)
    if curves:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    return ax


__all__ = ["Curve", "has_matplotlib", "plot_curves", "text_plot"]
