"""Whole kernels compiled by g++ and run on the host, a block's threads as fibers: host_kernels.h.

A stand-in for a GPU, for what decodes and quantizes: addresses, spans, masks and the order of operations are the device
code's own; conversions by hardware are not (chips before sm_89 have none), nor is NaN's payload.
"""

import ctypes
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from hqarray.rawkernels import loader

REPLACED = (
    (r'asm\("prmt\.b32.*?\);', "d = host_permute(a, b, selector);"),
    (r'asm\("cvt\.f32\.f16 .*?\);', "y = host_widen(x);"),
    (r'asm\("mul\.f16x2 %0, %1, %2;" : "=r"\((.*?)\) : .*?, "r"\(factor \* 0x10001u\)\);',
     r"\1 = host_multiply_halves(pair, factor * 0x10001u);"),
    (r'asm\("cvt\.rn\.bf16x2\.f32.*?\);', "pair = host_bf16(low) | host_bf16(high) << 16;"),
    (r'asm\("cvt\.rn\.f16x2\.f32.*?\);', "pair = host_half(low) | host_half(high) << 16;"),
    (r'asm\("mul\.f32 %0, %0, 0f3F800000;" : "\+f"\(value\)\);', ";"),
    (r'asm\("max\.NaN\." type .*?\);', "d = host_larger2(a, b, true, type);"),
    (r'asm\("max\." type .*?\);', "d = host_larger2(a, b, false, type);"),
    (r'asm\("max\.NaN\.f32 .*?\);', "d = host_larger(fabsf(a), fabsf(b));"),
    (r'asm\("fma\.rn\.bf16x2 %0, %1, %2, %3;" : "=r"\(d\).*?\);', "d = host_high(pair);"),
    (r'asm\("cvt\.pack\.sat\.s4\.s32\.b32.*?\);', "word = host_pack(word, code[i], code[i + 1]);"),
    (r'asm\("mad\.wide\.u32.*?"l"\(base\)\);', "address = u64(line * 16) * pitch16 + u64(base);"),
    (r'asm\("mad\.wide\.s32.*?"l"\(first\)\);', "address = u64(i64((p.row + i) * 16) * row16) + u64(first);"),
    (r'asm volatile\("st\.global\..*?: "memory"\);', "std::memcpy(target, w, 4 * WORDS);"),
    (r"const u32 address = u32\(__cvta_generic_to_shared\(word \+ 4 \* pair\)\);", ""),
    (r'asm volatile\("ld\.volatile\.shared\.v4.*?\);', "std::memcpy(key, word + 4 * pair, 16);"),
    (r"extern __shared__ __align__\(16\) u8 (\w+)\[\];", r"u8* \1 = shared_bytes;"),
    (r"\basm( volatile)?\(.*?\);", "abort();"),
)
"""Inline assembly and what stands for it; whatever else is met aborts."""

ARGUMENTS = {"hq_dequantize": "DequantizeArguments", "hq_decode": "DecodeArguments",
             "hq_transpose": "TransposeArguments", "hq_quantize": "Arguments",
             "hq_members": "MembersArguments", "hq_records": "RecordsArguments", "hq_combine": "CombineArguments",
             "hq_dot": "DotArguments"}


class Compiler:
    """Kernels of one folder of translated sources, each compiled once."""

    def __init__(self, folder: Path):
        self.folder, self.libraries, self.atomics = folder, {}, 0
        for path in (*loader.SOURCES.glob("*.cu"), *loader.SOURCES.glob("*.cuh")):
            text = path.read_text()
            for pattern, replacement in REPLACED:
                text = re.sub(pattern, replacement, text)
            (folder / path.name).write_text(text)

    def library(self, source):
        if source not in self.libraries:
            stem = self.folder / f"kernel{len(self.libraries)}"
            kind = ("Grouped" if "#define GROUPED 1" in source.text else "") + ARGUMENTS[source.entry]
            header = Path(__file__).with_name("host_kernels.h")
            Path(f"{stem}.cpp").write_text(f"""#include "{header}"
{source.code}
static void once() {{ {source.entry}(*static_cast<const hq::{kind}*>(arguments)); }}
extern "C" void launch(const void* given, unsigned x, unsigned y, unsigned z) {{ run_grid(once, given, {{x, y, z}}); }}
extern "C" int atomics_made() {{ return atomics; }}
""")
            command = ["g++", "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared",
                       "-fPIC", f"-I{self.folder}", f"{stem}.cpp", "-o", f"{stem}.so"]
            built = subprocess.run(command, capture_output=True, text=True)
            assert built.returncode == 0, built.stderr
            self.libraries[source] = ctypes.CDLL(f"{stem}.so")
        return self.libraries[source]

    def kernel_of(self, launch, grid, device):
        """Stands for cuda.kernel_of."""
        def run(stream, struct, *values):
            library = self.library(launch.source)
            library.launch(struct.pack(*values), *map(ctypes.c_uint, grid))
            self.atomics = library.atomics_made()

        return SimpleNamespace(launch=run)


class Memory:
    """Stands for CuPy's MemoryPointer; begins on 256 bytes."""

    device_id = 0

    def __init__(self, nbytes, content=0xFF):
        self.whole = np.full(nbytes + 256, 0xFF, np.uint8)
        start = -self.whole.ctypes.data % 256
        self.bytes = self.whole[start : start + nbytes]
        self.bytes[...] = content
        self.ptr = self.bytes.ctypes.data


class Array:
    """Stands for an empty CuPy array, which nothing may be written behind."""

    GUARD = 64

    def __init__(self, shape, dtype):
        self.shape, self.dtype, self.size = tuple(shape), np.dtype(dtype), int(np.prod(shape))
        nbytes = self.size * self.dtype.itemsize
        self.data = Memory(nbytes + self.GUARD, 0xA5)
        self.values = self.data.bytes[:nbytes].view(self.dtype).reshape(self.shape)
        self.strides = self.values.strides

    @property
    def T(self):
        assert (self.data.bytes[-self.GUARD :] == 0xA5).all(), "something was written behind the array"
        turned = object.__new__(Array)
        turned.__dict__ = self.__dict__ | {"values": self.values.T}
        return turned


def uploaded(host, device, stream):
    """Stands for cuda_grouped._uploaded."""
    memory = Memory(8 * max(1, len(host)))
    memory.bytes[: 8 * len(host)] = np.array(host, np.int64).view(np.uint8)
    return SimpleNamespace(data=memory), None


def install(monkeypatch, compiler):
    """Let the modules that launch on CuPy launch here."""
    from hqarray import cuda, cuda_grouped, cuda_grouped_sides

    for module in (cuda, cuda_grouped):
        for name, stand_in in {
            "getDevice": lambda: 0, "stream_of": lambda device: 0, "kernel_of": compiler.kernel_of,
            "cupy": SimpleNamespace(ndarray=Array), "_on_device_of": lambda memory: nullcontext(), "alloc": Memory,
        }.items():
            monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(cuda_grouped_sides, "kernel_of", compiler.kernel_of)
    monkeypatch.setattr(cuda_grouped, "_uploaded", uploaded)
    monkeypatch.setattr(cuda_grouped, "streamIsCapturing", lambda stream: False)
    monkeypatch.setattr(cuda_grouped, "scratch", lambda nbytes, stream: Memory(nbytes))
    for plan in (cuda._dequantize_plan, cuda._transpose_plan, cuda_grouped._dequantize_kernel):
        plan.cache_clear()
        monkeypatch.setattr(cuda if plan is not cuda_grouped._dequantize_kernel else cuda_grouped, plan.__name__,
                            plan.__wrapped__)
