// Largest magnitudes of X: grid and tiles as quantize, one atomic a tile, or a line of it. NaN is ignored, targets hold
// 0 before, or what they are raised from. Generated before this text: ROW, COLUMN (what each part measures), ROW_ROTATED, COLUMN_ROTATED.
// GROUPED: of each of many matrices whose rows are stacked.
#include "group.cuh"
#include "hadamard.cuh"
#include "largest.cuh"

namespace hq {

struct AmaxArguments {
    const char* values;
    i64 row_bytes, m, k;
    u32* target[2];  // of the rowwise and of the columnwise part
    const u32* noop;
#if GROUPED
    const TableMember* table;
#endif
};

struct Partial {
    OfWarps whole[2];
    u32 line[2][4][128];  // of a line in each warp that sees it
};

// What a warp sees, to shared memory.
template <int DOWN, int MEASURE, class In>
HQ_FN void see(const Patch<In>& patch, const Place& p, Partial& partial) {
    typedef Direction<DOWN> D;
    if constexpr (MEASURE == WHOLE) {
        see_whole(patch, p, partial.whole[DOWN]);
    } else {
        Lines<In> lines = DOWN ? column_amax<false>(patch) : row_amax<false>(patch);
#pragma unroll
        for (int lane = 1; lane < D::lanes; lane *= 2) lines.template across<false>(lane * D::step);
        if (D::lane(p) == 0) {
#pragma unroll
            for (int i = 0; i < 8; ++i) partial.line[DOWN][D::warp(p)][D::line(p) + i] = without_nan(lines.at(i));
        }
    }
}

template <int DOWN, int MEASURE, bool ROTATED>
HQ_FN void see_part(const Patch<Input>& patch, const Place& p, i64 length, Partial& partial) {
    if constexpr (MEASURE == NOTHING) return;
    else if constexpr (!ROTATED) see<DOWN, MEASURE>(patch, p, partial);
    else {
        Patch<BFloat16> rotated;
        rotate<DOWN>(patch, p, length, rotated);
        see<DOWN, MEASURE>(rotated, p, partial);
    }
}

// From shared memory to where the part collects.
template <int DOWN, int MEASURE>
HQ_FN void collect(u32* target, i64 lines, const Place& p, const Partial& partial) {
    typedef Direction<DOWN> D;
    if constexpr (MEASURE == WHOLE) {
        raise_to(target, partial.whole[DOWN]);
    } else if constexpr (MEASURE == LINES) {
        const int thread = int(threadIdx.x) - DOWN * 128;
        const i64 line = D::line_tile(p) * 128 + thread;
        if (thread < 0 || thread >= 128 || line >= lines) return;
        u32 best = 0;
#pragma unroll
        for (int w = 0; w < D::warps; ++w) best = max(best, partial.line[DOWN][w][thread]);
        atomicMax(target + line, best);
    }
}

}  // namespace hq

extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_amax(const __grid_constant__ hq::AmaxArguments a) {
    using namespace hq;
    __shared__ Partial partial;
    if (a.noop && *a.noop << 1) return;  // -0.0f is zero
    Place p;
#if GROUPED
    __shared__ TableMember member;
    if (threadIdx.x < 32) load_member(a.table, row_tile(), member);
    __syncthreads();
    if (member.index < 0) return;
    place(p, member.tile, blockIdx.x, member.size, a.k);
    const char* values = a.values + member.start * a.row_bytes;
    u32* rows = a.target[0] + (ROW == LINES ? member.start : member.index);
    u32* columns = a.target[1] + member.index * (COLUMN == LINES ? a.k : 1);
    const i64 m = member.size;
#else
    if (!locate(p, a.m, a.k, false)) return;
    const char* values = a.values;
    u32 *rows = a.target[0], *columns = a.target[1];
    const i64 m = a.m;
#endif
    Patch<Input> patch;
    load_patch<ALIGNED>(patch, p, values, a.row_bytes, m, a.k);
    see_part<0, ROW, ROW_ROTATED>(patch, p, a.k, partial);
    see_part<1, COLUMN, COLUMN_ROTATED>(patch, p, m, partial);
    __syncthreads();
    collect<0, ROW>(rows, m, p, partial);
    collect<1, COLUMN>(columns, a.k, p, partial);
}
