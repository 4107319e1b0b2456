// Quantize: grid (column tiles, row tiles, row tiles / 65535), 256 threads a TILE_ROWS x TILE_COLUMNS tile of X.
//
// One read of X gives both parts. A thread holds an 8 x 8 patch; its rows are lines of the rowwise part, its columns
// of the columnwise one, and both directions run the same code over them. Row codes are stored at once; column codes
// are turned in shared memory, so that a column is written in one piece. Padding is written as zeros, for what lies
// outside X is read as zero. Generated before this text: Input, Row, Column (traits of two formats), SAME_FORMAT, TILE_ROWS,
// TILE_COLUMNS, ALIGNED, SHARED_BYTES, GROUPED.
//
// GROUPED: X is many matrices, their rows stacked; blocks, scales and padding begin anew with each. A block reads its
// member from a table, and from there on it is that one's matrix. Generated as well: RowScales, ColumnScales (Spans).
#include "group.cuh"
#include "scale.cuh"
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
    const float* whole;  // amax of X
    const u32* noop;     // nothing is written where it is not zero
    Output row, column;
    i64 reversed;  // last tile first: after an amax pass that went forward
    i64 rows;      // rows of codes that are written: m, and padding
    i64 lines;     // the same of columns: k, and padding
};

struct Segments {  // of one part of a group, bytes
    i64 codes_unit, scales_unit;
    i64 codes_end, scales_end;
};

struct GroupedArguments {
    Arguments all;
    const Member<3>* table;  // of members.cu, a line a row tile
    i64 count;
    Segments row, column;
    i64 zeros_rest;  // whether what lies behind the last member is zeroed
};

template <class F> constexpr bool in_lanes = F::block_columns == 16 || F::block_columns == 32;
template <class F> constexpr bool in_tile = F::block_columns == 128;
template <class F> constexpr bool square = F::block_rows > 1;
template <class F> constexpr bool nan_wins = F::scaling != NO_SCALING && !F::Element::has_nan;
template <class F> constexpr int line_bytes = F::stored_bits * TILE_ROWS / 8;  // a staged column

// Both directions of one matrix have the same global scale, and so the same factors, if their bounds are equal.
template <class A, class B>
HQ_FN constexpr bool same_table() {
    if constexpr (A::scaling == TWO_LEVEL && B::scaling == TWO_LEVEL)
        return A::bound == B::bound && same<typename A::Element, typename B::Element>::value;
    else return true;
}
constexpr bool SAME_TABLE = same_table<Row, Column>();

struct Shared {
    alignas(16) u8 stage[Column::present ? TILE_COLUMNS * line_bytes<Column> : 16];
    Table table[Row::scaling == TWO_LEVEL && Column::scaling == TWO_LEVEL && !SAME_TABLE ? 2 : 1];
    alignas(16) u32 partial[2][4][128];  // largest magnitudes of a line in each warp that sees it
    alignas(16) float factor[2][128];
#if GROUPED
    Member<3> member;
    Arguments own;
#endif
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch reserves too little shared memory");

// Largest magnitudes of the lines over what one warp sees of their block.
template <class F, int DOWN>
HQ_FN Lines<Input> block_amax(const Patch<Input>& patch) {
    typedef Direction<DOWN> D;
    constexpr bool nan = nan_wins<F>;
    Lines<Input> lines = DOWN ? column_amax<nan>(patch) : row_amax<nan>(patch);
    constexpr int lanes = F::block_columns / 8 < D::lanes ? F::block_columns / 8 : D::lanes;
#pragma unroll
    for (int mask = 1; mask < lanes; mask *= 2) lines.template across<nan>(mask * D::step);
    return lines;
}

// 16 x 16 squares: one amax for the 8 lines and for the neighbour's.
template <class F, int DOWN>
HQ_FN void square_amax(Lines<Input>& lines) {
    u32 best = lines.template whole<true>();
    best = bits_of(max_abs<true>(float_of(best), float_of(__shfl_xor_sync(~0u, best, Direction<DOWN>::other_step))));
    if constexpr (Input::size == 2) best = narrow_pair<Input>(float_of(best), 0.0f) & 0xFFFFu;
#pragma unroll
    for (int i = 0; i < Lines<Input>::count; ++i) lines.reg[i] = Input::size == 2 ? best * 0x10001u : best;
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

HQ_FN float without_nan(u32 amax) { return amax > INF_BITS ? 0.0f : float_of(amax); }

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
        for (int w = 0; w < THREADS / 32; ++w) best = fmaxf(best, without_nan(shared.partial[DOWN][0][w]));
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
        for (int w = 0; w < D::warps; ++w) best = fmaxf(best, without_nan(shared.partial[DOWN][w][line]));
        const float factor = reciprocal_factor(best, max, F::epsilon, F::pow2);
        shared.factor[DOWN][line] = prepare_factor<F>(factor);
        const i64 at = line_tile * 128 + line;
        if (at < out.scale_pitch)
            scales[along_tile * out.scale_pitch + at] = at < D::lines(a) ? divide(1.0f, factor) : 0.0f;
    }
}

