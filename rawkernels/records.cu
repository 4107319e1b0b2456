// Records: rows of a part as messages and back: grid (1 or more, rows, rows again) of tiles of 32 rows x 1024 bytes of codes.
//
// A record is a row's codes with their padding, its scales from the next 16 bytes on, its global scale from the next.
// PACKS: row i of the part is read once and becomes the records index[i, :copies]. Else it becomes record index[i], and
// zeros where there is none. Generated before this text: Scale (u8 or float), PACKS, VECTORS (of 16 bytes of codes a lane). Scales lie apart by rows, so that a
// lane takes a row: what a warp reads or writes of one block's scales lies together where rows do.
#include "group.cuh"

namespace hq {

struct RecordsArguments {
    char* codes;
    i64 pitch16, rows;      // 16 bytes from row to row of the part
    Scale* scales;
    const i64* starts;      // of each row its first scale, below 0: it is no row of the part; null: row i's is scale i
    const i64* steps;       // and from each of its scales to the next; null: step
    i64 step, blocks;
    float* globals;         // null: there are none
    char* records;
    i64 record16, count;    // 16 bytes of a record; how many there are
    const i64* index;       // (rows, copies); null: in order. From count on: none
    i64 copies;
};

constexpr int LANES = 32, SCALES = 16 / sizeof(Scale);

// The record of a row, or null.
HQ_FN uint4* record_of(const RecordsArguments& a, i64 row, i64 copy) {
    const i64 record = a.index ? a.index[row * a.copies + copy] : row;
    return record < a.count ? reinterpret_cast<uint4*>(a.records) + record * a.record16 : nullptr;
}

// Codes of the warp's share of rows, 1 KiB of each.
HQ_FN void copy_codes(const RecordsArguments& a, i64 first) {
    const i64 column = i64(blockIdx.x) * LANES * VECTORS + threadIdx.x % LANES;
    for (i64 row = first + threadIdx.x / LANES; row < first + LANES && row < a.rows; row += THREADS / LANES) {
        uint4* codes = reinterpret_cast<uint4*>(a.codes) + row * a.pitch16;
        const uint4* source = PACKS ? codes : record_of(a, row, 0);
        uint4 held[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            held[i] = make_uint4(0, 0, 0, 0);
            if (source && column + i * LANES < a.pitch16) held[i] = __ldcs(source + column + i * LANES);
        }
        for (i64 copy = 0; copy < (PACKS ? a.copies : 1); ++copy) {
            uint4* target = PACKS ? record_of(a, row, copy) : codes;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                if (target && column + i * LANES < a.pitch16) target[column + i * LANES] = held[i];
        }
    }
}

// 16 bytes of the scales of the lane's row.
HQ_FN void copy_scales(const RecordsArguments& a, i64 row, i64 at, i64 step, i64 vector) {
    union { uint4 vector; Scale each[SCALES]; } held = {make_uint4(0, 0, 0, 0)};
    if (!PACKS) {
        const uint4* record = record_of(a, row, 0);
        if (record) held.vector = __ldcs(record + a.pitch16 + vector);
    }
    if (at >= 0) {
#pragma unroll
        for (int i = 0; i < SCALES; ++i) {
            const i64 block = vector * SCALES + i;
            if (block >= a.blocks) continue;
            Scale* scale = a.scales + at + block * step;
            if (PACKS) held.each[i] = *scale; else *scale = held.each[i];
        }
    }
    for (i64 copy = 0; copy < (PACKS ? a.copies : 0); ++copy) {
        uint4* record = record_of(a, row, copy);
        if (record) record[a.pitch16 + vector] = held.vector;
    }
}

// The global scale of the lane's row, which lies behind so many vectors of scales.
HQ_FN void copy_global(const RecordsArguments& a, i64 row, i64 vectors) {
    if (!PACKS) {
        const uint4* record = record_of(a, row, 0);
        a.globals[row] = record ? float_of(record[a.pitch16 + vectors].x) : 0.0f;
    }
    for (i64 copy = 0; copy < (PACKS ? a.copies : 0); ++copy) {
        uint4* record = record_of(a, row, copy);
        if (record) record[a.pitch16 + vectors] = make_uint4(bits_of(a.globals[row]), 0, 0, 0);
    }
}

}  // namespace hq

extern "C" __global__ void __launch_bounds__(256, hq::PACKS ? 4 : 3) hq_records(const __grid_constant__ hq::RecordsArguments a) {
    using namespace hq;
    const i64 first = row_tile() * LANES, row = first + threadIdx.x % LANES;
    copy_codes(a, first);
    if (row >= a.rows) return;
    i64 at = row, step = a.step;
    if (a.starts) { at = a.starts[row]; step = a.steps[row]; }
    const int warps = THREADS / LANES, warp = threadIdx.x / LANES;
    const i64 vectors = (a.blocks + SCALES - 1) / SCALES;
    for (i64 i = i64(blockIdx.x) * warps + warp; i < vectors; i += i64(gridDim.x) * warps) copy_scales(a, row, at, step, i);
    if (a.globals && !blockIdx.x && !warp) copy_global(a, row, vectors);
}
