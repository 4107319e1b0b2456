// Set up a grouped GEMM: grid (1 + blocks that zero), no tiles. Block 0 turns sizes into what cuBLASLt's grouped layout
// reads: for each member the pointers of five things, and six dimensions. The others zero the rows behind the last
// member. Generated before this text: nothing but a tile's constants.
#include "group.cuh"

namespace hq {

enum Ragged { UNIFORM, ROWS, K };  // which axis of the product the sizes are of

// Where the members of something begin: base + unit * (units before). divide > 0: units are sums of spans
// round_up(ceil(size / divide), multiple). 0: a member is one unit. -1: units are the stacked rows, as aligned.
struct Target {
    i64 base, unit, divide, multiple;
};

constexpr int TARGETS = 5;  // codes of cuBLASLt's A (our b) and B (our a), D, scales of A and of B
constexpr int DIMENSIONS = 3;

struct GroupGemmArguments {
    Groups groups;
    Target targets[TARGETS];
    i64 ragged;
    i64 m, n, k;          // of every member; the ragged one is not read
    i64 k_unit, k_terms;  // k is given as k_terms * round_up(k, k_unit), which is the pitch of both operands too
    i64 pitch;            // of D, in elements
    char* arrays;         // TARGETS arrays of pointers, then rows, columns and pitches of A, B and D, each on 16 bytes
    char* rest;           // stacked rows of the result, whose end is zeroed; null: nothing is
    i64 row_bytes;
};

constexpr int WARPS = THREADS / 32;

// Sum over the threads before this one; total over all. Twice in a row uses another half of `partial`.
HQ_FN i64 block_sum_before(i64 value, i64& total, i64* partial) {
    i64 all;
    const i64 before = sum_before(value, all);
    if ((threadIdx.x & 31) == 31) partial[threadIdx.x / 32] = before + value;
    __syncthreads();
    i64 earlier = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < int(threadIdx.x / 32)) earlier += partial[w];
        total += partial[w];
    }
    __syncthreads();
    return earlier + before;
}

HQ_FN i64 span_of(const Target& t, i64 size) {
    if (t.divide <= 0) return 1;
    const i64 units = t.divide > 1 ? (size + t.divide - 1) / t.divide : size;
    return t.multiple > 1 ? round_up(units, t.multiple) : units;
}

HQ_FN void set_up(const GroupGemmArguments& a) {
    __shared__ i64 partial[WARPS];
    const Groups& g = a.groups;
    const i64 count = (g.count + 3) / 4 * 4;  // entries from one array to the next
    u64* pointers = reinterpret_cast<u64*>(a.arrays);
    int* dimensions = reinterpret_cast<int*>(pointers + TARGETS * count);
    i64 reach = 0, before[TARGETS] = {};  // of the members before this round's
    for (i64 first = 0; first < g.count; first += THREADS) {
        const i64 i = first + threadIdx.x;
        const bool exists = i < g.count;
        const i64 given = exists ? g.size(i) : 0;
        i64 total;
        const i64 sum = reach + block_sum_before(g.alignment > 1 ? round_up(given, g.alignment) : given, total, partial);
        reach += total;
        const i64 start = sum < g.capacity ? sum : g.capacity;
        const i64 size = given < g.capacity - start ? given : g.capacity - start;
#pragma unroll
        for (int t = 0; t < TARGETS; ++t) {
            const Target& target = a.targets[t];
            i64 units = target.divide < 0 ? start : i;
            if (target.divide > 0) {  // the same in all threads
                units = before[t] + block_sum_before(exists ? span_of(target, size) : 0, total, partial);
                before[t] += total;
            }
            if (exists) pointers[t * count + i] = target.base + target.unit * units;
        }
        if (!exists) continue;
        const i64 m = a.ragged == ROWS ? size : a.m;
        const i64 k = a.k_terms * round_up(a.ragged == K ? size : a.k, a.k_unit);
        const i64 pitch = k ? k : a.k_unit;  // never 0
        const i64 values[3 * DIMENSIONS] = {
            k, a.n, pitch, k, m, pitch, a.n, m, a.pitch,
        };
#pragma unroll
        for (int d = 0; d < 3 * DIMENSIONS; ++d) dimensions[d * count + i] = int(values[d]);
    }
}

}  // namespace hq

extern "C" __global__ void __launch_bounds__(hq::THREADS) hq_group_gemm(const __grid_constant__ hq::GroupGemmArguments a) {
    using namespace hq;
    if (blockIdx.x == 0) return set_up(a);
    __shared__ i64 used;
    if (threadIdx.x < 32) {
        i64 sum = 0, all;
        for (i64 i = threadIdx.x; i < a.groups.count; i += 32) sum += a.groups.size(i);
        sum_before(sum, all);
        if (threadIdx.x == 0) used = all;
    }
    __syncthreads();
    if (used < a.groups.capacity)  // rows of a multiple of 16 bytes
        for (i64 i = used * a.row_bytes / 16 + (i64(blockIdx.x) - 1) * THREADS + threadIdx.x;
             i < a.groups.capacity * a.row_bytes / 16; i += (i64(gridDim.x) - 1) * THREADS)
            reinterpret_cast<uint4*>(a.rest)[i] = make_uint4(0, 0, 0, 0);
}
