// Four over six: each block's largest value becomes 4 or 6, whichever errs less on the whole. scaling.py has the
// words, and the order of every operation.
#pragma once
#include "scale.cuh"
#include "tile.cuh"

namespace hq {

// What code q of a block decodes to in this sum, RN(RN(q * s * A) / D). Codes with the same mantissa differ by a power
// of two, and so do these where nothing under- or overflows: two divisions a block serve all its values.
struct Decoded {
    float one, one_and_half;
    float scale, whole, divisor;
    bool exact;  // divide for each value

    HQ_FN Decoded(float scale, float whole, float divisor)
        : one(divide(scale * whole, divisor)), one_and_half(divide(1.5f * scale * whole, divisor)), scale(scale),
          whole(whole), divisor(divisor), exact(!(whole > 0x1p-90f && whole < 0x1p110f)) {}
    HQ_FN float at(float q) const {
        if (exact) return divide(q * scale * whole, divisor);
        const u32 bits = bits_of(q);
        return float_of(bits & INF_BITS) * (bits & 0x00400000u ? one_and_half : one);
    }
};

// The nearest E2M1 of a magnitude, ties to even: adding and taking off a number whose unit in the last place is the
// spacing there.
HQ_FN float nearest_e2m1(float a) {
    a = fminf(a, 6.0f);
    const float rounder = float_of((bits_of(fmaxf(a, 1.0f)) & INF_BITS) + (22u << 23));
    return (a + rounder) - rounder;
}

template <class F>
HQ_FN float error_of(float value, float factor, const Decoded& decoded) {
    const float error = fabsf(decoded.at(nearest_e2m1(value * factor)) - value);
    return F::four_over_six == SQUARED_ERRORS ? error * error : error;
}

// Sums of errors of each line's block under one scale byte a line: over its first 8 values, then its other ones, which
// the next lane has; of a square over its rows besides.
template <class F, int DOWN, class In, class Globals>
HQ_FN void total_errors(const Patch<In>& patch, const Place& p, const u32 (&byte)[8], const Globals& globals, float (&total)[8]) {
    typedef Direction<DOWN> D;
    const bool upper = D::along(p) & 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const Global& g = globals.at(i);
        const float scale = float_of_e4m3(byte[i]);
        const float factor = two_level_factor(scale, g.decode_scale);
        const Decoded decoded(scale, g.whole, F::bound * float_of(F::Element::max_bits));
        float error[8], sum = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            error[e] = error_of<F>(fabsf(DOWN ? patch.at(e, i) : patch.at(i, e)), factor, decoded);
            sum += error[e];
        }
        const float before = __shfl_xor_sync(~0u, sum, D::step);
        float both = before;  // right in the upper lane, which adds to what the lower one has
#pragma unroll
        for (int e = 0; e < 8; ++e) both += error[e];
        const float other = __shfl_xor_sync(~0u, both, D::step);
        total[i] = upper ? both : other;
    }
    if constexpr (F::block_rows > 1) {
#pragma unroll
        for (int i = 0; i < 8; ++i) total[i] += __shfl_xor_sync(~0u, total[i], D::other_step);
#pragma unroll
        for (int half = 4; half; half /= 2)
#pragma unroll
            for (int i = 0; i < half; ++i) total[i] += total[i + half];
#pragma unroll
        for (int i = 1; i < 8; ++i) total[i] = total[0];
    }
}

template <class F, int DOWN, class In, class Globals>
HQ_FN LineScales<F, In> choose_scales(const Patch<In>& patch, const Place& p, const Lines<In>& amax, const Globals& globals) {
    u32 four[8], six[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float base = divide(fabsf(amax.signed_at(i)), 6.0f) * globals.at(i).encode_scale;
        const u32 both = convert_fp8x2<3>(base, base * 1.5f);
        six[i] = both & 0xFF;
        four[i] = both >> 8 & 0xFF;
    }
    float error_of_four[8], error_of_six[8];
    total_errors<F, DOWN>(patch, p, four, globals, error_of_four);
    total_errors<F, DOWN>(patch, p, six, globals, error_of_six);
    LineScales<F, In> scales;
    scales.stored[0] = scales.stored[1] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        scales.stored[i / 4] |= (error_of_four[i] < error_of_six[i] ? four[i] : six[i]) << (8 * (i & 3));
    finish_two_level<F, In>(globals, scales);
    return scales;
}

}  // namespace hq
