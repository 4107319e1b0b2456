"""JAX: parts as arrays with JAX's float8 types and back, and fake quantization inside jit and grad.

    from hqarray.interop import jax as hqj
    codes, scales, _ = hqj.to_jax(hx.rowwise)           # float8_e4m3fn, float8_e8m0fnu
    loss = jax.grad(lambda w: f(hqj.fake_quantize(w, "mxfp8")))

JAX takes over memory only where its elements lie without gaps, in C or Fortran order, and on the CPU begin on a
multiple of 64 bytes; anything else is copied. A JAX array never changes: do not requantize into memory it shares.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError("hqarray.interop.jax needs JAX: pip install 'hqarray[jax]'") from error

from hqarray import dlpack, ops
from hqarray.arrays import FLOAT32, HybridArray, QuantizedArray
from hqarray.dlpack import Typed
from hqarray.formats import FORMATS, Format, as_format
from hqarray.grouped import GroupedArray
from hqarray.layout import Array, namespace

from .fitting import expect_shape, fitting

_TYPED = frozenset(
    element.dtype_name for element in (format.storage.element for format in FORMATS.values())
    if element.dtype_name in (*dlpack.TYPES, element.dtype.name)
)
"""Elements that JAX has a type for which DLPack carries."""

FP4 = "float4_e2m1fn"
"""JAX has the type, one element to an array's element, and DLPack does not carry it."""

# --- parts --------------------------------------------------------------------------------------


class JaxPart(NamedTuple):
    """A part as JAX arrays.

    codes         (outer, k) of JAX's type of the element; FP4 uint8 (outer, ceil(k / 2)), low nibble first; FP6 uint8
    scales        of the logical shape, float8_e8m0fnu, float8_e4m3fn or float32; None where the format has none
    global_scale  float32 (1,) where the format has one, (outer,) where it has one a row
    """

    codes: Any
    scales: Any = None
    global_scale: Any = None


class JaxPair(NamedTuple):
    """The parts of a HybridArray as JAX arrays; columnwise is that of X.T."""

    rowwise: JaxPart | None = None
    columnwise: JaxPart | None = None


def to_jax(array: QuantizedArray | HybridArray) -> JaxPart | JaxPair:
    """A part as JAX arrays of JAX's types, or a HybridArray as a pair of these, on the same device.

    Shares memory where JAX allows it (see above): codes where k fills the row pitch of 16 bytes, scales where their
    count fills the padding of their layout. What is read-only is copied, since JAX does not know the flag.
    FP4 is given as bytes, since JAX reads no FP4 by DLPack; jax.lax.bitcast_convert_type(codes, jnp.float4_e2m1fn)
    splits each into two. On a GPU JAX's stream waits for CuPy's current one.
    """
    if isinstance(array, HybridArray):
        rows, columns = (None if part is None else _part_as_jax(part) for part in (array.rowwise, array.columnwise))
        return JaxPair(rows, columns)
    if not isinstance(array, QuantizedArray):
        raise TypeError(
            f"to_jax takes a part or a HybridArray, not {type(array).__name__}"
            f"{'; [to_jax(member) for member in g] gives a pair for each' if isinstance(array, GroupedArray) else ''}"
        )
    return _part_as_jax(array)


def _part_as_jax(part: QuantizedArray) -> JaxPart:
    has_scales, whole = part.format.storage.scale != "none", part.global_scale
    return JaxPart(
        _as_jax(dlpack.codes_of(part)),
        _as_jax(dlpack.scales_of(part)) if has_scales else None,
        None if whole is None else _as_jax(Typed(whole)),
    )


def _as_jax(typed: Typed) -> Any:
    array = typed.array
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = namespace(array).ascontiguousarray(array)
    return jnp.from_dlpack(Typed(array, typed.name, typed.read_only))


