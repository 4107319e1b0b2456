"""How kernels are launched on CuPy's current stream: compiled kernels, scratch memory, seeds, amaxes before a quantize.

What cuda.py and cuda_grouped.py share.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import cupy  # noqa: TID253  this module is imported only once a CuPy array has arrived
from cupy.cuda import alloc, get_current_stream  # noqa: TID253
from cupy_backends.cuda.api.driver import launchKernel
from cupy_backends.cuda.api.runtime import CUDARuntimeError, getDevice, memsetAsync, setDevice, streamIsCapturing

from .philox import Draws
from .rawkernels import geometry, loader, traits

# --- kernels ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel on one device; leading are launchKernel's function, grid, block and shared bytes."""

    raw: Any
    leading: tuple[int, ...]

    def launch(self, stream: int, arguments: struct.Struct, *values: int) -> None:
        """One launch; the kernel's one argument is copied before this returns."""
        buffer, pointer = _local.argument
        arguments.pack_into(buffer, 0, *values)
        launchKernel(*self.leading, stream, pointer, 0)


class _Local(threading.local):
    """This thread's copy of a kernel's argument, and the array of one pointer that the driver reads.

    Made once in a thread, which then has a context as well: the driver launches in none but the current one, and a
    thread that has only asked for its device (autograd's) has none yet.
    """

    def __init__(self) -> None:
        with suppress(CUDARuntimeError):  # no GPU: nothing will be launched, and what is tried says so
            setDevice(getDevice())
        buffer = ctypes.create_string_buffer(512)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self.argument = buffer, ctypes.addressof(self.pointers)


_local = _Local()

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


def kernel_of(launch: traits.Launch, grid: tuple[int, int, int], device: int) -> Kernel:
    """A kernel on a device, compiled for it where it was not before, and how it is launched."""
    raw = _raw_kernel(launch.source, launch.shared_bytes, device)
    return Kernel(raw, (raw.kernel.ptr, *grid, geometry.THREADS, 1, 1, launch.shared_bytes))


def stream_of(device: int) -> int:
    """The current stream of a device."""
    return get_current_stream(device).ptr  # type: ignore[no-any-return]


def is_capturing(stream: int) -> bool:
    """Whether a graph records what is launched on a stream."""
    return bool(streamIsCapturing(stream))


# --- before a quantize --------------------------------------------------------------------------


captured: list[Any] = []
"""Scratch memory that a captured graph points to; never freed, since the graph may be replayed at any time."""


def scratch(nbytes: int, stream: int) -> Any:
    """Memory for what is launched next on a stream."""
    memory = alloc(nbytes)
    if streamIsCapturing(stream):
        captured.append(memory)
    return memory


Seed: TypeAlias = tuple[int, int, int, int, int]
"""`seed_at`, `seed`, `turned` and `before` of quantize.cu."""

NO_SEED: Seed = (0, 0, 0, 0, 0)


def seed_of(draws: Draws | None) -> Seed:
    """What the kernels draw from: a pointer to the seed, or the seed; and whether the matrix is X.T."""
    if draws is None:
        return NO_SEED
    seed, turned = draws.seed, int(draws.turned)
    if isinstance(seed, int):
        return 0, seed - (1 << 64) if seed >> 63 else seed, turned, *draws.first  # the same 64 bits with a sign
    return seed.data.ptr, 0, turned, *draws.first


@dataclass(frozen=True, slots=True)
class Amaxes:
    """The kernel that measures what the parts of a matrix need before their first code.

    measures  of the rowwise and the columnwise part
    counts    how many numbers each of them is
    shared    the columnwise part takes what the rowwise one measured
    line_bytes  of scratch memory for amaxes of lines; kept, since each launch asks
    """

    kernel: Kernel
    measures: tuple[traits.Measure | None, traits.Measure | None]
    counts: tuple[int, int]
    shared: bool
    line_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        of_lines = (4 * count for measure, count in zip(self.measures, self.counts, strict=True)
                    if measure is not None and measure.kind == "LINES")
        object.__setattr__(self, "line_bytes", sum(of_lines))

    def launch(
        self, stream: int, arguments: struct.Struct, works: tuple[int, int], given: int, flag: int,
        *place: int, table: tuple[int, ...] = (), at: int = 0,
    ) -> tuple[int, int]:
        """Measure a matrix; where each part finds its amaxes.

        works  where a part collects the amax of its matrix
        given  a caller's amax, which parts that measure none take; 0: none
        place  pointer, row bytes, m and k of the matrix
        at     line_bytes of scratch memory; 0: it is allocated, and free again in the stream's order
        """
        if self.line_bytes and not at:
            at = scratch(self.line_bytes, stream).ptr
        targets = [given, given]
        for number, (measure, count) in enumerate(zip(self.measures, self.counts, strict=True)):
            if measure is None:
                continue
            if measure.kind == "LINES":
                targets[number], at = at, at + 4 * count
            else:
                targets[number] = works[number]
            memsetAsync(targets[number], 0, 4 * count, stream)
        if self.shared:
            targets[1] = targets[0]
        self.kernel.launch(stream, arguments, *place, *targets, flag, *table)
        return targets[0], targets[1]


def counts_of(measures: Sequence[traits.Measure | None], wholes: int, lines: tuple[int, int]) -> tuple[int, int]:
    first, second = (
        0 if measure is None else wholes if measure.kind == "WHOLE" else count
        for measure, count in zip(measures, lines, strict=True)
    )
    return first, second
