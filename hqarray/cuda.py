"""The operations of reference.py on CuPy: allocate, launch, wrap.

Work goes to CuPy's current stream on the array's device, memory comes from CuPy's allocator, nothing synchronises.
What a call needs besides its pointers is a plan, kept by formats, shape, strides and dtype.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeAlias

import cupy  # noqa: TID253  this module is imported only once a CuPy array has arrived
import numpy as np
from cupy.cuda import alloc, get_current_stream  # noqa: TID253
from cupy_backends.cuda.api.driver import launchKernel
from cupy_backends.cuda.api.runtime import getDevice, memsetAsync

from .arrays import Direction, QuantizedArray
from .buffers import Packed
from .formats import Format, Storage
from .layout import Array, PartLayout, part_layout
from .rawkernels import geometry, loader, traits

FLOAT32 = np.dtype(np.float32)

WORK_OFFSET = 4
"""Bytes after a part's amax: where the amax kernel collects, so that amax itself is written by quantize alone."""

MOST_PLANS = 4096


# --- kernels ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel on one device, with its grid."""

    raw: Any
    pointer: int
    grid: tuple[int, int, int]
    shared_bytes: int

    def launch(self, arguments: struct.Struct, *values: int) -> None:
        """One launch on the current stream; the kernel's one argument is copied before this returns."""
        local = _local
        arguments.pack_into(local.buffer, 0, *values)
        launchKernel(self.pointer, *self.grid, geometry.THREADS, 1, 1, self.shared_bytes, get_current_stream().ptr,
                     local.pointer, 0)


class _Local(threading.local):
    """This thread's copy of a kernel's argument, and the array of one pointer that the driver reads."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(512)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.pointer = ctypes.addressof(self.pointers)


_local = _Local()

# Structs of the kernels: every field takes eight bytes.
_QUANTIZE = struct.Struct("=19q")
_AMAX = struct.Struct("=6q")
_DEQUANTIZE = struct.Struct("=9q")
_NARROW = struct.Struct("=3q")
_TRANSPOSE = struct.Struct("=14q")


@cache
def arch_of(device: int) -> str:
    """NVRTC's name of a device's architecture, with the suffix that gives all its instructions."""
    capability: str = cupy.cuda.Device(device).compute_capability
    return f"sm_{capability}a" if int(capability) >= 90 else f"sm_{capability}"


@cache
def _raw_kernel(source: loader.Source, shared_bytes: int, device: int) -> Any:
    raw = loader.load(source, arch_of(device))
    if shared_bytes > 48 << 10:
        raw.max_dynamic_shared_size_bytes = shared_bytes
    return raw


def _kernel(launch: traits.Launch, m: int, k: int, device: int) -> Kernel:
    raw = _raw_kernel(launch.source, launch.shared_bytes, device)
    return Kernel(raw, raw.kernel.ptr, geometry.grid(launch.tile, m, k), launch.shared_bytes)


# --- arrays -------------------------------------------------------------------------------------


def _on_device_of(memory: Any) -> AbstractContextManager[Any]:
    """The device of a MemoryPointer as the current one, whichever was."""
    return nullcontext() if memory.device_id == getDevice() else memory.device


def _narrowed(values: Array) -> Array:
    """float64 rounded to float32."""
    values = cupy.ascontiguousarray(values)
    narrow = cupy.ndarray(values.shape, FLOAT32)
    if values.size:
        kernel = _kernel(traits.narrow_launch(), 1, values.size, values.data.device_id)
        kernel.launch(_NARROW, values.data.ptr, narrow.data.ptr, values.size)
    return narrow


def _readable(values: Array) -> tuple[Array, bool]:
    """The matrix with one contiguous axis, and whether it is turned: X.T is read instead of X."""
    dtype, strides = values.dtype, values.strides
    size = dtype.itemsize
    if size == 8:
        return _narrowed(values), False
    if strides[1] == size or values.shape[1] <= 1:
        return values, False
    if strides[0] == size:
        return values.T, True
    return cupy.ascontiguousarray(values), False


# --- quantize -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """One direction of a plan: what its part is made of."""

    format: Format
    shape: tuple[int, int]
    layout: PartLayout
    pitch16: int
    has_amax: bool

    @staticmethod
    def of(format: Format, shape: tuple[int, int]) -> _Part:
        layout = part_layout(format.storage, shape)
        return _Part(format, shape, layout, layout.codes.pitch * layout.codes.itemsize // 16, format.measures_amax)

    def empty(self, has_amax: bool) -> QuantizedArray:
        """A part in one allocation whose bytes are all written by the kernel that makes it."""
        layout = self.layout
        memory = alloc(layout.nbytes)
        return QuantizedArray(self.format, self.shape, Packed(memory, layout, layout.has_global_scale, has_amax))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Kernels of one call of quantize."""

    kernel: Kernel
    amax: Kernel | None
    rows: _Part | None
    columns: _Part | None


