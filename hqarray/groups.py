"""Groups: sizes that the host may not know, and where the members of a part lie in one buffer.

Members are matrices whose sizes differ along at most one axis, the ragged one; a member begins where the spans of
those before it end. A span is a size divided (scales: one a block) and rounded up (pitch, padding), so that a kernel
finds every member from the sizes alone. Members that differ along both axes are looked up on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .formats import ROW, Storage
from .layout import ALIGNMENT, PITCH, Array, BlockMajor, RowMajor, part_layout, round_up, scale_layout

Axis: TypeAlias = Literal["outer", "k"]

SizeKind: TypeAlias = Literal["int32", "int64", "ends", "each"]
SIZE_KINDS: tuple[SizeKind, ...] = ("int32", "int64", "ends", "each")
"""How kernels are told sizes: an array of int32 or int64, int32 cumulative ends, or one size for all."""


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """The sizes of one axis of the members of a group.

    num_groups  how many members
    each        every member's size; None where they differ
    host        sizes known to the host, negative ones and what passes the capacity cut off; None elsewhere
    device      the array that holds sizes, or ends, on a device; None where there is none
    kind        what `device` holds
    capacity    most that the sizes, each rounded up to alignment, may add up to
    alignment   members begin on a multiple of this
    """

    num_groups: int
    each: int | None
    host: tuple[int, ...] | None
    device: Array | None
    kind: SizeKind
    capacity: int
    alignment: int = 1

    @classmethod
    def uniform(cls, num_groups: int, each: int) -> Sizes:
        return cls(num_groups, each, None, None, "each", num_groups * each)

    @classmethod
    def known(cls, sizes: npt.ArrayLike, capacity: int | None = None, alignment: int = 1) -> Sizes:
        """Sizes on the host."""
        array = np.asarray(sizes, np.int64)
        reach = int(span_ends(Span(1, alignment), array)[-1]) if len(array) else 0
        host = tuple(int(n) for n in array)
        return cls(len(host), None, host, None, "int64", reach if capacity is None else capacity, alignment)

    @property
    def is_known(self) -> bool:
        """Whether the host knows them."""
        return self.each is not None or self.host is not None

    @property
    def values(self) -> npt.NDArray[np.int64]:
        """Sizes as an array on the host; they must be known there."""
        if self.each is not None:
            return np.full(self.num_groups, self.each, np.int64)
        assert self.host is not None
        return np.array(self.host, np.int64)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each member begins in the stacked values, and where the last one ends: (num_groups + 1,)."""
        return span_starts(Span(1, self.alignment), self.values)


