"""What the functions of groups are given: stacked values, sizes and amaxes, checked once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from .formats import Format
from .groups import Sizes
from .inputs import as_ours, backend_of_type, expect_one_amax, place, taken
from .layout import Array


def is_on_gpu(array: Any) -> bool:
    """Whether it is a CuPy array."""
    return not isinstance(array, np.ndarray) and backend_of_type(array.__class__) is not None


def as_stacked(values: Array, sizes: Any, offsets: Any, alignment: int) -> tuple[Array, Sizes]:
    """The values as (T, k), and the sizes of the matrices in them."""
    alignment = operator.index(alignment)
    if alignment < 1:
        raise ValueError(f"alignment={alignment}: matrices begin on a multiple of it, 1 or more")
    if sizes is not None and offsets is not None:
        raise ValueError("sizes= and offsets= say the same; pass one of them")
    given = as_ours(sizes, "sizes") if offsets is None else as_ours(offsets, "offsets")
    if values.ndim == 3:
        if given is not None or alignment > 1:
            raise ValueError(f"values of {values.shape} are matrices of equal size; pass (T, k) with sizes")
        groups, n, k = values.shape
        return values.reshape(groups * n, k), Sizes.uniform(groups, n)
    if values.ndim != 2:
        raise ValueError(f"values are (T, k) with sizes, or (num_groups, n, k), not {values.shape}")
    if given is None:
        raise ValueError(f"values of {values.shape} need sizes= (rows of each group) or offsets= (where each ends)")
    if is_on_gpu(given):
        return values, _device_sizes(given, values, offsets is not None, alignment)
    return values, host_sizes(given, values.shape[0], offsets is not None, alignment)


def host_sizes(given: Any, capacity: int, are_ends: bool, alignment: int) -> Sizes:
    """Integers, or where each group ends, as sizes. Raises ValueError where one is negative or they pass capacity."""
    what = "offsets" if are_ends else "sizes"
    if isinstance(given, np.ndarray):
        if given.dtype.kind not in "iu" or given.ndim != 1:
            raise TypeError(f"{what} are integers, one for each group, not {given.dtype} of shape {given.shape}")
        given = given.tolist()
    try:
        numbers = [operator.index(n) for n in given]
    except TypeError as error:
        raise TypeError(f"{what} are integers, one for each group: {error}") from error
    numbers = np.diff(numbers, prepend=0).tolist() if are_ends else numbers
    for i, n in enumerate(numbers):
        if n < 0:
            raise ValueError(f"{what}: group {i} would have {n} rows; a size is 0 or more")
    sizes = Sizes.known(numbers, capacity, alignment)
    ends = [start + n for start, n in zip(sizes.starts.tolist(), numbers, strict=False) if n]
    if ends and ends[-1] > capacity:
        aligned = f" at starts of a multiple of {alignment}" if alignment > 1 else ""
        raise ValueError(f"{what}: groups{aligned} end at row {ends[-1]}, the values have {capacity}")
    return sizes


def _device_sizes(given: Array, values: Array, are_ends: bool, alignment: int) -> Sizes:
    what = "offsets" if are_ends else "sizes"
    if isinstance(values, np.ndarray):
        raise TypeError(f"{what} are on a GPU and the values on the host; use cupy.asnumpy(...)")
    if place(given) != place(values):
        raise ValueError(f"{what} are on cuda:{place(given)}, the values on cuda:{place(values)}; move one")
    kinds = {"int32": "ends"} if are_ends else {"int32": "int32", "int64": "int64"}
    kind: Any = kinds.get(given.dtype.name)
    if kind is None or given.ndim != 1 or not given.flags.c_contiguous:
        raise TypeError(
            f"{what} on a GPU are a contiguous array of {' or '.join(kinds)}, one for each group, not {given.dtype} of "
            f"shape {given.shape}; use .astype(np.int32)"
        )
    return Sizes(len(given), None, None, given, kind, values.shape[0], alignment)


def as_amaxes(amax: Any, formats: Sequence[Format | None], values: Array, num_groups: int) -> Array:
    """A caller's amaxes, float32 (num_groups,) where the values are."""
    if not any(format is not None and format.measures_amax for format in formats):
        names = ", ".join(format.name for format in formats if format is not None)
        raise ValueError(f"amax= scales formats with one amax per matrix (FP8, NVFP4); {names} measure blocks or rows")
    expect_one_amax(formats)
    amax = as_ours(taken(amax, formats), "amax")
    shape, dtype = getattr(amax, "shape", "?"), getattr(amax, "dtype", type(amax).__name__)
    if backend_of_type(amax.__class__) is None or dtype != np.float32 or shape != (num_groups,):
        raise ValueError(f"amax is one float32 for each group, ({num_groups},), not {dtype} of shape {shape}")
    if place(amax) != place(values):
        raise ValueError("amax and the values are in different places; move one")
    return amax
