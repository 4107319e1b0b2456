"""Buffers of a part: one allocation of our own, or arrays as somebody else made them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from .layout import Array, PartLayout, namespace


def ordinal_of(memory: Any) -> int:
    """The CUDA device that holds a NumPy array or CuPy's MemoryPointer; -1 for the host."""
    return -1 if isinstance(memory, np.ndarray) else int(memory.device_id)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A part's buffers in one allocation of bytes; views are made on access.

    memory  a NumPy array of bytes, or CuPy's MemoryPointer: an array costs more than all the rest of a part
    """

    memory: Any
    layout: PartLayout
    has_global_scale: bool
    has_amax: bool

    @classmethod
    def of(cls, base: Array, layout: PartLayout, has_global_scale: bool, has_amax: bool) -> Packed:
        """Over an array of layout.nbytes bytes."""
        memory = base if isinstance(base, np.ndarray) else base.data
        return cls(memory, layout, has_global_scale, has_amax)

    @property
    def base(self) -> Array:
        """The bytes as an array."""
        if isinstance(self.memory, np.ndarray):
            return self.memory
        return namespace(self.memory).ndarray((self.layout.nbytes,), np.uint8, self.memory)

    def _segment(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        nbytes = prod(shape) * dtype.itemsize
        return self.base[offset : offset + nbytes].view(dtype).reshape(shape)

    @property
    def padded_codes(self) -> Array:
        codes = self.layout.codes
        dtype = self.layout.codes_dtype
        return self._segment(0, (codes.rows, codes.pitch), dtype)

    @property
    def codes(self) -> Array:
        return self.layout.codes.view(self.padded_codes)

    @property
    def scales(self) -> Array:
        layout = self.layout
        buffer = self._segment(layout.scales_offset, layout.scales_shape, layout.scales_dtype)
        return layout.scales.untile(buffer, *layout.num_scales)

    @property
    def global_scale(self) -> Array | None:
        if not self.has_global_scale:
            return None
        shape = (self.layout.num_global_scales,)
        return self._segment(self.layout.global_scale_offset, shape, np.dtype(np.float32))

    @property
    def amax(self) -> Array | None:
        return self._segment(self.layout.amax_offset, (1,), np.dtype(np.float32)) if self.has_amax else None

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def ordinal(self) -> int:
        """The CUDA device that holds it; -1 for the host."""
        return ordinal_of(self.memory)

    @property
    def device(self) -> Any:
        return self.memory.device

    def copy(self) -> Packed:
        return Packed.of(self.base.copy(), self.layout, self.has_global_scale, self.has_amax)


@dataclass(frozen=True, slots=True, eq=False)
class Separate:
    """A part's buffers as somebody else made them: logical arrays, any strides that keep a row contiguous."""

    codes: Array
    scales: Array
    global_scale: Array | None
    amax: Array | None = None

    @property
    def ordinal(self) -> int:
        """The CUDA device that holds it; -1 for the host."""
        return -1 if isinstance(self.codes, np.ndarray) else int(self.codes.data.device_id)

    @property
    def device(self) -> Any:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.codes, self.scales, self.global_scale) if array is not None)

    def copy(self) -> Separate:
        copies = (None if a is None else a.copy() for a in (self.codes, self.scales, self.global_scale, self.amax))
        return Separate(*copies)
