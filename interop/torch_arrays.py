"""Parts as torch tensors with torch's float8 types and back, over the same memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch  # noqa: TID253  this module names torch

from hqarray.arrays import HybridArray, QuantizedArray
from hqarray.buffers import Packed
from hqarray.formats import BFLOAT16, FORMATS, Format, Storage, as_format
from hqarray.grouped_parts import GroupedPart
from hqarray.layout import Array, PartLayout, part_layout

NUMPY_DTYPES: dict[Any, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32), torch.float16: np.dtype(np.float16), torch.bfloat16: BFLOAT16,
    torch.float64: np.dtype(np.float64), torch.int32: np.dtype(np.int32), torch.int64: np.dtype(np.int64),
    torch.uint8: np.dtype(np.uint8),
}
TORCH_DTYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}

BYTES = np.dtype(np.uint8)


class TorchPart(NamedTuple):
    """A part as tensors.

    codes         (outer, k) of torch's type of the element; FP4 (outer, ceil(k / 2)) float4_e2m1fn_x2; FP6 uint8
    scales        of the logical shape, any strides; None where the format has none
    global_scale  float32 (1,) where the format has one, (outer,) where it has one a row
    """

    codes: Any
    scales: Any = None
    global_scale: Any = None


class TorchPair(NamedTuple):
    """The parts of a HybridArray as tensors; columnwise is that of X.T."""

    rowwise: TorchPart | None = None
    columnwise: TorchPart | None = None


# --- memory -------------------------------------------------------------------------------------


@cache
def _cuda() -> Any:
    from hqarray.interop import torch_cuda

    return torch_cuda


def as_array(tensor: Any, what: str = "the tensor") -> Array:
    """A tensor as a NumPy or CuPy array over the same memory, one-byte types as uint8. Orders no streams."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} is {type(tensor).__name__}, not a torch.Tensor; torch.as_tensor(...) makes one")
    dtype = NUMPY_DTYPES.get(tensor.dtype)
    if dtype is None:
        if tensor.element_size() != 1:
            raise TypeError(f"{what} has dtype {tensor.dtype}, which is not read; use .to(torch.float32)")
        dtype = BYTES
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_cuda:
        return _cuda().as_array(tensor, dtype)
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise TypeError(f"{what} is {tensor.layout} on {tensor.device}; dense tensors on the CPU or CUDA are read")
    if dtype == BFLOAT16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return (tensor if tensor.dtype in NUMPY_DTYPES else tensor.view(torch.uint8)).numpy()


