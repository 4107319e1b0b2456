"""Formats: what a stored code means, and how it was chosen.

A row of ELEMENTS gives codes their values, a row of FORMATS adds blocks, scales and the rule that makes
them. Everything else in the library reads the facts of a row and never asks which row it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .names import parse_fields, render, suggestion

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

Block: TypeAlias = tuple[int, int]
ScaleKind: TypeAlias = Literal["none", "float32", "e8m0", "e4m3"]


# --- elements -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Element:
    """A binary floating-point format of one stored number, sign bit first.

    specials: "none" (every code is finite), "nan" (the all-ones magnitude is NaN, no infinity) or "ieee".
    Sources: OCP MX v1.0 and OCP OFP8; bfloat16, float16 and float32 are the formats of unquantized parts.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Literal["none", "nan", "ieee"]

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def stored_bits(self) -> int:
        """Bits one code takes in memory: FP4 two a byte, FP6 one a byte."""
        return self.bits if self.bits in (4, 8, 16, 32) else 8

    @property
    def dtype(self) -> np.dtype[Any]:
        """What a code buffer holds: uint8, or the values themselves for 16- and 32-bit elements."""
        return np.dtype(np.uint8) if self.bits <= 8 else _WIDE_DTYPES[self.name]

    @property
    def dtype_name(self) -> str:
        """Name of the type in ml_dtypes, torch and JAX: float8_e4m3fn, float8_e5m2, float6_e2m3fn, bfloat16."""
        if self.bits > 8:
            return self.name
        return f"float{self.bits}_{self.name}{'' if self.specials == 'ieee' else 'fn'}"

    @property
    def significand_bits(self) -> int:
        return self.mantissa_bits + 1

    @property
    def nan_code(self) -> int | None:
        return None if self.specials == "none" else (1 << (self.bits - 1)) - 1

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        ones = (1 << (self.bits - 1)) - 1
        return ones - {"none": 0, "nan": 1, "ieee": 1 << self.mantissa_bits}[self.specials]

    @property
    def max(self) -> float:
        """Largest finite value: 448, 57344, 7.5, 28, 6."""
        return _magnitude(self, self.max_code)

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)), the emax of OCP MX: 8, 15, 2, 4, 2."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """Decode table: the float32 value of each of the 2**bits codes (elements of at most 8 bits)."""
        return _decode_table(self)


_WIDE_DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


def _magnitude(element: Element, code: int) -> float:
    exponent, mantissa = divmod(code, 1 << element.mantissa_bits)
    fraction = mantissa / (1 << element.mantissa_bits)
    if exponent == 0:
        return float(fraction * 2.0 ** (1 - element.bias))
    return float((1 + fraction) * 2.0 ** (exponent - element.bias))


@cache
def _decode_table(element: Element) -> npt.NDArray[np.float32]:
    if element.bits > 8:
        raise ValueError(f"{element.name} has {element.bits} bits; its codes are the values, there is no table")
    half = 1 << (element.bits - 1)
    values = [_magnitude(element, code) for code in range(half)]
    for code in range(element.max_code + 1, half):
        infinite = element.specials == "ieee" and code == element.max_code + 1
        values[code] = float("inf") if infinite else float("nan")
    table = np.array([*values, *(-value for value in values)], np.float32)
    table.setflags(write=False)
    return table


ELEMENTS: dict[str, Element] = {
    element.name: element
    for element in (
        Element("e4m3", 4, 3, 7, "nan"),
        Element("e5m2", 5, 2, 15, "ieee"),
        Element("e2m3", 2, 3, 1, "none"),
        Element("e3m2", 3, 2, 3, "none"),
        Element("e2m1", 2, 1, 1, "none"),
        Element("bfloat16", 8, 7, 127, "ieee"),
        Element("float16", 5, 10, 15, "ieee"),
        Element("float32", 8, 23, 127, "ieee"),
    )
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How one scale is stored.

    dtype_name  of its type in ml_dtypes, torch and JAX
    nan         what is stored where the scale is NaN
    """

    dtype_name: str
    nan: float | None


