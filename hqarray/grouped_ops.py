"""The public functions of groups: check once, choose the backend by the array's type, call it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from . import gemm, grouped_gemm, ops
from .arrays import DIRECTIONS, Direction, HybridArray
from .formats import HighPrecision
from .grouped import GroupedArray, Part
from .grouped_making import backend_on, from_arrays, from_stacked, grouped_quantize, split_quantize, warm_of
from .grouped_parts import (
    ScatteredPart,
    on_device,
    zeros_scattered,
)
from .inputs import as_array, as_output, place
from .layout import Array, namespace

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
    values: Array = backend_on(part.ordinal < 0).dequantize_groups(part, wanted, transposed=columnwise)
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
    warm = warm_of(a.rowwise.memory.__class__) if is_plain else None
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


__all__ = [
    "dequantize", "engine_for", "from_arrays", "from_stacked", "grouped_matmul", "grouped_quantize", "split_quantize",
]
