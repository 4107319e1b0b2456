// Parts of quantize.cu: its arguments and shared memory, the scales of each kind of block, and where codes go.
#pragma once
#include "four_over_six.cuh"
#include "group.cuh"
#include "hadamard.cuh"
#include "largest.cuh"
#include "philox.cuh"
#include "turn.cuh"

namespace hq {

struct Output {
    u8* codes;
    u64 pitch16;  // 16 bytes, from one line to the next
    u8* scales;
    i64 scale_pitch;  // scales from one row of the scale buffer to the next
    float* global_scale;
    float* amax;
};

struct Arguments {
    const char* values;
    i64 row_bytes;  // from one row of X to the next
    i64 m, k;
    const float* whole[2];  // amax of X, or of each line, as the rowwise and the columnwise part measure it
    const u32* noop;        // nothing is written where it is not zero
    Output row, column;
    i64 reversed;  // last tile first: after an amax pass that went forward
    i64 rows;      // rows of codes that are written: m, and padding
    i64 lines;     // the same of columns: k, and padding
    const u64* seed_at;  // of draws; null: the next field
    u64 seed;
    i64 turned;    // X is the transposed matrix: rows draw as its columns
    i64 before[2];  // rows and columns before it in the matrix whose draws it shares
    u32* record;    // float bits, raised to the largest magnitude of X (delayed scaling); null: nothing is recorded
};

struct Segments {  // of one part of a group, bytes
    i64 codes_unit, scales_unit;
    i64 codes_end, scales_end;
};

struct GroupedArguments {
    Arguments all;
    const TableMember* table;  // of members.cu, a line a row tile
    i64 count;
    Segments row, column;
    i64 zeros_rest;  // whether what lies behind the last member is zeroed
};

template <class F> constexpr bool in_lanes = F::block_columns == 16 || F::block_columns == 32;
template <class F> constexpr bool in_tile = F::block_columns == 128;
template <class F> constexpr bool square = F::block_rows > 1;
template <class F> constexpr bool one_scale = F::scaling == RECIPROCAL && F::block_columns == 0;
template <class F> constexpr bool nan_wins = F::scaling != NO_SCALING && !F::Element::has_nan;
template <class F> constexpr bool is_long = F::four_over_six != ALWAYS_SIX;  // no second copy of such code
template <class F> constexpr bool has_table = F::scaling == TWO_LEVEL && !F::per_row;
template <class F> constexpr bool has_whole = has_table<F> || one_scale<F>;  // a scale of the whole matrix
template <class F> constexpr int line_bytes = F::stored_bits * TILE_ROWS / 8;  // a staged column

// Both directions of one matrix have the same global scale, and so the same factors, if their bounds are equal, they
// measure the same amax and prepare factors alike.
template <class A, class B>
HQ_FN constexpr bool same_table() {
    if constexpr (has_table<A> && has_table<B>)
        return A::bound == B::bound && A::stochastic == B::stochastic && !A::rht && !B::rht &&
            same<typename A::Element, typename B::Element>::value;
    else return true;
}
constexpr bool SAME_TABLE = same_table<Row, Column>();

// Whether `record` is looked at: a scale of the whole matrix may come from amaxes of earlier steps. That of a rotated
// part may not: what is recorded is the amax of X.
constexpr bool RECORDS = (has_whole<Row> || has_whole<Column>) && !(has_whole<Row> && Row::rht) && !(has_whole<Column> && Column::rht);

struct Shared {
    alignas(16) u8 stage[Column::present ? TILE_COLUMNS * line_bytes<Column> : 16];
    Table table[has_table<Row> && has_table<Column> && !SAME_TABLE ? 2 : 1];
    alignas(16) u32 partial[2][4][128];  // largest magnitudes of a line in each warp that sees it
    alignas(16) float factor[2][128];
    Keys keys[1];
    OfWarps seen;
#if GROUPED
    TableMember member;
    Arguments own;
#endif
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch reserves too little shared memory");

// Largest magnitudes of the lines over what one warp sees of their block.
template <class F, int DOWN, class In>
HQ_FN Lines<In> block_amax(const Patch<In>& patch) {
    typedef Direction<DOWN> D;
    constexpr bool nan = nan_wins<F>;
    Lines<In> lines = DOWN ? column_amax<nan>(patch) : row_amax<nan>(patch);
    constexpr int lanes = F::block_columns / 8 < D::lanes ? F::block_columns / 8 : D::lanes;
#pragma unroll
    for (int mask = 1; mask < lanes; mask *= 2) lines.template across<nan>(mask * D::step);
    return lines;
}

// Squares of 16 x 16 or 32 x 32: one amax for the 8 lines and for those of the other lanes.
template <class F, int DOWN, class In>
HQ_FN void square_amax(Lines<In>& lines) {
    constexpr bool nan = nan_wins<F>;
    u32 best = lines.template whole<nan>();
#pragma unroll
    for (int lane = 1; lane < F::block_rows / 8; lane *= 2)
        best = bits_of(max_abs<nan>(float_of(best), float_of(__shfl_xor_sync(~0u, best, lane * Direction<DOWN>::other_step))));
    if constexpr (In::size == 2) best = narrow_pair<In>(float_of(best), 0.0f) & 0xFFFFu;
#pragma unroll
    for (int i = 0; i < Lines<In>::count; ++i) lines.reg[i] = In::size == 2 ? best * 0x10001u : best;
}

// 128-blocks, step 1: what each warp saw, to shared memory.
template <class F, int DOWN>
HQ_FN void share_amax(const Lines<Input>& lines, const Place& p, Shared& shared) {
    typedef Direction<DOWN> D;
    if constexpr (square<F>) {
        u32 best = lines.template whole<false>();
#pragma unroll
        for (int mask = D::other_step; mask < D::other_step * (32 / D::lanes); mask *= 2)
            best = bits_of(max_abs<false>(float_of(best), float_of(__shfl_xor_sync(~0u, best, mask))));
        if ((threadIdx.x & 31) == 0) shared.partial[DOWN][0][p.warp] = best;
    } else if (D::lane(p) == 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) shared.partial[DOWN][D::warp(p)][D::line(p) + i] = lines.at(i);
    }
}

// 128-blocks, step 2: a thread a line; stores the scale, leaves the factor in shared memory.
template <class F, int DOWN>
HQ_FN void tile_scale(const Arguments& a, const Output& out, const Place& p, Shared& shared) {
    typedef Direction<DOWN> D;
    const float max = float_of(F::Element::max_bits);
    float* scales = reinterpret_cast<float*>(out.scales);
    const i64 line_tile = DOWN ? p.tile_column : p.tile_row, along_tile = DOWN ? p.tile_row : p.tile_column;
    if constexpr (square<F>) {
        float best = 0.0f;
#pragma unroll
        for (int w = 0; w < THREADS / 32; ++w) best = fmaxf(best, float_of(without_nan(shared.partial[DOWN][0][w])));
        const float factor = reciprocal_factor(best, max, F::epsilon, F::pow2);
        if (threadIdx.x < 128) shared.factor[DOWN][threadIdx.x] = prepare_factor<F>(factor);
        const i64 blocks = round_up(D::length(a), 128) / 128;
        const i64 column = along_tile + threadIdx.x;  // one thread writes the scale, the next ones the padding
        if (threadIdx.x < 4 && column < out.scale_pitch && (threadIdx.x == 0 || (along_tile == blocks - 1)))
            scales[line_tile * out.scale_pitch + column] = threadIdx.x == 0 ? divide(1.0f, factor) : 0.0f;
    } else {
        const int line = int(threadIdx.x) - DOWN * 128;
        if (line < 0 || line >= 128) return;
        float best = 0.0f;
#pragma unroll
        for (int w = 0; w < D::warps; ++w) best = fmaxf(best, float_of(without_nan(shared.partial[DOWN][w][line])));
        const float factor = reciprocal_factor(best, max, F::epsilon, F::pow2);
        shared.factor[DOWN][line] = prepare_factor<F>(factor);
        const i64 at = line_tile * 128 + line;
        if (at < out.scale_pitch)
            scales[along_tile * out.scale_pitch + at] = at < D::lines(a) ? divide(1.0f, factor) : 0.0f;
    }
}

// 16- and 32-blocks: the first lane of each block stores the 8 bytes of its lines.
template <class F, int DOWN, class In>
HQ_FN void store_bytes(const LineScales<F, In>& scales, const Arguments& a, const Output& out, const Place& p) {
    typedef Direction<DOWN> D;
    if (D::lane(p) % (F::block_columns / 8)) return;
    if (!p.inside && (D::along0(p) >= D::length(a) || D::line0(p) >= out.scale_pitch)) return;
    constexpr int tile_blocks = D::tile_length / F::block_columns;
    const u8* tile = out.scales + D::along_tile(p) * tile_blocks * out.scale_pitch + D::line_tile(p) * D::tile_lines;
    char* target = line_at(tile, D::along(p) / F::block_columns, u32(out.scale_pitch >> 4)) + D::line(p);
    store_global<2>(target, scales.stored);
}

template <int WORDS>
HQ_FN void store_words(char* target, const u32* words) {
    if constexpr (WORDS == 1) *reinterpret_cast<u32*>(target) = words[0];
    else if constexpr (WORDS == 2) *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
    else {
#pragma unroll
        for (int v = 0; v < WORDS / 4; ++v)
            reinterpret_cast<uint4*>(target)[v] = make_uint4(words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]);
    }
}

