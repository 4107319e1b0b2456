"""The operations of reference.py on CuPy: allocate, launch, wrap.

Work goes to CuPy's current stream on the array's device, memory comes from CuPy's allocator, nothing synchronises.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import cupy  # noqa: TID253  this module is imported only once a CuPy array has arrived
import numpy as np
from cupy.cuda import get_current_stream  # noqa: TID253
from cupy_backends.cuda.api.driver import launchKernel

from .arrays import Direction, Packed, QuantizedArray
from .formats import Format, Storage
from .layout import Array, part_layout
from .rawkernels import geometry, loader, traits

FLOAT32 = np.dtype(np.float32)

WORK_OFFSET = 4
"""Bytes after a part's amax: where the amax kernel collects, so that amax itself is written by quantize alone."""


# --- kernels ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel and how many bytes of shared memory it asks for."""

    raw: Any
    pointer: int
    shared_bytes: int

    def launch(self, grid: tuple[int, int, int], arguments: bytes) -> None:
        """One launch on the current stream; `arguments` is the kernel's struct, copied before this returns."""
        buffer = _arguments.buffer
        ctypes.memmove(buffer, arguments, len(arguments))
        launchKernel(self.pointer, *grid, geometry.THREADS, 1, 1, self.shared_bytes, get_current_stream().ptr,
                     _arguments.pointer, 0)


class _Arguments(threading.local):
    """This thread's copy of a kernel's one argument, and the array of one pointer that the driver reads."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(512)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.pointer = ctypes.addressof(self.pointers)


_arguments = _Arguments()

_QUANTIZE = struct.Struct("=19q")
_AMAX = struct.Struct("=6q")
_DEQUANTIZE = struct.Struct("=9q")


@cache
def arch_of(device: int) -> str:
    """NVRTC's name of a device's architecture, with the suffix that gives all its instructions."""
    capability: str = cupy.cuda.Device(device).compute_capability
    return f"sm_{capability}a" if int(capability) >= 90 else f"sm_{capability}"


def _load(source: loader.Source, shared_bytes: int, device: int) -> Kernel:
    raw = loader.load(source, arch_of(device))
    if shared_bytes > 48 << 10:
        raw.max_dynamic_shared_size_bytes = shared_bytes
    return Kernel(raw, raw.kernel.ptr, shared_bytes)


@cache
def _quantize_kernel(
    row: Format | None, column: Format | None, dtype: str, aligned: bool, device: int
) -> tuple[Kernel, geometry.Tile]:
    source, tile, shared = traits.quantize_source(row, column, dtype, aligned)
    return _load(source, shared, device), tile


@cache
def _amax_kernel(dtype: str, aligned: bool, device: int) -> Kernel:
    return _load(traits.amax_source(dtype, aligned), 0, device)


@cache
def _dequantize_kernel(storage: Storage, dtype: str, transposed: bool, aligned: bool, device: int) -> Kernel:
    source, shared = traits.dequantize_source(storage, dtype, transposed, aligned)
    return _load(source, shared, device)


# --- arrays -------------------------------------------------------------------------------------


def _on_device_of(array: Array) -> AbstractContextManager[Any]:
    """The array's device as the current one, whichever was."""
    device = array.device
    return nullcontext() if device.id == cupy.cuda.runtime.getDevice() else device


def empty_part(format: Format, shape: tuple[int, int], has_amax: bool) -> QuantizedArray:
    """A part in one allocation whose bytes are all written by the kernel that makes it."""
    layout = part_layout(format.storage, shape)
    base = cupy.ndarray((layout.nbytes,), np.uint8)
    return QuantizedArray(format, shape, Packed(base, layout, format.storage.global_scale, has_amax))


def _readable(values: Array) -> tuple[Array, bool]:
    """The matrix with one contiguous axis, and whether it is turned: X.T is read instead of X."""
    size = values.dtype.itemsize
    if values.dtype == np.float64:
        return values.astype(np.float32), False
    if values.strides[1] == size or values.shape[1] <= 1:
        return values, False
    if values.strides[0] == size:
        return values.T, True
    return cupy.ascontiguousarray(values), False


def _is_aligned(values: Array) -> bool:
    return values.data.ptr % 16 == 0 and values.strides[0] % 16 == 0


def _output(part: QuantizedArray | None) -> tuple[int, int, int, int, int, int]:
    """`Output` of quantize.cu; zeros where there is no part."""
    if part is None:
        return (0, 0, 0, 0, 0, 0)
    buffers = part.buffers
    assert isinstance(buffers, Packed)
    layout, base = buffers.layout, buffers.base.data.ptr
    return (
        base,
        layout.codes.pitch * layout.codes.itemsize,
        base + layout.scales_offset,
        layout.scales_shape[1],
        base + layout.global_scale_offset,
        base + layout.amax_offset if buffers.has_amax else 0,
    )


# --- quantize -----------------------------------------------------------------------------------


