"""Where pieces of a part lie in the whole: plain numbers, and the copies that put bytes and rows there.

A piece is the part of some rows (axis 0) or columns (axis 1) of an (outer, k) matrix, in a buffer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hqarray import reference_records
from hqarray.arrays import QuantizedArray
from hqarray.buffers import Packed
from hqarray.formats import Format
from hqarray.layout import Array, BlockMajor, PartLayout, namespace, part_layout

BYTES = np.dtype(np.uint8)


class Move(NamedTuple):
    """A block of bytes from one buffer to another: so many rows of a width, pitches from row to row; offsets."""

    source: int
    target: int
    width: int
    height: int
    source_pitch: int
    target_pitch: int


class Span(NamedTuple):
    """Bytes of a buffer from an offset on."""

    offset: int
    nbytes: int


# --- numbers ------------------------------------------------------------------------------------


def has_scales_of_pieces(format: Format) -> bool:
    """Whether scales, or global scales, are those of blocks or rows, and not of the matrix."""
    return format.storage.block is not None or format.storage.global_per_row


@lru_cache(maxsize=4096)
def moves(format: Format, shape: tuple[int, int], place: tuple[int, int], axis: int) -> tuple[Move, ...]:
    """What is put in place of a piece, rows or columns first to last of the matrix: scales, and along axis 1 codes."""
    first, last = place
    if first == last:
        return ()
    storage, whole = format.storage, part_layout(format.storage, shape)
    piece = part_layout(storage, (last - first, shape[1]) if axis == 0 else (shape[0], last - first))
    found = []
    if axis == 1:
        own, size = piece.codes, whole.codes.itemsize
        column = first * own.stored_bits // 8
        found.append(Move(0, column, own.columns * size, own.outer, own.pitch * size, whole.codes.pitch * size))
    if storage.block is not None:
        found.append(_scales(piece, whole, first // storage.block[axis], axis))
    if storage.global_per_row:  # along k one piece is whole rows
        nbytes, at = 4 * piece.num_global_scales, 4 * first if axis == 0 else 0
        found.append(Move(piece.global_scale_offset, whole.global_scale_offset + at, nbytes, 1, nbytes, nbytes))
    return tuple(move for move in found if move.width and move.height)


def _scales(piece: PartLayout, whole: PartLayout, first: int, axis: int) -> Move:
    """Scales that begin at some block along an axis of the whole."""
    size, turned = piece.scales_dtype.itemsize, isinstance(piece.scales, BlockMajor)
    height, width = piece.num_scales[::-1] if turned else piece.num_scales
    source_pitch, pitch = piece.scales_shape[1] * size, whole.scales_shape[1] * size
    along_rows = (axis == 1) == turned  # pieces lie one below another in the buffer
    target = whole.scales_offset + (first * pitch if along_rows else first * size)
    return Move(piece.scales_offset, target, width * size, height, source_pitch, pitch)


@lru_cache(maxsize=4096)
def scalars(format: Format, shape: tuple[int, int], whole: tuple[int, int], has_amax: bool) -> tuple[Move, ...]:
    """The scale, global scale and amax of a matrix, which all its pieces have: from one of a shape to the whole."""
    storage = format.storage
    source, target = (part_layout(storage, size) for size in (shape, whole))
    at = [(source.scales_offset, target.scales_offset)] if storage.block is None and storage.scale != "none" else []
    if storage.global_scale and not storage.global_per_row:
        at.append((source.global_scale_offset, target.global_scale_offset))
    if has_amax:
        at.append((source.amax_offset, target.amax_offset))
    if len(at) == 2:  # one copy of two rows, as far apart in the piece as in the whole
        (first, to), (second, other) = at
        return (Move(first, to, 4, 2, second - first, other - to),)
    return tuple(Move(first, to, 4, 1, 4, 4) for first, to in at)


@lru_cache(maxsize=4096)
def unwritten(format: Format, shape: tuple[int, int], axis: int) -> tuple[Span, ...]:
    """Bytes of a part that pieces along an axis do not write, or that are padding: they are zeroed first.

    Pieces of rows bring the padding of their rows with them.
    """
    layout = part_layout(format.storage, shape)
    codes = layout.codes
    written = codes.nbytes * codes.outer // max(codes.rows, 1)
    if axis == 1 and codes.columns != codes.pitch:
        written = 0
    scales = layout.scales_offset + prod(layout.scales_shape) * layout.scales_dtype.itemsize
    if sorted(layout.scales_shape) != sorted(layout.num_scales):
        return (Span(written, layout.nbytes - written),)
    spans = Span(written, layout.scales_offset - written), Span(scales, layout.nbytes - scales)
    return tuple(span for span in spans if span.nbytes)


# --- bytes --------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _layout(format: Format, shape: tuple[int, int]) -> PartLayout:
    """Kept by format, whose storage takes longer to make than a look-up."""
    return part_layout(format.storage, shape)


def whole_part(format: Format, shape: tuple[int, int], module: Any, has_amax: bool, axis: int) -> QuantizedArray:
    """A part that pieces along an axis are put into: padding that they do not bring is zero, codes are anything."""
    layout = _layout(format, shape)
    base = module.ndarray((layout.nbytes,), BYTES)
    buffers = Packed.of(base, layout, layout.has_global_scale, has_amax)
    for offset, nbytes in unwritten(format, shape, axis):
        if isinstance(base, np.ndarray):
            base[offset : offset + nbytes] = 0
        else:
            (base.data + offset).memset_async(0, nbytes)
    return QuantizedArray(format, shape, buffers)


def memory_of_part(part: QuantizedArray) -> Any:
    """A NumPy array of a packed part's bytes, or CuPy's MemoryPointer to them."""
    assert isinstance(part.buffers, Packed)
    return part.buffers.memory


def part_of(memory: Any, offset: int, nbytes: int) -> Any:
    """Memory, as in block, that begins at a byte of other memory."""
    return memory[offset : offset + nbytes] if isinstance(memory, np.ndarray) else memory + offset


def block(memory: Any, offset: int, shape: tuple[int, ...]) -> Array:
    """Bytes of a buffer as an array, no copy; memory is a NumPy array of bytes or CuPy's MemoryPointer."""
    if isinstance(memory, np.ndarray):
        return memory[offset : offset + prod(shape)].reshape(shape)
    return namespace(memory).ndarray(shape, BYTES, memory + offset)


