// Largest magnitude of X: grid and tiles as quantize, one atomic a tile. `whole` holds 0 before; NaN is ignored.
#include "tile.cuh"

namespace hq {

struct AmaxArguments {
    const char* values;
    i64 row_bytes, m, k;
    u32* whole;
    const u32* noop;
};

}  // namespace hq

extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_amax(const __grid_constant__ hq::AmaxArguments a) {
    using namespace hq;
    __shared__ u32 partial[THREADS / 32];
    if (a.noop && *a.noop << 1) return;  // -0.0f is zero
    Place p;
    if (!locate(p, a.m, a.k, false)) return;
    Patch<Input> patch;
    load_patch<ALIGNED>(patch, p, a.values, a.row_bytes, a.m, a.k);
    u32 best = column_amax<false>(patch).template whole<false>();
    best = best > INF_BITS ? 0 : best;
    best = __reduce_max_sync(~0u, best);
    if ((threadIdx.x & 31) == 0) partial[p.warp] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < THREADS / 32; ++w) best = best > partial[w] ? best : partial[w];
        atomicMax(a.whole, best);
    }
}
