"""What the public functions are given: arrays, amaxes and flags, checked once and put where the work is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import isnan, prod
from types import ModuleType
from typing import Any

import numpy as np

from . import reference
from .arrays import HybridArray, QuantizedArray
from .dlpack import Typed, from_dlpack
from .formats import BFLOAT16, Format
from .grouped import GroupedArray
from .layout import Array, namespace
from .philox import Draws

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16, np.dtype(np.float64))
"""Dtypes that are read; float64 is rounded to float32 first."""

SEEDS = (np.dtype(np.uint64), np.dtype(np.int64))
"""Dtypes of a seed in memory; an int64 is taken as 64 bits without a sign."""

FLAGS = (np.dtype(np.float32), np.dtype(np.int32))
"""Dtypes of a noop flag on a GPU: four bytes, read by the kernels."""


@cache
def backend_of_type(kind: type) -> ModuleType | None:
    """The module that computes on arrays of a type; None where there is none."""
    if issubclass(kind, np.ndarray):
        return reference
    if kind.__module__.partition(".")[0] != "cupy":
        return None
    from . import cuda

    return cuda


def backend_of(array: Array) -> ModuleType:
    """The module that computes on an array that as_array has let in."""
    backend = backend_of_type(array.__class__)
    assert backend is not None
    return backend


def as_array(values: Any, what: str) -> Array:
    """The values as a NumPy or CuPy array of a dtype we read; `what` names them in errors."""
    kind = values.__class__
    if backend_of_type(kind) is None:
        typed = _by_dlpack(values, what)
        values = typed.array
        if typed.name != values.dtype.name:
            raise TypeError(
                f"{what} has dtype {typed.name}; float32, float16, bfloat16 and float64 are read, use .astype, or "
                f"QuantizedArray.from_buffers where these are codes"
            )
    elif kind is not np.ndarray and isinstance(values, np.ndarray):  # np.matrix multiplies where arrays do not
        if isinstance(values, np.ma.MaskedArray):
            raise TypeError(f"{what} is a masked array, and a mask has no code; use .filled(value)")
        values = values.view(np.ndarray)
    if values.dtype not in FLOATS:
        swapped = "" if values.dtype.isnative else " in this machine's byte order"
        raise TypeError(
            f"{what} has dtype {values.dtype.str if swapped else values.dtype}; float32, float16, bfloat16 and float64 "
            f"are read{swapped}, use .astype({('float32' if not swapped else values.dtype.newbyteorder('=').name)!r})"
        )
    return values


def _by_dlpack(values: Any, what: str) -> Typed:
    if isinstance(values, (HybridArray, GroupedArray)):
        raise TypeError(f"{what} is a {type(values).__name__} already; .dequantize() gives its values")
    if isinstance(values, QuantizedArray):
        raise TypeError(f"{what} is one part of an array; wrap it: HybridArray(rowwise=part)")
    if not hasattr(values, "__dlpack__"):
        raise TypeError(
            f"{what} is {type(values).__name__}; pass a NumPy or CuPy array, or one that offers DLPack"
            + (" (np.asarray(...) makes one)" if isinstance(values, (list, tuple, float)) else "")
        )
    try:
        return from_dlpack(values)
    except Exception as error:  # whatever the producer raises
        if hasattr(values, "to_local"):
            raise TypeError(f"{what} is a {type(values).__name__}, which lies on several ranks; pass this rank's "
                            f"piece, .to_local() gives it") from error
        first = (str(error).splitlines() or [""])[0]
        traced = " (while a function is traced, as by jax.jit, hqarray.interop.jax.fake_quantize alone runs)"
        raise TypeError(
            f"{what} ({type(values).__name__}, {getattr(values, 'dtype', 'no dtype')}) cannot be read by DLPack: "
            f"{first}; pass a dense copy of it on the CPU or a CUDA device, in float32 if its type is not known"
            f"{traced if 'Tracer' in type(values).__name__ else ''}"
        ) from error


def as_ours(x: Any, what: str) -> Any:
    """A NumPy or CuPy array, of any dtype, over the memory of another library's; anything else as it is."""
    if backend_of_type(x.__class__) is not None or not hasattr(x, "__dlpack__"):
        return x
    return _by_dlpack(x, what).array


