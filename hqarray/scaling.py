"""Scale rules in NumPy: from the amax of each block to (stored scales, factors that encode with them).

`whole` is the amax of the matrix (1,), or of each row (rows, 1). All arithmetic is single float32 operations, rounded
to nearest even, in the order written here; callers ignore floating-point warnings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .codec import Floats, encode
from .formats import ELEMENTS, Element, PowerOfTwo, Reciprocal, TwoLevel

Scales: TypeAlias = tuple[npt.NDArray[Any], Floats]

FLT_MAX = np.float32(np.finfo(np.float32).max)
INF_BITS = np.int32(0x7F800000)
SIXTH = np.float32(1 / 6)  # 0x3E2AAAAB, the constant the encoder multiplies by


def _reciprocal(amax: Floats, rule: Reciprocal, element: Element, whole: Floats | None) -> Scales:
    amax = np.where(amax < np.float32(rule.epsilon), np.float32(rule.epsilon), amax)
    factor = np.minimum(np.float32(element.max) / amax, FLT_MAX)
    if rule.pow2:
        factor = (factor.view(np.int32) & INF_BITS).view(np.float32)
    factor = np.where((amax > 0) & (amax < np.inf), factor, np.float32(1))
    return np.float32(1) / factor, factor


def _power_of_two(amax: Floats, rule: PowerOfTwo, element: Element, whole: Floats | None) -> Scales:
    """Integer arithmetic on the exponent field, exact also where float32 would round a subnormal quotient."""
    bits = amax.view(np.int32)
    below_max = (element.max_code & ((1 << element.mantissa_bits) - 1)) << (23 - element.mantissa_bits)
    carry = {
        "up": 0x7FFFFF - below_max,  # one more where the significand exceeds that of the largest element
        "floor": 0,
        "even": 1 << (22 - element.mantissa_bits),  # round the significand to the element's width first
    }[rule.rounding]
    byte = ((bits + np.int32(carry)) >> 23) - np.int32(element.max_exponent)
    byte = np.where(bits >= INF_BITS, 254, np.clip(byte, 0, 254)).astype(np.int32)
    # 2^(127 - byte); byte 254 asks for 2^-127, which is subnormal
    factor = np.where(byte == 254, np.int32(0x00400000), (254 - byte) << 23).astype(np.int32)
    return byte.astype(np.uint8), factor.view(np.float32)


def _two_level(amax: Floats, rule: TwoLevel, element: Element, whole: Floats | None) -> Scales:
    assert whole is not None
    encode_scale, decode_scale = global_scales(whole, rule, element)
    stored = encode(np.minimum(amax * (encode_scale * SIXTH), FLT_MAX), ELEMENTS["e4m3"])
    return stored, _factor(stored, decode_scale)


def _factor(stored: npt.NDArray[np.uint8], decode_scale: Floats) -> Floats:
    """What encodes under E4M3 scales: min(RN(1 / RN(s8 * S_dec)), FLT_MAX)."""
    factor: Floats = np.minimum(np.float32(1) / (ELEMENTS["e4m3"].values.take(stored) * decode_scale), FLT_MAX)
    return factor


SCALE_RULES: dict[type, Callable[..., Scales]] = {
    Reciprocal: _reciprocal,
    PowerOfTwo: _power_of_two,
    TwoLevel: _two_level,
}


def global_scales(amax: Floats, rule: TwoLevel, element: Element) -> tuple[Floats, Floats]:
    """(S_enc, S_dec) of each amax: S_enc = min(RN(RN(bound * max) / amax), FLT_MAX), 1 for amax 0 or Inf."""
    with np.errstate(all="ignore"):
        most = np.float32(np.float32(rule.bound) * np.float32(element.max))
        encode_scale: Floats = np.where((amax > 0) & (amax < np.inf), np.minimum(most / amax, FLT_MAX), np.float32(1))
        return encode_scale, np.float32(1) / encode_scale


def four_over_six(blocks: Floats, amax: Floats, rule: TwoLevel, element: Element, whole: Floats) -> Scales:
    """Scales under which a block's largest value becomes 4 or 6, whichever errs less on the whole.

    blocks  (block rows, rows in a block, blocks in a row, columns in a block), zeros where a block is cut off
    amax    (block rows, blocks in a row)

    Of each block, b its amax, A = whole, D = RN(bound * 6), values x in their order:

        base = RN(RN(b / 6) * S_enc);  s6 = e4m3(min(base, 448));  s4 = e4m3(min(RN(1.5 * base), 448))
        of both scales s:  factor = min(RN(1 / RN(s * S_dec)), FLT_MAX);  q = e2m1(RN(x * factor)), to nearest even
        error(x) = |RN(RN(RN(RN(q * s) * A) / D) - x|, for "mse" RN(error * error)
        of a row of the block the sum from its first column to its last, each sum rounded, from 0
        of a square's 16 rows r: for h = 8, 4, 2, 1: total(r) = RN(total(r) + total(r + h)) for r < h, total(0) counts

    and s4 is taken where its total is less than that of s6: a tie takes s6, and so does a NaN (an infinite A or x).
    NaN elements do not matter, since their block's scale becomes NaN. Stochastic rounding chooses alike, by rounding
    to nearest: the scale does not depend on draws. Source: TransformerEngine's quantize_4over6_nvfp4.cuh.
    """
    encode_scale, decode_scale = global_scales(whole, rule, element)
    e4m3 = ELEMENTS["e4m3"]
    largest, divisor = np.float32(e4m3.max), np.float32(np.float32(rule.bound) * np.float32(element.max))
    base = amax / np.float32(6) * encode_scale
    by_block = whole.reshape(-1, 1, 1, 1)
    candidates = []
    for ratio in (np.float32(1.5), np.float32(1)):
        stored = encode(np.minimum(base * ratio, largest), e4m3)
        factor = _factor(stored, decode_scale)
        errors = element.values.take(encode(blocks * factor[:, None, :, None], element))
        errors *= e4m3.values.take(stored)[:, None, :, None]
        errors *= by_block
        errors /= divisor
        errors -= blocks
        errors = errors * errors if rule.four_over_six == "mse" else np.abs(errors)
        candidates.append((stored, factor, _total(errors)))
    (four, four_factor, four_error), (six, six_factor, six_error) = candidates
    is_four = four_error < six_error
    return np.where(is_four, four, six), np.where(is_four, four_factor, six_factor)


def _total(errors: Floats) -> Floats:
    """The sum of each block, in the order that four_over_six gives."""
    total = np.zeros(errors.shape[:3], np.float32)
    for column in range(errors.shape[3]):
        total += errors[..., column]
    half = errors.shape[1] // 2
    while half:
        total = total[:, :half] + total[:, half:]
        half //= 2
    first: Floats = total[:, 0]
    return first