def as_tensor(array: Array) -> Any:
    """A NumPy or CuPy array as a tensor over the same memory. Orders no streams."""
    dtype = TORCH_DTYPES[array.dtype]
    if not isinstance(array, np.ndarray):
        return _cuda().as_tensor(array.data, dtype, array.shape, tuple(n // dtype.itemsize for n in array.strides))
    if dtype is torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(dtype)
    return torch.from_numpy(array)


def shared(array: Array) -> Any:
    """A NumPy or CuPy array as a tensor over the same memory; torch's stream waits for CuPy's."""
    if not isinstance(array, np.ndarray):
        _cuda().order(int(array.data.device_id), torch_first=False)
    return as_tensor(array)


def on_torch(device: Any) -> AbstractContextManager[None]:
    """What hqarray does inside runs on torch's current stream, in memory of torch's allocator; nothing on the CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return nullcontext()
    index = torch.cuda.current_device() if device.index is None else device.index
    context: AbstractContextManager[None] = _cuda().on_torch(index)
    return context


# --- parts in one tensor ------------------------------------------------------------------------


def emptied(part: QuantizedArray | GroupedPart) -> tuple[Any, Any]:
    """The part without its memory, and its memory as a tensor of bytes: what autograd can save."""
    if isinstance(part, GroupedPart):
        return replace(part, memory=None), _bytes_of(part.memory, part.layout.nbytes)
    buffers = part.buffers
    assert isinstance(buffers, Packed)
    hollow = Packed(None, buffers.layout, buffers.has_global_scale, buffers.has_amax)
    return QuantizedArray(part.format, part.shape, hollow), _bytes_of(buffers.memory, buffers.layout.nbytes)


def filled(hollow: Any, tensor: Any) -> Any:
    """The part over the bytes of a tensor; inverse of emptied."""
    memory = _cuda().pointer_to(tensor) if tensor.is_cuda else tensor.numpy()
    if isinstance(hollow, GroupedPart):
        return replace(hollow, memory=memory)
    buffers = hollow.buffers
    own = Packed(memory, buffers.layout, buffers.has_global_scale, buffers.has_amax)
    return QuantizedArray(hollow.format, hollow.shape, own)


def _bytes_of(memory: Any, nbytes: int) -> Any:
    if isinstance(memory, np.ndarray):
        return torch.from_numpy(memory)
    return _cuda().as_tensor(memory, torch.uint8, (nbytes,))


# --- out ----------------------------------------------------------------------------------------


def torch_type(name: str) -> Any:
    """Torch's dtype of that name, two FP4 codes in a byte; uint8 where torch has none (FP6)."""
    return getattr(torch, name, None) or getattr(torch, f"{name}_x2", torch.uint8)


@cache
def _types(storage: Storage) -> tuple[Any, Any]:
    """Torch's dtypes of codes and scales."""
    return torch_type(storage.element.dtype_name), torch_type(storage.scale_dtype_name)


class _View(NamedTuple):
    """A tensor in the memory of a part: offset and strides in elements."""

    dtype: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, storage: Any, start: int, device: Any) -> Any:
        """The tensor in memory that begins so many bytes into a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=device)
        return tensor.set_(storage, start // self.dtype.itemsize + self.offset, self.shape, self.strides)

    def is_of(self, tensor: Any, start: int) -> bool:
        """Whether a tensor is this view of memory that begins at an address."""
        return (  # type: ignore[no-any-return]
            tensor.data_ptr() == start + self.offset * self.dtype.itemsize
            and tensor.shape == self.shape
            and tensor.stride() == self.strides
        )


@cache
def _storage(format: Format) -> tuple[Storage, Any, Any]:
    """The format's storage and torch's dtypes of codes and scales; kept, since a format's facts are derived anew."""
    return format.storage, *_types(format.storage)


@lru_cache(maxsize=4096)
def _views(format: Format, shape: tuple[int, int]) -> tuple[PartLayout, tuple[_View | None, ...]]:
    """The layout of our own of such a part, and where codes, scales and global scale lie in it."""
    storage = format.storage
    layout, types = part_layout(storage, shape), _types(storage)
    codes = _View(types[0], 0, (shape[0], layout.codes.columns), (layout.codes.pitch, 1))
    scales = whole = None
    if storage.scale != "none":
        probe = layout.scales.untile(torch.empty(layout.scales_shape, device="meta"), *layout.num_scales)
        start = layout.scales_offset // layout.scales_dtype.itemsize
        scales = _View(types[1], start, tuple(probe.shape), probe.stride())
    if storage.global_scale:
        whole = _View(torch.float32, layout.global_scale_offset // 4, (layout.num_global_scales,), (1,))
    return layout, (codes, scales, whole)


def to_torch(array: QuantizedArray | HybridArray) -> TorchPart | TorchPair:
    """A part as tensors of torch's types, or a HybridArray as a pair of these, sharing memory.

    On CUDA torch's current stream waits for what CuPy's current stream has been given. The memory is freed with the
    last tensor or array that holds it, in the order of the stream that it was allocated for.
    Scales that lie in tiles, which are no strided view, are a copy.
    """
    if isinstance(array, HybridArray):
        rows, columns = (None if p is None else to_torch(p) for p in (array.rowwise, array.columnwise))
        return TorchPair(rows, columns)  # type: ignore[arg-type]
    if not isinstance(array, QuantizedArray):
        raise TypeError(f"to_torch takes a part or a HybridArray, not {type(array).__name__}; of a GroupedArray g[i]")
    buffers, ordinal = array.buffers, array.ordinal
    if ordinal >= 0:
        _cuda().order(ordinal, torch_first=False)
    if isinstance(buffers, Packed):
        if ordinal >= 0:
            storage, start, device = _cuda().storage_of(buffers.memory, buffers.layout.nbytes)
        else:
            storage, start, device = torch.from_numpy(buffers.memory).untyped_storage(), 0, "cpu"
        _, views = _views(array.format, array.shape)
        return TorchPart(*(None if view is None else view.of(storage, start, device) for view in views))
    (kept, codes_type, scales_type), whole = _storage(array.format), array.global_scale
    scales = None if kept.scale == "none" else _typed(array.scales, scales_type)
    return TorchPart(_typed(array.codes, codes_type), scales, None if whole is None else as_tensor(whole))


def _typed(array: Array, dtype: Any) -> Any:
    tensor = as_tensor(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


# --- in -----------------------------------------------------------------------------------------


def from_torch(
    parts: TorchPart | TorchPair | tuple[Any, ...],
    *,
    format: Format | str | tuple[Format | str | None, Format | str | None] | None = None,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
) -> QuantizedArray | HybridArray:
    """Tensors as a part, or a TorchPair as a HybridArray, sharing memory: the inverse of to_torch.

    parts    TorchPart, or (codes, scales, global_scale) as it has them; codes may also be uint8
    format   default the one whose types and shapes these are; of a pair one or two
    shape    (outer, k), default that of codes, k even for FP4; of a pair X's
    dtype    nominal dtype of a pair, torch's or NumPy's; default float32
    returns  QuantizedArray, of a pair HybridArray; not in the library's own layout, which a GEMM copies it to, unless
             the tensors are what to_torch gave

    On CUDA CuPy's current stream waits for what torch's current stream has been given.
    Raises ValueError where no format or more than one fits, TypeError for what is no tensor.
    """
    if isinstance(parts, TorchPair):
        formats = format if isinstance(format, tuple) else (format, format)
        matrix = None if shape is None else (int(np.prod(shape[:-1])), shape[-1])
        shapes = (matrix, None if matrix is None else matrix[::-1])
        rows, columns = (
            None if part is None else _part_of(part, wanted, size)
            for part, wanted, size in zip(parts, formats, shapes, strict=True)
        )
        nominal = np.dtype(np.float32) if dtype is None else NUMPY_DTYPES.get(dtype, dtype)
        return HybridArray(rows, columns, shape, nominal)  # type: ignore[arg-type]
    if isinstance(format, tuple) or dtype is not None:
        raise TypeError("a pair of formats and a nominal dtype are those of a TorchPair")
    return _part_of(TorchPart(*parts), format, shape)


def _part_of(part: TorchPart, format: Any, shape: tuple[int, ...] | None) -> QuantizedArray:
    codes = part.codes
    for name, tensor in zip(part._fields, part, strict=True):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}, not a torch.Tensor")
        if tensor is not None and tensor.device != codes.device:
            raise ValueError(f"{name} is on {tensor.device}, codes on {codes.device}; move one")
    if codes.ndim != 2:
        raise ValueError(f"codes are (outer, k), these are {tuple(codes.shape)}; use .flatten(0, -2)")
    format = _fitting(part, shape) if format is None else as_format(format)
    storage, codes_type, scales_type = _storage(format)
    if codes.dtype not in (codes_type, torch.uint8):
        raise TypeError(f"codes of {format.name} are {codes_type} or torch.uint8, these are {codes.dtype}")
    if part.scales is not None and part.scales.dtype not in (scales_type, torch.uint8):
        raise TypeError(f"scales of {format.name} are {scales_type}, these are {part.scales.dtype}")
    size = _shape_of(codes, storage) if shape is None else (int(shape[0]), int(shape[1]))
    if codes.is_cuda:
        _cuda().order(codes.get_device(), torch_first=True)
    layout, views = _views(format, size)
    if part.scales is not None and _is_ours(part, layout, views):
        memory = _memory_of(codes, layout.nbytes)
        return QuantizedArray(format, size, Packed(memory, layout, storage.global_scale, False))
    arrays = [None if tensor is None else as_array(tensor) for tensor in part]
    if storage.scale == "none":
        arrays[1] = None
    return QuantizedArray.from_buffers(arrays[0], arrays[1], format, size, global_scale=arrays[2])


def _shape_of(codes: Any, storage: Storage) -> tuple[int, int]:
    outer, columns = codes.shape
    return outer, columns * 2 if storage.element.stored_bits == 4 else columns


def _is_ours(part: TorchPart, layout: PartLayout, views: tuple[_View | None, ...]) -> bool:
    """Whether the tensors lie in one storage as our own layout has them: to_torch gave them, and padding is zero."""
    storage = part.codes.untyped_storage()
    start = storage.data_ptr()
    if storage.nbytes() != layout.nbytes or not start:
        return False
    for tensor, view in zip(part, views, strict=True):
        if (tensor is None) != (view is None) or (view is not None and not view.is_of(tensor, start)):
            return False
    return True


def _memory_of(codes: Any, nbytes: int) -> Any:
    """What a part holds of the storage that its codes begin."""
    if codes.is_cuda:
        return _cuda().pointer_to(codes)
    return torch.empty(0, dtype=torch.uint8).set_(codes.untyped_storage(), 0, (nbytes,), (1,)).numpy()


def _fitting(part: TorchPart, shape: tuple[int, ...] | None) -> Format:
    """The one format whose types and shapes a part's are; of those that are stored alike the first in FORMATS."""
    codes, scales = part.codes, part.scales
    kinds = (codes.dtype, *(() if scales is None else (scales.dtype,)))
    sizes = (tuple(codes.shape), *(() if scales is None else (tuple(scales.shape),)))
    found = _found(kinds, sizes, part.global_scale is not None, None if shape is None else tuple(shape))
    if len(found) == 1:
        return found[0]
    described = " with scales ".join(f"{kind} {size}" for kind, size in zip(kinds, sizes, strict=True))
    names = ", ".join(format.name for format in found) or "no format"
    raise ValueError(f"codes {described} may be {names}; pass format=")


@lru_cache(maxsize=4096)
def _found(
    kinds: tuple[Any, ...], sizes: tuple[tuple[int, ...], ...], has_global_scale: bool, shape: tuple[int, ...] | None
) -> tuple[Format, ...]:
    """Formats that tensors of these types and shapes may be of."""
    found: dict[Storage, Format] = {}
    for format in FORMATS.values():
        storage = format.storage
        types = _types(storage)[: 1 if storage.scale == "none" else 2]
        if storage.pow2 or kinds != types or has_global_scale != storage.global_scale:
            continue
        outer, columns = sizes[0]
        matrix = (outer, columns * 2 if storage.element.stored_bits == 4 else columns) if shape is None else shape
        if len(sizes) > 1:
            wanted = storage.num_scales(matrix)  # type: ignore[arg-type]
            if sizes[1] != wanted and not (storage.block is None and prod(sizes[1]) == 1):
                continue
        found.setdefault(storage, format)
    return tuple(found.values())
