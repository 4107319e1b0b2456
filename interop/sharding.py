"""A matrix in pieces on several ranks: quantized as the whole would be, and gathered as codes and scales.

Sharding.agreed says once who holds which rows; quantize_sharded gives the piece's codes as they are in the whole, and
all_gather of these is hq.quantize(whole), byte for byte, on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np

from hqarray import ops
from hqarray.arrays import DIRECTIONS, Direction, HybridArray, QuantizedArray
from hqarray.formats import Format, as_format
from hqarray.grouped_parts import memory_of, on_device
from hqarray.inputs import Slots, as_amax, as_array, as_draws, backend_of, expect_amaxes, expect_source
from hqarray.layout import Array, namespace, part_layout, round_up
from hqarray.philox import Draws
from hqarray.shards import Shard, expect_whole_blocks, quantize_shard, shard_alignment

from .distributed import Bytes, Ranks, as_ranks, exchange
from .pieces import (
    BYTES,
    Move,
    has_scales_of_pieces,
    memory_of_part,
    move,
    moves,
    part_of,
    scalars,
    whole_part,
)

AXES = {0: "rows", 1: "columns"}


def _expect_axis(axis: int) -> None:
    if axis not in AXES:
        raise ValueError(f"Sharding: axis={axis!r} is 0 (pieces are rows) or 1 (columns)")


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
        _expect_axis(self.axis)
        borders, length = self.borders, self.shape[self.axis]
        if len(borders) < 2 or borders[0] != 0 or borders[-1] != length or any(a > b for a, b in pairwise(borders)):
            raise ValueError(f"Sharding: borders rise from 0 to the {length} {AXES[self.axis]}, these are {borders}")

    @classmethod
    def even(cls, shape: tuple[int, int], count: int, *, axis: int = 0, step: int = 1) -> Sharding:
        """Pieces of nearly equal length that begin on multiples of `step` (shard_alignment says which)."""
        if axis not in AXES or count < 1 or step < 1:
            raise ValueError(f"Sharding.even: axis={axis!r} is 0 or 1, count={count!r} and step={step!r} are 1 or more")
        blocks = -(-shape[axis] // step)
        borders = [min(blocks * i // count * step, shape[axis]) for i in range(count + 1)]
        return cls(shape, tuple(borders), axis)

    @classmethod
    def agreed(cls, values: Any, ranks: Any, *, axis: int = 0) -> Sharding:
        """The sharding of what the ranks hold now: each tells the others its shape. Synchronises.

        Every rank raises the same ValueError where their pieces are no matrix together.
        """
        ranks = as_ranks(ranks)
        with ranks.agreement("Sharding.agreed") as said:
            values = as_array(values, "values")
            _expect_axis(axis)
            said += (f"axis {axis}",)
        two = values.shape if values.ndim == 2 else (-1, -1)
        every = exchange(ranks, (values.ndim, *two, crc32(values.dtype.name.encode()), axis), values)
        across = [(ndim, pair[1 - axis], dtype, along) for ndim, *pair, dtype, along in every]
        if values.ndim != 2 or len(set(across)) > 1:
            shapes = ", ".join(f"rank {i} {tuple(pair)}" for i, (_, *pair, _, _) in enumerate(every))
            other = "columns" if axis == 0 else "rows"
            axes = sorted({along for *_, along in across})
            raise ValueError(
                f"pieces of a matrix along axis {' and '.join(map(str, axes))} are 2-D, of one dtype and as many "
                f"{other}; {ranks} found shapes {shapes} (-1: not 2-D), dtypes "
                f"{'alike' if len({x[2] for x in across}) == 1 else 'that differ'}"
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
        mine = self.borders[rank + 1] - self.borders[rank]
        return (mine, self.shape[1]) if self.axis == 0 else (self.shape[0], mine)

    def expect(
        self, shape: tuple[int, ...], ranks: Any, what: str, remedy: str = "make it with Sharding.agreed(values, ranks)"
    ) -> None:
        """Raises ValueError where a rank's piece has another shape, or there are not so many ranks."""
        if len(self.borders) != ranks.size + 1:
            raise ValueError(f"{what}: this Sharding has {len(self.borders) - 1} pieces, and {ranks} is one of "
                             f"{ranks.size}; {remedy}")
        if tuple(shape) != self.piece_shape(ranks.rank):
            raise ValueError(f"{what} on {ranks} is {tuple(shape)}; of the whole {self.shape} it has "
                             f"{self.piece_shape(ranks.rank)}: {remedy}")


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
    ranks = as_ranks(ranks)
    with ranks.agreement("quantize_sharded") as said:
        values = as_array(values, "values")
        sharding.expect(values.shape, ranks, "the piece")
        nominal = ops.nominal_dtype(values.dtype)
        formats: dict[Direction, Format] = {
            direction: as_format(format).resolve(nominal)
            for direction, format in zip(DIRECTIONS, (rowwise, columnwise), strict=True) if format is not None
        }
        expect_no_cut(formats, sharding)
        expect_source(columnwise_source, rowwise, columnwise)
        if amax is not None:
            expect_amaxes(list(formats.values()))
        if seed is None:
            as_draws(None, formats.values(), values)  # raises where one is missing
        said += values.dtype, formats, columnwise_source, amax, seed, sharding
    measuring = [format for format in formats.values() if format.measures_amax]
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


