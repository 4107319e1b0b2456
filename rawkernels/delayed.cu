// Delayed scaling: grid (matrices), one history a tile, 256 threads. Appends the current amax to the history, takes the
// next amax from there, and sets the current one to 0.
//
// Magnitudes are compared as bits. In each pass a history moves left by one in place: all threads read, then all write.
#include "tile.cuh"

namespace hq {

struct DelayedArguments {
    u32* history;  // (matrices, length), oldest first
    i64 length;
    u32* current;
    float* amax;
    i64 takes_largest;
    i64 factor;  // bits of 2^margin as a float
};

}  // namespace hq

extern "C" __global__ void __launch_bounds__(hq::THREADS) hq_delayed(const __grid_constant__ hq::DelayedArguments a) {
    using namespace hq;
    __shared__ u32 partial[THREADS / 32];
    const i64 matrix = blockIdx.x;
    u32* history = a.history + matrix * a.length;
    const u32 last = a.current[matrix];
    __syncthreads();  // before thread 0 clears it
    if (threadIdx.x == 0) a.current[matrix] = 0;
    if (last == 0 || last >= INF_BITS) return;  // the same for the whole block
    u32 best = last;
#pragma unroll 1
    for (i64 first = 0; first < a.length; first += THREADS) {
        const i64 at = first + threadIdx.x;
        const u32 next = at + 1 < a.length ? history[at + 1] : last;
        __syncthreads();
        if (at < a.length) history[at] = next;
        best = next > best ? next : best;
    }
    best = __reduce_max_sync(~0u, best);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 1; w < THREADS / 32; ++w) best = best > partial[w] ? best : partial[w];
        const float taken = float_of(a.takes_largest ? best : last) * float_of(u32(a.factor));
        a.amax[matrix] = taken < float_of(INF_BITS) ? taken : float_of(INF_BITS - 1);
    }
}
