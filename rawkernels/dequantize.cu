// Dequantize: grid and tiles as quantize, over the values Y = X or X.T that a part decodes to.
//
// TRANSPOSED 0: Y's rows are the part's lines. 1: the part is columnwise; its lines, Y's columns, come in pieces of
// LINE_BYTES through shared memory. Every value is RN(code * scale), under a global scale RN(that * global_scale), where
// rht rotated back, then one rounding to Output; NaN is the hardware's canonical one. Generated before this text: Part
// (storage traits), Output, Input = Output, TRANSPOSED, ALIGNED (Y's rows start on 16 bytes), TILE_ROWS, TILE_COLUMNS,
// GROUPED.
//
// GROUPED: the rows of many matrices, stacked; a block finds its member. Generated as well: Codes, Scales and, where
// lines have global scales of their own, GlobalScales (Spans).
#include "encode.cuh"
#include "group.cuh"
#include "rotate.cuh"

namespace hq {

struct DequantizeArguments {
    const u8* codes;
    i64 pitch;
    const u8* scales;
    i64 scale_pitch;
    const float* global_scale;
    char* values;
    i64 row_bytes, m, k;  // of Y
};

struct GroupedDequantizeArguments {
    DequantizeArguments all;
    Groups groups;
    i64 codes_unit, scales_unit;
};

constexpr int LINE_BYTES = Part::stored_bits * TILE_ROWS / 8;
constexpr int WORDS = Part::stored_bits / 4;  // of 8 codes
constexpr int PIECE = WORDS < 4 ? WORDS : 4;  // words in one access

// Two codes, each in the upper byte of a half, as two float16: sign, exponent and mantissa move to the top, times
// 2^(15 - BIAS), which is exact, subnormals included.
template <class E>
HQ_FN u32 widen_pair(u32 upper) {
    constexpr u32 magnitude = E::ones << 8;
    constexpr int left = 2 - E::mantissa_bits;
    const u32 moved = left < 0 ? (upper & magnitude * 0x10001u) >> -left : (upper & magnitude * 0x10001u) << (left < 0 ? 0 : left);
    u32 pair = moved | ((upper << (8 - E::bits)) & 0x80008000u);
    constexpr u32 factor = u32(15 + 15 - E::bias) << 10;
    if (E::bias != 15) asm("mul.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(factor * 0x10001u));
    return pair;
}

// 8 codes of a line, decoded; value(i) is the i-th, exactly.
template <class P>
struct DecodedLine {
    u32 word[P::bits >= 16 ? WORDS : 4];

    HQ_FN explicit DecodedLine(const u32* codes) {
        typedef typename P::Element E;
        if constexpr (P::bits >= 16) {
#pragma unroll
            for (int w = 0; w < WORDS; ++w) word[w] = codes[w];
        } else if constexpr (P::bits == 4) {  // upper bytes of the even and of the odd numbers' float16
            const u32 even = (codes[0] & 0x07070707u) << 1 | (codes[0] & 0x08080808u) << 4;
            const u32 odd = (codes[0] >> 3 & 0x0E0E0E0Eu) | (codes[0] & 0x80808080u);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 pair = permute(even, odd, 0x4400u + 0x1111u * j) & 0xFF00FF00u;
                constexpr u32 factor = u32(15 + 15 - E::bias) << 10;
                asm("mul.f16x2 %0, %1, %2;" : "=r"(word[j]) : "r"(pair), "r"(factor * 0x10001u));
            }
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#if HQ_HAS_FP8_CVT
                if constexpr (P::hardware_fp8 && E::mantissa_bits == 3) {
                    const u16 two = u16(codes[j / 2] >> (16 * (j & 1)));
                    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word[j]) : "h"(two));
                    continue;
                }
#endif
                word[j] = widen_pair<E>(permute(codes[j / 2], 0, j & 1 ? 0x3424 : 0x1404));
                if constexpr (E::has_nan && E::bits - E::mantissa_bits < 6) {  // the top exponent is not float16's
                    const u32 two = codes[j / 2] >> (16 * (j & 1));
                    const u32 low = two & E::ones, high = two >> 8 & E::ones;
                    constexpr u32 inf = E::max_code + 1 < E::nan_code ? E::max_code + 1 : ~0u;  // none beside NAN_ONLY
                    if (low > E::max_code) word[j] = (word[j] & (low == inf ? 0xFFFF8000u : 0xFFFF0000u)) | (low == inf ? 0x7C00u : 0x7FFFu);
                    if (high > E::max_code) word[j] = (word[j] & (high == inf ? 0x8000FFFFu : 0x0000FFFFu)) | (high == inf ? 0x7C000000u : 0x7FFF0000u);
                }
            }
        }
    }
    HQ_FN float value(int i) const {
        if constexpr (P::bits == 32) return float_of(word[i]);
        else if constexpr (P::bits == 16) return i & 1 ? P::Wide::high(word[i / 2]) : P::Wide::low(word[i / 2]);
        else return i & 1 ? Float16::high(word[i / 2]) : Float16::low(word[i / 2]);
    }
};

