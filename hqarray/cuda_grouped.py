"""The operations of reference_grouped.py on CuPy: all members in one launch, their sizes read on the device.

Nothing synchronises and the host reads no size. Sizes that it knows are copied to the device once for each list.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import cupy  # noqa: TID253  this module is imported only once a CuPy array has arrived
import numpy as np
from cupy.cuda import alloc, alloc_pinned_memory  # noqa: TID253
from cupy_backends.cuda.api.runtime import getDevice, memcpyAsync, streamIsCapturing

from .cuda import MOST_PLANS, _narrowed, _on_device_of
from .cuda_launch import (
    NO_SEED,
    Amaxes,
    Kernel,
    Seed,
    captured,
    counts_of,
    kernel_of,
    scratch,
    seed_of,
    stream_of,
)
from .formats import Format
from .grouped_parts import GroupedPart, layout_of, with_sizes
from .groups import SIZE_KINDS, GroupedLayout, Sizes, Span, code_span, global_span, scale_span
from .layout import Array
from .philox import Draws
from .rawkernels import geometry, traits

# Structs of the kernels: every field takes eight bytes.
_MEMBERS = struct.Struct("=18q")
_QUANTIZE = struct.Struct("=39q")
_AMAX = struct.Struct("=8q")
_DEQUANTIZE = struct.Struct("=17q")

MEMBER_BYTES = 96
"""A line of the table of members: `TableMember` of group.cuh."""

HOST_TO_DEVICE = 1  # cudaMemcpyKind

# --- sizes --------------------------------------------------------------------------------------


MOST_ROWS = (1 << 31) - (1 << 20)
"""Kernels count the rows of a group in 32 bits."""


@lru_cache(maxsize=MOST_PLANS)
def _uploaded(host: tuple[int, ...], device: int, stream: int) -> tuple[Array, Any]:
    """Sizes that the host knows, on the current device, for work on a stream; and the memory they are copied from."""
    array, source = cupy.ndarray((len(host),), np.int64), alloc_pinned_memory(8 * max(1, len(host)))
    np.frombuffer(source, np.int64, len(host))[...] = host
    memcpyAsync(array.data.ptr, source.ptr, 8 * len(host), HOST_TO_DEVICE, stream)
    return array, source


Groups: TypeAlias = tuple[int, int, int, int, int, int]


def groups_of(sizes: Sizes) -> Groups:
    """`Groups` of member.cuh; the arrays that it points to belong to the sizes, or to this module."""
    if sizes.capacity > MOST_ROWS:
        raise NotImplementedError(f"a group has up to {MOST_ROWS} rows on a GPU, not {sizes.capacity}; split it")
    pointer, kind = 0, sizes.kind
    if sizes.each is None:
        array = sizes.device
        if array is None:
            assert sizes.host is not None
            device = getDevice()
            stream = stream_of(device)
            kept = _uploaded(sizes.host, device, stream)
            if streamIsCapturing(stream):
                captured.append(kept)
            array, kind = kept[0], "int64"
        pointer = array.data.ptr
    return (pointer, SIZE_KINDS.index(kind), sizes.num_groups, sizes.each or 0, sizes.capacity, sizes.alignment)


def _kernel(launch: traits.Launch, capacity: int, num_groups: int, k: int, device: int) -> Kernel:
    return kernel_of(launch, geometry.grouped_grid(launch.tile, capacity, num_groups, k), device)


# --- quantize -----------------------------------------------------------------------------------


def _unit(span: Span | None) -> int:
    return 0 if span is None else span.nbytes


@dataclass(frozen=True, slots=True)
class _Part:
    """One direction of a plan: where the kernel writes a part."""

    format: Format
    layout: GroupedLayout
    is_along_rows: bool  # the part's own sizes are those of the rows
    each: Sizes          # else these
    pitch16: int
    scale_pitch: int
    codes_unit: int
    scales_unit: int
    has_amax: bool

    @staticmethod
    def of(format: Format, rows: Sizes, k: int, *, columnwise: bool) -> _Part:
        storage, columns = format.storage, Sizes.uniform(rows.num_groups, k)
        is_along_rows = not columnwise or rows.each is None
        if not columnwise:
            layout = layout_of(format, "outer", k, rows)
        elif rows.each is None:
            layout = layout_of(format, "k", k, rows)
        else:
            layout = layout_of(format, "outer", rows.each, columns)
        # a member's matrix is (rows, k) to the kernel, and rows are what may be ragged, in either direction
        axis = "k" if columnwise else "outer"
        codes, scales = code_span(storage, axis, k, 1), scale_span(storage, axis, k)  # type: ignore[arg-type]
        scale_pitch = 0
        if scales is not None:  # of the direction whose scales have one pitch for all members
            scale_pitch = scales.nbytes // (4 if storage.scale == "float32" else 1)
        return _Part(format, layout, is_along_rows, columns, codes.nbytes // 16, scale_pitch, codes.nbytes,
                     _unit(scales), format.measures_amax)

    def empty(self, rows: Sizes) -> GroupedPart:
        """A part in one allocation whose bytes are all written by the kernel that makes it."""
        sizes = rows if self.is_along_rows else self.each
        return GroupedPart(self.format, self.layout, sizes, alloc(self.layout.nbytes), self.has_amax)

    def output(self, part: GroupedPart) -> tuple[int, int, int, int, int, int]:
        """`Output` of quantize.cu."""
        layout, base = self.layout, part.memory.ptr
        return (base, self.pitch16, base + layout.scales_offset, self.scale_pitch, base + layout.global_scale_offset,
                base + layout.amax_offset if part.has_amax else 0)

    @property
    def segments(self) -> tuple[int, int, int, int]:
        """`Segments` of quantize.cu; scales that are one a member are all written."""
        layout = self.layout
        scales_end = 0 if layout.scales is None else layout.global_scale_offset - layout.scales_offset
        return self.codes_unit, self.scales_unit, layout.scales_offset, scales_end


_NO_OUTPUT, _NO_SEGMENTS = (0,) * 6, (0,) * 4

Parts: TypeAlias = tuple[GroupedPart | None, GroupedPart | None]
"""Rowwise and columnwise."""


@dataclass(frozen=True, slots=True)
class _Members:
    """The kernel that writes the table of members, which those after it read: a line a row tile.

    spans  divide and multiple of each span of `TableMember`
    """

    kernel: Kernel
    tiles: int
    spans: tuple[int, ...]

    @staticmethod
    def of(rows: Sizes, row: Format | None, column: Format | None, tile: geometry.Tile, device: int) -> _Members:
        launch = traits.members_launch()
        _, y, z = geometry.grouped_grid(tile, rows.capacity, rows.num_groups, 1)
        tiles = y * z  # the last layer of the grid is whole
        kernel = kernel_of(launch, (-(-tiles // launch.tile.rows), 1, 1), device)
        spans = (
            None if row is None else scale_span(row.storage, "outer", 8),
            None if column is None else code_span(column.storage, "k", 8, 1),
            None if column is None else scale_span(column.storage, "k", 8),
            None if row is None else global_span(row.storage, "outer", 8),
            None if column is None else global_span(column.storage, "k", 8),
        )
        numbers = (n for span in spans
                   for n in ((1, 1) if span is None else (min(span.divide, traits.MOST_INT), span.multiple)))
        return _Members(kernel, tiles, tuple(numbers))

    def find(self, stream: int, rows: Sizes) -> Any:
        """The table, once the stream is there; sizes are read on the device."""
        table = scratch(self.tiles * MEMBER_BYTES, stream)
        self.kernel.launch(stream, _MEMBERS, *groups_of(rows), table.ptr, self.tiles, *self.spans)
        return table


@dataclass(frozen=True, slots=True)
class _Plan:
    """One call of quantize_groups but for its pointers and sizes; segments are those of both parts."""

    device: int
    capacity: int
    k: int
    members: _Members
    kernel: Kernel
    amax: Amaxes | None
    rows: _Part | None
    columns: _Part | None
    segments: tuple[int, ...]

    def empty(self, rows: Sizes) -> Parts:
        """New parts of members of those sizes, not yet written."""
        return (None if self.rows is None else self.rows.empty(rows),
                None if self.columns is None else self.columns.empty(rows))

    def launch(
        self, pointer: int, row_bytes: int, rows: Sizes, parts: Parts, whole: Array | None = None,
        noop: Array | None = None, seed: Seed = NO_SEED, *, zeros_rest: bool, record: Array | None = None,
    ) -> None:
        """Read the matrix at a pointer into parts of the plan; whole, noop and record as in quantize_groups."""
        stream, capacity, k = stream_of(self.device), self.capacity, self.k
        table = self.members.find(stream, rows)  # memory of this stream, which is not reused before these kernels end
        flag, given = 0 if noop is None else noop.data.ptr, 0 if whole is None else whole.data.ptr
        (rowwise, columnwise), wholes, amax = parts, (given, given), self.amax
        if amax is not None:
            works = 0 if rowwise is None else _work(rowwise), 0 if columnwise is None else _work(columnwise)
            place = (pointer, row_bytes, capacity, k)
            wholes = amax.launch(stream, _AMAX, works, given, flag, *place, table=(table.ptr,))
        self.kernel.launch(
            stream, _QUANTIZE, pointer, row_bytes, capacity, k, *wholes, flag,
            *(_NO_OUTPUT if rowwise is None else self.rows.output(rowwise)),  # type: ignore[union-attr]
            *(_NO_OUTPUT if columnwise is None else self.columns.output(columnwise)),  # type: ignore[union-attr]
            amax is not None, capacity, k, *seed, 0 if record is None else record.data.ptr,
            table.ptr, rows.num_groups, *self.segments, zeros_rest,
        )


def _work(part: GroupedPart) -> int:
    """Where a part's amaxes are collected."""
    return part.memory.ptr + part.layout.work_offset  # type: ignore[no-any-return]


