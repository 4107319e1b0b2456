"""Containers: QuantizedArray, one part; HybridArray, one matrix in up to two parts. No numerics.

A container is frozen (no rebinding) and compares by identity; its buffers are mutable. Methods that compute
import the public functions of ops inside: the one upward edge of the package.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from types import NoneType
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np

from .buffers import Packed, Separate
from .display import Picture, html_card, sample_scales
from .dlpack import Typed, from_dlpack
from .formats import BFLOAT16, Format, as_format
from .layout import Array, namespace, part_layout

Direction: TypeAlias = Literal["rowwise", "columnwise"]

DIRECTIONS: tuple[Direction, Direction] = ("rowwise", "columnwise")

PICKLE_VERSION = 1

FLOAT32: np.dtype[Any] = np.dtype(np.float32)

NOMINAL = (FLOAT32, np.dtype(np.float16), BFLOAT16)
"""Dtypes an array may stand for."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class QuantizedArray:
    """One part: a K-major matrix (outer, k) in one format, its blocks along the last axis.

    codes         uint8 (outer, k), FP4 (outer, ceil(k / 2)), or the values where the format keeps them
    scales        float32 or uint8 (E8M0, E4M3 bits), logical shape: format.storage.num_scales(shape)
    global_scale  float32 (1,) where the format has one, (outer,) where it has one a row, else None
    amax          float32 (1,), the measured or given amax; None where none is. Decoding never reads it.
    shape         (outer, k); the columnwise part of X has the shape of X.T
    """

    format: Format
    shape: tuple[int, int]
    buffers: Packed | Separate

    @classmethod
    def from_buffers(
        cls, codes: Any, scales: Any, format: Format | str, shape: tuple[int, int], *, global_scale: Any = None,
    ) -> QuantizedArray:
        """Somebody else's bytes as a part, without a copy: NumPy's, CuPy's, or anything's with DLPack.

        codes (outer, k) or FP4 (outer, ceil(k / 2)), uint8 or the float8 type itself (or the values of an
        unquantized format), last axis contiguous; scales of the logical shape, any strides; global_scale one float32,
        or of formats with one a row (outer,).
        Raises ValueError for a wrong shape, TypeError for a wrong dtype.
        """
        format = as_format(format)
        storage = format.storage
        outer, k = (int(n) for n in shape)
        layout = part_layout(storage, (outer, k))
        itemsize = storage.element.dtype.itemsize
        codes = _expect_dtype("codes", from_dlpack(codes), storage.element.dtype, storage.element.dtype_name, format)
        _expect_shape("codes", codes, (outer, layout.codes.columns), format, (outer, k))
        if codes.size and codes.strides[-1] != itemsize:
            raise ValueError(
                f"codes must be contiguous along the last axis, their strides are {codes.strides}; pass a copy"
            )
        if scales is None:
            if storage.scale != "none":
                raise ValueError(f"{format.name} needs scales of shape {layout.num_scales}, scales is None")
            scales = codes[:0, :0].view(np.uint8)
        scales = _expect_dtype("scales", from_dlpack(scales), layout.scales_dtype, storage.scale_dtype_name, format)
        if storage.scale != "none" and storage.block is None and scales.size == 1:
            scales = scales.reshape(1, 1)
        _expect_shape("scales", scales, layout.num_scales, format, (outer, k))
        if storage.global_scale != (global_scale is not None):
            each = "one float32 for each row" if storage.global_per_row else "one float32"
            needs = f"needs a global_scale ({each})" if storage.global_scale else "has no global_scale"
            raise ValueError(f"{format.name} {needs}")
        if global_scale is not None:
            global_scale = from_dlpack(global_scale).array
            count = layout.num_global_scales
            if global_scale.dtype != np.float32 or global_scale.size != count:
                wanted = f"{count} float32, one for each row" if storage.global_per_row else "one float32"
                raise TypeError(f"global_scale is {wanted}, not {global_scale.dtype} {global_scale.shape}")
            global_scale = global_scale.reshape(count)
        return cls(format, (outer, k), Separate(codes, scales, global_scale))

    @property
    def codes(self) -> Array:
        return self.buffers.codes

    @property
    def scales(self) -> Array:
        return self.buffers.scales

    @property
    def global_scale(self) -> Array | None:
        return self.buffers.global_scale

    @property
    def amax(self) -> Array | None:
        return self.buffers.amax

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.buffers.nbytes

    @property
    def device(self) -> Any:
        """The CuPy device of CuPy buffers; "cpu" for NumPy's."""
        return self.buffers.device

    @property
    def ordinal(self) -> int:
        """The CUDA device that holds the buffers; -1 for the host."""
        return self.buffers.ordinal

    def copy(self) -> QuantizedArray:
        return QuantizedArray(self.format, self.shape, self.buffers.copy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise TypeError("a part is codes and scales; HybridArray(rowwise=part).dequantize() gives the values")

    def packed(self) -> QuantizedArray:
        """This part in the library's own layout, zero-padded: itself where it already is, else a copy."""
        if isinstance(self.buffers, Packed):
            return self
        part = zeros_part(self.format, self.shape, namespace(self.codes), has_amax=self.amax is not None)
        for target, source in (
            (part.codes, self.codes), (part.scales, self.scales),
            (part.global_scale, self.global_scale), (part.amax, self.amax),
        ):
            if target is not None:
                target[...] = source
        if self.format.storage.element.stored_bits == 4 and self.shape[1] % 2:
            part.codes[:, -1] &= 0x0F  # the nibble behind an odd k is code padding
        return part

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = (self.codes, self.scales, self.global_scale, self.amax)
        return _unpickle_part, (PICKLE_VERSION, self.format.name, self.shape, *(_dense(array) for array in arrays))

    def __repr__(self) -> str:
        where = f"{describe_device(self.device)}, {describe_bytes(self.nbytes)}"
        return f"QuantizedArray({self.shape} {self.format.name}, {where})"

    def _repr_html_(self) -> str:
        facts = [
            ("shape", str(self.shape)), ("part", _part_fact(self)), ("engine", engine_fact(self)),
            ("device", describe_device(self.device)),
        ]
        return html_card("QuantizedArray", facts, [picture_of("scales", self)])


_PART = (QuantizedArray, NoneType)


def zeros_part(
    format: Format, shape: tuple[int, int], module: Any = np, *, has_amax: bool | None = None
) -> QuantizedArray:
    """A part of zero bytes in one allocation; module is numpy or cupy."""
    layout = part_layout(format.storage, shape)
    base = module.zeros(layout.nbytes, np.uint8)
    has_amax = format.measures_amax if has_amax is None else has_amax
    return QuantizedArray(format, shape, Packed.of(base, layout, format.storage.global_scale, has_amax))


def _dense(array: Array | None) -> Array | None:
    return None if array is None else array.copy()


def _unpickle_part(version: int, name: str, shape: tuple[int, int], *arrays: Array) -> QuantizedArray:
    if version > PICKLE_VERSION:
        raise ValueError(f"this part was pickled by a newer hqarray (pickle version {version} > {PICKLE_VERSION})")
    return QuantizedArray(as_format(name), shape, Separate(*arrays)).packed()


def _expect_dtype(what: str, given: Typed, dtype: np.dtype[Any], typed: str, format: Format) -> Array:
    """The array as dtype; bytes may come under the name of what they encode, of nothing else."""
    array, name = given.array, given.name.removesuffix("_x2")  # torch's name of two FP4 codes a byte
    if array.dtype == dtype and name in (dtype.name, typed):
        return array
    if name == typed != dtype.name:
        return array.view(dtype)
    expected = dtype.name if typed == dtype.name else f"{dtype.name} or {typed}"
    there = given.name if array.dtype.isnative else f"{array.dtype.str}, in another byte order"
    raise TypeError(f"{what} of {format.name} are {expected}, these are {there}")


def _expect_shape(what: str, array: Array, expected: tuple[int, ...], format: Format, shape: tuple[int, int]) -> None:
    if array.shape != expected:
        raise ValueError(f"{what} of a {shape} part in {format.name} have shape {expected}, these have {array.shape}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class HybridArray:
    """One logical matrix in up to two parts, each in its own format.

    rowwise    blocks along the last axis of X; read by `X @ b`
    columnwise the rowwise part of X.T; read by `a @ X`
    shape      X's; the parts are over its 2-D view (prod(shape[:-1]), shape[-1])
    dtype      nominal dtype, what dequantize and @ return by default: float32, float16 or bfloat16
    derived    the part that was quantized from what the other one decodes to; None where both read X

    Equality is identity and instances are hashable: two arrays are compared part by part, byte by byte, with
    hqarray.testing.assert_bitwise_equal. NumPy's matmul works on both sides; every other NumPy function
    raises a TypeError that names dequantize().

        X == dequantize(rowwise) ~ dequantize(columnwise).T
    """

    rowwise: QuantizedArray | None = None
    columnwise: QuantizedArray | None = None
    shape: tuple[int, ...] = None  # type: ignore[assignment]
    dtype: np.dtype[Any] = FLOAT32
    derived: Direction | None = None

    def __post_init__(self) -> None:
        rows, columns = self.rowwise, self.columnwise
        if rows is None and columns is None:
            raise ValueError("a HybridArray holds at least one part; pass rowwise= or columnwise=")
        given: tuple[Any, Any] = (rows, columns)
        if not (isinstance(given[0], _PART) and isinstance(given[1], _PART)):
            name, part = next((n, p) for n, p in zip(DIRECTIONS, given, strict=True) if not isinstance(p, _PART))
            raise TypeError(f"{name} is a QuantizedArray, not {type(part).__name__}; quantize(x, {name}=...) makes one")
        if rows is not None and columns is not None and rows.ordinal != columns.ordinal:
            places = f"rowwise on {describe_device(rows.device)} and columnwise on {describe_device(columns.device)}"
            raise ValueError(f"both parts of a HybridArray lie on one device, not {places}; move one")
        matrix = rows.shape if rows is not None else columns.shape[::-1]  # type: ignore[union-attr]
        if columns is not None and columns.shape != matrix[::-1]:
            raise ValueError(
                f"columnwise is the rowwise part of X.T: beside rowwise {matrix} it must be {matrix[::-1]}, "
                f"not {columns.shape}"
            )
        if self.derived is not None and (self.derived not in DIRECTIONS or getattr(self, self.derived) is None):
            raise ValueError(f"derived={self.derived!r} is not the name of a part that is there")
        dtype: Any = self.dtype
        if not isinstance(dtype, np.dtype):
            object.__setattr__(self, "dtype", np.dtype(dtype))
        if self.dtype not in NOMINAL:
            raise TypeError(f"the nominal dtype is float32, float16 or bfloat16, not {self.dtype}")
        if self.shape == matrix:
            return
        shape = matrix if self.shape is None else tuple(operator.index(n) for n in self.shape)
        if not shape or min(shape) < 0 or (prod(shape[:-1]), shape[-1]) != matrix:
            raise ValueError(f"shape {shape} does not flatten to the parts' matrix {matrix}")
        object.__setattr__(self, "shape", shape)

    # --- facts ---

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes held by both parts, padding included."""
        return sum(part.nbytes for _, part in self.parts())

    @property
    def device(self) -> Any:
        return next(self.parts())[1].device

    @property
    def columnwise_source(self) -> str:
        """What columns were quantized from: "original", or "rowwise_dequantized" for what the rows became."""
        return "rowwise_dequantized" if self.derived == "columnwise" else "original"

    def parts(self) -> Iterator[tuple[Direction, QuantizedArray]]:
        """The parts that are there, with their names."""
        if self.rowwise is not None:
            yield "rowwise", self.rowwise
        if self.columnwise is not None:
            yield "columnwise", self.columnwise

    def part(self, direction: Direction, wanted_by: str = "this call") -> QuantizedArray:
        """The part of that name. Raises ValueError where it is missing, saying which are there."""
        part = self.rowwise if direction == "rowwise" else self.columnwise
        if part is None:
            other, there = next(self.parts())
            raise ValueError(
                f"{wanted_by} needs the {direction} part, but this HybridArray {self.shape} holds only "
                f"{other} ({there.format.name}); quantize with {direction}=... or use .T"
            )
        return part

    # --- same buffers, another view ---

    @property
    def T(self) -> HybridArray:
        """X.T: the two parts change places; no data moves. Needs 2-D."""
        if self.ndim != 2:
            raise ValueError(f".T needs 2-D, this HybridArray is {self.shape}; reshape(-1, {self.shape[-1]}) first")
        turned: dict[Direction | None, Direction | None] = {"rowwise": "columnwise", "columnwise": "rowwise"}
        return HybridArray(self.columnwise, self.rowwise, self.shape[::-1], self.dtype, turned.get(self.derived))

    def reshape(self, *shape: Any) -> HybridArray:
        """Regroup the leading axes; the last one, along which rowwise blocks run, must stay."""
        given = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        sizes = [operator.index(n) for n in given]
        if sizes.count(-1) > 1 or min(sizes, default=0) < -1:
            raise ValueError(f"reshape to {given}: sizes are 0 or more, one of them may be -1")
        if -1 in sizes:
            known = prod(n for n in sizes if n != -1)
            rest = prod(self.shape[:-1]) if not known else self.size // known if self.size % known == 0 else -1
            sizes[sizes.index(-1)] = rest
        if min(sizes, default=-1) < 0 or prod(sizes) != self.size:
            raise ValueError(f"reshape of {self.shape} to {given}: {self.size} elements do not fill that shape")
        if sizes[-1] != self.shape[-1]:
            raise ValueError(
                f"reshape of {self.shape} to {given} must keep the last axis ({self.shape[-1]}), which "
                f"the blocks run along; use reshape(..., {self.shape[-1]}), or dequantize() first"
            )
        return HybridArray(self.rowwise, self.columnwise, tuple(sizes), self.dtype, self.derived)

    def drop(self, *, rowwise: bool = False, columnwise: bool = False) -> HybridArray:
        """Without the named part; its memory is freed with the last array that holds it.

        Raises ValueError, and changes nothing, when the part is not there or it is the last.
        """
        dropped = [name for name, wanted in zip(DIRECTIONS, (rowwise, columnwise), strict=True) if wanted]
        for direction in dropped:
            if getattr(self, direction) is None:
                there, part = next(self.parts())
                raise ValueError(
                    f"drop({direction}=True): this HybridArray {self.shape} has no {direction} part, only {there} "
                    f"({part.format.name})"
                )
        kept = {direction: part for direction, part in self.parts() if direction not in dropped}
        if not kept:
            raise ValueError(f"drop({', '.join(dropped)}) would leave no part in this HybridArray {self.shape}")
        derived = self.derived if self.derived in kept else None
        return HybridArray(kept.get("rowwise"), kept.get("columnwise"), self.shape, self.dtype, derived)

    def copy(self) -> HybridArray:
        """Same values in buffers of its own."""
        rows, columns = (None if part is None else part.copy() for part in (self.rowwise, self.columnwise))
        return HybridArray(rows, columns, self.shape, self.dtype, self.derived)

    # --- operations ---

    def dequantize(self, *, source: Direction | None = None, dtype: Any = None) -> Array:
        """The values, decoded. See hqarray.dequantize."""
        return _ops().dequantize(self, source=source, dtype=dtype)

    def with_columnwise(self, format: Format | str | None = None, *, seed: Any = None) -> HybridArray:
        """This array with a columnwise part made from its rows. See hqarray.with_columnwise."""
        array: HybridArray = _ops().with_columnwise(self, format, seed=seed)
        return array

    def __matmul__(self, other: Any) -> Array:
        return _ops().matmul(self, other) if _is_operand(other) else NotImplemented

    def __rmatmul__(self, other: Any) -> Array:
        return _ops().matmul(other, self) if _is_operand(other) else NotImplemented

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> NoReturn:
        raise TypeError("a HybridArray has no elements to iterate over; use .dequantize()")

    def __bool__(self) -> NoReturn:
        raise TypeError("the truth value of a HybridArray is not defined; use .dequantize()")

    # --- NumPy protocols ---

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.device != "cpu":
            raise TypeError("this HybridArray is on a GPU; use .dequantize() and cupy.asnumpy()")
        if copy is False:
            raise ValueError("a HybridArray becomes a NumPy array only by decoding, which copies; use .dequantize()")
        values: np.ndarray[Any, Any] = self.dequantize()
        return values if dtype is None else values.astype(dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Array:
        if getattr(ufunc, "__name__", "") != "matmul" or method != "__call__":
            raise TypeError(_undefined(f"ufunc {getattr(ufunc, '__name__', ufunc)}"))
        if options:
            raise TypeError(f"matmul of quantized arrays takes no {', '.join(options)}; hqarray.matmul has options")
        return _ops().matmul(*inputs, out=out[0] if isinstance(out, tuple) else out)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.shape:
            return self.shape
        if function is np.ndim:
            return self.ndim
        if function is np.size and len(args) + len(kwargs) == 1:
            return self.size
        raise TypeError(_undefined(f"numpy.{getattr(function, '__name__', function)}"))

    # --- pickle and display ---

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self.rowwise, self.columnwise)
        return _unpickle_hybrid, (PICKLE_VERSION, *parts, self.shape, self.dtype.name, self.derived)

    def __repr__(self) -> str:
        parts = "".join(f", {direction}={part.format.name}" for direction, part in self.parts())
        source = f", {self.derived} derived" if self.derived else ""
        return (
            f"HybridArray({self.shape} {self.dtype.name}{parts}{source}, {describe_device(self.device)}, "
            f"{describe_bytes(self.nbytes)})"
        )

    def _repr_html_(self) -> str:
        facts = [("shape", str(self.shape)), ("dtype", self.dtype.name)]
        facts += [(direction, _part_fact(part)) for direction, part in self.parts()]
        facts += [("columnwise source", self.columnwise_source)] if self.columnwise is not None else []
        facts += [*engine_facts(self.parts()), ("device", describe_device(self.device))]
        pictures = [picture_of(f"{direction} scales", part) for direction, part in self.parts()]
        return html_card("HybridArray", [*facts, ("bytes", describe_bytes(self.nbytes))], pictures)


def _unpickle_hybrid(
    version: int, rowwise: QuantizedArray | None, columnwise: QuantizedArray | None, shape: tuple[int, ...],
    dtype: str, derived: Direction | None,
) -> HybridArray:
    if version > PICKLE_VERSION:
        raise ValueError(f"this array was pickled by a newer hqarray (pickle version {version} > {PICKLE_VERSION})")
    from .formats import ELEMENTS

    return HybridArray(rowwise, columnwise, shape, ELEMENTS[dtype].dtype, derived)


def _is_operand(x: Any) -> bool:
    """Whether matmul answers for x, if only with an error that says what to do; else Python asks x."""
    return isinstance(x, (HybridArray, QuantizedArray, list, tuple, int, float, str)) or hasattr(x, "__dlpack__")


@cache
def _ops() -> Any:
    """The public functions; an import statement takes a microsecond, a tenth of a product's time on the host."""
    from . import ops

    return ops


def _undefined(what: str) -> str:
    return f"{what} is not defined on quantized arrays; use .dequantize() to get the values (matmul and @ are defined)"


def describe_device(device: Any) -> str:
    return device if isinstance(device, str) else f"cuda:{device.id}"


def describe_bytes(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def engine_fact(part: Any) -> str:
    """What multiplies two parts like this one (or a group of them), and why."""
    try:
        return str(_ops().engine_of_likes(part.format.storage, part.ordinal))
    except ImportError as error:
        return f"not known: {error}"


def _part_fact(part: QuantizedArray) -> str:
    num_scales = part.format.storage.num_scales(part.shape)
    scales = f", scales {num_scales} {part.format.storage.scale}" if num_scales != (0, 0) else ""
    return f"{part.format.name} {part.shape}{scales}, {describe_bytes(part.nbytes)}"


def engine_facts(parts: Iterable[tuple[Direction, Any]]) -> list[tuple[str, str]]:
    """A row for each engine of the parts, one where they agree."""
    engines: dict[str, list[str]] = {}
    for name, part in parts:
        engines.setdefault(engine_fact(part), []).append(name)
    return [("engine" if len(engines) == 1 else f"engine, {' and '.join(who)}", what) for what, who in engines.items()]


def picture_of(name: str, part: QuantizedArray) -> Picture:
    """A picture of a sample of a part's scales, which waits for the device."""
    if part.format.storage.scale == "none":
        return Picture(name, ())
    return Picture(name, (sample_scales(part.scales, part.format.storage, part.global_scale),))
