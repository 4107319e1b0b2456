"""The public functions: check once, choose the backend by the array's type, call it."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, Literal

import numpy as np

from . import gemm, reference
from .arrays import Direction, HybridArray, QuantizedArray
from .buffers import Packed
from .formats import Format, Storage, as_format
from .grouped import GroupedArray
from .inputs import (
    FLOATS,
    as_amax,
    as_array,
    as_draws,
    as_flag,
    as_hybrid,
    as_matrix,
    as_output,
    backend_of,
    backend_of_type,
    expect_same_place,
    expect_source,
    recorded,
)
from .layout import Array

# --- quantize -----------------------------------------------------------------------------------


def quantize(
    values: Any,
    *,
    rowwise: Format | str | None = None,
    columnwise: Format | str | None = None,
    columnwise_source: Literal["original", "rowwise_dequantized"] = "original",
    amax: Any = None,
    seed: Any = None,
) -> HybridArray:
    """Quantize a matrix along one or both of its axes in one read.

    values      (..., k), float32, float16, bfloat16 or float64 (rounded to float32 first); any strides.
                NumPy, CuPy, or anything with DLPack on the CPU or a CUDA device (torch, JAX), read without a copy.
    rowwise     format of the part blocked along the last axis; None leaves it out
    columnwise  format of the part blocked along the other one (over the 2-D view); None leaves it out
    columnwise_source  "original", or "rowwise_dequantized": columns are quantized from what the rows became
    amax        one float32 used instead of the measured amax by formats with one per matrix (FP8, NVFP4; of a rotated
                part that of the rotated values), or a slot of a DelayedScaling, which records the measured one as well.
                An array's value is not looked at (on a GPU the host would wait): 0, NaN, Inf and negative ones mean
                scale 1.
    seed        needed by formats that round at random, ignored by others: an integer from 0 to 2**64 - 1, or an array
                of one uint64 or int64 where the values are, which a captured CUDA graph reads when it is replayed.
                A seed gives the same bits every time, on NumPy and on a GPU; use another one for each call.
    returns     HybridArray of the same shape; codes uint8, scales as the format's row says

    Scale rule and element rounding: formats.py, row of the format (source named there). A value within the
    scaled range of its block is off by at most half the element's spacing there, by less than the spacing where it is
    rounded at random; of a rotated part this holds of the rotated values.
    Raises TypeError for a dtype it cannot read, ValueError when both directions are None.
    """
    gpu = _gpu_of(values.__class__) if amax is None and seed is None and columnwise_source == "original" else None
    done: HybridArray | None = None if gpu is None else gpu.warm(values, rowwise, columnwise)
    if done is not None:
        return done
    values = as_array(values, "values")
    if rowwise is None and columnwise is None:
        raise ValueError("quantize needs rowwise=, columnwise= or both, for example rowwise='mxfp8'")
    expect_source(columnwise_source, rowwise, columnwise)
    dtype = nominal_dtype(values.dtype)
    row = None if rowwise is None else as_format(rowwise).resolve(dtype)
    column = None if columnwise is None else as_format(columnwise).resolve(dtype)
    formats = [format for format in (row, column) if format is not None]
    whole = None if amax is None else as_amax(amax, formats, values)
    draws = as_draws(seed, formats, values)
    matrix = as_matrix(values, "values")
    backend = backend_of(matrix)
    derived: Direction | None = None
    if columnwise_source == "rowwise_dequantized" and column is not None:
        derived = "columnwise"
    rows, columns = backend.quantize_parts(matrix, row, column, derived, whole, draws, recorded(amax))
    array = HybridArray(rows, columns, values.shape, dtype, derived)
    if gpu is not None:
        gpu.keep_warm(values, rowwise, columnwise, matrix, array)
    return array


@cache
def _gpu_of(kind: type) -> ModuleType | None:
    """The module that computes on a GPU's arrays of a type; None for all others."""
    backend = backend_of_type(kind)
    return None if backend is reference else backend


def nominal_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype == np.float64 else dtype


