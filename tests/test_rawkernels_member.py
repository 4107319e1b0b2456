"""member.cuh, compiled for the host with a warp of 32 fibers, against the words of groups.py."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from hqarray.grouped_parts import clamp
from hqarray.groups import SIZE_KINDS, Span, span_starts
from hqarray.rawkernels import loader

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

ROWS = 128
SPANS = (Span(1, 16), Span(2, 16), Span(128, 4))
KNOWN = ", ".join(f"Span<{span.divide}, {span.multiple}>{{}}" for span in SPANS)
ANY = ", ".join(f"AnySpan{{{span.divide}, {span.multiple}}}" for span in SPANS)

WARP = """
#include <ucontext.h>
// 32 lanes in turns: each collective writes its lane's word and lets the others run before it reads.
struct { int x; } threadIdx;
static ucontext_t lanes[32], home;
static unsigned long long words[2][32];
static int turns[32];
static const unsigned long long* all(unsigned long long word) {
    const int lane = threadIdx.x, half = turns[lane]++ & 1;
    words[half][lane] = word;
    threadIdx.x = (lane + 1) % 32;
    swapcontext(&lanes[lane], &lanes[threadIdx.x]);
    threadIdx.x = lane;
    return words[half];
}
template <class T> static T __shfl_sync(unsigned, T value, int from) { return T(all(value)[from]); }
template <class T> static T __shfl_up_sync(unsigned, T value, int step) {
    const int lane = threadIdx.x, from = lane >= step ? lane - step : lane;
    return T(all(value)[from]);
}
static unsigned __ballot_sync(unsigned, bool value) {
    const auto* w = all(value);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(w[i]) << i;
    return bits;
}
static unsigned __reduce_add_sync(unsigned, unsigned value) {
    const auto* w = all(value);
    unsigned sum = 0;
    for (int i = 0; i < 32; ++i) sum += unsigned(w[i]);
    return sum;
}
static void __syncwarp() { all(0); }
static int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
#include "member.cuh"
using namespace hq;
static const Groups* groups;
static long long first, last;
static Member<3>* found;
static void lane_of() {
    for (long long tile = first; tile < last; ++tile) find_member<ROWS>(*groups, tile, found[tile - first], SPANS);
    all(0);
    if (threadIdx.x == 31) setcontext(&home);
    const int next = threadIdx.x + 1;
    threadIdx.x = next;
    setcontext(&lanes[next]);
}
extern "C" void find(const Groups* g, long long from, long long to, Member<3>* out) {
    static char stacks[32][1 << 15];
    groups = g; first = from; last = to; found = out;
    for (int i = 0; i < 32; ++i) {
        turns[i] = 0;
        getcontext(&lanes[i]);
        lanes[i].uc_stack.ss_sp = stacks[i];
        lanes[i].uc_stack.ss_size = sizeof stacks[i];
        lanes[i].uc_link = nullptr;
        makecontext(&lanes[i], lane_of, 0);
    }
    threadIdx.x = 0;
    swapcontext(&home, &lanes[0]);
}
"""


@pytest.fixture(scope="module", params=[KNOWN, ANY], ids=["spans as types", "spans as numbers"])
def warp(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("member")
    (folder / "shim.cpp").write_text(WARP.replace("ROWS", str(ROWS)).replace("SPANS", request.param))
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{loader.SOURCES}", "shim.cpp", "-o", "shim.so"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(folder / "shim.so"))


def find(warp, stored, kind, each, capacity, alignment, tiles):
    """What the warp finds for each tile: rows of (index, start, size, rows, tile, tiles, before...)."""
    count = len(stored)
    numbers = np.asarray(stored, np.int64 if kind == "int64" else np.int32)
    groups = np.array([numbers.ctypes.data, SIZE_KINDS.index(kind), count, each, capacity, alignment], np.int64)
    out = np.full((tiles, 6 + len(SPANS) + 1), -99, np.int64)
    warp.find(ctypes.c_void_p(groups.ctypes.data), ctypes.c_longlong(0), ctypes.c_longlong(tiles),
              ctypes.c_void_p(out.ctypes.data))
    return out[:, : 6 + len(SPANS)]


def expected(sizes, capacity, alignment, tiles):
    """The same, by the sizes as they are meant."""
    sizes = np.asarray(sizes, np.int64)
    aligned = np.minimum(span_starts(Span(1, alignment), np.clip(sizes, 0, capacity)), capacity)
    own = clamp(sizes, capacity, alignment)
    rows = np.diff(aligned)
    counts = -(-rows // ROWS)
    ends = np.cumsum(counts)
    before = [span_starts(span, own) for span in SPANS]
    table = []
    for tile in range(tiles):
        i = int(np.searchsorted(ends, tile, side="right"))
        if i < len(sizes):
            at = tile - (ends[i] - counts[i])
            table.append([i, aligned[i], own[i], rows[i], at, counts[i], *(b[i] for b in before)])
        else:
            total = int(ends[-1]) if len(sizes) else 0
            table.append([-1, aligned[-1], 0, capacity - aligned[-1], tile - total, total, *(b[-1] for b in before)])
    return np.array(table, np.int64)


SIZES = {
    "ragged": [0, 128, 0, 130, 65, 0],
    "large": [1, 7, 10379, 0, 130],
    "empty": [0, 0, 0],
    "one": [513],
    "none": [],
    "one row each": [1] * 1000,
    "1024 groups": [n % 300 for n in range(1024)],
    "negative": [-5, 100, -(1 << 31), 7],
    "too many": [300, 1 << 30, 5, 1 << 30, 1 << 30, 6],
}


@pytest.mark.parametrize("alignment", [1, 16, 128, 100])
@pytest.mark.parametrize("kind", ["int32", "int64", "ends"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_tile_finds_its_member(warp, sizes, kind, alignment):
    stored = np.asarray(sizes, np.int64)
    if kind == "ends":
        stored = np.cumsum(stored)
        if len(stored) and (stored.max() >= 1 << 31 or stored.min() < -(1 << 31)):
            pytest.skip("no int32 ends")
    reach = int(span_starts(Span(1, alignment), np.clip(sizes, 0, 20_000))[-1])
    for capacity in sorted({reach, reach // 2, reach + 300}):
        tiles = capacity // ROWS + len(sizes) + 2
        actual = find(warp, stored, kind, 0, capacity, alignment, tiles)
        np.testing.assert_array_equal(actual, expected(sizes, capacity, alignment, tiles))


@pytest.mark.parametrize("each", [0, 1, 127, 128, 300])
@pytest.mark.parametrize("count", [0, 1, 33])
def test_every_tile_finds_its_member_among_equal_ones(warp, each, count):
    tiles = -(-each // ROWS) * count + 2
    actual = find(warp, [0] * count, "each", each, each * count, 1, tiles)
    np.testing.assert_array_equal(actual, expected([each] * count, each * count, 1, tiles))
