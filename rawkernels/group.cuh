// Groups: many matrices whose rows are stacked, in kernels over tiles.
#pragma once
#include "member.cuh"
#include "tile.cuh"

namespace hq {

HQ_FN i64 sum_before(i64 value, i64& total) {  // over the lanes before this one, and over all
    i64 sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const i64 other = __shfl_up_sync(~0u, sum, step);
        if (int(threadIdx.x & 31) >= step) sum += other;
    }
    total = __shfl_sync(~0u, sum, 31);
    return sum - value;
}

HQ_FN i64 row_tile() { return blockIdx.y + i64(blockIdx.z) * gridDim.y; }
HQ_FN i64 row_tiles() { return i64(gridDim.y) * gridDim.z; }

typedef Member<5> TableMember;  // spans of row scales, column codes, column scales, and global scales of rows and columns

// This tile's line of what members.cu wrote, to shared memory, by the first warp.
HQ_FN void load_member(const TableMember* table, i64 tile, TableMember& member) {
    constexpr int words = sizeof(TableMember) / 8;
    if (threadIdx.x < words) reinterpret_cast<i64*>(&member)[threadIdx.x] = __ldg(reinterpret_cast<const long long*>(table + tile) + threadIdx.x);
    __syncwarp();
}

// Zeros from byte `from`, on 16, to byte `to`: this block's share of what the blocks behind the last member do.
HQ_FN void zero_share(void* base, i64 from, i64 to, i64 share, i64 shares) {
    uint4* vectors = static_cast<uint4*>(base);
    const i64 stride = shares * gridDim.x * THREADS;
    for (i64 i = from / 16 + (share * gridDim.x + blockIdx.x) * THREADS + threadIdx.x; i < to / 16; i += stride)
        vectors[i] = make_uint4(0, 0, 0, 0);
}

HQ_FN void zero_floats(float* numbers, i64 from, i64 to, i64 share, i64 shares) {
    for (i64 i = from + (share * gridDim.x + blockIdx.x) * THREADS + threadIdx.x; i < to; i += shares * gridDim.x * THREADS) numbers[i] = 0.0f;
}

}  // namespace hq