def expect_no_cut(formats: dict[Direction, Format], sharding: Sharding) -> None:
    """Raises ValueError where a piece of any rank cuts a block."""
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

    Codes and scales travel, not values, those of both parts at once. Along the axis of the blocks' rows codes arrive
    where they stay, and scales (which lie block by block) are put in place by one copy; along the other one all of a
    piece is one message, which is put in place on arrival. A scale, global scale or amax of the whole matrix does not
    travel.
    """
    ranks = as_ranks(ranks)
    with ranks.agreement("all_gather") as said:
        if not isinstance(array, HybridArray):
            raise TypeError(f"all_gather takes a HybridArray, as quantize_sharded makes it, not {type(array).__name__}")
        sharding.expect(array.shape, ranks, "the piece")
        if only not in (None, *DIRECTIONS):
            raise ValueError(f"only={only!r} is 'rowwise', 'columnwise' or None")
        if only is not None:
            array.part(only, "all_gather")
        parts = {direction: part for direction, part in array.parts() if only in (None, direction)}
        said += sharding, [(direction, part.format, part.amax is None) for direction, part in parts.items()]
        # pieces that were quantized each by its own amax are none of one matrix
        said += (part.amax for part in parts.values() if part.format.measures_amax)
    gathered = _gather(parts, sharding, ranks)
    derived = array.derived if array.derived in gathered else None
    return HybridArray(
        gathered.get("rowwise"), gathered.get("columnwise"), sharding.shape, array.dtype, derived
    )


def _gather(
    parts: dict[Direction, QuantizedArray], sharding: Sharding, ranks: Ranks
) -> dict[Direction, QuantizedArray]:
    """Parts of the whole: what the others have arrives at once, this rank's piece is put in place here."""
    gathered, messages, puts = {}, [], []
    for direction, given in parts.items():
        format, own = given.format, sharding if direction == "rowwise" else sharding.T
        expect_no_cut({"rowwise": format}, own)
        with on_device(given.device):
            part = given.packed()
            whole = whole_part(format, own.shape, namespace(part.codes), part.amax is not None, own.axis)
            pieces, source, target = _chunks(format, own, 1)[0], memory_of_part(part), memory_of_part(whole)
            wanted = scalars(format, part.shape, own.shape, part.amax is not None) + pieces.moves[ranks.rank]
            if own.axis == 0:
                message, mine = _codes(source, target, pieces, ranks.rank)
                messages.append(message)
                wanted += mine
            arrived = None
            if own.axis == 1 or has_scales_of_pieces(format):
                arrived = memory_of(namespace(part.codes).ndarray((pieces.ends[-1],), BYTES))
                places = [Bytes(arrived, end, size) for end, size in zip(pieces.ends, pieces.sizes, strict=False)]
                places[ranks.rank] = Bytes(source, pieces.starts[ranks.rank], pieces.sizes[ranks.rank])
                messages.append((places[ranks.rank], places))
        gathered[direction] = whole
        puts.append((part, source, target, wanted, pieces, arrived))
    finish = ranks.start_spread(messages, beside=False)
    finish()
    for part, source, target, wanted, pieces, arrived in puts:
        with on_device(part.device):
            move(target, source, 0, wanted)
            if arrived is not None:
                pieces.put(target, arrived, 0, but=ranks.rank)
    return gathered