def requantize(array: HybridArray, values: Any, *, amax: Any = None, noop: Any = None, seed: Any = None) -> None:
    """Quantize new values into the buffers of an array, in its formats.

    values  of the array's shape, where its buffers are; otherwise as in quantize
    amax, seed  as in quantize
    noop    one element, where the values are (on a GPU float32 or int32); the array is left as it is where it is not 0
    Raises ValueError for another shape, or where the part that the other was derived from was dropped; then
    nothing is changed.
    """
    array = as_hybrid(array, "requantize")
    values = as_array(values, "values")
    if values.shape != array.shape:
        raise ValueError(f"requantize needs values of shape {array.shape}, these have {values.shape}")
    expect_same_place(array, values)
    flag = None if noop is None else as_flag(noop, values)
    if array.derived is not None and None in (array.rowwise, array.columnwise):
        source = "rowwise" if array.derived == "columnwise" else "columnwise"
        raise ValueError(
            f"the {array.derived} part was quantized from what the {source} part decodes to, and that was dropped; "
            f"quantize anew"
        )
    matrix, formats = as_matrix(values, "values"), [part.format for _, part in array.parts()]
    whole = None if amax is None else as_amax(amax, formats, values)
    draws = as_draws(seed, formats, values)
    backend_of(matrix).requantize_parts(
        array.rowwise, array.columnwise, matrix, array.derived, whole, flag, draws, recorded(amax)
    )


def amax(values: Any, format: Format | str | None = None) -> Array:
    """Largest magnitude of an array, float32 (1,), NaN ignored: the other half of quantize(amax=...).

    format  of the part that it is for, blocked along the last axis (of a columnwise part: amax(x.T, format)). It
            matters where values are rotated first (rht), whose amax is another one; that quantizes them.
    """
    values = as_array(values, "values")
    matrix = as_matrix(values, "values")
    if format is None or not as_format(format).resolve(nominal_dtype(values.dtype)).storage.rht:
        return backend_of(matrix).amax(matrix)
    measured = quantize(matrix, rowwise=format, seed=0).part("rowwise", "amax").amax
    if measured is None:
        raise ValueError(f"{as_format(format).name} has no amax of the whole matrix")
    return measured


def fake_quantize(values: Any, format: Format | str, *, amax: Any = None, seed: Any = None) -> Array:
    """What values become in a format, blocks along the last axis: quantize and decode, same dtype.

    For blocks along the first axis: fake_quantize(x.T, format).T.
    """
    array = quantize(values, rowwise=format, amax=amax, seed=seed)
    return dequantize(array)


# --- decode -------------------------------------------------------------------------------------


def dequantize(array: HybridArray | GroupedArray, *, source: Direction | None = None, dtype: Any = None) -> Array:
    """Decode to values of array's shape.

    source  "rowwise" or "columnwise"; default the part with more significand bits, rowwise on a tie, and always
            the other one where a part was derived from it
    dtype   float32, float16 or bfloat16; default the array's nominal dtype
    Raises ValueError where the source is missing. Of a GroupedArray: see GroupedArray.dequantize.
    """
    if isinstance(array, GroupedArray):
        return array.dequantize(source=source, dtype=dtype)
    array = as_hybrid(array, "dequantize")
    if source not in (None, "rowwise", "columnwise"):
        raise ValueError(f"source={source!r} is not 'rowwise' or 'columnwise'")
    direction = source or _more_precise(array)
    part = array.part(direction, "dequantize")
    wanted = _decoded_dtype(array.dtype if dtype is None else dtype)
    values = _backend_of(part).dequantize_part(part, wanted, transposed=direction == "columnwise")
    return values if values.shape == array.shape else values.reshape(array.shape)


