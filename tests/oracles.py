"""Transcriptions of the format specifications in exact rational arithmetic: slow, scalar, no NumPy arithmetic.

Sources: OCP MX v1.0 and OFP8 for elements and E8M0, TransformerEngine's order of float32 operations for the
rest. A real number is a Fraction, float("inf") or None for NaN.
"""

from dataclasses import replace
from fractions import Fraction
from math import inf

import numpy as np

from hqarray import FP8, MX, NVFP4, FP8Block

FLOAT32 = (24, -126)
SPECIFICATIONS = {  # significand bits, smallest normal exponent, largest value, NaN code
    "e4m3": (4, -6, Fraction(448), 0x7F),
    "e5m2": (3, -14, Fraction(57344), 0x7F),
    "e2m3": (4, 0, Fraction(15, 2), None),
    "e3m2": (3, -2, Fraction(28), None),
    "e2m1": (2, 0, Fraction(6), None),
}
LARGEST32 = Fraction(2**24 - 1) * 2**104


def floor_log2(x):
    """The largest e with 2^e <= x, exactly."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def in_quanta(x, significand_bits, min_exponent):
    """x rounded to nearest even as (integer, exponent of its unit)."""
    e = max(floor_log2(x), min_exponent) if x else min_exponent
    unit = e - significand_bits + 1
    return round(x / Fraction(2) ** unit), unit


def float32(x):
    """One IEEE rounding to float32; beyond its range Inf."""
    if x == inf:
        return inf
    n, unit = in_quanta(abs(x), *FLOAT32)
    rounded = n * Fraction(2) ** unit
    rounded = inf if rounded > LARGEST32 else rounded
    return rounded if x >= 0 else -rounded


def times(a, b):
    """RN(a * b) for non-negative a, b."""
    return inf if inf in (a, b) else float32(a * b)


def over(a, b):
    """RN(a / b) for non-negative a, b."""
    if b == 0:
        return inf
    return Fraction(0) if b == inf else float32(Fraction(a) / b)


def code_of(x, element):
    """Code of the magnitude of a non-negative real, nearest even, saturating."""
    significand_bits, min_exponent, largest, _ = SPECIFICATIONS[element]
    n, unit = in_quanta(min(x, largest) if x != inf else largest, significand_bits, min_exponent)
    return n + (unit + significand_bits - 1 - min_exponent) * 2 ** (significand_bits - 1)


def value_of(code, element):
    """Magnitude of a finite non-negative code."""
    significand_bits, min_exponent, _, _ = SPECIFICATIONS[element]
    exponent, fraction = divmod(code, 2 ** (significand_bits - 1))
    if exponent:
        fraction += 2 ** (significand_bits - 1)
    return fraction * Fraction(2) ** (max(exponent, 1) - 1 + min_exponent - significand_bits + 1)


# --- scale rules: amax -> (stored scale, function from |x| to the real number that the element rounds) -----------


def reciprocal(amax, element, pow2, epsilon):
    """Facts 3.1."""
    amax = max(amax, float32(Fraction(epsilon)))
    factor = Fraction(1)
    if amax not in (0, inf):
        factor = min(over(SPECIFICATIONS[element][2], amax), LARGEST32)
        if pow2:
            factor = Fraction(2) ** floor_log2(factor)
    return over(1, factor), lambda x: times(x, factor)


def mx(amax, element, rule):
    """OCP MX v1.0 section 6.3 (floor), torchao (even), and for up: the smallest 2^e with amax <= max * 2^e."""
    significand_bits, _, largest, _ = SPECIFICATIONS[element]
    if amax == inf:
        e = 127
    elif amax == 0:
        e = -127
    elif rule == "up":
        e = floor_log2(amax) - floor_log2(largest)
        e += amax > largest * Fraction(2) ** e
    elif rule == "floor":
        e = floor_log2(amax) - floor_log2(largest)
    else:
        n, unit = in_quanta(amax, significand_bits, -10**6)
        e = floor_log2(n * Fraction(2) ** unit) - floor_log2(largest)
    e = min(max(e, -127), 127)
    return e + 127, lambda x: times(x, Fraction(2) ** -e)


def nvfp4_global(amax):
    """Facts 3.6: (S_enc, S_dec)."""
    encode = Fraction(1) if amax in (0, inf) else min(over(Fraction(448 * 6), amax), LARGEST32)
    return encode, over(1, encode)


def nvfp4(amax, whole):
    sixth = float32(Fraction(1, 6))
    encode, decode = nvfp4_global(whole)
    stored = code_of(min(times(amax, times(encode, sixth)), LARGEST32), "e4m3")
    factor = min(over(1, times(value_of(stored, "e4m3"), decode)), LARGEST32)
    return stored, lambda x: times(x, factor)


# --- a whole part ---------------------------------------------------------------------------------------------


def magnitudes(values):
    """abs of a float32 matrix as rows of Fraction, inf or None."""
    def real(x):
        return None if x != x else inf if abs(x) == inf else abs(Fraction(x))

    return [[real(float(x)) for x in row] for row in values]


def quantize(values, block, element, rule):
    """(codes one a byte, scales one a block) of a float32 matrix; rule(amax) as above, block (1, k) or a square.

    NaN elements do not count in amax; they are the NaN code, or make their block's scale None and its codes 0.
    """
    *_, nan_code = SPECIFICATIONS[element]
    bits = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}[element]
    outer, k = values.shape
    real, negative = magnitudes(values), np.signbit(values)
    codes = np.zeros((outer, k), np.uint8)
    scales = [[None] * -(-k // block[1]) for _ in range(-(-outer // block[0]))]
    for i in range(len(scales)):
        for j in range(len(scales[0])):
            at = [(r, c) for r in range(i * block[0], min(outer, (i + 1) * block[0]))
                  for c in range(j * block[1], min(k, (j + 1) * block[1]))]
            members = [real[r][c] for r, c in at]
            stored, scaled = rule(max((x for x in members if x is not None), default=Fraction(0)))
            if nan_code is None and None in members:
                continue
            scales[i][j] = stored
            for (r, c), x in zip(at, members, strict=True):
                sign = int(negative[r, c]) << (bits - 1)
                codes[r, c] = nan_code if x is None else sign | code_of(scaled(x), element)
    return codes, scales


def part(values, format):
    """(codes one a byte, logical scales as stored, global scale or None) of a float32 matrix in a format."""
    outer, k = values.shape
    if getattr(format, "per_row", False) and k:  # each row is a matrix of its own
        rows = [part(row[None], replace(format, per_row=False)) for row in values]
        codes = np.concatenate([np.zeros((0, k), np.uint8), *(row[0] for row in rows)])
        dtype, blocks = (np.float32, 1) if isinstance(format, FP8) else (np.uint8, -(-k // 16))
        scales = np.concatenate([np.zeros((0, blocks), dtype), *(row[1] for row in rows)])
        return codes, scales, None if isinstance(format, FP8) else np.array([row[2] for row in rows], np.float32)
    global_scale, repeats, nan = None, 1, np.nan
    match format:
        case FP8(element, pow2, epsilon) | FP8Block(element, _, pow2, epsilon):
            block = format.block if isinstance(format, FP8Block) else (max(outer, 1), max(k, 1))
            codes, scales = quantize(values, block, element, lambda amax: reciprocal(amax, element, pow2, epsilon))
            dtype = np.float32
        case MX(element, rule):
            block, dtype, nan, repeats = format.block, np.uint8, 0xFF, format.block[0]
            codes, scales = quantize(values, block, element, lambda amax: mx(amax, element, rule))
        case NVFP4(block):
            whole = largest(values)
            codes, scales = quantize(values, block, "e2m1", lambda amax: nvfp4(amax, whole))
            dtype, nan, repeats = np.uint8, 0x7F, block[0]
            global_scale = np.float32(nvfp4_global(whole)[1])
    stored = np.array([[nan if s is None else float(s) for s in row] for row in scales]).astype(dtype)
    stored = stored.reshape(len(scales), -(-k // block[1]))
    return codes, np.repeat(stored, repeats, axis=0)[: outer if repeats > 1 else None], global_scale


def largest(values):
    """amax of a matrix, NaN ignored."""
    return max((x for row in magnitudes(values) for x in row if x is not None), default=Fraction(0))