// The scales of 8 lines that start at `line`, for elements from `along` on.
template <class P>
HQ_FN void load_scales(const DequantizeArguments& a, i64 line, i64 along, float (&scale)[8]) {
    if constexpr (P::scale == FLOAT32) {
        const float* scales = reinterpret_cast<const float*>(a.scales);
        if constexpr (!P::one_scale && P::scale_rows == 1) {  // (blocks, lines), pitch a multiple of 4: two halves
            const float* source = scales + along / P::scale_columns * a.scale_pitch + line;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float4 four = line + 4 * h < a.scale_pitch ? __ldg(reinterpret_cast<const float4*>(source) + h) : float4{};
                scale[4 * h] = four.x; scale[4 * h + 1] = four.y; scale[4 * h + 2] = four.z; scale[4 * h + 3] = four.w;
            }
        } else {
            const float one = __ldg(P::one_scale ? scales : scales + line / P::scale_rows * a.scale_pitch + along / P::scale_columns);
#pragma unroll
            for (int i = 0; i < 8; ++i) scale[i] = one;
        }
    } else if constexpr (P::scale != NO_SCALE) {
        const uint2 bytes = __ldg(reinterpret_cast<const uint2*>(a.scales + along / P::scale_columns * a.scale_pitch + line));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 byte = (i < 4 ? bytes.x : bytes.y) >> (8 * (i & 3)) & 255;
            scale[i] = P::scale == E8M0 ? float_of(decode_e8m0(byte)) : float_of_e4m3(byte);
        }
    }
}

// Global scales of 8 lines that start at `line` of so many: one a line, or the whole matrix's.
template <class P>
struct GlobalScale {
    float value[P::global_per_row ? 8 : 1];

    HQ_FN GlobalScale(const float* stored, i64 line, i64 lines) {
        if constexpr (!P::global_per_row) {
            value[0] = P::global_scale ? *stored : 1.0f;
        } else if constexpr (GROUPED) {  // a member's begin anywhere
#pragma unroll
            for (int i = 0; i < 8; ++i) value[i] = line + i < lines ? __ldg(stored + line + i) : 0.0f;
        } else {  // there is room up to a multiple of 4
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float4 four = line + 4 * h < lines ? __ldg(reinterpret_cast<const float4*>(stored + line) + h) : float4{};
                value[4 * h] = four.x; value[4 * h + 1] = four.y; value[4 * h + 2] = four.z; value[4 * h + 3] = four.w;
            }
        }
    }
    HQ_FN float of(int line) const { return value[P::global_per_row ? line : 0]; }
};

// A product's NaN is canonical; an unscaled value is multiplied by one for that alone.
template <class P>
HQ_FN float scaled(float value, float scale, float global_scale) {
    if constexpr (P::scale == NO_SCALE) {
        asm("mul.f32 %0, %0, 0f3F800000;" : "+f"(value));
        return value;
    }
    value *= scale;
    if constexpr (P::global_scale) value *= global_scale;
    return value;
}

HQ_FN void load_codes(const u8* source, u32* words) {
    if constexpr (PIECE == 1) words[0] = *reinterpret_cast<const u32*>(source);
    if constexpr (PIECE == 2) *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(source);
    if constexpr (PIECE == 4) *reinterpret_cast<uint4*>(words) = *reinterpret_cast<const uint4*>(source);
}

