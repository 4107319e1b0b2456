"""Calls of groups on CuPy that were made before, looked up ahead of every check.

An entry is kept only of a call whose arrays were read and written where they lie. Its key holds all that the checks
looked at but sizes on the host, which are looked at again; sizes on a device are told to the kernels each time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from cupy_backends.cuda.api.runtime import getDevice

from . import cuda, cuda_grouped, cuda_grouped_gemm
from .cuda_gemm import MOST_CALLS, _array_key
from .grouped import GroupedArray, unchecked
from .grouped_gemm import Request, _agree
from .grouped_parts import with_sizes
from .groups import Sizes
from .layout import Array

Key: TypeAlias = tuple[Any, ...]

# --- matmul -------------------------------------------------------------------------------------

_products: dict[Key, tuple[cuda_grouped_gemm.Call, bool]] = {}
"""Calls, and whether each is of the transposed product; a call keeps the layouts whose identity is in the key."""


def _product_key(a: GroupedArray, b: GroupedArray, out: Any, bias: Any, choices: Key) -> Key:
    """Raises AttributeError for what is no part in one buffer and no CuPy array."""
    x: Any = a.rowwise
    y: Any = b.columnwise
    rows, summed, across, other, first, second = a.rows, a.columns, b.columns, b.rows, x.memory, y.memory
    return (
        id(x.layout), id(y.layout), first.device_id, second.device_id, (first.ptr | second.ptr) & 15, a.dtype, b.dtype,
        rows.each, rows.capacity, rows.alignment, across.each, across.capacity, across.alignment,
        summed.each, summed.capacity, other.each, other.capacity, _array_key(out), _array_key(bias), choices,
    )


def matmul(a: GroupedArray, b: GroupedArray, out: Any, bias: Any, choices: Key) -> Array | None:
    """The product, if one like it was made before; None for the first time, or where something must be checked.

    choices  what else the caller's arguments were
    """
    try:
        kept = _products.get(_product_key(a, b, out, bias, choices))
    except (TypeError, AttributeError):  # not arrays, or choices that are none: the checks will say so
        return None
    if kept is None:
        return None
    call, is_transposed = kept
    x: Any = a.rowwise
    y: Any = b.columnwise
    if call.sizes == "k":
        return call.run(x, y, a.columns, out, bias) if _agree(a.columns, b.rows) else None
    if not is_transposed:
        return call.run(x, y, a.rows, out, bias)
    result = call.run(y, x, b.columns, out, bias)
    return result.T if out is None else result


def keep_matmul(
    a: GroupedArray, b: GroupedArray, out: Any, bias: Any, choices: Key, request: Request, is_transposed: bool
) -> None:
    """Keep the call that multiplied a and b as a request, for `matmul`; not where arrays were copied first."""
    call = cuda_grouped_gemm.call_of(request)
    if call is None:
        return
    if len(_products) >= MOST_CALLS:
        _products.clear()
    _products[_product_key(a, b, out, bias, choices)] = call, is_transposed


# --- quantize -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Quantize:
    """A call of grouped_quantize but for its pointers.

    keeps    formats and layouts of out, whose identity stands for them in the key
    rows     sizes; those on a device without the array
    columns  sizes
    dtype    nominal
    """

    keeps: Key
    plan: cuda_grouped._Plan
    row_bytes: int
    rows: Sizes
    columns: Sizes
    dtype: np.dtype[Any]


_quantized: dict[Key, _Quantize] = {}


def _sizes_key(given: Any) -> Key | None:
    return None if given is None else (given.shape, given.strides, given.dtype, given.data.device_id)


def _part_key(part: Any) -> Key | None:
    return None if part is None else (id(part.layout), id(part.format), part.memory.device_id)


def _out_key(out: Any) -> Key | None:
    if out is None:
        return None
    rows = out.rows
    return (_part_key(out.rowwise), _part_key(out.columnwise), rows.num_groups, rows.each, rows.capacity,
            rows.alignment, out.columns.each, out.dtype)


def _quantize_key(values: Any, sizes: Any, offsets: Any, formats: tuple[Any, Any], alignment: int, out: Any) -> Key:
    """Raises AttributeError for what is neither on a GPU nor a group of parts in one buffer."""
    memory = values.data
    return (values.shape, values.strides, values.dtype, memory.ptr & 15, memory.device_id, _sizes_key(sizes),
            _sizes_key(offsets), formats, alignment.__class__, alignment, _out_key(out))


def quantize(
    values: Any, sizes: Any, offsets: Any, formats: tuple[Any, Any], alignment: int, out: Any
) -> GroupedArray | None:
    """The group, if one like it was quantized before; None for the first time, or where something must be checked."""
    try:
        kept = _quantized.get(_quantize_key(values, sizes, offsets, formats, alignment, out))
    except (TypeError, AttributeError):  # not arrays, or formats that are none: the checks will say so
        return None
    if kept is None:
        return None
    plan, rows = kept.plan, kept.rows
    if plan.device != getDevice():
        with cuda._on_device_of(values.data):
            return quantize(values, sizes, offsets, formats, alignment, out)
    given = sizes if offsets is None else offsets
    if given is not None:
        rows = Sizes(rows.num_groups, None, None, given, rows.kind, rows.capacity, rows.alignment)
    parts = plan.empty(rows) if out is None else with_sizes((out.rowwise, out.columnwise), rows)
    plan.launch(values.data.ptr, kept.row_bytes, rows, parts, None, None, zeros_rest=out is None)
    return unchecked(*parts, rows, kept.columns, kept.dtype)


def keep_quantize(
    values: Array, sizes: Any, offsets: Any, formats: tuple[Any, Any], alignment: int, out: GroupedArray | None,
    matrix: Array, group: GroupedArray,
) -> None:
    """Keep the plan by which values, as a matrix, became a group, for `quantize`; not where they were copied first."""
    rows = group.rows
    is_in_place = matrix.data.ptr == values.data.ptr and cuda_grouped.is_readable(matrix)
    if not is_in_place or rows.host is not None or not rows.num_groups:
        return
    row, column = (None if part is None else part.format for part in (group.rowwise, group.columnwise))
    plan = cuda_grouped._plan(matrix, rows, row, column)
    keeps = () if out is None else tuple((part.layout, part.format) for _, part in out.parts())  # type: ignore[union-attr]
    if len(_quantized) >= MOST_CALLS:
        _quantized.clear()
    _quantized[_quantize_key(values, sizes, offsets, formats, alignment, out)] = _Quantize(
        keeps, plan, matrix.strides[0], replace(rows, device=None), group.columns, group.dtype
    )
