// Turning 8 x 8 codes in registers.
#pragma once
#include "input.cuh"

namespace hq {

// 4 x 4 bytes, a word a row, turned.
HQ_FN void turn_bytes(u32 a, u32 b, u32 c, u32 d, u32& w, u32& x, u32& y, u32& z) {
    const u32 ab = permute(a, b, 0x5140), cd = permute(c, d, 0x5140), AB = permute(a, b, 0x7362), CD = permute(c, d, 0x7362);
    w = lows(ab, cd); x = highs(ab, cd); y = lows(AB, CD); z = highs(AB, CD);
}

// 8 x 8 codes, rows to columns.
template <int BITS>
HQ_FN void turn(const u32 (&row)[8][BITS / 4], u32 (&column)[8][BITS / 4]) {
    if constexpr (BITS == 4) {
        u32 even[4], odd[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const u32 a = row[2 * p][0], b = row[2 * p + 1][0];
            even[p] = (a & 0x0F0F0F0Fu) | (b & 0x0F0F0F0Fu) << 4;
            odd[p] = (a >> 4 & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u);
        }
        turn_bytes(even[0], even[1], even[2], even[3], column[0][0], column[2][0], column[4][0], column[6][0]);
        turn_bytes(odd[0], odd[1], odd[2], odd[3], column[1][0], column[3][0], column[5][0], column[7][0]);
    } else if constexpr (BITS == 8) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int w = 0; w < 2; ++w)
                turn_bytes(row[4 * h][w], row[4 * h + 1][w], row[4 * h + 2][w], row[4 * h + 3][w],
                           column[4 * w][h], column[4 * w + 1][h], column[4 * w + 2][h], column[4 * w + 3][h]);
    } else if constexpr (BITS == 16) {
#pragma unroll
        for (int c = 0; c < 8; ++c)
#pragma unroll
            for (int w = 0; w < 4; ++w)
                column[c][w] = c & 1 ? highs(row[2 * w][c / 2], row[2 * w + 1][c / 2]) : lows(row[2 * w][c / 2], row[2 * w + 1][c / 2]);
    } else {
#pragma unroll
        for (int c = 0; c < 8; ++c)
#pragma unroll
            for (int r = 0; r < 8; ++r) column[c][r] = row[r][c];
    }
}

}  // namespace hq