HQ_FN void store_values(char* target, const u32* words, int columns) {
    if (ALIGNED && columns >= 8) {
#pragma unroll
        for (int v = 0; v < Output::size / 2; ++v)
            reinterpret_cast<uint4*>(target)[v] = make_uint4(words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]);
    } else {
#pragma unroll
        for (int c = 0; c < 8; ++c)
            if (c < columns) reinterpret_cast<Output::type*>(target)[c] = Output::type(words[c * Output::size / 4] >> (c * Output::size * 8 % 32));
    }
}

// Bytes low to high of 16, at an address on 16, in as few pieces as their alignment allows.
HQ_FN void store_bytes(char* target, const u32 (&words)[4], int low, int high) {
    const auto holds = [&](int from, int size) { return low <= from && from + size <= high; };
    if (holds(0, 16)) {
        *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
        return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (holds(8 * h, 8)) {
            *reinterpret_cast<uint2*>(target + 8 * h) = make_uint2(words[2 * h], words[2 * h + 1]);
            continue;
        }
#pragma unroll
        for (int w = 2 * h; w < 2 * h + 2; ++w) {
            if (holds(4 * w, 4)) *reinterpret_cast<u32*>(target + 4 * w) = words[w];
            else if (Output::size == 2) {
                if (holds(4 * w, 2)) *reinterpret_cast<u16*>(target + 4 * w) = u16(words[w]);
                if (holds(4 * w + 2, 2)) *reinterpret_cast<u16*>(target + 4 * w + 2) = u16(words[w] >> 16);
            }
        }
    }
}

// Values of a row that starts on any element: 16 bytes on 16, the end of the neighbour's with the start of one's own.
// For whole warps, even where nothing is stored. columns: how many of the row's elements exist from this lane's on,
// counted up to 16.
HQ_FN void store_shifted(char* target, const u32* words, int lane, int columns, bool stored) {
    constexpr int vectors = Output::size / 2;
    const int shift = int(reinterpret_cast<u64>(target) & 15), end = shift + (columns < 8 ? columns : 8) * Output::size;
    const bool follows = lane + 1 < LANES_ACROSS && columns > 8;  // the neighbour stores what both share
#pragma unroll
    for (int v = 0; v <= vectors; ++v) {
        u32 all[8], four[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            all[w] = v ? words[4 * v - 4 + w] : __shfl_up_sync(~0u, words[4 * vectors - 4 + w], 1);
            all[4 + w] = v < vectors ? words[4 * v + w] : 0;
        }
        const int low = v == 0 && lane == 0 ? shift : 0, high = end - 16 * v < 16 ? end - 16 * v : 16;
        if (!stored || columns <= 0 || high <= low || (v == vectors && follows)) continue;
        if (shift) slice<Output::size>(all, 16 - shift, four);
#pragma unroll
        for (int w = 0; w < 4; ++w) four[w] = shift ? four[w] : words[v < vectors ? 4 * v + w : 0];
        store_bytes(target + 16 * v - shift, four, low, high);
    }
}

// 8 float32: two neighbours exchange halves, so that one store of theirs fills a sector of 32 bytes. For whole warps.
HQ_FN void store_exchanged(char* target, const u32* words) {
    const bool odd = threadIdx.x & 1;
    u32 first[4], second[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const u32 other = __shfl_xor_sync(~0u, odd ? words[w] : words[4 + w], 1);
        first[w] = odd ? other : words[w];
        second[w] = odd ? words[4 + w] : other;
    }
    uint4* vectors = reinterpret_cast<uint4*>(target) - (odd ? 1 : 0);
    vectors[0] = make_uint4(first[0], first[1], first[2], first[3]);
    vectors[2] = make_uint4(second[0], second[1], second[2], second[3]);
}

HQ_FN void store_row(char* target, const u32* words, const Place& p, int columns, bool stored) {
    if (!ALIGNED) store_shifted(target, words, p.tx, columns, stored);
    else if (Output::size == 4 && p.full) store_exchanged(target, words);
    else if (stored) store_values(target, words, columns);
}

// Two neighbours of a row of Y to its words.
template <class Out>
HQ_FN void put_pair(u32* words, int pair, float low, float high) {
    if constexpr (Out::size == 4) {
        words[2 * pair] = bits_of(low);
        words[2 * pair + 1] = bits_of(high);
    } else words[pair] = narrow_pair<Out>(low, high);
}

