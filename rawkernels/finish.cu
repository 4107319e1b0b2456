// Finish a product: grid (columns, rows, rows again) of tiles of ROWS x 1024, 4 columns of each row a thread.
//
// OUT = [OUT +] activation(SUM + BIAS), float32 with one rounding, to any row pitch; AUX = SUM + BIAS. Generated before
// this text: Output, Bias, Aux (types), HAS_BIAS, HAS_AUX, GELU, ACCUMULATE, ROWS, a tile's constants, GROUPED.
//
// GROUPED: of many products whose rows are stacked; a block finds its member, which has a bias of its own and, with
// SCALED, a factor of its own: SUM is multiplied by what the scales of both operands leave to it.
#include "columns.cuh"
#include "group.cuh"
#include "whole.cuh"

namespace hq {

struct FinishArguments {
    const float* sum;  // null: zeros, the sum over nothing
    i64 sum_pitch;     // elements, a multiple of 4
    const char* bias;
    char* out;
    i64 out_row_bytes;
    char* aux;
    i64 aux_row_bytes, m, n;
};

struct GroupedFinishArguments {
    FinishArguments all;
    Groups groups;
    i64 bias_bytes;         // from one member's bias to the next
    const float* scalar_a;  // one a member, or null
    const float* scalar_b;
    i64 zeros_rest;         // whether rows of no member are zeroed
};

// x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), in the order of gemm.gelu.
HQ_FN float gelu(float x) {
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
}

// Rows from `row0` to before `end`, at most ROWS of them.
HQ_FN void finish_rows(const FinishArguments& a, i64 row0, i64 end, const char* biases, float alpha) {
    const i64 column = (i64(blockIdx.x) * THREADS + threadIdx.x) * COLUMNS;
    if (column >= a.n) return;
    const int count = a.n - column < COLUMNS ? int(a.n - column) : COLUMNS;
    float bias[COLUMNS] = {};
    if constexpr (HAS_BIAS) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (c < count) bias[c] = load<Bias>(biases + column * Bias::size, c);
    }
#pragma unroll 8
    for (int r = 0; r < ROWS; ++r) {
        const i64 row = row0 + r;
        if (row >= end) return;
        float y[COLUMNS] = {};
        if (a.sum) {
            const float4 four = *reinterpret_cast<const float4*>(a.sum + row * a.sum_pitch + column);
            y[0] = four.x; y[1] = four.y; y[2] = four.z; y[3] = four.w;
        }
        if constexpr (SCALED) {
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) y[c] *= alpha;
        }
        if constexpr (HAS_BIAS) {
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) y[c] += bias[c];
        }
        if constexpr (HAS_AUX) store<Aux>(a.aux + row * a.aux_row_bytes + column * Aux::size, y, count);
        char* out = a.out + row * a.out_row_bytes + column * Output::size;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            if (GELU) y[c] = gelu(y[c]);
            if (ACCUMULATE && c < count) y[c] += load<Output>(out, c);
        }
        store<Output>(out, y, count);
    }
}

HQ_FN void zero_rows(const FinishArguments& a, i64 row0, i64 end) {
    const i64 column = (i64(blockIdx.x) * THREADS + threadIdx.x) * COLUMNS;
    if (column >= a.n) return;
    const float zeros[COLUMNS] = {};
    for (i64 row = row0; row < end; ++row)
        store<Output>(a.out + row * a.out_row_bytes + column * Output::size, zeros, a.n - column < COLUMNS ? int(a.n - column) : COLUMNS);
}

}  // namespace hq

#if GROUPED
extern "C" __global__ void __launch_bounds__(256, 5) hq_finish(const __grid_constant__ hq::GroupedFinishArguments g) {
    using namespace hq;
    __shared__ Member<0> member;
    if (threadIdx.x < 32) find_member<ROWS>(g.groups, row_tile(), member);
    __syncthreads();
    const i64 start = member.start, rows_end = start + member.rows;
    if (member.index < 0) {
        if (!g.zeros_rest) return;
        const i64 shares = row_tiles() - member.tiles, each = (member.rows + shares - 1) / shares;
        const i64 from = start + member.tile * each;
        return zero_rows(g.all, from, from + each < rows_end ? from + each : rows_end);
    }
    float alpha = 1.0f;
    if constexpr (SCALED) {
        if (g.scalar_a) alpha = rest_of(g.scalar_a[member.index]);
        if (g.scalar_b) alpha *= rest_of(g.scalar_b[member.index]);
    }
    const i64 from = start + member.tile * ROWS, end = start + member.size;
    finish_rows(g.all, from, end, g.all.bias + member.index * g.bias_bytes, alpha);
    if (g.zeros_rest) zero_rows(g.all, from > end ? from : end, from + ROWS < rows_end ? from + ROWS : rows_end);
}
#else
extern "C" __global__ void __launch_bounds__(256) hq_finish(const __grid_constant__ hq::FinishArguments a) {
    using namespace hq;
    finish_rows(a, row_tile() * ROWS, a.m, a.bias, 1.0f);
}
#endif
