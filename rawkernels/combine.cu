// Combine: grid (columns, tokens, tokens again) of tiles of ROWS x 2048, 8 columns of each token a thread.
//
// OUT[t] = the sum over choices j of WEIGHTS[t, j] * VALUES[index[t, j]], float32 products and sums in the order of the
// choices, rounded once; where there is no such row it counts as zeros. All loads of DEPTH choices of ROWS tokens come
// before the first sum. Generated before this text: Value, ROWS, MIN_BLOCKS, ALIGNED: all rows lie on 16 bytes, and columns
// are a multiple of WIDE.
#include "columns.cuh"
#include "group.cuh"

namespace hq {

struct CombineArguments {
    const char* values;
    i64 row_bytes, rows;
    const i64* index;      // null: in order
    const float* weights;  // null: 1
    char* out;
    i64 out_row_bytes, tokens, choices, columns;
};

constexpr int DEPTH = 2;

}  // namespace hq

extern "C" __global__ void __launch_bounds__(256, MIN_BLOCKS) hq_combine(const __grid_constant__ hq::CombineArguments a) {
    using namespace hq;
    const i64 column = (i64(blockIdx.x) * THREADS + threadIdx.x) * WIDE, first = row_tile() * ROWS;
    if (column >= a.columns) return;
    const int count = a.columns - column < WIDE ? int(a.columns - column) : WIDE;
    float sum[ROWS][WIDE] = {};
    for (i64 choice = 0; choice < a.choices; choice += DEPTH) {
        Wide<Value> held[ROWS][DEPTH];
        float weight[ROWS][DEPTH];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                held[r][d].clear();
                weight[r][d] = 1.0f;
                if (first + r >= a.tokens || choice + d >= a.choices) continue;
                const i64 slot = (first + r) * a.choices + choice + d, row = a.index ? a.index[slot] : slot;
                if (a.weights) weight[r][d] = a.weights[slot];
                if (row < a.rows) held[r][d].template load<ALIGNED>(a.values + row * a.row_bytes + column * Value::size, count);
            }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (choice + d >= a.choices) continue;
#pragma unroll
                for (int c = 0; c < WIDE; ++c) {
                    const float term = held[r][d].at(c) * weight[r][d];
                    sum[r][c] = choice + d ? sum[r][c] + term : term;
                }
            }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (first + r >= a.tokens) continue;
        char* out = a.out + (first + r) * a.out_row_bytes + column * Value::size;
#pragma unroll
        for (int half = 0; half < WIDE; half += COLUMNS) {
            const float(&part)[COLUMNS] = reinterpret_cast<const float(&)[COLUMNS]>(sum[r][half]);
            if (half < count) store<Value>(out + half * Value::size, part, count - half);
        }
    }
}
