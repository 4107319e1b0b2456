"""The quantize kernel of NVFP4, run on the host by g++ (host_kernels.py) against the reference, bit for bit."""

import shutil
from types import SimpleNamespace

import host_kernels
import numpy as np
import pytest

import hqarray as hq
from hqarray import reference, scaling, testing
from hqarray.formats import BFLOAT16, NVFP4, TwoLevel
from hqarray.philox import Draws

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

named = pytest.mark.parametrize
RANDOM, NEAREST = NVFP4(rounding="stochastic"), NVFP4()
SQUARES, ROTATED = NVFP4((16, 16), rounding="stochastic"), NVFP4(rht=True, rounding="stochastic")
ROWS = NVFP4(rounding="stochastic", per_row=True)
SEED = 0xDEADBEEF_12345678
BF16, FLOAT32 = BFLOAT16, np.dtype(np.float32)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    return host_kernels.Compiler(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def check(monkeypatch, compiler):
    """Both parts of a matrix by the kernel, from poisoned memory, are those of the reference."""
    pytest.importorskip("cupy")
    from hqarray import cuda

    host_kernels.install(monkeypatch, compiler)
    monkeypatch.setattr(cuda, "_plans", {})

    def run(x, row, column, draws, amax=None):
        padded = -(-x.shape[1] * x.itemsize // 16) * 16 // x.itemsize
        memory = host_kernels.Memory(len(x) * padded * x.itemsize)
        placed = memory.bytes.view(x.dtype).reshape(len(x), padded)[:, : x.shape[1]]
        placed[...] = x
        values = SimpleNamespace(data=memory, strides=placed.strides, shape=x.shape, dtype=x.dtype)
        whole = None if amax is None else np.float32([amax])
        expected = reference.quantize_parts(x, row, column, None, whole, draws)
        memory.ptr = memory.bytes.ctypes.data
        plan = cuda._plan(row, column, values, True)
        if plan.amax is not None:  # of lines, which no kernel measures here
            magnitudes = np.abs(x.astype(np.float32))
            magnitudes[np.isnan(magnitudes)] = 0
            lines = [np.ascontiguousarray(magnitudes.max(axis, initial=0)) for axis in (1, 0)]
            pointers = tuple(line.ctypes.data for line in lines)
            object.__setattr__(plan, "amax", SimpleNamespace(launch=lambda *_, **__: pointers))
        parts = [None if one is None else one.empty() for one in (plan.rows, plan.columns)]
        given = None if whole is None else SimpleNamespace(data=SimpleNamespace(ptr=whole.ctypes.data))
        plan.launch(memory.ptr, *parts, given, seed=cuda.seed_of(draws))
        for part, wanted in zip(parts, expected, strict=True):
            if part is not None:
                actual = wanted.copy()
                actual.buffers.base[...] = part.buffers.memory.bytes
                testing.assert_bitwise_equal(actual, wanted)
                testing.assert_code_padding_is_zero(actual)

    return run


@named("dtype", [BF16, FLOAT32], ids=str)
@named("kind", ["gauss", "wide", "nans", "infinities", "ties", "negative_zeros"])
def test_codes_are_those_of_the_reference(check, kind, dtype):
    for shape in ((145, 136), (33, 17), (1, 16)):
        x = testing.matrix(kind, shape, dtype)
        check(x, RANDOM, RANDOM, Draws(SEED), amax=hq.amax(x)[0])
        check(x, SQUARES, ROTATED, Draws(SEED), amax=hq.amax(x)[0])


@named("first", [(0, 0), (1, 0), (5, 17 * 16), (2**33 - 4, 0), (2**33 - 3, 0), (2**33 - 7, 0), (2**40 + 7, 2**35 + 32)],
       ids=str)
@named("turned", [False, True], ids=["rows", "columns"])
def test_a_shard_draws_as_in_the_whole_wherever_it_begins(check, first, turned):
    """Rows from an even or an odd one, and where the word of a counter overflows within the 8 lines of a thread."""
    x = testing.matrix("gauss", (40, 48), BF16)
    draws = Draws(SEED, turned=turned, first=first[::-1] if turned else first)
    check(x, RANDOM, None, draws, amax=4.0)
    draws = Draws(SEED, turned=turned, first=first if turned else first[::-1])
    check(x, None, RANDOM, draws, amax=4.0)


EXPONENTS = (-149, -140, -130, -120, -100, -40, 0, 60, 90, 98, *range(100, 107), 110, *range(112, 121))
HALVES = np.arange(0x0E01, dtype=np.uint16).view(np.float16).astype(np.float32) * 2**14
TIES = np.concatenate([np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]), (HALVES[1:] + HALVES[:-1]) / 2])
"""Where a rounding changes: between codes, and between float16's numbers up to 6."""


@named("format", [RANDOM, NEAREST, ROWS], ids=lambda format: format.name)
def test_amaxes_huge_and_tiny_under_every_scale_byte(check, format):
    """Rows of four blocks under each of the bytes 0 to 0x7E, of values beside those where codes change."""
    generator = np.random.default_rng(5)
    scales = np.repeat(hq.formats.ELEMENTS["e4m3"].values[:127, None], 64, axis=1).astype(np.float32)
    largest = np.float32(np.finfo(np.float32).max)
    for exponent in EXPONENTS:
        with np.errstate(all="ignore"):
            decode_scale = np.float32(2.0**exponent * generator.uniform(1, 2))
            amax = np.clip(decode_scale * np.float32(2688), np.float32(2.0**-149), largest)
            decode_scale = scaling.global_scales(np.float32([amax]), TwoLevel(448.0), hq.formats.ELEMENTS["e2m1"])[1][0]
            factor = np.minimum(1 / (scales * decode_scale), largest)
            x = (generator.choice(TIES, scales.shape) / factor.astype(np.float64)).astype(np.float32)
        x = np.nextafter(x, largest * generator.integers(-1, 2, x.shape).astype(np.float32))
        x[:, ::16] = np.minimum(6 * scales[:, ::16].astype(np.float64) * decode_scale, largest)
        x[0] = np.float32(2.0**-149) * generator.integers(0, 2**22, 64)  # times FLT_MAX up to 4
        check(x, format, None, Draws(SEED), amax=None if format.measures_rows else amax)
