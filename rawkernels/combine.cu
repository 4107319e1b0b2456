// Combine: grid (columns, tokens, tokens again) of tiles of ROWS x 1024, 4 columns of each token a thread.
//
// OUT[t] = the sum over choices j of WEIGHTS[t, j] * VALUES[index[t, j]], float32 products and sums in the order of the
// choices, rounded once; where there is no such row it counts as zeros. Generated before this text: Value, ROWS.
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

}  // namespace hq

extern "C" __global__ void __launch_bounds__(256) hq_combine(const __grid_constant__ hq::CombineArguments a) {
    using namespace hq;
    const i64 column = (i64(blockIdx.x) * THREADS + threadIdx.x) * COLUMNS;
    if (column >= a.columns) return;
    const int count = a.columns - column < COLUMNS ? int(a.columns - column) : COLUMNS;
    const i64 first = row_tile() * ROWS;
    float sum[ROWS][COLUMNS] = {};
    for (i64 choice = 0; choice < a.choices; ++choice) {
        float value[ROWS][COLUMNS] = {}, weight[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {  // all rows' loads before the first sum
            if (first + r >= a.tokens) continue;
            const i64 slot = (first + r) * a.choices + choice, row = a.index ? a.index[slot] : slot;
            weight[r] = a.weights ? a.weights[slot] : 1.0f;
            if (row < a.rows) load_columns<Value>(a.values + row * a.row_bytes + column * Value::size, value[r], count);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const float term = value[r][c] * weight[r];
                sum[r][c] = choice ? sum[r][c] + term : term;
            }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        if (first + r < a.tokens) store<Value>(a.out + (first + r) * a.out_row_bytes + column * Value::size, sum[r], count);
}
