"""The public functions of groups: check once, choose the backend by the array's type, call it."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal

import numpy as np

from . import gemm, grouped_gemm, ops, reference_grouped
from .arrays import DIRECTIONS, Direction, HybridArray
from .formats import Format, HighPrecision, as_format
from .grouped import GroupedArray, Part, unchecked
from .grouped_inputs import as_amaxes, as_stacked, host_sizes, is_on_gpu
from .grouped_parts import (
    GroupedPart,
    ScatteredPart,
    gather,
    layout_of,
    memory_of,
    on_device,
    scatter,
    zeros_scattered,
)
from .groups import Sizes
from .inputs import as_array, as_flag, as_ours, as_output, place
from .layout import PITCH, Array, namespace

Formats = tuple[Format | None, Format | None]


@cache
def _backend(on_host: bool) -> ModuleType:
    """The module that quantizes and decodes groups."""
    if on_host:
        return reference_grouped
    from . import cuda_grouped

    return cuda_grouped


@cache
def _warm(kind: type) -> ModuleType | None:
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
) -> GroupedArray:
    """Quantize matrices stacked along rows, each as if alone, in one call.

    values     (T, k) with sizes or offsets, or (num_groups, n, k) without; dtypes as in quantize
    sizes      rows of each matrix, summing to T or less: integers, or beside values on a GPU an int32 or int64 array
               there, which the host then never reads
    offsets    where each matrix ends, taken in place of sizes (torch's offs; on a GPU int32)
    rowwise, columnwise  formats, as in quantize; with out= its own, or None
    alignment  matrices begin on a multiple of this many rows
    amax       float32 (num_groups,) used instead of measured amaxes by formats with one per matrix
    out        a GroupedArray of these formats, shape and T whose buffers are written; rows of no matrix are not
    noop       one element, where the values are; with out=, nothing is written where it is not 0
    returns    GroupedArray; over out's buffers where it is given

    Bit for bit what quantize makes of each matrix alone. On a device, a negative size counts as 0 and what passes T
    is cut off (g.validate() raises). Raises ValueError for sizes on the host that do not fit.
    """
    given = (values, sizes, offsets, (rowwise, columnwise), alignment, out)
    warm = _warm(values.__class__) if amax is None and noop is None else None
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
    if out is not None:
        _check_out(out, matrix, rows, formats)
    group = _quantize(matrix, rows, formats, whole, out, flag)
    if warm is not None:
        warm.keep_quantize(*given, matrix, group)
    return group


def _quantize(
    matrix: Array, rows: Sizes, formats: Formats, whole: Array | None = None, out: GroupedArray | None = None,
    noop: Any = None,
) -> GroupedArray:
    parts = None if out is None else (out.rowwise, out.columnwise)
    rowwise, columnwise = _backend(place(matrix) < 0).quantize_groups(matrix, rows, *formats, whole, parts, noop)
    columns = Sizes.uniform(rows.num_groups, matrix.shape[1])
    return unchecked(rowwise, columnwise, rows, columns, ops._nominal(matrix.dtype))


def _resolve(rowwise: Any, columnwise: Any, dtype: np.dtype[Any], wanted_by: str) -> Formats:
    if rowwise is None and columnwise is None:
        raise ValueError(f"{wanted_by} needs rowwise=, columnwise= or both, for example rowwise='mxfp8'")
    nominal = ops._nominal(dtype)
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


def split_quantize(values: Any, sizes: Any, formats: Any) -> list[HybridArray | Array]:
    """Quantize matrices stacked along rows, each in formats of its own.

    values   (T, k), as in quantize
    sizes    rows of each matrix, on the host, summing to T or less
    formats  one entry for each matrix: None leaves it as it is (a view), a format quantizes it rowwise, a pair is
             (rowwise, columnwise), either of which may be None
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
        group = _quantize(matrix, Sizes.known([rows.values[i] for i in chosen]), pair)
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


def from_stacked(values: Any, rowwise: Format | str | None, columnwise: Format | str | None) -> GroupedArray:
    """See GroupedArray.from_stacked."""
    values = as_array(values, "values")
    if values.ndim != 3:
        raise ValueError(f"from_stacked takes (num_groups, n, k), not {values.shape}; grouped_quantize takes sizes")
    if rowwise is None and columnwise is None:
        rowwise = HighPrecision()
    row, column = _resolve(rowwise, columnwise, values.dtype, "from_stacked")
    if row is None or not _is_own_memory(values, row):
        return grouped_quantize(values, rowwise=row, columnwise=column)
    groups, n, k = values.shape
    rows, columns = Sizes.uniform(groups, n), Sizes.uniform(groups, k)
    memory = memory_of(values.reshape(-1).view(np.uint8))
    part = GroupedPart(row, layout_of(row, "outer", k, rows), rows, memory, False)
    other = None if column is None else grouped_quantize(values, columnwise=column).columnwise
    return GroupedArray(part, other, rows, columns, ops._nominal(values.dtype))


def _is_own_memory(values: Array, format: Format) -> bool:
    """Whether the codes of a rowwise part are the array's own bytes, as a GEMM can read them."""
    storage = format.storage
    if storage.scale != "none" or storage.element.dtype != values.dtype or not values.flags.c_contiguous:
        return False
    pointer = values.ctypes.data if isinstance(values, np.ndarray) else values.data.ptr
    return values.shape[-1] * values.itemsize % PITCH == 0 and pointer % PITCH == 0


def from_arrays(arrays: list[Any], rowwise: Format | str | None, columnwise: Format | str | None) -> GroupedArray:
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
    rows, columns = (_axis([x.shape[axis] for x in arrays]) for axis in (0, 1))
    concatenate = namespace(first).concatenate
    with on_device(first.device):
        if columns.each is not None:
            return _quantize(concatenate(arrays), rows, (row, column))
        if rows.each is not None:  # the rows of X.T are its columns
            return _quantize(concatenate([x.T for x in arrays]), columns, (column, row)).T
    return _pack([ops.quantize(x, rowwise=row, columnwise=column) for x in arrays], None, None)


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


# --- decode -------------------------------------------------------------------------------------


def dequantize(array: GroupedArray, *, source: Direction | None = None, dtype: Any = None) -> Array | list[Array]:
    """Decode all members.

    source, dtype  as in hqarray.dequantize
    returns        (num_groups, m, k) where all are of one shape, else the stacked array: (T, k) where rows are
                   ragged, (m, T) where columns are, elements of no member zero; a list where both are
    """
    if source not in (None, *DIRECTIONS):
        raise ValueError(f"source={source!r} is not 'rowwise' or 'columnwise'")
    direction = source or _more_precise(array)
    part = array.part(direction, "dequantize")
    wanted = ops._decoded_dtype(array.dtype if dtype is None else dtype)
    if isinstance(part, ScatteredPart):
        return [ops.dequantize(x, source=direction, dtype=wanted) for x in array]
    columnwise = direction == "columnwise"
    values: Array = _backend(part.ordinal < 0).dequantize_groups(part, wanted, transposed=columnwise)
    groups, m, k = array.shape
    if m is None or k is None:
        return values
    if not columnwise:
        return values.reshape(groups, m, k)
    turned = values.reshape(m, groups, k).transpose(1, 0, 2)
    return namespace(values).ascontiguousarray(turned)


def _more_precise(array: GroupedArray) -> Direction:
    bits = {direction: part.format.storage.element.significand_bits for direction, part in array.parts()}
    return "rowwise" if bits.get("rowwise", 0) >= bits.get("columnwise", 0) else "columnwise"


# --- matmul -------------------------------------------------------------------------------------


def grouped_matmul(
    a: Any,
    b: Any,
    *,
    out: Any = None,
    out_dtype: Any = None,
    bias: Any = None,
    activation: Literal["gelu"] | None = None,
    accumulate: bool = False,
    engine: gemm.Engine | str | None = None,
) -> Array | GroupedArray:
    """Members a_i (m_i, k_i) @ b_i (k_i, n_i) of two GroupedArrays; what hqarray.matmul does with them.

    bias     (num_groups, n), or (n,) for all
    returns  (num_groups, m, n) where those are equal for all, (T, n) where m is ragged, (m, T) where n is, elements of
             no member zero in what is allocated here and untouched in out; a GroupedArray of unquantized results
             where both are. A sum over an empty k is zero.
    Otherwise as hqarray.matmul.
    """
    asked = (a, b, out, bias, (out_dtype, activation, accumulate, engine))
    is_plain = type(a) is type(b) is GroupedArray and a.rowwise is not None
    warm = _warm(a.rowwise.memory.__class__) if is_plain else None
    done: Array | None = None if warm is None else warm.matmul(*asked)
    if done is not None:
        return done
    product, chosen = _product(a, b, engine)
    if isinstance(out, tuple):
        raise NotImplementedError("out=(y, aux) is not built for groups; store a @ b + bias with a call of its own")
    if activation not in (None, "gelu"):
        raise ValueError(f"activation={activation!r} is not 'gelu'")
    if accumulate and out is None:
        raise ValueError("accumulate=True adds to out; pass out=")
    shape, ordinal, given = product.shape, a.ordinal, out
    if out is not None:
        if shape is None:
            raise NotImplementedError("out= is not built for members that differ along both axes; leave it out")
        out = as_output(out, "out")
        ops._check_outputs({"out": out})
        if out.shape != shape:
            raise ValueError(f"out must have shape {shape} for {a.shape} @ {b.shape}, it has {out.shape}")
        _expect_place("out", out, ordinal)
    dtype = ops._out_dtype(product.left, product.right, out, out_dtype)
    if bias is not None:
        bias = _as_bias(bias, product, ordinal)
    if not product.is_one_call:
        y = _one_by_one(product, a, b, dtype, out, bias, activation, accumulate, chosen)
        return y if given is None else given
    side = out if out is None or not product.is_transposed else out.T
    with on_device(a.device):
        target = side if side is None or side.flags.c_contiguous else namespace(side).ascontiguousarray(side)
    request = product.request(dtype, target, bias, activation, accumulate, chosen)
    result = grouped_gemm.multiply(request) if ordinal < 0 else _multiply_on_gpu(request)
    if warm is not None and target is side:
        warm.keep_matmul(*asked, request, product.is_transposed)
    if out is None:
        return result.T if product.is_transposed else result
    if target is not side:
        side[...] = target
    return given


def engine_for(a: Any, b: Any) -> gemm.Engine:
    """What `a @ b` of groups would be multiplied by, and why; see hqarray.engine_for."""
    return _product(a, b, None)[1]


def _product(a: Any, b: Any, engine: gemm.Engine | str | None) -> tuple[grouped_gemm.Product, gemm.Engine]:
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, GroupedArray):
            raise TypeError(
                f"{name} is {type(x).__name__} beside a GroupedArray; both are groups: GroupedArray.from_stacked(...) "
                f"makes one of (num_groups, n, k), grouped_quantize(..., sizes) of (T, k)"
            )
    if a.ordinal != b.ordinal:
        raise TypeError(f"a is on {a.device} and b on {b.device}; move one and quantize it there")
    product = grouped_gemm.product(a, b)
    ops._check_rotation(product.left, product.right)
    chip = None if a.ordinal < 0 else ops._gpu_gemm().chip_of(a.ordinal)
    return product, ops._engine(engine, product.left, product.right, chip)


