"""Every operation in NumPy: the definition that the CUDA kernels reproduce bit for bit.

All arithmetic is single float32 operations, rounded to nearest even, in the order written here. Works in tiles
that fit the cache, so peak memory is the result and two or three megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .arrays import Direction, QuantizedArray, zeros_part
from .formats import ELEMENTS, SCALES, Block, Element, Format, PowerOfTwo, Reciprocal, Storage, TwoLevel, scale_values
from .layout import pack_nibbles, round_up, unpack_nibbles

Values: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]
Bits: TypeAlias = npt.NDArray[np.int32]
Codes: TypeAlias = npt.NDArray[np.uint8]

FLT_MAX = np.float32(np.finfo(np.float32).max)
INF_BITS = np.int32(0x7F800000)
MAGNITUDE = np.int32(0x7FFFFFFF)
SIXTH = np.float32(1 / 6)  # 0x3E2AAAAB, the constant the encoder multiplies by

TILE_ELEMENTS = 1 << 17
"""Elements quantized at a time: 512 KiB of float32, about an L2 cache, and few calls into NumPy for each element."""


# --- elements -----------------------------------------------------------------------------------


@cache
def encode_table(element: Element) -> Codes:
    """Code of each of the 65,536 values that the top 16 bits of a float32 can name.

    A float32 whose lower half is not zero is looked up with its 16th bit set ("rounded to odd"). Elements of at
    most 5 mantissa bits round such a value as they would the whole one: the bit lies below every tie. Nearest,
    ties to the even code; finite overflow and Inf saturate; NaN is nan_code, or 0 where the element has none.
    """
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    values = bits.view(np.float32)
    magnitudes = element.values[: element.max_code + 1].astype(np.float64)
    ties = (magnitudes[:-1] + magnitudes[1:]) / 2
    nan = np.isnan(values)
    wanted = np.where(nan, 0, np.abs(values)).astype(np.float64)
    below, above = np.searchsorted(ties, wanted, "left"), np.searchsorted(ties, wanted, "right")
    codes = np.where(below % 2 == 0, below, above) | ((bits >> 31).astype(np.int64) << (element.bits - 1))
    table = np.where(nan, element.nan_code or 0, codes).astype(np.uint8)
    table.setflags(write=False)
    return table


def encode(values: Floats, element: Element) -> Values:
    """float32 -> codes, nearest even, saturating; 16- and 32-bit elements are an ordinary cast."""
    if element.bits > 8:
        return values.astype(element.dtype)
    bits = np.ascontiguousarray(values).view(np.uint32)
    index = bits & np.uint32(0xFFFF)
    index += np.uint32(0xFFFF)
    index |= bits
    index >>= np.uint32(16)
    return encode_table(element).take(index)


@cache
def decode_table(element: Element) -> Values:
    """What each byte of stored codes decodes to: one float32, for FP4 two of them as one 8-byte item."""
    stored = np.arange(256, dtype=np.uint8)
    per_byte = np.stack([stored & 15, stored >> 4], axis=1) if element.stored_bits == 4 else stored[:, None]
    values = element.values.take(per_byte & ((1 << element.bits) - 1))
    table = values.view(np.uint64 if element.stored_bits == 4 else np.float32).ravel()
    table.setflags(write=False)
    return table


def decode(codes: Values, element: Element) -> Floats:
    """Stored codes, one byte for two of FP4, -> float32, exact."""
    if element.bits > 8:
        return codes.astype(np.float32)
    return decode_table(element).take(codes).view(np.float32)


# --- scales -------------------------------------------------------------------------------------
# A rule turns the amax of each block into (stored scales, encode factors). `whole` is the amax of the matrix.

Scales: TypeAlias = tuple[npt.NDArray[Any], Floats]


def _reciprocal(amax: Floats, rule: Reciprocal, element: Element, whole: Floats | None) -> Scales:
    amax = np.where(amax < np.float32(rule.epsilon), np.float32(rule.epsilon), amax)
    factor = np.minimum(np.float32(element.max) / amax, FLT_MAX)
    if rule.pow2:
        factor = (factor.view(np.int32) & INF_BITS).view(np.float32)
    factor = np.where((amax > 0) & (amax < np.inf), factor, np.float32(1))
    return np.float32(1) / factor, factor


def _power_of_two(amax: Floats, rule: PowerOfTwo, element: Element, whole: Floats | None) -> Scales:
    """Integer arithmetic on the exponent field, exact also where float32 would round a subnormal quotient."""
    bits = amax.view(np.int32)
    below_max = (element.max_code & ((1 << element.mantissa_bits) - 1)) << (23 - element.mantissa_bits)
    carry = {
        "up": 0x7FFFFF - below_max,  # one more where the significand exceeds that of the largest element
        "floor": 0,
        "even": 1 << (22 - element.mantissa_bits),  # round the significand to the element's width first
    }[rule.rounding]
    byte = ((bits + np.int32(carry)) >> 23) - np.int32(element.max_exponent)
    byte = np.where(bits >= INF_BITS, 254, np.clip(byte, 0, 254)).astype(np.int32)
    # 2^(127 - byte); byte 254 asks for 2^-127, which is subnormal
    factor = np.where(byte == 254, np.int32(0x00400000), (254 - byte) << 23).astype(np.int32)
    return byte.astype(np.uint8), factor.view(np.float32)


def _two_level(amax: Floats, rule: TwoLevel, element: Element, whole: Floats | None) -> Scales:
    assert whole is not None
    encode_scale, decode_scale = global_scales(whole, rule, element)
    e4m3 = ELEMENTS["e4m3"]
    stored = encode(np.minimum(amax * (encode_scale * SIXTH), FLT_MAX), e4m3)
    factor = np.minimum(np.float32(1) / (e4m3.values.take(stored) * decode_scale), FLT_MAX)
    return stored, factor


_SCALE_RULES: dict[type, Callable[..., Scales]] = {
    Reciprocal: _reciprocal,
    PowerOfTwo: _power_of_two,
    TwoLevel: _two_level,
}


def global_scales(amax: Floats, rule: TwoLevel, element: Element) -> tuple[np.float32, np.float32]:
    """(S_enc, S_dec) of a matrix: S_enc = min(RN(RN(bound * max) / amax), FLT_MAX), 1 for amax 0 or Inf."""
    whole = amax.reshape(())[()]
    with np.errstate(all="ignore"):
        encode_scale = np.minimum(np.float32(np.float32(rule.bound) * np.float32(element.max)) / whole, FLT_MAX)
        if not 0 < whole < np.inf:
            encode_scale = np.float32(1)
        return encode_scale, np.float32(1) / encode_scale


def amax(values: Values) -> Floats:
    """Largest magnitude as float32 (1,); NaN elements are ignored, an empty or all-NaN matrix has 0."""
    largest = np.int32(0)
    for tile in _tiles(values.shape, (1, 1), values):
        bits = _load(values, tile, (1, 1)).view(np.int32)
        bits &= MAGNITUDE
        if bits.max() > INF_BITS:
            bits[bits > INF_BITS] = 0
        largest = max(largest, bits.max())
    return np.array([largest], np.int32).view(np.float32)


# --- tiles --------------------------------------------------------------------------------------


def _tiles(shape: tuple[int, ...], block: Block, values: Values) -> Iterator[tuple[slice, slice]]:
    """Slices of about TILE_ELEMENTS that start on block borders, long in the direction of the memory."""
    outer, k = shape
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
    values: Values, row: Format | None, column: Format | None, derived: Direction | None, whole: Floats | None
) -> tuple[QuantizedArray | None, QuantizedArray | None]:
    """The rowwise and the columnwise part of an (outer, k) matrix; None for a format that is None.

    derived  the direction that is quantized from what the other one decodes to
    whole    float32 (1,) amax to use where a format has one per matrix; None measures it
    """
    outer, k = values.shape
    rows = None if row is None else zeros_part(row, (outer, k))
    columns = None if column is None else zeros_part(column, (k, outer))
    requantize_parts(rows, columns, values, derived, whole)
    return rows, columns


def requantize_parts(
    rows: QuantizedArray | None, columns: QuantizedArray | None, values: Values, derived: Direction | None,
    whole: Floats | None = None, noop: Any = None,
) -> None:
    """Quantize into the buffers of both parts; nothing is written where noop is not zero."""
    if noop is not None and np.asarray(noop).reshape(()):
        return
    values = _apart(values, [part for part in (rows, columns) if part is not None])
    parts = [(part, source) for part, source in ((rows, values), (columns, values.T)) if part is not None]
    if derived == "rowwise":
        parts.reverse()
    if whole is None and derived is None and any(part.format.measures_amax for part, _ in parts):
        whole = amax(values)
    for number, (part, source) in enumerate(parts):
        if number == 1 and derived is not None:
            source = dequantize_part(parts[0][0], np.dtype(np.float32)).T
        quantize_into(part, source, whole if part.format.measures_amax else None)


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


def quantize_into(part: QuantizedArray, values: Values, whole: Floats | None = None) -> None:
    """Quantize into the buffers of a part of the same shape. Padding is not touched."""
    format = part.format
    element, storage = format.storage.element, format.storage
    if format.measures_amax:
        whole = amax(values) if whole is None else whole
        if part.amax is not None:
            part.amax[...] = whole
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
    rule = _SCALE_RULES[type(format.scaling)]
    with np.errstate(all="ignore"):
        if storage.global_scale:
            part.global_scale[...] = global_scales(whole, format.scaling, element)[1]  # type: ignore
        if format.amax_block is None:
            scales[...], factor = rule(whole, format.scaling, element, None)
            for tile in _tiles(values.shape, (1, 1), values):
                loaded = _load(values, tile, (1, 1))
                loaded *= factor
                codes[tile] = encode(loaded, element)
            return
        for tile in _tiles(values.shape, format.amax_block, values):
            _quantize_tile(codes, scales, values, tile, format, whole)


def _quantize_tile(
    codes: Codes, scales: Values, values: Values, tile: tuple[slice, slice], format: Format, whole: Floats | None
) -> None:
    element, storage, block = format.storage.element, format.storage, format.amax_block
    assert block is not None and storage.block is not None
    rows, columns = values[tile].shape
    loaded = _load(values, tile, block)
    largest, has_nan = _block_amax(loaded, block)
    stored, factor = _SCALE_RULES[type(format.scaling)](largest, format.scaling, element, whole)
    blocks = loaded.reshape(-1, block[0], loaded.shape[1] // block[1], block[1])
    blocks *= factor[:, None, :, None]
    encoded = encode(loaded, element)
    if has_nan is not None and element.nan_code is None:  # the block's scale carries the NaN
        stored[has_nan] = SCALES[storage.scale].nan
        encoded.reshape(blocks.shape)[np.broadcast_to(has_nan[:, None, :, None], blocks.shape)] = 0
    top, left = tile[0].start, tile[1].start
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
    part: QuantizedArray, dtype: np.dtype[Any], out: Values | None = None, *, transposed: bool = False
) -> Values:
    """Decode to (outer, k) values, or to their (k, outer) transpose, C-contiguous where it is allocated here.

    RN(code * scale), NVFP4 RN((code * scale) * global_scale), then a cast. NaN is canonical: all ones, no sign.
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
                decoded *= global_scale
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