def as_output(x: Any, what: str) -> Any:
    """The array to write into; `what` names it in errors. Raises ValueError where its memory must not be written."""
    if backend_of_type(x.__class__) is not None:
        return x
    if not hasattr(x, "__dlpack__"):
        raise TypeError(f"{what} is a NumPy or CuPy array, not {type(x).__name__}")
    if getattr(x, "requires_grad", False):
        raise ValueError(f"{what} requires grad, and what is written into it has none; pass {what}.detach()")
    typed = _by_dlpack(x, what)
    if typed.read_only:
        raise ValueError(
            f"{what} ({type(x).__name__}) is read-only, or its library does not say otherwise; leave it out, or pass a "
            f"NumPy or CuPy array"
        )
    return typed.array


def as_matrix(values: Array, what: str) -> Array:
    """(..., k) -> (prod(...), k)."""
    if values.ndim == 0:
        raise ValueError(f"{what} is 0-D; a matrix has at least one axis, reshape it to (1, 1)")
    return values if values.ndim == 2 else values.reshape(prod(values.shape[:-1]), values.shape[-1])


def as_hybrid(array: Any, what: str) -> HybridArray:
    """Raises TypeError for anything but a HybridArray, and says how to make one."""
    if isinstance(array, HybridArray):
        return array
    remedy = "quantize(x, ...) makes one"
    if isinstance(array, QuantizedArray):
        remedy = "wrap it: HybridArray(rowwise=part)"
    elif isinstance(array, GroupedArray):
        remedy = "g[i] is one; grouped_quantize(..., out=g) quantizes into the buffers of all"
    raise TypeError(f"{what} takes a HybridArray, not {type(array).__name__}; {remedy}")


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Amaxes to quantize with, and where those of what is quantized are recorded: a DelayedScaling, or some of it.

    amax     float32 (n,), used in place of measured ones
    current  float32 (n,), raised to the largest magnitude of what is quantized
    """

    amax: Array
    current: Array

    def __len__(self) -> int:
        return len(self.amax)

    def __getitem__(self, index: int | slice) -> Slots:
        """The slot of one matrix, or those of several: of the members of a group, or of a layer's operands."""
        if not isinstance(index, slice):
            index = range(len(self))[index]  # IndexError where there is none
            index = slice(index, index + 1)
        return Slots(self.amax[index], self.current[index])


def recorded(amax: Any) -> Array | None:
    """Where the amax of what is quantized is recorded; None where it is not."""
    return amax.current if isinstance(amax, Slots) else None


def taken(amax: Any, formats: Iterable[Format | None]) -> Any:
    """What slots hold; any other amax as it is. Raises ValueError where slots would record what no part needs."""
    if not isinstance(amax, Slots):
        return amax
    if any(format is not None and format.measures_amax and format.storage.rht for format in formats):
        raise ValueError(
            "a slot of a DelayedScaling records the amax of the values, and a rotated part (rht) is scaled by that of "
            "rotated ones; leave amax= out there"
        )
    return amax.amax


def as_amax(amax: Any, formats: list[Format], values: Array) -> Array:
    """A caller's amax as float32 (1,) where the values are. Raises where no format has one amax per matrix."""
    amax = taken(amax, formats)
    expect_amaxes(formats)
    if not isinstance(amax, (int, float, np.generic)) and not hasattr(amax, "__dlpack__") and hasattr(amax, "update"):
        raise ValueError("amax is one float32, not a whole DelayedScaling; pass the matrix's slot, state[0]")
    if isinstance(amax, (int, float, np.floating, np.integer)) and not isinstance(amax, bool):
        number = float(amax)
        with np.errstate(over="ignore"):
            amax = namespace(values).asarray(np.array([number], np.float32))
        if number < 0 or isnan(number):
            raise ValueError(f"amax is a magnitude, not {number}")
    array = as_ours(amax, "amax")
    if getattr(array, "dtype", None) != np.float32 or prod(array.shape) != 1:
        shape, dtype = getattr(array, "shape", "?"), getattr(array, "dtype", type(amax).__name__)
        raise ValueError(f"amax is one float32 (hq.amax(x) makes it), not {dtype} of shape {shape}")
    _expect_place("amax", array, values)
    return array.reshape(1)


