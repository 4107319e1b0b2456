// Inputs: an 8 x 8 patch of a thread, its loads and the largest magnitudes of its rows and columns.
//
// 16-bit elements stay packed, two columns a register, so that one instruction serves two; float32 stays as it is.
#pragma once
#include "codec.cuh"

namespace hq {

// Bytes of a (0 to 3) and b (4 to 7); bit 3 of a selector repeats the byte's sign bit, which __byte_perm cannot.
HQ_FN u32 permute(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}
template <class A, class B> struct same { static constexpr bool value = false; };
template <class A> struct same<A, A> { static constexpr bool value = true; };

template <bool CONDITION, class A, class B> struct choose { typedef A type; };
template <class A, class B> struct choose<false, A, B> { typedef B type; };

HQ_FN u32 lows(u32 a, u32 b) { return permute(a, b, 0x5410); }   // (a.lo, b.lo)
HQ_FN u32 highs(u32 a, u32 b) { return permute(a, b, 0x7632); }  // (a.hi, b.hi)

// Larger magnitude of each half. NAN_WINS: NaN if either is, else the one that is not. Signs are garbage.
#if __CUDA_ARCH__ >= 860
#define HQ_MAX_ABS2(type)                                                                          \
    if (NAN_WINS) asm("max.NaN.xorsign.abs." type " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));      \
    else asm("max.xorsign.abs." type " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
#define HQ_MAX_ABS2(type)                                                                          \
    a &= 0x7FFF7FFFu; b &= 0x7FFF7FFFu;                                                            \
    if (NAN_WINS) asm("max.NaN." type " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));                  \
    else asm("max." type " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#endif

struct BFloat16 {
    typedef u16 type;
    static constexpr int size = 2;
    template <bool NAN_WINS> static HQ_FN u32 max_abs2(u32 a, u32 b) { u32 d; HQ_MAX_ABS2("bf16x2") return d; }
    static HQ_FN float low(u32 pair) { return float_of(pair << 16); }
    static HQ_FN float high(u32 pair) { return float_of(pair & 0xFFFF0000u); }
    // The same on the FMA pipe, where the other half is finite: x * (0, 1) + (0, 0).
    static HQ_FN float high_beside_finite(u32 pair) {
        u32 d;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(0x3F800000u), "r"(0u));
        return float_of(d);
    }
};

struct Float16 {
    typedef u16 type;
    static constexpr int size = 2;
    template <bool NAN_WINS> static HQ_FN u32 max_abs2(u32 a, u32 b) { u32 d; HQ_MAX_ABS2("f16x2") return d; }
    static HQ_FN float widen(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
    static HQ_FN float low(u32 pair) { return widen(u16(pair)); }
    static HQ_FN float high(u32 pair) { return widen(u16(pair >> 16)); }
};

struct Float32 {
    typedef u32 type;
    static constexpr int size = 4;
};

// Larger magnitude of two floats, NaN as above.
template <bool NAN_WINS>
HQ_FN float max_abs(float a, float b) {
    float d;
    if (NAN_WINS) asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(fabsf(a)), "f"(fabsf(b)));
    else d = fmaxf(fabsf(a), fabsf(b));
    return d;
}

// Largest magnitude of 8 lines (the patch's rows, or its columns), held as `count` registers that can be shuffled.
template <class In>
struct Lines {
    static constexpr int count = In::size == 2 ? 4 : 8;
    u32 reg[count];

    template <bool NAN_WINS>
    static HQ_FN u32 larger(u32 a, u32 b) {
        if constexpr (In::size == 2) return In::template max_abs2<NAN_WINS>(a, b);
        else return bits_of(max_abs<NAN_WINS>(float_of(a), float_of(b)));
    }
    // Combine with the lane whose number differs by `mask`.
    template <bool NAN_WINS>
    HQ_FN void across(int mask) {
#pragma unroll
        for (int i = 0; i < count; ++i) reg[i] = larger<NAN_WINS>(reg[i], __shfl_xor_sync(~0u, reg[i], mask));
    }
    // Largest of all 8 lines, float bits without sign; NaN only where NAN_WINS.
    template <bool NAN_WINS>
    HQ_FN u32 whole() const {
        u32 best = reg[0];
#pragma unroll
        for (int i = 1; i < count; ++i) best = larger<NAN_WINS>(best, reg[i]);
        if constexpr (In::size == 2) best = bits_of(max_abs<NAN_WINS>(In::low(best), In::high(best)));
        return best & 0x7FFFFFFFu;
    }
    // Line i as a float whose sign is garbage, and as float32 bits without it.
    HQ_FN float signed_at(int i) const {
        if constexpr (In::size == 2) return i & 1 ? In::high(reg[i / 2]) : In::low(reg[i / 2]);
        else return float_of(reg[i]);
    }
    HQ_FN u32 at(int i) const { return bits_of(signed_at(i)) & 0x7FFFFFFFu; }
};

// Words of `all` from a byte on (0 to 15, a multiple of SIZE); all is overwritten.
template <int SIZE, int IN, int OUT>
HQ_FN void slice(u32 (&all)[IN], u32 byte, u32 (&words)[OUT]) {
    static_assert(IN >= OUT + 4, "a slice may begin in any of the first 16 bytes");
#pragma unroll
    for (int w = 0; w < OUT + 2; ++w) all[w] = byte & 8 ? all[w + 2] : all[w];
#pragma unroll
    for (int w = 0; w < OUT + 1; ++w) all[w] = byte & 4 ? all[w + 1] : all[w];
#pragma unroll
    for (int w = 0; w < OUT; ++w) words[w] = SIZE == 4 ? all[w] : __funnelshift_r(all[w], all[w + 1], (byte & 3) * 8);
}

template <class In>
struct Patch {
    static constexpr int words = In::size * 2;  // 32-bit words in a row of 8
    u32 word[8][words];

    HQ_FN float at(int row, int column) const {
        if constexpr (In::size == 4) return float_of(word[row][column]);
        else return column & 1 ? In::high(word[row][column / 2]) : In::low(word[row][column / 2]);
    }

    // The same up to the sign of zero, cheaper where the neighbour in its word is finite.
    HQ_FN float magnitude_at(int row, int column) const {
        if constexpr (same<In, BFloat16>::value)
            if (column & 1) return BFloat16::high_beside_finite(word[row][column / 2]);
        return at(row, column);
    }

    HQ_FN void clear() {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int w = 0; w < words; ++w) word[i][w] = 0;
    }

    // rows: how many of the 8 exist; columns: likewise, counted up to 16. What does not exist is zero.
    // ALIGNED: every row starts on 16 bytes. Otherwise rows start anywhere on an element.
    template <bool ALIGNED>
    HQ_FN void load(const char* first, i64 row_bytes, int rows, int columns) {
        if (!ALIGNED && rows > 0 && columns >= 16) return load_shifted(first, row_bytes, rows);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const char* source = first + i * row_bytes;
#pragma unroll
            for (int w = 0; w < words; ++w) word[i][w] = 0;
            if (i >= rows || columns <= 0) continue;
            if (ALIGNED && columns >= 8) load_row(i, source);
            else load_elements(word[i], source, columns);
        }
    }