def move(target: Any, source: Any, offset: int, wanted: Sequence[Move]) -> None:
    """Copy blocks between buffers, memory as in block; sources begin at an offset. On a GPU in its current stream."""
    if isinstance(target, np.ndarray):
        for m in wanted:
            _view(target, m.target, m, m.target_pitch)[...] = _view(source, offset + m.source, m, m.source_pitch)
        return
    from cupy.cuda import get_current_stream
    from cupy_backends.cuda.api.runtime import memcpy2DAsync, memcpyDeviceToDevice

    stream, to, at = get_current_stream().ptr, target.ptr, source.ptr + offset
    for m in wanted:
        memcpy2DAsync(
            to + m.target, m.target_pitch, at + m.source, m.source_pitch, m.width, m.height, memcpyDeviceToDevice,
            stream,
        )


def _view(memory: Array, offset: int, size: Move, pitch: int) -> Array:
    shape = size.height, size.width
    return np.ndarray(shape, BYTES, memory.data, offset, (pitch, 1))


# --- rows ---------------------------------------------------------------------------------------

def spread_rows(rows: Array, places: Array, count: int) -> Array:
    """So many rows of bytes, where each of `rows` (n, width) lies at its places; those that none goes to hold anything.

    places  int64 (n,) or (n, copies), from count on none
    """
    module = namespace(rows)
    if isinstance(rows, np.ndarray):
        out = module.zeros((count, rows.shape[1]), rows.dtype)
        reference_records.spread(rows, places, out)
        return out
    out = module.empty((count + 1, rows.shape[1]), rows.dtype)  # the last one for what goes nowhere
    if not rows.size or not places.size:
        return out[:count]
    from hqarray import cuda_records

    if not cuda_records.spread(rows, places, out[:count]):  # rows that lie anywhere
        for column in module.minimum(places, count).reshape(len(rows), -1).T:
            out[column] = rows
    return out[:count]


def bytes_of(array: Array) -> Array:
    """An array (n, ...) as (n, bytes)."""
    array = namespace(array).ascontiguousarray(array)
    width = prod(array.shape[1:]) * array.itemsize
    return array.reshape(-1).view(np.uint8).reshape(len(array), width)


__all__ = ["BYTES", "Move", "Span", "block", "bytes_of", "has_scales_of_pieces", "memory_of_part", "move", "moves",
           "part_of", "scalars", "spread_rows", "unwritten", "whole_part"]
