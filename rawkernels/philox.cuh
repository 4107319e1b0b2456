// Random bits by counter, Philox4x32-10: the stream of philox.py.
#pragma once
#include "tile.cuh"

namespace hq {

HQ_FN void philox(u32 (&c)[4], u32 key, u32 other_key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 first = u64(0xD2511F53u) * c[0], second = u64(0xCD9E8D57u) * c[2];
        c[0] = u32(second >> 32) ^ c[1] ^ key;
        c[2] = u32(first >> 32) ^ c[3] ^ other_key;
        c[1] = u32(second);
        c[3] = u32(first);
        key += 0x9E3779B9u;
        other_key += 0xBB67AE85u;
    }
}

// Draws of a patch along its lines: 16 bits for each of the 8 elements of a line, two in a word, the first one low.
template <int DOWN>
struct Draws {
    u64 seed, line, piece;
    u32 part;
    HQ_FN Draws(u64 seed, u32 part, const Place& p)
        : seed(seed), line(Direction<DOWN>::line0(p)), piece(Direction<DOWN>::along0(p) / 8), part(part) {}
    HQ_FN void of_line(int i, u32 (&words)[4]) const {
        words[0] = u32(piece);
        words[1] = u32(line + i);
        words[2] = u32((line + i) >> 32);
        words[3] = part + 2 * u32(piece >> 32);
        philox(words, u32(seed), u32(seed >> 32));
    }
};

struct NoDraws {};

}  // namespace hq
