"""A product on CuPy as a call: what is launched for it, in order, given the pointers of its arrays.

Work goes to CuPy's current stream on the arrays' device and nothing synchronises.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import cupy  # noqa: TID253  this module is imported only once a CuPy array has arrived
import numpy as np
from cupy.cuda import alloc  # noqa: TID253
from cupy_backends.cuda.api.runtime import (
    getDevice,
    memcpy2DAsync,
    memcpyDeviceToDevice,
    memsetAsync,
    streamIsCapturing,
)

from . import cublaslt, cuda
from .arrays import QuantizedArray
from .cuda_launch import captured, scratch, stream_of
from .formats import Format
from .layout import Array, round_up

# Structs of the kernels: every field takes eight bytes.
_DECODE = struct.Struct("=11q")
_FINISH = struct.Struct("=9q")
_TILE = struct.Struct("=8q")


# --- memory -------------------------------------------------------------------------------------

_workspaces: dict[tuple[int, int, str], Any] = {}


def workspace(device: int, stream: int, layout: str = "strided") -> int:
    """Pointer to the workspace of a stream for one batch layout.

    cuBLASLt up to 13.7 leaves descriptors of grouped calls there, which another layout must not meet.
    """
    memory = _workspaces.get((device, stream, layout))
    if memory is None:
        memory = _workspaces[device, stream, layout] = alloc(cublaslt.WORKSPACE_BYTES)
    return memory.ptr  # type: ignore[no-any-return]


class Scratch:
    """Offsets of one call's scratch memory."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> int:
        """Offset of so many bytes, on 256."""
        offset = self.nbytes
        self.nbytes += round_up(nbytes, 256)
        return offset


@cache
def _constants(device: int) -> tuple[int, int]:
    """Pointers to a float32 zero and a one on a device."""
    array = cupy.array([0, 1], np.float32)
    captured.append(array)
    return array.data.ptr, array.data.ptr + 4


def memory_of(x: Any) -> Any:
    """The memory pointer of a packed part or an array."""
    return x.buffers.memory if type(x) is QuantizedArray else x.data  # type: ignore[union-attr]


# --- sides of a product -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decode:
    """The kernel that makes a GEMM operand out of a part, and its constant arguments."""

    kernel: Any
    pitch: int
    scale_pitch: int
    target: int  # offset in scratch memory
    row_bytes: int
    outer: int
    k: int
    globals_offset: int = 0  # of global scales, where each row has its own
    writes_alpha: bool = False

    def prepare(self, pointers: Pointers, base: int, stream: int) -> Operand:
        """Launch; the pointers that cuBLASLt gets."""
        codes, scales, scalar, other, alpha = pointers
        own = codes + self.globals_offset if self.globals_offset else scalar
        self.kernel.launch(
            stream, _DECODE, codes, self.pitch, scales, self.scale_pitch, own, other,
            alpha if self.writes_alpha else 0, base + self.target, self.row_bytes, self.outer, self.k,
        )
        return base + self.target, 0


@dataclass(frozen=True, slots=True)
class Tile:
    """What Blackwell wants: scales in 128 x 4 tiles, rows of codes a multiple of 32 elements apart."""

    kernel: Any
    scale_pitch: int
    lines: int
    blocks: int
    target: int
    codes: int  # offset in scratch memory of codes with a wider pitch; -1: they stay where they are
    rows: int
    pitch: int
    wider: int
    writes_alpha: bool = False

    def prepare(self, pointers: Pointers, base: int, stream: int) -> Operand:
        """Launch; the pointers that cuBLASLt gets."""
        codes, scales, scalar, other, alpha = pointers
        self.kernel.launch(
            stream, _TILE, scales, self.scale_pitch, self.lines, self.blocks, base + self.target, scalar, other,
            alpha if self.writes_alpha else 0,
        )
        if self.codes >= 0:
            stored, codes = codes, base + self.codes
            memsetAsync(codes, 0, self.wider * self.rows, stream)
            memcpy2DAsync(codes, self.wider, stored, self.pitch, self.pitch, self.rows, memcpyDeviceToDevice, stream)
        return codes, base + self.target


@dataclass(frozen=True, slots=True)
class Spread:
    """Scales (blocks, lines) with a wider pitch, for a product with more lines than the part has; in bytes."""

    pitch: int
    wider: int
    blocks: int
    target: int

    def prepare(self, pointers: Pointers, base: int, stream: int) -> Operand:
        """Copy; the pointers that cuBLASLt gets. What lies between meets zero codes, in lines that are dropped."""
        target = base + self.target
        source, kind = pointers[1], memcpyDeviceToDevice
        memcpy2DAsync(target, self.wider, source, self.pitch, self.pitch, self.blocks, kind, stream)
        return pointers[0], target


Pointers: TypeAlias = tuple[int, int, int, int, int]
"""Codes, scales, this side's and the other's scale of the whole matrix (0: none), alpha."""

Operand: TypeAlias = tuple[int, int]
"""Codes and scales that cuBLASLt reads."""


@dataclass(frozen=True, slots=True)
class Side:
    """How one operand comes to cuBLASLt.

    convert        a plain array is made a part of this format first
    scalar_offset  of a scale of the whole matrix that is left to alpha; 0: there is none
    """

    operand: cublaslt.Operand
    convert: Format | None = None
    scales_offset: int = 0
    scalar_offset: int = 0
    work: Decode | Tile | Spread | None = None


