// Members: which of many matrices, whose rows are stacked, a tile lies in, found by one warp from the sizes alone. They
// are not trusted: negative ones count as 0, and what passes the capacity is cut off. g++ compiles this too.
#pragma once
#include "codec.cuh"

namespace hq {

enum SizeKind { INT32_SIZES, INT64_SIZES, INT32_ENDS, EACH };

struct Groups {
    const void* sizes;
    i64 kind, count, each;
    i64 capacity;   // rows there are, below 2^31
    i64 alignment;  // members begin on a multiple of it

    template <int KIND>
    HQ_FN u32 size_as(u32 i) const {  // as given, in [0, capacity]
        const int* words = static_cast<const int*>(sizes);
        const i64 n = KIND == INT32_SIZES ? words[i] : KIND == INT64_SIZES ? static_cast<const i64*>(sizes)[i] :
                      KIND == INT32_ENDS ? i64(words[i]) - (i ? words[i - 1] : 0) : each;
        return n < 0 ? 0 : n < capacity ? u32(n) : u32(capacity);
    }
    HQ_FN i64 size(i64 i) const {
        if (kind == INT32_SIZES) return size_as<INT32_SIZES>(u32(i));
        if (kind == INT64_SIZES) return size_as<INT64_SIZES>(u32(i));
        return kind == INT32_ENDS ? size_as<INT32_ENDS>(u32(i)) : size_as<EACH>(u32(i));
    }
    // Where the member after one of n rows begins, if that one begins at `start`.
    HQ_FN u32 after(u32 start, u32 n) const {
        const u32 cap = u32(capacity), aligned = alignment > 1 ? (n + u32(alignment) - 1) / u32(alignment) * u32(alignment) : n;
        return aligned < cap - start ? start + aligned : cap;
    }
};

// What a member takes of a buffer, in units: groups.Span.
template <int DIVIDE, int MULTIPLE>
struct Span {
    static HQ_FN u32 of(u32 size) { return ((size + DIVIDE - 1) / DIVIDE + MULTIPLE - 1) / MULTIPLE * MULTIPLE; }
};
struct AnySpan {  // the same, known at run time
    i64 divide, multiple;
    HQ_FN u32 of(u32 size) const {
        const u32 d = u32(divide), m = u32(multiple);
        return ((size + d - 1) / d + m - 1) / m * m;
    }
};

template <int SPANS>
struct Member {
    i64 index;          // -1: the tile lies behind the last member, whose end all numbers then tell
    i64 start, size;    // rows
    i64 rows;           // size and what lies between it and the next member
    i64 tile, tiles;    // of this member; or how far behind the last one, and how many tiles all members have
    i64 before[SPANS + 1];  // units of each span before it
};

// Sum over this lane and the ones before it.
HQ_FN u32 sum_up_to(u32 value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, value, step);
        if (int(threadIdx.x & 31) >= step) value += other;
    }
    return value;
}

// A run of members each lane.
template <int KIND, int ROWS, class... Spans>
HQ_FN void find_among(const Groups& g, u32 tile, Member<sizeof...(Spans)>& found, Spans... span) {
    constexpr int spans = sizeof...(Spans);
    const u32 lane = threadIdx.x & 31, count = u32(g.count), capacity = u32(g.capacity), run = (count + 31) / 32;
    const u32 first = lane * run < count ? lane * run : count, last = first + run < count ? first + run : count;
    u32 end = 0;
#pragma unroll 4
    for (u32 i = first; i < last; ++i) end = g.after(end, g.size_as<KIND>(i));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {  // a sum that stays at the capacity
        const u32 other = __shfl_up_sync(~0u, end, step);
        if (int(lane) >= step) end = end < capacity - other ? end + other : capacity;
    }
    const u32 whole = __shfl_sync(~0u, end, 31), before = __shfl_up_sync(~0u, end, 1), start = lane ? before : 0;

    u32 tiles = 0, at = start;
#pragma unroll 4
    for (u32 i = first; i < last; ++i) {
        const u32 next = g.after(at, g.size_as<KIND>(i));
        tiles += (next - at + ROWS - 1) / ROWS;
        at = next;
    }
    const u32 tiles_end = sum_up_to(tiles), all = __shfl_sync(~0u, tiles_end, 31);
    const bool mine = tile >= tiles_end - tiles && tile < tiles_end;
    const u32 owner = __ballot_sync(~0u, mine);

    u32 index = count;
    Member<spans> member = {-1, whole, 0, capacity - whole, i64(tile) - all, all, {}};
    if (mine) {
        u32 seen = tiles_end - tiles;
        at = start;
        for (u32 i = first; i < last; ++i) {
            const u32 size = g.size_as<KIND>(i), next = g.after(at, size), own = (next - at + ROWS - 1) / ROWS;
            if (tile < seen + own) {
                index = i;
                member = {i, at, size < capacity - at ? size : capacity - at, next - at, tile - seen, own, {}};
                break;
            }
            seen += own;
            at = next;
        }
    }
    if constexpr (spans > 0) {
        if (owner) index = __shfl_sync(~0u, index, __ffs(owner) - 1);
        u32 sums[spans + 1] = {};
        at = start;
#pragma unroll 4
        for (u32 i = first; i < last && i < index; ++i) {
            const u32 given = g.size_as<KIND>(i), size = given < capacity - at ? given : capacity - at;
            int s = 0;
            ((sums[s++] += span.of(size)), ...);
            at = g.after(at, given);
        }
#pragma unroll
        for (int s = 0; s < spans; ++s) member.before[s] = __reduce_add_sync(~0u, sums[s]);
    }
    if (owner ? mine : lane == 0) found = member;
}

// Members that are all alike.
template <int ROWS, class... Spans>
HQ_FN void find_alike(const Groups& g, u32 tile, Member<sizeof...(Spans)>& found, Spans... span) {
    const u32 each = g.size_as<EACH>(0), own = (each + ROWS - 1) / ROWS, all = own * u32(g.count);
    const bool exists = tile < all;
    const u32 index = exists ? tile / own : u32(g.count);
    found = {exists ? i64(index) : -1, i64(index) * each, exists ? each : 0, exists ? each : g.capacity - i64(index) * each,
             exists ? tile - index * own : tile - all, exists ? own : all, {}};
    int s = 0;
    ((found.before[s++] = i64(index) * span.of(each)), ...);
}

// By one warp; one of its lanes writes what is found.
template <int ROWS, class... Spans>
HQ_FN void find_member(const Groups& g, i64 tile, Member<sizeof...(Spans)>& found, Spans... span) {
    if (g.kind == EACH) {
        if ((threadIdx.x & 31) == 0) find_alike<ROWS>(g, u32(tile), found, span...);
    } else if (g.kind == INT64_SIZES) find_among<INT64_SIZES, ROWS>(g, u32(tile), found, span...);
    else if (g.kind == INT32_SIZES) find_among<INT32_SIZES, ROWS>(g, u32(tile), found, span...);
    else find_among<INT32_ENDS, ROWS>(g, u32(tile), found, span...);
    __syncwarp();
}

}  // namespace hq