// 16- and 32-blocks: the first lane of each block stores the 8 bytes of its lines.
template <class F, int DOWN>
HQ_FN void store_bytes(const LineScales<F, Input>& scales, const Arguments& a, const Output& out, const Place& p) {
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

template <class F, int DOWN, bool CAREFUL = false, class Scales>
HQ_FN void encode_lines(const Patch<Input>& patch, const Scales& scales, const Sink<F, DOWN>& sink, const Place& p) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 w[Sink<F, DOWN>::words];
        if constexpr (DOWN) encode_line<F, Input, CAREFUL>(ColumnOf<Input>{patch, i}, scales.at(i), scales.before, w);
        else encode_line<F, Input, CAREFUL>(RowOf<Input>{patch, i}, scales.at(i), scales.before, w);
        sink.put(p, i, w);
    }
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
template <class F, int DOWN>
HQ_FN void encode_pairs(const Patch<Input>& patch, const LineScales<F, Input>& scales, const Sink<F, DOWN>& sink, const Place& p) {
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

// Squares of 16 x 16 in both directions hold the same codes: encoded once, turned.
constexpr bool TURNED = SAME_FORMAT && in_lanes<Row> && square<Row>;

template <class F, bool CAREFUL>
HQ_FN void encode_square(const Patch<Input>& patch, const LineScales<F, Input>& scales, const Sink<F, 0>& rows, const Sink<F, 1>& columns, const Place& p) {
    u32 row[8][Sink<F, 0>::words], column[8][Sink<F, 0>::words];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        encode_line<F, Input, CAREFUL>(RowOf<Input>{patch, i}, scales.at(i), scales.before, row[i]);
        rows.put(p, i, row[i]);
    }
    turn<F::stored_bits>(row, column);
#pragma unroll
    for (int i = 0; i < 8; ++i) columns.put(p, i, column[i]);
}

struct OneFactor {  // a whole matrix under one scale, or unquantized
    float factor;
    static constexpr float before = 1.0f;
    HQ_FN float at(int) const { return factor; }
};

struct TileFactors {  // 8 lines' factors out of shared memory
    float factor[8];
    static constexpr float before = 1.0f;
    HQ_FN TileFactors(const float* source) {
        const float4 a = reinterpret_cast<const float4*>(source)[0], b = reinterpret_cast<const float4*>(source)[1];
        factor[0] = a.x; factor[1] = a.y; factor[2] = a.z; factor[3] = a.w;
        factor[4] = b.x; factor[5] = b.y; factor[6] = b.z; factor[7] = b.w;
    }
    HQ_FN float at(int i) const { return factor[i]; }
};

// Scales and codes of one direction.
template <class F, int DOWN>
HQ_FN void quantize_lines(const Patch<Input>& patch, const Arguments& a, const Output& out, const Place& p, Shared& shared) {
    const Sink<F, DOWN> sink(out, p, shared, a.rows);
    if constexpr (in_lanes<F>) {
        Lines<Input> lines = block_amax<F, DOWN>(patch);
        if constexpr (square<F>) square_amax<F, DOWN>(lines);
        const auto scales = scale_lines<F, Input>(lines, &shared.table[DOWN && !SAME_TABLE]);
        store_bytes<F, DOWN>(scales, a, out, p);
        if constexpr (LineScales<F, Input>::packed && F::bits == 4) encode_pairs<F, DOWN>(patch, scales, sink, p);
        else if (has_short_cut<F> && scales.careful) encode_lines<F, DOWN, true>(patch, scales, sink, p);
        else encode_lines<F, DOWN>(patch, scales, sink, p);
        zero_lines<F, DOWN>(scales.nan, sink, p);
    } else if constexpr (in_tile<F>) {
        encode_lines<F, DOWN>(patch, TileFactors(shared.factor[DOWN] + Direction<DOWN>::line(p)), sink, p);
    } else if constexpr (F::scaling == RECIPROCAL) {
        const float factor = reciprocal_factor(*a.whole, float_of(F::Element::max_bits), F::epsilon, F::pow2);
        encode_lines<F, DOWN>(patch, OneFactor{prepare_factor<F>(factor)}, sink, p);
    } else {
        encode_lines<F, DOWN>(patch, OneFactor{1.0f}, sink, p);
    }
}

