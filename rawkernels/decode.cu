// Decode for a GEMM: grid and tiles as quantize, over a part's rows and k up to a multiple of 8, to bf16 or float32.
//
// A scale of the whole matrix stays out of the values but for its power of two, which keeps products in range; the
// rest of both operands' goes to *alpha. TERMS 3 (bf16): three runs of k columns in a row. SPLIT: three terms whose sum
// is the float32 value, cut out of its bits. Otherwise the partner of such a row: the value three times, Inf and NaN
// in the first run alone, since they would meet the zeros among the others' terms. Rotated values (rht) stay so.
// Generated before this text: as for dequantize.cu, with TRANSPOSED 0, ALIGNED, and Part without the whole matrix's
// scale; SCALAR (there is one), TERMS, SPLIT.
//
// GROUPED: many matrices; a block finds its member. RAGGED_K: they differ in k, each decodes to (m, round_up(k, 8)), and
// the grid's x counts tiles of all members. Otherwise they differ in rows, which stay where they are stacked.
#define HQ_NO_ENTRY
#include "dequantize.cu"
#include "whole.cuh"

namespace hq {

struct DecodeArguments {
    const u8* codes;
    i64 pitch;
    const u8* scales;
    i64 scale_pitch;
    const float* scalar;  // of this part, where SCALAR; its lines' global scales, where they have some
    const float* other;   // of the other operand, or null
    float* alpha;         // null where another kernel writes it
    char* values;
    i64 row_bytes, m, k;
};

struct GroupedDecodeArguments {
    DecodeArguments all;
    Groups groups;
    i64 codes_unit, scales_unit, values_unit;
};

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

// The patch of a thread.
HQ_FN void decode_patch(const DecodeArguments& a, i64 row0, i64 column0) {
    const int rows = count_of(a.m, row0, 8), columns = count_of(a.k, column0, 8);
    if (rows <= 0 || columns <= 0) return;
    const u8* source = a.codes + row0 * a.pitch + column0 * WORDS / 2;
    alignas(16) u32 codes[8][WORDS];
#pragma unroll
    for (int r = 0; r < 8; ++r)  // rows up to a multiple of 16 are there, except within a group
#pragma unroll
        for (int w = 0; w < WORDS; w += PIECE) {
            if ((!GROUPED || r < rows) && (WORDS < 8 || column0 * 4 + 4 * w < a.pitch)) load_once(source + r * a.pitch + 4 * w, codes[r] + w);
            else
#pragma unroll
                for (int n = 0; n < PIECE; ++n) codes[r][w + n] = 0;
        }
    float scale[8];
    load_scales<Part>({a.codes, a.pitch, a.scales, a.scale_pitch, nullptr, nullptr, 0, a.m, a.k}, row0, column0, scale);
    const GlobalScale<Part> global_scale(a.scalar, row0, a.m);
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
            if constexpr (Part::global_scale) { low *= global_scale.of(r); high *= global_scale.of(r); }
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

static_assert(LANES_ACROSS * 8 == TILE_COLUMNS, "a warp spans a tile's columns");
HQ_FN int own_row() { return threadIdx.x / 32 * 8; }
HQ_FN int own_column() { return threadIdx.x % 32 * 8; }

#if GROUPED
constexpr int SPANS = Part::global_per_row ? 4 : 3;

// A member's matrix.
HQ_FN DecodeArguments arguments_of(const GroupedDecodeArguments& g, const Member<SPANS>& member) {
    DecodeArguments own = g.all;
    own.scalar += Part::global_per_row ? member.before[3] * (RAGGED_K ? own.m : 1) : member.index;
    own.scales += member.before[1] * g.scales_unit;
    constexpr bool block_major = !Part::one_scale && Part::scale_rows == 1, row_major = !Part::one_scale && !block_major;
    if (RAGGED_K ? row_major : block_major) own.scale_pitch = Scales::of(member.size);
    if constexpr (RAGGED_K) {
        own.codes += member.before[0] * g.codes_unit;
        own.values += member.before[2] * g.values_unit;
        own.pitch = round_up((member.size * Part::stored_bits + 7) / 8, 16);
        own.k = round_up(member.size, 8);
        own.row_bytes = TERMS * own.k * Output::size;
    } else {
        own.codes += member.start * own.pitch;
        own.values += member.start * own.row_bytes;
        own.m = member.size;
    }
    return own;
}
#endif

}  // namespace hq

#if GROUPED
extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_decode(const __grid_constant__ hq::GroupedDecodeArguments g) {
    using namespace hq;
    __shared__ Member<SPANS> member;
    __shared__ DecodeArguments own;
    if (threadIdx.x < 32) {
        find_lines<Part, RAGGED_K ? TILE_COLUMNS : TILE_ROWS>(g.groups, RAGGED_K ? blockIdx.x : row_tile(), member, Codes{}, Scales{}, Span<1, 8>{});
        if (threadIdx.x == 0 && member.index >= 0) own = arguments_of(g, member);
    }
    __syncthreads();
    if (member.index < 0) return;
    const i64 line_tile = RAGGED_K ? row_tile() : member.tile, column_tile = RAGGED_K ? member.tile : blockIdx.x;
    decode_patch(own, line_tile * TILE_ROWS + own_row(), column_tile * TILE_COLUMNS + own_column());
}
#else
extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_decode(const __grid_constant__ hq::DecodeArguments a) {
    using namespace hq;
    if (a.alpha && first_thread())
        *a.alpha = (SCALAR ? rest_of(*a.scalar) : 1.0f) * (a.other ? rest_of(*a.other) : 1.0f);
    decode_patch(a, row_tile() * TILE_ROWS + own_row(), i64(blockIdx.x) * TILE_COLUMNS + own_column());
}
#endif
