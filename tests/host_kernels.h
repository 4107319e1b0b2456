// Kernels on the host: a block of 256 fibers that take turns at warp collectives and barriers. host_kernels.py includes it
// before a kernel's text, in which it has replaced inline assembly by calls of the functions here.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

struct Dim3 { unsigned x, y, z; };
static Dim3 threadIdx, blockIdx, gridDim;
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
static uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
static uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

static void fail(const char* what) { fprintf(stderr, "%s\n", what); abort(); }

template <class T> static T __ldg(const T* p) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) fail("a load is not aligned");
    return *p;
}
template <class T> static T __ldcs(const T* p) { return __ldg(p); }

// --- fibers -------------------------------------------------------------------------------------

constexpr int FIBERS = 256, MOST_TURNS = 100000;
static ucontext_t fibers[FIBERS], home;
static bool ended[FIBERS], at_barrier[FIBERS];
static int current;
static struct { bool waits; unsigned mask; uint64_t word; } slot[FIBERS];
static uint64_t words[FIBERS][32];
static unsigned char shared_memory[1 << 18];
static unsigned char* shared_bytes = shared_memory + (256 - reinterpret_cast<uintptr_t>(shared_memory) % 256);

static void others_turn() {
    const int me = current;
    const Dim3 thread = threadIdx;
    swapcontext(&fibers[me], &home);
    current = me;
    threadIdx = thread;
}

// The words of the lanes of a mask, once all that have not ended are here. Of other lanes: garbage.
static const uint64_t* all(unsigned mask, uint64_t word) {
    const int me = current, first = me / 32 * 32;
    if (!(mask >> (me - first) & 1)) fail("a lane is not in its own mask");
    slot[me] = {true, mask, word};
    for (int turns = 0; slot[me].waits; ++turns) {
        bool complete = true;
        for (int i = first; i < first + 32; ++i)
            if ((mask >> (i - first) & 1) && !ended[i] && !(slot[i].waits && slot[i].mask == mask)) complete = false;
        if (!complete) {
            if (turns > MOST_TURNS) fail("lanes wait for one another");
            others_turn();
            continue;
        }
        for (int i = first; i < first + 32; ++i) {  // not of others, who may not have read what they waited for before
            if (!(mask >> (i - first) & 1)) continue;
            for (int j = 0; j < 32; ++j) words[i][j] = (mask >> j & 1) && !ended[first + j] ? slot[first + j].word : 0xDEADBEEFDEADBEEF;
        }
        for (int i = first; i < first + 32; ++i)
            if (mask >> (i - first) & 1) slot[i].waits = false;
    }
    return words[me];
}

template <class T> static uint64_t packed(T value) { uint64_t word = 0; memcpy(&word, &value, sizeof value); return word; }
template <class T> static T unpacked(uint64_t word) { T value; memcpy(&value, &word, sizeof value); return value; }
template <class T> static T __shfl_sync(unsigned mask, T value, int from) { return unpacked<T>(all(mask, packed(value))[from]); }
template <class T> static T __shfl_up_sync(unsigned mask, T value, int step) {
    const int lane = current % 32;
    return unpacked<T>(all(mask, packed(value))[lane >= step ? lane - step : lane]);
}
template <class T> static T __shfl_xor_sync(unsigned mask, T value, int bits) {
    const int lane = current % 32;
    return unpacked<T>(all(mask, packed(value))[lane ^ bits]);
}
static unsigned __ballot_sync(unsigned mask, bool value) {
    const uint64_t* own = all(mask, value);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(own[i] == 1) << i;
    return bits;
}
static unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    const uint64_t* own = all(mask, value);
    unsigned sum = 0;
    for (int i = 0; i < 32; ++i) sum += unsigned(own[i]);
    return sum;
}
static unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    const uint64_t* own = all(mask, value);
    unsigned best = 0;
    for (int i = 0; i < 32; ++i)
        if ((mask >> i & 1) && unsigned(own[i]) > best) best = unsigned(own[i]);
    return best;
}
static int atomics;  // since the launch
static unsigned atomicMax(unsigned* target, unsigned value) {
    const unsigned old = *target;
    ++atomics;
    if (value > old) *target = value;
    return old;
}
static void __syncwarp() { all(~0u, 0); }
static void __syncthreads() {
    const int me = current;
    at_barrier[me] = true;
    for (int turns = 0; at_barrier[me]; ++turns) {
        bool complete = true;
        for (int i = 0; i < FIBERS; ++i) complete &= ended[i] || at_barrier[i];
        if (complete) memset(at_barrier, 0, sizeof at_barrier);
        else if (turns > MOST_TURNS) fail("threads wait at a barrier");
        else others_turn();
    }
}

// --- instructions -------------------------------------------------------------------------------

