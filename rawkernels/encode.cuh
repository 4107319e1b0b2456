// Encoders: 8 values of a line (a row or a column of the patch) to code words, first value in the lowest bits.
//
// Each equals Element::encode of codec.cuh on every float32; hardware conversions where the chip has them.
#pragma once
#include "input.cuh"

namespace hq {

// Two floats to two of 16 bits. Conversions make NaN the canonical one of the hardware, all ones without a sign, as the
// reference does.
template <class Out>
HQ_FN u32 narrow_pair(float low, float high) {
    u32 pair;
    if (same<Out, BFloat16>::value) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// --- 8-bit elements, and 6-bit ones through them ---

#if __CUDA_ARCH__ >= 890
#define HQ_HAS_FP8_CVT 1
#else
#define HQ_HAS_FP8_CVT 0
#endif

// Two floats to two FP8 codes; MANTISSA_BITS 3 is E4M3, 2 is E5M2. Saturating, NaN is 0x7F.
template <int MANTISSA_BITS>
HQ_FN u32 convert_fp8x2(float low, float high) {
#if HQ_HAS_FP8_CVT
    u16 codes;
    if (MANTISSA_BITS == 3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    typedef Element<7 - MANTISSA_BITS, MANTISSA_BITS, MANTISSA_BITS == 3 ? 7 : 15, MANTISSA_BITS == 3 ? NAN_ONLY : IEEE> E;
    return E::encode(bits_of(low)) | E::encode(bits_of(high)) << 8;
#endif
}

// float32 of an E4M3 code.
HQ_FN float float_of_e4m3(u32 code) {
#if HQ_HAS_FP8_CVT
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(u16(code)));
    return Float16::low(pair);
#else
    return float_of(E4M3::decode(code));
#endif
}

// E2M3 is E4M3 and E3M2 is E5M2 after a shift of the exponent, so FP6 is an FP8 conversion and a clamp.
template <class F>
struct Fp6 {
    typedef typename F::Element E;
    static constexpr int shift = E::mantissa_bits == 3 ? 6 : 12;
    static constexpr u32 scale_bits = u32(127 - shift) << 23;
    static constexpr u32 max_bits = E::max_bits - (u32(shift) << 23);
};

// CLAMP: a value may lie beyond the largest 6-bit element. Under rule "up" only Inf does.
template <class F, bool CLAMP>
HQ_FN u32 encode_bytes(float a, float b, float c, float d) {
    typedef typename F::Element E;
    if constexpr (F::hardware_fp8) {
        return convert_fp8x2<E::mantissa_bits>(a, b) | convert_fp8x2<E::mantissa_bits>(c, d) << 16;
    } else if constexpr (F::hardware_fp6) {
        const float top = float_of(Fp6<F>::max_bits);
        if (CLAMP) {
            a = fminf(fmaxf(a, -top), top); b = fminf(fmaxf(b, -top), top);
            c = fminf(fmaxf(c, -top), top); d = fminf(fmaxf(d, -top), top);
        }
        const u32 wide = convert_fp8x2<E::mantissa_bits>(a, b) | convert_fp8x2<E::mantissa_bits>(c, d) << 16;
        return (wide & 0x1F1F1F1Fu) | ((wide >> 2) & 0x20202020u);
    } else {
        return E::encode(bits_of(a)) | E::encode(bits_of(b)) << 8 | E::encode(bits_of(c)) << 16 |
               E::encode(bits_of(d)) << 24;
    }
}

// --- E2M1 ---
// The magnitude's code, ties to even included, is min(RN(2a), RN(a + 2), RN(a / 2 + 4)), at most 7: each line is exact
// where it is the smallest, and code parity is integer parity. One FMA rounds each line to an integer, in a range
// whose unit in the last place is one.

// 8 values times 2 * half_factor. fp32 subnormals are integers in units of 2^-149.
HQ_FN u32 encode_e2m1(const float (&value)[8], float half_factor) {
    int code[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float a = fabsf(value[i] * half_factor);
        const int twice = __float_as_int(a * float_of(4));
        const int plus2 = __float_as_int(__fmaf_rn(a, float_of(2), float_of(2)));
        const int half4 = __float_as_int(__fmaf_rn(a, float_of(1), float_of(4)));
        code[i] = min(min(twice, plus2), half4);
    }
    u32 word = 0;
#pragma unroll
    for (int i = 6; i >= 0; i -= 2)  // saturates to 7
        asm("cvt.pack.sat.s4.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(code[i + 1]), "r"(code[i]), "r"(word));
    return word;
}

// The same, up or down at random: encode_stochastic of codec.py. A draw is 9 bits, four in a word; sums of float16's bits
// and draws have 12, of which the upper three are the code. 2^-14 is in the factor, and changes no h: the product has its
// exponent moved, or is below 2^-126, where h is 0 either way; and what overflows in only one of the two is beyond 6 in both.
HQ_FN u32 encode_e2m1_at_random(const float (&value)[8], float factor, const u32* draws) {
    u32 sum[4];  // of values j and j + 4, four bits higher where j is odd
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32 pair = narrow_pair<Float16>(fabsf(value[j]) * factor, fabsf(value[j + 4]) * factor);
        const u32 most6 = __vminu2(pair, 0x0E000E00u);
        sum[j] = j & 1 ? 16 * most6 + (draws[j / 2] >> 3 & 0x1FF01FF0u) : most6 + (draws[j / 2] & 0x01FF01FFu);
    }
    const u32 low = (sum[0] & 0x1E001E00u) | (sum[1] & ~0x1E001E00u), high = (sum[2] & 0x1E001E00u) | (sum[3] & ~0x1E001E00u);
    return (low >> 9 & 0x00FF00FFu) | (high >> 1 & 0xFF00FF00u);
}

// Two bf16 times their power-of-two factors, exact; each half is 0x4300 + code. bf16's unit is one in [128, 256).
HQ_FN u32 encode_e2m1_pair(u32 values, u32 factors) {
    u32 y, twice, plus2, half4;
    const u32 zero = 0x80008000u;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(values), "r"(factors), "r"(zero));
    asm("abs.bf16x2 %0, %1;" : "=r"(y) : "r"(y));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(twice) : "r"(y), "r"(0x40004000u), "r"(0x43004300u));  // 2a + 128
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(plus2) : "r"(y), "r"(0x3F803F80u), "r"(0x43024302u));  // a + 130
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(half4) : "r"(y), "r"(0x3F003F00u), "r"(0x43044304u));  // a/2 + 132
    return __vminu2(__vminu2(__vminu2(twice, plus2), half4), 0x43074307u);
}