// Scales and codes of both directions in one.
template <class F>
HQ_FN void quantize_square(const Patch<Input>& patch, const Arguments& a, const Place& p, Shared& shared) {
    const Sink<F, 0> rows(a.row, p, shared, a.rows);
    const Sink<F, 1> columns(a.column, p, shared, a.rows);
    Lines<Input> lines = block_amax<F, 0>(patch);
    square_amax<F, 0>(lines);
    const auto scales = scale_lines<F, Input>(lines, &shared.table[0]);
    store_bytes<F, 0>(scales, a, a.row, p);
    store_bytes<F, 1>(scales, a, a.column, p);
    if (scales.careful) encode_square<F, true>(patch, scales, rows, columns, p);
    else encode_square<F, false>(patch, scales, rows, columns, p);
    zero_lines<F, 0>(scales.nan, rows, p);
    zero_lines<F, 1>(scales.nan, columns, p);
}

// What one thread of the grid writes for a whole matrix: the first, or number `index` of a group.
template <class F>
HQ_FN void store_scalars(const Arguments& a, const Output& out, i64 index) {
    const float whole = F::scaling == TWO_LEVEL || (F::scaling == RECIPROCAL && F::block_columns == 0) || out.amax ? a.whole[index] : 0.0f;
    if constexpr (F::scaling == TWO_LEVEL) out.global_scale[index] = global_of<F>(whole).decode_scale;
    if constexpr (F::scaling == RECIPROCAL && F::block_columns == 0) {
        const float factor = reciprocal_factor(whole, float_of(F::Element::max_bits), F::epsilon, F::pow2);
        reinterpret_cast<float*>(out.scales)[index] = divide(1.0f, factor);
        if (!GROUPED)
            for (i64 i = 1; i < out.scale_pitch; ++i) reinterpret_cast<float*>(out.scales)[i] = 0.0f;
    }
    if (out.amax) out.amax[index] = whole;
}

// The staged columns to global memory, 16 bytes a lane, neighbours along a column.
template <class F>
HQ_FN void store_columns(const Arguments& a, const Place& p, const Shared& shared) {
    constexpr int chunks = line_bytes<F> / 16;
    const i64 first = p.tile_row * line_bytes<F>;
    const u8* tile = a.column.codes + p.tile_column * TILE_COLUMNS * 16 * a.column.pitch16 + first;
    const int byte = threadIdx.x % chunks * 16, column = threadIdx.x / chunks;
    const bool stored = p.full || first + byte < i64(a.column.pitch16) * 16;
    const int columns = p.full ? TILE_COLUMNS : count_of(a.lines, p.tile_column * TILE_COLUMNS, TILE_COLUMNS);
#pragma unroll
    for (int c = 0; c < TILE_COLUMNS; c += THREADS / chunks)
        if (stored && column + c < columns) {
            const uint4 w = *reinterpret_cast<const uint4*>(shared.stage + staged(column + c, byte, line_bytes<F>));
            const u32 words[4] = {w.x, w.y, w.z, w.w};
            store_global<4>(line_at(tile, column + c, u32(a.column.pitch16)) + byte, words);
        }
}

// One tile of a matrix.
HQ_FN void quantize_tile(const Arguments& a, const Place& p, Shared& shared) {
    constexpr bool tables = Row::scaling == TWO_LEVEL || Column::scaling == TWO_LEVEL;
    Patch<Input> patch;  // its loads are under way while the table is made
    const bool idle = GROUPED && p.warp_row0 >= a.rows;  // nothing of what this warp holds is written
    if (idle) patch.clear();
    else load_patch<ALIGNED>(patch, p, a.values, a.row_bytes, a.m, a.k);
    if constexpr (tables) {
        typedef typename choose<Row::scaling == TWO_LEVEL, Row, Column>::type First;
        shared.table[0].fill<First>(threadIdx.x, *a.whole);
        if constexpr (!SAME_TABLE) shared.table[1].fill<Column>(threadIdx.x ^ 128, *a.whole);
    }
    if constexpr (in_tile<Row>) share_amax<Row, 0>(block_amax<Row, 0>(patch), p, shared);
    if constexpr (in_tile<Column>) share_amax<Column, 1>(block_amax<Column, 1>(patch), p, shared);
    if constexpr (tables || in_tile<Row> || in_tile<Column>) __syncthreads();
    if constexpr (in_tile<Row>) tile_scale<Row, 0>(a, a.row, p, shared);
    if constexpr (in_tile<Column>) tile_scale<Column, 1>(a, a.column, p, shared);
    if constexpr (in_tile<Row> || in_tile<Column>) __syncthreads();

    if constexpr (TURNED) {
        if (!idle) quantize_square<Row>(patch, a, p, shared);
        __syncthreads();
        store_columns<Column>(a, p, shared);
        return;
    }
    // Run-time branches keep the two directions in separate basic blocks: without them ptxas shares the unpacked
    // patch between them and spills.
    if constexpr (Row::present)
        if (!idle && a.row.codes) quantize_lines<Row, 0>(patch, a, a.row, p, shared);
    if constexpr (Column::present) {
        if (!idle && a.column.codes) quantize_lines<Column, 1>(patch, a, a.column, p, shared);
        __syncthreads();
        store_columns<Column>(a, p, shared);
    }
}

