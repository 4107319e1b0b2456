"""Exploration: how far a matrix is from what formats make of it, as numbers and as tables.

Works in tiles, so memory stays bounded whatever the size of the matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import hadamard, ops
from .arrays import HybridArray, QuantizedArray
from .buffers import Separate
from .formats import FORMATS, Format, as_format
from .inputs import as_array
from .layout import Array, part_layout
from .recipes import RECIPES, ROLES
from .reference import dequantize_part

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

TILE = 1024
"""Rows and columns of a tile; every block of every format fits it a whole number of times."""

OVER = 1 + 2.0**-20
"""An element counts as clipped beyond this times the largest magnitude: a float32 scale is off by 2^-24."""


# --- one format ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FormatError:
    """What one format makes of a matrix, blocks along its last axis.

    format             name
    sqnr_db            10 log10(sum x^2 / sum (q - x)^2), inf where q is x
    relative_error     sqrt of the inverse ratio: |q - x| / |x| in the Frobenius norm
    max_error          largest |q - x|
    clipped            share of elements beyond the largest magnitude of their block, saturated
    zeroed             share of elements that are not zero and become zero
    nan                share of elements that decode to NaN
    bytes_per_element  codes, scales and padding over the number of elements

    Errors are over the elements that are finite and do not decode to NaN, NaN where no element is; shares are
    over all.
    """

    format: str
    sqnr_db: float
    relative_error: float
    max_error: float
    clipped: float
    zeroed: float
    nan: float
    bytes_per_element: float


@dataclass(slots=True)
class Tally:
    """Running sums over tiles, in float64.

    count     elements
    measured  those that are finite and do not decode to NaN: the sums are over them
    lost      those that are finite and decode to NaN
    """

    signal: float = 0.0
    noise: float = 0.0
    max_error: float = 0.0
    count: int = 0
    measured: int = 0
    lost: int = 0
    clipped: int = 0
    zeroed: int = 0
    nan: int = 0

    def add(self, values: Array, decoded: Array, largest: Array | None = None) -> None:
        """Count a tile of values that decode to `decoded`; largest is the magnitude each could decode to at most."""
        x, q = values.astype(np.float64), decoded.astype(np.float64)
        finite, nan = np.isfinite(x), np.isnan(q)
        counted = finite & ~nan
        error = np.subtract(q, x, where=counted, out=np.zeros_like(x))
        self.signal += _energy(np.where(counted, x, 0))
        self.noise += _energy(error)
        self.max_error = max(self.max_error, float(np.abs(error).max(initial=0)))
        self.count += x.size
        self.measured += int(counted.sum())
        self.lost += int((finite & nan).sum())
        self.nan += int(nan.sum())
        self.zeroed += int(((x != 0) & (q == 0)).sum())
        if largest is not None:
            self.add_clipped(x, q, largest)

    def add_clipped(self, values: Array, decoded: Array, largest: Array) -> None:
        """Count the elements that are beyond the largest magnitude they could decode to."""
        over = np.abs(values.astype(np.float64)) > largest.astype(np.float64) * OVER
        self.clipped += int((over & (decoded != values)).sum())

    @property
    def sqnr_db(self) -> float:
        if self.count and not self.measured:
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 and self.noise < math.inf else -math.inf

    @property
    def relative_error(self) -> float:
        if self.count and not self.measured:
            return math.nan
        if self.noise == 0:
            return 0.0
        return math.sqrt(self.noise / self.signal) if self.signal else math.inf


def _energy(values: npt.NDArray[np.float64]) -> float:
    # not a BLAS dot: its threads cost more than the sum on a busy machine
    return float(np.square(values).sum())


def measure(values: Array, format: Format | str, *, seed: int = 0) -> FormatError:
    """What one format makes of a matrix (..., k), tile by tile: the numbers of FormatError.

    Peak memory is some tens of megabytes beside the input, and the quantized matrix where a tile alone would be
    quantized otherwise: by formats with a scale a row, a rotation or draws (by seed).
    """
    matrix = values.reshape(-1, values.shape[-1]) if values.size else np.zeros((0, 1), np.float32)
    format = as_format(format).resolve(np.dtype(np.float32) if matrix.dtype == np.float64 else matrix.dtype)
    tally = Tally()
    with np.errstate(all="ignore"):
        if format.storage.rht or format.is_stochastic or format.measures_rows:
            _tally_rows(tally, host(matrix), format, seed)
        else:
            amax = host(ops.amax(matrix)) if format.measures_amax else None
            for tile in tiles(matrix.shape):
                x = host(matrix[tile]).astype(np.float32)
                part = ops.quantize(x, rowwise=format, amax=amax).rowwise
                assert part is not None
                tally.add(x, _decode(part), _decode(_largest(part)))
    count = max(tally.count, 1)
    nbytes = part_layout(format.storage, matrix.shape).nbytes if tally.count else 0
    return FormatError(
        format.name, tally.sqnr_db, tally.relative_error, tally.max_error, tally.clipped / count,
        tally.zeroed / count, tally.nan / count, nbytes / count,
    )


def _tally_rows(tally: Tally, matrix: npt.NDArray[Any], format: Format, seed: int) -> None:
    """Quantize a matrix as a whole, and count some rows at a time; those of rotated parts are clipped as rotated."""
    part = ops.quantize(matrix, rowwise=format, seed=seed).rowwise
    assert part is not None
    outer, k = matrix.shape
    height = max(1, TILE * TILE // max(k, 1))
    for top in range(0, outer, height):
        rows = rows_of(part, top, min(top + height, outer))
        x = matrix[top : top + height].astype(np.float32)
        tally.add(x, _decode(rows))
        if format.storage.rht:
            x = hadamard.rotate(x, k)
        stored, largest = (dequantize_part(p, np.dtype(np.float32), rotated=True) for p in (rows, _largest(rows)))
        tally.add_clipped(x, stored, largest)


def rows_of(part: QuantizedArray, top: int, bottom: int) -> QuantizedArray:
    """Views of some rows of a part; top is on the border of its blocks."""
    storage, scales, whole = part.format.storage, part.scales, part.global_scale
    if storage.block is not None:
        scales = scales[top // storage.block[0] : -(-bottom // storage.block[0])]
    if whole is not None and storage.global_per_row:
        whole = whole[top:bottom]
    return QuantizedArray(part.format, (bottom - top, part.shape[1]), Separate(part.codes[top:bottom], scales, whole))


def tiles(shape: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Slices of at most TILE x TILE that cover a matrix."""
    for top in range(0, shape[0], TILE):
        for left in range(0, shape[1], TILE):
            yield slice(top, top + TILE), slice(left, left + TILE)