def from_jax(
    parts: JaxPart | JaxPair | tuple[Any, ...],
    *,
    format: Format | str | tuple[Format | str | None, Format | str | None] | None = None,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
) -> QuantizedArray | HybridArray:
    """JAX arrays as a part, or a JaxPair as a HybridArray, over the same memory: the inverse of to_jax.

    parts    JaxPart, or (codes, scales, global_scale) as it has them; codes and scales may also be uint8, codes of FP4
             also float4_e2m1fn (outer, k), which are copied
    format   default the one whose types and shapes these are, which bytes (MXFP4, FP6) do not tell; of a pair one or
             two
    shape    (outer, k), default that of codes, k even for FP4; of a pair X's
    dtype    nominal dtype of a pair; default float32
    returns  QuantizedArray, of a pair HybridArray. Its memory is JAX's: read-only on the CPU, and on a GPU not to be
             requantized into; .copy() has buffers of its own.

    Raises as QuantizedArray.from_buffers does, ValueError where no format or more than one fits, TypeError for what is
    no JAX array.
    """
    if isinstance(parts, JaxPair):
        formats = format if isinstance(format, tuple) else (format, format)
        if len(formats) != 2:
            raise ValueError(f"format= is one, or (rowwise, columnwise), not {len(formats)}: {formats}")
        matrix = None if shape is None else (prod(shape[:-1]), shape[-1])
        shapes = (matrix, None if matrix is None else matrix[::-1])
        rows, columns = (
            None if part is None else _part_of(part, wanted, size)
            for part, wanted, size in zip(parts, formats, shapes, strict=True)
        )
        nominal = FLOAT32 if dtype is None else np.dtype(dtype)
        return HybridArray(rows, columns, shape, nominal)  # type: ignore[arg-type]
    if isinstance(format, tuple) or dtype is not None:
        raise TypeError("a pair of formats and a nominal dtype are those of a JaxPair")
    if not isinstance(parts, (tuple, list)) or len(parts) not in (1, 2, 3):
        raise TypeError(f"from_jax takes a JaxPart, (codes, scales, global_scale) or a JaxPair, not "
                        f"{type(parts).__name__}; hqarray.quantize takes an array of values")
    return _part_of(JaxPart(*parts), format, shape)


def _part_of(part: JaxPart, format: Format | str | None, shape: tuple[int, ...] | None) -> QuantizedArray:
    for name, array in zip(part._fields, part, strict=True):
        if not isinstance(array, jax.Array) and (array is not None or name == "codes"):
            raise TypeError(f"{name} is {type(array).__name__}, not a jax.Array; jnp.asarray(...) makes one")
        if isinstance(array, jax.core.Tracer):
            raise TypeError(f"{name} is traced and has no memory: call from_jax outside jit, grad and vmap")
    if part.codes.ndim != 2:
        raise ValueError(f"codes are (outer, k), these are {part.codes.shape}; use .reshape(-1, k)")
    typed, k = _TYPED, None
    if part.codes.dtype.name == FP4:
        k, typed = part.codes.shape[1], _TYPED | {FP4}
        part = part._replace(codes=_packed(part.codes))
    if shape is not None:
        expect_shape(shape, part.codes.shape)
    format = _fitting(part, shape, typed) if format is None else as_format(format)
    if shape is None and k is not None:
        shape = part.codes.shape[0], k
    if shape is None:
        outer, columns = part.codes.shape
        shape = outer, columns * 2 if format.storage.element.stored_bits == 4 else columns
    return QuantizedArray.from_buffers(
        part.codes, part.scales, format, (shape[0], shape[1]), global_scale=part.global_scale
    )