// Where line i's codes go: rows to global memory, columns to the stage.
template <class F, int DOWN>
struct Sink {
    static constexpr int words = F::stored_bits / 4;
    char* target;
    u32 pitch16;
    int lines = 8;       // how many of the 8 lines are stored
    bool second = true;  // whether a row's pitch holds the second 16 of its 32 bytes

    HQ_FN Sink(const Output& out, const Place& p, Shared& shared, i64 rows) {
        if constexpr (DOWN) {
            target = reinterpret_cast<char*>(shared.stage);
        } else {
            pitch16 = u32(out.pitch16);
            const u8* tile = out.codes + p.tile_row * TILE_ROWS * 16 * out.pitch16 + p.tile_column * TILE_COLUMNS * words / 2;
            target = line_at(tile, p.row, pitch16) + p.column * words / 2;
            if (!p.inside) {
                const i64 byte = p.column0 * words / 2, pitch = i64(out.pitch16) * 16;
                second = byte + 16 < pitch;
                lines = byte < pitch ? count_of(rows, p.row0, 8) : 0;
            }
        }
    }
    HQ_FN void put(const Place& p, int i, const u32* line_words) const {
        if constexpr (DOWN) {
            constexpr int piece = words < 4 ? words : 4;
#pragma unroll
            for (int w = 0; w < words; w += piece)
                store_words<piece>(target + staged(p.column + i, p.row * line_bytes<F> / TILE_ROWS + 4 * w, line_bytes<F>), line_words + w);
        } else if (i < lines) {
            char* line = line_at(target, i, pitch16);
            store_global<words == 8 ? 4 : words>(line, line_words);
            if (words == 8 && second) store_global<4>(line + 16, line_words + 4);
        }
    }
};