// Sign bits of 8 numbers at the top of the 8 nibbles: `even` holds 00 or FF bytes of numbers 0, 2, 4, 6.
HQ_FN u32 place_signs(u32 codes, u32 even, u32 odd) { return codes | (even & 0x08080808u) | (odd & 0x80808080u); }

constexpr u32 SIGNS_OF_HALVES = 0xFBD9;  // (a.lo, b.lo, a.hi, b.hi) as 00 or FF bytes

template <class In>
HQ_FN u32 sign_row(u32 codes, const Patch<In>& patch, int i) {
    const auto& w = patch.word[i];
    if constexpr (In::size == 2) {
        const u32 a = permute(w[0], w[1], SIGNS_OF_HALVES), b = permute(w[2], w[3], SIGNS_OF_HALVES);
        return place_signs(codes, lows(a, b), highs(a, b));
    } else {
        return place_signs(codes, lows(permute(w[0], w[2], 0x00FB), permute(w[4], w[6], 0x00FB)),
                           lows(permute(w[1], w[3], 0x00FB), permute(w[5], w[7], 0x00FB)));
    }
}

template <class In>
HQ_FN u32 sign_column(u32 codes, const Patch<In>& patch, int c) {
    const auto& w = patch.word;
    if constexpr (In::size == 2) {
        const int p = c / 2;
        const u32 a = permute(w[0][p], w[2][p], SIGNS_OF_HALVES), b = permute(w[4][p], w[6][p], SIGNS_OF_HALVES);
        const u32 d = permute(w[1][p], w[3][p], SIGNS_OF_HALVES), e = permute(w[5][p], w[7][p], SIGNS_OF_HALVES);
        return c & 1 ? place_signs(codes, highs(a, b), highs(d, e)) : place_signs(codes, lows(a, b), lows(d, e));
    } else {
        return place_signs(codes, lows(permute(w[0][c], w[2][c], 0x00FB), permute(w[4][c], w[6][c], 0x00FB)),
                           lows(permute(w[1][c], w[3][c], 0x00FB), permute(w[5][c], w[7][c], 0x00FB)));
    }
}

// Codes of a row of the patch from packed pairs.
HQ_FN u32 encode_e2m1_row(const Patch<BFloat16>& patch, int i, u32 factors) {
    u32 t[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) t[p] = encode_e2m1_pair(patch.word[i][p], factors);
    const u32 a = permute(t[0], t[1], 0x6240), b = permute(t[2], t[3], 0x6240);
    return sign_row(lows(a, b) + (highs(a, b) << 4), patch, i);
}

