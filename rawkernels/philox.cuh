// Random bits by counter, Philox4x32-10: the stream of philox.py.
#pragma once
#include "tile.cuh"

namespace hq {

// The keys of the ten rounds, which a block of threads makes once: two words a round.
struct alignas(16) Keys {
    u32 word[20];
    HQ_FN void fill(int thread, u64 seed) {
        if (thread < 20) word[thread] = u32(seed >> (thread & 1) * 32) + (thread / 2) * (thread & 1 ? 0xBB67AE85u : 0x9E3779B9u);
    }
    // Of two rounds; volatile, or the compiler keeps all of them in registers, and spills.
    HQ_FN void load(int pair, u32 (&key)[4]) const {
        const u32 address = u32(__cvta_generic_to_shared(word + 4 * pair));
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(key[0]), "=r"(key[1]), "=r"(key[2]), "=r"(key[3]) : "r"(address));
    }
};

HQ_FN void philox(u32 (&c)[4], const Keys& keys) {
    u32 key[4];
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        if (round % 2 == 0) keys.load(round / 2, key);
        const u64 first = u64(0xD2511F53u) * c[0], second = u64(0xCD9E8D57u) * c[2];
        c[0] = u32(second >> 32) ^ c[1] ^ key[2 * (round & 1)];
        c[2] = u32(first >> 32) ^ c[3] ^ key[2 * (round & 1) + 1];
        c[1] = u32(second);
        c[3] = u32(first);
    }
}

// Draws of a patch along its lines: 16 bits for each of the 8 elements of a line, two in a word, the first one low.
template <int DOWN>
struct Draws {
    const Keys& keys;
    u64 line, piece;
    u32 part;
    // X: rows and columns before it in the matrix that it is a shard of; turned: it is the transposed one.
    HQ_FN Draws(const Keys& keys, bool turned, const i64 (&before)[2], const Place& p)
        : keys(keys), line(Direction<DOWN>::line0(p) + before[DOWN != turned]),
          piece((Direction<DOWN>::along0(p) + before[DOWN == turned]) / 8), part(DOWN != turned) {}
    HQ_FN void of_line(int i, u32 (&words)[4]) const {
        words[0] = u32(piece);
        words[1] = u32(line + i);
        words[2] = u32((line + i) >> 32);
        words[3] = part + 2 * u32(piece >> 32);
        philox(words, keys);
    }
};

}  // namespace hq