static int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) { return unsigned((uint64_t(high) << 32 | low) >> (shift & 31)); }
static unsigned of_halves(unsigned a, unsigned b, unsigned (*one)(unsigned, unsigned)) {
    return one(a & 0xFFFF, b & 0xFFFF) | one(a >> 16, b >> 16) << 16;
}
static unsigned lesser(unsigned a, unsigned b) { return a < b ? a : b; }
static unsigned greater(unsigned a, unsigned b) { return a > b ? a : b; }
static unsigned is_greater(unsigned a, unsigned b) { return a > b ? 0xFFFF : 0; }
static unsigned __vminu2(unsigned a, unsigned b) { return of_halves(a, b, lesser); }
static unsigned __vmaxu2(unsigned a, unsigned b) { return of_halves(a, b, greater); }
static unsigned __vcmpgtu2(unsigned a, unsigned b) { return of_halves(a, b, is_greater); }
static unsigned __vcmpeq2(unsigned a, unsigned b) { return ((a ^ b) & 0xFFFF ? 0 : 0xFFFFu) | ((a ^ b) >> 16 ? 0 : 0xFFFF0000u); }
static unsigned host_permute(unsigned a, unsigned b, unsigned selector) {
    unsigned d = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned one = selector >> (4 * i) & 15, byte = unsigned((uint64_t(b) << 32 | a) >> (8 * (one & 7))) & 255;
        d |= (one & 8 ? (byte & 128 ? 255 : 0) : byte) << (8 * i);
    }
    return d;
}
static float host_widen(unsigned short half) { return float(unpacked<_Float16>(half)); }
static unsigned host_multiply_halves(unsigned a, unsigned b) {
    const _Float16 low = unpacked<_Float16>(a & 0xFFFF) * unpacked<_Float16>(b & 0xFFFF), high = unpacked<_Float16>(a >> 16) * unpacked<_Float16>(b >> 16);
    return unsigned(packed(low)) | unsigned(packed(high)) << 16;
}
static unsigned host_bf16(float value) {
    const unsigned bits = unsigned(packed(value));
    return value == value ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FFF;
}
static unsigned host_half(float value) { return value == value ? unsigned(packed(_Float16(value))) : 0x7FFF; }

// Larger of two magnitudes: as integers, for neither bfloat16 nor float16 has its NaNs elsewhere than above Inf.
static unsigned host_larger(unsigned a, unsigned b, bool nan_wins, unsigned inf) {
    if (!nan_wins && (a > inf || b > inf)) return a > inf ? b : a;
    return greater(a, b);
}
static unsigned host_larger2(unsigned a, unsigned b, bool nan_wins, const char* type) {
    const unsigned inf = type[0] == 'b' ? 0x7F80 : 0x7C00;
    return host_larger(a & 0xFFFF, b & 0xFFFF, nan_wins, inf) | host_larger(a >> 16, b >> 16, nan_wins, inf) << 16;
}
static float host_larger(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
// x * (0, 1) + (0, 0): what the low half leaves is a NaN or zero.
static unsigned host_high(unsigned pair) { return (pair & 0xFFFF0000u) | ((pair & 0x7F80) == 0x7F80 ? 0x7FFFu : 0); }
static unsigned host_pack(unsigned word, int low, int high) {
    auto four = [](int x) { return unsigned(x < -8 ? -8 : x > 7 ? 7 : x) & 15; };
    return word << 8 | four(high) << 4 | four(low);
}
static int __float_as_int(float x) { return unpacked<int>(packed(x)); }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static int min(int a, int b) { return a < b ? a : b; }
static unsigned max(unsigned a, unsigned b) { return greater(a, b); }
static int __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }

// Of kernels that are not run here.
static float __fdividef(float, float) { abort(); }

// --- launch -------------------------------------------------------------------------------------

static void (*body)();
static const void* arguments;
static void thread() {
    body();
    ended[current] = true;
    swapcontext(&fibers[current], &home);
}
static void run_grid(void (*kernel)(), const void* given, Dim3 grid) {
    static char stacks[FIBERS][1 << 16];
    body = kernel; arguments = given; gridDim = grid; atomics = 0;
    for (unsigned block = 0; block < grid.x * grid.y * grid.z; ++block) {
        blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
        memset(shared_memory, 0xEE, sizeof shared_memory);
        memset(ended, 0, sizeof ended);
        for (int i = 0; i < FIBERS; ++i) {
            getcontext(&fibers[i]);
            fibers[i].uc_stack.ss_sp = stacks[i];
            fibers[i].uc_stack.ss_size = sizeof stacks[i];
            makecontext(&fibers[i], thread, 0);
        }
        for (bool runs = true; runs;) {
            runs = false;
            for (int i = 0; i < FIBERS; ++i)
                if (!ended[i]) {
                    current = i;
                    threadIdx = {unsigned(i), 0, 0};
                    swapcontext(&home, &fibers[i]);
                    runs |= !ended[i];
                }
        }
    }
}
