"""What the plots have in common: axes, styles, files. matplotlib is imported when one is drawn.

Lines differ in dash and marker, and colours in lightness, so that a plot is read in black and white as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

STYLES = tuple(zip(("-", "--", "-.", ":"), ("o", "s", "^", "D"), strict=True))
"""Dashes and markers, taken in turn."""

LIGHTEST = 0.8
"""Of cividis, 0 to 1: a lighter line is lost on white."""

LINK = "0.75"
"""Grey of the lines that join names to points: lighter than any point."""

PICTURES = (".png", ".svg")
"""Endings of files that save() writes."""


def own_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The axes given, or those of a new figure of so many inches."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "hqarray[explore]"') from error
    axes: Axes = pyplot.subplots(figsize=size, layout="constrained")[1]
    return axes


def expect_linear(ax: Axes | None, name: str) -> None:
    """Raises ValueError for axes that are logarithmic, on which blocks and bars from 0 on have no place."""
    if ax is not None and (ax.get_xscale(), ax.get_yscale()) != ("linear", "linear"):
        raise ValueError(
            f"{name} needs axes that are linear, these are {ax.get_xscale()} along x and {ax.get_yscale()} along y; "
            f"pass others, or ax=None for a figure of its own"
        )


def whole_ticks(axis: Axis) -> None:
    """Ticks at whole numbers; those that somebody fixed stay."""
    from matplotlib.ticker import MaxNLocator

    locator = axis.get_major_locator()
    if isinstance(locator, MaxNLocator):
        locator.set_params(integer=True)


def colors(count: int) -> list[Any]:
    """So many colours, from dark to LIGHTEST."""
    from matplotlib import colormaps

    return [colormaps["cividis"](LIGHTEST * i / max(count - 1, 1)) for i in range(count)]


# --- files --------------------------------------------------------------------------------------


def save(draw: Callable[[Axes], object], path: str | Path, size: tuple[float, float]) -> None:
    """Write a picture of so many inches, of what is drawn into its axes, as .png or .svg by the ending of the path.

    Raises ValueError for another ending, before anything is drawn.
    """
    if picture_ending(path) == ".svg":
        Path(path).write_text(svg(draw, size), encoding="utf-8")
        return
    with _figure(draw, size) as figure:
        figure.savefig(path, format="png")


def picture_ending(path: str | Path) -> str:
    """The ending of a picture's path, in small letters. Raises ValueError where save() does not write such."""
    ending = Path(path).suffix.lower()
    if ending not in PICTURES:
        given = f"ends in {Path(path).suffix!r}" if ending else "has no ending"
        raise ValueError(f"{str(path)!r} {given}; a picture is written to a file that ends in {' or '.join(PICTURES)}")
    return ending


@contextmanager
def _figure(draw: Callable[[Axes], object], size: tuple[float, float]) -> Iterator[Figure]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hqarray"}):  # fonttype none: text stays text
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        yield figure


def svg(draw: Callable[[Axes], object], size: tuple[float, float]) -> str:
    """An SVG image of so many inches, of what is drawn into its axes; the same bytes for the same drawing."""
    from io import StringIO

    file = StringIO()
    with _figure(draw, size) as figure:
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


__all__ = ["LINK", "STYLES", "colors", "expect_linear", "own_axes", "picture_ending", "save", "svg", "whole_ticks"]
