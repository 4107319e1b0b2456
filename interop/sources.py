"""Between arrays and the tensors of a file: what both our own files and other programs' checkpoints need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hqarray.arrays import QuantizedArray
from hqarray.buffers import Separate
from hqarray.dlpack import from_dlpack
from hqarray.formats import Format
from hqarray.layout import Array, part_layout
from hqarray.tensorfile import TYPE_NAMES, TYPES, type_name

TYPED = {
    TYPES[name].dtype.name: name  # type: ignore[union-attr]
    for name in ("F8_E4M3", "F8_E5M2", "BF16", "F16", "F32")
}
"""Types that codes and scales have in a file; all others are U8. safetensors.torch 0.8 opens no F8_E8M0, F4 or F6."""


class Stored(NamedTuple):
    """An array, and the type that it has in a file."""

    type: str
    array: Array


@dataclass(frozen=True, slots=True)
class Source:
    """Where an array of a file comes from.

    tensors    names of all tensors it is made of
    read       makes it
    shape      its shape; None of a GroupedArray
    described  what the metadata of our own file says of it; None where it needs none
    """

    tensors: tuple[str, ...]
    read: Callable[[], Any]
    shape: tuple[int, ...] | None
    described: dict[str, Any] | None = None


def plain(name: str, array: Any) -> Stored:
    """An array that is not quantized. Raises TypeError, naming it, for what is no array of a type files have."""
    array = np.asarray(array) if isinstance(array, np.generic) else array
    if not isinstance(array, np.ndarray) and type(array).__module__.partition(".")[0] != "cupy":
        return _by_dlpack(name, array)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name!r} is a masked array, and a file has no masks; use .filled(value)")
    return Stored(type_name(array.dtype, repr(name)), array)


def _by_dlpack(name: str, array: Any) -> Stored:
    """A tensor of torch, an array of JAX, or whatever else offers DLPack."""
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name!r} is {type(array).__name__}; save takes HybridArrays, GroupedArrays, and arrays of "
                        f"NumPy, CuPy or any library with DLPack (torch, JAX)")
    try:
        given = from_dlpack(array)
    except Exception as error:  # whatever the producer raises
        raise TypeError(f"{name!r} ({type(array).__name__}) cannot be read by DLPack: {error}; pass a dense copy on "
                        f"the CPU or a CUDA device") from error
    if given.name not in TYPE_NAMES:
        raise TypeError(f"{name!r} has dtype {given.name}; safetensors holds {', '.join(TYPE_NAMES)}")
    return Stored(TYPE_NAMES[given.name], given.array)


def typed(dtype_name: str, array: Array) -> Stored:
    """Codes or scales under the type they stand for, or U8."""
    return Stored(TYPED.get(dtype_name, "U8"), array)


def placeholder(format: Format, shape: tuple[int, int]) -> QuantizedArray:
    """A part of that format and shape that takes no memory and holds zeros: it says what a file would hold."""
    layout = part_layout(format.storage, shape)
    codes = np.broadcast_to(np.zeros((), layout.codes_dtype), (shape[0], layout.codes.columns))
    scales = np.broadcast_to(np.zeros((), layout.scales_dtype), layout.num_scales)
    one = np.zeros(1, np.float32)
    whole = np.broadcast_to(one, layout.num_global_scales) if format.storage.global_scale else None
    buffers = Separate(codes, scales, whole, one if format.measures_amax else None)
    return QuantizedArray(format, shape, buffers)
