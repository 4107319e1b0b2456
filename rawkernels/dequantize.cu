// Dequantize: grid and tiles as quantize, over the values Y = X or X.T that a part decodes to.
//
// TRANSPOSED 0: Y's rows are the part's rows. 1: the part is columnwise; its lines, Y's columns, come in 128-byte pieces
// through shared memory. Every value is RN(code * scale), under a global scale RN(that * global_scale), then one
// rounding to Output; NaN is the canonical one. Generated before: Part (storage traits), Output, Input = Output,
// TRANSPOSED, ALIGNED (Y's rows start on 16 bytes), TILE_ROWS, TILE_COLUMNS.
#include "encode.cuh"
#include "tile.cuh"

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

constexpr int LINE_BYTES = Part::stored_bits * TILE_ROWS / 8;

// 8 codes to floats. An element's exponent and mantissa, put at the top of a float16's, are its value times
// 2^(BIAS - 15), subnormals included.
template <class P>
HQ_FN void decode_codes(const u32* words, float (&value)[8]) {
    typedef typename P::Element E;
    if constexpr (P::bits >= 16) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if constexpr (P::Wide::size == 4) value[i] = float_of(words[i]);
            else value[i] = i & 1 ? P::Wide::high(words[i / 2]) : P::Wide::low(words[i / 2]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 code = P::stored_bits == 4 ? words[0] >> (4 * i) & 15 : words[i / 4] >> (8 * (i & 3)) & 255;
            const u32 magnitude = code & E::ones, sign = code >> (E::bits - 1);
            const u16 half = u16(sign << 15 | magnitude << (10 - E::mantissa_bits));
            value[i] = Float16::widen(half) * float_of(u32(127 + 15 - E::bias) << 23);
            if (E::has_nan && magnitude == E::nan_code) value[i] = float_of(NAN_BITS);
        }
    }
}

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
            scale[i] = float_of(P::scale == E8M0 ? decode_e8m0(byte) : E4M3::decode(byte));
        }
    }
}

template <class P>
HQ_FN float scaled(float value, float scale, float global_scale) {
    if constexpr (P::scale != NO_SCALE) value *= scale;
    if constexpr (P::global_scale) value *= global_scale;
    return value;
}

template <int WORDS>
HQ_FN void load_words(const u8* source, u32* words) {
    if constexpr (WORDS == 1) words[0] = *reinterpret_cast<const u32*>(source);
    else if constexpr (WORDS == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(source);
        words[0] = two.x; words[1] = two.y;
    } else {
#pragma unroll
        for (int v = 0; v < WORDS / 4; ++v) {
            const uint4 four = reinterpret_cast<const uint4*>(source)[v];
            words[4 * v] = four.x; words[4 * v + 1] = four.y; words[4 * v + 2] = four.z; words[4 * v + 3] = four.w;
        }
    }
}

HQ_FN void store_row(char* target, const float (&value)[8], int columns) {
    u32 words[Output::size * 2];
    narrow<Output>(value, words);
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

}  // namespace hq

extern "C" __global__ void __launch_bounds__(hq::THREADS, MIN_BLOCKS) hq_dequantize(const __grid_constant__ hq::DequantizeArguments a) {
    using namespace hq;
    extern __shared__ __align__(16) u8 stage[];
    constexpr int words = Part::stored_bits / 4;
    typedef Direction<TRANSPOSED> D;
    Place p;
    if (!locate(p, a.m, false)) return;
    const float global_scale = Part::global_scale ? *a.global_scale : 1.0f;
    const int rows = count_of(a.m, p.row0, 8), columns = count_of(a.k, p.column0, 8);
    char* target = a.values + p.row0 * a.row_bytes + p.column0 * Output::size;

    if constexpr (TRANSPOSED) {
        constexpr int chunks = LINE_BYTES / 16;
        const i64 first = p.tile_row * LINE_BYTES, lines = round_up(a.k, 16) - p.tile_column * TILE_COLUMNS;
        const u8* source = a.codes + p.tile_column * TILE_COLUMNS * a.pitch + first;
#pragma unroll
        for (int n = 0; n < TILE_COLUMNS * chunks / THREADS; ++n) {
            const int index = n * THREADS + threadIdx.x, line = index / chunks, byte = index % chunks * 16;
            if (line < lines && first + byte < a.pitch)
                *reinterpret_cast<uint4*>(stage + staged(line, byte, LINE_BYTES)) = __ldg(reinterpret_cast<const uint4*>(source + line * a.pitch + byte));
        }
        __syncthreads();
    }
    if (rows <= 0 || columns <= 0) return;
    float scale[8];
    load_scales<Part>(a, D::line0(p), D::along0(p), scale);
    if constexpr (TRANSPOSED) {
        float value[8][8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            u32 w[words];
            load_words<words>(stage + staged(p.column + c, p.row * LINE_BYTES / TILE_ROWS, LINE_BYTES), w);
            float line[8];
            decode_codes<Part>(w, line);
#pragma unroll
            for (int r = 0; r < 8; ++r) value[r][c] = scaled<Part>(line[r], scale[c], global_scale);
        }
#pragma unroll
        for (int r = 0; r < 8; ++r)
            if (r < rows) store_row(target + r * a.row_bytes, value[r], columns);
    } else {
        const u8* source = a.codes + p.row0 * a.pitch + p.column0 * (words * 4) / 8;
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            if (r >= rows) break;
            u32 w[words];
            load_words<words>(source + r * a.pitch, w);
            float value[8];
            decode_codes<Part>(w, value);
#pragma unroll
            for (int c = 0; c < 8; ++c) value[c] = scaled<Part>(value[c], scale[r], global_scale);
            store_row(target + r * a.row_bytes, value, columns);
        }
    }
}
