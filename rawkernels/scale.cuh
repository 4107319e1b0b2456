// Scales of the 8 lines of a patch: from their largest magnitudes to stored bytes and encode factors.
#pragma once
#include "encode.cuh"

namespace hq {

// What a format with a global scale needs of the whole matrix.
struct Global {
    float decode_scale;  // S_dec
    float sixth;         // RN(S_enc / 6)
    float before;        // fp4_unit where an encode factor times that may be subnormal and lose bits: values take it; else 1
    float encode_scale;  // S_enc
    float whole;         // the amax that they come from
};

template <class F>
HQ_FN Global global_of(float whole) {
    // Under the largest scale, 448, a factor times the unit is then 2^-125 or more.
    constexpr float most = 0x1p116f * fp4_unit<F>;
    const float encode_scale = global_encode_scale(whole, F::bound * float_of(F::Element::max_bits));
    const float decode_scale = divide(1.0f, encode_scale);
    return {decode_scale, encode_scale * float_of(SIXTH_BITS), decode_scale > most ? fp4_unit<F> : 1.0f, encode_scale, whole};
}

// Whether values under an E4M3 scale byte are multiplied with `before`. Values that this makes subnormal become zero all
// the same, but under byte 0, whose factor is FLT_MAX.
HQ_FN bool takes_before(const Global& g, u32 byte) { return g.before != 1.0f && byte != 0; }

// What encodes under a byte without sign, prepared where values do not take `before`.
template <class F>
HQ_FN float factor_of(const Global& g, u32 byte) {
    const float factor = two_level_factor(float_of_e4m3(byte), g.decode_scale);
    return takes_before(g, byte) ? factor : prepare_factor<F>(factor);
}

// Factor of each E4M3 scale byte without sign: 128 divisions a block of threads instead of one a line.
struct alignas(16) Table {
    float factor[128];
    Global global;

    template <class F>
    HQ_FN void fill(int thread, float whole) {
        if (thread >= 128) return;
        const Global g = global_of<F>(whole);
        factor[thread] = factor_of<F>(g, thread);
        if (thread == 0) global = g;
    }
};

// Where 8 lines have their global scale from: that of the matrix, with its table, or each its own.
struct OfMatrix {
    const Table* table;
    HQ_FN const Global& at(int) const { return table->global; }
    HQ_FN float factor(int, u32 byte) const { return table->factor[byte]; }
};

template <class F>
struct OfLines {
    Global global[8];
    HQ_FN OfLines(const float* whole, i64 line0, i64 lines) {
#pragma unroll
        for (int i = 0; i < 8; ++i) global[i] = global_of<F>(line0 + i < lines ? whole[line0 + i] : 0.0f);
    }
    HQ_FN const Global& at(int i) const { return global[i]; }
    HQ_FN float factor(int i, u32 byte) const { return factor_of<F>(global[i], byte); }
};

template <class F, class In>
struct LineScales {
    static constexpr bool packed = F::scaling == POWER_OF_TWO && same<In, BFloat16>::value &&
        F::Element::max_exponent >= 2;  // else a factor may be subnormal, which pairs do not make
    u32 factor[packed ? 4 : 8];  // pairs of bf16, or prepared float32
    u32 stored[2];               // 8 bytes
    u32 nan = 0;                 // bit i: line i's block holds a NaN that the element cannot; its codes are zero
    bool careful = false;        // encode_line must not take its short cut
    u32 first = 0;               // bit i: a careful one multiplies line i's values with FP4's unit first

