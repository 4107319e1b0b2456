// Largest magnitude of X: grid and tiles as quantize, one atomic a tile. `whole` holds 0 before; NaN is ignored.
// GROUPED: of each of many matrices whose rows are stacked.
#include "group.cuh"

namespace hq {

struct AmaxArguments {
    const char* values;
    i64 row_bytes, m, k;
    u32* whole;
    const u32* noop;
#if GROUPED
    const Member<3>* table;
#endif
};

}  // namespace hq

extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_amax(const __grid_constant__ hq::AmaxArguments a) {
    using namespace hq;
    __shared__ u32 partial[THREADS / 32];
    if (a.noop && *a.noop << 1) return;  // -0.0f is zero
    Place p;
#if GROUPED
    __shared__ Member<3> member;
    if (threadIdx.x < 32) load_member(a.table, row_tile(), member);
    __syncthreads();
    if (member.index < 0) return;
    place(p, member.tile, blockIdx.x, member.size, a.k);
    const char* values = a.values + member.start * a.row_bytes;
    u32* whole = a.whole + member.index;
    const i64 m = member.size;
#else
    if (!locate(p, a.m, a.k, false)) return;
    const char* values = a.values;
    u32* whole = a.whole;
    const i64 m = a.m;
#endif
    Patch<Input> patch;
    load_patch<ALIGNED>(patch, p, values, a.row_bytes, m, a.k);
    u32 best = column_amax<false>(patch).template whole<false>();
    best = best > INF_BITS ? 0 : best;
    best = __reduce_max_sync(~0u, best);
    if ((threadIdx.x & 31) == 0) partial[p.warp] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < THREADS / 32; ++w) best = best > partial[w] ? best : partial[w];
        atomicMax(whole, best);
    }
}