def _packed(codes: Any) -> Any:
    """FP4 values (outer, k) as bytes (outer, ceil(k / 2)), the low nibble first."""
    outer, k = codes.shape
    even = jnp.pad(codes, ((0, 0), (0, k % 2)))
    return jax.lax.bitcast_convert_type(even.reshape(outer, (k + 1) // 2, 2), jnp.uint8)


def _fitting(part: JaxPart, shape: tuple[int, ...] | None, typed: frozenset[str]) -> Format:
    arrays = [part.codes] if part.scales is None else [part.codes, part.scales]
    kinds, sizes = [array.dtype.name for array in arrays], tuple(array.shape for array in arrays)
    if FP4 in typed:
        kinds[0] = FP4
    whole = None if shape is None else tuple(shape)
    num_global = None if part.global_scale is None else part.global_scale.size
    return fitting(tuple(kinds), sizes, num_global, shape=whole, typed=typed)


# --- inside functions ---------------------------------------------------------------------------


def fake_quantize(x: Any, format: Format | str, *, amax: Any = None, seed: int | None = None) -> Any:
    """What values become in a format, blocks along the last axis, with the bits of hqarray.fake_quantize.

    x        (..., k) float32, float16 or bfloat16 (float64 gives float32)
    format   as in hqarray.quantize
    amax     one float32 used instead of the measured one by formats with one amax per matrix
    seed     of formats that round at random: an integer, not traced, so that a compiled function draws alike each time
    returns  JAX array of the shape of x

    The derivative is that of the identity (straight through, also where a given amax saturates), none goes to amax.
    May be called inside jit, grad, jvp and vmap (there for each example as if alone). On concrete arrays it runs where
    x is, on a GPU by hqarray's kernels, and waits for them; inside jit it is a callback to the NumPy reference: x goes
    to the host and back. Inside shard_map each shard is quantized as if alone.
    Raises as hqarray.quantize does, when it is called or traced.
    """
    format = as_format(format)
    x = jnp.asarray(x)
    if amax is not None:
        amax = jnp.asarray(amax, jnp.float32)
        if amax.size != 1:
            raise ValueError(f"amax is one float32 (hq.amax(x) makes it), not of shape {amax.shape}")
        amax = amax.reshape(1)
    if isinstance(seed, jax.Array):
        raise TypeError("seed is an integer here, which is fixed when a function is traced, not a JAX array")
    whole = None if amax is None else 1.0
    # raises what a callback would hide
    ops.fake_quantize(np.zeros((0,) * x.ndim, x.dtype), format, amax=whole, seed=seed)
    return _fake(format, seed, x, amax)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _fake(format: Format, seed: int | None, x: Any, amax: Any) -> Any:
    given = (x,) if amax is None else (x, amax)
    if all(not isinstance(array, jax.core.Tracer) and len(array.devices()) == 1 for array in given):
        return _at_once(format, seed, *(dlpack.from_dlpack(array).array for array in given))
    _worker()
    result = jax.ShapeDtypeStruct(x.shape, ops.nominal_dtype(np.dtype(x.dtype)))
    return jax.pure_callback(partial(_on_host, format, seed), result, *given, vmap_method="sequential")


@_fake.defjvp  # type: ignore[untyped-decorator,unused-ignore]
def _straight_through(
    format: Format, seed: int | None, primals: tuple[Any, Any], tangents: tuple[Any, Any]
) -> tuple[Any, Any]:
    y = _fake(format, seed, *primals)
    return y, tangents[0].astype(y.dtype)


def _at_once(format: Format, seed: int | None, values: Array, amax: Array | None = None) -> Any:
    y = ops.fake_quantize(values, format, amax=amax, seed=seed)
    if not isinstance(values, np.ndarray):  # XLA may reuse the memory of x once it is freed, whatever CuPy still reads
        with values.device:
            namespace(values).cuda.get_current_stream().synchronize()
    return _as_jax(Typed(y))


@cache
def _worker() -> ThreadPoolExecutor:
    """One thread that rounds as the caller's does: XLA's own, which run callbacks, flush subnormals."""
    pool = ThreadPoolExecutor(1, "hqarray")
    pool.submit(int).result()  # a thread takes over how its maker rounds: it must be made now
    return pool


def _on_host(format: Format, seed: int | None, values: Any, amax: Any = None) -> Any:
    whole = None if amax is None else np.asarray(amax)
    return _worker().submit(ops.fake_quantize, np.asarray(values), format, amax=whole, seed=seed).result()


__all__ = ["JaxPair", "JaxPart", "fake_quantize", "from_jax", "to_jax"]
