// Byte scales to 128 x 4 tiles: grid (blocks, lines, lines again) of tiles of 128 lines x 8 blocks, 4 scales a thread.
//
// From (blocks, lines) as quantize writes them to what cuBLASLt reads on Blackwell (layout.Tiled128x4). The global
// scales of both operands go to *alpha.
#include "input.cuh"

namespace hq {

struct TileArguments {
    const u8* scales;
    i64 scale_pitch, lines, blocks;
    u8* tiles;
    const float* scalar;  // both or neither
    const float* other;
    float* alpha;
};

}  // namespace hq

extern "C" __global__ void __launch_bounds__(256) hq_tile_scales(const __grid_constant__ hq::TileArguments a) {
    using namespace hq;
    if (a.alpha && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) *a.alpha = *a.scalar * *a.other;
    const i64 line_tile = blockIdx.y + i64(blockIdx.z) * gridDim.y, tiles = (a.blocks + 3) / 4;
    const i64 line = line_tile * 128 + threadIdx.x % 128, tile = i64(blockIdx.x) * 2 + threadIdx.x / 128;
    if (tile >= tiles || line_tile * 128 >= a.lines) return;
    u32 four = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if (line < a.lines && tile * 4 + j < a.blocks) four |= u32(a.scales[(tile * 4 + j) * a.scale_pitch + line]) << (8 * j);
    *reinterpret_cast<u32*>(a.tiles + (line_tile * tiles + tile) * 512 + line % 32 * 16 + line % 128 / 32 * 4) = four;
}
