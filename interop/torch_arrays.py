"""Parts as torch tensors with torch's float8 types and back, over the same memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch  # noqa: TID253  this module names torch

from hqarray.arrays import HybridArray, QuantizedArray
from hqarray.buffers import Packed
from hqarray.formats import BFLOAT16, FORMATS, Format, Storage, as_format
from hqarray.grouped import GroupedArray
from hqarray.grouped_parts import GroupedPart
from hqarray.layout import Array, PartLayout, part_layout

from .fitting import expect_shape, fitting

if TYPE_CHECKING:
    from .torch_groups import TorchGroup

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
def _groups() -> Any:
    """It reads this module."""
    from hqarray.interop import torch_groups

    return torch_groups


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
    """A NumPy or CuPy array as a tensor over the same memory; of read-only memory a copy. Orders no streams."""
    dtype = TORCH_DTYPES[array.dtype]
    if not isinstance(array, np.ndarray):
        return _cuda().as_tensor(array.data, dtype, array.shape, tuple(n // dtype.itemsize for n in array.strides))
    if not array.flags.writeable:
        array = array.copy()
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
    return _cuda().OnTorch(index)  # type: ignore[no-any-return]


def after_cupy(device: Any) -> None:
    """Make torch's current stream wait for what CuPy's was given before, unless it captures a graph."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        _cuda().order(torch.cuda.current_device() if device.index is None else device.index, torch_first=False)


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
    if tensor.is_cuda and tensor.data_ptr() & 255:  # a hook on saved tensors put them where GEMMs do not read
        tensor = tensor.clone()
    memory = _cuda().pointer_to(tensor) if tensor.is_cuda else tensor.numpy()
    if isinstance(hollow, GroupedPart):
        return replace(hollow, memory=memory)
    buffers = hollow.buffers
    own = Packed(memory, buffers.layout, buffers.has_global_scale, buffers.has_amax)
    return QuantizedArray(hollow.format, hollow.shape, own)


