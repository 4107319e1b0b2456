"""Elements and scales: the numbers that codes stand for. A row of ELEMENTS gives codes their values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

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
        return np.dtype(np.uint8) if self.bits <= 8 else WIDE_DTYPES[self.name]

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


WIDE_DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


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


# --- scales -------------------------------------------------------------------------------------


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
