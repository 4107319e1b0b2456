"""Plots of formats, parts and groups with matplotlib, which is imported when one is drawn.

Each draws into ax, or into a figure of its own, and returns the axes. Lines differ in dash and marker, labels stand
beside what they name and colours differ in lightness, so that a plot is read in black and white as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .arrays import HybridArray, QuantizedArray
from .display import sample_scales
from .explore import Comparison, as_matrix, compare, decode, quantized_tiles, resolved
from .formats import FORMATS, Element, Format, as_format
from .grouped import GroupedArray
from .grouped_parts import ScatteredPart
from .inputs import as_array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = tuple(zip(("-", "--", "-.", ":"), ("o", "s", "^", "D"), strict=True))
"""Dashes and markers, taken in turn."""

LIGHTEST = 0.8
"""Of cividis, 0 to 1: a lighter line is lost on white."""

LINK = "0.75"
"""Grey of the lines that join names to points: lighter than any point."""

TICKS = 1.04
"""Least ratio of bits per element that are both written on an axis."""

FLOOR = 1000
"""Ratio of the largest error of a product that is drawn to the smallest."""

MOST_SCALES = (1024, 1024)
"""Most rows and blocks of scales that are drawn."""

OCTAVES = (-16, 2)
"""Range of the histogram of relative errors, powers of two; what lies outside is counted at its ends."""

BINS_PER_OCTAVE = 2


# --- of a matrix --------------------------------------------------------------------------------


def plot_error(x: Any, formats: Iterable[Format | str] | Format | str, *, ax: Axes | None = None) -> Axes:
    """Draw how the elements of a matrix are spread over relative errors, one line for each format.

    x        (..., k) float array that quantize takes; blocks run along the last axis
    formats  names or formats
    ax       matplotlib axes; None makes a figure
    returns  the axes: |q - x| / |x| of an element (log2) against the share of elements, percent per bin

    Elements that are zero or not finite are left out; those that stay exact have no place on a logarithmic axis and
    are named in the legend. An element that becomes zero has the error 1. Works in tiles, as compare does.
    """
    x = as_array(x, "x")
    if x.ndim == 0:
        raise ValueError("x is 0-D; a matrix has at least one axis, reshape it to (1, 1)")
    wanted = [as_format(f) for f in ((formats,) if isinstance(formats, (Format, str)) else formats)]
    ax = _axes(ax, (7, 4))
    edges = np.exp2(np.arange(OCTAVES[0] * BINS_PER_OCTAVE, OCTAVES[1] * BINS_PER_OCTAVE + 1) / BINS_PER_OCTAVE)
    centers = np.sqrt(edges[1:] * edges[:-1])
    used = np.zeros(len(centers), np.int64)
    for format, (dash, marker), color in zip(wanted, cycle(STYLES), _colors(len(wanted)), strict=False):
        counts, exact, count = _relative_errors(as_matrix(x), format, edges)
        used += counts
        label = f"{format.name} ({exact / max(count, 1):.1%} exact)"
        ax.plot(centers, 100 * counts / max(count, 1), dash, marker=marker, markersize=4, color=color, label=label)
    ax.set_xscale("log", base=2)
    filled = np.flatnonzero(used)
    if filled.size:
        ax.set_xlim(edges[max(filled[0] - 1, 0)], edges[min(filled[-1] + 2, len(edges) - 1)])
    ax.set_ylim(bottom=0)
    ax.set(xlabel="relative error |q - x| / |x| of an element", ylabel=f"elements (% per 1/{BINS_PER_OCTAVE} octave)")
    ax.set_title(_describe(x.shape, x.dtype.name))
    if wanted:
        ax.legend()
    return ax


def _relative_errors(
    matrix: Any, format: Format, edges: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], int, int]:
    """Counts in bins of the relative errors, how many are zero, and of how many elements."""
    counts, exact, count = np.zeros(len(edges) - 1, np.int64), 0, 0
    with np.errstate(all="ignore"):
        for tile, part in quantized_tiles(matrix, resolved(format, matrix.dtype)):
            x, q = tile.astype(np.float64), decode(part).astype(np.float64)
            errors = np.abs(q - x)[(x != 0) & np.isfinite(x)] / np.abs(x[(x != 0) & np.isfinite(x)])
            errors = errors[~np.isnan(errors)]
            exact += int((errors == 0).sum())
            count += errors.size
            counts += np.histogram(np.clip(errors[errors != 0], edges[0], edges[-1]), edges)[0]
    return counts, exact, count


def plot_tradeoff(
    x: Any, formats: Iterable[Format | str] | Format | str | None = None, *, ax: Axes | None = None
) -> Axes:
    """Draw what formats cost and what they give: bits per element against the SQNR of a matrix.

    x        (..., k) float array that quantize takes, or a Comparison
    formats  names or formats; default every quantized row of FORMATS; of a Comparison those that it holds
    ax       matplotlib axes; None makes a figure
    returns  the axes: bits per element, scales and padding included (log2), against SQNR in dB

    The line joins the formats that no other beats in both. Exact ones stand at the upper edge; those without an
    SQNR (NaN, an infinite error) are named below the axis.
    """
    if isinstance(x, Comparison):
        if formats is not None:
            raise ValueError("plot_tradeoff: a Comparison has its formats; pass the matrix to compare others")
        comparison = x
    else:
        comparison = compare(x, quantized_formats() if formats is None else formats)
    points = [(error.format, 8 * error.bytes_per_element, error.sqnr_db) for error in comparison]
    ax = plot_points(points, ax=ax)
    ax.set_title(_describe(comparison.shape, comparison.dtype))
    return ax


def plot_points(
    points: Sequence[tuple[str, float, float]], *, ylabel: str = "SQNR (dB)", ax: Axes | None = None
) -> Axes:
    """Draw (name, bits per element, decibels): the names at the right, joined to their points.

    Decibels may be inf (drawn at the upper edge), or -inf and NaN (named below).
    """
    ax = _axes(ax, (8, 4.5))
    drawn = [point for point in points if math.isfinite(point[2])]
    exact = [point for point in points if point[2] == math.inf]
    lost = [name for name, _, db in points if math.isnan(db) or db == -math.inf]
    levels = [db for *_, db in drawn] or [0.0]
    margin = max(0.06 * (max(levels) - min(levels)), 1.0)
    top = max(levels) + (4 if exact else 1) * margin
    ax.set_xscale("log", base=2)
    placed = [*drawn, *((f"{name} (exact)", bits, top - margin) for name, bits, _ in exact)]
    best, front = -math.inf, list[tuple[float, float]]()
    for _, bits, db in sorted(placed, key=lambda point: (point[1], -point[2])):
        if db > best:
            front.append((bits, db))
            best = db
    if front:
        ax.step(*zip(*front, strict=True), where="post", color="0.6", linewidth=1, zorder=1)
        costs = [bits for _, bits, _ in placed]
        ax.set_xlim(min(costs) / 1.15, max(costs) * 1.15)
        ax.set_xticks(_apart(costs), [f"{bits:.3g}" for bits in _apart(costs)])
        ax.set_xticks([], minor=True)
    ax.set_ylim(min(levels) - margin, top)
    _label(ax, placed)
    ax.set(xlabel="bits per element, scales and padding included", ylabel=ylabel)
    if lost:
        ax.text(0, -0.2, f"no SQNR: {', '.join(lost)}", transform=ax.transAxes, fontsize="small")
    return ax


def _apart(costs: Sequence[float]) -> list[float]:
    """The costs from the smallest on, those left out that are nearer than TICKS to the one before."""
    kept: list[float] = []
    for bits in sorted(costs):
        if not kept or bits > TICKS * kept[-1]:
            kept.append(bits)
    return kept


def _label(ax: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Mark each point, and name it at the right of the axes: from top to bottom as the points lie, none on another."""
    ordered = sorted(points, key=lambda point: point[2])
    low, high = ax.get_ylim()
    heights = _spaced([(db - low) / (high - low) for *_, db in ordered], gap=0.06)
    for (name, bits, db), height, (_, marker), color in zip(
        ordered, heights, cycle(STYLES), _colors(len(ordered)), strict=False
    ):
        ax.plot([bits], [db], marker=marker, color=color, markeredgecolor="black", linestyle="none", zorder=3)
        ax.annotate(
            name, (bits, db), xytext=(1.04, height), textcoords="axes fraction", va="center", fontsize="small",
            arrowprops={"arrowstyle": "-", "color": LINK, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
            annotation_clip=False,
        )


def _spaced(places: Sequence[float], gap: float) -> list[float]:
    """Places from 0 to 1, in order, moved apart to at least a gap, or as far as all of them fit."""
    gap = min(gap, 1 / max(len(places) - 1, 1))
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else max(place, 0.0))
    over = 1.0
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], over)
        over = moved[i] - gap
    return moved