def _decoded_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype that parts can be decoded to. Raises TypeError for another one."""
    wanted: np.dtype[Any] = np.dtype(dtype)
    if wanted not in FLOATS[:3]:
        raise TypeError(f"dequantize gives float32, float16 or bfloat16, not {wanted}; use .astype({wanted}) after")
    return wanted


def _more_precise(array: HybridArray) -> Direction:
    parts = dict(array.parts())
    if len(parts) == 1:
        return next(iter(parts))
    if array.derived is not None:
        return "rowwise" if array.derived == "columnwise" else "columnwise"
    bits = {direction: _significand_bits(part.format) for direction, part in parts.items()}
    return "columnwise" if bits["columnwise"] > bits["rowwise"] else "rowwise"


@cache
def _significand_bits(format: Format) -> int:
    return format.storage.element.significand_bits


def _backend_of(part: QuantizedArray) -> ModuleType:
    backend = backend_of_type(_part_memory_type(part))
    assert backend is not None
    return backend


def with_columnwise(array: HybridArray, format: Format | str | None = None, *, seed: Any = None) -> HybridArray:
    """Add a columnwise part made from the rows.

    format  default the rowwise one. Where that is the rowwise format and it loses nothing (one scale, or square
            blocks), codes are moved; otherwise columns are quantized from what the rows decode to, and
            columnwise_source says "rowwise_dequantized".
    seed    as in quantize; of columns that are quantized
    Raises ValueError where there is a columnwise part already or no rowwise one.
    """
    part = as_hybrid(array, "with_columnwise").part("rowwise", "with_columnwise")
    if array.columnwise is not None:
        raise ValueError(
            f"this HybridArray {array.shape} has a columnwise part ({array.columnwise.format.name}); "
            f"drop(columnwise=True) first"
        )
    wanted = part.format if format is None else as_format(format).resolve(array.dtype)
    backend = _backend_of(part)
    if _is_moved(part.format, wanted):
        return HybridArray(part, backend.transpose_part(part), array.shape, array.dtype)
    values = backend.dequantize_part(part, np.dtype(np.float32))
    _, columns = backend.quantize_parts(values, None, wanted, None, None, as_draws(seed, [wanted], values))
    return HybridArray(part, columns, array.shape, array.dtype, "columnwise")


@cache
def _is_moved(rowwise: Format, columnwise: Format) -> bool:
    """Whether columns are made by moving the codes of rows; kept, since a format's facts are derived anew each time."""
    return columnwise == rowwise and columnwise.transposable


# --- matmul -------------------------------------------------------------------------------------


def matmul(
    a: Any,
    b: Any,
    *,
    out: Any = None,
    out_dtype: Any = None,
    bias: Any = None,
    activation: Literal["gelu"] | None = None,
    accumulate: bool = False,
    engine: gemm.Engine | str | None = None,
) -> Array:
    """The product a @ b for quantized arrays and plain ones: out = [out +] activation(a @ b + bias).

    a           (..., k) HybridArray, read by its rowwise part, or a plain float array
    b           (k, n) HybridArray, read by its columnwise part, or a plain float array
    out         (..., n) array to write into; (out, aux) also stores a @ b + bias for the backward pass
    out_dtype   float32, float16 or bfloat16; default out's, else float32 if either nominal dtype is, the common
                one where they agree, float32 for bfloat16 with float16
    bias        (n,) float array
    activation  "gelu" (tanh form)
    accumulate  add to out, which must be given
    engine      a name (native, bf16, bf16x3, fp32) or Engine; default the one engine_for names
    returns     (..., n); out where given

    Operands are exact; sums are float32, so row i of the result is within about k * 2^-24 * sum |a_ik b_kj| of the
    exact product, plus one rounding to out_dtype.
    Raises ValueError for shapes that do not match or a missing part, TypeError for a dtype it cannot use.
    Two GroupedArrays are multiplied member by member, in one call: see grouped_ops.grouped_matmul.
    """
    choices = (out_dtype, activation, accumulate, engine)
    if isinstance(a, GroupedArray) or isinstance(b, GroupedArray):
        return _grouped_ops().grouped_matmul(
            a, b, out=out, out_dtype=out_dtype, bias=bias, activation=activation, accumulate=accumulate, engine=engine
        )
    if _gpu_of(_memory_type(a)) is not None:
        done = _gpu_gemm().warm(a, b, out, bias, choices)
        if done is not None:
            return done
    a, b = (x if isinstance(x, HybridArray) else as_array(x, name) for x, name in ((a, "a"), (b, "b")))
    gpu = _gpu_module(a, b)
    _check_shapes(a, b)
    left, right = gemm.left_operand(a), gemm.right_operand(b)
    _check_rotation(left, right)
    chosen = _engine(engine, left, right, None if gpu is None else gpu.chip_of(_ordinal(left.data)))
    shape = left.lead + right.lead
    out, aux = _outputs(out)
    given = out
    out, aux = (None if x is None else as_output(x, name) for x, name in ((out, "out"), (aux, "aux")))
    _check_outputs({name: array for name, array in (("out", out), ("aux", aux)) if array is not None})
    dtype = _out_dtype(left, right, out, out_dtype)
    for name, array in (("out", out), ("aux", aux)):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} must have shape {shape} for {a.shape} @ {b.shape}, it has {array.shape}")
    if aux is not None and aux.dtype not in FLOATS[:3]:
        raise TypeError(f"aux is float32, float16 or bfloat16, not {aux.dtype}")
    if accumulate and out is None:
        raise ValueError("accumulate=True adds to out; pass out=")
    if activation not in (None, "gelu"):
        raise ValueError(f"activation={activation!r} is not 'gelu'")
    if bias is not None:
        bias = as_array(bias, "bias")
        if bias.shape != right.lead:
            raise ValueError(f"bias must have shape {right.lead}, it has {bias.shape}")
    _check_places(gpu, {"a": left.data, "b": right.data, "out": out, "aux": aux, "bias": bias})
    epilogue = gemm.Epilogue(bias, activation, accumulate)
    if gpu is not None:
        y = gpu.multiply(gpu.Request(a, b, left, right, shape, dtype, out, aux, epilogue, chosen, choices))
        return y if given is None else given
    if out is None:
        out = np.empty(shape, dtype)
    flat = (left.shape[0], right.shape[0])
    target, spare = out.reshape(flat), None if aux is None else aux.reshape(flat)
    gemm.multiply(left, right, epilogue, target, spare)
    for array, written in ((out, target), (aux, spare)):
        if array is not None and written is not None and not np.shares_memory(array, written):
            array[...] = written.reshape(shape)
    return out if given is None else given