def _expect_place(what: str, array: Array, ordinal: int) -> None:
    if place(array) != ordinal:
        raise TypeError(f"{what} is {type(array).__name__} on {array.device}, and a is elsewhere; move it there")


def _as_bias(bias: Any, product: grouped_gemm.Product, ordinal: int) -> Array:
    """(num_groups, n), of one bias for all a view."""
    bias = as_array(bias, "bias")
    groups, n = product.n.num_groups, product.n.each
    if n is None:
        raise NotImplementedError("bias= is not built for ragged n; add it to the result")
    if bias.shape not in ((groups, n), (n,)):
        raise ValueError(f"bias must have shape {(groups, n)} or {(n,)}, it has {bias.shape}")
    _expect_place("bias", bias, ordinal)
    return namespace(bias).broadcast_to(bias, (groups, n))


def _multiply_on_gpu(request: grouped_gemm.Request) -> Array:
    """One grouped call; where cuBLASLt has none, members one by one if the host knows their sizes."""
    from .cublaslt_grouped import Unavailable  # type: ignore[import-not-found,unused-ignore]
    from .cuda_grouped_gemm import multiply  # type: ignore[import-not-found,unused-ignore]

    try:
        return multiply(request)
    except Unavailable:
        if not all(sizes.is_known for sizes in (request.m, request.n, request.k)):
            raise
    a = request.a
    with on_device(a.device):
        out = namespace(a.memory).zeros(request.shape, request.dtype) if request.out is None else request.out
    targets = grouped_gemm.views(out, request.m)
    _multiply_each(a, request.b, targets, request.bias, request.activation, request.accumulate, request.engine)
    return out


