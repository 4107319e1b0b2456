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
#include "quantize.cuh"

namespace hq {

// Scales and codes of one direction of a patch, as it is encoded.
template <class F, int DOWN, class In>
HQ_FN void quantize_patch(const Patch<In>& patch, const Arguments& a, const Output& out, const Place& p, Shared& shared) {
    typedef Direction<DOWN> D;
    const Sink<F, DOWN> sink(out, p, shared, a.rows);
    if constexpr (in_lanes<F>) {
        const auto scales = block_scales<F, DOWN>(patch, a, out, p, shared);
        store_bytes<F, DOWN>(scales, a, out, p);
        if constexpr (LineScales<F, In>::packed && F::bits == 4) encode_pairs<F, DOWN>(patch, scales, sink, p);
        else if constexpr (is_long<F>) encode_lines<F, DOWN, true>(patch, a, shared, scales, sink, p);
        else if (is_careful<F, DOWN>(scales, a, shared, p)) encode_lines<F, DOWN, true>(patch, a, shared, scales, sink, p);
        else encode_lines<F, DOWN>(patch, a, shared, scales, sink, p);
        zero_lines<F, DOWN>(scales.nan, sink, p);
    } else if constexpr (in_tile<F>) {
        encode_lines<F, DOWN>(patch, a, shared, TileFactors(shared.factor[DOWN] + D::line(p)), sink, p);
    } else if constexpr (one_scale<F>) {
        const float factor = reciprocal_factor(*a.whole[DOWN], float_of(F::Element::max_bits), F::epsilon, F::pow2);
        encode_lines<F, DOWN>(patch, a, shared, OneFactor{prepare_factor<F>(factor)}, sink, p);
    } else if constexpr (F::scaling == RECIPROCAL) {
        const LineFactors<F> factors(a.whole[DOWN], D::line0(p), D::lines(a));
        factors.template store<DOWN>(p, a, out);
        encode_lines<F, DOWN>(patch, a, shared, factors, sink, p);
    } else {
        encode_lines<F, DOWN>(patch, a, shared, OneFactor{1.0f}, sink, p);
    }
}

// Scales and codes of one direction. The columns come last, and may rotate the patch where it is.
template <class F, int DOWN>
HQ_FN void quantize_lines(Patch<Input>& patch, const Arguments& a, const Output& out, const Place& p, Shared& shared) {
    if constexpr (!F::rht) quantize_patch<F, DOWN>(patch, a, out, p, shared);
    else if constexpr (DOWN && same<Input, BFloat16>::value) {
        rotate<DOWN>(patch, p, Direction<DOWN>::length(a), patch);
        quantize_patch<F, DOWN>(patch, a, out, p, shared);
    } else {
        Patch<BFloat16> rotated;
        rotate<DOWN>(patch, p, Direction<DOWN>::length(a), rotated);
        quantize_patch<F, DOWN>(rotated, a, out, p, shared);
    }
}

// Scales and codes of both directions in one.
template <class F>
HQ_FN void quantize_square(const Patch<Input>& patch, const Arguments& a, const Place& p, Shared& shared) {
    const Sink<F, 0> rows(a.row, p, shared, a.rows);
    const Sink<F, 1> columns(a.column, p, shared, a.rows);
    const auto scales = block_scales<F, 0>(patch, a, a.row, p, shared);
    store_bytes<F, 0>(scales, a, a.row, p);
    store_bytes<F, 1>(scales, a, a.column, p);
    if (scales.careful) encode_square<F, true>(patch, scales, rows, columns, p);
    else encode_square<F, false>(patch, scales, rows, columns, p);
    zero_lines<F, 0>(scales.nan, rows, p);
    zero_lines<F, 1>(scales.nan, columns, p);
}

// What one thread of the grid writes for a whole matrix: the first, or number `index` of a group.
template <class F, int DOWN>
HQ_FN void store_scalars(const Arguments& a, const Output& out, i64 index) {
    const float whole = has_whole<F> ? a.whole[DOWN][index] : 0.0f;
    if constexpr (has_table<F>) out.global_scale[index] = global_of<F>(whole).decode_scale;
    if constexpr (one_scale<F>) {
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

// What all warps saw of X, once they have.
HQ_FN void record(const Arguments& a, const Shared& shared) {
    if (RECORDS && a.record) raise_to(a.record, shared.seen);
}

// One tile of a matrix.
HQ_FN void quantize_tile(const Arguments& a, const Place& p, Shared& shared) {
    constexpr bool tables = has_table<Row> || has_table<Column>, draws = Row::stochastic || Column::stochastic;
    Patch<Input> patch;  // its loads are under way while the table is made
    const bool idle = GROUPED && p.warp_row0 >= a.rows;  // nothing of what this warp holds is written
    if (idle) patch.clear();
    else load_patch<ALIGNED>(patch, p, a.values, a.row_bytes, a.m, a.k);
    if constexpr (tables) {
        typedef typename choose<has_table<Row>, Row, Column>::type First;
        shared.table[0].fill<First>(threadIdx.x, *a.whole[!has_table<Row>]);
        if constexpr (!SAME_TABLE) shared.table[1].fill<Column>(threadIdx.x ^ 128, *a.whole[1]);
    }
    if constexpr (in_tile<Row>) share_amax<Row, 0>(block_amax<Row, 0>(patch), p, shared);
    if constexpr (in_tile<Column>) share_amax<Column, 1>(block_amax<Column, 1>(patch), p, shared);
    if constexpr (draws) shared.keys->fill(threadIdx.x, a.seed_at ? __ldg(a.seed_at) : a.seed);
    if constexpr (tables || draws || in_tile<Row> || in_tile<Column>) __syncthreads();
    if constexpr (in_tile<Row>) tile_scale<Row, 0>(a, a.row, p, shared);
    if constexpr (in_tile<Column>) tile_scale<Column, 1>(a, a.column, p, shared);
    if constexpr (in_tile<Row> || in_tile<Column>) __syncthreads();
    if constexpr (RECORDS)
        if (a.record) see_whole(patch, p, shared.seen);

    if constexpr (TURNED) {
        if (!idle) quantize_square<Row>(patch, a, p, shared);
        __syncthreads();
        record(a, shared);
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
        record(a, shared);
        store_columns<Column>(a, p, shared);
    } else if (RECORDS && a.record) {
        __syncthreads();
        record(a, shared);
    }
}

#if GROUPED

// A member's matrix.
HQ_FN Arguments arguments_of(const GroupedArguments& g, const TableMember& member) {
    Arguments own = g.all;
    own.values += member.start * own.row_bytes;
    own.m = member.size;
    own.rows = member.rows;
    own.whole[0] += Row::per_row ? member.start : member.index;
    own.whole[1] += member.index * (Column::per_row ? own.k : 1);
    if (own.record) own.record += member.index;
    if constexpr (Row::present) {
        own.row.codes += member.start * own.row.pitch16 * 16;
        own.row.scales += member.before[0] * g.row.scales_unit;
        if (Row::scaling == TWO_LEVEL && Row::per_row) own.row.global_scale += member.before[3];
        if (in_lanes<Row> || (in_tile<Row> && !square<Row>) || Row::per_row) own.row.scale_pitch = RowScales::of(member.size);
    }
    if constexpr (Column::present) {
        own.column.codes += member.before[1] * g.column.codes_unit;
        own.column.pitch16 = round_up(round_up(member.size * Column::stored_bits, 8) / 8, 16) / 16;
        own.column.scales += member.before[2] * g.column.scales_unit;
        if (Column::scaling == TWO_LEVEL && Column::per_row) own.column.global_scale += member.before[4] * own.k;
        if (in_tile<Column> && square<Column>) own.column.scale_pitch = ColumnScales::of(member.size);
    }
    return own;
}

// What lies behind the last member.
HQ_FN void zero_rest(const GroupedArguments& g, const TableMember& end) {
    const i64 shares = row_tiles() - end.tiles;
    if constexpr (Row::present) {
        zero_share(g.all.row.codes, end.start * g.all.row.pitch16 * 16, g.row.codes_end, end.tile, shares);
        zero_share(g.all.row.scales, end.before[0] * g.row.scales_unit, g.row.scales_end, end.tile, shares);
        if (Row::scaling == TWO_LEVEL && Row::per_row && g.all.k)
            zero_floats(g.all.row.global_scale, end.before[3], g.all.m, end.tile, shares);
    }
    if constexpr (Column::present) {
        zero_share(g.all.column.codes, end.before[1] * g.column.codes_unit, g.column.codes_end, end.tile, shares);
        zero_share(g.all.column.scales, end.before[2] * g.column.scales_unit, g.column.scales_end, end.tile, shares);
        if (Column::scaling == TWO_LEVEL && Column::per_row)
            zero_floats(g.all.column.global_scale, end.before[4] * g.all.k, g.count * g.all.k, end.tile, shares);
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
            if constexpr (Row::present) store_scalars<Row, 0>(g.all, g.all.row, i);
            if constexpr (Column::present) store_scalars<Column, 1>(g.all, g.all.column, i);
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
        if constexpr (Row::present) store_scalars<Row, 0>(a, a.row, 0);
        if constexpr (Column::present) store_scalars<Column, 1>(a, a.column, 0);
    }
    Place p;
    if (locate(p, a.m, a.k, a.reversed)) quantize_tile(a, p, shared);
}
#endif
