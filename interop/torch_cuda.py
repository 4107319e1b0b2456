"""CUDA tensors as CuPy arrays and back over the same memory, and torch's current stream and allocator for CuPy.

Loaded once a CUDA tensor or a CuPy array has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, lru_cache
from math import prod
from typing import Any

import cupy  # noqa: TID253
import numpy as np
import torch  # noqa: TID253
from cupy.cuda import MemoryPointer, UnownedMemory, get_current_stream, using_allocator  # noqa: TID253
from cupy_backends.cuda.api.runtime import getDevice, streamWaitEvent

from hqarray.layout import Array

BYTES = np.dtype(np.uint8)

LEGACY = (0, 1)
"""Two names of the legacy default stream: what the runtime calls it, and what DLPack does."""


class TorchMemory(UnownedMemory):  # type: ignore[misc]
    """Memory of a tensor, which lives as long as this does."""

    def __init__(self, tensor: Any, nbytes: int) -> None:
        super().__init__(tensor.data_ptr(), nbytes, tensor, tensor.get_device())
        self.tensor = tensor


def pointer_to(tensor: Any) -> Any:
    """A MemoryPointer to a tensor's first element, up to the end of its storage."""
    nbytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return MemoryPointer(TorchMemory(tensor, nbytes), 0)


def as_array(tensor: Any, dtype: np.dtype[Any]) -> Array:
    """A CUDA tensor as a CuPy array of a dtype of the same size. Orders no streams: see on_torch and order."""
    memory = pointer_to(tensor)
    if tensor.is_contiguous():
        return cupy.ndarray(tuple(tensor.shape), dtype, memory)
    strides = tuple(n * tensor.element_size() for n in tensor.stride())
    return cupy.ndarray(tuple(tensor.shape), dtype, memory, strides)


def as_tensor(memory: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
    """A tensor over a MemoryPointer; strides in elements, None for C order. Orders no streams.

    Memory that is a tensor's gives a tensor of the same storage.
    """
    strides = _c_order(shape) if strides is None else strides
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=f"cuda:{memory.device_id}")
    itemsize = dtype.itemsize
    if strides == _c_order(shape) and _is_bytes(memory.mem):  # two views take less time than a tensor that is set
        return bytes_at(memory, 0, prod(shape) * itemsize).view(dtype).view(shape)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    storage, start, device = storage_of(memory, extent * itemsize)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, start // itemsize, shape, strides)


def storage_of(memory: Any, nbytes: int) -> tuple[Any, int, Any]:
    """The storage that a MemoryPointer's bytes lie in, where in it they begin, and torch's device."""
    mem = memory.mem
    tensor = mem.tensor if type(mem) is TorchMemory else _tensor_of(memory, nbytes)
    storage = tensor.untyped_storage()
    return storage, memory.ptr - storage.data_ptr(), tensor.device


def _tensor_of(memory: Any, nbytes: int) -> Any:
    """CuPy's memory as a tensor of bytes."""
    array = cupy.ndarray((nbytes,), BYTES, memory)
    with _on_device(memory.device_id):
        return torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))


def flat(memory: Any, nbytes: int) -> tuple[Any, int]:
    """A flat tensor of bytes in the storage of a MemoryPointer's bytes, and where in the storage they begin.

    Torch's stream waits for CuPy's. The tensor's size is a multiple of 16 bytes: it can be viewed as any type.
    """
    mem = memory.mem
    order(mem.device_id, torch_first=False)
    if type(mem) is not TorchMemory:
        return _tensor_of(memory, nbytes), 0
    tensor = mem.tensor
    if tensor.dtype is torch.uint8 and tensor.ndim == 1 and not tensor.storage_offset() and not tensor.numel() & 15:
        return tensor, memory.ptr - mem.ptr
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes() & -16,), (1,))
    return whole, memory.ptr - storage.data_ptr()


def _is_bytes(mem: Any) -> bool:
    """Whether memory is that of a flat tensor of bytes."""
    if type(mem) is not TorchMemory:
        return False
    tensor = mem.tensor
    return tensor.dtype is torch.uint8 and tensor.ndim == 1 and tensor.is_contiguous()


def bytes_at(memory: Any, start: int, nbytes: int) -> Any:
    """Bytes from a place in a MemoryPointer's on, as a tensor. Orders no streams."""
    mem = memory.mem
    if _is_bytes(mem):
        return mem.tensor.narrow(0, memory.ptr - mem.ptr + start, nbytes)
    return as_tensor(memory + start, torch.uint8, (nbytes,))


def _c_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


# --- streams and memory -------------------------------------------------------------------------


class _External:
    """A stream by its handle, as CuPy takes it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class _TorchStream(cupy.cuda.Stream):  # type: ignore[misc]
    """A stream of torch's; CuPy's own destroys what it wraps in some versions."""

    def __del__(self) -> None:
        pass


@lru_cache(maxsize=256)
def _stream(handle: int, device: int) -> Any:
    """A stream of the current device."""
    return _TorchStream.from_external(_External(handle))


def _on_device(device: int) -> Any:
    return nullcontext() if getDevice() == device else cupy.cuda.Device(device)


def _stream_handle(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream  # type: ignore[no-any-return]


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_handle)
"""Torch's current stream of a device; as torch's own compiler asks for it, since making the object takes 2 us."""


@cache
def maker(device: int, dtype: Any = torch.uint8) -> Callable[..., Any]:
    """Makes tensors on a device; a tensor's new_empty is a microsecond faster than torch.empty."""
    return torch.empty(0, dtype=dtype, device=f"cuda:{device}").new_empty  # type: ignore[no-any-return]


def _allocate(nbytes: int) -> Any:
    """CuPy's allocator by torch's: memory of the current device, in the order of torch's current stream."""
    return MemoryPointer(TorchMemory(maker(getDevice())(nbytes), nbytes), 0)


class OnTorch:
    """CuPy on a device, its work on torch's current stream there, its memory from torch's allocator: a context."""

    __slots__ = ("allocator", "device", "outer", "stream")

    def __init__(self, device: int) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.outer = _on_device(self.device)
        self.outer.__enter__()
        self.stream = _stream(current_stream(self.device), self.device)
        self.stream.__enter__()
        self.allocator = using_allocator(_allocate)
        self.allocator.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.allocator.__exit__(*error)
        self.stream.__exit__(*error)
        self.outer.__exit__(*error)


def bytes_of(memory: Any, nbytes: int) -> Any:
    """A MemoryPointer's bytes as a tensor: that which was allocated for them, where one was. Orders no streams."""
    mem = memory.mem
    if type(mem) is TorchMemory and memory.ptr == mem.ptr and mem.tensor.shape == (nbytes,):
        return mem.tensor
    return as_tensor(memory, torch.uint8, (nbytes,))


def order(device: int, *, torch_first: bool) -> None:
    """Make CuPy's current stream wait for torch's, or torch's for CuPy's, where they are two; the host goes on."""
    cupys, torchs = get_current_stream(device).ptr, current_stream(device)
    if cupys == torchs or (cupys in LEGACY and torchs in LEGACY):
        return
    first, second = (torchs, cupys) if torch_first else (cupys, torchs)
    with _on_device(device):
        event = cupy.cuda.Event(disable_timing=True)
        event.record(_stream(first, device))
        streamWaitEvent(second, event.ptr)
