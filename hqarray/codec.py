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

    Where float16's smallest normal number stands for the element's, a code is float16's bits without the lowest n (E2M1
    has 1 mantissa bit of float16's 10, so n = 9). With h the bits of float16(|value| * 2^(bias - 15)), to nearest even,
    and a draw below 2^n, the code is

        (min(h, largest code << n) + draw) >> n

    So a value that has a code keeps it for every draw, one beyond the largest element becomes that, and another goes up
    with a probability that is a multiple of 2^-n, within 2^-(n + 1) of its distance from the lower neighbour in units
    of the spacing. The multiplication is exact, or its result below 2^-126 and h 0 all the same. Of elements of at most
    4 exponent bits.
    """
    dropped = np.uint16(np.finfo(np.float16).nmant - element.mantissa_bits)
    unit = np.float32(np.finfo(np.float16).smallest_normal) * np.float32(2.0 ** (element.bias - 1))
    with np.errstate(all="ignore"):
        codes = (np.abs(values) * unit).astype(np.float16).view(np.uint16)
    np.minimum(codes, np.uint16(element.max_code << dropped), out=codes)
    codes += draws
    codes >>= dropped
    codes |= np.signbit(values).astype(np.uint16) << np.uint16(element.bits - 1)
    nan = np.isnan(values)
    if nan.any():
        codes[nan] = element.nan_code or 0
    return codes.astype(np.uint8)


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