def _one_by_one(
    product: grouped_gemm.Product, a: GroupedArray, b: GroupedArray, dtype: np.dtype[Any], out: Array | None,
    bias: Array | None, activation: Any, accumulate: bool, engine: gemm.Engine,
) -> Array | GroupedArray:
    """What no single call can do, with sizes on the host: members that differ along two axes, or k one part of which
    is uniform and the other not.
    """
    for name, x in (("a", a), ("b", b)):
        x._expect_known(f"a @ b, for a result that no single call gives, ({name})")
    m, n, shape, module = product.m, product.n, product.shape, namespace(product.a.memory)
    targets: list[Array]
    made: ScatteredPart | None = None
    with on_device(a.device):
        if shape is None:
            shapes = [(int(rows), int(columns)) for rows, columns in zip(m.values, n.values, strict=True)]
            made = zeros_scattered(HighPrecision(dtype.name), shapes, module)
            targets = [part.codes for part in made.parts]
        else:
            out = module.zeros(shape, dtype) if out is None else out
            targets = grouped_gemm.views(out, m) if n.each is not None else [
                columns.T for columns in grouped_gemm.views(out.T, n)
            ]
    _multiply_each(product.a, product.b, targets, bias, activation, accumulate, engine)
    return out if made is None else GroupedArray(made, None, m, n, dtype)


def _multiply_each(
    a: Part, b: Part, targets: list[Array], bias: Array | None, activation: Any, accumulate: bool, engine: gemm.Engine
) -> None:
    for i, (x, y, target) in enumerate(zip(a.members(), b.members(), targets, strict=True)):
        if target.size:
            ops.matmul(
                HybridArray(x), HybridArray(columnwise=y), out=target, bias=None if bias is None else bias[i],
                activation=activation, accumulate=accumulate, engine=engine,
            )
