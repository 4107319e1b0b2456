"""DLPack with the types of codes and scales: float8, E8M0 and bfloat16 out of and into NumPy and CuPy.

NumPy and CuPy refuse these types, so their own capsules of bytes are renamed in place: on the way out to what the
bytes mean, on the way in to bytes. Memory, strides, streams and lifetimes stay what NumPy, CuPy and the other library
make of them: the deleter in a capsule is theirs, and no Python runs when it is called.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .formats import BFLOAT16, Format
from .layout import Array

TYPES: dict[str, tuple[int, int, int]] = {  # DLDataType: code, bits, lanes
    "bfloat16": (4, 16, 1),
    "float8_e3m4": (7, 8, 1),
    "float8_e4m3": (8, 8, 1),
    "float8_e4m3b11fnuz": (9, 8, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e4m3fnuz": (11, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}
"""Types that fill whole bytes, by their names in ml_dtypes, torch and JAX (dlpack.h 1.1; the last is torch's alone)."""

NAMES = {type: name for name, type in TYPES.items()}

PLAIN = frozenset((0, 1, 2, 5, 6))
"""Codes that NumPy and CuPy read themselves: int, uint, float, complex, bool."""

UINT = 1

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType

READ_ONLY = 1
"""DLPACK_FLAG_BITMASK_READ_ONLY."""

NUMPY_KNOWS_VERSIONS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
"""NumPy 2.0 exports unversioned capsules alone, and takes no options but the stream."""


# --- capsules -----------------------------------------------------------------------------------


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("dtype", _DataType), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned; the unversioned one begins with its tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )


# prototypes of our own: those of ctypes.pythonapi are everybody's
_is_valid: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _managed(capsule: Any) -> tuple[_Tensor | None, _Versioned | None]:
    """The tensor in a capsule, and its header where it is versioned; no tensor where its version is beyond us."""
    if _is_valid(capsule, b"dltensor"):
        return _Tensor.from_address(_pointer(capsule, b"dltensor")), None
    managed = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
    return managed.tensor if managed.major == 1 else None, managed


def _is_empty(tensor: _Tensor) -> bool:
    return tensor.ndim > 0 and 0 in (ctypes.c_int64 * tensor.ndim).from_address(tensor.shape)


# --- out ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Typed:
    """An array and what its elements mean: what torch.from_dlpack and jnp.from_dlpack read, sharing its memory.

    array      NumPy or CuPy: bytes of a float8 type, or elements of its own dtype
    name       "float8_e4m3fn" and so on (TYPES), "" for the dtype of the array
    read_only  the memory must not be written; of a NumPy array its own flag says so as well

    A consumer that does not know the flag for read-only memory gets a copy. Raises TypeError for a name that is not
    what the array holds.
    """

    array: Array
    name: str = ""
    read_only: bool = False

    def __post_init__(self) -> None:
        dtype = self.array.dtype
        own = _name_of(dtype)
        if not self.name:
            object.__setattr__(self, "name", own)
        elif self.name != own and (dtype != np.uint8 or TYPES.get(self.name, (0, 0, 0))[1:] not in ((8, 1), (4, 2))):
            raise TypeError(f"{self.name!r} is no type of {own} elements; DLPack types of bytes: {', '.join(TYPES)}")
        if not self.read_only and isinstance(self.array, np.ndarray) and not self.array.flags.writeable:
            object.__setattr__(self, "read_only", True)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device

    def __dlpack__(
        self, *, stream: Any = None, max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None, copy: bool | None = None,
    ) -> Any:
        """A capsule, as the array API standard says; what is asked for is asked of NumPy or CuPy.

        Raises BufferError where memory is read-only, copy is False and the consumer does not know the flag, and for
        another device than NumPy or CuPy can give.
        """
        array, type = self.array, TYPES.get(self.name)
        is_versioned = max_version is not None and max_version[0] >= 1 and _knows_versions(array)
        if self.read_only and not is_versioned:
            if copy is False:
                raise BufferError("the memory is read-only, which an unversioned capsule cannot say; pass max_version")
            copy = True
        if type is not None:
            array = array.view(np.uint16 if type[1] == 16 else np.uint8)
        if _knows_versions(array):
            with _device_of(array):
                capsule = array.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
        elif dl_device not in (None, (CPU, 0)):
            raise BufferError(f"unsupported device requested: {dl_device}")
        else:
            capsule = (array.copy() if copy else array).__dlpack__(stream=stream)
        if type is not None:
            tensor, _ = _managed(capsule)
            assert tensor is not None
            dtype = tensor.dtype
            dtype.code, dtype.bits, dtype.lanes = type
        if self.read_only and not copy:
            _, managed = _managed(capsule)
            assert managed is not None
            managed.flags |= READ_ONLY
        return capsule


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """NumPy takes microseconds to make a name."""
    return dtype.name


