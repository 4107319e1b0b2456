// Transpose: grid and tiles as quantize, over a part (outer, k): its codes and scales moved to where the part of the
// transposed matrix has them. For formats of one scale or of square blocks, which lose nothing by it.
//
// Generated before this text: Part (traits of the format), Input (any), TILE_ROWS = TILE_COLUMNS = 128.
#include "tile.cuh"
#include "turn.cuh"

namespace hq {

struct Side {
    u8* codes;
    i64 pitch16;  // 16 bytes, from one line to the next
    u8* scales;
    i64 scale_pitch;
    float* global_scale;
    float* amax;
};

struct TransposeArguments {
    Side from, to;
    i64 m, k;  // of the part that is read
};

constexpr int WORDS = Part::stored_bits / 4;  // of 8 codes
constexpr int LINE_BYTES = Part::stored_bits * TILE_ROWS / 8;
constexpr int PIECE = WORDS < 4 ? WORDS : 4;

template <int N>
HQ_FN void copy_words(void* target, const void* source) {
    if constexpr (N == 1) *static_cast<u32*>(target) = *static_cast<const u32*>(source);
    if constexpr (N == 2) *static_cast<uint2*>(target) = *static_cast<const uint2*>(source);
    if constexpr (N == 4) *static_cast<uint4*>(target) = *static_cast<const uint4*>(source);
}

// What one thread of the grid moves for the whole matrix.
template <class F>
HQ_FN void move_scalars(const TransposeArguments& a) {
    if (F::global_scale) *a.to.global_scale = *a.from.global_scale;
    if (a.to.amax) *a.to.amax = *a.from.amax;
    if constexpr (F::scale == FLOAT32 && F::one_scale)
        for (i64 i = 0; i < a.to.scale_pitch; ++i)
            reinterpret_cast<float*>(a.to.scales)[i] = i == 0 ? *reinterpret_cast<const float*>(a.from.scales) : 0.0f;
}

// The block scales of this tile.
template <class F>
HQ_FN void move_scales(const TransposeArguments& a, const Place& p) {
    if constexpr (F::scale == FLOAT32) {
        const float* from = reinterpret_cast<const float*>(a.from.scales);
        float* to = reinterpret_cast<float*>(a.to.scales);
        if constexpr (!F::one_scale) {  // one of 128 x 128; the last row of tiles writes the padding
            const i64 at = p.tile_row + threadIdx.x, blocks = round_up(a.m, 128) / 128;
            if (threadIdx.x < 4 && at < a.to.scale_pitch && (threadIdx.x == 0 || p.tile_row == blocks - 1))
                to[p.tile_column * a.to.scale_pitch + at] = threadIdx.x == 0 ? from[p.tile_row * a.from.scale_pitch + p.tile_column] : 0.0f;
        }
    } else if constexpr (F::scale != NO_SCALE) {  // bytes of squares, stored for each of a square's lines
        constexpr int side = F::scale_columns;
        static_assert(side % 4 == 0 && 128 % side == 0, "a tile holds whole squares, and 4 lines lie in one");
        const i64 block = p.tile_row * (128 / side) + threadIdx.x / 32, line = p.tile_column * 128 + threadIdx.x % 32 * 4;
        if (threadIdx.x / 32 < 128 / side && block * side < a.m && line < a.to.scale_pitch) {
            const u32 byte = line < a.k ? a.from.scales[line / side * a.from.scale_pitch + block * side] : 0;
            u32 four = byte * 0x01010101u;
            if (line + 4 > a.k && line < a.k) four &= 0xFFFFFFFFu >> (8 * (line + 4 - a.k));
            *reinterpret_cast<u32*>(a.to.scales + block * a.to.scale_pitch + line) = four;
        }
    }
}

}  // namespace hq

extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_transpose(const __grid_constant__ hq::TransposeArguments a) {
    using namespace hq;
    extern __shared__ __align__(16) u8 stage[];
    if (first_thread()) move_scalars<Part>(a);
    Place p;
    if (!locate(p, a.m, a.k, false)) return;
    move_scales<Part>(a, p);
    alignas(16) u32 row[8][WORDS], column[8][WORDS];
    const i64 from_pitch = a.from.pitch16 * 16, to_pitch = a.to.pitch16 * 16;
    const i64 first_byte = p.column0 * WORDS / 2, rows = round_up(a.m, 16) - p.row0;
#pragma unroll
    for (int r = 0; r < 8; ++r)
#pragma unroll
        for (int w = 0; w < WORDS; w += PIECE) {
            const bool there = r < rows && first_byte + 4 * w < from_pitch;
            if (there) copy_words<PIECE>(row[r] + w, a.from.codes + (p.row0 + r) * from_pitch + first_byte + 4 * w);
            else
#pragma unroll
                for (int n = 0; n < PIECE; ++n) row[r][w + n] = 0;
        }
    turn<Part::stored_bits>(row, column);
#pragma unroll
    for (int c = 0; c < 8; ++c)
#pragma unroll
        for (int w = 0; w < WORDS; w += PIECE)
            copy_words<PIECE>(stage + staged(p.column + c, p.row * LINE_BYTES / TILE_ROWS + 4 * w, LINE_BYTES), column[c] + w);
    __syncthreads();
    constexpr int chunks = LINE_BYTES / 16;
    const i64 first = p.tile_row * LINE_BYTES, lines = round_up(a.k, 16) - p.tile_column * TILE_COLUMNS;
    u8* target = a.to.codes + p.tile_column * TILE_COLUMNS * to_pitch + first;
#pragma unroll
    for (int n = 0; n < TILE_COLUMNS * chunks / THREADS; ++n) {
        const int index = n * THREADS + threadIdx.x, line = index / chunks, byte = index % chunks * 16;
        if (line < lines && first + byte < to_pitch)
            copy_words<4>(target + line * to_pitch + byte, stage + staged(line, byte, LINE_BYTES));
    }
}