#if GROUPED
// find_member, and behind the spans given that of its lines' global scales, where they have some.
template <class P, int ROWS, int SPANS, class... Spans>
HQ_FN void find_lines(const Groups& g, i64 tile, Member<SPANS>& found, Spans... span) {
    if constexpr (P::global_per_row) find_member<ROWS>(g, tile, found, span..., GlobalScales{});
    else find_member<ROWS>(g, tile, found, span...);
}
#endif

}  // namespace hq

#ifndef HQ_NO_ENTRY  // decode.cu has its own
namespace hq {

// One tile of a matrix.
HQ_FN void dequantize_tile(const DequantizeArguments& a, const Place& p, u8* stage) {
    typedef Direction<TRANSPOSED> D;
    const int rows = count_of(a.m, p.row0, 8), columns = count_of(a.k, p.column0, 16);
    const bool exists = rows > 0 && columns > 0;
    char* target = a.values + p.row0 * a.row_bytes + p.column0 * Output::size;
    alignas(16) u32 codes[8][WORDS];
    float scale[8];
    // A ragged end of fewer than 16 is not rotated. Before any lane leaves:
    const bool upper = D::lane(p) & 1, rotated = Part::rht && (D::along0(p) & ~i64(15)) + 16 <= D::length(a);
    const u32 rotating = Part::rht ? __ballot_sync(~0u, rotated) : 0;

    if constexpr (TRANSPOSED) {
        constexpr int chunks = LINE_BYTES / 16, step = THREADS / chunks, pieces = TILE_COLUMNS / step;
        const i64 lines = (GROUPED ? a.k : round_up(a.k, 16)) - p.tile_column * TILE_COLUMNS;
        const int line = threadIdx.x / chunks, byte = threadIdx.x % chunks * 16;
        const u8* source = a.codes + (p.tile_column * TILE_COLUMNS + line) * a.pitch + p.tile_row * LINE_BYTES + byte;
        const int stored = p.tile_row * LINE_BYTES + byte < a.pitch ? count_of(lines, 0, TILE_COLUMNS) - line : 0;
        uint4 piece[pieces];  // without branches, so that all loads are under way before the first is waited for
#pragma unroll
        for (int n = 0; n < pieces; ++n)
            piece[n] = __ldg(reinterpret_cast<const uint4*>(n * step < stored ? source + n * step * a.pitch : a.codes));
        load_scales<Part>(a, exists ? D::line0(p) : 0, exists ? D::along0(p) : 0, scale);
        const GlobalScale<Part> global_scale(a.global_scale, D::line0(p), D::lines(a));
#pragma unroll
        for (int n = 0; n < pieces; ++n)
            *reinterpret_cast<uint4*>(stage + staged(line + n * step, byte, LINE_BYTES)) = piece[n];
        __syncthreads();
        u32 words[8][Output::size * 2];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int w = 0; w < WORDS; w += PIECE)
                    load_codes(stage + staged(p.column + 2 * pair + h, p.row * LINE_BYTES / TILE_ROWS + 4 * w, LINE_BYTES), codes[h] + w);
            const DecodedLine<Part> low(codes[0]), high(codes[1]);
            const auto value = [&](const DecodedLine<Part>& line, int h, int r) {
                return scaled<Part>(line.value(r), scale[2 * pair + h], global_scale.of(2 * pair + h));
            };
            if constexpr (Part::rht) {
                float turned[2][8];
#pragma unroll
                for (int r = 0; r < 8; ++r) {
                    turned[0][r] = value(low, 0, r);
                    turned[1][r] = value(high, 1, r);
                }
                if (rotated)
#pragma unroll
                    for (int h = 0; h < 2; ++h) rotate_back<D::step>(turned[h], Part::signs, upper, rotating);
#pragma unroll
                for (int r = 0; r < 8; ++r) put_pair<Output>(words[r], pair, turned[0][r], turned[1][r]);
            } else {
#pragma unroll
                for (int r = 0; r < 8; ++r) put_pair<Output>(words[r], pair, value(low, 0, r), value(high, 1, r));
            }
        }
#pragma unroll
        for (int r = 0; r < 8; ++r)
            store_row(target + r * a.row_bytes, words[r], p, columns, r < rows);
    } else {
        if (ALIGNED && !exists) return;
        const u8* source = a.codes + p.row0 * a.pitch + p.column0 * WORDS / 2;
#pragma unroll
        for (int r = 0; r < 8; ++r) {  // rows up to a multiple of 16 are there
#pragma unroll
            for (int w = 0; w < WORDS; w += PIECE)
                if ((GROUPED ? r < rows && columns > 0 : ALIGNED || exists) && (WORDS < 8 || p.column0 * 4 + 4 * w < a.pitch)) load_codes(source + r * a.pitch + 4 * w, codes[r] + w);
        }
        if (ALIGNED || exists) load_scales<Part>(a, D::line0(p), D::along0(p), scale);
        const GlobalScale<Part> global_scale(a.global_scale, D::line0(p), D::lines(a));
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const DecodedLine<Part> line(codes[r]);
            u32 words[Output::size * 2];
            float value[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) value[c] = scaled<Part>(line.value(c), scale[r], global_scale.of(r));
            if (Part::rht && rotated) rotate_back<D::step>(value, Part::signs, upper, rotating);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) put_pair<Output>(words, pair, value[2 * pair], value[2 * pair + 1]);
            store_row(target + r * a.row_bytes, words, p, columns, r < rows);
        }
    }
}

