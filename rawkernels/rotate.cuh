// The random Hadamard transform of hadamard.py on 16 values, of which a thread holds 8. g++ compiles it too.
#pragma once
#include "codec.cuh"

namespace hq {

// Sums and differences of 8 neighbours, the lower or the upper half of 16: h = 1, 2, 4.
HQ_FN void butterflies(float (&value)[8]) {
#pragma unroll
    for (int h = 1; h < 8; h *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!(i & h)) {
                const float first = value[i], second = value[i + h];
                value[i] = first + second;
                value[i + h] = first - second;
            }
}

// h = 8: one's own number and its partner in the other half.
HQ_FN float joined(float own, float other, bool upper) { return upper ? other - own : own + other; }

// The diagonal's entry, of which bit i of `signs` is set where it is -1.
HQ_FN float sign_of(u32 signs, int i, bool upper) { return float_of(0x3F800000u | (signs >> (upper ? i + 8 : i) & 1) << 31); }

// A product that the compiler does not make a flip of the sign of, which would show in a NaN.
HQ_FN float product(float a, float b) {
#ifdef __CUDACC__
    asm("mul.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
#else
    return a * b;
#endif
}

// 8 of 16 values times H; lane ^ APART holds the others. For the lanes of `mask`.
template <int APART>
HQ_FN void transform(float (&value)[8], bool upper, u32 mask) {
    butterflies(value);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = joined(value[i], __shfl_xor_sync(mask, value[i], APART), upper);
}

// hadamard.rotate_back.
template <int APART>
HQ_FN void rotate_back(float (&value)[8], u32 signs, bool upper, u32 mask) {
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] *= 0.25f;
    transform<APART>(value, upper, mask);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = product(value[i], sign_of(signs, i, upper));
}

}  // namespace hq