def _codes(
    source: Any, target: Any, pieces: _Chunk, rank: int
) -> tuple[tuple[Bytes, list[Bytes]], tuple[Move, ...]]:
    """Rows of codes as a message that arrives where they stay, and the move of this rank's."""
    places = [Bytes(target, first * pieces.pitch, (last - first) * pieces.pitch) for first, last in pieces.places]
    nbytes, start = places[rank].nbytes, places[rank].start
    places[rank] = Bytes(source, 0, nbytes)
    mine = (Move(0, start, nbytes, 1, nbytes, nbytes),) if nbytes else ()
    return (places[rank], places), mine


class _Chunk(NamedTuple):
    """One chunk of each rank's piece of an (outer, k) matrix.

    places  first and last row (axis 1: column) in the whole
    own     the same in the piece
    pitch   bytes from one row of codes to the next
    starts  byte of the chunk's buffer where what is put in place begins: its scales, along axis 1 its codes
    sizes   bytes from there on
    ends    where these lie in what arrives
    moves   into the whole
    """

    places: list[tuple[int, int]]
    own: list[slice]
    pitch: int
    starts: list[int]
    sizes: list[int]
    ends: list[int]
    moves: list[tuple[Move, ...]]

    def put(self, whole: Any, arrived: Any, offset: int, *, but: int = -1) -> None:
        """Put what arrived, from a byte of a buffer on, in place, but for one rank's."""
        for rank, (start, end, wanted) in enumerate(zip(self.starts, self.ends, self.moves, strict=False)):
            if rank != but:
                move(whole, arrived, offset + end - start, wanted)