@cache
def _gpu_gemm() -> ModuleType:
    from . import cuda_gemm

    return cuda_gemm


@cache
def _grouped_ops() -> ModuleType:
    from . import grouped_ops

    return grouped_ops


def _gpu_module(a: Any, b: Any) -> ModuleType | None:
    """The module that multiplies on a GPU where both operands are there; None for the host."""
    left, right = backend_of_type(_memory_type(a)), backend_of_type(_memory_type(b))
    if left is right:
        return None if left is reference or left is None else _gpu_gemm()
    if left in (reference, None) and right in (reference, None):
        return None
    raise TypeError(
        f"a @ b needs both operands in one place; a is {_place(a)}, b is {_place(b)}: "
        f"move one with cupy.asarray(...) or cupy.asnumpy(...) and quantize it there"
    )


def _memory_type(x: Any) -> type:
    """The type of what holds the numbers of an operand."""
    if not isinstance(x, HybridArray):
        return type(x)
    return _part_memory_type(x.rowwise if x.rowwise is not None else x.columnwise)  # type: ignore[arg-type]


def _part_memory_type(part: QuantizedArray) -> type:
    buffers = part.buffers
    return type(buffers.memory if isinstance(buffers, Packed) else buffers.codes)


def _place(x: Any) -> str:
    name = "on a GPU (CuPy)" if backend_of_type(_memory_type(x)) not in (reference, None) else "on the host"
    return f"{type(x).__name__} {name}"


def _check_places(gpu: ModuleType | None, arrays: dict[str, Any]) -> None:
    """All arrays of a product lie where a does."""
    if gpu is None:
        for name, array in arrays.items():
            if array is not None and not isinstance(array, QuantizedArray) and not isinstance(array, np.ndarray):
                raise TypeError(f"{name} is {type(array).__name__}, a and b are on the host; pass a NumPy array")
        return
    there = {name: _ordinal(array) for name, array in arrays.items() if array is not None}
    for name, ordinal in there.items():
        if ordinal != there["a"]:
            place = "the host" if ordinal is None else f"cuda:{ordinal}"
            raise TypeError(f"{name} is on {place}, a on cuda:{there['a']}; move it there, or make it there")