def quantize_parts(
    values: Array, row: Format | None, column: Format | None, derived: Direction | None, whole: Array | None
) -> tuple[QuantizedArray | None, QuantizedArray | None]:
    """See reference.quantize_parts; one read of the values, two where an amax is measured first."""
    outer, k = values.shape
    with _on_device_of(values):
        rows = None if row is None else empty_part(row, (outer, k), row.measures_amax)
        columns = None if column is None else empty_part(column, (k, outer), column.measures_amax)
        _quantize(rows, columns, values, derived, whole, None)
    return rows, columns


def requantize_parts(
    rows: QuantizedArray | None, columns: QuantizedArray | None, values: Array, derived: Direction | None,
    whole: Array | None = None, noop: Array | None = None,
) -> None:
    """See reference.requantize_parts; noop is read on the device."""
    with _on_device_of(values):
        own = [None if part is None else part.packed() for part in (rows, columns)]
        _quantize(own[0], own[1], values, derived, whole, noop)
        for part, written in zip((rows, columns), own, strict=True):
            if part is not None and written is not part:
                _copy_into(part, written)


def _copy_into(part: QuantizedArray, source: QuantizedArray | None) -> None:
    assert source is not None
    for target, new in (
        (part.codes, source.codes), (part.scales, source.scales),
        (part.global_scale, source.global_scale), (part.amax, source.amax),
    ):
        if target is not None:
            target[...] = new


def _quantize(
    rows: QuantizedArray | None, columns: QuantizedArray | None, values: Array, derived: Direction | None,
    whole: Array | None, noop: Array | None,
) -> None:
    if derived is not None and rows is not None and columns is not None:
        first, second = (rows, columns) if derived == "columnwise" else (columns, rows)
        source = values if derived == "columnwise" else values.T
        _quantize(first, None, source, None, whole, noop)
        _quantize(second, None, dequantize_part(first, FLOAT32, transposed=True), None, whole, noop)
        return
    values, turned = _readable(values)
    if turned:
        rows, columns = columns, rows
    device, dtype, aligned = values.device.id, values.dtype.name, _is_aligned(values)
    m, k = values.shape
    row, column = (None if part is None else part.format for part in (rows, columns))
    flag = 0 if noop is None else noop.data.ptr
    whole_pointer, measured = 0, False
    needs = [part for part in (rows, columns) if part is not None and part.format.measures_amax]
    if needs and whole is not None:
        whole_pointer = whole.data.ptr
    elif needs:
        buffers = needs[0].buffers
        assert isinstance(buffers, Packed)
        whole_pointer = buffers.base.data.ptr + buffers.layout.amax_offset + WORK_OFFSET
        _measure(values, whole_pointer, flag)
        measured = True
    kernel, tile = _quantize_kernel(row, column, dtype, aligned, device)
    kernel.launch(
        geometry.grid(tile, m, k),
        _QUANTIZE.pack(values.data.ptr, values.strides[0], m, k, whole_pointer, flag, *_output(rows),
                       *_output(columns), measured),
    )


def _measure(values: Array, whole_pointer: int, flag: int) -> None:
    cupy.cuda.runtime.memsetAsync(whole_pointer, 0, 4, get_current_stream().ptr)
    m, k = values.shape
    if m * k:
        kernel = _amax_kernel(values.dtype.name, _is_aligned(values), values.device.id)
        kernel.launch(
            geometry.grid(geometry.SQUARE, m, k),
            _AMAX.pack(values.data.ptr, values.strides[0], m, k, whole_pointer, flag),
        )


def amax(values: Array) -> Array:
    """See reference.amax."""
    with _on_device_of(values):
        whole = cupy.empty(1, np.float32)
        _measure(_readable(values)[0], whole.data.ptr, 0)
    return whole


# --- dequantize ---------------------------------------------------------------------------------


def dequantize_part(part: QuantizedArray, dtype: np.dtype[Any], *, transposed: bool = False) -> Array:
    """See reference.dequantize_part."""
    buffers = part.packed().buffers
    assert isinstance(buffers, Packed)
    layout, base = buffers.layout, buffers.base.data.ptr
    shape = part.shape[::-1] if transposed else part.shape
    with _on_device_of(buffers.base):
        values = cupy.ndarray(shape, dtype)
        if values.size:
            kernel = _dequantize_kernel(
                part.format.storage, dtype.name, transposed, shape[1] * dtype.itemsize % 16 == 0, buffers.base.device.id
            )
            kernel.launch(
                geometry.grid(geometry.SQUARE, *shape),
                _DEQUANTIZE.pack(base, layout.codes.pitch * layout.codes.itemsize, base + layout.scales_offset,
                                 layout.scales_shape[1], base + layout.global_scale_offset, values.data.ptr,
                                 values.strides[0], *shape),
            )
    return values


def transpose_part(part: QuantizedArray) -> QuantizedArray:
    """See reference.transpose_part."""
    raise NotImplementedError
