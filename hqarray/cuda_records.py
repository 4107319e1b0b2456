"""Records of rows, and sums of rows by weight, on CuPy: one launch each on CuPy's current stream."""

from __future__ import annotations

import struct
from functools import lru_cache

import cupy  # noqa: TID253  this module is imported only once a CuPy array has arrived
import numpy as np

from .cuda_launch import Kernel, kernel_of, stream_of
from .layout import Array
from .rawkernels import geometry, traits
from .records import Lines

# Structs of the kernels: every field takes eight bytes.
_RECORDS = struct.Struct("=14q")
_COMBINE = struct.Struct("=10q")
_DOT = struct.Struct("=10q")


@lru_cache(maxsize=4096)
def _records_kernel(packs: bool, scale_bytes: int, rows: int, pitch: int, device: int) -> Kernel:
    launch = traits.records_launch(packs, scale_bytes)
    return kernel_of(launch, geometry.grid(launch.tile, rows, pitch), device)


def pack(lines: Lines, places: Array | None, messages: Array) -> None:
    """See record_ops.pack; into messages."""
    _launch(lines, messages, places, packs=True)


def unpack(messages: Array, lines: Lines, index: Array) -> None:
    """See record_ops.unpack."""
    _launch(lines, messages, index, packs=False)


def _launch(lines: Lines, messages: Array, index: Array | None, *, packs: bool) -> None:
    record, device, rows = lines.record, messages.data.device_id, len(lines.codes)
    dtype, blocks = record.scales
    _records_kernel(packs, dtype.itemsize, rows, record.pitch, device).launch(
        stream_of(device), _RECORDS, lines.codes.data.ptr, record.pitch // 16, rows, _pointer(lines.scales),
        _pointer(lines.starts), _pointer(lines.steps), lines.step, blocks, _pointer(lines.globals), messages.data.ptr,
        record.nbytes // 16, len(messages), _pointer(index), _copies(index),
    )


def spread(rows: Array, places: Array, out: Array) -> bool:
    """Rows of bytes to their places in out; False where they do not lie on 16 bytes, and nothing is done."""
    width, device = rows.shape[1], rows.data.device_id
    if (width | rows.data.ptr | out.data.ptr) % 16 or not rows.flags.c_contiguous:
        return False
    _records_kernel(True, 1, len(rows), width, device).launch(
        stream_of(device), _RECORDS, rows.data.ptr, width // 16, len(rows), 0, 0, 0, 0, 0, 0, out.data.ptr, width // 16,
        len(out), places.data.ptr, _copies(places),
    )
    return True


def _copies(index: Array | None) -> int:
    return 1 if index is None or len(index.shape) == 1 else int(index.shape[1])


def _pointer(array: Array | None) -> int:
    return 0 if array is None else array.data.ptr


@lru_cache(maxsize=4096)
def _combine_kernel(dtype: str, aligned: bool, tokens: int, columns: int, device: int) -> Kernel:
    launch = traits.combine_launch(dtype, aligned)
    return kernel_of(launch, geometry.grid(launch.tile, tokens, columns), device)


def weighted_sum(rows: Array, shape: tuple[int, int], index: Array | None, weights: Array | None) -> Array:
    """See record_ops.weighted_sum."""
    if rows.dtype.itemsize == 8:  # float64: sums are float32 whatever is added
        return weighted_sum(rows.astype(np.float32), shape, index, weights).astype(rows.dtype)
    (tokens, choices), columns, device = shape, rows.shape[1], rows.data.device_id
    sums = cupy.ndarray((tokens, columns), rows.dtype)
    if not sums.size:
        return sums
    rows = _in_rows(rows)
    if weights is not None:
        weights = cupy.ascontiguousarray(weights)
    aligned = (rows.data.ptr | rows.strides[0]) % 16 == 0 and columns % 8 == 0
    _combine_kernel(rows.dtype.name, aligned, tokens, columns, device).launch(
        stream_of(device), _COMBINE, rows.data.ptr, rows.strides[0], len(rows), _pointer(index), _pointer(weights),
        sums.data.ptr, sums.strides[0], tokens, choices, columns,
    )
    return sums


@lru_cache(maxsize=4096)
def _dot_kernel(dtype: str, other: str, slots: int, device: int) -> Kernel:
    launch = traits.dot_launch(dtype, other)
    return kernel_of(launch, geometry.grid(launch.tile, slots, 1), device)


def dots(rows: Array, other: Array, choices: int, index: Array | None) -> Array:
    """See record_ops.dots."""
    rows, other = (_in_rows(array.astype(np.float32) if array.itemsize == 8 else array) for array in (rows, other))
    products = cupy.ndarray((len(other), choices), np.float32)
    if products.size:
        _dot_kernel(rows.dtype.name, other.dtype.name, products.size, rows.data.device_id).launch(
            stream_of(rows.data.device_id), _DOT, rows.data.ptr, rows.strides[0], len(rows), _pointer(index),
            other.data.ptr, other.strides[0], products.data.ptr, products.size, choices, rows.shape[1],
        )
    return products


def _in_rows(array: Array) -> Array:
    """The matrix, or a copy whose rows are in one piece."""
    return array if array.strides[1] == array.itemsize else cupy.ascontiguousarray(array)


__all__ = ["dots", "pack", "spread", "unpack", "weighted_sum"]