SCALES: dict[ScaleKind, Scale] = {
    "none": Scale("uint8", None),
    "float32": Scale("float32", float("nan")),
    "e8m0": Scale("float8_e8m0fnu", 0xFF),
    "e4m3": Scale("float8_e4m3fn", 0x7F),
}


@cache
def scale_values(kind: ScaleKind) -> npt.NDArray[np.float32] | None:
    """Decode table of byte scales; None for float32 scales, which are the values.

    E8M0 byte b is 2**(b - 127), byte 0 the subnormal 2**-127, byte 255 NaN (OCP MX v1.0).
    """
    if kind == "e4m3":
        return ELEMENTS["e4m3"].values
    if kind == "e8m0":
        table = np.array([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")], np.float32)
        table.setflags(write=False)
        return table
    return None


# --- scaling: how scales come from amax -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reciprocal:
    """encode = RN(max / amax), 1 where amax is 0, Inf or NaN, at most FLT_MAX; stored scale RN(1 / encode).

    pow2 clears the mantissa of encode; amax below epsilon counts as epsilon.
    """

    pow2: bool
    epsilon: float


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """E8M0 scale; "up": the smallest with amax / scale <= max; "floor", "even": OCP MX v1.0, torchao."""

    rounding: Literal["up", "floor", "even"]


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """E4M3 block scale under one fp32 global scale; the largest block scale is `bound`."""

    bound: float


Scaling: TypeAlias = Reciprocal | PowerOfTwo | TwoLevel | None


# --- formats ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Storage:
    """What a reader must know to decode a part. GEMM, engine choice and files look at nothing else.

    block: rows x columns that share one stored scale; None: one scale for the whole matrix, or none.
    pow2: block scales in float32 are powers of two, so that bfloat16 holds what they decode to.
    """

    element: Element
    block: Block | None
    scale: ScaleKind
    global_scale: bool = False
    rht: bool = False
    pow2: bool = False

    @property
    def scale_dtype_name(self) -> str:
        """Name of the type of one stored scale in ml_dtypes, torch and JAX."""
        return SCALES[self.scale].dtype_name

    @property
    def bf16_terms(self) -> int:
        """How many bf16 numbers hold a decoded element exactly, a scale of the whole matrix left aside: 1 or 3.

        A significand of up to 4 bits times a power of two or a 4-bit significand fits bf16's 8 bits; an arbitrary
        float32 (or float16) does not.
        """
        any_float32 = self.scale == "float32" and self.block is not None and not self.pow2
        return 3 if any_float32 or self.element.significand_bits > 8 else 1

    def num_scales(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Logical shape of the scales of an (outer, k) part."""
        if self.scale == "none":
            return (0, 0)
        if self.block is None:
            return (1, 1)
        return (-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))


class Format(ABC):
    """One row of the table: frozen, hashable, equal by value."""

    __slots__ = ()

    @property
    @abstractmethod
    def storage(self) -> Storage:
        """How a part of this format lies in memory."""

    @property
    @abstractmethod
    def scaling(self) -> Scaling:
        """How its scales come from amax; None where there are none."""

    @property
    def amax_block(self) -> Block | None:
        """Rows x columns over which one amax is taken; None: over the whole matrix."""
        return self.storage.block

    @property
    def measures_amax(self) -> bool:
        """Whether the amax of the whole matrix is needed before the first code."""
        return isinstance(self.scaling, TwoLevel) or (isinstance(self.scaling, Reciprocal) and self.amax_block is None)

    @property
    def transposable(self) -> bool:
        """Whether the columnwise part is the rowwise one with its codes moved: one scale or square blocks."""
        return (self.amax_block is None or self.amax_block[0] == self.amax_block[1]) and not self.storage.rht

    @property
    def name(self) -> str:
        """Short name, with the differing fields in brackets where no row is equal: mxfp8(rule=floor)."""
        return _name(self)

    def resolve(self, dtype: np.dtype[Any]) -> Format:
        """The format with what is taken from the input's dtype filled in."""
        return self


def _check(kind: str, field: str, value: object, allowed: Sequence[object]) -> None:
    if repr(value) not in map(repr, allowed):  # 1.0 equals 1 and True, and is neither
        raise ValueError(f"{kind}: {field}={value!r} is not one of {', '.join(map(repr, allowed))}")


def _elements(*bits: int) -> list[str]:
    return [element.name for element in ELEMENTS.values() if element.bits in bits]


def _check_reciprocal(format: FP8 | FP8Block) -> None:
    kind = type(format).__name__
    epsilon: Any = format.epsilon
    _check(kind, "pow2", format.pow2, (False, True))
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float, np.integer, np.floating)):
        raise TypeError(f"{kind}: epsilon={epsilon!r} is {type(epsilon).__name__}; give a number, such as 1e-6")
    if not 0 <= epsilon <= ELEMENTS["float32"].max:
        raise ValueError(f"{kind}: epsilon={epsilon!r} must be finite in float32 and not negative")
    object.__setattr__(format, "epsilon", float(epsilon))


@dataclass(frozen=True, slots=True)
class FP8(Format):
    """One fp32 scale for the whole matrix, from an amax measured or given (current, static, delayed scaling).

    Source: facts of TransformerEngine's current scaling; scale rule in Reciprocal.
    """

    element: str = "e4m3"
    pow2: bool = False
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check("FP8", "element", self.element, _elements(8))
        _check_reciprocal(self)

    @property
    def storage(self) -> Storage:
        return Storage(ELEMENTS[self.element], None, "float32")

    @property
    def scaling(self) -> Scaling:
        return Reciprocal(self.pow2, self.epsilon)


@dataclass(frozen=True, slots=True)
class FP8Block(Format):
    """One fp32 scale per 1x128 or 128x128 block; pow2 makes them powers of two, exact in bf16.

    Source: DeepSeek-V3's block scaling as TransformerEngine and cuBLASLt (VEC128, BLK128x128) have it.
    """

    element: str = "e4m3"
    block: Block = (1, 128)
    pow2: bool = False
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        _check("FP8Block", "element", self.element, _elements(8))
        _check("FP8Block", "block", self.block, ((1, 128), (128, 128)))
        _check_reciprocal(self)

    @property
    def storage(self) -> Storage:
        return Storage(ELEMENTS[self.element], self.block, "float32", pow2=self.pow2)

    @property
    def scaling(self) -> Scaling:
        return Reciprocal(self.pow2, self.epsilon)


@dataclass(frozen=True, slots=True)
class MX(Format):
    """OCP Microscaling: one E8M0 scale per 32 elements along the row. Rules: PowerOfTwo."""

    element: str = "e4m3"
    rule: Literal["up", "floor", "even"] = "up"

    def __post_init__(self) -> None:
        _check("MX", "element", self.element, _elements(4, 6, 8))
        _check("MX", "rule", self.rule, ("up", "floor", "even"))

    @property
    def storage(self) -> Storage:
        return Storage(ELEMENTS[self.element], (1, 32), "e8m0")

    @property
    def scaling(self) -> Scaling:
        return PowerOfTwo(self.rule)


@dataclass(frozen=True, slots=True)
class NVFP4(Format):
    """E2M1 with an E4M3 scale per 16 elements and one fp32 scale for the matrix.

    block (16, 16) takes one amax per square, so rows and columns hold the same values; its scales are stored
    once for each of the 16 rows, as a reader of 1x16 blocks expects them. Source: arXiv 2509.25149 and
    TransformerEngine's order of operations.
    """

    block: Block = (1, 16)
    rht: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"
    four_over_six: Literal["mae", "mse"] | None = None

    def __post_init__(self) -> None:
        _check("NVFP4", "block", self.block, ((1, 16), (16, 16)))
        _check("NVFP4", "rounding", self.rounding, ("nearest", "stochastic"))
        _check("NVFP4", "four_over_six", self.four_over_six, (None, "mae", "mse"))
        _check("NVFP4", "rht", self.rht, (False, True))
        for option, value in (("rht", self.rht), ("rounding", self.rounding == "stochastic"),
                              ("four_over_six", self.four_over_six is not None)):
            if value:
                raise NotImplementedError(
                    f"NVFP4({option}={getattr(self, option)!r}) is a legal format that is not built yet; "
                    f"NVFP4 quantizes with nearest rounding, no Hadamard transform and no four-over-six"
                )

    @property
    def storage(self) -> Storage:
        return Storage(ELEMENTS["e2m1"], (1, 16), "e4m3", global_scale=True, rht=self.rht)

    @property
    def scaling(self) -> Scaling:
        return TwoLevel(bound=448.0)

    @property
    def amax_block(self) -> Block | None:
        return self.block


@dataclass(frozen=True, slots=True)
class HighPrecision(Format):
    """This direction stays unquantized: the values K-major in dtype, or in the input's where dtype is None."""

    dtype: str | None = None

    def __post_init__(self) -> None:
        _check("HighPrecision", "dtype", self.dtype, (None, *_WIDE_DTYPES))

    @property
    def storage(self) -> Storage:
        if self.dtype is None:
            raise ValueError("HighPrecision(dtype=None) takes its dtype from an array; name one, or quantize with it")
        return Storage(ELEMENTS[self.dtype], None, "none")

    @property
    def scaling(self) -> Scaling:
        return None

    @property
    def amax_block(self) -> Block | None:
        return None

    def resolve(self, dtype: np.dtype[Any]) -> Format:
        return self if self.dtype is not None else _HIGH_PRECISION[dtype.name]


_HIGH_PRECISION = {name: HighPrecision(name) for name in _WIDE_DTYPES}

FORMATS: dict[str, Format] = {
    "fp8_e4m3": FP8("e4m3"),
    "fp8_e5m2": FP8("e5m2"),
    "fp8_block_1x128": FP8Block("e4m3", (1, 128)),
    "fp8_block_1x128_pow2": FP8Block("e4m3", (1, 128), pow2=True),
    "fp8_block_128x128": FP8Block("e4m3", (128, 128)),
    "fp8_block_128x128_pow2": FP8Block("e4m3", (128, 128), pow2=True),
    "mxfp8": MX("e4m3"),
    "mxfp8_e5m2": MX("e5m2"),
    "mxfp6_e2m3": MX("e2m3"),
    "mxfp6_e3m2": MX("e3m2"),
    "mxfp4": MX("e2m1"),
    "nvfp4": NVFP4((1, 16)),
    "nvfp4_16x16": NVFP4((16, 16)),
    "bf16": HighPrecision("bfloat16"),
    "fp16": HighPrecision("float16"),
    "fp32": HighPrecision("float32"),
}
"""The table of short names. A row added here is accepted wherever a format name is."""


# --- names --------------------------------------------------------------------------------------


def as_format(format: Format | str) -> Format:
    """The format a short name stands for: "nvfp4", or "mxfp8(rule=floor)" for a row with other fields.

    Raises ValueError for a name or field that is not in the table, TypeError for anything else.
    """
    if isinstance(format, Format):
        return format
    if isinstance(format, str) and format in FORMATS:
        return FORMATS[format]
    if not isinstance(format, str):
        raise TypeError(f"a format is a short name or a Format, not {type(format).__name__}: {format!r}")
    name, bracket, options = format.strip().partition("(")
    if name not in FORMATS:
        raise ValueError(f"unknown format {format!r}; {suggestion(name, FORMATS)}known: {', '.join(FORMATS)}")
    row = FORMATS[name]
    if not bracket:
        return row
    changes = parse_fields(format, name, options, [f.name for f in fields(row)])  # type: ignore[arg-type]
    return replace(row, **changes)  # type: ignore[type-var]


@cache
def _name(format: Format) -> str:
    best: tuple[int, str] | None = None
    for name, row in FORMATS.items():
        if type(row) is not type(format):
            continue
        names = [f.name for f in fields(row)]  # type: ignore[arg-type]
        changed = {n: getattr(format, n) for n in names if getattr(row, n) != getattr(format, n)}
        if best is None or len(changed) < best[0]:
            best = (len(changed), render(name, changed))
    return best[1] if best else repr(format)
