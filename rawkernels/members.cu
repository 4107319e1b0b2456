// Members: grid (row tiles / 8), a warp a row tile of a group: which member it lies in, for the kernels after this one.
// A tile's blocks across the columns then read one line of a table, where each would search all sizes.
#include "group.cuh"

namespace hq {

struct MembersArguments {
    Groups groups;
    TableMember* table;
    i64 tiles;
    AnySpan span[5];
};

}  // namespace hq

extern "C" __global__ void __launch_bounds__(hq::THREADS) hq_members(const __grid_constant__ hq::MembersArguments a) {
    using namespace hq;
    const i64 tile = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (tile < a.tiles) find_member<TILE_ROWS>(a.groups, tile, a.table[tile], a.span[0], a.span[1], a.span[2], a.span[3], a.span[4]);
}