#if GROUPED
constexpr int SPANS = Part::global_per_row ? 3 : 2;

// A member's matrix.
HQ_FN DequantizeArguments arguments_of(const GroupedDequantizeArguments& g, const Member<SPANS>& member) {
    DequantizeArguments own = g.all;
    own.values += member.start * own.row_bytes;
    own.m = member.size;
    own.global_scale += Part::global_per_row ? member.before[2] * (TRANSPOSED ? own.k : 1) : member.index;
    constexpr bool block_major = !Part::one_scale && Part::scale_rows == 1, row_major = !Part::one_scale && !block_major;
    if constexpr (TRANSPOSED) {  // lines of a pitch of their own
        own.codes += member.before[0] * g.codes_unit;
        own.pitch = round_up(round_up(member.size * Part::stored_bits, 8) / 8, 16);
    } else {
        own.codes += member.start * own.pitch;
    }
    own.scales += Part::one_scale ? member.index * 4 : member.before[1] * g.scales_unit;
    if (TRANSPOSED ? row_major : block_major) own.scale_pitch = Scales::of(member.size);
    return own;
}

// Rows that are no member's.
HQ_FN void zero_rows(const DequantizeArguments& a, i64 from, i64 to) {
    typedef Output::type T;
    T* row = reinterpret_cast<T*>(a.values + from * a.row_bytes) + i64(blockIdx.x) * TILE_COLUMNS;
    const i64 columns = count_of(a.k, i64(blockIdx.x) * TILE_COLUMNS, TILE_COLUMNS);
    for (i64 r = from; r < to; ++r, row += a.row_bytes / Output::size)
        for (i64 c = threadIdx.x; c < columns; c += THREADS) row[c] = 0;
}
#endif

}  // namespace hq

#if GROUPED
extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_dequantize(const __grid_constant__ hq::GroupedDequantizeArguments g) {
    using namespace hq;
    extern __shared__ __align__(16) u8 stage[];
    __shared__ Member<SPANS> member;
    __shared__ DequantizeArguments own;
    if (threadIdx.x < 32) {
        find_lines<Part, TILE_ROWS>(g.groups, row_tile(), member, Codes{}, Scales{});
        if (threadIdx.x == 0 && member.index >= 0) own = arguments_of(g, member);
    }
    __syncthreads();
    if (member.index < 0) {
        const i64 shares = row_tiles() - member.tiles, each = (member.rows + shares - 1) / shares;
        const i64 from = member.start + member.tile * each, end = member.start + member.rows;
        return zero_rows(g.all, from, from + each < end ? from + each : end);
    }
    Place p;
    place(p, member.tile, blockIdx.x, own.m, own.k);
    if (p.tile_row * TILE_ROWS < own.m) dequantize_tile(own, p, stage);
    const i64 first = p.tile_row * TILE_ROWS, last = first + TILE_ROWS;
    zero_rows(own, own.m > first ? own.m : first, last < member.rows ? last : member.rows);
}
#else
extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_dequantize(const __grid_constant__ hq::DequantizeArguments a) {
    using namespace hq;
    extern __shared__ __align__(16) u8 stage[];
    Place p;
    if (locate(p, a.m, a.k, false)) dequantize_tile(a, p, stage);
}
#endif
#endif