def _ordinal(array: Any) -> int | None:
    """Number of the GPU where an array lies; None for the host."""
    device = getattr(array, "device", "cpu")
    return None if isinstance(device, str) else int(device.id)


def _outputs(out: Any) -> tuple[Any, Any]:
    """(out, aux) as they were given."""
    if not isinstance(out, tuple):
        return out, None
    if len(out) != 2:
        raise TypeError(f"out is an array, or (out, aux), not a tuple of {len(out)}")
    return out


def _check_outputs(named: dict[str, Any]) -> None:
    """Outputs are arrays that overlap neither one another nor, by a stride of 0, themselves."""
    for name, array in named.items():
        if array.size and any(stride == 0 and n > 1 for stride, n in zip(array.strides, array.shape, strict=True)):
            raise ValueError(f"{name} has a stride of 0, so that elements share memory; pass an array of its own")
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ValueError(f"{name} is read-only; pass an array that may be written")
    if len(named) == 2 and all(isinstance(array, np.ndarray) for array in named.values()):
        first, second = named.values()
        if np.may_share_memory(first, second):
            raise ValueError("out and aux share memory; pass two arrays")


def _check_shapes(a: Any, b: Any) -> None:
    for name, x in (("a", a), ("b", b)):
        if len(x.shape) == 0:
            raise ValueError(f"{name} is 0-D; a @ b needs a (..., k) and b (k, n)")
    if len(b.shape) != 2:
        raise ValueError(f"b must be (k, n), it is {b.shape}; reshape it, or loop over its matrices")
    if a.shape[-1] != b.shape[0]:
        hint = " (b.T would fit: .T is free)" if a.shape[-1] == b.shape[1] else ""
        raise ValueError(f"a @ b contracts a's last axis with b's first: {a.shape} @ {b.shape} do not fit{hint}")


def _check_rotation(left: gemm.Operand, right: gemm.Operand) -> None:
    if left.storage.rht != right.storage.rht:
        raise ValueError("one operand is Hadamard-rotated (rht) and the other is not; quantize both alike")


def engine_of_likes(storage: Storage, ordinal: int) -> gemm.Engine:
    """What a product of two parts that are stored so would be multiplied by, on a CUDA device (-1: NumPy)."""
    return gemm.choose_engine(storage, storage, None if ordinal < 0 else _gpu_gemm().chip_of(ordinal))


def _engine(
    asked: gemm.Engine | str | None, left: gemm.Operand, right: gemm.Operand, chip: gemm.Chip
) -> gemm.Engine:
    if asked is None:
        return gemm.choose_engine(left.storage, right.storage, chip)
    return gemm.asked_engine(asked, left.storage, right.storage, chip)  # type: ignore[arg-type]


def _out_dtype(left: gemm.Operand, right: gemm.Operand, out: Any, out_dtype: Any) -> np.dtype[Any]:
    wanted = None if out_dtype is None else np.dtype(out_dtype)
    if out is not None:
        if wanted is not None and out.dtype != wanted:
            raise TypeError(f"out has dtype {out.dtype}, out_dtype={wanted}; give one of them, or the same")
        wanted = out.dtype
    wanted = gemm.result_dtype(left.dtype, right.dtype) if wanted is None else wanted
    if wanted not in FLOATS[:3]:
        raise TypeError(f"the result is float32, float16 or bfloat16, not {wanted}")
    return wanted


def engine_for(a: Any, b: Any) -> gemm.Engine:
    """What `a @ b` would be multiplied by, and why, without multiplying."""
    if isinstance(a, GroupedArray) or isinstance(b, GroupedArray):
        from . import grouped_ops

        return grouped_ops.engine_for(a, b)
    a, b = (x if isinstance(x, HybridArray) else as_array(x, name) for x, name in ((a, "a"), (b, "b")))
    gpu = _gpu_module(a, b)
    _check_shapes(a, b)
    left, right = gemm.left_operand(a), gemm.right_operand(b)
    _check_rotation(left, right)
    return _engine(None, left, right, None if gpu is None else gpu.chip_of(_ordinal(left.data)))