@dataclass(frozen=True, slots=True)
class Span:
    """What a member of some size takes: round_up(ceil(size / divide), multiple) units of so many bytes."""

    divide: int
    multiple: int
    nbytes: int = 1

    def units(self, sizes: Any) -> Any:
        """Of a size or an array of them."""
        blocks = -(-sizes // self.divide)
        return -(-blocks // self.multiple) * self.multiple

    def most(self, capacity: int, num_groups: int) -> int:
        """Bytes that members of up to `capacity` together can take."""
        if not num_groups:
            return 0
        full = capacity // self.divide if self.divide > 1 else capacity
        ragged = num_groups if self.divide > 1 else 0
        return (full + ragged + num_groups * (self.multiple - 1)) * self.nbytes


def span_ends(span: Span, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Units where each member's span ends."""
    return np.cumsum(span.units(sizes))


def span_starts(span: Span, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Units where each member's span starts, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), span_ends(span, sizes)])


@dataclass(frozen=True, slots=True)
class GroupedLayout:
    """A part of many members in one buffer: codes, scales, then global scales, amaxes and the work of the amax kernel.

    ragged   the axis along which members' sizes differ; the other one is `each`
    codes    span of a member's codes along the ragged axis
    scales   the same of its scales; None: one for each member, or none
    globals  the same of its global scales where it has one a row; None: one for each member, or none
    Offsets are in bytes. Codes and scales of a member lie as those of a part alone do, rows not padded to 16.
    """

    storage: Storage
    num_groups: int
    ragged: Axis
    each: int
    codes: Span
    scales: Span | None
    globals: Span | None
    codes_nbytes: int
    scales_offset: int
    scales_nbytes: int
    globals_nbytes: int
    global_scale_offset: int
    amax_offset: int
    work_offset: int
    nbytes: int

    @property
    def has_global_scale(self) -> bool:
        return self.storage.global_scale

    @property
    def num_global_scales(self) -> int:
        """What there is room for: one for each member, or of rows for the capacity."""
        return self.num_groups if self.globals is None else self.globals_nbytes // 4

    def shape(self, size: int) -> tuple[int, int]:
        """(outer, k) of a member of that size along the ragged axis."""
        return (size, self.each) if self.ragged == "outer" else (self.each, size)

    def starts(self, sizes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Bytes from the buffer's beginning to each member's codes, and to its scales."""
        codes = span_starts(self.codes, sizes)[:-1] * self.codes.nbytes
        if self.scales is None:
            return codes, self.scales_offset + np.arange(len(sizes)) * (4 if self.storage.scale == "float32" else 0)
        return codes, self.scales_offset + span_starts(self.scales, sizes)[:-1] * self.scales.nbytes


def code_span(storage: Storage, ragged: Axis, each: int, alignment: int) -> Span:
    """Span of codes: rows of a pitch, or columns rounded up to 16 bytes in each of `each` rows."""
    if ragged == "outer":
        layout = part_layout(storage, (1, each)).codes
        return Span(1, alignment, layout.pitch * layout.itemsize)
    bits = storage.element.stored_bits
    shared = max(1, 8 // bits)  # codes in a byte
    return Span(shared, PITCH * 8 // (bits * shared), each * bits * shared // 8)


def scale_span(storage: Storage, ragged: Axis, each: int) -> Span | None:
    """Span of scales; None where a member has one, or none."""
    if storage.scale == "none" or storage.block is None:
        return None
    itemsize = 4 if storage.scale == "float32" else 1
    layout, (rows, columns) = scale_layout(storage), storage.block
    if isinstance(layout, BlockMajor):  # (blocks, outer up to a multiple of pad)
        if ragged == "outer":
            return Span(1, layout.pad, -(-each // columns) * itemsize)
        return Span(columns, 1, round_up(each, layout.pad) * itemsize)
    assert isinstance(layout, RowMajor)  # (outer blocks, blocks up to a multiple of pad)
    if ragged == "outer":
        return Span(rows, 1, round_up(-(-each // columns), layout.pad) * itemsize)
    return Span(columns, layout.pad, -(-each // rows) * itemsize)


def global_span(storage: Storage, ragged: Axis, each: int) -> Span | None:
    """Span of global scales, one for each row that is not empty; None where a member has one, or none."""
    if not storage.global_per_row:
        return None
    return Span(1, 1, 4 * min(each, 1)) if ragged == "outer" else Span(ROW, 1, 4 * each)


@lru_cache(maxsize=4096)
def grouped_layout(
    storage: Storage, num_groups: int, ragged: Axis, each: int, capacity: int, alignment: int = 1
) -> GroupedLayout:
    """The layout of a part whose members together may reach `capacity` along the ragged axis."""
    codes, scales = code_span(storage, ragged, each, alignment), scale_span(storage, ragged, each)
    # members' starts on the alignment are counted in the capacity already
    codes_nbytes = capacity * codes.nbytes if ragged == "outer" else codes.most(capacity, num_groups)
    scales_offset = round_up(codes_nbytes, ALIGNMENT)
    one_each = num_groups * 4 if storage.scale == "float32" and scales is None else 0
    scales_nbytes = one_each if scales is None else scales.most(capacity, num_groups)
    global_scale = round_up(scales_offset + scales_nbytes, ALIGNMENT)
    scalars = round_up(num_groups * 4, PITCH)
    by_row = global_span(storage, ragged, each)
    globals_nbytes = num_groups * 4 if by_row is None else by_row.most(capacity, num_groups)
    amax = global_scale + round_up(globals_nbytes, PITCH)
    return GroupedLayout(
        storage, num_groups, ragged, each, codes, scales, by_row, codes_nbytes, scales_offset, scales_nbytes,
        globals_nbytes, global_scale_offset=global_scale, amax_offset=amax, work_offset=amax + scalars,
        nbytes=amax + 2 * scalars,
    )
