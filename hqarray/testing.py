"""Assertions and case generators: what hqarray's own tests use, and those of a user's formats and kernels.

    import hqarray as hq
    from hqarray import testing
    x = testing.matrix("wide", (65, 130))
    testing.assert_in_rounding_cell(x, hq.quantize(x, rowwise="mxfp8", columnwise="nvfp4"))

Everything is NumPy: assertions copy GPU arrays to the host, generators yield host arrays that a test converts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import hadamard
from .arrays import HybridArray, QuantizedArray
from .buffers import Packed
from .formats import ELEMENTS, Element, scale_values
from .layout import Array, namespace, unpack_nibbles
from .reference import dequantize_part

Doubles: TypeAlias = npt.NDArray[np.float64]

Shape: TypeAlias = tuple[int, ...]

FLOAT32_TOLERANCE = 2.0**-20
"""Relative: a fp32 scale and the fp32 factor that encoded with it are reciprocal but for a few roundings."""


def _host(array: Array) -> npt.NDArray[Any]:
    host: npt.NDArray[Any] = array.get() if hasattr(array, "get") else np.asarray(array)
    return host


# --- equality of bits ---------------------------------------------------------------------------


def assert_bitwise_equal(actual: Any, expected: Any, *, name: str = "") -> None:
    """Two arrays, QuantizedArrays or HybridArrays hold the same bytes: -0 is not 0, a NaN equals its own bits.

    name     what the message calls them
    Padding and layout do not count. Raises AssertionError with the part, the first coordinate that differs, both
    values in hexadecimal, and how many differ; TypeError for two different kinds of array, and for objects.
    """
    if isinstance(actual, HybridArray) and isinstance(expected, HybridArray):
        for fact in ("shape", "dtype", "derived"):
            _assert_fact(name or "HybridArray", fact, getattr(actual, fact), getattr(expected, fact))
        there, wanted = dict(actual.parts()), dict(expected.parts())
        _assert_fact(name or "HybridArray", "parts", list(there), list(wanted))
        for direction, part in there.items():
            assert_bitwise_equal(part, wanted[direction], name=_join(name, direction))
    elif isinstance(actual, QuantizedArray) and isinstance(expected, QuantizedArray):
        for fact in ("format", "shape"):
            _assert_fact(name or "QuantizedArray", fact, getattr(actual, fact), getattr(expected, fact))
        for field in ("codes", "scales", "global_scale", "amax"):
            ours, theirs = getattr(actual, field), getattr(expected, field)
            if ours is None or theirs is None:
                _assert_fact(name or "QuantizedArray", f"{field} is None", ours is None, theirs is None)
            else:
                packed = field == "codes" and actual.format.storage.element.stored_bits == 4
                _assert_same_bytes(_host(ours), _host(theirs), _join(name, field), 2 if packed else 1)
    elif hasattr(actual, "dtype") and hasattr(expected, "dtype") and not _quantized(actual, expected):
        _assert_same_bytes(_host(actual), _host(expected), name or "array", 1)
    else:
        raise TypeError(f"cannot compare {type(actual).__name__} with {type(expected).__name__} bit by bit")


def _quantized(*arrays: Any) -> bool:
    return any(isinstance(array, (QuantizedArray, HybridArray)) for array in arrays)


def _join(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field


def _assert_fact(name: str, fact: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise AssertionError(f"{name}: {fact} is {actual}, expected {expected}")


def _assert_same_bytes(actual: npt.NDArray[Any], expected: npt.NDArray[Any], name: str, codes_per_byte: int) -> None:
    _assert_fact(name, "dtype", actual.dtype, expected.dtype)
    _assert_fact(name, "shape", actual.shape, expected.shape)
    if actual.dtype.hasobject:
        raise TypeError(f"{name} has dtype {actual.dtype}, whose bytes are addresses; compare arrays of numbers")
    words = np.dtype(f"u{actual.itemsize}" if actual.itemsize in (1, 2, 4, 8) else f"V{actual.itemsize}")
    ours, theirs = (np.ascontiguousarray(array).view(words).reshape(array.shape) for array in (actual, expected))
    differ = np.argwhere(ours != theirs)
    if not len(differ):
        return
    at = tuple(int(i) for i in differ[0])
    elements = f", elements {at[1] * 2} and {at[1] * 2 + 1} of row {at[0]}" if codes_per_byte == 2 else ""
    decoded = f" ({actual[at]!s} for {expected[at]!s})" if actual.dtype != np.uint8 else ""
    found, wanted = (f"0x{int.from_bytes(word[at].tobytes(), sys.byteorder):0{2 * actual.itemsize}X}"
                     for word in (ours, theirs))
    raise AssertionError(
        f"{name}[{', '.join(map(str, at))}]{elements}: {found}, expected {wanted}{decoded}; "
        f"{len(differ)} of {actual.size} differ"
    )


# --- rounding -----------------------------------------------------------------------------------


def assert_in_rounding_cell(values: Array, quantized: HybridArray | QuantizedArray) -> None:
    """Every element is a nearest neighbour of its value on its scaled grid: an oracle in float64.

    values     what was quantized, (..., k), in its shape; for a QuantizedArray its (outer, k) matrix
    quantized  a part, or a HybridArray, whose columnwise part is held against values.T (against what the other
               part decodes to where it was derived from it)

    Takes the stored scales as they are and asks of each code: the value lies between the midpoints to both
    neighbours, beyond the last one it saturates; with power-of-two scales a tie has the even code; the sign is
    kept, of zeros too; a NaN is nan_code, or its block's scale is NaN and its codes 0; nothing else is NaN. Stochastic
    formats round to either neighbour of a value, which so lies between those of its code. fp32 scales leave
    FLOAT32_TOLERANCE around a midpoint, and rotated values what rounds them to bfloat16; their signs may differ where
    they are as small as that. Raises AssertionError with the element and its cell.
    """
    if isinstance(quantized, HybridArray):
        host = _host(values)
        _assert_fact("values", "shape", host.shape, quantized.shape)
        matrix = host.reshape(prod(quantized.shape[:-1]), quantized.shape[-1])
        for direction, part in quantized.parts():
            source = matrix if direction == "rowwise" else matrix.T
            if direction == quantized.derived:
                other = quantized.part("columnwise" if direction == "rowwise" else "rowwise")
                source = dequantize_part(other, np.dtype(np.float32)).T
            _assert_part_in_cells(source, part, direction)
    else:
        _assert_part_in_cells(_host(values), quantized, "part")


def _assert_part_in_cells(values: npt.NDArray[Any], part: QuantizedArray, name: str) -> None:
    _assert_fact(name, "shape of the values", values.shape, part.shape)
    with np.errstate(all="ignore"):
        exact = values.astype(np.float32).astype(np.float64)
        rounded = np.zeros(())
        if part.format.storage.rht:
            exact, rounded = _rotated(exact)
        if part.format.storage.scale == "none":
            right, cell = _nearest_wide(exact, _host(part.codes))
        else:
            right, cell = _nearest_code(exact, part, rounded)
    if right.all():
        return
    at = tuple(int(i) for i in np.argwhere(~right)[0])
    raise AssertionError(
        f"{name}[{at[0]}, {at[1]}]: {exact[at]!r} is not in the rounding cell of {cell(at)} in {part.format.name}; "
        f"{np.count_nonzero(~right)} of {right.size} elements are not"
    )


Verdict: TypeAlias = tuple[npt.NDArray[np.bool_], Callable[[tuple[int, ...]], str]]


def _rotated(exact: Doubles) -> tuple[Doubles, Doubles]:
    """Values after the transform of hadamard.py by its matrix, and how far bfloat16 and float32 sums may move them."""
    size, k = hadamard.SIZE, exact.shape[1]
    index = np.arange(size)
    signs = (-1.0) ** np.bitwise_count(index[:, None] & index[None, :])
    matrix = np.array(hadamard.SIGNS)[:, None] * signs / 4
    whole = exact[:, : k // size * size].reshape(len(exact), k // size, size)
    rotated, magnitude = exact.copy(), np.abs(exact)
    rotated[:, : whole.shape[1] * size] = (whole @ matrix).reshape(len(exact), k // size * size)
    magnitude[:, : whole.shape[1] * size] = (
        np.abs(whole) @ np.abs(matrix)
    ).reshape(len(exact), k // size * size)
    rounded = np.abs(rotated) * 2.0**-8 + magnitude * 2.0**-21 + 2.0**-133
    return rotated, np.where(magnitude > np.finfo(np.float32).max, np.inf, rounded)  # sums may be anything there


def _nearest_code(exact: Doubles, part: QuantizedArray, rounded: Doubles) -> Verdict:
    storage = part.format.storage
    element = storage.element
    codes = _host(part.codes)
    codes = unpack_nibbles(codes, part.shape[1]) if element.stored_bits == 4 else codes
    scale, factor_limit = _scale_of_elements(part), 1 / float(np.finfo(np.float32).max)
    half = 1 << (element.bits - 1)
    magnitude, negative = codes & (half - 1), codes >= half
    grid = element.values[: element.max_code + 1].astype(np.float64)
    below = np.concatenate([[-np.inf], (grid[:-1] + grid[1:]) / 2])
    above = np.concatenate([below[1:], [np.inf]])
    if part.format.is_stochastic:  # anything between the neighbours
        below, above = (np.concatenate([[-np.inf], grid[:-1]]), np.concatenate([grid[1:], [np.inf]]))
    finite = np.minimum(magnitude, element.max_code)
    low, high, size = below[finite] * scale, above[finite] * scale, np.abs(exact)
    if storage.scale == "e8m0":
        even = magnitude % 2 == 0
        near = np.where(even, (low <= size) & (size <= high), (low < size) & (size < high))
    else:
        # below fp32's normal range the product of scales has lost bits of its own
        slack = FLOAT32_TOLERANCE + 2.0**-149 / np.maximum(scale, 2.0**-200)
        near = (low * (1 - slack) <= size + rounded) & (size - rounded <= high * (1 + slack))
        near |= scale < factor_limit  # the factor is capped at FLT_MAX; a zero scale decodes to zeros
    near |= np.isinf(size) & (magnitude == element.max_code)
    right = near & (magnitude <= element.max_code) & ((negative == np.signbit(exact)) | (size < rounded))
    nan = np.isnan(exact)
    if element.nan_code is not None:
        right = np.where(nan, codes == element.nan_code, right & ~np.isnan(scale))
    else:
        lost = nan | np.isinf(rounded)
        right = np.where(np.isnan(scale), (codes == 0) & _in_block_with_nan(lost, part), right & ~nan)
    right |= np.isinf(rounded)

    def cell(at: tuple[int, ...]) -> str:
        return f"code 0x{codes[at]:02X} ({element.values[codes[at]]} * {scale[at]}, from {low[at]} to {high[at]})"

    return right, cell


def _scale_of_elements(part: QuantizedArray) -> Doubles:
    """The real number that each element's code is multiplied by."""
    storage = part.format.storage
    stored = _host(part.scales)
    table = scale_values(storage.scale)
    scales = (stored if table is None else table[stored]).astype(np.float64)
    if part.global_scale is not None and scales.size:
        scales = scales * _host(part.global_scale).astype(np.float64).reshape(-1, 1)
    if storage.block is None:
        return np.broadcast_to(scales, part.shape)
    rows, columns = (np.arange(n) // b for n, b in zip(part.shape, storage.block, strict=True))
    return scales[np.ix_(rows, columns)]


def _in_block_with_nan(nan: npt.NDArray[np.bool_], part: QuantizedArray) -> npt.NDArray[np.bool_]:
    block = part.format.amax_block
    assert block is not None
    rows, columns = (np.arange(n) // b for n, b in zip(part.shape, block, strict=True))
    found = np.zeros((rows.max(initial=0) + 1, columns.max(initial=0) + 1), bool)
    np.logical_or.at(found, (rows[:, None], columns[None, :]), nan)
    return found[np.ix_(rows, columns)]


def _nearest_wide(exact: Doubles, stored: npt.NDArray[Any]) -> Verdict:
    element = next(e for e in ELEMENTS.values() if e.bits > 8 and e.dtype == stored.dtype)
    kept = stored.astype(np.float64)
    infinite = np.array(np.inf, stored.dtype)
    low, high = (_finite(np.nextafter(stored, side), element) for side in (-infinite, infinite))
    kept_finite = _finite(stored, element)
    even = stored.view(f"u{stored.itemsize}") % 2 == 0
    below = np.where(kept == -np.inf, kept, (low + kept_finite) / 2)
    above = np.where(kept == np.inf, kept, (high + kept_finite) / 2)
    near = np.where(even, (below <= exact) & (exact <= above), (below < exact) & (exact < above))
    right = near & (np.signbit(exact) == np.signbit(kept))
    right = np.where(np.isnan(exact), np.isnan(kept), right & ~np.isnan(kept))

    def cell(at: tuple[int, ...]) -> str:
        return f"{kept[at]} (from {below[at]} to {above[at]})"

    return right, cell


def _finite(stored: npt.NDArray[Any], element: Element) -> Doubles:
    """Values in float64, infinity as the number the next binade would begin with."""
    beyond = 2.0 ** (element.max_exponent + 1)
    finite: Doubles = np.clip(stored.astype(np.float64), -beyond, beyond)
    return finite


# --- padding and poison -------------------------------------------------------------------------


def assert_code_padding_is_zero(part: QuantizedArray) -> None:
    """The invariant that a GEMM may contract over: code padding, an odd k's last high nibble included, is zero."""
    assert isinstance(part.buffers, Packed), "only a part in the library's own layout has code padding"
    outer, k = part.shape
    padding = _host(part.buffers.padded_codes).copy()
    storage = part.format.storage
    if storage.element.stored_bits == 4 and k % 2:
        padding[:outer, k // 2] &= 0xF0
    padding[:outer, : k // 2 if storage.element.stored_bits == 4 else k] = 0
    dirty = np.argwhere(padding != 0)
    if len(dirty):
        at = tuple(int(i) for i in dirty[0])
        raise AssertionError(f"code padding of {part!r} at {at} is {padding[at]!r}, not 0; {len(dirty)} are not")


def poison(array: HybridArray | QuantizedArray, byte: int = 0xFF) -> None:
    """Overwrite all that quantizing must write, and all padding that may hold anything; code padding stays zero."""
    for part in (part for _, part in array.parts()) if isinstance(array, HybridArray) else (array,):
        if isinstance(part.buffers, Packed):
            layout = part.buffers.layout
            part.buffers.base[layout.codes.nbytes :] = byte
        for buffer in (part.codes, part.scales, part.global_scale, part.amax):
            if buffer is not None:
                filled = np.full(buffer.dtype.itemsize, byte, np.uint8).view(buffer.dtype)[0]
                buffer[...] = filled


# --- cases --------------------------------------------------------------------------------------

Maker: TypeAlias = Callable[[np.random.Generator, Shape], npt.NDArray[Any]]


def _gauss(rng: np.random.Generator, shape: Shape) -> npt.NDArray[Any]:
    return rng.standard_normal(shape)


def _wide(rng: np.random.Generator, shape: Shape) -> npt.NDArray[Any]:
    return rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))


def _zero_blocks(rng: np.random.Generator, shape: Shape) -> npt.NDArray[Any]:
    x = rng.standard_normal(shape)
    x[..., : shape[-1] // 2] = 0
    return x


def _zero_rows(rng: np.random.Generator, shape: Shape) -> npt.NDArray[Any]:
    x = rng.standard_normal(shape)
    x.reshape(-1, max(shape[-1], 1))[::2] = 0
    return x


def _ties(rng: np.random.Generator, shape: Shape) -> npt.NDArray[Any]:
    """Significands of 1 to 6 bits under block maxima that make every kind of scale a power of two."""
    odd = 2.0 * rng.integers(0, 32, shape) + 1
    x: npt.NDArray[Any] = odd * 2.0 ** rng.integers(-8, 0, shape) * rng.choice([-1.0, 1.0], shape)
    x[..., ::16] = 6.0 * 2.0 ** rng.integers(3, 5, x[..., ::16].shape)
    x.reshape(-1)[:1] = 2688.0
    return x


def _some(special: float) -> Maker:
    def make(rng: np.random.Generator, shape: Shape) -> npt.NDArray[Any]:
        x = rng.standard_normal(shape)
        x[rng.random(shape) < 0.02] = special
        x.reshape(-1)[-1:] = special
        return x

    return make


def _infinities(rng: np.random.Generator, shape: Shape) -> npt.NDArray[Any]:
    return np.copysign(_some(np.inf)(rng, shape), rng.standard_normal(shape))


MATRICES: dict[str, Maker] = {
    "gauss": _gauss,
    "wide": _wide,
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 2.0**-100,
    "tiny_wide": lambda rng, shape: _wide(rng, shape) * 2.0**-125,
    "huge": lambda rng, shape: rng.standard_normal(shape) * 2.0**90,
    "largest": lambda rng, shape: rng.choice([-1.0, 1.0], shape) * float(np.finfo(np.float32).max),
    "zero_blocks": _zero_blocks,
    "zero_rows": _zero_rows,
    "all_zero": lambda rng, shape: np.zeros(shape),
    "negative_zeros": lambda rng, shape: np.copysign(rng.integers(0, 2, shape), rng.standard_normal(shape)),
    "all_equal": lambda rng, shape: np.full(shape, 0.3),
    "powers_of_two": lambda rng, shape: 2.0 ** rng.integers(-20, 20, shape) * rng.choice([-1.0, 1.0], shape),
    "ties": _ties,
    "subnormals": lambda rng, shape: rng.integers(-200, 200, shape) * 2.0**-149,
    "infinities": _infinities,
    "nans": _some(np.nan),
    "all_nan": lambda rng, shape: np.full(shape, np.nan),
}
"""Named matrices: what quantizers got wrong somewhere. Make one with matrix(name, shape)."""

SHAPES: dict[str, Shape] = {
    "0_rows": (0, 48),
    "0_columns": (5, 0),
    "1_row": (1, 96),
    **{f"k={k}": (19, k) for k in (1, 15, 17, 31, 33, 127, 129)},
    "one_block_of_16": (1, 16),
    "one_block_of_32": (1, 32),
    "one_square": (128, 128),
    "ragged": (131, 259),
    "3-D": (3, 5, 34),
    "1-D": (37,),
}
"""Named shapes: empty, one block, and every kind of ragged tail."""

VIEWS: dict[str, Callable[[Array], Array]] = {
    "transposed": lambda x: x.T,
    "every_second_column": lambda x: x[:, ::2],
    "rows_reversed": lambda x: x[::-1],
    "columns_reversed": lambda x: x[:, ::-1],
    "offset": lambda x: x[1:, 3:],
    "fortran": lambda x: x.T.copy().T,
    "broadcast_row": lambda x: namespace(x).broadcast_to(x[:1], x.shape),
}
"""Named strided views of a 2-D array, NumPy's or CuPy's: each must quantize to the bytes of its contiguous copy."""


def matrix(name: str, shape: Shape, dtype: Any = np.float32, *, seed: int = 0) -> npt.NDArray[Any]:
    """The matrix of that name in MATRICES, the same for the same seed; what dtype cannot hold becomes Inf or 0."""
    if name not in MATRICES:
        raise ValueError(f"no matrix {name!r}; known: {', '.join(MATRICES)}")
    rng = np.random.default_rng([seed, *name.encode()])
    with np.errstate(all="ignore"):
        made: npt.NDArray[Any] = np.asarray(MATRICES[name](rng, shape)).astype(np.float32).astype(dtype)
    return made


__all__ = [
    "FLOAT32_TOLERANCE",
    "MATRICES",
    "SHAPES",
    "VIEWS",
    "assert_bitwise_equal",
    "assert_code_padding_is_zero",
    "assert_in_rounding_cell",
    "matrix",
    "poison",
]