_plans: dict[Any, _Plan] = {}


def _plan(values: Array, rows: Sizes, row: Format | None, column: Format | None, given: bool = False) -> _Plan:
    device, row_bytes, k = values.data.device_id, values.strides[0], values.shape[1]
    aligned = (values.data.ptr | row_bytes) % 16 == 0
    key = (row, column, k, values.dtype, aligned, rows.num_groups, rows.each, rows.capacity, rows.alignment, device,
           given)
    plan = _plans.get(key)
    if plan is None:
        place = (rows.capacity, rows.num_groups, k, device)
        launch = traits.quantize_launch(row, column, values.dtype.name, aligned, grouped=True)
        kernel, members = _kernel(launch, *place), _Members.of(rows, row, column, launch.tile, device)
        amax, (*measures, shared) = None, traits.measures_of(row, column, given)
        if any(measures):
            measuring = traits.amax_launch(values.dtype.name, aligned, True, measures[0], measures[1])
            counts = counts_of(measures, rows.num_groups, (rows.capacity, rows.num_groups * k))
            amax = Amaxes(_kernel(measuring, *place), (measures[0], measures[1]), counts, shared)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        own, other = (None if format is None else _Part.of(format, rows, k, columnwise=columnwise)
                      for format, columnwise in ((row, False), (column, True)))
        segments = (n for part in (own, other) for n in (_NO_SEGMENTS if part is None else part.segments))
        plan = _plans[key] = _Plan(device, rows.capacity, k, members, kernel, amax, own, other, tuple(segments))
    return plan


