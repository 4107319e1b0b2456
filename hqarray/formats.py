"""Formats: what a stored code means, and how it was chosen.

A row of ELEMENTS gives codes their values (elements.py), a row of FORMATS adds blocks, scales and the rule that makes
them. Everything else in the library reads the facts of a row and never asks which row it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np

from .elements import BFLOAT16, ELEMENTS, SCALES, WIDE_DTYPES, Element, Scale, ScaleKind, scale_values
from .names import parse_fields, render, suggestion

Block: TypeAlias = tuple[int, int]

ROW = 1 << 62
"""Columns of a block that is a whole row, however long it is."""


def block_name(block: Block | None) -> str:
    """What shares one scale: "matrix", "row" or "1x128"."""
    if block is None:
        return "matrix"
    return "row" if block == (1, ROW) else f"{block[0]}x{block[1]}"


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
    """E4M3 block scale under one fp32 global scale; the largest block scale is `bound`.

    four_over_six: each block's largest value becomes 4 or 6, whichever leaves the smaller sum of absolute ("mae") or
    squared ("mse") errors; None: always 6.
    """

    bound: float
    four_over_six: Literal["mae", "mse"] | None = None


Scaling: TypeAlias = Reciprocal | PowerOfTwo | TwoLevel | None


# --- formats ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Storage:
    """What a reader must know to decode a part. GEMM, engine choice and files look at nothing else.

    block           rows x columns that share one stored scale, (1, ROW) a row; None: one for the whole matrix, or none
    global_scale    float32 that all decoded values are multiplied by besides
    rht             values are rotated: hadamard.py
    pow2            scales in float32 are powers of two, so that bfloat16 holds what they decode to
    global_per_row  there is one global scale for each row, not for the matrix
    """

    element: Element
    block: Block | None
    scale: ScaleKind
    global_scale: bool = False
    rht: bool = False
    pow2: bool = False
    global_per_row: bool = False

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
        any_float32 = (self.scale == "float32" and self.block is not None and not self.pow2) or self.global_per_row
        return 3 if any_float32 or self.element.significand_bits > 8 else 1

    def num_scales(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Logical shape of the scales of an (outer, k) part."""
        if self.scale == "none":
            return (0, 0)
        if self.block is None:
            return (1, 1)
        return (-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))

    def num_global_scales(self, shape: tuple[int, int]) -> int:
        """How many global scales an (outer, k) part has: 0, 1, or one a row that is not empty."""
        return shape[0] * min(shape[1], 1) if self.global_per_row else int(self.global_scale)


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
        if isinstance(self.scaling, TwoLevel):
            return not self.storage.global_per_row
        return isinstance(self.scaling, Reciprocal) and self.amax_block is None

    @property
    def measures_rows(self) -> bool:
        """Whether the amax of each whole row is needed before its first code."""
        return self.storage.global_per_row or (self.amax_block is not None and self.amax_block[1] == ROW)

    @property
    def is_stochastic(self) -> bool:
        """Whether codes depend on a seed."""
        return False

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

    per_row gives each row of the part a scale of its own, from its own amax: cuBLASLt's OUTER_VEC_32F.
    Source: facts of TransformerEngine's current scaling; scale rule in Reciprocal.
    """

    element: str = "e4m3"
    pow2: bool = False
    epsilon: float = 0.0
    per_row: bool = False

    def __post_init__(self) -> None:
        _check("FP8", "element", self.element, _elements(8))
        _check("FP8", "per_row", self.per_row, (False, True))
        _check_reciprocal(self)

    @property
    def storage(self) -> Storage:
        if self.per_row:
            return Storage(ELEMENTS[self.element], (1, ROW), "float32", pow2=self.pow2)
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
    """OCP Microscaling: one E8M0 scale per 32 elements along the row. Rules: PowerOfTwo.

    block (32, 32) takes one amax per square, so rows and columns hold the same values; its scales are stored once for
    each of the 32 rows, as a reader of 1x32 blocks expects them.
    """

    element: str = "e4m3"
    rule: Literal["up", "floor", "even"] = "up"
    block: Block = (1, 32)

    def __post_init__(self) -> None:
        _check("MX", "element", self.element, _elements(4, 6, 8))
        _check("MX", "rule", self.rule, ("up", "floor", "even"))
        _check("MX", "block", self.block, ((1, 32), (32, 32)))

    @property
    def storage(self) -> Storage:
        return Storage(ELEMENTS[self.element], (1, 32), "e8m0")

    @property
    def scaling(self) -> Scaling:
        return PowerOfTwo(self.rule)

    @property
    def amax_block(self) -> Block | None:
        return self.block


@dataclass(frozen=True, slots=True)
class NVFP4(Format):
    """E2M1 with an E4M3 scale per 16 elements and one fp32 scale for the matrix.

    block (16, 16) takes one amax per square, so rows and columns hold the same values; its scales are stored
    once for each of the 16 rows, as a reader of 1x16 blocks expects them. Source: arXiv 2509.25149 and
    TransformerEngine's order of operations.

    rht            every 16 values along the row are rotated first, by a Hadamard matrix with random signs: hadamard.py
    rounding       "stochastic": up or down at random, right on average within 2^-10 of a spacing, but for a block's
                   largest values where its scale was rounded down, which saturate; needs a seed: philox.py
    four_over_six  a block's largest value becomes 4 or 6, by the smaller error: scaling.py, arXiv 2512.02010
    global_bound   largest block scale, 448 (all of E4M3) or 256 (leaves room for the larger scales of 4)
    per_row        each row of the part has a global scale of its own, from its own amax
    """

    block: Block = (1, 16)
    rht: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"
    four_over_six: Literal["mae", "mse"] | None = None
    global_bound: int = 448
    per_row: bool = False

    def __post_init__(self) -> None:
        bound: Any = self.global_bound
        if isinstance(bound, float) and bound.is_integer():  # a name's number
            object.__setattr__(self, "global_bound", int(bound))
        _check("NVFP4", "block", self.block, ((1, 16), (16, 16)))
        _check("NVFP4", "rounding", self.rounding, ("nearest", "stochastic"))
        _check("NVFP4", "four_over_six", self.four_over_six, (None, "mae", "mse"))
        _check("NVFP4", "rht", self.rht, (False, True))
        _check("NVFP4", "global_bound", self.global_bound, (448, 256))
        _check("NVFP4", "per_row", self.per_row, (False, True))
        if self.per_row and self.block[0] > 1:
            raise ValueError("NVFP4: per_row=True needs block=(1, 16), since a square's rows share a scale")

    @property
    def storage(self) -> Storage:
        return Storage(
            ELEMENTS["e2m1"], (1, 16), "e4m3", global_scale=True, rht=self.rht, global_per_row=self.per_row
        )

    @property
    def scaling(self) -> Scaling:
        return TwoLevel(float(self.global_bound), self.four_over_six)

    @property
    def amax_block(self) -> Block | None:
        return self.block

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"


@dataclass(frozen=True, slots=True)
class HighPrecision(Format):
    """This direction stays unquantized: the values K-major in dtype, or in the input's where dtype is None."""

    dtype: str | None = None

    def __post_init__(self) -> None:
        _check("HighPrecision", "dtype", self.dtype, (None, *WIDE_DTYPES))

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


