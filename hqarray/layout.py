"""Layouts: where the codes and scales of a part lie in memory, as frozen values with inverse pairs.

A part is one buffer: codes, then scales, then its two scalars. CodeLayout and the ScaleLayouts say how the
logical (outer, k) codes and (rows, blocks) scales lie in it; each has a pair of functions that undo one another.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .formats import Storage

Array: TypeAlias = Any
"""A NumPy or CuPy array: the functions here use only what both have."""

ALIGNMENT = 256
"""Bytes: every segment of a part starts on this, as fresh CUDA allocations do."""

PITCH = 16
"""Bytes between multiples of which a row of codes may start: what cuBLASLt asks of a leading dimension."""


def namespace(array: Array) -> ModuleType:
    """Numpy or cupy: the module of an array's type (CuPy 14 has no __array_namespace__)."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def pack_nibbles(codes: Array) -> Array:
    """(outer, k) codes below 16 -> (outer, ceil(k / 2)) bytes, even index in the low nibble."""
    outer, k = codes.shape
    if k % 2 or not codes.flags.c_contiguous:
        even = namespace(codes).zeros((outer, round_up(k, 2)), codes.dtype)
        even[:, :k] = codes
        codes = even
    pairs = codes.view("<u2")
    return (pairs | pairs >> 4).astype(codes.dtype)


