"""How the members of a part come to a grouped cuBLASLt product: where each begins, and what decodes it first."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

from . import cublaslt_grouped
from .cuda_calls import Scratch
from .cuda_grouped import Groups
from .cuda_launch import kernel_of
from .formats import Storage
from .grouped_parts import GroupedPart
from .groups import SIZE_KINDS, Axis, Sizes, Span
from .layout import round_up
from .rawkernels import geometry, traits

_DECODE = struct.Struct("=20q")  # of decode.cu: every field takes eight bytes

A, B, OUT, SCRATCH = range(4)  # what a target lies in

# --- targets: where the members of something begin ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """`Target` of group_gemm.cu: members begin at base + offset + unit * (units before them).

    units  unit, divide and multiple; divide > 0: units are spans; 0: a member is one unit; -1: units are the stacked
           rows
    """

    base: int
    offset: int
    units: tuple[int, int, int]


NOTHING = Target(SCRATCH, 0, (0, 0, 0))


def _along(source: int, offset: int, span: Span) -> Target:
    return Target(source, offset, (span.nbytes, span.divide, span.multiple))


# --- sides --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decode:
    """The kernel that makes an operand of all members of a part, and its constant arguments."""

    kernel: Any
    constants: tuple[int, ...]  # pitch and scale pitch of the part; row bytes, rows and columns of the values
    scales_offset: int
    scalars_offset: int  # of scales of whole members, or of their lines' global scales
    target: int  # offset in scratch memory
    units: tuple[int, int, int]
    groups: Groups | None  # None: the ragged sizes of the product

    def launch(self, part: int, base: int, groups: Groups, stream: int) -> None:
        pitch, scale_pitch, row_bytes, outer, k = self.constants
        self.kernel.launch(
            stream, _DECODE, part, pitch, part + self.scales_offset, scale_pitch, part + self.scalars_offset, 0, 0,
            base + self.target, row_bytes, outer, k, *(groups if self.groups is None else self.groups), *self.units,
        )


@dataclass(frozen=True, slots=True)
class Side:
    """How the members of one part come to cuBLASLt.

    k_unit, k_terms   an operand has k_terms * round_up(k, k_unit) columns
    scalars_offset    of scales of whole members that the finishing kernel multiplies with; 0: there are none
    """

    type: str
    k_unit: int
    k_terms: int
    codes: Target
    scale: str | None = None
    scales: Target = NOTHING
    scalars_offset: int = 0
    decode: Decode | None = None


def uniform(num_groups: int, each: int) -> Groups:
    return 0, SIZE_KINDS.index("each"), num_groups, each, num_groups * each, 1


@dataclass(frozen=True, slots=True)
class Rows:
    """How the lines of an operand are stacked: ragged ones, or so many in every member."""

    capacity: int
    each: int | None

    def target(self, source: int, offset: int, row_bytes: int) -> Target:
        if self.each is None:
            return Target(source, offset, (row_bytes, -1, 0))
        return Target(source, offset, (row_bytes * self.each, 0, 0))


def side_of(
    part: GroupedPart, source: int, sizes: Sizes, engine: str, terms: int, split: bool, scratch: Scratch, device: int
) -> Side:
    """Sizes: of the part's ragged axis. terms, split: of bf16x3, as in cuda_gemm."""
    layout = part.layout
    storage = layout.storage
    is_ready = storage.scale == "none" and terms == 1 and engine in ("native", storage.element.name)
    if engine != "native" and not is_ready:
        return _decoded_side(part, source, sizes, terms, split, scratch, device)
    rows = Rows(sizes.capacity, sizes.each)
    codes = _along(source, 0, layout.codes) if layout.ragged == "k" else rows.target(source, 0, layout.codes.nbytes)
    side = Side(storage.element.name, 128 // storage.element.stored_bits, 1, codes)
    if storage.scale == "none":
        return side
    if layout.scales is None:
        scales = Target(source, layout.scales_offset, (4, 0, 0))
    elif sizes.each is not None:
        unit = layout.scales.nbytes * layout.scales.units(sizes.each)
        scales = Target(source, layout.scales_offset, (unit, 0, 0))
    else:
        scales = _along(source, layout.scales_offset, layout.scales)
    return replace(side, scale=cublaslt_grouped.SCALE_MODES[storage.block], scales=scales)


def _decoded_side(
    part: GroupedPart, source: int, sizes: Sizes, terms: int, split: bool, scratch: Scratch, device: int
) -> Side:
    layout, num_groups, capacity = part.layout, part.num_groups, sizes.capacity
    storage, axis = layout.storage, layout.ragged
    launch = traits.decode_launch(storage, "bfloat16", terms, split, axis)
    scale_pitch = _scale_pitch(storage, axis, layout.scales)
    if axis == "k":
        grid = geometry.ragged_grid(launch.tile, layout.each, capacity, num_groups)
        span = Span(1, 8, layout.each * terms * 2)
        target = scratch.take(span.most(capacity, num_groups))
        constants, codes = (0, scale_pitch, 0, layout.each, 0), _along(SCRATCH, target, span)
        value_unit = span.nbytes
    else:
        width = round_up(layout.each, 8)
        row_bytes = terms * width * 2
        grid = geometry.grouped_grid(launch.tile, capacity, num_groups, width)
        target = scratch.take(capacity * row_bytes)
        constants = (layout.codes.nbytes, scale_pitch, row_bytes, 0, width)
        codes, value_unit = Rows(capacity, sizes.each).target(SCRATCH, target, row_bytes), 0
    own = layout.global_scale_offset if storage.global_scale else layout.scales_offset
    scalars = own if traits.left_to_alpha(storage)[1] else 0
    units = (layout.codes.nbytes, 0 if layout.scales is None else layout.scales.nbytes, value_unit)
    groups = None if sizes.each is None else uniform(num_groups, sizes.each)
    decode = Decode(kernel_of(launch, grid, device), constants, layout.scales_offset, own, target, units, groups)
    return Side("bfloat16", 8, terms, codes, scalars_offset=scalars, decode=decode)


def _scale_pitch(storage: Storage, axis: Axis, scales: Span | None) -> int:
    """Of scales that have one pitch for all members; 0 where it follows from a member's size."""
    if scales is None or storage.block is None:
        return 0
    is_block_major = storage.block[0] == 1
    itemsize = 4 if storage.scale == "float32" else 1
    return scales.nbytes // itemsize if is_block_major == (axis == "k") else 0
