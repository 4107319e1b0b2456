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
    // Of two rounds; volatile for both compilers, or one keeps all of them in registers, and spills.
    HQ_FN void load(int pair, u32 (&key)[4]) const {
        const u32 address = u32(__cvta_generic_to_shared(word + 4 * pair));
        asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(key[0]), "=r"(key[1]), "=r"(key[2]), "=r"(key[3]) : "r"(address));
    }
};

// Philox of counters that differ in their second word alone: their first three rounds have 4 of 20 products in common.
struct Rounds {
    static constexpr u32 M0 = 0xD2511F53u, M1 = 0xCD9E8D57u;
    u32 first, second, third[3];  // what those rounds need besides

    HQ_FN Rounds(const Keys& keys, u32 c0, u32 c2, u32 c3) {
        u32 key[4];
        keys.load(0, key);
        const u64 a = u64(M0) * c0, b = u64(M1) * c2;
        first = u32(b >> 32) ^ key[0];
        second = u32(a) ^ key[3];
        const u64 c = u64(M1) * (u32(a >> 32) ^ c3 ^ key[1]);
        const u64 d = u64(M0) * (u32(c >> 32) ^ u32(b) ^ key[2]);
        keys.load(1, key);
        third[0] = u32(c) ^ key[0];
        third[1] = u32(d >> 32) ^ key[1];
        third[2] = u32(d);
    }
    HQ_FN void words(const Keys& keys, u32 c1, u32 (&c)[4]) const {
        const u64 a = u64(M0) * (first ^ c1), b = u64(M1) * (u32(a >> 32) ^ second);
        c[0] = u32(b >> 32) ^ third[0];
        c[1] = u32(b);
        c[2] = u32(a) ^ third[1];
        c[3] = third[2];
        u32 key[4];
        keys.load(1, key);
#pragma unroll
        for (int round = 3; round < 10; ++round) {
            if (round % 2 == 0) keys.load(round / 2, key);
            const u64 one = u64(M0) * c[0], other = u64(M1) * c[2];
            c[0] = u32(other >> 32) ^ c[1] ^ key[2 * (round & 1)];
            c[2] = u32(one >> 32) ^ c[3] ^ key[2 * (round & 1) + 1];
            c[1] = u32(other);
            c[3] = u32(one);
        }
    }
};

// Where the draws of a patch are: 2 words a line, and a call for each pair of lines of the whole matrix.
template <int DOWN>
struct Draws {
    const Keys& keys;
    u64 pair, piece;  // of the first line
    u32 part;
    bool odd;         // it is the second one of its pair
    // before: rows and columns before X in the matrix that it is a shard of; turned: that is the transposed one.
    HQ_FN Draws(const Keys& keys, bool turned, const i64 (&before)[2], const Place& p)
        : keys(keys), pair(u64(Direction<DOWN>::line0(p) + before[DOWN != turned]) / 2),
          piece(u64(Direction<DOWN>::along0(p) + before[DOWN == turned]) / 8), part(DOWN != turned),
          odd(before[DOWN != turned] & 1) {}  // line0 is a multiple of 8
    HQ_FN Rounds rounds(u64 pair) const { return {keys, u32(piece), u32(pair >> 32), part + 2 * u32(piece >> 32)}; }
    // Whether the 8 lines are 4 pairs whose counters differ in one word; always, but for some shards.
    HQ_FN bool aligned() const { return !odd && u32(pair) <= 0xFFFFFFFCu; }
};

// Words of lines 2i and 2i + 1 of the patch, asked for in order: where they are aligned,
template <int DOWN>
struct AlignedPairs {
    const Draws<DOWN>& draws;
    const Rounds rounds;
    HQ_FN explicit AlignedPairs(const Draws<DOWN>& draws) : draws(draws), rounds(draws.rounds(draws.pair)) {}
    HQ_FN void words(int i, u32 (&w)[4]) { rounds.words(draws.keys, u32(draws.pair) + i, w); }
};

// and anywhere: 8 lines from an odd one have halves of five calls.
template <int DOWN>
struct AnyPairs {
    const Draws<DOWN>& draws;
    u32 held[2];  // of the next line, by the call before
    HQ_FN explicit AnyPairs(const Draws<DOWN>& draws) : draws(draws) {}
    HQ_FN void words(int i, u32 (&w)[4]) {
        call(i == 0 ? 0 : i + draws.odd, w);
        if (!draws.odd) return;
        if (i == 0) {
            held[0] = w[2]; held[1] = w[3];
            call(1, w);
        }
        const u32 next[2] = {w[2], w[3]};
        w[2] = w[0]; w[3] = w[1]; w[0] = held[0]; w[1] = held[1];
        held[0] = next[0]; held[1] = next[1];
    }

  private:
    HQ_FN void call(int i, u32 (&w)[4]) const {
        const u64 pair = draws.pair + i;
        draws.rounds(pair).words(draws.keys, u32(pair), w);
    }
};

// Of formats that do not draw.
template <int DOWN>
struct NoPairs {
    HQ_FN explicit NoPairs(const Draws<DOWN>&) {}
    HQ_FN void words(int, u32 (&)[4]) const {}
};

}  // namespace hq
