"""A matrix in pieces on several ranks: quantized as the whole would be, and gathered as codes and scales.

Sharding.agreed says once who holds which rows; quantize_sharded gives the piece's codes as they are in the whole, and
all_gather of these is hq.quantize(whole), byte for byte, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Literal
from zlib import crc32

from hqarray import ops
from hqarray.arrays import DIRECTIONS, Direction, HybridArray, QuantizedArray
from hqarray.buffers import Packed
from hqarray.formats import Format, as_format
from hqarray.grouped_parts import on_device
from hqarray.inputs import Slots, as_array, expect_one_amax
from hqarray.layout import Array, PartLayout, namespace, part_layout
from hqarray.shards import Shard, expect_whole_blocks, quantize_shard

from .distributed import as_ranks, exchange

AXES = ("rows", "columns")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a matrix is cut: along one axis, a piece for each rank in their order. Pieces may be empty.

    shape    (rows, columns) of the matrix
    borders  where each piece begins, and where the last one ends: (ranks + 1,)
    axis     0: pieces are rows, 1: they are columns
    """

    shape: tuple[int, int]
    borders: tuple[int, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", Shard((0, 0), self.shape).shape)
        object.__setattr__(self, "borders", tuple(int(n) for n in self.borders))
        if self.axis not in (0, 1):
            raise ValueError(f"Sharding: axis={self.axis!r} is 0 (pieces are rows) or 1 (columns)")
        borders, length = self.borders, self.shape[self.axis]
        if len(borders) < 2 or borders[0] != 0 or borders[-1] != length or any(a > b for a, b in pairwise(borders)):
            raise ValueError(f"Sharding: borders rise from 0 to the {length} {AXES[self.axis]}, these are {borders}")

    @classmethod
    def even(cls, shape: tuple[int, int], count: int, *, axis: int = 0, step: int = 1) -> Sharding:
        """Pieces of nearly equal length that begin on multiples of `step` (shard_alignment says which)."""
        blocks = -(-shape[axis] // step)
        borders = [min(blocks * i // count * step, shape[axis]) for i in range(count + 1)]
        return cls(shape, tuple(borders), axis)

    @classmethod
    def agreed(cls, values: Any, ranks: Any, *, axis: int = 0) -> Sharding:
        """The sharding of what the ranks hold now: each tells the others its shape. Synchronises.

        Every rank raises the same ValueError where their pieces are no matrix together.
        """
        ranks, values = as_ranks(ranks), as_array(values, "values")
        two = values.shape if values.ndim == 2 else (-1, -1)
        every = exchange(ranks, (values.ndim, *two, crc32(values.dtype.name.encode()), axis), values)
        across = [(ndim, pair[1 - axis], dtype, along) for ndim, *pair, dtype, along in every]
        if values.ndim != 2 or len(set(across)) > 1:
            shapes = ", ".join(f"rank {i} {tuple(pair)}" for i, (_, *pair, _, _) in enumerate(every))
            other = "columns" if axis == 0 else "rows"
            raise ValueError(
                f"pieces of a matrix along axis {axis} are 2-D, of one dtype and as many {other}; {ranks} found shapes "
                f"{shapes} (-1: not 2-D), dtypes {'alike' if len({x[2] for x in across}) == 1 else 'that differ'}"
            )
        borders = [0]
        for _, *pair, _, _ in every:
            borders.append(borders[-1] + pair[axis])
        shape = (borders[-1], two[1]) if axis == 0 else (two[0], borders[-1])
        return cls(shape, tuple(borders), axis)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Length of each piece along the axis."""
        return tuple(end - start for start, end in pairwise(self.borders))

    @property
    def T(self) -> Sharding:
        """That of the transpose."""
        return Sharding(self.shape[::-1], self.borders, 1 - self.axis)

    def slices(self, rank: int) -> tuple[slice, slice]:
        """A rank's piece of the matrix: matrix[sharding.slices(rank)]."""
        mine, other = slice(*self.borders[rank : rank + 2]), slice(0, self.shape[1 - self.axis])
        return (mine, other) if self.axis == 0 else (other, mine)

    def shard(self, rank: int) -> Shard:
        """The place of a rank's piece."""
        rows, columns = self.slices(rank)
        return Shard((rows.start, columns.start), self.shape)

    def piece_shape(self, rank: int) -> tuple[int, int]:
        rows, columns = self.slices(rank)
        return rows.stop - rows.start, columns.stop - columns.start

    def expect(self, shape: tuple[int, ...], ranks: Any, what: str) -> None:
        """Raises ValueError where a rank's piece has another shape, or there are not so many ranks."""
        if len(self.borders) != ranks.size + 1:
            raise ValueError(f"this Sharding has {len(self.borders) - 1} pieces, and {ranks} is one of {ranks.size}")
        if tuple(shape) != self.piece_shape(ranks.rank):
            raise ValueError(
                f"{what} on {ranks} is {tuple(shape)}; the Sharding of {self.shape} has {self.piece_shape(ranks.rank)} "
                f"there: make it with Sharding.agreed(values, ranks)"
            )


# --- quantize -----------------------------------------------------------------------------------


def quantize_sharded(
    values: Any,
    sharding: Sharding,
    ranks: Any,
    *,
    rowwise: Format | str | None = None,
    columnwise: Format | str | None = None,
    columnwise_source: Literal["original", "rowwise_dequantized"] = "original",
    amax: Any = None,
    seed: Any = None,
) -> HybridArray:
    """Quantize this rank's piece of a matrix to the bytes that it has in the whole; all ranks call it.

    values    the piece, as the sharding has it
    ranks     as as_ranks takes them
    rowwise, columnwise, columnwise_source, seed  as in quantize; the same on all ranks
    amax      of the whole matrix, or a slot of a DelayedScaling; None: measured where a format needs it, and the
              largest of all ranks taken, one float32 for each such call
    returns   HybridArray of the piece

    Formats with one scale may be cut anywhere; those with blocks on multiples of shard_alignment, which every rank
    checks for all pieces before anything is sent: where one would cut a block, all raise the same ValueError.
    """
    ranks, values = as_ranks(ranks), as_array(values, "values")
    sharding.expect(values.shape, ranks, "the piece")
    nominal = ops._nominal(values.dtype)
    formats: dict[Direction, Format] = {
        direction: as_format(format).resolve(nominal)
        for direction, format in zip(DIRECTIONS, (rowwise, columnwise), strict=True) if format is not None
    }
    _expect_no_cut(formats, sharding)
    measuring = [format for format in formats.values() if format.measures_amax]
    if amax is not None:
        expect_one_amax(formats.values())
    shard = sharding.shard(ranks.rank)
    derived = columnwise_source == "rowwise_dequantized" and len(formats) == 2
    is_one_call = not derived and (len(measuring) < 2 or not any(format.storage.rht for format in measuring))
    if is_one_call or len(formats) != 2:
        given = _amax_of_all(values, formats, amax, ranks)
        return quantize_shard(values, shard, **_named(formats), amax=given, seed=seed)
    row, column = ({direction: formats[direction]} for direction in DIRECTIONS)
    rows = quantize_shard(values, shard, **_named(row), amax=_amax_of_all(values, row, amax, ranks), seed=seed)
    if derived:  # what was recorded is the amax of the values
        values, amax = rows.dequantize(dtype="float32"), amax.amax if isinstance(amax, Slots) else amax
    given = _amax_of_all(values, column, amax, ranks)
    columns = quantize_shard(values, shard, **_named(column), amax=given, seed=seed)
    return HybridArray(
        rows.rowwise, columns.columnwise, rows.shape, rows.dtype, "columnwise" if derived else None
    )


def _named(formats: dict[Direction, Format]) -> dict[str, Any]:
    """As keywords."""
    return {str(direction): format for direction, format in formats.items()}


def _expect_no_cut(formats: dict[Direction, Format], sharding: Sharding) -> None:
    for rank in range(len(sharding.borders) - 1):
        ends = tuple(piece.stop for piece in sharding.slices(rank))
        for direction, format in formats.items():
            expect_whole_blocks(format, direction, sharding.shard(rank), ends)


def _amax_of_all(values: Array, formats: dict[Direction, Format], amax: Any, ranks: Any) -> Any:
    """The amax that formats need: what was given, or the largest of all ranks; None where they need none."""
    needing = [(direction, format) for direction, format in formats.items() if format.measures_amax]
    if not needing:
        return None
    if amax is not None:
        return amax
    direction, format = needing[0]
    measured = ops.amax(values if direction == "rowwise" else values.T, format)
    ranks.all_reduce_max(measured)
    return measured


# --- gather -------------------------------------------------------------------------------------


def all_gather(
    array: HybridArray, sharding: Sharding, ranks: Any, *, only: Direction | None = None
) -> HybridArray:
    """The whole matrix from the pieces that quantize_sharded made, on every rank: the bytes of quantize(whole).

    array    this rank's piece
    only     the part that the next GEMM reads: "rowwise" for `X @ b`, "columnwise" for `a @ X`; None gathers those
             that are there
    returns  HybridArray of the whole shape in buffers of its own

    Codes and scales travel, not values. Along the axis of the blocks' rows codes arrive where they stay, and scales
    (which lie block by block) are put in place by one copy; along the other one all of a piece is one message, which
    is put in place on arrival. A scale, global scale or amax of the whole matrix does not travel.
    """
    ranks = as_ranks(ranks)
    sharding.expect(array.shape, ranks, "the piece")
    if only is not None:
        array.part(only, "all_gather")
    gathered = {
        direction: _gather(part, sharding if direction == "rowwise" else sharding.T, ranks)
        for direction, part in array.parts() if only in (None, direction)
    }
    derived = array.derived if array.derived in gathered else None
    return HybridArray(
        gathered.get("rowwise"), gathered.get("columnwise"), sharding.shape, array.dtype, derived
    )


def _gather(part: QuantizedArray, sharding: Sharding, ranks: Any) -> QuantizedArray:
    """A part of the whole; sharding is that of the (outer, k) matrix."""
    _expect_no_cut({"rowwise": part.format}, sharding)
    with on_device(part.device):
        part = part.packed()
        whole = _allocate(part, sharding.shape)
        ours, all_ = part.buffers, whole.buffers
        assert isinstance(ours, Packed) and isinstance(all_, Packed)
        layouts = [part_layout(part.format.storage, sharding.piece_shape(i)) for i in range(ranks.size)]
        is_outer = sharding.axis == 0
        if is_outer:
            outer = sharding.shape[0]
            ranks.all_gather(ours.padded_codes[: part.shape[0]], all_.padded_codes[:outer], sharding.sizes)
        if not is_outer or _has_scales_of_pieces(part.format):
            starts = [layout.scales_offset if is_outer else 0 for layout in layouts]
            sizes = [layout.nbytes - start for layout, start in zip(layouts, starts, strict=True)]
            mine = ours.base[starts[ranks.rank] :]
            messages = namespace(mine).empty(sum(sizes), mine.dtype)
            ranks.all_gather(mine, messages, sizes)
            _put_in_place(whole, messages, starts, layouts, sharding)
        for name in ("scales", "global_scale", "amax"):  # of the whole matrix: equal on all ranks
            target, source = getattr(all_, name), getattr(ours, name)
            if target is not None and not _is_of_pieces(part.format, name):
                target[...] = source
    return whole


def _is_of_pieces(format: Format, name: str) -> bool:
    """Whether scales, or global scales, are those of blocks or rows, and not of the matrix."""
    storage = format.storage
    return storage.block is not None if name == "scales" else name == "global_scale" and storage.global_per_row


def _has_scales_of_pieces(format: Format) -> bool:
    return _is_of_pieces(format, "scales") or _is_of_pieces(format, "global_scale")


def _allocate(part: QuantizedArray, shape: tuple[int, int]) -> QuantizedArray:
    """A part of another shape whose padding is zero; its codes are not where they have none."""
    layout = part_layout(part.format.storage, shape)
    codes, buffers = layout.codes, part.buffers
    assert isinstance(buffers, Packed)
    base = namespace(buffers.base).empty(layout.nbytes, buffers.base.dtype)
    is_full = (codes.outer, codes.columns) == (codes.rows, codes.pitch)
    base[codes.nbytes if is_full else 0 :] = 0
    return QuantizedArray(
        part.format, shape, Packed.of(base, layout, buffers.has_global_scale, buffers.has_amax)
    )


def _put_in_place(
    whole: QuantizedArray, messages: Array, starts: Sequence[int], layouts: Sequence[PartLayout], sharding: Sharding
) -> None:
    """Pieces that arrived one behind another, each from byte `start` of its buffer on, into the whole part."""
    storage, axis, end = whole.format.storage, sharding.axis, 0
    codes, scales, globals_ = whole.codes, whole.scales, whole.global_scale
    for start, layout, (first, last) in zip(starts, layouts, pairwise(sharding.borders), strict=True):
        piece, end = messages[end : end + layout.nbytes - start], end + layout.nbytes - start
        if first == last:
            continue
        if axis == 1:
            own, column = layout.codes, first * layout.codes.stored_bits // (8 * layout.codes.itemsize)
            padded = piece[: own.nbytes].view(codes.dtype).reshape(own.rows, own.pitch)
            codes[:, column : column + own.columns] = own.view(padded)
        if storage.block is not None:
            tiles = _segment(piece, layout.scales_offset - start, layout.scales_shape, scales.dtype)
            own_scales = layout.scales.untile(tiles, *layout.num_scales)
            block = first // storage.block[axis]
            blocks = slice(block, block + own_scales.shape[axis])
            scales[(blocks, slice(None)) if axis == 0 else (slice(None), blocks)] = own_scales
        if storage.global_per_row and globals_ is not None:
            count = layout.num_global_scales
            rows = slice(first, first + count) if axis == 0 else slice(None)  # along k one piece is whole rows
            globals_[rows] = _segment(piece, layout.global_scale_offset - start, (count,), globals_.dtype)


def _segment(memory: Array, offset: int, shape: tuple[int, ...], dtype: Any) -> Array:
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


__all__ = ["Sharding", "all_gather", "quantize_sharded"]