def quantized_formats() -> list[Format]:
    """The rows of FORMATS that have scales."""
    return [format for format in FORMATS.values() if format.scaling is not None]


# --- of a part, of a group ----------------------------------------------------------------------


def plot_scales(part: QuantizedArray, *, ax: Axes | None = None) -> Axes:
    """Draw the scales of a part as a heat map.

    part     a QuantizedArray, such as hx.rowwise
    ax       matplotlib axes; None makes a figure
    returns  the axes: blocks along k against rows, log2 of the scale as colour

    A scale that is zero or NaN is hatched and counted in the title. Of more than 1024 rows or blocks every n-th is
    drawn, as the labels then say. Raises TypeError for what is no part, ValueError for one without scales.
    """
    given: Any = part
    if isinstance(given, HybridArray):
        there = " or ".join(f"hx.{direction}" for direction, _ in given.parts())
        raise TypeError(f"plot_scales takes one part of a HybridArray: pass {there}")
    if not isinstance(given, QuantizedArray):
        raise TypeError(f"plot_scales takes a QuantizedArray, such as hx.rowwise, not {type(given).__name__}")
    storage = part.format.storage
    rows, blocks = storage.num_scales(part.shape)
    if rows * blocks == 0:
        raise ValueError(f"{part!r} has no scales to draw")
    sample = sample_scales(part.scales, storage, part.global_scale, MOST_SCALES)
    ax = _axes(ax, (7, 4))
    hidden = ~np.isfinite(sample.log2)
    if hidden.any():
        ax.patch.set(hatch="xxxx", edgecolor=LINK)
    values = np.ma.masked_array(sample.log2, hidden)
    image = ax.imshow(values, cmap="cividis", aspect="auto", interpolation="nearest", extent=(0, blocks, rows, 0))
    ax.figure.colorbar(image, ax=ax, label="log2 of the scale")
    size = [min(sides) for sides in zip(storage.block or part.shape, part.shape, strict=True)]
    every = [f", 1 of {n} drawn" if n > 1 else "" for n in sample.steps]
    ax.set(xlabel=f"block along k (of {size[1]} elements{every[1]})",
           ylabel=f"row of scales (of {size[0]} row{'s' * (size[0] != 1)}{every[0]})")
    counts = ((int(np.isneginf(sample.log2).sum()), "zero"), (int(np.isnan(sample.log2).sum()), "NaN"))
    ax.set_title(f"{part.format.name} {part.shape}" + "".join(f", {n} {what}" for n, what in counts if n))
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True)
    return ax