def _bytes_of(memory: Any, nbytes: int) -> Any:
    if isinstance(memory, np.ndarray):
        return torch.from_numpy(memory)
    return _cuda().bytes_of(memory, nbytes)


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

    def of(self, flat: Any, start: int) -> Any:
        """The tensor in memory that begins so many bytes into the storage of a flat tensor of bytes.

        Two views of a tensor take less of the host's time than a new one that is set to a storage.
        """
        dtype, offset, shape, strides = self
        return flat.view(dtype).as_strided(shape, strides, start // dtype.itemsize + offset)

    def is_of(self, tensor: Any, start: int) -> bool:
        """Whether a tensor is this view of memory that begins at an address."""
        dtype, offset, shape, strides = self
        at = start + offset * dtype.itemsize
        return tensor.data_ptr() == at and tensor.shape == shape and tensor.stride() == strides  # type: ignore[no-any-return]


@cache
def _storage(format: Format) -> tuple[Storage, Any, Any]:
    """The format's storage and torch's dtypes of codes and scales; kept, since a format's facts are derived anew."""
    return format.storage, *_types(format.storage)


@lru_cache(maxsize=4096)
def _views(format: Format, shape: tuple[int, int]) -> tuple[PartLayout, tuple[_View, _View | None, _View | None]]:
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


def to_torch(array: QuantizedArray | HybridArray | GroupedArray) -> TorchPart | TorchPair | TorchGroup:
    """A part as tensors of torch's types, a HybridArray as a pair of these, a GroupedArray as a TorchGroup.

    They share memory.

    On CUDA torch's current stream waits for what CuPy's current stream has been given. The memory is freed with the
    last tensor or array that holds it, in the order of the stream that it was allocated for.
    Read-only memory (a mapped file, a JAX array) is copied, since torch's tensors can always be written.
    """
    if isinstance(array, QuantizedArray):
        return _tensors(array)
    if isinstance(array, GroupedArray):
        return _groups().group_to_torch(array)  # type: ignore[no-any-return]
    if not isinstance(array, HybridArray):
        raise TypeError(f"to_torch takes a part, HybridArray or GroupedArray, not {type(array).__name__}")
    return TorchPair(*(None if part is None else _tensors(part) for part in (array.rowwise, array.columnwise)))


def _tensors(part: QuantizedArray) -> TorchPart:
    buffers = part.buffers
    if not isinstance(buffers, Packed):
        return _separate_tensors(part)
    memory = buffers.memory
    if isinstance(memory, np.ndarray):
        flat, start = as_tensor(memory), 0
    else:
        flat, start = _cuda().flat(memory, buffers.layout.nbytes)
    codes, scales, whole = _views(part.format, part.shape)[1]
    return TorchPart(
        codes.of(flat, start),
        None if scales is None else scales.of(flat, start),
        None if whole is None else whole.of(flat, start),
    )


def _separate_tensors(part: QuantizedArray) -> TorchPart:
    if part.ordinal >= 0:
        _cuda().order(part.ordinal, torch_first=False)
    (kept, codes_type, scales_type), whole = _storage(part.format), part.global_scale
    scales = None if kept.scale == "none" else _typed(part.scales, scales_type)
    return TorchPart(_typed(part.codes, codes_type), scales, None if whole is None else as_tensor(whole))


def _typed(array: Array, dtype: Any) -> Any:
    tensor = as_tensor(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


# --- in -----------------------------------------------------------------------------------------


def from_torch(
    parts: TorchPart | TorchPair | TorchGroup | tuple[Any, ...],
    *,
    format: Format | str | tuple[Format | str | None, Format | str | None] | None = None,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
) -> QuantizedArray | HybridArray | GroupedArray:
    """Tensors as a part, a TorchPair as a HybridArray, a TorchGroup as a GroupedArray: the inverse of to_torch.

    parts    TorchPart, or (codes, scales, global_scale) as it has them; codes may also be uint8
    format   default the one whose types and shapes these are; of a pair or group one or two
    shape    (outer, k), default that of codes, k even for FP4; of a pair X's, of a group of 3-D codes (groups, m, k)
    dtype    nominal dtype of a pair or group, torch's or NumPy's; default float32
    returns  QuantizedArray, HybridArray or GroupedArray, sharing memory. Unless the tensors are what to_torch gave, a
             group is a copy, and a part not in the library's own layout, which a GEMM copies it to

    On CUDA CuPy's current stream waits for what torch's current stream has been given.
    Raises ValueError where no format or more than one fits, TypeError for what is no tensor.
    """
    formats = formats_of(format)
    if isinstance(parts, TorchPair):
        matrix = None if shape is None else (int(np.prod(shape[:-1])), shape[-1])
        shapes = (matrix, None if matrix is None else matrix[::-1])
        rows, columns = (
            None if part is None else _part_of(part, wanted, size)
            for part, wanted, size in zip(parts, formats, shapes, strict=True)
        )
        return HybridArray(rows, columns, shape, nominal_of(dtype))  # type: ignore[arg-type]
    if not isinstance(parts, TorchPart) and isinstance(parts, _groups().TorchGroup):
        return _groups().group_from_torch(parts, formats, shape, dtype)  # type: ignore[no-any-return]
    if isinstance(format, tuple) or dtype is not None:
        raise TypeError("a pair of formats and a nominal dtype are those of a TorchPair or TorchGroup")
    if not isinstance(parts, TorchPart):
        if not isinstance(parts, (tuple, list)) or len(parts) not in (1, 2, 3):
            raise TypeError(f"from_torch takes a TorchPart, (codes, scales, global_scale), a TorchPair or TorchGroup, "
                            f"not {type(parts).__name__}; hqarray.quantize takes a tensor of values")
        parts = TorchPart(*parts)
    return _part_of(parts, format, shape)


def formats_of(format: Any) -> tuple[Any, Any]:
    """The formats of rowwise and columnwise. Raises ValueError for another number of them."""
    if not isinstance(format, tuple):
        return format, format
    if len(format) != 2:
        raise ValueError(f"format= is one, or (rowwise, columnwise), not {len(format)}: {format}")
    return format


def nominal_of(dtype: Any) -> Any:
    """A nominal dtype, torch's or NumPy's, as NumPy's; default float32."""
    if isinstance(dtype, torch.dtype) and dtype not in NUMPY_DTYPES:
        raise TypeError(f"the nominal dtype is float32, float16 or bfloat16, not {dtype}")
    return np.dtype(np.float32) if dtype is None else NUMPY_DTYPES.get(dtype, dtype)


def _part_of(part: TorchPart, format: Any, shape: tuple[int, ...] | None) -> QuantizedArray:
    codes, scales, _ = part
    _check_tensors(part)
    if codes.ndim != 2:
        raise ValueError(f"codes are (outer, k), these are {tuple(codes.shape)}; use .flatten(0, -2)")
    if shape is not None:
        expect_shape(shape, codes.shape)
    format = _fitting(part, shape) if format is None else as_format(format)
    storage, codes_type, scales_type = _storage(format)
    if codes.dtype not in (codes_type, torch.uint8):
        raise TypeError(f"codes of {format.name} are {codes_type} or torch.uint8, these are {codes.dtype}")
    if scales is not None and scales.dtype not in (scales_type, torch.uint8):
        raise TypeError(f"scales of {format.name} are {scales_type}, these are {scales.dtype}")
    size = _shape_of(codes, storage) if shape is None else (int(shape[0]), int(shape[1]))
    if codes.is_cuda:
        _cuda().order(codes.get_device(), torch_first=True)
    layout, views = _views(format, size)
    if scales is not None and _is_ours(part, layout, views):
        memory = _memory_of(codes, layout.nbytes)
        return QuantizedArray(format, size, Packed(memory, layout, storage.global_scale, False))
    arrays = [None if tensor is None else as_array(tensor) for tensor in part]
    if storage.scale == "none":
        arrays[1] = None
    return QuantizedArray.from_buffers(arrays[0], arrays[1], format, size, global_scale=arrays[2])


def _check_tensors(part: TorchPart) -> None:
    """Raise where a field is no tensor or not beside the codes."""
    device = None
    for name, tensor in zip(TorchPart._fields, part, strict=True):
        if isinstance(tensor, torch.Tensor):
            if device is None:
                device = tensor.device
            elif tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, codes on {device}; move one")
        elif tensor is not None or device is None:
            raise TypeError(f"{name} is {type(tensor).__name__}, not a torch.Tensor")


def _shape_of(codes: Any, storage: Storage) -> tuple[int, int]:
    outer, columns = codes.shape
    return outer, columns * 2 if storage.element.stored_bits == 4 else columns


def _is_ours(part: TorchPart, layout: PartLayout, views: tuple[_View, _View | None, _View | None]) -> bool:
    """Whether the tensors lie in one storage as our own layout has them: to_torch gave them, and padding is zero."""
    codes, scales, whole = part
    storage = codes.untyped_storage()
    start = storage.data_ptr()
    if not start or storage.nbytes() != layout.nbytes:
        return False
    of_codes, of_scales, of_whole = views
    if of_scales is None or (whole is None) != (of_whole is None):
        return False
    return (
        of_codes.is_of(codes, start)
        and of_scales.is_of(scales, start)
        and (of_whole is None or of_whole.is_of(whole, start))
    )


def _memory_of(codes: Any, nbytes: int) -> Any:
    """What a part holds of the storage that its codes begin."""
    if codes.is_cuda:
        return _cuda().pointer_to(codes)
    return torch.empty(0, dtype=torch.uint8).set_(codes.untyped_storage(), 0, (nbytes,), (1,)).numpy()


def _fitting(part: TorchPart, shape: tuple[int, ...] | None) -> Format:
    tensors = [part.codes] if part.scales is None else [part.codes, part.scales]
    kinds = tuple(str(tensor.dtype).removeprefix("torch.").removesuffix("_x2") for tensor in tensors)
    sizes = tuple(tuple(tensor.shape) for tensor in tensors)
    whole = None if shape is None else tuple(shape)
    num_global = None if part.global_scale is None else part.global_scale.numel()
    return fitting(kinds, sizes, num_global, shape=whole, typed=_typed_elements())


@cache
def _typed_elements() -> frozenset[str]:
    """Elements that torch has a type for."""
    names = {format.storage.element.dtype_name for format in FORMATS.values()}
    return frozenset(name for name in names if torch_type(name) is not torch.uint8)
