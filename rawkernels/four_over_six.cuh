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

// Errors of one line's block under two scale bytes, in the order of scaling.py: its first 8 values, then its other ones,
// which the next lane has. Other warps wait for this one, so that errors are computed side by side and then summed.
template <class F, int DOWN, class In>
HQ_FN void line_errors(const Patch<In>& patch, const Place& p, int i, const u32 (&byte)[2], const Global& g, float (&sum)[2]) {
    typedef Direction<DOWN> D;
    const bool upper = D::along(p) & 8;
    float value[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) value[e] = fabsf(DOWN ? patch.at(e, i) : patch.at(i, e));
#pragma unroll 1
    for (int candidate = 0; candidate < 2; ++candidate) {
        const float scale = float_of_e4m3(byte[candidate]);
        const float factor = two_level_factor(scale, g.decode_scale);
        const Decoded decoded(scale, g.whole, F::bound * float_of(F::Element::max_bits));
        float error[8], total = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) error[e] = error_of<F>(value[e], factor, decoded);
#pragma unroll
        for (int second = 0; second < 2; ++second) {  // the upper lane adds to what the lower one has
#pragma unroll
            for (int e = 0; e < 8; ++e) total += error[e];
            const float other = __shfl_xor_sync(~0u, total, D::step);
            total = upper ? (second ? total : other) : (second ? other : 0.0f);
        }
        sum[candidate] = total;
    }
}

// Bit i: in line i's block 4 errs less, for the lines that some lane of the warp doubts; of squares, whose errors are
// summed over their rows besides, for all. Seldom asked for, so the patch is copied to memory and the code is a loop:
// unrolled, that of two directions does not fit into the instruction cache.
template <class F, int DOWN, class In, class Globals>
HQ_FN u32 surely_choose(const Patch<In> patch, const Place& p, const u32 (&four)[8], const u32 (&six)[8], const Globals& globals, u32 doubt, u32 chosen) {
    typedef Direction<DOWN> D;
    constexpr bool square = F::block_rows > 1;
    u32 bytes[8][2];
    float sums[square ? 8 : 1][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) { bytes[i][0] = four[i]; bytes[i][1] = six[i]; }
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
        if (!square && !__any_sync(~0u, doubt >> i & 1)) continue;
        float(&sum)[2] = sums[square ? i : 0];
        line_errors<F, DOWN>(patch, p, i, bytes[i], globals.at(i), sum);
        if (!square) chosen = (chosen & ~(1u << i)) | u32(sum[0] < sum[1]) << i;
    }
    if constexpr (square) {
#pragma unroll 1
        for (int i = 0; i < 16; ++i) sums[i / 2][i % 2] += __shfl_xor_sync(~0u, sums[i / 2][i % 2], D::other_step);
#pragma unroll 1
        for (int half = 4; half; half /= 2)
#pragma unroll 1
            for (int i = 0; i < 2 * half; ++i) sums[i / 2][i % 2] += sums[i / 2 + half][i % 2];
        chosen = sums[0][0] < sums[0][1] ? 0xFF : 0;
    }
    return chosen;
}

// The same sums nearly, in units of each block's codes and in fewer operations: x * factor less the nearest E2M1. No
// x * factor passes 6.4 under a normal scale, so that none needs a clamp.
template <class F, int DOWN, class In>
HQ_FN void nearly_total(const Patch<In>& patch, const float (&factor)[8], float (&total)[8]) {
    typedef Direction<DOWN> D;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        total[i] = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float a = fabsf((DOWN ? patch.at(e, i) : patch.at(i, e)) * factor[i]);
            const float power = float_of(bits_of(fmaxf(a, 1.0f)) & INF_BITS);  // twice the spacing
            const float error = __fmaf_rn(power, -0x1p22f, __fmaf_rn(power, 0x1p22f, a)) - a;
            total[i] = F::four_over_six == SQUARED_ERRORS ? __fmaf_rn(error, error, total[i]) : total[i] + fabsf(error);
        }
        total[i] += __shfl_xor_sync(~0u, total[i], D::step);
    }
    if constexpr (F::block_rows > 1) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += total[i];
        sum += __shfl_xor_sync(~0u, sum, D::other_step);
#pragma unroll
        for (int i = 0; i < 8; ++i) total[i] = sum;
    }
}

// How far two sums of both candidates can lie apart by roundings alone, beside a block's largest value b or its square.
// With u = 2^-24 a value's error has 8 u b of them, at most b / 6 itself, and sums have 40 roundings in all: of n values
// 2 n (8 + 40 / 6) u b, and of squares 2 n (8 / 3 + 40 / 36) u b^2.
template <class F> constexpr float least_difference =
    (F::four_over_six == SQUARED_ERRORS ? 0x1p-17f : 0x1p-15f) * (F::block_rows > 1 ? 16.0f : 1.0f);

// Bit i: in line i's block 4 errs less. doubt, bit i: its two sums are too near to each other.
template <class F, int DOWN, class In, class Globals>
HQ_FN u32 nearly_choose(const Patch<In>& patch, const Lines<In>& amax, const u32 (&four)[8], const u32 (&six)[8], const Globals& globals, u32& doubt) {
    float sum_of_four[8], sum_of_six[8] = {};
#pragma unroll 1
    for (int candidate = 0; candidate < 2; ++candidate) {  // one copy of the code, of which there is much
        float factor[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            factor[i] = (1.0f / fp4_unit<F>) * globals.factor(i, candidate ? six[i] : four[i]);
            sum_of_four[i] = sum_of_six[i];  // of the candidate before
        }
        nearly_total<F, DOWN>(patch, factor, sum_of_six);
    }
    u32 chosen = 0;
    doubt = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        constexpr bool squared = F::four_over_six == SQUARED_ERRORS;
        const Global& g = globals.at(i);
        const float largest = fabsf(amax.signed_at(i)), unit = __fdividef(g.decode_scale, largest);
        const float a = float_of_e4m3(four[i]) * unit, b = float_of_e4m3(six[i]) * unit;
        const float difference = sum_of_four[i] * (squared ? a * a : a) - sum_of_six[i] * (squared ? b * b : b);
        chosen |= u32(difference < 0.0f && four[i] != six[i]) << i;
        doubt |= u32(four[i] != six[i] && (six[i] < 8 || !(fabsf(difference) > least_difference<F>))) << i;
    }
    return chosen;
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
    u32 doubt = 0xFF, chosen = 0;
    if constexpr (!F::per_row) {  // then factors are in a table
        constexpr bool squared = F::four_over_six == SQUARED_ERRORS;  // under a normal scale b is over whole * 2^-15
        const float whole = globals.at(0).whole;
        if (whole > (squared ? 0x1p-35f : 0x1p-90f) && whole < (squared ? 0x1p55f : 0x1p110f)) chosen = nearly_choose<F, DOWN>(patch, amax, four, six, globals, doubt);
    }
    if (__any_sync(~0u, doubt)) chosen = surely_choose<F, DOWN>(patch, p, four, six, globals, doubt, chosen);
    LineScales<F, In> scales;
    scales.stored[0] = scales.stored[1] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) scales.stored[i / 4] |= (chosen >> i & 1 ? four[i] : six[i]) << (8 * (i & 3));
    finish_two_level<F, In>(globals, scales);
    return scales;
}

}  // namespace hq
