"""A matrix in pieces on several ranks: quantized as the whole would be, and gathered as codes and scales.

Sharding.agreed says once who holds which rows; quantize_sharded gives the piece's codes as they are in the whole, and
all_gather of these is hq.quantize(whole), byte for byte, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np

from hqarray import ops
from hqarray.arrays import DIRECTIONS, Direction, HybridArray, QuantizedArray
from hqarray.buffers import Packed
from hqarray.formats import Format, as_format
from hqarray.grouped_parts import on_device
from hqarray.inputs import Slots, as_array, expect_one_amax
from hqarray.layout import Array, PartLayout, namespace, part_layout
from hqarray.philox import Draws
from hqarray.shards import Shard, expect_whole_blocks, quantize_shard, shard_alignment

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
    for direction, format in formats.items():
        _cuts_no_block(direction, format, sharding)


@lru_cache(maxsize=1024)
def _cuts_no_block(direction: Direction, format: Format, sharding: Sharding) -> None:
    """Raises ValueError where it does; looked up where it was found not to."""
    for rank in range(len(sharding.borders) - 1):
        ends = tuple(piece.stop for piece in sharding.slices(rank))
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
        whole = _allocate(part.format, sharding.shape, namespace(part.codes), part.amax is not None)
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
            _put_in_place(whole, messages, starts, layouts, list(pairwise(sharding.borders)), sharding.axis)
        _put_scalars(whole, part)
    return whole


def _put_scalars(whole: QuantizedArray, part: QuantizedArray) -> None:
    """Scales of the whole matrix, which are equal on all ranks."""
    for name in ("scales", "global_scale", "amax"):
        target, source = getattr(whole, name), getattr(part, name)
        if target is not None and not _is_of_pieces(whole.format, name):
            target[...] = source


def _is_of_pieces(format: Format, name: str) -> bool:
    """Whether scales, or global scales, are those of blocks or rows, and not of the matrix."""
    storage = format.storage
    return storage.block is not None if name == "scales" else name == "global_scale" and storage.global_per_row


def _has_scales_of_pieces(format: Format) -> bool:
    return _is_of_pieces(format, "scales") or _is_of_pieces(format, "global_scale")


def _allocate(format: Format, shape: tuple[int, int], module: Any, has_amax: bool) -> QuantizedArray:
    """A part whose padding is zero; its codes are not where they have none."""
    layout = part_layout(format.storage, shape)
    codes = layout.codes
    base = module.empty(layout.nbytes, np.uint8)
    is_full = (codes.outer, codes.columns) == (codes.rows, codes.pitch)
    base[codes.nbytes if is_full else 0 :] = 0
    return QuantizedArray(format, shape, Packed.of(base, layout, format.storage.global_scale, has_amax))


def _put_in_place(
    whole: QuantizedArray, messages: Array, starts: Sequence[int], layouts: Sequence[PartLayout],
    places: Sequence[tuple[int, int]], axis: int,
) -> None:
    """Pieces that arrived one behind another, each from byte `start` of its buffer on, into their places."""
    storage, end = whole.format.storage, 0
    codes, scales, globals_ = whole.codes, whole.scales, whole.global_scale
    for start, layout, (first, last) in zip(starts, layouts, places, strict=True):
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


# --- both ---------------------------------------------------------------------------------------


def quantize_all_gather(
    values: Any,
    sharding: Sharding,
    ranks: Any,
    *,
    rowwise: Format | str | None = None,
    columnwise: Format | str | None = None,
    amax: Any = None,
    seed: Any = None,
    chunks: int = 2,
) -> HybridArray:
    """all_gather(quantize_sharded(...)), chunk by chunk: the next chunk is quantized while the last one travels.

    chunks  of a piece, where there is one format whose rows (of columnwise: columns) are what is cut; each is a call of
            quantize and one of the engine. Otherwise, and for 1, all is quantized first.
    Otherwise as in quantize_sharded; the bytes do not depend on chunks.
    """
    ranks, values = as_ranks(ranks), as_array(values, "values")
    direction: Direction = "rowwise" if sharding.axis == 0 else "columnwise"
    given = rowwise if sharding.axis == 0 else columnwise
    if chunks < 1:
        raise ValueError(f"chunks={chunks}: 1 or more")
    if chunks == 1 or given is None or None not in (rowwise, columnwise):
        piece = quantize_sharded(
            values, sharding, ranks, rowwise=rowwise, columnwise=columnwise, amax=amax, seed=seed
        )
        return all_gather(piece, sharding, ranks)
    sharding.expect(values.shape, ranks, "the piece")
    format = as_format(given).resolve(ops._nominal(values.dtype))
    _expect_no_cut({direction: format}, sharding)
    with on_device(values.device):
        whole = _gather_chunks(values, sharding, ranks, direction, format, (amax, seed), chunks)
    parts: dict[str, Any] = {direction: whole}
    return HybridArray(**parts, shape=sharding.shape, dtype=ops._nominal(values.dtype))


class _Chunk(NamedTuple):
    """One chunk of each rank's piece: places in the whole, places in the piece, and how parts of them lie.

    starts  bytes of each part's buffer ahead of its scales
    ends    where the scales of each rank lie in what arrives
    """

    places: list[tuple[int, int]]
    own: list[slice]
    layouts: list[PartLayout]
    starts: list[int]
    ends: list[int]


@lru_cache(maxsize=1024)
def _chunks(format: Format, sharding: Sharding, count: int) -> list[_Chunk]:
    """Chunks that begin on whole blocks, of a part whose rows are cut.

    Each is twice as long as the one before: quantizing is at least twice as fast as sending, so that the next chunk is
    ready when the link is, and the link waits for the shortest alone.
    """
    k, step = sharding.shape[1 - sharding.axis], shard_alignment(rowwise=format)[0]
    cuts = [[min(size, -(-size // step) * (2**i - 1) // (2**count - 1) * step) for i in range(count + 1)]
            for size in sharding.sizes]
    found = []
    for chunk in range(count):
        own = [slice(*cut[chunk : chunk + 2]) for cut in cuts]
        places = [(first + mine.start, first + mine.stop)
                  for first, mine in zip(sharding.borders, own, strict=False)]
        layouts = [part_layout(format.storage, (last - first, k)) for first, last in places]
        starts = [layout.scales_offset for layout in layouts]
        sizes = [layout.nbytes - start for layout, start in zip(layouts, starts, strict=True)]
        found.append(_Chunk(places, own, layouts, starts, [0, *accumulate(sizes)]))
    return found


def _gather_chunks(
    values: Array, sharding: Sharding, ranks: Any, direction: Direction, format: Format, given: tuple[Any, Any],
    count: int,
) -> QuantizedArray:
    """The part of the whole, whose rows are cut. given: amax and seed."""
    axis, module, (amax, seed) = sharding.axis, namespace(values), given
    amax = _amax_of_all(values, {direction: format}, amax, ranks)
    shape = sharding.shape if axis == 0 else sharding.shape[::-1]
    whole, part = _allocate(format, shape, module, format.measures_amax), None
    target, travelling, has_scales = whole.buffers, [], _has_scales_of_pieces(format)
    assert isinstance(target, Packed)
    codes = target.padded_codes
    for chunk in _chunks(format, sharding, count):
        mine, (first, _) = chunk.own[ranks.rank], chunk.places[ranks.rank]
        draws = None if seed is None else Draws(seed, first=(first, 0) if axis == 0 else (0, first))
        array = ops.quantize(
            values[mine] if axis == 0 else values[:, mine], **_named({direction: format}), amax=amax, seed=draws
        )
        part = array.part(direction)
        own, arriving = part.buffers, None
        assert isinstance(own, Packed)
        messages = [(own.padded_codes[: mine.stop - mine.start], [codes[a:b] for a, b in chunk.places])]
        if has_scales:
            arriving = module.empty(chunk.ends[-1], np.uint8)
            tail = own.base[chunk.starts[ranks.rank] :]
            messages.append((tail, [arriving[a:b] for a, b in pairwise(chunk.ends)]))
        travelling.append((ranks.start_spread(messages), arriving, chunk))
    for finish, arriving, chunk in travelling:
        finish()
        if arriving is not None:
            _put_in_place(whole, arriving, chunk.starts, chunk.layouts, chunk.places, 0)
    assert part is not None
    _put_scalars(whole, part)
    return whole


__all__ = ["Sharding", "all_gather", "quantize_all_gather", "quantize_sharded"]
