// A scale of a whole matrix beside a GEMM: its power of two goes into the decoded values, which keeps products in
// range, and the rest to alpha.
#pragma once
#include "codec.cuh"

namespace hq {

// Biased exponent of the power of two that goes into the values: in [-100, 100], where no decoded value is subnormal.
HQ_FN u32 exponent_of(float scalar) {
    const u32 field = bits_of(scalar) >> 23 & 255;
    return field == 255 ? 127 : field < 27 ? 27 : field > 227 ? 227 : field;
}
HQ_FN float power_of(float scalar) { return float_of(exponent_of(scalar) << 23); }
HQ_FN float rest_of(float scalar) { return scalar * float_of((254 - exponent_of(scalar)) << 23); }

}  // namespace hq
