"""Every operation in NumPy: the definition that the CUDA kernels reproduce bit for bit.

All arithmetic is single float32 operations, rounded to nearest even, in the order written here. Works in tiles
that fit the cache, so peak memory is the result and two or three megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import hadamard
from .arrays import Direction, QuantizedArray, zeros_part
from .buffers import Packed
from .codec import Codes, Floats, Values, decode, encode, encode_stochastic, encode_table
from .formats import ROW, SCALES, Block, Format, Storage, scale_values
from .layout import pack_nibbles, round_up, unpack_nibbles
from .philox import Draws, PartDraws
from .scaling import FLT_MAX, INF_BITS, SCALE_RULES, four_over_six, global_scales

Bits: TypeAlias = npt.NDArray[np.int32]

MAGNITUDE = np.int32(0x7FFFFFFF)

TILE_ELEMENTS = 1 << 17
"""Elements quantized at a time: 512 KiB of float32, about an L2 cache, and few calls into NumPy for each element."""


# --- amax --------------------------------------------------------------------------------------


def amax(values: Values, storage: Storage | None = None) -> Floats:
    """Largest magnitude as float32 (1,); NaN elements are ignored, an empty or all-NaN matrix has 0.

    storage  of a part whose values are rotated: of the values after that
    """
    largest = np.int32(0)
    for tile in _tiles(values.shape, (1, hadamard.SIZE), values):
        largest = max(largest, _magnitudes(values, tile, storage).max())
    return np.array([largest], np.int32).view(np.float32)


def _row_amaxes(values: Values, storage: Storage) -> Floats:
    """The same of each row, (outer, 1)."""
    largest = np.zeros((len(values), 1), np.int32)
    for tile in _tiles(values.shape, (1, hadamard.SIZE), values):
        rows = largest[tile[0]]
        np.maximum(rows, _magnitudes(values, tile, storage).max(axis=1, keepdims=True), out=rows)
    return largest.view(np.float32)


def _magnitudes(values: Values, tile: tuple[slice, slice], storage: Storage | None) -> Bits:
    """Bits of the magnitudes of a tile, 0 for NaN."""
    loaded = _load(values, tile, (1, 1))
    if storage is not None and storage.rht:
        loaded = hadamard.rotate(loaded, loaded.shape[1])
    bits: Bits = loaded.view(np.int32)
    bits &= MAGNITUDE
    if bits.max() > INF_BITS:
        bits[bits > INF_BITS] = 0
    return bits


def update_amaxes(history: Floats, current: Floats, amax: Floats, largest: bool, margin: int) -> None:
    """One step of delayed scaling for n matrices at a time.

    history  (n, length), oldest first: where current is positive and finite it is appended, and the oldest dropped
    current  (n,), becomes 0
    amax     (n,), becomes the largest of the history or its last, times 2**margin and at most FLT_MAX; it stays as it
             is where nothing was appended
    """
    moved = (current > 0) & (current < np.inf)
    history[moved] = np.concatenate([history[moved, 1:], current[moved, None]], axis=1)
    with np.errstate(all="ignore"):
        taken = (history.max(1) if largest else history[:, -1]) * np.float32(2.0**margin)
    amax[moved] = np.minimum(taken, FLT_MAX)[moved]
    current[...] = 0


# --- tiles --------------------------------------------------------------------------------------


def _tiles(shape: tuple[int, ...], block: Block, values: Values) -> Iterator[tuple[slice, slice]]:
    """Slices of about TILE_ELEMENTS that start on block borders, long in the direction of the memory."""
    outer, k = shape
    block = (block[0], 2 if block[1] == ROW else block[1])
    if not outer * k:
        return
    along_rows = abs(values.strides[1]) <= abs(values.strides[0])
    width = round_up(min(k, 4096 if along_rows else 512), block[1])
    height = round_up(max(1, TILE_ELEMENTS // max(width, 1)), block[0])
    for top in range(0, outer, height):
        for left in range(0, k, width):
            yield slice(top, min(top + height, outer)), slice(left, min(left + width, k))


def _load(values: Values, tile: tuple[slice, slice], block: Block) -> Floats:
    """A tile as float32, filled up with zeros to whole blocks."""
    source = values[tile]
    if abs(source.strides[0]) < abs(source.strides[1]):
        source = source.T.copy().T  # reading in memory's order is twice as fast
    padded = tuple(round_up(n, b) for n, b in zip(source.shape, block, strict=True))
    loaded = np.empty(padded, np.float32) if padded == source.shape else np.zeros(padded, np.float32)
    with np.errstate(all="ignore"):
        loaded[: source.shape[0], : source.shape[1]] = source
    return loaded


def _block_amax(tile: Floats, block: Block) -> tuple[Floats, npt.NDArray[np.bool_] | None]:
    """Largest magnitude of each block, NaN ignored, and which blocks hold a NaN (None: none does)."""
    rows, columns = tile.shape
    bits = tile.view(np.int32) & MAGNITUDE
    starts = np.arange(0, columns, block[1])
    largest = np.maximum.reduceat(bits, starts, axis=1)
    has_nan: npt.NDArray[np.bool_] | None = None
    if largest.max(initial=0) > INF_BITS:
        has_nan = np.logical_or.reduce((largest > INF_BITS).reshape(rows // block[0], block[0], -1), axis=1)
        bits[bits > INF_BITS] = 0
        largest = np.maximum.reduceat(bits, starts, axis=1)
    if block[0] > 1:
        largest = largest.reshape(rows // block[0], block[0], -1).max(1)
    return largest.view(np.float32), has_nan


# --- quantize -----------------------------------------------------------------------------------


def quantize_parts(
    values: Values, row: Format | None, column: Format | None, derived: Direction | None, whole: Floats | None,
    draws: Draws | None = None, record: Floats | None = None,
) -> tuple[QuantizedArray | None, QuantizedArray | None]:
    """The rowwise and the columnwise part of an (outer, k) matrix; None for a format that is None.

    derived  the direction that is quantized from what the other one decodes to
    whole    float32 (1,) amax to use where a format has one per matrix; None measures it
    draws    of stochastic formats; else it may be None
    record   float32 (1,), raised to the amax of values; with `whole`, where no format that takes it is rotated
    """
    outer, k = values.shape
    rows = None if row is None else zeros_part(row, (outer, k))
    columns = None if column is None else zeros_part(column, (k, outer))
    requantize_parts(rows, columns, values, derived, whole, draws=draws, record=record)
    return rows, columns


def quantize_apart(
    values: Values, row: Format | None, column: Format | None, whole: Floats | None, draws: Draws | None,
    codes: Codes, rest: Codes,
) -> None:
    """One part in two buffers of bytes: its codes with their padding; its scales and what lies behind them."""
    part = next(part for part in quantize_parts(values, row, column, None, whole, draws) if part is not None)
    assert isinstance(part.buffers, Packed)
    base, layout = part.buffers.base, part.buffers.layout
    codes[...] = base[: layout.codes.nbytes]
    rest[...] = base[layout.scales_offset :]


def requantize_parts(
    rows: QuantizedArray | None, columns: QuantizedArray | None, values: Values, derived: Direction | None,
    whole: Floats | None = None, noop: Any = None, draws: Draws | None = None, record: Floats | None = None,
) -> None:
    """Quantize into the buffers of both parts; nothing is written or recorded where noop is not zero."""
    if noop is not None and np.asarray(noop).reshape(()):
        return
    if record is not None:
        np.maximum(record, amax(values), out=record)
    values = _apart(values, [part for part in (rows, columns) if part is not None])
    given: list[tuple[Direction, QuantizedArray | None, Values]] = [
        ("rowwise", rows, values), ("columnwise", columns, values.T)
    ]
    parts = [(direction, part, source) for direction, part, source in given if part is not None]
    if derived == "rowwise":
        parts.reverse()
    measured = whole
    if whole is None and derived is None and any(_measures_values(part.format) for _, part, _ in parts):
        measured = amax(values)
    for number, (direction, part, source) in enumerate(parts):
        if number == 1 and derived is not None:
            source = dequantize_part(parts[0][1], np.dtype(np.float32)).T
        one = measured if _measures_values(part.format) else whole if part.format.measures_amax else None
        own = draws.of(direction) if draws is not None and part.format.is_stochastic else None
        quantize_into(part, source, one, own)


def _measures_values(format: Format) -> bool:
    """Whether the amax of the matrix is that of the values themselves: of rotated ones it is another."""
    return format.measures_amax and not format.storage.rht


def _apart(values: Values, parts: list[QuantizedArray]) -> Values:
    """Values that no buffer overlaps: a copy where one does. Raises ValueError where a buffer cannot be written."""
    for part in parts:
        buffers = (part.codes, part.scales, part.global_scale, part.amax)
        for buffer in (buffer for buffer in buffers if buffer is not None and buffer.size):
            if not buffer.flags.writeable:
                raise ValueError(f"a buffer of {part!r} is read-only; .copy() the array and requantize that")
            if np.may_share_memory(values, buffer):
                values = values.copy()
    return values


def quantize_into(
    part: QuantizedArray, values: Values, whole: Floats | None = None, draws: PartDraws | None = None
) -> None:
    """Quantize into the buffers of a part of the same shape. Padding is not touched."""
    format = part.format
    element, storage, block = format.storage.element, format.storage, format.amax_block
    if format.measures_amax:
        whole = amax(values, storage) if whole is None else whole
        if part.amax is not None:
            part.amax[...] = whole
    elif format.measures_rows:
        whole = _row_amaxes(values, storage)
    codes, scales = part.codes, part.scales
    if format.scaling is None:
        for tile in _tiles(values.shape, (1, 1), values):
            with np.errstate(all="ignore"):
                same = values.dtype == element.dtype  # then bits are kept, NaN's too
                if same:
                    codes[tile] = values[tile]
                else:
                    _store(codes[tile], _load(values, tile, (1, 1)))
        return
    with np.errstate(all="ignore"):
        if storage.global_scale:
            decode_scales = global_scales(whole, format.scaling, element)[1]  # type: ignore[arg-type]
            part.global_scale[...] = decode_scales.ravel()[: storage.num_global_scales(part.shape)]  # type: ignore
        if block is None or block[1] == ROW:
            scales[...], factor = SCALE_RULES[type(format.scaling)](whole, format.scaling, element, None)
            for tile in _tiles(values.shape, (1, 1), values):
                loaded = _load(values, tile, (1, 1))
                loaded *= factor if block is None else factor[tile[0]]
                codes[tile] = encode(loaded, element)
            return
        for tile in _tiles(values.shape, block, values):
            one = whole[tile[0]] if format.measures_rows else whole  # type: ignore[index]
            _quantize_tile(codes, scales, values, tile, format, one, draws)


def _quantize_tile(
    codes: Codes, scales: Values, values: Values, tile: tuple[slice, slice], format: Format, whole: Floats | None,
    draws: PartDraws | None,
) -> None:
    element, storage, block, rule = format.storage.element, format.storage, format.amax_block, format.scaling
    assert block is not None and storage.block is not None
    (rows, columns), top, left = values[tile].shape, tile[0].start, tile[1].start
    loaded = _load(values, tile, block)
    if storage.rht:
        loaded = hadamard.rotate(loaded, columns)
    largest, has_nan = _block_amax(loaded, block)
    blocks = loaded.reshape(-1, block[0], loaded.shape[1] // block[1], block[1])
    if getattr(rule, "four_over_six", None) is None:
        stored, factor = SCALE_RULES[type(rule)](largest, rule, element, whole)
    else:
        stored, factor = four_over_six(blocks, largest, rule, element, whole)  # type: ignore[arg-type]
    blocks *= factor[:, None, :, None]
    if draws is None:
        encoded = encode(loaded, element)
    else:
        encoded = encode_stochastic(loaded, element, draws.bits(top, left, *loaded.shape))
    if has_nan is not None and element.nan_code is None:  # the block's scale carries the NaN
        stored[has_nan] = SCALES[storage.scale].nan
        encoded.reshape(blocks.shape)[np.broadcast_to(has_nan[:, None, :, None], blocks.shape)] = 0
    if element.stored_bits == 4:  # what fills the last block is zero and packs to the padding
        target = codes[top : top + rows, left // 2 : -(-(left + columns) // 2)]
        target[...] = pack_nibbles(encoded)[:rows, : target.shape[1]]
    else:
        codes[tile] = encoded[:rows, :columns]
    repeats = block[0] // storage.block[0]  # scales stored once for each of a square's rows
    if repeats > 1:
        stored = np.repeat(stored, repeats, axis=0)
    first, left = top // storage.block[0], left // storage.block[1]
    stored = stored[: -(-rows // storage.block[0])]
    scales[first : first + stored.shape[0], left : left + stored.shape[1]] = stored


# --- dequantize ---------------------------------------------------------------------------------


def dequantize_part(
    part: QuantizedArray, dtype: np.dtype[Any], out: Values | None = None, *, transposed: bool = False,
    rotated: bool = False,
) -> Values:
    """Decode to (outer, k) values, or to their (k, outer) transpose, C-contiguous where it is allocated here.

    rotated  leave values as a part with rht holds them, exactly: the operand of a GEMM. Else they are rotated back.

    RN(code * scale), NVFP4 RN((code * scale) * global_scale), then hadamard.rotate_back, then a cast. NaN is
    canonical: all ones, no sign.
    """
    storage = part.format.storage
    result = np.empty(part.shape[::-1] if transposed else part.shape, dtype) if out is None else out
    values = result.T if transposed else result
    codes, scales, global_scale = part.codes, part.scales, part.global_scale
    with np.errstate(all="ignore"):
        for tile in _tiles(part.shape, (storage.block or (1, 2)), values):
            decoded = decode(_codes_of(codes, tile, storage), storage.element)[:, : tile[1].stop - tile[1].start]
            if storage.scale != "none":
                _multiply_scales(decoded, scales, tile, storage)
            if global_scale is not None:
                decoded *= global_scale[tile[0], None] if storage.global_per_row else global_scale
            if storage.rht and not rotated:
                hadamard.rotate_back(decoded)
            _store(values[tile], decoded)
    return result


def _store(target: Values, values: Floats) -> None:
    """A cast. NaN loses sign and payload, which processors treat differently: all ones, as GPUs make it."""
    target[...] = values
    nan = np.isnan(values)
    if nan.any():
        ones = np.array([0x7FFFFFFF >> (32 - 8 * target.itemsize)], f"u{target.itemsize}")
        target[nan] = ones.view(target.dtype)


def _codes_of(codes: Values, tile: tuple[slice, slice], storage: Storage) -> Values:
    """The stored codes of a tile, whose left border is even."""
    if storage.element.stored_bits == 4:
        tile = (tile[0], slice(tile[1].start // 2, -(-tile[1].stop // 2)))
    wanted: Values = codes[tile]
    return wanted


def _multiply_scales(decoded: Floats, scales: Values, tile: tuple[slice, slice], storage: Storage) -> None:
    """Multiply a tile by the scales of its blocks, in place."""
    if storage.block is None:
        decoded *= scales
        return
    rows, columns = storage.block
    window = tuple(slice(s.start // b, -(-s.stop // b)) for s, b in zip(tile, storage.block, strict=True))
    table = scale_values(storage.scale)
    wanted = scales[window] if table is None else table.take(scales[window])
    if columns == ROW:
        decoded *= wanted
        return
    if rows > 1:
        wanted = np.repeat(wanted, rows, axis=0)[: decoded.shape[0]]
    whole = decoded.shape[1] // columns  # blocks; a ragged one may follow
    blocks = decoded[:, : whole * columns].reshape(decoded.shape[0], whole, columns)
    blocks *= wanted[:, :whole, None]
    decoded[:, whole * columns :] *= wanted[:, whole:]


# --- columns from rows --------------------------------------------------------------------------


def transpose_part(part: QuantizedArray) -> QuantizedArray:
    """The other direction's part by moving codes; loses nothing for a transposable format, only for those."""
    storage, square = part.format.storage, part.format.amax_block
    assert part.format.transposable
    outer, k = part.shape
    turned = zeros_part(part.format, (k, outer), has_amax=part.amax is not None)
    if storage.element.stored_bits == 4:
        turned.codes[...] = pack_nibbles(unpack_nibbles(part.codes, k).T)
    else:
        turned.codes[...] = part.codes.T
    if square is None:
        turned.scales[...] = part.scales
    else:
        repeats = square[0] // storage.block[0]  # type: ignore[index]
        turned.scales[...] = np.repeat(part.scales[::repeats].T, repeats, axis=0)[: turned.scales.shape[0]]
    for target, source in ((turned.global_scale, part.global_scale), (turned.amax, part.amax)):
        if target is not None:
            target[...] = source
    return turned


__all__ = [
    "amax", "decode", "dequantize_part", "encode", "encode_table", "quantize_into", "quantize_parts",
    "requantize_parts", "transpose_part",
]
