"""Making groups: quantize matrices stacked along rows, or gather arrays that are there."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from . import ops, reference_grouped
from .arrays import DIRECTIONS, Direction, HybridArray
from .formats import Format, HighPrecision, as_format
from .grouped import GroupedArray, Part, unchecked
from .grouped_inputs import as_amaxes, as_stacked, host_sizes, is_on_gpu
from .grouped_parts import GroupedPart, gather, layout_of, memory_of, on_device, scatter
from .groups import Sizes
from .inputs import as_array, as_draws, as_flag, as_ours, place, recorded
from .layout import PITCH, Array, namespace
from .philox import Draws

Formats = tuple[Format | None, Format | None]


@cache
def backend_on(on_host: bool) -> ModuleType:
    """The module that quantizes and decodes groups."""
    if on_host:
        return reference_grouped
    from . import cuda_grouped

    return cuda_grouped


@cache
def warm_of(kind: type) -> ModuleType | None:
    """The module that looks up calls with arrays, or memory, of a type; None where that is not a GPU's."""
    if ops._gpu_of(kind) is None:
        return None
    from . import cuda_grouped_warm

    return cuda_grouped_warm


# --- quantize -----------------------------------------------------------------------------------


def grouped_quantize(
    values: Any,
    sizes: Any = None,
    *,
    offsets: Any = None,
    rowwise: Format | str | None = None,
    columnwise: Format | str | None = None,
    alignment: int = 1,
    amax: Any = None,
    out: GroupedArray | None = None,
    noop: Any = None,
    seed: Any = None,
) -> GroupedArray:
    """Quantize matrices stacked along rows, each as if alone, in one call.

    values     (T, k) with sizes or offsets, or (num_groups, n, k) without; dtypes as in quantize
    sizes      rows of each matrix, summing to T or less: integers, or beside values on a GPU an int32 or int64 array
               there, which the host then never reads
    offsets    where each matrix ends, taken in place of sizes (torch's offs; on a GPU int32)
    rowwise, columnwise  formats, as in quantize; with out= its own, or None
    alignment  matrices begin on a multiple of this many rows
    amax       float32 (num_groups,) used instead of measured amaxes by formats with one per matrix, or so many slots
               of a DelayedScaling, which record those measured
    out        a GroupedArray of these formats, shape and T whose buffers are written; rows of no matrix are not
    noop       one element, where the values are; with out=, nothing is written where it is not 0
    seed       as in quantize; each matrix draws by its own rows and columns, as if alone, so equal ones draw alike
    returns    GroupedArray; over out's buffers where it is given

    Bit for bit what quantize makes of each matrix alone. On a device, a negative size counts as 0 and what passes T
    is cut off (g.validate() raises). Raises ValueError for sizes on the host that do not fit.
    """
    given = (values, sizes, offsets, (rowwise, columnwise), alignment, out)
    warm = warm_of(values.__class__) if amax is None and noop is None and seed is None else None
    done: GroupedArray | None = None if warm is None else warm.quantize(*given)
    if done is not None:
        return done
    values = as_array(values, "values")
    if isinstance(out, GroupedArray):
        rowwise, columnwise = _formats_of(out, rowwise, columnwise)
    elif out is not None:
        raise TypeError(f"out is a GroupedArray, not {type(out).__name__}")
    formats = _resolve(rowwise, columnwise, values.dtype, "grouped_quantize")
    matrix, rows = as_stacked(values, sizes, offsets, alignment)
    if noop is not None and out is None:
        raise ValueError("noop= leaves out= as it is, and there is none; pass out=")
    flag = None if noop is None else as_flag(noop, values)
    whole = None if amax is None else as_amaxes(amax, formats, values, rows.num_groups)
    draws = as_draws(seed, formats, values)
    if out is not None:
        _check_out(out, matrix, rows, formats)
    group = _quantize(matrix, rows, formats, whole, out, flag, draws, recorded(amax))
    if warm is not None:
        warm.keep_quantize(*given, matrix, group)
    return group


def _quantize(
    matrix: Array, rows: Sizes, formats: Formats, whole: Array | None = None, out: GroupedArray | None = None,
    noop: Any = None, draws: Draws | None = None, record: Array | None = None,
) -> GroupedArray:
    parts = None if out is None else (out.rowwise, out.columnwise)
    backend = backend_on(place(matrix) < 0)
    rowwise, columnwise = backend.quantize_groups(matrix, rows, *formats, whole, parts, noop, draws, record)
    columns = Sizes.uniform(rows.num_groups, matrix.shape[1])
    return unchecked(rowwise, columnwise, rows, columns, ops.nominal_dtype(matrix.dtype))


def _resolve(rowwise: Any, columnwise: Any, dtype: np.dtype[Any], wanted_by: str) -> Formats:
    if rowwise is None and columnwise is None:
        raise ValueError(f"{wanted_by} needs rowwise=, columnwise= or both, for example rowwise='mxfp8'")
    nominal = ops.nominal_dtype(dtype)
    row, column = (None if f is None else as_format(f).resolve(nominal) for f in (rowwise, columnwise))
    return row, column