// CAREFUL: as of encode_line, and lines may begin anywhere in the matrix whose draws they share.
template <class F, int DOWN, bool CAREFUL = false, class In, class Scales>
HQ_FN void encode_lines(const Patch<In>& patch, const Arguments& a, const Shared& shared, const Scales& scales, const Sink<F, DOWN>& sink, const Place& p) {
    typedef typename choose<CAREFUL, AnyPairs<DOWN>, AlignedPairs<DOWN>>::type Pairs;
    const Draws<DOWN> draws(*shared.keys, a.turned, a.before, p);
    typename choose<F::stochastic, Pairs, NoPairs<DOWN>>::type pairs(draws);
    u32 random[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 w[Sink<F, DOWN>::words];
        if (i % 2 == 0) pairs.words(i / 2, random);
        if constexpr (DOWN) encode_line<F, In, CAREFUL>(ColumnOf<In>{patch, i}, scales.at(i), scales.before(i), random + 2 * (i % 2), w);
        else encode_line<F, In, CAREFUL>(RowOf<In>{patch, i}, scales.at(i), scales.before(i), random + 2 * (i % 2), w);
        sink.put(p, i, w);
    }
}

// Whether a patch takes the copy of the code that serves every case.
template <class F, int DOWN, class Scales>
HQ_FN bool is_careful(const Scales& scales, const Arguments& a, const Shared& shared, const Place& p) {
    if (!has_short_cut<F>) return false;
    if (F::stochastic && !Draws<DOWN>(*shared.keys, a.turned, a.before, p).aligned()) return true;
    return scales.careful;
}

// A NaN that the element cannot hold is in the block's scale; the block's codes are zero. Rare, so it is done after.
template <class F, int DOWN>
HQ_FN void zero_lines(u32 nan, const Sink<F, DOWN>& sink, const Place& p) {
    if (F::Element::has_nan || nan == 0) return;
    const u32 zeros[Sink<F, DOWN>::words] = {};
#pragma unroll 1
    for (int i = 0; i < 8; ++i)
        if (nan >> i & 1) sink.put(p, i, zeros);
}

