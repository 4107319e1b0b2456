// Dot: grid (1, slots, slots again) of tiles of one slot, a block of 256 threads each.
//
// OUT[t, j] = VALUES[index[t, j]] . OTHER[t], products and sums in float32, 8 columns a thread at a time and then over the
// block: always in the same order. Where there is no such row the product is 0.
// Generated before this text: Value and Other (types).
#include "columns.cuh"
#include "group.cuh"

namespace hq {

struct DotArguments {
    const char* values;
    i64 row_bytes, rows;
    const i64* index;  // null: in order
    const char* other;
    i64 other_row_bytes;
    float* out;
    i64 slots, choices, columns;
};

// The thread's share of the product. IN_VECTORS: both rows lie on 16 bytes, and columns are a multiple of WIDE.
template <bool IN_VECTORS>
HQ_FN float dot(const DotArguments& a, const char* values, const char* other) {
    float sum = 0.0f;
#pragma unroll 4
    for (i64 column = threadIdx.x * WIDE; column < a.columns; column += THREADS * WIDE) {
        const int count = a.columns - column < WIDE ? int(a.columns - column) : WIDE;
        Wide<Value> left;
        Wide<Other> right;
        if constexpr (!IN_VECTORS) { left.clear(); right.clear(); }
        left.template load<IN_VECTORS>(values + column * Value::size, count);
        right.template load<IN_VECTORS>(other + column * Other::size, count);
#pragma unroll
        for (int c = 0; c < WIDE; ++c) sum += left.at(c) * right.at(c);
    }
    return sum;
}

}  // namespace hq

extern "C" __global__ void __launch_bounds__(256) hq_dot(const __grid_constant__ hq::DotArguments a) {
    using namespace hq;
    __shared__ float sums[THREADS / 32];
    const i64 slot = row_tile();
    if (slot >= a.slots) return;
    const i64 row = a.index ? a.index[slot] : slot;
    const char* values = a.values + row * a.row_bytes;
    const char* other = a.other + slot / a.choices * a.other_row_bytes;
    const bool in_vectors = (reinterpret_cast<u64>(values) | reinterpret_cast<u64>(other)) % 16 == 0 && a.columns % WIDE == 0;
    float sum = row >= a.rows ? 0.0f : in_vectors ? dot<true>(a, values, other) : dot<false>(a, values, other);
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int warp = 1; warp < THREADS / 32; ++warp) sum += sums[warp];
    a.out[slot] = sum;
}
