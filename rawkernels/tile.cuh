// Tiles: which 8 x 8 patch of X a thread holds. 256 threads a tile of TILE_ROWS x TILE_COLUMNS; LANES_ACROSS lanes of a
// warp lie along a row, so a warp covers 32 x 64 (8 lanes), or 8 x 256 (32).
#pragma once
#include "input.cuh"

namespace hq {

constexpr int THREADS = 256;
constexpr int LANES_DOWN = 32 / LANES_ACROSS;
constexpr int WARPS_ACROSS = TILE_COLUMNS / (8 * LANES_ACROSS), WARPS_DOWN = TILE_ROWS / (8 * LANES_DOWN);
static_assert(WARPS_ACROSS * WARPS_DOWN * 32 == THREADS, "256 threads cover a tile, 8 x 8 elements each");

HQ_FN i64 round_up(i64 n, i64 multiple) { return (n + multiple - 1) / multiple * multiple; }

// Where a thread's patch lies.
struct Place {
    int warp, across, down, tx, ty;
    int row, column;        // in the tile
    i64 tile_row, tile_column;
    i64 row0, column0;      // in X
    i64 warp_row0;          // of this warp
    bool full, inside;      // the whole tile lies in X; what this warp holds of it does
};

// base + line * 16 * pitch16 in one instruction; a line of up to 64 GiB.
HQ_FN char* line_at(const void* base, u32 line, u32 pitch16) {
    u64 address;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(line * 16), "r"(pitch16), "l"(base));
    return reinterpret_cast<char*>(address);
}

// Words to global memory; the compiler cannot see that an address from line_at is one.
template <int WORDS>
HQ_FN void store_global(char* target, const u32* w) {
    if constexpr (WORDS == 1) asm volatile("st.global.u32 [%0], %1;" ::"l"(target), "r"(w[0]) : "memory");
    if constexpr (WORDS == 2) asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(w[0]), "r"(w[1]) : "memory");
    if constexpr (WORDS == 4)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

// DOWN 0: lines are rows. 1: lines are columns, of X.T.
template <int DOWN>
struct Direction {
    static HQ_FN int line(const Place& p) { return DOWN ? p.column : p.row; }
    static HQ_FN int along(const Place& p) { return DOWN ? p.row : p.column; }
    static HQ_FN i64 line_tile(const Place& p) { return DOWN ? p.tile_column : p.tile_row; }
    static HQ_FN i64 along_tile(const Place& p) { return DOWN ? p.tile_row : p.tile_column; }
    static constexpr int tile_lines = DOWN ? TILE_COLUMNS : TILE_ROWS, tile_length = DOWN ? TILE_ROWS : TILE_COLUMNS;
    static HQ_FN i64 line0(const Place& p) { return DOWN ? p.column0 : p.row0; }
    static HQ_FN i64 along0(const Place& p) { return DOWN ? p.row0 : p.column0; }
    template <class A> static HQ_FN i64 lines(const A& a) { return DOWN ? a.k : a.m; }
    template <class A> static HQ_FN i64 length(const A& a) { return DOWN ? a.m : a.k; }
    static HQ_FN int lane(const Place& p) { return DOWN ? p.ty : p.tx; }
    static constexpr int step = DOWN ? LANES_ACROSS : 1;        // lane number to the next patch along the line
    static constexpr int other_step = DOWN ? 1 : LANES_ACROSS;  // to the next patch across lines
    static constexpr int lanes = DOWN ? LANES_DOWN : LANES_ACROSS;  // patches of a warp along a line
    static constexpr int warps = DOWN ? WARPS_DOWN : WARPS_ACROSS;
    static HQ_FN int warp(const Place& p) { return DOWN ? p.down : p.across; }
};

// A thread's place in a tile of an m x k matrix.
HQ_FN void place(Place& p, i64 tile_row, i64 tile_column, i64 m, i64 k) {
    const int lane = threadIdx.x & 31;
    p.warp = threadIdx.x / 32; p.across = p.warp % WARPS_ACROSS; p.down = p.warp / WARPS_ACROSS;
    p.tx = lane % LANES_ACROSS; p.ty = lane / LANES_ACROSS;
    p.row = (p.down * LANES_DOWN + p.ty) * 8; p.column = (p.across * LANES_ACROSS + p.tx) * 8;
    p.tile_row = tile_row; p.tile_column = tile_column;
    p.full = (tile_row + 1) * TILE_ROWS <= m && (tile_column + 1) * TILE_COLUMNS <= k;
    p.row0 = tile_row * TILE_ROWS + p.row; p.column0 = tile_column * TILE_COLUMNS + p.column;
    p.warp_row0 = tile_row * TILE_ROWS + p.down * LANES_DOWN * 8;
    // Where members end anywhere, most warps of a tile that is not full are; elsewhere such tiles are few.
    p.inside = GROUPED ? p.warp_row0 + LANES_DOWN * 8 <= m && (tile_column + 1) * TILE_COLUMNS <= k : p.full;
}

// False where the tile lies beyond the last row: the grid's y and z together count row tiles.
HQ_FN bool locate(Place& p, i64 m, i64 k, bool reversed) {
    i64 tile_row = blockIdx.y + i64(blockIdx.z) * gridDim.y, tile_column = blockIdx.x;
    const i64 row_tiles = (m + TILE_ROWS - 1) / TILE_ROWS;
    if (tile_row >= row_tiles) return false;
    if (reversed) {
        tile_row = row_tiles - 1 - tile_row;
        tile_column = gridDim.x - 1 - tile_column;
    }
    place(p, tile_row, tile_column, m, k);
    return true;
}

// Where a byte of a staged line lies: 16-byte pieces of the lines a warp writes together fall into different banks.
HQ_FN int staged(int line, int byte, int line_bytes) { return (line * line_bytes + byte) ^ (((line >> 3) & 7) << 4); }

HQ_FN bool first_thread() { return blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0; }

// How many of the 8 rows (columns: of the next 16) from `at` exist.
HQ_FN int count_of(i64 end, i64 at, int most) { return end - at < most ? int(end - at) : most; }

// This thread's patch. ALIGNED: every row of X starts on 16 bytes.
template <bool ALIGNED_ROWS, class In>
HQ_FN void load_patch(Patch<In>& patch, const Place& p, const char* values, i64 row_bytes, i64 m, i64 k) {
    const char* tile = values + p.tile_row * TILE_ROWS * row_bytes + p.tile_column * TILE_COLUMNS * In::size;
    if (ALIGNED_ROWS && p.inside) {
        const char* first = tile + p.column * In::size;
        const int row16 = int(row_bytes >> 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u64 address;
            asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(address) : "r"((p.row + i) * 16), "r"(row16), "l"(first));
            patch.load_row(i, reinterpret_cast<const char*>(address));
        }
    } else {
        patch.template load<ALIGNED_ROWS>(tile + p.row * row_bytes + p.column * In::size, row_bytes,
                                          count_of(m, p.row0, 8), count_of(k, p.column0, 16));
    }
}

}  // namespace hq
