// The random Hadamard transform of 16 values along a line, in the order of operations of hadamard.py.
#pragma once
#include "encode.cuh"
#include "rotate.cuh"
#include "tile.cuh"

namespace hq {

// The lines of a patch rotated and rounded to bf16; `length` is that of a line of X. May be done in place. SIGNS is
// generated: bit i is set where entry i of the diagonal is -1.
template <int DOWN, class In>
HQ_FN void rotate(const Patch<In>& patch, const Place& p, i64 length, Patch<BFloat16>& rotated) {
    typedef Direction<DOWN> D;
    const bool upper = D::along(p) & 8;                 // the second half of its 16
    const bool whole = (D::along0(p) | 15) < length;    // else a ragged end, rounded alone
    const float quarter = upper ? -0.25f : 0.25f, sign = upper ? -1.0f : 1.0f;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        float value[2][8];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int line = 2 * pair + h;
            float x[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                value[h][e] = DOWN ? patch.at(e, line) : patch.at(line, e);
                const bool lower_is_negative = SIGNS >> e & 1, upper_is_negative = SIGNS >> (e + 8) & 1;
                const float factor = (lower_is_negative ? -1.0f : 1.0f) * (lower_is_negative == upper_is_negative ? 0.25f : quarter);
                x[e] = value[h][e] * factor;
            }
            butterflies(x);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float other = __shfl_xor_sync(~0u, x[e], D::step);
                x[e] = __fmaf_rn(x[e], sign, other);  // the sum, or the first half less the second
                value[h][e] = whole ? x[e] : value[h][e];
            }
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            if constexpr (DOWN) rotated.word[e][pair] = narrow_pair<BFloat16>(value[0][e], value[1][e]);
            else rotated.word[2 * pair + e / 4][e % 4] = narrow_pair<BFloat16>(value[e / 4][2 * (e % 4)], value[e / 4][2 * (e % 4) + 1]);
        }
    }
}

}  // namespace hq
