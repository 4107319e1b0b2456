"""Exploration: how far a matrix is from what formats make of it, as numbers and as tables.

Works in tiles, so memory stays bounded whatever the size of the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
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
from .tables import TextTable, break_name, decibels, percent

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

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
    matrix = as_matrix(values)
    format = resolved(format, matrix.dtype)
    tally = Tally()
    with np.errstate(all="ignore"):
        for x, part in quantized_tiles(matrix, format, seed):
            if format.storage.rht:  # clipped is what is beyond the largest rotated value
                tally.add(x, decode(part))
                stored, largest = (dequantize_part(p, x.dtype, rotated=True) for p in (part, _largest(part)))
                tally.add_clipped(hadamard.rotate(x, x.shape[1]), stored, largest)
            else:
                tally.add(x, decode(part), decode(_largest(part)))
    count = max(tally.count, 1)
    nbytes = part_layout(format.storage, matrix.shape).nbytes if tally.count else 0
    return FormatError(
        format.name, tally.sqnr_db, tally.relative_error, tally.max_error, tally.clipped / count,
        tally.zeroed / count, tally.nan / count, nbytes / count,
    )


def as_matrix(values: Array) -> Array:
    """The 2-D view (prod(shape[:-1]), shape[-1]) of an array; of an empty one a (0, 1) matrix."""
    return values.reshape(-1, values.shape[-1]) if values.size else np.zeros((0, 1), np.float32)


def resolved(format: Format | str, dtype: np.dtype[Any]) -> Format:
    """The format as it quantizes values of a dtype; float64 counts as the float32 that it is rounded to."""
    return as_format(format).resolve(np.dtype(np.float32) if dtype == np.float64 else dtype)


def quantized_tiles(matrix: Array, format: Format, seed: int = 0) -> Iterator[tuple[Array, QuantizedArray]]:
    """Float32 tiles of a matrix on the host and the part of each, as it lies in the part of the whole matrix.

    Where a tile alone would be quantized otherwise (a scale a row, a rotation, draws by seed) the matrix is quantized
    as a whole, and tiles are some of its rows.
    """
    if format.storage.rht or format.is_stochastic or format.measures_rows:
        matrix = host(matrix)
        whole = ops.quantize(matrix, rowwise=format, seed=seed).rowwise
        assert whole is not None
        height = max(1, TILE * TILE // max(matrix.shape[1], 1))
        for top in range(0, matrix.shape[0], height):
            bottom = min(top + height, matrix.shape[0])
            yield matrix[top:bottom].astype(np.float32), rows_of(whole, top, bottom)
        return
    amax = host(ops.amax(matrix)) if format.measures_amax else None
    for tile in tiles(matrix.shape):
        x = host(matrix[tile]).astype(np.float32)
        part = ops.quantize(x, rowwise=format, amax=amax).rowwise
        assert part is not None
        yield x, part


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


def decode(part: QuantizedArray) -> Array:
    """The values (outer, k) of one part."""
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

    def sorted(self, by: str, *, reverse: bool = False) -> Comparison:
        """The same, best first: by a field of FormatError, SQNR from the largest and all else from the smallest.

        NaN comes last, and formats that are equal keep their order. Raises ValueError for what is no field.
        """
        known = [f.name for f in fields(FormatError)]
        if by not in known:
            raise ValueError(f"sorted(by={by!r}): not one of {', '.join(known)}")
        values = [(getattr(error, by), error) for error in self.errors]
        numbers = [pair for pair in values if pair[0] == pair[0]]
        lost = [error for value, error in values if value != value]
        ordered = sorted(numbers, key=lambda pair: pair[0], reverse=(by == "sqnr_db") != reverse)
        return replace(self, errors=(*(error for _, error in ordered), *lost))

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


__all__ = ["Comparison", "FormatError", "Tally", "TextTable", "as_matrix", "break_name", "compare", "decibels",
           "decode", "host", "measure", "percent", "quantized_tiles", "resolved", "tiles"]