Key: TypeAlias = tuple[Format | None, Format | None, tuple[int, ...], str, bool, int]
_plans: dict[Key, _Plan] = {}


def _plan(row: Format | None, column: Format | None, values: Array, aligned: bool) -> _Plan:
    """The plan of a call."""
    device = values.data.device_id
    key = (row, column, values.shape, values.dtype.char, aligned, device)
    plan = _plans.get(key)
    if plan is None:
        (m, k), dtype = values.shape, values.dtype.name
        kernel = _kernel(traits.quantize_launch(row, column, dtype, aligned), m, k, device)
        measures = any(format is not None and format.measures_amax for format in (row, column))
        amax_kernel = _kernel(traits.amax_launch(dtype, aligned), m, k, device) if measures else None
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        rows = None if row is None else _Part.of(row, (m, k))
        columns = None if column is None else _Part.of(column, (k, m))
        plan = _plans[key] = _Plan(kernel, amax_kernel, rows, columns)
    return plan


def quantize_parts(
    values: Array, row: Format | None, column: Format | None, derived: Direction | None, whole: Array | None
) -> tuple[QuantizedArray | None, QuantizedArray | None]:
    """See reference.quantize_parts; one read of the values, two where an amax is measured first."""
    if values.data.device_id != getDevice():
        with values.device:
            return quantize_parts(values, row, column, derived, whole)
    if derived is not None:
        rows, _ = quantize_parts(values, row, None, None, whole)
        assert rows is not None
        return rows, quantize_parts(dequantize_part(rows, FLOAT32), None, column, None, whole)[1]
    values, turned = _readable(values)
    if turned:
        row, column = column, row
    plan = _plan(row, column, values, _is_aligned(values))
    rows = None if plan.rows is None else plan.rows.empty(plan.rows.has_amax)
    columns = None if plan.columns is None else plan.columns.empty(plan.columns.has_amax)
    _launch(plan, values, rows, columns, whole, None)
    return (columns, rows) if turned else (rows, columns)


def requantize_parts(
    rows: QuantizedArray | None, columns: QuantizedArray | None, values: Array, derived: Direction | None,
    whole: Array | None = None, noop: Array | None = None,
) -> None:
    """See reference.requantize_parts; noop is read on the device."""
    with _on_device_of(values.data):
        if derived is not None:
            assert rows is not None and columns is not None
            first, second = (rows, columns) if derived == "columnwise" else (columns, rows)
            requantize_parts(first, None, values if derived == "columnwise" else values.T, None, whole, noop)
            requantize_parts(second, None, dequantize_part(first, FLOAT32, transposed=True), None, whole, noop)
            return
        values, turned = _readable(values)
        parts = (columns, rows) if turned else (rows, columns)
        own = [None if part is None else part.packed() for part in parts]
        row, column = (None if part is None else part.format for part in parts)
        _launch(_plan(row, column, values, _is_aligned(values)), values, own[0], own[1], whole, noop)
        for part, written in zip(parts, own, strict=True):
            if part is not None and written is not part:
                _copy_into(part, written)


def _is_aligned(values: Array) -> bool:
    both: int = values.data.ptr | values.strides[0]
    return both % 16 == 0


def _copy_into(part: QuantizedArray, source: QuantizedArray | None) -> None:
    assert source is not None
    for target, new in (
        (part.codes, source.codes), (part.scales, source.scales),
        (part.global_scale, source.global_scale), (part.amax, source.amax),
    ):
        if target is not None:
            target[...] = new


_NO_OUTPUT = (0, 0, 0, 0, 0, 0)


