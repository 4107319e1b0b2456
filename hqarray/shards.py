"""Pieces of a matrix that lie in different processes, quantized as the matrix would be.

One amax for the whole matrix is hq.amax(piece, format), of a rotated columnwise part hq.amax(piece.T, format), reduced
over all processes (MAX) by NCCL or MPI, and then given to quantize_shard. Whatever else a format needs lies within a
piece that cuts no block.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from operator import index
from typing import Any

from . import ops
from .arrays import DIRECTIONS, Direction, HybridArray
from .formats import ROW, Block, Format, as_format
from .inputs import as_array
from .philox import Draws

MOST = 1 << 62
"""Rows or columns that a matrix may have."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a piece lies in a matrix.

    first  (row, column) of its first element
    shape  (rows, columns) of the matrix
    """

    first: tuple[int, int]
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        for name in ("first", "shape"):
            pair = getattr(self, name)
            try:
                numbers = tuple(index(n) for n in pair)
            except TypeError as error:
                raise ValueError(f"Shard: {name}={pair!r} is not two integers, 0 or more") from error
            if len(numbers) != 2 or any(isinstance(n, bool) or not 0 <= n <= MOST for n in pair):
                raise ValueError(f"Shard: {name}={pair!r} is not two integers, of rows and columns, from 0 to 2**62")
            object.__setattr__(self, name, numbers)
        if any(first > whole for first, whole in zip(self.first, self.shape, strict=True)):
            raise ValueError(f"Shard: first={self.first} lies beyond the matrix {self.shape}")


def shard_alignment(
    *, rowwise: Format | str | None = None, columnwise: Format | str | None = None
) -> tuple[int, int]:
    """(rows, columns) of which a shard must begin on multiples, and end on one or with the matrix.

    FP8 with one scale and unquantized parts have (1, 1). A part's blocks begin at its first element, so a shard that
    cuts one has no part: mxfp8 rows have (1, 32) and columns (32, 1), squares their side both ways. Where each row has
    a scale, a shard is whole rows: ROW.
    """
    steps = [_step(as_format(format), direction)
             for format, direction in zip((rowwise, columnwise), DIRECTIONS, strict=True) if format is not None]
    return lcm(*(rows for rows, _ in steps)), lcm(*(columns for _, columns in steps))


def _step(format: Format, direction: Direction) -> Block:
    """The same for one part, in rows and columns of the matrix."""
    if format.scaling is None:
        return (1, 1)
    storage, one = format.storage, (1, 1)
    outer, k = (lcm(a, b) for a, b in zip(format.amax_block or one, storage.block or one, strict=True))
    k = ROW if format.measures_rows else lcm(k, max(1, 8 // storage.element.stored_bits))  # a byte is not cut
    return (outer, k) if direction == "rowwise" else (k, outer)


def quantize_shard(
    values: Any,
    shard: Shard,
    *,
    rowwise: Format | str | None = None,
    columnwise: Format | str | None = None,
    amax: Any = None,
    seed: Any = None,
) -> HybridArray:
    """Quantize a piece of a matrix to the bytes that it has in the whole.

    values   (rows, columns), the piece; dtypes and places as in quantize
    shard    where it lies
    rowwise, columnwise  as in quantize; shard_alignment says where a shard may begin and end
    amax     of the whole matrix, for formats with one per matrix: the largest hq.amax(piece, format) of all pieces, of
             a columnwise part that is rotated (rht) the largest hq.amax(piece.T, format), or a slot of a DelayedScaling
    seed     as in quantize, the same for all pieces: each draws as its elements do in the whole
    returns  HybridArray of the piece's shape: its codes and block scales are those of the whole, cut out

    Raises ValueError for a shard that is not in the matrix or cuts a block, or where the amax is not given.
    """
    if not isinstance(shard, Shard):
        raise TypeError(f"shard is {shard!r}; pass hq.Shard(first, shape), the piece's place and the matrix's shape")
    values = as_array(values, "values")
    if values.ndim != 2:
        raise ValueError(f"a shard is 2-D, not {values.shape}; pass the 2-D view and its place in that of the whole")
    ends = tuple(first + n for first, n in zip(shard.first, values.shape, strict=True))
    if any(end > whole for end, whole in zip(ends, shard.shape, strict=True)):
        raise ValueError(f"values of {values.shape} at {shard.first} reach beyond the matrix {shard.shape}")
    formats = {direction: as_format(format).resolve(ops.nominal_dtype(values.dtype))
               for direction, format in zip(DIRECTIONS, (rowwise, columnwise), strict=True) if format is not None}
    for direction, format in formats.items():
        expect_whole_blocks(format, direction, shard, ends)
    if amax is None and values.shape != shard.shape and any(format.measures_amax for format in formats.values()):
        names = ", ".join(format.name for format in formats.values() if format.measures_amax)
        column = formats.get("columnwise")
        turned = column is not None and column.measures_amax and column.storage.rht
        raise ValueError(
            f"{names} has one amax for the whole matrix, and a shard measures its own; pass amax=, the largest "
            f"hq.amax({'values.T' if turned else 'values'}, format) of all shards (an all-reduce with MAX)"
        )
    return ops.quantize(
        values, rowwise=rowwise, columnwise=columnwise, amax=amax,
        seed=None if seed is None else Draws(seed, first=shard.first),
    )


def expect_whole_blocks(format: Format, direction: Direction, shard: Shard, ends: tuple[int, ...]) -> None:
    """Raises ValueError where a shard that reaches to `ends` cuts a block of a part, and says what to do."""
    places = zip(("rows", "columns"), _step(format, direction), shard.first, ends, shard.shape, strict=True)
    for axis, step, first, end, whole in places:
        if first == end or (first % step == 0 and (end % step == 0 or end == whole)):
            continue
        where = f"a shard of {axis} {first} to {end} of {whole} cuts a block of {direction}={format.name}"
        if step >= ROW:
            raise ValueError(f"{where}, whose scales are of all {axis}; shard the other axis, or gather these first")
        raise ValueError(
            f"{where}; begin shards on multiples of {step} {axis} and end them on one or with the matrix "
            f"(hq.shard_alignment says which), or quantize this direction where those {axis} are together"
        )


__all__ = ["Shard", "quantize_shard", "shard_alignment"]