@cache
def _is_ours(kind: type) -> bool:
    return issubclass(kind, np.ndarray) or kind.__module__.partition(".")[0] == "cupy"


def _knows_versions(array: Array) -> bool:
    return NUMPY_KNOWS_VERSIONS or not isinstance(array, np.ndarray)


def _device_of(array: Array) -> AbstractContextManager[Any]:
    """CuPy orders an export after the current stream of the current device: make that the array's."""
    return nullcontext() if isinstance(array, np.ndarray) else array.device


def codes_of(part: Any) -> Typed:
    """The codes of a part under the name of their element; bytes where DLPack has none that fills a byte (FP4, FP6)."""
    format: Format = part.format
    return _named(part.codes, format.storage.element.dtype_name)


def scales_of(part: Any) -> Typed:
    """The scales of a part, E8M0 and E4M3 under these names."""
    format: Format = part.format
    return _named(part.scales, format.storage.scale_dtype_name)


def _named(array: Array, name: str) -> Typed:
    return Typed(array, name if name in TYPES else "")


# --- in -----------------------------------------------------------------------------------------


class _Renamed:
    """A producer whose capsules NumPy and CuPy read; name is what the elements were, "" where they are plain."""

    __slots__ = ("device", "name", "producer", "read_only")

    def __init__(self, producer: Any, device: tuple[int, int]) -> None:
        self.producer, self.device = producer, device
        self.name, self.read_only = "", True

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        capsule = self.producer.__dlpack__(*args, **options)
        tensor, managed = _managed(capsule)
        self.read_only = managed is None or managed.flags & READ_ONLY != 0
        if tensor is None:
            return capsule  # NumPy and CuPy refuse a version that is too high
        if tensor.data is None and not _is_empty(tensor):  # NumPy would allocate
            raise BufferError("it has no memory of its own, as tensors that wrap others or only pretend have none")
        dtype = tensor.dtype
        if dtype.code not in PLAIN:
            type = dtype.code, dtype.bits, dtype.lanes
            name = NAMES.get(type)
            if name is None:
                raise BufferError(f"elements of DLPack type {type} (code, bits, lanes) fill no byte, or are not known")
            self.name = name
            dtype.code, dtype.bits, dtype.lanes = UINT, type[1] * type[2], 1
        return capsule


def from_dlpack(x: Any, *, copy: bool | None = None) -> Typed:
    """What another library's array holds, as a NumPy or CuPy array over the same memory, and the type's name.

    x        anything with __dlpack__ on the CPU or a CUDA device; of one that requires grad, what .detach() gives.
             NumPy and CuPy arrays, and what is Typed already, are taken as they are.
    copy     True always copies, False never, None where the other library has to (NumPy 2.0 takes False for None)
    returns  Typed: bfloat16 and plain types as they are, one-byte types as uint8; read_only where the library says so
             or (an unversioned capsule) says nothing

    The memory lives as long as the array. CuPy's current stream waits for the producer; a producer that reuses memory
    by the order of another stream (torch's side streams) must not free it before that has caught up.
    Raises TypeError for what has no __dlpack__, BufferError for another device, a type that fills no whole bytes, and
    a tensor without memory; otherwise what the library, NumPy or CuPy raise where they refuse.
    """
    if isinstance(x, Typed):
        return x if not copy else Typed(x.array.copy(), x.name)
    if _is_ours(x.__class__):
        return Typed(x.copy() if copy else x)
    if not hasattr(x, "__dlpack__"):
        raise TypeError(f"{type(x).__name__} is no NumPy or CuPy array and offers no DLPack")
    if getattr(x, "requires_grad", False) and hasattr(x, "detach"):
        x = x.detach()
    if hasattr(x, "resolve_neg"):  # a sign that torch keeps beside the memory, and does not export
        x = x.resolve_neg()
    device: tuple[int, int] = x.__dlpack_device__() if hasattr(x, "__dlpack_device__") else (CPU, 0)
    kind = int(device[0])
    renamed = _Renamed(x, (kind, int(device[1])))
    options: dict[str, Any] = {"copy": False} if copy is False else {}
    if kind in (CPU, CUDA_HOST):
        array = np.from_dlpack(renamed, **(options if NUMPY_KNOWS_VERSIONS else {}))
    elif kind in (CUDA, CUDA_MANAGED):
        array = _cupy().from_dlpack(renamed, **options)
    else:
        raise BufferError(f"it is on a device that is neither the CPU nor CUDA (DLPack's type {kind})")
    name = renamed.name
    if name == BFLOAT16.name:
        array = array.view(BFLOAT16)
    return Typed(array.copy(), name) if copy else Typed(array, name, renamed.read_only)


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise BufferError("it is on a CUDA device, which is read by CuPy: pip install 'hqarray[cuda13]'") from error
    return cupy