// Packed FP4: pairs of columns share their instructions.
template <class F, int DOWN, class In>
HQ_FN void encode_pairs(const Patch<In>& patch, const LineScales<F, In>& scales, const Sink<F, DOWN>& sink, const Place& p) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        u32 w[2];
        if constexpr (DOWN) encode_e2m1_columns(patch, c, scales.factor[c], w[0], w[1]);
        else {
            w[0] = encode_e2m1_row(patch, 2 * c, lows(scales.factor[c], scales.factor[c]));
            w[1] = encode_e2m1_row(patch, 2 * c + 1, highs(scales.factor[c], scales.factor[c]));
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) sink.put(p, 2 * c + h, &w[h]);
    }
}

// Squares in both directions hold the same codes: encoded once, turned. Not where the directions draw apart, or sum
// errors in another order; nor bytes, whose turn keeps 32 registers.
template <class F> constexpr bool turns = in_lanes<F> && square<F> && F::bits == 4 && !F::rht && !F::stochastic && F::four_over_six == ALWAYS_SIX;
constexpr bool TURNED = SAME_FORMAT && turns<Row>;

template <class F, bool CAREFUL>
HQ_FN void encode_square(const Patch<Input>& patch, const LineScales<F, Input>& scales, const Sink<F, 0>& rows, const Sink<F, 1>& columns, const Place& p) {
    u32 row[8][Sink<F, 0>::words], column[8][Sink<F, 0>::words];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        encode_line<F, Input, CAREFUL>(RowOf<Input>{patch, i}, scales.at(i), scales.before(i), nullptr, row[i]);
        rows.put(p, i, row[i]);
    }
    turn<F::stored_bits>(row, column);
#pragma unroll
    for (int i = 0; i < 8; ++i) columns.put(p, i, column[i]);
}

struct OneFactor {  // a whole matrix under one scale, or unquantized
    float factor;
    HQ_FN float before(int) const { return 1.0f; }
    HQ_FN float at(int) const { return factor; }
};

template <class F>
struct LineFactors {  // each line under a scale of its own
    float factor[8];
    HQ_FN LineFactors(const float* whole, i64 line0, i64 lines) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            factor[i] = reciprocal_factor(line0 + i < lines ? whole[line0 + i] : 0.0f, float_of(F::Element::max_bits), F::epsilon, F::pow2);
    }
    HQ_FN float before(int) const { return 1.0f; }
    HQ_FN float at(int i) const { return prepare_factor<F>(factor[i]); }
    // By the lanes at the lines' beginning; lines that do not exist are padding, up to the pitch.
    template <int DOWN>
    HQ_FN void store(const Place& p, const Arguments& a, const Output& out) const {
        typedef Direction<DOWN> D;
        if (D::along0(p) || D::length(a) == 0) return;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const i64 line = D::line0(p) + i;
            if (line < out.scale_pitch) reinterpret_cast<float*>(out.scales)[line] = line < D::lines(a) ? divide(1.0f, factor[i]) : 0.0f;
        }
    }
};

struct TileFactors {  // 8 lines' factors out of shared memory
    float factor[8];
    HQ_FN float before(int) const { return 1.0f; }
    HQ_FN TileFactors(const float* source) {
        const float4 a = reinterpret_cast<const float4*>(source)[0], b = reinterpret_cast<const float4*>(source)[1];
        factor[0] = a.x; factor[1] = a.y; factor[2] = a.z; factor[3] = a.w;
        factor[4] = b.x; factor[5] = b.y; factor[6] = b.z; factor[7] = b.w;
    }
    HQ_FN float at(int i) const { return factor[i]; }
};

// Byte scales of 16- and 32-blocks.
template <class F, int DOWN, class In>
HQ_FN LineScales<F, In> block_scales(const Patch<In>& patch, const Arguments& a, const Output& out, const Place& p, const Shared& shared) {
    typedef Direction<DOWN> D;
    Lines<In> lines = block_amax<F, DOWN>(patch);
    if constexpr (square<F>) square_amax<F, DOWN>(lines);
    if constexpr (F::scaling == TWO_LEVEL && F::per_row) {
        const OfLines<F> globals(a.whole[DOWN], D::line0(p), D::lines(a));
        if (D::along0(p) == 0 && D::length(a) > 0) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (D::line0(p) + i < D::lines(a)) out.global_scale[D::line0(p) + i] = globals.global[i].decode_scale;
        }
        if constexpr (F::four_over_six == ALWAYS_SIX) return scale_lines<F, In>(lines, globals);
        else return choose_scales<F, DOWN>(patch, p, lines, globals);
    } else {
        const OfMatrix globals = {&shared.table[DOWN && has_table<Row> && !SAME_TABLE]};
        if constexpr (F::four_over_six == ALWAYS_SIX) return scale_lines<F, In>(lines, globals);
        else return choose_scales<F, DOWN>(patch, p, lines, globals);
    }
}

}  // namespace hq