_HIGH_PRECISION = {name: HighPrecision(name) for name in WIDE_DTYPES}

FORMATS: dict[str, Format] = {
    "fp8_e4m3": FP8("e4m3"),
    "fp8_e5m2": FP8("e5m2"),
    "fp8_row_e4m3": FP8("e4m3", per_row=True),
    "fp8_block_1x128": FP8Block("e4m3", (1, 128)),
    "fp8_block_1x128_pow2": FP8Block("e4m3", (1, 128), pow2=True),
    "fp8_block_128x128": FP8Block("e4m3", (128, 128)),
    "fp8_block_128x128_pow2": FP8Block("e4m3", (128, 128), pow2=True),
    "mxfp8": MX("e4m3"),
    "mxfp8_e5m2": MX("e5m2"),
    "mxfp8_32x32": MX("e4m3", block=(32, 32)),
    "mxfp6_e2m3": MX("e2m3"),
    "mxfp6_e3m2": MX("e3m2"),
    "mxfp4": MX("e2m1"),
    "nvfp4": NVFP4((1, 16)),
    "nvfp4_16x16": NVFP4((16, 16)),
    "nvfp4_row": NVFP4((1, 16), per_row=True),
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
    changes = parse_fields(format, name, options, _fields(row), _having)
    return replace(row, **changes)  # type: ignore[type-var]


def _fields(format: Format) -> dict[str, object]:
    return {field.name: getattr(format, field.name) for field in fields(format)}  # type: ignore[arg-type]


def _having(field: str) -> list[str]:
    return [name for name, row in FORMATS.items() if field in _fields(row)]


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


__all__ = [
    "BFLOAT16", "ELEMENTS", "FORMATS", "FP8", "MX", "NVFP4", "ROW", "SCALES", "Block", "Element", "FP8Block", "Format",
    "HighPrecision", "PowerOfTwo", "Reciprocal", "Scale", "ScaleKind", "Scaling", "Storage", "TwoLevel", "as_format",
    "block_name", "scale_values",
]
