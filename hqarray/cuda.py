"""The operations of reference.py on CuPy: allocate, launch, wrap.

Work goes to CuPy's current stream on the array's device, memory comes from CuPy's allocator, nothing synchronises.
What a call needs besides its pointers is a plan, kept by formats, shape, strides and dtype.
"""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import cupy  # noqa: TID253  this module is imported only once a CuPy array has arrived
import numpy as np
from cupy.cuda import alloc  # noqa: TID253
from cupy_backends.cuda.api.runtime import getDevice, memsetAsync

from .arrays import Direction, HybridArray, QuantizedArray
from .buffers import Packed
from .cuda_launch import NO_SEED, Amaxes, Kernel, Seed, counts_of, kernel_of, seed_of, stream_of
from .formats import Format
from .layout import Array, PartLayout, part_layout, round_up
from .philox import Draws
from .rawkernels import geometry, traits

FLOAT32 = np.dtype(np.float32)

WORK_OFFSET = 4
"""Bytes after a part's amax: where the amax kernel collects, so that amax itself is written by quantize alone."""

MOST_PLANS = 4096


# Structs of the kernels: every field takes eight bytes.
_QUANTIZE = struct.Struct("=28q")
_AMAX = struct.Struct("=7q")
_DEQUANTIZE = struct.Struct("=9q")
_NARROW = struct.Struct("=3q")
_DELAYED = struct.Struct("=6q")
_TRANSPOSE = struct.Struct("=14q")


def _kernel(launch: traits.Launch, m: int, k: int, device: int) -> Kernel:
    return kernel_of(launch, geometry.grid(launch.tile, m, k), device)


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
        kernel.launch(stream_of(values.data.device_id), _NARROW, values.data.ptr, narrow.data.ptr, values.size)
    return narrow


def _turns(values: Array) -> bool | None:
    """Whether X.T is what is read of a matrix X; None where neither has rows in one piece."""
    size, strides = values.dtype.itemsize, values.strides
    if strides[1] == size or values.shape[1] <= 1:
        return False
    return True if strides[0] == size else None


def _readable(values: Array) -> tuple[Array, bool]:
    """The matrix with one contiguous axis, and whether it is turned: X.T is read instead of X."""
    if values.dtype.itemsize == 8:
        return _narrowed(values), False
    turned = _turns(values)
    if turned is None:
        return cupy.ascontiguousarray(values), False
    return (values.T, True) if turned else (values, False)


# A frozen dataclass's own constructor takes twice as long, HybridArray's with its checks five times.
_new = object.__new__
_set_packed = tuple(getattr(Packed, name).__set__ for name in Packed.__slots__)
_set_part = tuple(getattr(QuantizedArray, name).__set__ for name in QuantizedArray.__slots__)
_set_hybrid = tuple(getattr(HybridArray, name).__set__ for name in HybridArray.__slots__)


def _packed_part(
    format: Format, shape: tuple[int, int], memory: Any, layout: PartLayout, has_amax: bool
) -> QuantizedArray:
    """QuantizedArray(format, shape, Packed(memory, layout, layout.has_global_scale, has_amax))."""
    buffers = _new(Packed)
    set_memory, set_layout, set_has_global_scale, set_has_amax = _set_packed
    set_memory(buffers, memory)
    set_layout(buffers, layout)
    set_has_global_scale(buffers, layout.has_global_scale)
    set_has_amax(buffers, has_amax)
    part = _new(QuantizedArray)
    set_format, set_shape, set_buffers = _set_part
    set_format(part, format)
    set_shape(part, shape)
    set_buffers(part, buffers)
    return part