    // 8 elements of row i, on 16 bytes.
    HQ_FN void load_row(int i, const char* source) {
#pragma unroll
        for (int v = 0; v < words / 4; ++v) {
            const uint4 four = __ldg(reinterpret_cast<const uint4*>(source) + v);
            word[i][4 * v] = four.x; word[i][4 * v + 1] = four.y; word[i][4 * v + 2] = four.z; word[i][4 * v + 3] = four.w;
        }
    }

  private:
    // The aligned vectors around each row, all under way before the first is shifted. Needs 16 readable bytes after.
    HQ_FN void load_shifted(const char* first, i64 row_bytes, int rows) {
        constexpr int vectors = words / 4 + 1;
        uint4 loaded[8][vectors];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u64 address = reinterpret_cast<u64>(first + (i < rows ? i : rows - 1) * row_bytes);
#pragma unroll
            for (int v = 0; v < vectors; ++v) loaded[i][v] = __ldg(reinterpret_cast<const uint4*>(address & ~15ull) + v);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32 all[4 * vectors];
#pragma unroll
            for (int v = 0; v < vectors; ++v) {
                all[4 * v] = loaded[i][v].x; all[4 * v + 1] = loaded[i][v].y;
                all[4 * v + 2] = loaded[i][v].z; all[4 * v + 3] = loaded[i][v].w;
            }
            slice<In::size>(all, (u32(reinterpret_cast<u64>(first)) + i * u32(row_bytes)) & 15, word[i]);
#pragma unroll
            for (int w = 0; w < words; ++w) word[i][w] = i < rows ? word[i][w] : 0;
        }
    }
    static HQ_FN void load_elements(u32* target, const char* source, int columns) {
        const auto* elements = reinterpret_cast<const typename In::type*>(source);
#pragma unroll
        for (int c = 0; c < 8; ++c)
            if (c < columns) target[c * In::size / 4] |= u32(__ldg(elements + c)) << (c * In::size * 8 % 32);
    }
};

// Bits of a largest magnitude, where a NaN counts as nothing.
HQ_FN u32 without_nan(u32 amax) { return amax > INF_BITS ? 0 : amax; }

// Largest magnitude of each row of a patch.
template <bool NAN_WINS, class In>
HQ_FN Lines<In> row_amax(const Patch<In>& patch) {
    typedef Lines<In> L;
    L lines;
#pragma unroll
    for (int i = 0; i < L::count; ++i) {
        if constexpr (In::size == 2) {  // two rows share a register
            u32 best[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32* w = patch.word[2 * i + r];
                best[r] = L::template larger<NAN_WINS>(L::template larger<NAN_WINS>(w[0], w[1]),
                                                       L::template larger<NAN_WINS>(w[2], w[3]));
            }
            lines.reg[i] = L::template larger<NAN_WINS>(lows(best[0], best[1]), highs(best[0], best[1]));
        } else {
            u32 best = patch.word[i][0] & 0x7FFFFFFFu;
#pragma unroll
            for (int c = 1; c < 8; ++c) best = L::template larger<NAN_WINS>(best, patch.word[i][c]);
            lines.reg[i] = best;
        }
    }
    return lines;
}

// Largest magnitude of each column of a patch.
template <bool NAN_WINS, class In>
HQ_FN Lines<In> column_amax(const Patch<In>& patch) {
    typedef Lines<In> L;
    L lines;
#pragma unroll
    for (int i = 0; i < L::count; ++i) {
        u32 best = patch.word[0][i];
        if constexpr (In::size == 4) best &= 0x7FFFFFFFu;
#pragma unroll
        for (int r = 1; r < 8; ++r) best = L::template larger<NAN_WINS>(best, patch.word[r][i]);
        lines.reg[i] = best;
    }
    return lines;
}

}  // namespace hq