@lru_cache(maxsize=1024)
def _chunks(format: Format, sharding: Sharding, count: int) -> list[_Chunk]:
    """Chunks that begin on whole blocks, and of long pieces on 128 rows, so that copies of scales are aligned.

    Each is twice as long as the one before: quantizing is at least twice as fast as sending, so that the next chunk is
    ready when the link is, and the link waits for the shortest alone.
    """
    axis, shape = sharding.axis, sharding.shape
    aligned = shard_alignment(rowwise=format)[axis]
    cuts = []
    for size in sharding.sizes:
        step = lcm(aligned, 128) if size >= 128 << count else aligned
        cuts.append([min(size, -(-size // step) * (2**i - 1) // (2**count - 1) * step) for i in range(count + 1)])
    found = []
    for chunk in range(count):
        own = [slice(*cut[chunk : chunk + 2]) for cut in cuts]
        places = [(first + mine.start, first + mine.stop)
                  for first, mine in zip(sharding.borders, own, strict=False)]
        layouts = [part_layout(format.storage, (last - first, shape[1]) if axis == 0 else (shape[0], last - first))
                   for first, last in places]
        starts = [layout.scales_offset if axis == 0 else 0 for layout in layouts]
        sizes = [layout.nbytes - start for layout, start in zip(layouts, starts, strict=True)]
        codes = layouts[0].codes
        found.append(_Chunk(
            places, own, codes.pitch * codes.itemsize, starts, sizes, [0, *accumulate(sizes)],
            [moves(format, shape, place, axis) for place in places],
        ))
    return found


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
    chunks: int = 1,
) -> HybridArray:
    """all_gather(quantize_sharded(...)) with less of the host's time, or chunk by chunk.

    chunks  of a piece, where there is one format whose rows (of columnwise: columns) are what is cut: the next one is
            quantized while the last one travels. Each takes 100 to 300 us of the host's time, so that one is fastest
            for matrices up to 16384 x 16384. Otherwise all is quantized first.
    Otherwise as in quantize_sharded; the bytes do not depend on chunks.
    """
    ranks = as_ranks(ranks)
    direction: Direction = "rowwise" if sharding.axis == 0 else "columnwise"
    given = rowwise if sharding.axis == 0 else columnwise
    if given is None or None not in (rowwise, columnwise) or isinstance(amax, Slots):
        piece = quantize_sharded(
            values, sharding, ranks, rowwise=rowwise, columnwise=columnwise, amax=amax, seed=seed
        )
        return all_gather(piece, sharding, ranks)
    with ranks.agreement("quantize_all_gather") as said:
        values = as_array(values, "values")
        sharding.expect(values.shape, ranks, "the piece")
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise ValueError(f"chunks={chunks!r} is an integer, 1 or more")
        nominal = ops.nominal_dtype(values.dtype)
        gathering = _gathering(as_format(given), direction, sharding, nominal, chunks)
        format = gathering.format
        if amax is not None:
            amax = as_amax(amax, [format], values)
        draws = as_draws(seed, [format], values)
        said += values.dtype, direction, format, chunks, amax, seed, sharding
    with on_device(values.device):
        amax = _amax_of_all(values, {direction: format}, amax, ranks)
        whole = _gather_chunks(values, ranks, gathering, amax, draws)
    rows, columns = (whole, None) if gathering.by_rows else (None, whole)
    return HybridArray(rows, columns, sharding.shape, nominal)


@dataclass(frozen=True, slots=True, eq=False)
class _Gathering:
    """What a call does but for its values; own is the sharding of the (outer, k) matrix."""

    format: Format
    by_rows: bool
    own: Sharding
    chunks: list[_Chunk]
    offsets: list[int]  # of each chunk in what arrives, and all bytes
    has_scales: bool
    measures: bool


@lru_cache(maxsize=1024)
def _gathering(
    format: Format, direction: Direction, sharding: Sharding, dtype: np.dtype[Any], count: int
) -> _Gathering:
    format, by_rows = format.resolve(dtype), direction == "rowwise"
    expect_no_cut({direction: format}, sharding)
    own = sharding if by_rows else sharding.T
    chunks = _chunks(format, own, count)
    offsets = [0, *accumulate(chunk.ends[-1] for chunk in chunks)]
    return _Gathering(format, by_rows, own, chunks, offsets, has_scales_of_pieces(format), format.measures_amax)


def _gather_chunks(
    values: Array, ranks: Any, gathering: _Gathering, amax: Array | None, draws: Draws | None
) -> QuantizedArray:
    """The part of the whole, whose rows are cut: each chunk is quantized where it lies in the whole, if it can be."""
    format, shape, rank = gathering.format, gathering.own.shape, ranks.rank
    module, backend = namespace(values), backend_of(values)
    pair = (format, None) if gathering.by_rows else (None, format)
    whole = whole_part(format, shape, module, gathering.measures, 0)
    target, travelling, pitch = memory_of_part(whole), [], gathering.chunks[0].pitch
    count = gathering.offsets[-1] if gathering.has_scales else max(chunk.sizes[rank] for chunk in gathering.chunks)
    arrived = memory_of(module.ndarray((count,), BYTES))
    for chunk, offset in zip(gathering.chunks, gathering.offsets, strict=False):
        mine, (first, last), start = chunk.own[rank], chunk.places[rank], chunk.starts[rank]
        if draws is not None:
            draws = Draws(draws.seed, first=(first, 0) if gathering.by_rows else (0, first))
        chosen = values if len(gathering.chunks) == 1 else values[mine] if gathering.by_rows else values[:, mine]
        codes = [Bytes(target, a * pitch, (b - a) * pitch) for a, b in chunk.places]
        own, rows = codes[rank], round_up(last - first, 16)
        if first % 16 or (last % 16 and last < shape[0]):  # rows of padding would lie on those of the next rank
            own = Bytes(memory_of(module.ndarray((rows * pitch,), BYTES)), 0, own.nbytes)
        at = offset + chunk.ends[rank] if gathering.has_scales else 0
        backend.quantize_apart(
            chosen, *pair, amax, draws, part_of(own.memory, own.start, rows * pitch),
            part_of(arrived, at, chunk.sizes[rank]),
        )
        messages = [(own, codes)]
        if gathering.has_scales:
            scales = [Bytes(arrived, offset + end, size) for end, size in zip(chunk.ends, chunk.sizes, strict=False)]
            messages.append((scales[rank], scales))
        travelling.append((ranks.start_spread(messages, beside=len(gathering.chunks) > 1), chunk, offset))
    move(target, arrived, at - start, scalars(format, (last - first, shape[1]), shape, gathering.measures))
    for finish, chunk, offset in travelling:
        finish()
        if gathering.has_scales:
            chunk.put(target, arrived, offset)
    return whole


__all__ = ["Sharding", "all_gather", "quantize_all_gather", "quantize_sharded"]