def _formats_of(out: GroupedArray, rowwise: Any, columnwise: Any) -> tuple[Any, Any]:
    """Those of out, which the ones given must be."""
    for direction, given in zip(DIRECTIONS, (rowwise, columnwise), strict=True):
        if given is not None:
            there, wanted = out.part(direction, "out=").format, as_format(given).resolve(out.dtype)
            if there != wanted:
                raise ValueError(f"out holds {direction} {there.name}, not {wanted.name}; pass {direction}=None")
    formats = {direction: part.format for direction, part in out.parts()}
    return formats.get("rowwise"), formats.get("columnwise")


def _check_out(out: GroupedArray, matrix: Array, rows: Sizes, formats: Formats) -> None:
    """Raises ValueError where out's buffers are not what would be allocated."""
    k = matrix.shape[1]
    there = (out.shape, out.rows.capacity, out.rows.alignment)
    wanted = ((rows.num_groups, rows.each, k), rows.capacity, rows.alignment)
    if there != wanted:
        raise ValueError(
            f"out is of shape, rows and alignment {', '.join(map(str, there))}; these values need "
            f"{', '.join(map(str, wanted))}"
        )
    if out.ordinal != place(matrix):
        raise ValueError(f"out is on {out.device}, the values are not; move them")
    columns = Sizes.uniform(rows.num_groups, k)
    for part, format, across, along in zip((out.rowwise, out.columnwise), formats, (k, rows.each), (rows, columns),
                                           strict=True):
        if isinstance(part, GroupedPart) and format is not None:
            own = layout_of(format, "k", k, rows) if across is None else layout_of(format, "outer", across, along)
            if part.layout != own:
                raise ValueError("out is a range of another array's members (split); .copy() gives it its own buffers")


def split_quantize(values: Any, sizes: Any, formats: Any, *, seed: Any = None) -> list[HybridArray | Array]:
    """Quantize matrices stacked along rows, each in formats of its own.

    values   (T, k), as in quantize
    sizes    rows of each matrix, on the host, summing to T or less
    formats  one entry for each matrix: None leaves it as it is (a view), a format quantizes it rowwise, a pair is
             (rowwise, columnwise), either of which may be None
    seed     as in grouped_quantize
    returns  a list of HybridArrays and of views of the values

    Matrices of equal formats are quantized together; they are then views of one buffer.
    """
    values = as_array(values, "values")
    if values.ndim != 2:
        raise ValueError(f"split_quantize takes values (T, k), not {values.shape}")
    sizes = as_ours(sizes, "sizes")
    if is_on_gpu(sizes):
        raise TypeError("split_quantize needs sizes on the host; cupy.asnumpy(sizes) copies them (and synchronises)")
    rows = host_sizes(sizes, values.shape[0], False, 1)
    wanted = [_pair(entry, values.dtype) for entry in formats]
    if len(wanted) != rows.num_groups:
        raise ValueError(f"split_quantize has {rows.num_groups} sizes and {len(wanted)} formats; give one for each")
    draws = as_draws(seed, (format for pair in wanted if pair is not None for format in pair), values)
    starts = rows.starts.tolist()
    result = [values[start:end] for start, end in pairwise(starts)]
    for pair in dict.fromkeys(pair for pair in wanted if pair is not None):
        chosen = [i for i, other in enumerate(wanted) if other == pair]
        first, last = chosen[0], chosen[-1]
        if chosen == list(range(first, last + 1)):
            matrix = values[starts[first] : starts[last + 1]]
        else:
            with on_device(values.device):
                matrix = namespace(values).concatenate([values[starts[i] : starts[i + 1]] for i in chosen])
        group = _quantize(matrix, Sizes.known([rows.values[i] for i in chosen]), pair, draws=draws)
        for i, member in zip(chosen, group, strict=True):
            result[i] = member
    return result


def _pair(entry: Any, dtype: np.dtype[Any]) -> Formats | None:
    if entry is None:
        return None
    if isinstance(entry, (tuple, list)):
        if len(entry) != 2:
            raise ValueError(f"formats: an entry is None, a format, or (rowwise, columnwise), not {len(entry)} of them")
        return None if tuple(entry) == (None, None) else _resolve(entry[0], entry[1], dtype, "split_quantize")
    return _resolve(entry, None, dtype, "split_quantize")


# --- groups of arrays that are there -------------------------------------------------------------


def from_stacked(
    values: Any, rowwise: Format | str | None, columnwise: Format | str | None, seed: Any = None
) -> GroupedArray:
    """See GroupedArray.from_stacked."""
    values = as_array(values, "values")
    if values.ndim != 3:
        raise ValueError(f"from_stacked takes (num_groups, n, k), not {values.shape}; grouped_quantize takes sizes")
    if rowwise is None and columnwise is None:
        rowwise = HighPrecision()
    row, column = _resolve(rowwise, columnwise, values.dtype, "from_stacked")
    if row is None or not _is_own_memory(values, row):
        return grouped_quantize(values, rowwise=row, columnwise=column, seed=seed)
    groups, n, k = values.shape
    rows, columns = Sizes.uniform(groups, n), Sizes.uniform(groups, k)
    memory = memory_of(values.reshape(-1).view(np.uint8))
    part = GroupedPart(row, layout_of(row, "outer", k, rows), rows, memory, False)
    other = None if column is None else grouped_quantize(values, columnwise=column, seed=seed).columnwise
    return GroupedArray(part, other, rows, columns, ops.nominal_dtype(values.dtype))