def unpack_nibbles(packed: Array, k: int) -> Array:
    """(outer, ceil(k / 2)) bytes -> (outer, k) codes; inverse of pack_nibbles."""
    pairs = packed[..., None] >> np.array([0, 4], np.uint8)
    return (pairs & 15).reshape(packed.shape[0], 2 * packed.shape[1])[:, :k]


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """Rows of codes with a pitch of a multiple of 16 bytes, and rows up to a multiple of 16; padding is zero.

    A GEMM contracts over the padding (FP8 needs k % 16 == 0), so zero is an invariant, not a habit.
    """

    outer: int
    k: int
    stored_bits: int
    itemsize: int

    @property
    def columns(self) -> int:
        """Items in a logical row: k, or ceil(k / 2) bytes where two codes share one."""
        return -(-self.k * self.stored_bits // (8 * self.itemsize))

    @property
    def pitch(self) -> int:
        """Items from one row to the next."""
        return round_up(self.columns * self.itemsize, PITCH) // self.itemsize

    @property
    def rows(self) -> int:
        return round_up(self.outer, 16)

    @property
    def nbytes(self) -> int:
        return self.rows * self.pitch * self.itemsize

    def view(self, padded: Array) -> Array:
        """The logical (outer, columns) codes inside the (rows, pitch) buffer; no copy."""
        return padded[: self.outer, : self.columns]

    def pad(self, codes: Array) -> npt.NDArray[Any]:
        """A zero-padded (rows, pitch) buffer that holds the logical codes; inverse of view."""
        padded = np.zeros((self.rows, self.pitch), codes.dtype)
        self.view(padded)[...] = codes
        return padded


class ScaleLayout(ABC):
    """How (rows, blocks) logical scales lie in a buffer."""

    __slots__ = ()

    @abstractmethod
    def buffer_shape(self, rows: int, blocks: int) -> tuple[int, ...]:
        """Shape of the buffer, padding included."""

    @abstractmethod
    def tile(self, scales: Array) -> npt.NDArray[Any]:
        """Logical (rows, blocks) scales -> a new zero-padded buffer."""

    @abstractmethod
    def untile(self, buffer: Array, rows: int, blocks: int) -> Array:
        """Buffer -> logical (rows, blocks) scales: a view where the layout is strided, else a copy."""


@dataclass(frozen=True, slots=True)
class RowMajor(ScaleLayout):
    """(rows, blocks), row pitch a multiple of `pad` scales. pad 4: cuBLASLt's BLK128x128_32F."""

    pad: int = 1

    def buffer_shape(self, rows: int, blocks: int) -> tuple[int, ...]:
        return (rows, round_up(blocks, self.pad))

    def tile(self, scales: Array) -> npt.NDArray[Any]:
        buffer = np.zeros(self.buffer_shape(*scales.shape), scales.dtype)
        buffer[:, : scales.shape[1]] = scales
        return buffer

    def untile(self, buffer: Array, rows: int, blocks: int) -> Array:
        return buffer[:, :blocks]


@dataclass(frozen=True, slots=True)
class BlockMajor(ScaleLayout):
    """(blocks, rows), pitch a multiple of `pad` scales. pad 4, float32: cuBLASLt's VEC128_32F.

    Byte scales lie so too: row-major bytes cost a GPU's quantize kernel 12 to 35 % of its time.
    """

    pad: int = 1

    def buffer_shape(self, rows: int, blocks: int) -> tuple[int, ...]:
        return (blocks, round_up(rows, self.pad))

    def tile(self, scales: Array) -> npt.NDArray[Any]:
        buffer = np.zeros(self.buffer_shape(*scales.shape), scales.dtype)
        buffer[:, : scales.shape[0]] = scales.T
        return buffer

    def untile(self, buffer: Array, rows: int, blocks: int) -> Array:
        return buffer[:, :rows].T


@dataclass(frozen=True, slots=True)
class Tiled128x4(ScaleLayout):
    """Tiles of 128 rows x 4 blocks, 512 bytes each: cuBLASLt's VEC32_UE8M0 and VEC16_UE4M3 on Blackwell.

    Scale (i, j) lies at ((i/128) * tiles + j/4) * 512 + (i%32) * 16 + (i%128)/32 * 4 + j%4.
    """

    def buffer_shape(self, rows: int, blocks: int) -> tuple[int, ...]:
        return (round_up(rows, 128) // 128, round_up(blocks, 4) // 4, 32, 4, 4)

    def tile(self, scales: Array) -> npt.NDArray[Any]:
        rows, blocks = scales.shape
        row_tiles, block_tiles = self.buffer_shape(rows, blocks)[:2]
        padded = np.zeros((row_tiles * 128, block_tiles * 4), scales.dtype)
        padded[:rows, :blocks] = scales
        return padded.reshape(row_tiles, 4, 32, block_tiles, 4).transpose(0, 3, 2, 1, 4).copy()

    def untile(self, buffer: Array, rows: int, blocks: int) -> Array:
        row_tiles, block_tiles = buffer.shape[:2]
        return buffer.transpose(0, 3, 2, 1, 4).reshape(row_tiles * 128, block_tiles * 4)[:rows, :blocks]


def scale_layout(storage: Storage) -> ScaleLayout:
    """The layout quantize writes: what cuBLASLt reads on Hopper, block-major for bytes."""
    if storage.scale == "float32":
        square = storage.block is not None and storage.block[0] > 1
        return RowMajor(pad=4) if square else BlockMajor(pad=4)
    return BlockMajor(pad=PITCH)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One part in one buffer of `nbytes`: codes at 0, scales, global scales and amax at byte offsets."""

    codes: CodeLayout
    codes_dtype: np.dtype[Any]
    scales: ScaleLayout
    num_scales: tuple[int, int]
    scales_shape: tuple[int, ...]
    scales_dtype: np.dtype[Any]
    scales_offset: int
    global_scale_offset: int
    amax_offset: int
    has_global_scale: bool
    num_global_scales: int
    nbytes: int


@lru_cache(maxsize=4096)
def part_layout(storage: Storage, shape: tuple[int, int]) -> PartLayout:
    """Layout of an (outer, k) part of this storage."""
    codes = CodeLayout(*shape, storage.element.stored_bits, storage.element.dtype.itemsize)
    scales = scale_layout(storage)
    num_scales = storage.num_scales(shape)
    scales_shape = scales.buffer_shape(*num_scales) if storage.scale != "none" else (0, 0)
    dtype = np.dtype(np.float32 if storage.scale == "float32" else np.uint8)
    scales_offset = round_up(codes.nbytes, ALIGNMENT)
    scalars = round_up(scales_offset + int(np.prod(scales_shape)) * dtype.itemsize, PITCH)
    num_global_scales = storage.num_global_scales(shape)
    amax = scalars + max(PITCH, round_up(4 * num_global_scales, PITCH))
    return PartLayout(
        codes, storage.element.dtype, scales, num_scales, scales_shape, dtype, scales_offset,
        global_scale_offset=scalars, amax_offset=amax, has_global_scale=storage.global_scale,
        num_global_scales=num_global_scales, nbytes=amax + PITCH,
    )