def _hybrid(
    rows: QuantizedArray | None, columns: QuantizedArray | None, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> HybridArray:
    """HybridArray(rows, columns, shape, dtype) of parts that are known to fit."""
    array = _new(HybridArray)
    set_rows, set_columns, set_shape, set_dtype, set_derived = _set_hybrid
    set_rows(array, rows)
    set_columns(array, columns)
    set_shape(array, shape)
    set_dtype(array, dtype)
    set_derived(array, None)
    return array


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

    def empty(self) -> QuantizedArray:
        """A part in one allocation whose bytes are all written by the kernel that makes it."""
        layout = self.layout
        return _packed_part(self.format, self.shape, alloc(layout.nbytes), layout, self.has_amax)

    def output(self, base: int, has_amax: bool, codes: int = 0) -> tuple[int, int, int, int, int, int]:
        """`Output` of quantize.cu, for a part whose memory begins at a pointer; codes: where else its codes lie."""
        layout = self.layout
        return (codes or base, self.pitch16, base + layout.scales_offset, layout.scales_shape[1],
                base + layout.global_scale_offset, base + layout.amax_offset if has_amax else 0)

    def work(self, base: int) -> int:
        """Where its amax is collected."""
        return base + self.layout.amax_offset + WORK_OFFSET


_NO_OUTPUT = (0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Plan:
    """One call of quantize but for its pointers; the matrix (m, k) may be X.T."""

    device: int
    m: int
    k: int
    row_bytes: int
    kernel: Kernel
    amax: Amaxes | None
    rows: _Part | None
    columns: _Part | None

    def launch(
        self, pointer: int, rows: QuantizedArray | None, columns: QuantizedArray | None, whole: Array | None = None,
        noop: Array | None = None, seed: Seed = NO_SEED, record: Array | None = None,
    ) -> None:
        """Read the matrix at a pointer into parts of the plan; whole, noop and record as in requantize_parts."""
        self.launch_at(
            stream_of(self.device), pointer, *(0 if part is None else part.buffers.memory.ptr  # type: ignore[union-attr]
                                               for part in (rows, columns)),
            given=0 if whole is None else whole.data.ptr, flag=0 if noop is None else noop.data.ptr, seed=seed,
            record=0 if record is None else record.data.ptr,
        )

    def launch_at(
        self, stream: int, pointer: int, rows: int, columns: int, *, given: int = 0, flag: int = 0,
        seed: Seed = NO_SEED, lines: int = 0, record: int = 0, codes: int = 0,
    ) -> None:
        """The same by pointers: of packed parts' memory, of an amax, of noop, of scratch_bytes (0: allocated here).

        record  is read by kernels of a pair in which a format measures the amax of the matrix, unless it is rotated
        codes   of the only part, where they lie elsewhere; 0: where its memory begins
        """
        own, other, amax, m, k = self.rows, self.columns, self.amax, self.m, self.k
        wholes = given, given
        if amax is not None:
            works = 0 if own is None else own.work(rows), 0 if other is None else other.work(columns)
            wholes = amax.launch(stream, _AMAX, works, given, flag, pointer, self.row_bytes, m, k, at=lines)
        self.kernel.launch(
            stream, _QUANTIZE, pointer, self.row_bytes, m, k, *wholes, flag,
            *(_NO_OUTPUT if own is None else own.output(rows, own.has_amax, codes)),
            *(_NO_OUTPUT if other is None else other.output(columns, other.has_amax, codes)),
            amax is not None, round_up(m, 16), round_up(k, 16), *seed, record,
        )

    @property
    def scratch_bytes(self) -> int:
        return 0 if self.amax is None else self.amax.line_bytes


Key: TypeAlias = tuple[Any, ...]
_plans: dict[Key, _Plan] = {}


def _plan(row: Format | None, column: Format | None, values: Array, given: bool = False) -> _Plan:
    """The plan of a call whose values have rows in one piece; given: the caller has the amax of the matrix."""
    device, row_bytes = values.data.device_id, values.strides[0]
    aligned = (values.data.ptr | row_bytes) % 16 == 0
    key = (row, column, values.shape, row_bytes, values.dtype, aligned, device, given)
    plan = _plans.get(key)
    if plan is None:
        (m, k), dtype = values.shape, values.dtype.name
        kernel = _kernel(traits.quantize_launch(row, column, dtype, aligned), m, k, device)
        *measures, shared = traits.measures_of(row, column, given)
        amax = None
        if any(measures):
            launch = traits.amax_launch(dtype, aligned, row=measures[0], column=measures[1])
            counts = counts_of(measures, 1, (m, k))
            amax = Amaxes(_kernel(launch, m, k, device), (measures[0], measures[1]), counts, shared)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        rows = None if row is None else _Part.of(row, (m, k))
        columns = None if column is None else _Part.of(column, (k, m))
        plan = _plans[key] = _Plan(device, m, k, row_bytes, kernel, amax, rows, columns)
    return plan


_warm: dict[Key, tuple[_Plan, bool, tuple[int, ...], np.dtype[Any]]] = {}


def _warm_key(values: Array, rowwise: Format | str | None, columnwise: Format | str | None) -> Key:
    memory = values.data
    return rowwise, columnwise, values.shape, values.strides, values.dtype, memory.ptr & 15, memory.device_id


def warm(values: Array, rowwise: Format | str | None, columnwise: Format | str | None) -> HybridArray | None:
    """ops.quantize(values, rowwise=rowwise, columnwise=columnwise) if an equal call was kept; else None."""
    try:
        kept = _warm.get(_warm_key(values, rowwise, columnwise))
    except (TypeError, AttributeError):  # no hashable format, or no array: the checks will say so
        return None
    if kept is None:
        return None
    plan, turned, shape, dtype = kept
    if plan.device != getDevice():
        with values.device:
            return warm(values, rowwise, columnwise)
    rows = None if plan.rows is None else plan.rows.empty()
    columns = None if plan.columns is None else plan.columns.empty()
    plan.launch(values.data.ptr, rows, columns)
    return _hybrid(columns, rows, shape, dtype) if turned else _hybrid(rows, columns, shape, dtype)


def keep_warm(
    values: Array, rowwise: Format | str | None, columnwise: Format | str | None, matrix: Array, array: HybridArray
) -> None:
    """Keep the plan by which values, as a matrix, became an array, for `warm`; not where they were copied first."""
    if values is not matrix and not values.flags.c_contiguous:
        return
    row, column = (None if part is None else part.format for part in (array.rowwise, array.columnwise))
    found = plan_of(matrix, row, column)
    if found is None:
        return
    if len(_warm) >= MOST_PLANS:
        _warm.clear()
    _warm[_warm_key(values, rowwise, columnwise)] = *found, array.shape, array.dtype


def plan_of(
    matrix: Array, row: Format | None, column: Format | None, given: bool = False
) -> tuple[_Plan, bool] | None:
    """The plan that reads a matrix where it lies, and whether as X.T, whose rows are its columns; None if none does.

    given  the caller has the amax of the matrix
    """
    turned = None if matrix.dtype.itemsize == 8 else _turns(matrix)
    if turned is None:
        return None
    plan = _plan(column, row, matrix.T, given) if turned else _plan(row, column, matrix, given)
    return plan, turned


def quantize_parts(
    values: Array, row: Format | None, column: Format | None, derived: Direction | None, whole: Array | None,
    draws: Draws | None = None, record: Array | None = None,
) -> tuple[QuantizedArray | None, QuantizedArray | None]:
    """See reference.quantize_parts; one read of the values, two where an amax is measured first."""
    if values.data.device_id != getDevice():
        with values.device:
            return quantize_parts(values, row, column, derived, whole, draws, record)
    if derived is not None:
        assert row is not None
        rows, _ = quantize_parts(values, row, None, None, whole, draws, _left_to_record(values, row, record))
        assert rows is not None
        return rows, quantize_parts(dequantize_part(rows, FLOAT32), None, column, None, whole, draws)[1]
    values, turned = _readable(values)
    if turned:
        row, column, draws = column, row, None if draws is None else draws.T
    plan = _plan(row, column, values, whole is not None)
    rows = None if plan.rows is None else plan.rows.empty()
    columns = None if plan.columns is None else plan.columns.empty()
    plan.launch(values.data.ptr, rows, columns, whole, seed=seed_of(draws), record=record)
    return (columns, rows) if turned else (rows, columns)


def quantize_apart(
    values: Array, row: Format | None, column: Format | None, whole: Array | None, draws: Draws | None, codes: Any,
    rest: Any,
) -> None:
    """See reference.quantize_apart; codes and rest are MemoryPointers, codes of whole rows of 16 bytes."""
    with _on_device_of(values.data):
        values, turned = _readable(values)
        if turned:
            row, column, draws = column, row, None if draws is None else draws.T
        plan = _plan(row, column, values, whole is not None)
        part = plan.columns if plan.rows is None else plan.rows
        assert part is not None
        base = rest.ptr - part.layout.scales_offset
        plan.launch_at(
            stream_of(plan.device), values.data.ptr, base, base, given=0 if whole is None else whole.data.ptr,
            seed=seed_of(draws), codes=codes.ptr,
        )


def requantize_parts(
    rows: QuantizedArray | None, columns: QuantizedArray | None, values: Array, derived: Direction | None,
    whole: Array | None = None, noop: Array | None = None, draws: Draws | None = None, record: Array | None = None,
) -> None:
    """See reference.requantize_parts; noop is read on the device."""
    with _on_device_of(values.data):
        if derived is not None:
            assert rows is not None and columns is not None
            first, second = (rows, columns) if derived == "columnwise" else (columns, rows)
            others = None if draws is None else draws.T
            first_draws, second_draws = (draws, others) if derived == "columnwise" else (others, draws)
            left = _left_to_record(values, first.format, record, noop)
            requantize_parts(first, None, values if derived == "columnwise" else values.T, None, whole, noop,
                             first_draws, left)
            decoded = dequantize_part(first, FLOAT32, transposed=True)
            requantize_parts(second, None, decoded, None, whole, noop, second_draws)
            return
        values, turned = _readable(values)
        parts = (columns, rows) if turned else (rows, columns)
        own = [None if part is None else part.packed() for part in parts]
        row, column = (None if part is None else part.format for part in parts)
        seed = seed_of(draws.T if turned and draws is not None else draws)
        _plan(row, column, values, whole is not None).launch(values.data.ptr, own[0], own[1], whole, noop, seed, record)
        for part, written in zip(parts, own, strict=True):
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


@lru_cache(maxsize=MOST_PLANS)
def _amax_kernel(dtype: np.dtype[Any], aligned: bool, m: int, k: int, device: int) -> Kernel:
    return _kernel(traits.amax_launch(dtype.name, aligned), m, k, device)


def amax(values: Array) -> Array:
    """See reference.amax."""
    with _on_device_of(values.data):
        whole = cupy.ndarray((1,), FLOAT32)
        memsetAsync(whole.data.ptr, 0, 4, stream_of(values.data.device_id))
        _raise_to_amax(values, whole)
    return whole


def _raise_to_amax(values: Array, whole: Array, noop: Array | None = None) -> None:
    values, _ = _readable(values)
    pointer, row_bytes, device = values.data.ptr, values.strides[0], values.data.device_id
    m, k = values.shape
    kernel = _amax_kernel(values.dtype, (pointer | row_bytes) % 16 == 0, m, k, device)
    flag = 0 if noop is None else noop.data.ptr
    kernel.launch(stream_of(device), _AMAX, pointer, row_bytes, m, k, whole.data.ptr, 0, flag)


def _left_to_record(
    values: Array, first: Format, record: Array | None, noop: Array | None = None
) -> Array | None:
    """What is left for the kernel that reads values into the part that the other one is derived from.

    Its kernel records where it measures an amax; else the amax is that of the other format, which never sees values.
    """
    if record is None or first.measures_amax:
        return record
    _raise_to_amax(values, record, noop)
    return None


def update_amaxes(history: Array, current: Array, amax: Array, largest: bool, margin: int) -> None:
    """See reference.update_amaxes; one launch for all matrices."""
    count, length = history.shape
    if not count:
        return
    with _on_device_of(history.data):
        device, launch = history.data.device_id, traits.delayed_launch()
        kernel = _kernel(launch, 1, count, device)
        factor = int(np.float32(2.0**margin).view(np.int32))
        kernel.launch(
            stream_of(device), _DELAYED, history.data.ptr, length, current.data.ptr, amax.data.ptr, largest, factor
        )


# --- decode and move ----------------------------------------------------------------------------

@lru_cache(maxsize=MOST_PLANS)
def _dequantize_plan(
    format: Format, shape: tuple[int, int], dtype: np.dtype[Any], transposed: bool, device: int
) -> tuple[Kernel, int]:
    """The kernel that decodes a part to values of a shape, and the bytes between the part's rows of codes.

    By format and dtype: a storage takes a microsecond to make, the name of a dtype seven.
    """
    launch = traits.dequantize_launch(format.storage, dtype.name, transposed, shape[1] * dtype.itemsize % 16 == 0)
    part = _Part.of(format, shape[::-1] if transposed else shape)
    return _kernel(launch, *shape, device), 16 * part.pitch16


def dequantize_part(part: QuantizedArray, dtype: np.dtype[Any], *, transposed: bool = False) -> Array:
    """See reference.dequantize_part."""
    buffers = part.packed().buffers
    assert isinstance(buffers, Packed)
    layout, memory = buffers.layout, buffers.memory
    base, device = memory.ptr, memory.device_id
    if device != getDevice():
        with memory.device:
            return dequantize_part(part, dtype, transposed=transposed)
    shape = part.shape[::-1] if transposed else part.shape
    values = cupy.ndarray(shape, dtype)
    if values.size:
        kernel, pitch = _dequantize_plan(part.format, shape, dtype, transposed, device)
        kernel.launch(
            stream_of(device), _DEQUANTIZE, base, pitch, base + layout.scales_offset, layout.scales_shape[1],
            base + layout.global_scale_offset, values.data.ptr, values.strides[0], *shape,
        )
    return values


@lru_cache(maxsize=MOST_PLANS)
def _transpose_plan(format: Format, shape: tuple[int, int], device: int) -> tuple[Kernel, _Part, _Part]:
    """The kernel that moves codes of a part, what the part is made of, and what the other one is."""
    kernel = _kernel(traits.transpose_launch(format.storage), *shape, device)
    return kernel, _Part.of(format, shape), _Part.of(format, shape[::-1])


def transpose_part(part: QuantizedArray) -> QuantizedArray:
    """See reference.transpose_part."""
    assert part.format.transposable
    buffers = part.packed().buffers
    assert isinstance(buffers, Packed)
    device = buffers.memory.device_id
    with _on_device_of(buffers.memory):
        kernel, source, target = _transpose_plan(part.format, part.shape, device)
        layout = target.layout
        has_amax = buffers.has_amax
        turned = Packed(alloc(layout.nbytes), layout, layout.has_global_scale, has_amax)
        kernel.launch(
            stream_of(device), _TRANSPOSE, *source.output(buffers.memory.ptr, has_amax),
            *target.output(turned.memory.ptr, has_amax), *part.shape,
        )
    return QuantizedArray(part.format, target.shape, turned)