def plot_groups(g: GroupedArray, *, ax: Axes | None = None) -> Axes:
    """Draw the sizes of the members of a group: a bar for each, and what alignment adds, hatched.

    g        a GroupedArray; sizes on a device are copied to the host, which waits for it
    ax       matplotlib axes; None makes a figure
    returns  the axes: number of the group against its size along the axis where sizes differ; of members that differ
             along both axes, against its elements

    An empty member is marked 0. The title tells what the capacity leaves unused and the bytes held.
    """
    if not isinstance(g, GroupedArray):
        raise TypeError(f"plot_groups takes a GroupedArray, not {type(g).__name__}; grouped_quantize(...) makes one")
    array = g.to_host()
    _, part = next(array.parts())
    ax = _axes(ax, (7, 3.5))
    if array.ragged is None or isinstance(part, ScatteredPart):  # differ along both axes
        sizes, padded, what, capacity = array.rows.values * array.columns.values, None, "elements", None
    else:
        ragged = array.ragged
        sizes, capacity = ragged.values, ragged.capacity
        padded = -(-sizes // ragged.alignment) * ragged.alignment
        what = "columns" if ragged is array.columns else "rows"
    places = np.arange(len(sizes))
    ax.bar(places, sizes, color="0.35", edgecolor="black", label=what)
    if padded is not None and (padded > sizes).any():
        ax.bar(places, padded - sizes, bottom=sizes, color="white", edgecolor="black", hatch="////",
               label=f"alignment to {array.alignment}")
        ax.set_ylim(top=1.25 * padded.max())  # room for the legend
        ax.legend(ncols=2)
    for place in places[sizes == 0]:
        ax.annotate("0", (place, 0), xytext=(0, 2), textcoords="offset points", ha="center", fontsize="small")
    ax.set(xlabel="group", ylabel=f"{what} of the group")
    ax.xaxis.get_major_locator().set_params(integer=True)
    formats = ", ".join(f"{direction} {part.format.name}" for direction, part in array.parts())
    used = f"{int(sizes.sum())} {what}" + (f" of {capacity}" if capacity is not None else "")
    ax.set_title(f"{len(sizes)} groups, {used}, {formats}, {array.nbytes / 1024:.1f} KiB", fontsize="medium")
    return ax


# --- of formats ---------------------------------------------------------------------------------


def plot_formats(formats: Iterable[Format | str] | Format | str | None = None, *, ax: Axes | None = None) -> Axes:
    """Draw the positive values that the elements of formats have, at a scale of 1.

    formats  names or formats; default every quantized row of FORMATS
    ax       matplotlib axes; None makes a figure
    returns  the axes: magnitude (log2) against elements, one row for each, with the formats that use it

    Subnormal values are lower marks. Elements of more than 8 bits are a line from the smallest to the largest value.
    """
    if formats is None:
        wanted = quantized_formats()
    else:
        wanted = [as_format(f) for f in ((formats,) if isinstance(formats, (Format, str)) else formats)]
    users: dict[Element, list[str]] = {}
    for format in wanted:
        users.setdefault(format.storage.element, []).append(format.name)
    ax = _axes(ax, (8, 1 + 0.75 * max(len(users), 1)))
    for row, element in enumerate(users):
        if element.bits > 8:
            ends = np.array([2.0 ** (1 - element.bias - element.mantissa_bits), element.max])
            ax.plot(ends, [row, row], color="black", linewidth=4, solid_capstyle="butt")
            continue
        values = element.values[1 : element.max_code + 1].astype(np.float64)
        normal = values >= 2.0 ** (1 - element.bias)
        ax.vlines(values[normal], row - 0.3, row + 0.3, color="black", linewidth=0.9)
        ax.vlines(values[~normal], row, row + 0.3, color="0.45", linewidth=0.9)
    ax.set_xscale("log", base=2)
    ax.set_yticks(range(len(users)), [_tick(element, names) for element, names in users.items()])
    ax.set_ylim(len(users) - 0.5, -0.5)
    ax.set(xlabel="magnitude at a scale of 1 (short: subnormal)", ylabel="element: formats")
    for row, element in enumerate(users):
        ax.annotate(f"largest {element.max:g}", (1.02, row), xycoords=("axes fraction", "data"), va="center",
                    fontsize="small", annotation_clip=False)
    return ax


def _tick(element: Element, names: Sequence[str]) -> str:
    shown = ", ".join(names[:2]) + (f" + {len(names) - 2}" if len(names) > 2 else "")
    return f"{element.name}\n{shown}"


# --- of a report --------------------------------------------------------------------------------


def plot_products(errors: Mapping[str, Mapping[Any, float]], *, ax: Axes | None = None) -> Axes:
    """Draw the relative errors of products under recipes: a row for each recipe, a mark for each product.

    errors   recipe -> product -> |Y - Y64| / |Y64|; NaN and infinity have no place on the axis

    Errors below 1/FLOOR of the largest lie at the left edge: bf16's would leave the others no room.
    """
    sizes = [error for row in errors.values() for error in row.values() if error < math.inf]
    floor = max(sizes, default=1.0) / FLOOR or 1.0
    ax = _axes(ax, (8, 1 + 0.3 * len(errors)))
    products = list(dict.fromkeys(product for row in errors.values() for product in row))
    for product, (_, marker), color in zip(products, cycle(STYLES), _colors(len(products)), strict=False):
        shown = [(max(row[product], floor), i) for i, row in enumerate(errors.values()) if row[product] < math.inf]
        ax.plot(*(zip(*shown, strict=True) if shown else ((), ())), marker=marker, color=color, linestyle="none",
                markeredgecolor="black", label=product, clip_on=False, zorder=3)
    ax.set_xscale("log")
    ax.set_xlim(left=floor)
    ax.set_yticks(range(len(errors)), list(errors))
    ax.set_ylim(len(errors) - 0.5, -0.5)
    ax.grid(axis="y", color=LINK, linewidth=0.6)
    ax.set_axisbelow(True)
    below = f" (left edge: below {floor:.1g})" if any(size < floor for size in sizes) else ""
    ax.set(xlabel=f"relative error |Y - Y64| / |Y64| of a product{below}", ylabel="recipe")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def svg(draw: Callable[[Axes], object], size: tuple[float, float]) -> str:
    """An SVG image of so many inches, of what is drawn into its axes; the same bytes for the same drawing."""
    from io import StringIO

    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hqarray"}):  # fonttype none: text stays text
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        file = StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


# --- common -------------------------------------------------------------------------------------


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The axes given, or those of a new figure of so many inches."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "hqarray[explore]"') from error
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def _colors(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["cividis"](LIGHTEST * i / max(count - 1, 1)) for i in range(count)]


def _describe(shape: tuple[int, ...], dtype: str) -> str:
    return f"{' x '.join(map(str, shape))} {dtype}"


__all__ = ["plot_error", "plot_formats", "plot_groups", "plot_points", "plot_products", "plot_scales",
           "plot_tradeoff", "svg"]
