// Narrow: grid of 1-D tiles, 256 threads, 4 elements a thread; float64 to float32, nearest even, subnormals kept, NaN
// the hardware's canonical one.
//
// CuPy's own cast may flush subnormals: it compiles with -ftz=true.
#include "tile.cuh"

namespace hq {

struct NarrowArguments {
    const double* from;
    float* to;
    i64 count;
};

}  // namespace hq

extern "C" __global__ void __launch_bounds__(hq::THREADS) hq_narrow(const __grid_constant__ hq::NarrowArguments a) {
    using namespace hq;
    const i64 first = (i64(blockIdx.x) + (blockIdx.y + i64(blockIdx.z) * gridDim.y) * gridDim.x) * THREADS * 4 + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const i64 at = first + i * THREADS;
        if (at >= a.count) continue;
        const double value = a.from[at];
        a.to[at] = value == value ? __double2float_rn(value) : float_of(NAN_BITS);
    }
}