// Codes of columns 2p and 2p + 1 of the patch from packed pairs.
HQ_FN void encode_e2m1_columns(const Patch<BFloat16>& patch, int p, u32 factors, u32& low, u32& high) {
    u32 four[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        u32 sum = 0u - 0x43004300u * 0x1111u;
#pragma unroll
        for (int r = 0; r < 4; ++r) sum += encode_e2m1_pair(patch.word[4 * h + r][p], factors) << (4 * r);
        four[h] = sum;
    }
    low = sign_column(lows(four[0], four[1]), patch, 2 * p);
    high = sign_column(highs(four[0], four[1]), patch, 2 * p + 1);
}

// --- unquantized elements ---

// 8 floats to Out's words.
template <class Out>
HQ_FN void narrow(const float (&value)[8], u32* words) {
    if constexpr (Out::size == 4) {
#pragma unroll
        for (int i = 0; i < 8; ++i) asm("mul.f32 %0, %1, 0f3F800000;" : "=r"(words[i]) : "f"(value[i]));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = narrow_pair<Out>(value[2 * i], value[2 * i + 1]);
    }
}

// --- lines of a patch ---

template <class In> struct RowOf {
    const Patch<In>& patch; int line;
    HQ_FN float at(int i) const { return patch.at(line, i); }
    HQ_FN float magnitude_at(int i) const { return patch.magnitude_at(line, i); }
    HQ_FN u32 sign(u32 codes) const { return sign_row(codes, patch, line); }
    HQ_FN void copy(u32* words) const {
#pragma unroll
        for (int w = 0; w < Patch<In>::words; ++w) words[w] = patch.word[line][w];
    }
};

template <class In> struct ColumnOf {
    const Patch<In>& patch; int line;
    HQ_FN float at(int i) const { return patch.at(i, line); }
    HQ_FN float magnitude_at(int i) const { return patch.magnitude_at(i, line); }
    HQ_FN u32 sign(u32 codes) const { return sign_column(codes, patch, line); }
    HQ_FN void copy(u32* words) const {
#pragma unroll
        for (int w = 0; w < Patch<In>::words; ++w) {
            if constexpr (In::size == 4) words[w] = patch.word[w][line];
            else words[w] = line & 1 ? highs(patch.word[2 * w][line / 2], patch.word[2 * w + 1][line / 2])
                                     : lows(patch.word[2 * w][line / 2], patch.word[2 * w + 1][line / 2]);
        }
    }
};

// What FP4 encodes is values times this: in half, or with float16's smallest normal number where E2M1's is.
template <class F>
constexpr float fp4_unit = F::stochastic ? 0x1p-14f : 0.5f;

// What the factor of a line is multiplied with before encode_line: FP4's unit, of FP6 the FP8 exponent.
template <class F>
HQ_FN float prepare_factor(float factor) {
    if constexpr (F::bits == 4) return factor * fp4_unit<F>;
    if constexpr (F::bits == 6 && F::hardware_fp6) return factor * float_of(Fp6<F>::scale_bits);
    return factor;
}

// Whether a careful encode_line differs from the other one.
template <class F>
constexpr bool has_short_cut = (F::scaling == TWO_LEVEL && F::bits == 4) || (F::hardware_fp6 && F::rounding == UP);

// 8 values of a line, times its prepared factor, to words. CAREFUL: two-level FP4 values are multiplied with `before`
// and their neighbours may be Inf; 6-bit values are clamped. draws: of a format that rounds at random.
template <class F, class In, bool CAREFUL, class Line>
HQ_FN void encode_line(const Line& line, float factor, float before, const u32* draws, u32* words) {
    if constexpr (F::bits >= 16) {
        if constexpr (same<typename F::Wide, In>::value) line.copy(words);
        else {
            float value[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) value[i] = line.at(i);
            narrow<typename F::Wide>(value, words);
        }
    } else if constexpr (F::bits == 4) {
        float value[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = F::scaling != TWO_LEVEL ? line.at(i) : CAREFUL ? line.at(i) * before : line.magnitude_at(i);
        if constexpr (F::stochastic) words[0] = line.sign(encode_e2m1_at_random(value, factor, draws));
        else words[0] = line.sign(encode_e2m1(value, factor));
    } else {
#pragma unroll
        for (int w = 0; w < 2; ++w)
            words[w] = encode_bytes<F, CAREFUL || !has_short_cut<F>>(line.at(4 * w) * factor, line.at(4 * w + 1) * factor,
                                       line.at(4 * w + 2) * factor, line.at(4 * w + 3) * factor);
    }
}

}  // namespace hq
