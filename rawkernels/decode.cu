// Decode for a GEMM: grid and tiles as quantize, over a part's rows and k up to a multiple of 8, to bf16 or float32.
//
// A scale of the whole matrix stays out of the values but for its power of two, which keeps products in range; the
// rest of both operands' goes to *alpha. TERMS 3 (bf16): three runs of k columns in a row. SPLIT: three terms whose sum
// is the float32 value, cut out of its bits. Otherwise the partner of such a row: the value three times, Inf and NaN
// in the first run alone, since they would meet the zeros among the others' terms.
// Generated before this text: as for dequantize.cu, with TRANSPOSED 0, ALIGNED, and Part without the whole matrix's
// scale; SCALAR (there is one), TERMS, SPLIT.
#define HQ_NO_ENTRY
#include "dequantize.cu"

namespace hq {

struct DecodeArguments {
    const u8* codes;
    i64 pitch;
    const u8* scales;
    i64 scale_pitch;
    const float* scalar;  // of this part, where SCALAR
    const float* other;   // of the other operand, or null
    float* alpha;         // null where another kernel writes it
    char* values;
    i64 row_bytes, m, k;
};

// Biased exponent of the power of two that goes into the values: in [-100, 100], where no decoded value is subnormal.
HQ_FN u32 exponent_of(float scalar) {
    const u32 field = bits_of(scalar) >> 23 & 255;
    return field == 255 ? 127 : field < 27 ? 27 : field > 227 ? 227 : field;
}
HQ_FN float power_of(float scalar) { return float_of(exponent_of(scalar) << 23); }
HQ_FN float rest_of(float scalar) { return scalar * float_of((254 - exponent_of(scalar)) << 23); }

// Codes are read once: they leave the L2 to the values, which the GEMM reads next.
HQ_FN void load_once(const u8* source, u32* words) {
    if constexpr (PIECE == 1) words[0] = __ldcs(reinterpret_cast<const u32*>(source));
    if constexpr (PIECE == 2) {
        const uint2 two = __ldcs(reinterpret_cast<const uint2*>(source));
        words[0] = two.x; words[1] = two.y;
    }
    if constexpr (PIECE == 4) load_codes(source, words);
}

// bf16 words without their infinities and NaNs.
HQ_FN u32 finite_pair(u32 pair) { return pair & ~__vcmpeq2(pair & 0x7F807F80u, 0x7F807F80u); }

// The upper 8 bits of a significand, and what is left: exact, twice, until nothing is.
HQ_FN float cut(float& value) {
    const float top = float_of(bits_of(value) & 0xFFFF0000u);
    value = (bits_of(value) & 0x7F800000u) == INF_BITS ? 0.0f : value - top;
    return top;
}
// A NaN whose payload lies in the lower half would be cut to Inf.
HQ_FN float quiet(float value) { return value == value ? value : float_of(NAN_BITS); }

}  // namespace hq

extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_decode(const __grid_constant__ hq::DecodeArguments a) {
    using namespace hq;
    if (a.alpha && first_thread())
        *a.alpha = (SCALAR ? rest_of(*a.scalar) : 1.0f) * (a.other ? rest_of(*a.other) : 1.0f);
    static_assert(LANES_ACROSS * 8 == TILE_COLUMNS, "a warp spans a tile's columns");
    const i64 row0 = (blockIdx.y + i64(blockIdx.z) * gridDim.y) * TILE_ROWS + threadIdx.x / 32 * 8;
    const i64 column0 = i64(blockIdx.x) * TILE_COLUMNS + threadIdx.x % 32 * 8;
    const int rows = count_of(a.m, row0, 8), columns = count_of(a.k, column0, 8);
    if (rows <= 0 || columns <= 0) return;
    const u8* source = a.codes + row0 * a.pitch + column0 * WORDS / 2;
    alignas(16) u32 codes[8][WORDS];
#pragma unroll
    for (int r = 0; r < 8; ++r)  // rows up to a multiple of 16 are there
#pragma unroll
        for (int w = 0; w < WORDS; w += PIECE) {
            if (WORDS < 8 || column0 * 4 + 4 * w < a.pitch) load_once(source + r * a.pitch + 4 * w, codes[r] + w);
            else
#pragma unroll
                for (int n = 0; n < PIECE; ++n) codes[r][w + n] = 0;
        }
    float scale[8];
    load_scales<Part>({a.codes, a.pitch, a.scales, a.scale_pitch, nullptr, nullptr, 0, a.m, a.k}, row0, column0, scale);
    const float power = SCALAR ? power_of(*a.scalar) : 1.0f;
    char* target = a.values + row0 * a.row_bytes + column0 * Output::size;
    const i64 run_bytes = a.k * Output::size;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const DecodedLine<Part> line(codes[r]);
        const float factor = Part::scale == NO_SCALE ? power : SCALAR ? scale[r] * power : scale[r];
        const bool whole = Part::scale == NO_SCALE && !SCALAR;
        u32 words[TERMS][Output::size * 2];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            float low = line.value(2 * pair), high = line.value(2 * pair + 1);
            if (!whole) { low *= factor; high *= factor; }
            if constexpr (SPLIT) {
                low = quiet(low); high = quiet(high);
#pragma unroll
                for (int t = 0; t < TERMS; ++t) {
                    const float a_low = cut(low), a_high = cut(high);
                    put_pair<Output>(words[t], pair, a_low, a_high);
                }
            } else {
                put_pair<Output>(words[0], pair, low, high);
#pragma unroll
                for (int t = 1; t < TERMS; ++t) words[t][pair] = finite_pair(words[0][pair]);
            }
        }
        if (r < rows)
#pragma unroll
            for (int t = 0; t < TERMS; ++t) store_values(target + r * a.row_bytes + t * run_bytes, words[t], columns);
    }
}
