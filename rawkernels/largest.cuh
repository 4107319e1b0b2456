// Largest magnitude of a matrix, as float bits: a patch of each thread, a number of each warp, one atomic a block.
#pragma once
#include "tile.cuh"

namespace hq {

typedef u32 OfWarps[THREADS / 32];  // in shared memory

// What this warp holds; NaN is ignored.
template <class In>
HQ_FN void see_whole(const Patch<In>& patch, const Place& p, OfWarps& seen) {
    const u32 best = __reduce_max_sync(~0u, without_nan(column_amax<false>(patch).template whole<false>()));
    if ((threadIdx.x & 31) == 0) seen[threadIdx.x / 32] = best;
}

// After a barrier, by the first warp: raises *target to what all warps saw.
HQ_FN void raise_to(u32* target, const OfWarps& seen) {
    if (threadIdx.x >= 32) return;
    const u32 best = __reduce_max_sync(~0u, threadIdx.x < THREADS / 32 ? seen[threadIdx.x] : 0);
    if (threadIdx.x == 0 && best > *const_cast<volatile u32*>(target)) atomicMax(target, best);  // an old number only costs an atomic
}

}  // namespace hq