def host(array: Array) -> npt.NDArray[Any]:
    """The array itself, or a copy of it in host memory where it is CuPy's."""
    return array if isinstance(array, np.ndarray) else array.get()


def _decode(part: QuantizedArray) -> Array:
    return HybridArray(part).dequantize()


def _largest(part: QuantizedArray) -> QuantizedArray:
    """A copy of a part with every code at the largest finite magnitude of its element."""
    element = part.format.storage.element
    copy = part.copy()
    codes = copy.codes
    if element.bits > 8:
        codes[...] = element.max
    else:
        codes[...] = sum(element.max_code << shift for shift in range(0, 8, element.stored_bits))
    return copy


# --- many formats -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Errors of several formats on one matrix, in the order asked for.

    A table wherever it is shown: as text, in a terminal through rich, in Jupyter as HTML.
    """

    shape: tuple[int, ...]
    dtype: str
    errors: tuple[FormatError, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values: shape, dtype and one dict for each format."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "formats": {error.format: {k: v for k, v in asdict(error).items() if k != "format"} for error in self},
        }

    def __iter__(self) -> Iterator[FormatError]:
        return iter(self.errors)

    def __len__(self) -> int:
        return len(self.errors)

    def __getitem__(self, format: str | int) -> FormatError:
        """The errors of one format, by name or place."""
        if isinstance(format, int):
            return self.errors[format]
        for error in self.errors:
            if error.format == format:
                return error
        raise KeyError(f"{format!r} was not compared; there are {', '.join(error.format for error in self.errors)}")

    def table(self) -> TextTable:
        """The numbers as text cells."""
        rows = tuple(
            (error.format, decibels(error.sqnr_db), percent(error.relative_error), f"{error.max_error:.3g}",
             percent(error.clipped), percent(error.zeroed), percent(error.nan), f"{error.bytes_per_element:.3f}")
            for error in self.errors
        )
        head = ("format", "SQNR dB", "error %", "max error", "clipped %", "zeroed %", "NaN %", "B/elem")
        return TextTable(head, rows, f"{' x '.join(map(str, self.shape))} {self.dtype}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[TextTable]:
        yield self.table()

    def _repr_html_(self) -> str:
        return self.table().html()

    def __repr__(self) -> str:
        return self.table().text()


def _named(format: Format | str) -> Format:
    if isinstance(format, str) and format not in FORMATS and format in RECIPES:
        recipe = RECIPES[format]
        pairs = (f"{role} {'/'.join(dict.fromkeys(f.name for f in recipe[role]))}" for role in ROLES)
        raise ValueError(
            f"{format!r} is a recipe, which names formats for the three operands of a layer ({', '.join(pairs)}); "
            f"compare takes formats, such as {recipe.input[0].name!r}"
        )
    return as_format(format)


def compare(
    x: Any, formats: Iterable[Format | str] | Format | str | None = None, *, seed: int = 0
) -> Comparison:
    """Compare what formats make of a matrix.

    x        (..., k) float array that quantize takes; blocks run along the last axis, for the other one pass x.T
    formats  names or formats; default every row of FORMATS
    seed     of formats that round at random
    returns  Comparison, one FormatError for each format, in the order given

    Works in tiles: peak memory does not grow with x, but by the quantized matrix of formats that need it as a whole
    (a scale for each row, rotated values, draws). Raises TypeError for a dtype that quantize cannot read,
    ValueError for an unknown format.
    """
    x = as_array(x, "x")
    if isinstance(formats, (Format, str)):
        formats = (formats,)
    wanted = [_named(format) for format in (FORMATS if formats is None else formats)]
    if x.ndim == 0:
        raise ValueError("x is 0-D; a matrix has at least one axis, reshape it to (1, 1)")
    return Comparison(x.shape, x.dtype.name, tuple(measure(x, format, seed=seed) for format in wanted))


# --- tables -------------------------------------------------------------------------------------


def decibels(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else {math.inf: "exact", -math.inf: "-inf"}.get(value, "nan")


def percent(share: float) -> str:
    """A share in percent, without the sign: 3.72, <0.01, 0."""
    if share == 0:
        return "0"
    return "<0.01" if share < 5e-5 else f"{100 * share:.2f}"


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells as text, the first column left-aligned: rendered by rich, as HTML or as plain text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    rules: Sequence[int] = field(default=())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        from rich.text import Text

        if self.title:  # not the table's own title, which wraps at the width of the table
            yield Text(self.title, style="bold")
        yield self.at_width(options.max_width)

    def at_width(self, width: int) -> Table:
        """A rich table without the title, no number cut.

        Where it would be too wide, names in the first column are broken; where that is not enough, each row is a
        list of its cells, one a line.
        """
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        widths = [max(map(_width, column)) for column in zip(self.head, *self.rows, strict=True)]
        gap = 2 if sum(widths) + 2 * len(widths) - 2 <= width else 1
        spare = width - sum(widths[1:]) - gap * (len(widths) - 1)
        first = [row[0] if widths[0] <= spare else break_name(row[0], spare) for row in self.rows]
        if max(map(_width, (self.head[0], *first))) > spare:
            return self._lists(width)
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, gap - 1, 0, 0), pad_edge=False)
        for number, name in enumerate(self.head):
            table.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
        for number, (name, row) in enumerate(zip(first, self.rows, strict=True), 1):
            table.add_row(*(Text(cell) for cell in (name, *row[1:])), end_section=number in self.rules)
        return table

    def _lists(self, width: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        spare = width - 1 - max((_width(cell) for row in self.rows for cell in row[1:]), default=0)
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column(overflow="fold")
        table.add_column(justify="right", overflow="fold")
        for row in self.rows:
            table.add_row(Text(break_name(row[0], spare)), "")
            for name, cell in zip(self.head[1:], row[1:], strict=True):
                table.add_row(Text(f"  {' '.join(name.split())}"), Text(cell))
        return table

    def text(self, width: int = 80) -> str:
        from io import StringIO

        from rich.console import Console

        console = Console(file=StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]

    def html(self) -> str:
        """A <table>; everything in it is escaped."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.head)
        body = "".join(
            "<tr>" + f"<th>{escape(row[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
            for row in self.rows
        )
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def break_name(name: str, width: int) -> str:
    """A name on lines of at most width, broken after "_" and the marks between fields, where it has one there."""
    lines = [""]
    for piece in re.findall(r"[^_,(=/]*[_,(=/]|[^_,(=/]+", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _width(cell: str) -> int:
    return max(map(len, cell.split("\n")))
