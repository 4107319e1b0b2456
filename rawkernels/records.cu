// Records: rows of a part as messages and back: grid (1 or more, rows, rows again) of tiles of 32 rows x 4096 bytes of codes.
//
// A record is a row's codes with their padding, its scales from the next 16 bytes on, its global scale from the next.
// PACKS: record i is row index[i] of the part. Else row i of the part is record index[i], and zeros where there is none.
// Generated before this text: Scale (u8 or float), PACKS. Scales lie apart by rows, so that a lane takes a row: what a
// warp reads or writes of one block's scales lies together where rows do.
#include "group.cuh"

namespace hq {

struct RecordsArguments {
    char* codes;
    i64 pitch16, rows;      // 16 bytes from row to row; rows of the part, where PACKS, else records
    Scale* scales;
    const i64* starts;      // of each row its first scale, below 0: it is no row of the part; null: row i's is scale i
    const i64* steps;       // and from each of its scales to the next; null: step
    i64 step, blocks;
    float* globals;         // null: there are none
    char* records;
    i64 record16, count;    // 16 bytes of a record; rows or records to write
    const i64* index;       // null: in order
};

constexpr int ROWS = 32, VECTORS = 8, SCALES = 16 / sizeof(Scale);

// Codes of the warp's share of lines, 4 KiB of each: `source` is the lane's own.
HQ_FN void copy_codes(const RecordsArguments& a, i64 first, i64 source) {
    const i64 column = i64(blockIdx.x) * ROWS * VECTORS + threadIdx.x % 32;
    for (int line = threadIdx.x / 32; line < ROWS && first + line < a.count; line += THREADS / 32) {
        const i64 from = __shfl_sync(~0u, source, line), to = first + line;
        const uint4* in = reinterpret_cast<const uint4*>(PACKS ? a.codes : a.records) + from * (PACKS ? a.pitch16 : a.record16);
        uint4* out = reinterpret_cast<uint4*>(PACKS ? a.records : a.codes) + to * (PACKS ? a.record16 : a.pitch16);
        uint4 held[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            held[i] = make_uint4(0, 0, 0, 0);
            if (from >= 0 && column + i * 32 < a.pitch16) held[i] = __ldcs(in + column + i * 32);
        }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (column + i * 32 < a.pitch16) out[column + i * 32] = held[i];
    }
}

// 16 bytes of the scales of the lane's line.
HQ_FN void copy_scales(const RecordsArguments& a, i64 line, i64 source, i64 vector) {
    const i64 row = PACKS ? source : line, record = PACKS ? line : source;
    i64 at = row, step = a.step;
    if (a.starts && row >= 0) { at = a.starts[row]; step = a.steps[row]; }
    union { uint4 vector; Scale each[SCALES]; } held = {make_uint4(0, 0, 0, 0)};
    uint4* place = reinterpret_cast<uint4*>(a.records) + record * a.record16 + a.pitch16 + vector;
    if (!PACKS && record >= 0) held.vector = __ldcs(place);
    if (at >= 0) {
#pragma unroll
        for (int i = 0; i < SCALES; ++i) {
            const i64 block = vector * SCALES + i;
            if (block >= a.blocks) continue;
            Scale* scale = a.scales + at + block * step;
            if (PACKS) held.each[i] = *scale; else *scale = held.each[i];
        }
    }
    if (PACKS) *place = held.vector;
}

}  // namespace hq

extern "C" __global__ void __launch_bounds__(256, 4) hq_records(const __grid_constant__ hq::RecordsArguments a) {
    using namespace hq;
    const i64 first = row_tile() * ROWS, line = first + threadIdx.x % 32;
    if (first >= a.count) return;
    i64 source = -1;
    if (line < a.count) {
        source = a.index ? a.index[line] : line;
        if (source >= a.rows) source = -1;
    }
    copy_codes(a, first, source);
    if (line >= a.count) return;
    const int warps = THREADS / 32, warp = threadIdx.x / 32;
    const i64 vectors = (a.blocks + SCALES - 1) / SCALES;
    for (i64 i = i64(blockIdx.x) * warps + warp; i < vectors; i += i64(gridDim.x) * warps) copy_scales(a, line, source, i);
    if (!a.globals || blockIdx.x || warp) return;
    const i64 at = (PACKS ? line : source) * a.record16 + a.pitch16 + vectors;
    if (PACKS) reinterpret_cast<uint4*>(a.records)[at] = make_uint4(source < 0 ? 0 : bits_of(a.globals[source]), 0, 0, 0);
    else a.globals[line] = source < 0 ? 0.0f : reinterpret_cast<const float*>(a.records)[at * 4];
}