def expect_amaxes(formats: list[Format]) -> None:
    """Raises ValueError where no format has one amax per matrix, or two have different ones."""
    if not any(format.measures_amax for format in formats):
        names = ", ".join(format.name for format in formats)
        raise ValueError(
            f"amax= is for formats with one amax per matrix (FP8, NVFP4), and {names} "
            f"{'has' if len(formats) == 1 else 'have'} none; leave it out"
        )
    expect_one_amax(formats)


def expect_source(columnwise_source: str, rowwise: Any, columnwise: Any) -> None:
    """Raises ValueError for a source of columns that is none, or is not there."""
    if columnwise_source not in ("original", "rowwise_dequantized"):
        raise ValueError(f"columnwise_source={columnwise_source!r} is not 'original' or 'rowwise_dequantized'")
    if columnwise_source == "rowwise_dequantized" and rowwise is None and columnwise is not None:
        raise ValueError("columnwise_source='rowwise_dequantized' needs rowwise= as well")


def expect_one_amax(formats: Iterable[Format | None]) -> None:
    """Raises ValueError where one format needs the amax of the values, and another that of rotated ones."""
    rotated = {format.storage.rht for format in formats if format is not None and format.measures_amax}
    if len(rotated) > 1:
        raise ValueError(
            "amax= is one number, and a rotated part (rht) has another amax than one that is not; quantize the two "
            "parts in two calls"
        )


def as_draws(seed: Any, formats: Iterable[Format | None], values: Array) -> Draws | None:
    """What stochastic formats draw from; None where there is none, and then the seed is checked and ignored."""
    stochastic = [format for format in formats if format is not None and format.is_stochastic]
    first = (0, 0)
    if isinstance(seed, Draws):  # of a shard
        first, seed = seed.first, seed.seed
    if seed is None:
        if stochastic:
            raise ValueError(
                f"{stochastic[0].name} rounds at random and needs seed=: an integer, another one for each call, or an "
                f"array of one uint64 or int64 where the values are"
            )
        return None
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        seed = int(seed)
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed={seed} is not from 0 to 2**64 - 1")
    else:
        seed = as_ours(seed, "seed")
        dtype = getattr(seed, "dtype", type(seed).__name__)
        if backend_of_type(seed.__class__) is None or dtype not in SEEDS:
            raise TypeError(f"seed is an integer or an array of one uint64 or int64, not {dtype}")
        if seed.size != 1:
            raise ValueError(f"seed is one element, not {seed.shape}")
        _expect_place("seed", seed, values)
    return Draws(seed, first=first) if stochastic else None


def as_flag(noop: Any, values: Array) -> Any:
    """A noop flag, one element where the values are; on a GPU float32 or int32, which its kernels read."""
    if isinstance(noop, (bool, int, float, np.generic)):
        noop = np.asarray(noop)
        if not isinstance(values, np.ndarray):
            raise TypeError(f"noop beside values on a GPU is an array there, which kernels read, not a number ({noop})")
    noop = as_ours(noop, "noop")
    if backend_of_type(noop.__class__) is None or noop.dtype.kind not in "biuf":
        raise TypeError(f"noop is an array of one number, not {type(noop).__name__}")
    if noop.size != 1:
        raise ValueError(f"noop is one element, not {noop.shape}")
    _expect_place("noop", noop, values)
    if not isinstance(noop, np.ndarray) and noop.dtype not in FLAGS:
        raise TypeError(f"noop on a GPU is float32 or int32, not {noop.dtype}; use .astype(np.int32)")
    return noop


def _expect_place(what: str, array: Any, values: Array) -> None:
    if place(array) != place(values):
        raise ValueError(f"{what} is on {_named(place(array))} and the values are on {_named(place(values))}; move one")


def place(array: Array) -> int:
    """The CUDA device that holds an array; -1 for the host."""
    return -1 if isinstance(array, np.ndarray) else int(array.data.device_id)


def _named(ordinal: int) -> str:
    return "the host" if ordinal < 0 else f"cuda:{ordinal}"


def expect_same_place(array: HybridArray, values: Array) -> None:
    """Raises ValueError where new values are not where the array's buffers are."""
    there, _ = next(array.parts())
    ordinal = array.part(there).ordinal
    if ordinal != place(values):
        raise ValueError(
            f"the array is on {_named(ordinal)} and the values are on {_named(place(values))}; move the values with "
            f"cupy.asarray(...) or cupy.asnumpy(...)"
        )