def _is_own_memory(values: Array, format: Format) -> bool:
    """Whether the codes of a rowwise part are the array's own bytes, as a GEMM can read them."""
    storage = format.storage
    if storage.scale != "none" or storage.element.dtype != values.dtype or not values.flags.c_contiguous:
        return False
    pointer = values.ctypes.data if isinstance(values, np.ndarray) else values.data.ptr
    return values.shape[-1] * values.itemsize % PITCH == 0 and pointer % PITCH == 0


def from_arrays(
    arrays: list[Any], rowwise: Format | str | None, columnwise: Format | str | None, seed: Any = None
) -> GroupedArray:
    """See GroupedArray.from_arrays."""
    if not arrays:
        raise ValueError("from_arrays needs at least one array")
    if any(isinstance(x, HybridArray) for x in arrays):
        return _pack(arrays, rowwise, columnwise)
    arrays = [as_array(x, f"arrays[{i}]") for i, x in enumerate(arrays)]
    first = arrays[0]
    for i, x in enumerate(arrays):
        if x.ndim != 2:
            raise ValueError(f"arrays[{i}] is {x.shape}; members are 2-D")
        if x.dtype != first.dtype:
            raise TypeError(f"arrays[{i}] is {x.dtype}, arrays[0] {first.dtype}; members have one dtype, use .astype")
        if place(x) != place(first):
            raise TypeError(f"arrays[{i}] is on {x.device}, arrays[0] on {first.device}; move one")
    if rowwise is None and columnwise is None:
        rowwise = HighPrecision()
    row, column = _resolve(rowwise, columnwise, first.dtype, "from_arrays")
    draws = as_draws(seed, (row, column), first)
    rows, columns = (_axis([x.shape[axis] for x in arrays]) for axis in (0, 1))
    concatenate = namespace(first).concatenate
    with on_device(first.device):
        if columns.each is not None:
            return _quantize(concatenate(arrays), rows, (row, column), draws=draws)
        if rows.each is not None:  # the rows of X.T are its columns
            turned = None if draws is None else draws.T
            return _quantize(concatenate([x.T for x in arrays]), columns, (column, row), draws=turned).T
    return _pack([ops.quantize(x, rowwise=row, columnwise=column, seed=seed) for x in arrays], None, None)


def _axis(sizes: list[int]) -> Sizes:
    return Sizes.uniform(len(sizes), sizes[0]) if len(set(sizes)) == 1 else Sizes.known(sizes)


def _pack(arrays: list[Any], rowwise: Any, columnwise: Any) -> GroupedArray:
    """HybridArrays as one group: codes and scales are copied."""
    first = arrays[0]
    for i, x in enumerate(arrays):
        if not isinstance(x, HybridArray):
            raise TypeError(f"arrays[{i}] is {type(x).__name__} beside HybridArrays; quantize it first")
        if x.ndim != 2:
            raise ValueError(f"arrays[{i}] is {x.shape}; members are 2-D, reshape(-1, {x.shape[-1]}) first")
        if _formats(x) != _formats(first) or x.dtype != first.dtype:
            raise ValueError(
                f"arrays[{i}] is {x!r}, arrays[0] {first!r}; a GroupedArray has one pair of formats and one dtype; "
                f"keep mixed ones in a list, as split_quantize gives them"
            )
    formats = _formats(first)
    for direction, given in zip(DIRECTIONS, (rowwise, columnwise), strict=True):
        wanted = None if given is None else as_format(given).resolve(first.dtype)
        if wanted is not None and formats.get(direction) != wanted:
            there = formats[direction].name if direction in formats else "missing"
            raise ValueError(
                f"{direction}={wanted.name}, but the arrays' {direction} part is {there}; from_arrays does not "
                f"quantize anew: pass None, or plain arrays"
            )
    rows, columns = (_axis([x.shape[axis] for x in arrays]) for axis in (0, 1))
    with on_device(first.device):
        row, column = (_packed(arrays, direction, formats.get(direction), rows, columns) for direction in DIRECTIONS)
    return GroupedArray(row, column, rows, columns, first.dtype)


def _formats(x: HybridArray) -> dict[Direction, Format]:
    return {direction: part.format for direction, part in x.parts()}


def _packed(
    arrays: list[HybridArray], direction: Direction, format: Format | None, rows: Sizes, columns: Sizes
) -> Part | None:
    if format is None:
        return None
    members = tuple(x.part(direction) for x in arrays)
    outer, k = (rows, columns) if direction == "rowwise" else (columns, rows)
    module = namespace(members[0].codes)
    if k.each is not None:
        return gather(format, members, "outer", k.each, outer, module)
    if outer.each is not None:
        return gather(format, members, "k", outer.each, k, module)
    return scatter(format, members, module)
