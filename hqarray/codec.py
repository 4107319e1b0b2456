"""Codes of float32 values and values of codes, in NumPy; the scale of a block is multiplied by elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .formats import Element

Values: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]
Codes: TypeAlias = npt.NDArray[np.uint8]


@cache
def encode_table(element: Element) -> Codes:
    """Code of each of the 65,536 values that the top 16 bits of a float32 can name.

    A float32 whose lower half is not zero is looked up with its 16th bit set ("rounded to odd"). Elements of at
    most 5 mantissa bits round such a value as they would the whole one: the bit lies below every tie. Nearest,
    ties to the even code; finite overflow and Inf saturate; NaN is nan_code, or 0 where the element has none.
    """
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    values = bits.view(np.float32)
    magnitudes = element.values[: element.max_code + 1].astype(np.float64)
    ties = (magnitudes[:-1] + magnitudes[1:]) / 2
    nan = np.isnan(values)
    wanted = np.where(nan, 0, np.abs(values)).astype(np.float64)
    below, above = np.searchsorted(ties, wanted, "left"), np.searchsorted(ties, wanted, "right")
    codes = np.where(below % 2 == 0, below, above) | ((bits >> 31).astype(np.int64) << (element.bits - 1))
    table = np.where(nan, element.nan_code or 0, codes).astype(np.uint8)
    table.setflags(write=False)
    return table


def encode(values: Floats, element: Element) -> Values:
    """float32 -> codes, nearest even, saturating; 16- and 32-bit elements are an ordinary cast."""
    if element.bits > 8:
        return values.astype(element.dtype)
    bits = np.ascontiguousarray(values).view(np.uint32)
    index = bits & np.uint32(0xFFFF)
    index += np.uint32(0xFFFF)
    index |= bits
    index >>= np.uint32(16)
    return encode_table(element).take(index)


def encode_stochastic(values: Floats, element: Element, draws: npt.NDArray[np.uint16]) -> Codes:
    """float32 -> codes, up with the probability that makes the mean right; saturating, the sign kept, NaN as encode.

    Codes of magnitudes lie on lines that meet where the spacing doubles; of E2M1 c(a) = min(2a, a + 2, a/2 + 4). With
    v = 1 + (draw + 1/2) / 2^16, which is the float32 of the bits 0x3F800040 | draw << 7, the code is

        min(floor(min(RN(2a + v), RN(a + (v + 2)), RN(a/2 + (v + 4)))) - 1, largest code)

    where each RN is one rounding (an FMA; 2a, a/2, v + 2 and v + 4 are exact where they matter). So a value that has
    a code keeps it for every draw, and another goes up with a probability that is a multiple of 2^-16, within 2^-17
    (and the rounding of a sum below 16, 2^-21) of its distance from the lower neighbour in units of the spacing.
    Of elements with codes of magnitudes below 64 (at most 7 bits).
    """
    start = (draws.astype(np.uint32) << np.uint32(7) | np.uint32(0x3F800040)).view(np.float32)
    magnitude = np.abs(values)
    lowest = 2.0 ** (1 - element.bias - element.mantissa_bits)
    with np.errstate(all="ignore"):
        lines = [
            magnitude * np.float32(1 / (lowest * 2.0**line)) + (start + np.float32(line << element.mantissa_bits))
            for line in range(element.max_code >> element.mantissa_bits)
        ]
    largest = np.float32(element.max_code + 1)
    codes: Codes = np.fmin(np.fmin.reduce(lines), largest).astype(np.uint8)  # a cast truncates
    codes -= np.uint8(1)
    codes |= np.signbit(values).view(np.uint8) << np.uint8(element.bits - 1)
    nan = np.isnan(values)
    if nan.any():
        codes[nan] = element.nan_code or 0
    return codes


@cache
def decode_table(element: Element) -> Values:
    """What each byte of stored codes decodes to: one float32, for FP4 two of them as one 8-byte item."""
    stored = np.arange(256, dtype=np.uint8)
    per_byte = np.stack([stored & 15, stored >> 4], axis=1) if element.stored_bits == 4 else stored[:, None]
    values = element.values.take(per_byte & ((1 << element.bits) - 1))
    table = values.view(np.uint64 if element.stored_bits == 4 else np.float32).ravel()
    table.setflags(write=False)
    return table


def decode(codes: Values, element: Element) -> Floats:
    """Stored codes, one byte for two of FP4, -> float32, exact."""
    if element.bits > 8:
        return codes.astype(np.float32)
    return decode_table(element).take(codes).view(np.float32)