#if GROUPED

// A member's matrix.
HQ_FN Arguments arguments_of(const GroupedArguments& g, const Member<3>& member) {
    Arguments own = g.all;
    own.values += member.start * own.row_bytes;
    own.m = member.size;
    own.rows = member.rows;
    own.whole += member.index;
    if constexpr (Row::present) {
        own.row.codes += member.start * own.row.pitch16 * 16;
        own.row.scales += member.before[0] * g.row.scales_unit;
        if (in_lanes<Row> || (in_tile<Row> && !square<Row>)) own.row.scale_pitch = RowScales::of(member.size);
    }
    if constexpr (Column::present) {
        own.column.codes += member.before[1] * g.column.codes_unit;
        own.column.pitch16 = round_up(round_up(member.size * Column::stored_bits, 8) / 8, 16) / 16;
        own.column.scales += member.before[2] * g.column.scales_unit;
        if (in_tile<Column> && square<Column>) own.column.scale_pitch = ColumnScales::of(member.size);
    }
    return own;
}

// What lies behind the last member.
HQ_FN void zero_rest(const GroupedArguments& g, const Member<3>& end) {
    const i64 shares = row_tiles() - end.tiles;
    if constexpr (Row::present) {
        zero_share(g.all.row.codes, end.start * g.all.row.pitch16 * 16, g.row.codes_end, end.tile, shares);
        zero_share(g.all.row.scales, end.before[0] * g.row.scales_unit, g.row.scales_end, end.tile, shares);
    }
    if constexpr (Column::present) {
        zero_share(g.all.column.codes, end.before[1] * g.column.codes_unit, g.column.codes_end, end.tile, shares);
        zero_share(g.all.column.scales, end.before[2] * g.column.scales_unit, g.column.scales_end, end.tile, shares);
    }
}

// Rows between a member and the next one's start.
template <class F>
HQ_FN void zero_rows(const Arguments& a, const Place& p, Shared& shared) {
    const Sink<F, 0> sink(a.row, p, shared, a.rows);
    const u32 zeros[Sink<F, 0>::words] = {};
#pragma unroll 1
    for (int i = 0; i < 8; ++i) sink.put(p, i, zeros);
}

#endif

}  // namespace hq

#if GROUPED
extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_quantize(const __grid_constant__ hq::GroupedArguments g) {
    using namespace hq;
    extern __shared__ __align__(16) u8 dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    if (g.all.noop && *g.all.noop << 1) return;  // -0.0f is zero

    if (blockIdx.x == 0 && row_tile() == 0) {
        for (i64 i = threadIdx.x; i < g.count; i += THREADS) {
            if constexpr (Row::present) store_scalars<Row>(g.all, g.all.row, i);
            if constexpr (Column::present) store_scalars<Column>(g.all, g.all.column, i);
        }
    }
    if (threadIdx.x < 32) {
        load_member(g.table, g.all.reversed ? row_tiles() - 1 - row_tile() : row_tile(), shared.member);
        if (threadIdx.x == 0 && shared.member.index >= 0) shared.own = arguments_of(g, shared.member);
    }
    __syncthreads();
    if (shared.member.index < 0) {
        if (g.zeros_rest) zero_rest(g, shared.member);
        return;
    }
    Place p;
    const i64 tile_column = g.all.reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    place(p, shared.member.tile, tile_column, shared.own.m, shared.own.k);
    if (p.tile_row * TILE_ROWS < shared.own.m) quantize_tile(shared.own, p, shared);
    else if constexpr (Row::present) zero_rows<Row>(shared.own, p, shared);
}
#else
extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_quantize(const __grid_constant__ hq::Arguments a) {
    using namespace hq;
    extern __shared__ __align__(16) u8 dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    if (a.noop && *a.noop << 1) return;  // -0.0f is zero

    if (first_thread()) {
        if constexpr (Row::present) store_scalars<Row>(a, a.row, 0);
        if constexpr (Column::present) store_scalars<Column>(a, a.column, 0);
    }
    Place p;
    if (locate(p, a.m, a.k, a.reversed)) quantize_tile(a, p, shared);
}
#endif
