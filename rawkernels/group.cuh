// Groups: the member that a tile of stacked rows lies in, found from sizes on the device. Sizes are not trusted:
// negative ones count as 0, and what passes the capacity is cut off.
#pragma once
#include "tile.cuh"

namespace hq {

enum SizeKind { INT32_SIZES, INT64_SIZES, INT32_ENDS, EACH };

struct Groups {
    const void* sizes;
    i64 kind, count, each;
    i64 capacity;   // rows there are
    i64 alignment;  // members begin on a multiple of it

    HQ_FN i64 size(i64 i) const {  // as given, in [0, capacity]
        i64 n = each;
        if (kind == INT32_SIZES) n = static_cast<const int*>(sizes)[i];
        if (kind == INT64_SIZES) n = static_cast<const i64*>(sizes)[i];
        if (kind == INT32_ENDS) n = i64(static_cast<const int*>(sizes)[i]) - (i ? static_cast<const int*>(sizes)[i - 1] : 0);
        return n < 0 ? 0 : n < capacity ? n : capacity;
    }
    HQ_FN i64 after(i64 start, i64 n) const {  // where the next member begins
        const i64 end = start + (alignment > 1 ? round_up(n, alignment) : n);
        return end < capacity ? end : capacity;
    }
};

// What a member takes of a buffer, in units: layout.Span.
template <int DIVIDE, int MULTIPLE>
struct Span {
    static HQ_FN i64 of(i64 size) { return round_up((size + DIVIDE - 1) / DIVIDE, MULTIPLE); }
};

template <int SPANS>
struct Member {
    i64 index;          // -1: the tile lies behind the last member, whose end all numbers then tell
    i64 start, size;    // rows
    i64 rows;           // size and what lies between it and the next member
    i64 tile, tiles;    // of this member; or how far behind the last one, and how many tiles all members have
    i64 before[SPANS + 1];  // units of each span before it
};

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

// By one warp, a run of members each lane; one of the lanes writes what is found.
template <int ROWS, class... Spans>
HQ_FN void find_member(const Groups& g, i64 tile, Member<sizeof...(Spans)>& found) {
    constexpr int spans = sizeof...(Spans);
    const i64 run = (g.count + 31) / 32, first = (threadIdx.x & 31) * run;
    const i64 last = first + run < g.count ? first + run : g.count;
    i64 reach = 0, all;
    for (i64 i = first; i < last; ++i) reach += g.alignment > 1 ? round_up(g.size(i), g.alignment) : g.size(i);
    const i64 begin = sum_before(reach, all), start0 = begin < g.capacity ? begin : g.capacity;

    struct At {
        i64 start, tiles, before[spans + 1];
        HQ_FN i64 pass(const Groups& g, i64 i, i64& size) {  // over member i; returns its rows
            const i64 given = g.size(i), next = g.after(start, given), rows = next - start;
            size = given < g.capacity - start ? given : g.capacity - start;
            start = next;
            tiles += (rows + ROWS - 1) / ROWS;
            int s = 0;
            ((before[s++] += Spans::of(size)), ...);
            return rows;
        }
    } at = {start0, 0, {}};
    i64 size = 0;
    for (i64 i = first; i < last; ++i) at.pass(g, i, size);
    const i64 end = __shfl_sync(~0u, at.start, 31);
    At before = {start0, 0, {}}, whole = {end, 0, {}};
    before.tiles = sum_before(at.tiles, whole.tiles);
#pragma unroll
    for (int s = 0; s < spans; ++s) before.before[s] = sum_before(at.before[s], whole.before[s]);

    if (tile >= whole.tiles) {
        if ((threadIdx.x & 31) == 0) {
            found = {-1, end, 0, g.capacity - end, tile - whole.tiles, whole.tiles, {}};
#pragma unroll
            for (int s = 0; s < spans; ++s) found.before[s] = whole.before[s];
        }
    } else if (tile >= before.tiles && tile < before.tiles + at.tiles) {
        At here = before;
        for (i64 i = first; i < last; ++i) {
            At next = here;
            const i64 rows = next.pass(g, i, size);
            if (tile < next.tiles) {
                found = {i, here.start, size, rows, tile - here.tiles, next.tiles - here.tiles, {}};
#pragma unroll
                for (int s = 0; s < spans; ++s) found.before[s] = here.before[s];
                break;
            }
            here = next;
        }
    }
    __syncwarp();
}

HQ_FN i64 row_tile() { return blockIdx.y + i64(blockIdx.z) * gridDim.y; }
HQ_FN i64 row_tiles() { return i64(gridDim.y) * gridDim.z; }

// Zeros from byte `from`, on 16, to byte `to`: this block's share of what the blocks behind the last member do.
HQ_FN void zero_share(void* base, i64 from, i64 to, i64 share, i64 shares) {
    uint4* vectors = static_cast<uint4*>(base);
    const i64 stride = shares * gridDim.x * THREADS;
    for (i64 i = from / 16 + (share * gridDim.x + blockIdx.x) * THREADS + threadIdx.x; i < to / 16; i += stride)
        vectors[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace hq
