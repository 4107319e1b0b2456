// Codes, scales and their rules on the bits of numbers: no hardware conversion, so g++ compiles it too and proves it
// against reference.py. The fast paths of encode.cuh are compared with this.
#pragma once

#ifdef __CUDACC__
#define HQ_FN __device__ __forceinline__
#else
#include <cstring>
#define HQ_FN inline
#endif

namespace hq {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

enum Specials { FINITE = 0, NAN_ONLY = 1, IEEE = 2 };
enum ScaleKind { NO_SCALE = 0, FLOAT32 = 1, E8M0 = 2, E4M3_SCALE = 3 };
enum Scaling { NO_SCALING = 0, RECIPROCAL = 1, POWER_OF_TWO = 2, TWO_LEVEL = 3 };
enum Measure { NOTHING, WHOLE, LINES };  // amax of no matrix, of a whole one, of each of its lines
enum Choice { ALWAYS_SIX, ABSOLUTE_ERRORS, SQUARED_ERRORS };  // which scale a two-level block takes
enum Rounding { UP = 0, FLOOR = 1, EVEN = 2 };

constexpr u32 INF_BITS = 0x7F800000u;
constexpr u32 NAN_BITS = 0x7FFFFFFFu;  // the hardware's canonical NaN
constexpr u32 FLT_MAX_BITS = 0x7F7FFFFFu;
constexpr u32 SIXTH_BITS = 0x3E2AAAABu;  // RN(1/6)

#ifdef __CUDACC__
HQ_FN u32 bits_of(float x) { return __float_as_uint(x); }
HQ_FN float float_of(u32 x) { return __uint_as_float(x); }
HQ_FN float divide(float a, float b) { return __fdiv_rn(a, b); }
#else
HQ_FN u32 bits_of(float x) { u32 y; std::memcpy(&y, &x, 4); return y; }
HQ_FN float float_of(u32 x) { float y; std::memcpy(&y, &x, 4); return y; }
HQ_FN float divide(float a, float b) { return a / b; }
#endif

// An element format of at most 8 bits; derived numbers as in formats.Element.
template <int EXPONENT_BITS, int MANTISSA_BITS, int BIAS, int SPECIALS>
struct Element {
    static constexpr int bits = 1 + EXPONENT_BITS + MANTISSA_BITS;
    static constexpr int mantissa_bits = MANTISSA_BITS, bias = BIAS;
    static constexpr u32 ones = (1u << (bits - 1)) - 1;
    static constexpr bool has_nan = SPECIALS != FINITE;
    static constexpr u32 nan_code = has_nan ? ones : 0;
    static constexpr u32 max_code = ones - (SPECIALS == FINITE ? 0 : SPECIALS == NAN_ONLY ? 1 : 1u << MANTISSA_BITS);
    static constexpr int max_exponent = int(max_code >> MANTISSA_BITS) - BIAS;
    // float32 bits of the largest finite value
    static constexpr u32 max_bits = (max_code << (23 - MANTISSA_BITS)) + (u32(127 - BIAS) << 23);

    // Nearest, ties to the even code; saturating; NaN becomes nan_code.
    static HQ_FN u32 encode(u32 x) {
        u32 sign = (x >> 31) << (bits - 1), magnitude = x & 0x7FFFFFFFu;
        if (magnitude > INF_BITS) return nan_code;
        if (magnitude >= max_bits) return sign | max_code;
        constexpr u32 smallest_normal = u32(128 - BIAS) << 23;
        u32 shift = 23 - MANTISSA_BITS, offset = u32(127 - BIAS) << MANTISSA_BITS;
        u32 significand = magnitude;
        if (magnitude < smallest_normal) {  // count in units of the element's smallest value
            u32 exponent = magnitude >> 23;
            u32 extra = u32(128 - BIAS) - (exponent == 0 ? 1 : exponent);
            significand = (magnitude & 0x7FFFFFu) | (exponent == 0 ? 0 : 0x800000u);
            shift += extra;
            offset = 0;
            if (shift > 25) return sign;
        }
        u32 rounded = (significand + (1u << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift;
        u32 code = rounded - offset;
        return sign | (code > max_code ? max_code : code);
    }

    // float32 bits of a code.
    static HQ_FN u32 decode(u32 code) {
        u32 sign = (code >> (bits - 1)) << 31, magnitude = code & ones;
        if (SPECIALS != FINITE && magnitude > max_code)
            return SPECIALS == IEEE && magnitude == max_code + 1 ? sign | INF_BITS : NAN_BITS;
        if ((magnitude >> MANTISSA_BITS) == 0)  // mantissa times 2^(1 - BIAS - MANTISSA_BITS)
            return sign | bits_of(float(int(magnitude)) * float_of(u32(128 - BIAS - MANTISSA_BITS) << 23));
        return sign | ((magnitude << (23 - MANTISSA_BITS)) + (u32(127 - BIAS) << 23));
    }
};

typedef Element<4, 3, 7, NAN_ONLY> E4M3;

// E8M0 byte of a block's amax (sign clear, not NaN); Inf is 254. Exact where float32 would round the quotient.
template <class E, int ROUNDING>
HQ_FN u32 power_of_two_scale(u32 amax) {
    constexpr u32 top = E::max_bits & 0x7FFFFFu;
    constexpr u32 carry = ROUNDING == UP ? 0x7FFFFFu - top : ROUNDING == FLOOR ? 0u : 1u << (22 - E::mantissa_bits);
    int byte = int((amax + carry) >> 23) - E::max_exponent;
    byte = byte < 0 ? 0 : byte;
    if (E::max_exponent == 0 && byte == 255) byte = 254;  // the scale that saturates: 2^128 is none
    return amax >= INF_BITS ? 254u : u32(byte);
}

// float32 bits of 2^(127 - byte); byte 254 asks for a subnormal.
HQ_FN u32 power_of_two_factor(u32 byte) { return byte == 254 ? 0x00400000u : (254 - byte) << 23; }

// float32 bits of an E8M0 byte.
HQ_FN u32 decode_e8m0(u32 byte) { return byte == 0 ? 0x00400000u : byte == 255 ? NAN_BITS : byte << 23; }

// Encode factor of one fp32 scale; the stored scale is its reciprocal.
HQ_FN float reciprocal_factor(float amax, float max, float epsilon, bool pow2) {
    amax = amax < epsilon ? epsilon : amax;
    if (!(amax > 0.0f && amax < float_of(INF_BITS))) return 1.0f;
    float factor = divide(max, amax);
    factor = factor < float_of(FLT_MAX_BITS) ? factor : float_of(FLT_MAX_BITS);
    return pow2 ? float_of(bits_of(factor) & INF_BITS) : factor;
}

// S_enc of a two-level format; S_dec is its reciprocal.
HQ_FN float global_encode_scale(float amax, float bound_times_max) {
    if (!(amax > 0.0f && amax < float_of(INF_BITS))) return 1.0f;
    float scale = divide(bound_times_max, amax);
    return scale < float_of(FLT_MAX_BITS) ? scale : float_of(FLT_MAX_BITS);
}

// Encode factor under a decoded E4M3 scale: the reciprocal of the scale the decoder will use.
HQ_FN float two_level_factor(float scale, float global_decode_scale) {
    float factor = divide(1.0f, scale * global_decode_scale);
    return factor < float_of(FLT_MAX_BITS) ? factor : float_of(FLT_MAX_BITS);
}

}  // namespace hq