# --- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finish:
    """The finishing kernel over a float32 sum in scratch memory."""

    kernel: Any
    sum: int = 0
    sum_pitch: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A product but for its pointers.

    keeps    the layouts whose identity stands for them in a key
    sides    left and right; None for a sum over nothing
    plan     of cuBLASLt, which writes the result, or a sum for `finish`
    alpha    offset in scratch memory; -1: alpha is one
    is_bare  both operands are read in place and the result is written in place
    """

    keeps: tuple[Any, ...]
    device: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    m: int
    n: int
    sides: tuple[Side, Side] | None = None
    plan: cublaslt.Plan | None = None
    beta: int = 0
    finish: Finish | None = None
    scratch_bytes: int = 0
    alpha: int = -1
    is_bare: bool = False

    def __call__(self, a: Any, b: Any, out: Array | None, aux: Array | None, bias: Array | None) -> Array:
        """Launch; a and b are parts or plain arrays (..., k) and (k, n), as the call was made for."""
        if getDevice() != self.device:
            with cupy.cuda.Device(self.device):
                return self(a, b, out, aux, bias)
        if out is None:
            out = cupy.ndarray(self.shape, self.dtype)
        stream, added = stream_of(self.device), 0 if bias is None else bias.data.ptr
        if self.is_bare:
            self.launch(stream, memory_of(a).ptr, memory_of(b).ptr, (out.data.ptr, 0), added)
            return out
        if not self.m or not self.n:
            return out
        base, pa, pb = 0, 0, 0
        if self.scratch_bytes:
            memory = scratch(self.scratch_bytes, stream)  # freed after this call, in the stream's order
            base = memory.ptr
        if self.sides is not None:
            if self.converts:
                a, b = self._converted(a, b)
                if streamIsCapturing(stream):
                    captured.append((a, b))
            pa, pb = memory_of(a).ptr, memory_of(b).ptr
        spare = (0, 0) if aux is None else (aux.data.ptr, _row_bytes(aux, self.n))
        self.launch(stream, pa, pb, (out.data.ptr, _row_bytes(out, self.n)), added, base, spare)
        return out

    def launch(
        self, stream: int, a: int, b: int, out: tuple[int, int], bias: int = 0, base: int = 0,
        aux: tuple[int, int] = (0, 0),
    ) -> None:
        """The same by pointers, on the current device; m and n are not zero, operands are as _converted leaves them.

        out, aux  pointer and bytes from row to row; aux (0, 0): none
        base      of scratch_bytes of scratch memory
        """
        if self.is_bare:
            left, right = self.sides  # type: ignore[misc]
            self.plan.run(  # type: ignore[union-attr]
                a, b, out[0], (a + left.scales_offset, b + right.scales_offset), cublaslt.HOST_SCALARS[self.beta], bias,
                workspace(self.device, stream), stream,
            )
            return
        finish = self.finish
        if self.sides is not None:
            if finish is None:
                self._multiply(a, b, base, stream, out[0], bias)
            else:
                self._multiply(a, b, base, stream, base + finish.sum, 0)
        if finish is not None:
            finish.kernel.launch(
                stream, _FINISH, base + finish.sum if self.plan is not None else 0, finish.sum_pitch, bias, *out, *aux,
                self.m, self.n,
            )

    @property
    def converts(self) -> bool:
        """Whether a plain array is made a part first."""
        left, right = self.sides  # type: ignore[misc]
        return left.convert is not None or right.convert is not None

    def _converted(self, a: Any, b: Any) -> tuple[Any, Any]:
        left, right = self.sides  # type: ignore[misc]
        if left.convert is not None:
            a = cuda.quantize_parts(a.reshape(self.m, a.shape[-1]), left.convert, None, None, None)[0]
        if right.convert is not None:
            b = cuda.quantize_parts(b, None, right.convert, None, None)[1]
        return a, b

    def _multiply(self, pa: int, pb: int, base: int, stream: int, d: int, bias: int) -> None:
        left, right = self.sides  # type: ignore[misc]
        scalar_a = pa + left.scalar_offset if left.scalar_offset else 0
        scalar_b = pb + right.scalar_offset if right.scalar_offset else 0
        sa, sb, alpha = pa + left.scales_offset, pb + right.scales_offset, base + self.alpha
        if left.work is not None:
            pa, sa = left.work.prepare((pa, sa, scalar_a, scalar_b, alpha), base, stream)
        if right.work is not None:
            pb, sb = right.work.prepare((pb, sb, scalar_b, scalar_a, alpha), base, stream)
        if self.alpha >= 0:
            scalars = (alpha, _constants(self.device)[self.beta])
        else:
            scalars = cublaslt.HOST_SCALARS[self.beta]
        assert self.plan is not None
        self.plan.run(pa, pb, d, (sa, sb), scalars, bias, workspace(self.device, stream), stream)


def _row_bytes(out: Array, n: int) -> int:
    return out.strides[0] if out.ndim == 2 else n * out.dtype.itemsize  # type: ignore[no-any-return]
