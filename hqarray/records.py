"""Rows of a part as records that travel: a row's codes, its scales and its global scale, one after another.

Lines say where the rows of a part, or of all members of a group, lie; record_ops makes records of them and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import QuantizedArray
from .buffers import Packed
from .formats import Format
from .grouped_parts import GroupedPart
from .layout import PITCH, Array, PartLayout, part_layout, round_up


def can_travel(format: Format) -> bool:
    """Whether a row's codes and scales do not depend on where the row lies, nor on its neighbours but for an amax."""
    blocks = [block for block in (format.storage.block, format.amax_block) if block is not None]
    return not format.is_stochastic and all(rows == 1 for rows, _ in blocks)


@dataclass(frozen=True, slots=True)
class Record:
    """What a row of k elements is as a record: codes with their padding, scales and global scale if they are its own.

    Each of the three begins on 16 bytes.
    """

    format: Format
    k: int

    def __post_init__(self) -> None:
        if not can_travel(self.format):
            why = "rounds at random by a row's place" if self.format.is_stochastic else "has blocks of many rows"
            raise ValueError(
                f"{self.format.name} {why}, and a token that is sent has codes of its own; send another format (mxfp8, "
                f"fp8_block_1x128, nvfp4, ...), or bf16 and quantize where it arrives"
            )

    @property
    def _layout(self) -> PartLayout:
        return part_layout(self.format.storage, (1, self.k))

    @property
    def pitch(self) -> int:
        """Bytes of codes."""
        codes = self._layout.codes
        return codes.pitch * codes.itemsize

    @property
    def scales(self) -> tuple[np.dtype[Any], int]:
        """Type and number of a row's scales."""
        layout = self._layout
        return layout.scales_dtype, layout.num_scales[1] if self.format.storage.block is not None else 0

    @property
    def global_offset(self) -> int:
        """Byte where the global scale begins, if there is one, and the scales have ended."""
        dtype, count = self.scales
        return self.pitch + round_up(count * dtype.itemsize, PITCH)

    @property
    def nbytes(self) -> int:
        return self.global_offset + (PITCH if self.format.storage.global_per_row else 0)


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """Where rows of a part lie.

    codes    uint8 (rows, record.pitch)
    scales   those of all rows, one dimension; None where rows have none of their own
    starts   int64 (rows,), which of these is a row's first one; below 0: the row is none's, and has none. None: row i's
             is scale i
    steps    int64 (rows,), from each of a row's scales to the next; None: step
    globals  float32 (rows,); None where rows have none of their own
    """

    record: Record
    codes: Array
    scales: Array | None = None
    starts: Array | None = None
    steps: Array | None = None
    step: int = 0
    globals: Array | None = None

    @classmethod
    def of_part(cls, part: QuantizedArray) -> Lines:
        """The rows of a packed part."""
        buffers, record = part.buffers, Record(part.format, part.shape[1])
        assert isinstance(buffers, Packed)
        layout = buffers.layout
        codes = buffers.base[: part.shape[0] * record.pitch].reshape(part.shape[0], record.pitch)
        scales, count = None, record.scales[1]
        if count:
            size = layout.scales_shape[0] * layout.scales_shape[1]
            at, dtype = layout.scales_offset, layout.scales_dtype
            scales = buffers.base[at : at + size * dtype.itemsize].view(dtype)
        return cls(record, codes, scales, step=layout.scales_shape[1] if count else 0,
                   globals=_globals(part))

    @classmethod
    def of_group(cls, part: GroupedPart, starts: Array | None, steps: Array | None) -> Lines:
        """The rows of all members of a group; starts and steps where rows have scales of their own."""
        record = Record(part.format, part.layout.each)
        codes = part.base[: part.layout.codes_nbytes].reshape(part.sizes.capacity, record.pitch)
        return cls(record, codes, part.scales if record.scales[1] else None, starts, steps, globals=_globals(part))


def _globals(part: QuantizedArray | GroupedPart) -> Array | None:
    """The global scales of rows; of rows without elements there are none."""
    has_rows = part.format.storage.global_per_row and part.global_scale is not None and part.global_scale.size
    return part.global_scale if has_rows else None


__all__ = ["Lines", "Record", "can_travel"]