def is_readable(values: Array) -> bool:
    """Whether the kernels read a matrix where it lies."""
    size = values.dtype.itemsize
    return bool(size < 8 and (values.strides[1] == size or values.shape[1] <= 1))


def _readable(values: Array) -> Array:
    """The matrix with contiguous rows."""
    if is_readable(values):
        return values
    return _narrowed(values) if values.dtype.itemsize == 8 else cupy.ascontiguousarray(values)


def quantize_groups(
    values: Array, rows: Sizes, row: Format | None, column: Format | None, whole: Array | None = None,
    out: Parts | None = None, noop: Array | None = None, draws: Draws | None = None, record: Array | None = None,
) -> Parts:
    """See reference_grouped.quantize_groups: one launch, and one before it where an amax is measured."""
    with _on_device_of(values.data):
        values = _readable(values)
        plan = _plan(values, rows, row, column, whole is not None)
        parts = plan.empty(rows) if out is None else with_sizes(out, rows)
        if rows.num_groups:
            plan.launch(values.data.ptr, values.strides[0], rows, parts, whole, noop, seed_of(draws),
                        zeros_rest=out is None, record=record)
    return parts


def raise_to_amaxes(values: Array, rows: Sizes, amaxes: Array) -> None:
    """See reference_grouped.raise_to_amaxes; two launches, whatever the sizes: which rows are whose, and the amaxes."""
    if not rows.num_groups:
        return
    with _on_device_of(values.data):
        values = _readable(values)
        pointer, row_bytes, k, device = values.data.ptr, values.strides[0], values.shape[1], values.data.device_id
        launch = traits.amax_launch(values.dtype.name, (pointer | row_bytes) % 16 == 0, grouped=True)
        kernel = _kernel(launch, rows.capacity, rows.num_groups, k, device)
        stream = stream_of(device)
        table = _Members.of(rows, None, None, launch.tile, device).find(stream, rows)
        kernel.launch(stream, _AMAX, pointer, row_bytes, rows.capacity, k, amaxes.data.ptr, 0, 0, table.ptr)


# --- decode -------------------------------------------------------------------------------------


@lru_cache(maxsize=MOST_PLANS)
def _dequantize_kernel(format: Format, dtype: str, transposed: bool, capacity: int, num_groups: int, k: int,
                       device: int) -> Kernel:
    aligned = k * (4 if dtype == "float32" else 2) % 16 == 0
    launch = traits.dequantize_launch(format.storage, dtype, transposed, aligned, grouped=True)
    return _kernel(launch, capacity, num_groups, k, device)


def dequantize_groups(part: GroupedPart, dtype: np.dtype[Any], *, transposed: bool = False) -> Array:
    """See reference_grouped.dequantize_groups."""
    layout, sizes = part.layout, part.sizes
    columnwise = layout.ragged == "k"  # then the ragged axis comes first in the transposed values alone
    if transposed != columnwise:
        return dequantize_groups(part, dtype, transposed=columnwise).T
    storage, k, base = part.format.storage, layout.each, part.memory.ptr
    with _on_device_of(part.memory):
        values = cupy.ndarray((sizes.capacity, k), dtype)
        if values.size:
            device = part.memory.device_id
            place = (sizes.capacity, sizes.num_groups, k, device)
            kernel = _dequantize_kernel(part.format, dtype.name, columnwise, *place)
            scale_pitch = 0
            if layout.scales is not None:
                scale_pitch = layout.scales.nbytes // (4 if storage.scale == "float32" else 1)
            kernel.launch(
                stream_of(device), _DEQUANTIZE, base, layout.codes.nbytes, base + layout.scales_offset, scale_pitch,
                base + layout.global_scale_offset, values.data.ptr, values.strides[0], sizes.capacity, k,
                *groups_of(sizes), layout.codes.nbytes, _unit(layout.scales),
            )
    return values