    HQ_FN float before(int i) const { return F::scaling == TWO_LEVEL && (first >> i & 1) ? fp4_unit<F> : 1.0f; }
    HQ_FN float at(int i) const {
        if constexpr (packed) return prepare_factor<F>(i & 1 ? In::high(factor[i / 2]) : In::low(factor[i / 2]));
        else return float_of(factor[i]);
    }
    HQ_FN u32 byte(int i) const { return permute(stored[i / 4], 0, 0x4440 + (i & 3)); }
};

// E8M0 on pairs of bf16, half a register a line: the exponent field moves by the carry of the rounding rule.
template <class F, class In>
HQ_FN void scale_pairs(const Lines<In>& amax, LineScales<F, In>& scales) {
    typedef typename F::Element E;
    constexpr u32 top = (E::max_bits >> 16) & 0x7F;
    constexpr u32 carry = F::rounding == UP ? 0x7F - top : F::rounding == FLOOR ? 0 : 1u << (6 - E::mantissa_bits);
    constexpr u32 floor_ = u32(E::max_exponent) << 7;
    u32 field[4], largest = 0;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const u32 a = amax.reg[p] & 0x7FFF7FFFu;
        largest = __vmaxu2(largest, a);
        const u32 t = (a + carry * 0x10001u) & 0x7F807F80u;
        const u32 e = __vmaxu2(t, floor_ * 0x10001u) - floor_ * 0x10001u;
        scales.factor[p] = 0x7F007F00u - e;
        field[p] = e >> 7;
    }
    scales.stored[0] = permute(field[0], field[1], 0x6420);
    scales.stored[1] = permute(field[2], field[3], 0x6420);
    if (max(largest & 0xFFFFu, largest >> 16) < 0x7F80u) return;
#pragma unroll
    for (int p = 0; p < 4; ++p) {  // an Inf or a NaN somewhere: rare
        const u32 a = amax.reg[p] & 0x7FFF7FFFu;
        const u32 inf = __vcmpeq2(a, 0x7F807F80u), nan = __vcmpgtu2(a, 0x7F807F80u);
        scales.factor[p] = (scales.factor[p] & ~(inf | nan)) | (inf & 0x00400040u) | (nan & 0x7F007F00u);
        field[p] = (field[p] & ~(inf | nan)) | (inf & 0x00FE00FEu) | (E::has_nan ? 0 : nan & 0x00FF00FFu);
        if (!E::has_nan) scales.nan |= ((nan & 1) | (nan >> 15 & 2)) << (2 * p);
    }
    scales.careful = true;
    scales.stored[0] = permute(field[0], field[1], 0x6420);
    scales.stored[1] = permute(field[2], field[3], 0x6420);
}

// amax: float32 bits; NaN marks the block where the element has none, and counts as nothing where it has.
template <class F>
HQ_FN u32 power_of_two_byte(u32 amax) {
    if (amax > INF_BITS) return F::Element::has_nan ? 0 : 255;
    return power_of_two_scale<typename F::Element, F::rounding>(amax);
}

// Factors of stored E4M3 bytes, and what is rare about them.
template <class F, class In, class Globals>
HQ_FN void finish_two_level(const Globals& globals, LineScales<F, In>& scales) {
    if (F::per_row || globals.at(0).before != 1.0f) {  // else all lines have the same one
#pragma unroll
        for (int i = 0; i < 8; ++i) scales.first |= u32(takes_before(globals.at(i), scales.byte(i))) << i;
    }
    scales.careful = scales.first != 0;
    // Bytes 0x7E, the largest, under which Inf may be, and 0x7F, NaN: rare.
    if (((scales.stored[0] + 0x02020202u) | (scales.stored[1] + 0x02020202u)) & 0x80808080u) {
        scales.careful = true;
#pragma unroll
        for (int i = 0; i < 8; ++i) scales.nan |= u32(scales.byte(i) == 0x7F) << i;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) scales.factor[i] = bits_of(globals.factor(i, scales.byte(i)));
}

// Scales that make a block's amax the largest element.
template <class F, class In, class Globals>
HQ_FN LineScales<F, In> scale_lines(const Lines<In>& amax, const Globals& globals) {
    LineScales<F, In> scales;
    if constexpr (LineScales<F, In>::packed) {
        scale_pairs<F, In>(amax, scales);
    } else if constexpr (F::scaling == POWER_OF_TWO) {
        scales.stored[0] = scales.stored[1] = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 byte = power_of_two_byte<F>(amax.at(i));
            scales.stored[i / 4] |= byte << (8 * (i & 3));
            if (!F::Element::has_nan && byte == 255) scales.nan |= 1u << i;
            scales.careful |= byte >= 254;
            scales.factor[i] = bits_of(prepare_factor<F>(float_of(power_of_two_factor(byte))));
        }
    } else if constexpr (F::scaling == TWO_LEVEL) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            float scale[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) scale[i] = fabsf(amax.signed_at(4 * w + i)) * globals.at(4 * w + i).sixth;
            scales.stored[w] = convert_fp8x2<3>(scale[0], scale[1]) | convert_fp8x2<3>(scale[2], scale[3]) << 16;
        }
        finish_two_level<F, In>(globals, scales);
    }
    return scales;
}

}  // namespace hq
