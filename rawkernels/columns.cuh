// Four columns of a row of values in any of the dtypes of products, or eight that are read before any is needed.
#pragma once
#include "encode.cuh"

namespace hq {

constexpr int COLUMNS = 4;

template <class T>
HQ_FN float load(const char* source, int i) {
    const auto bits = reinterpret_cast<const typename T::type*>(source)[i];
    if constexpr (T::size == 4) return float_of(bits);
    else return T::low(bits);
}

constexpr int WIDE = 8;

// Eight columns of a row as they lie there.
template <class T>
struct Wide {
    static constexpr int WORDS = WIDE * T::size / 4;
    union { uint4 vector[WORDS / 4]; u32 word[WORDS]; };

    HQ_FN void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) word[i] = 0;
    }
    template <bool IN_VECTORS>
    HQ_FN void load(const char* source, int count) {
        if constexpr (IN_VECTORS) {
#pragma unroll
            for (int i = 0; i < WORDS / 4; ++i) vector[i] = __ldcs(reinterpret_cast<const uint4*>(source) + i);
        } else {
#pragma unroll
            for (int c = 0; c < WIDE; ++c)
                if (c < count) word[c * T::size / 4] |= u32(reinterpret_cast<const typename T::type*>(source)[c]) << (c * T::size * 8 % 32);
        }
    }
    HQ_FN float at(int c) const {
        if constexpr (T::size == 4) return float_of(word[c]);
        else return c % 2 ? T::high(word[c / 2]) : T::low(word[c / 2]);
    }
};

template <class T>
HQ_FN void store(char* target, const float (&value)[COLUMNS], int count) {
    u32 words[COLUMNS * T::size / 4];
#pragma unroll
    for (int pair = 0; pair < COLUMNS / 2; ++pair) {
        if constexpr (T::size == 4) {
            words[2 * pair] = bits_of(value[2 * pair]);
            words[2 * pair + 1] = bits_of(value[2 * pair + 1]);
        } else words[pair] = narrow_pair<T>(value[2 * pair], value[2 * pair + 1]);
    }
    if (count >= COLUMNS && reinterpret_cast<u64>(target) % (COLUMNS * T::size) == 0) {
        if constexpr (T::size == 4) *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
        else *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (c < count) reinterpret_cast<typename T::type*>(target)[c] = typename T::type(words[c * T::size / 4] >> (c * T::size * 8 % 32));
    }
}

}  // namespace hq