def _output(plan: _Part | None, part: QuantizedArray | None) -> tuple[int, int, int, int, int, int]:
    """`Output` of quantize.cu."""
    if plan is None or part is None:
        return _NO_OUTPUT
    layout, base = plan.layout, part.buffers.memory.ptr  # type: ignore[union-attr]
    amax_pointer = base + layout.amax_offset if part.buffers.has_amax else 0  # type: ignore[union-attr]
    return (base, plan.pitch16, base + layout.scales_offset, layout.scales_shape[1], base + layout.global_scale_offset,
            amax_pointer)


def _launch(
    plan: _Plan, values: Array, rows: QuantizedArray | None, columns: QuantizedArray | None, whole: Array | None,
    noop: Array | None,
) -> None:
    m, k = values.shape
    pointer, row_bytes = values.data.ptr, values.strides[0]
    flag = 0 if noop is None else noop.data.ptr
    whole_pointer, measured = 0, 0
    if plan.amax is not None:
        if whole is not None:
            whole_pointer = whole.data.ptr
        else:
            part = rows if rows is not None and rows.format.measures_amax else columns
            buffers = part.buffers  # type: ignore[union-attr]
            whole_pointer = buffers.memory.ptr + buffers.layout.amax_offset + WORK_OFFSET  # type: ignore[union-attr]
            memsetAsync(whole_pointer, 0, 4, get_current_stream().ptr)
            plan.amax.launch(_AMAX, pointer, row_bytes, m, k, whole_pointer, flag)
            measured = 1
    plan.kernel.launch(_QUANTIZE, pointer, row_bytes, m, k, whole_pointer, flag, *_output(plan.rows, rows),
                       *_output(plan.columns, columns), measured)


def amax(values: Array) -> Array:
    """See reference.amax."""
    with _on_device_of(values.data):
        whole = cupy.empty(1, np.float32)
        values, _ = _readable(values)
        memsetAsync(whole.data.ptr, 0, 4, get_current_stream().ptr)
        m, k = values.shape
        launch = traits.amax_launch(values.dtype.name, _is_aligned(values))
        kernel = _kernel(launch, m, k, values.data.device_id)
        kernel.launch(_AMAX, values.data.ptr, values.strides[0], m, k, whole.data.ptr, 0)
    return whole


# --- decode and move ----------------------------------------------------------------------------

@lru_cache(maxsize=MOST_PLANS)
def _dequantize_kernel(
    storage: Storage, shape: tuple[int, int], dtype: str, transposed: bool, device: int
) -> Kernel:
    aligned = shape[1] * np.dtype(dtype if dtype != "bfloat16" else "float16").itemsize % 16 == 0
    return _kernel(traits.dequantize_launch(storage, dtype, transposed, aligned), *shape, device)


def dequantize_part(part: QuantizedArray, dtype: np.dtype[Any], *, transposed: bool = False) -> Array:
    """See reference.dequantize_part."""
    buffers = part.packed().buffers
    assert isinstance(buffers, Packed)
    layout, base = buffers.layout, buffers.memory.ptr
    shape = part.shape[::-1] if transposed else part.shape
    with _on_device_of(buffers.memory):
        values = cupy.ndarray(shape, dtype)
        if values.size:
            kernel = _dequantize_kernel(part.format.storage, shape, dtype.name, transposed, buffers.memory.device_id)
            kernel.launch(
                _DEQUANTIZE, base, layout.codes.pitch * layout.codes.itemsize, base + layout.scales_offset,
                layout.scales_shape[1], base + layout.global_scale_offset, values.data.ptr, values.strides[0], *shape,
            )
    return values


@lru_cache(maxsize=MOST_PLANS)
def _transpose_kernel(storage: Storage, shape: tuple[int, int], device: int) -> Kernel:
    return _kernel(traits.transpose_launch(storage), *shape, device)


def transpose_part(part: QuantizedArray) -> QuantizedArray:
    """See reference.transpose_part."""
    assert part.format.transposable
    part = part.packed()
    outer, k = part.shape
    with _on_device_of(part.buffers.memory):  # type: ignore[union-attr]
        plans = _Part.of(part.format, (outer, k)), _Part.of(part.format, (k, outer))
        turned = plans[1].empty(has_amax=part.amax is not None)
        kernel = _transpose_kernel(part.format.storage, (outer, k), part.buffers.memory.device_id)  # type: ignore
        kernel.launch(_TRANSPOSE, *_output(plans[0], part), *_output(plans[1], turned), outer, k)
    return turned
