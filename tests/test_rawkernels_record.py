"""What quantize kernels record for delayed scaling, run on the host by g++ (host_kernels.py), bit for bit."""

import shutil
from types import SimpleNamespace

import host_kernels
import numpy as np
import pytest

from hqarray import reference, reference_grouped, testing
from hqarray.formats import BFLOAT16, as_format
from hqarray.groups import Sizes
from hqarray.rawkernels import geometry

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

named = pytest.mark.parametrize
PAIRS = [("fp8_e4m3", "fp8_e5m2"), ("fp8_e4m3", None), (None, "fp8_e4m3"), ("mxfp8", "fp8_e4m3"), ("nvfp4", "nvfp4"),
         ("nvfp4", None), ("nvfp4_16x16", "nvfp4_16x16"), ("fp8_block_128x128", "nvfp4"), ("fp8_e4m3", "bf16")]
SIZES = ([30, 0, 100], [0, 0], [128, 1, 129, 0], [7])
AMAX = 3.0


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    return host_kernels.Compiler(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def modules(monkeypatch, compiler):
    """The modules that launch on CuPy, launching on the host; none measures an amax."""
    pytest.importorskip("cupy")
    from hqarray import cuda, cuda_grouped

    host_kernels.install(monkeypatch, compiler)
    for module in (cuda, cuda_grouped):
        monkeypatch.setattr(module, "_plans", {})
    return cuda, cuda_grouped


def largest(x):
    """An oracle: Python's max of what are no NaN."""
    return max((abs(float(value)) for value in x.astype(np.float32).ravel() if value == value), default=0.0)


def at(array):
    """Stands for a CuPy array, of the memory of a NumPy one."""
    return SimpleNamespace(data=SimpleNamespace(ptr=array.ctypes.data))


def placed(x):
    """A matrix whose rows begin on 16 bytes, in memory that is NaN besides."""
    padded = -(-x.shape[1] * x.itemsize // 16) * 16 // x.itemsize
    memory = host_kernels.Memory(len(x) * padded * x.itemsize)
    values = memory.bytes.view(x.dtype).reshape(len(x), padded)[:, : x.shape[1]]
    values[...] = x
    return SimpleNamespace(data=memory, strides=values.strides, shape=x.shape, dtype=x.dtype)


def formats_of(pair):
    return [None if name is None else as_format(name) for name in pair]


def record(cuda, x, pair, current, noop=None):
    """The parts of a matrix, as they lie in memory, quantized with AMAX; current is what was recorded before."""
    values, (row, column) = placed(x), formats_of(pair)
    plan = cuda._plan(row, column, values, True)
    parts = [None if one is None else one.empty() for one in (plan.rows, plan.columns)]
    plan.launch(values.data.ptr, *parts, at(np.float32([AMAX])), None if noop is None else at(noop),
                record=None if current is None else at(current))
    return [part.buffers.memory.bytes for part in parts if part is not None]


@named("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@named("pair", PAIRS, ids=str)
def test_the_largest_magnitude_is_recorded_and_codes_are_as_without(modules, pair, dtype):
    cuda, _ = modules
    for kind, shape in (("wide", (145, 280)), ("nans", (33, 17)), ("infinities", (16, 40)), ("gauss", (1, 1))):
        x, current = testing.matrix(kind, shape, dtype), np.zeros(1, np.float32)
        written = record(cuda, x, pair, current)
        assert current[0] == largest(x)
        testing.assert_bitwise_equal(current, reference.amax(x))
        expected = reference.quantize_parts(x, *formats_of(pair), None, np.float32([AMAX]))
        for memory, plain, part in zip(written, record(cuda, x, pair, None), filter(None, expected), strict=True):
            testing.assert_bitwise_equal(memory, plain)
            actual = part.copy()
            actual.buffers.base[...] = memory
            testing.assert_bitwise_equal(actual, part)


@named("pair", [("fp8_e4m3", "fp8_e5m2"), ("fp8_e4m3", None), ("nvfp4", "nvfp4")], ids=str)
def test_every_element_is_seen_wherever_it_lies(modules, pair):
    """One element above the others, in the corners of tiles, warps and patches."""
    cuda, _ = modules
    shape = (300, 150)
    for row, column in ((0, 0), (7, 8), (31, 63), (127, 64), (128, 127), (255, 128), (256, 149), (299, 149)):
        x, current = np.full(shape, 0.5, BFLOAT16), np.zeros(1, np.float32)
        x[row, column] = -2
        record(cuda, x, pair, current)
        assert current[0] == 2, (row, column)


def test_what_is_larger_stays_and_costs_no_atomic(modules, compiler):
    cuda, _ = modules
    x, current = testing.matrix("gauss", (300, 280), BFLOAT16), np.zeros(1, np.float32)
    record(cuda, x, ("fp8_e4m3", "fp8_e4m3"), current)
    tile = geometry.quantize_tile(*formats_of(("fp8_e4m3", "fp8_e4m3")))
    assert 1 <= compiler.atomics <= -(-300 // tile.rows) * -(-280 // tile.columns)
    for there in (current[0], np.float32(1e30), np.float32(np.inf)):
        current[...] = there
        record(cuda, x, ("fp8_e4m3", "fp8_e4m3"), current)
        assert current[0] == there and compiler.atomics == 0


def test_nothing_but_nan_and_an_empty_matrix_record_nothing(modules):
    cuda, _ = modules
    for x in (np.full((40, 24), np.nan, BFLOAT16), np.zeros((0, 24), BFLOAT16), np.zeros((24, 0), BFLOAT16)):
        current = np.zeros(1, np.float32)
        record(cuda, x, ("fp8_e4m3", "nvfp4"), current)
        assert current[0] == 0


@named("flag", [np.int32([1]), np.float32([0.5]), np.int32([0]), np.float32([-0.0])], ids=str)
def test_a_call_that_is_skipped_records_nothing(modules, flag):
    cuda, _ = modules
    current = np.zeros(1, np.float32)
    record(cuda, np.ones((16, 16), BFLOAT16), ("fp8_e4m3", "fp8_e4m3"), current, flag)
    assert current[0] == (flag[0] == 0)


@named("alignment", [1, 16])
@named("pair", [pair for pair in PAIRS if pair != ("fp8_block_128x128", "nvfp4")], ids=str)
def test_members_record_their_own_and_rows_of_no_member_nothing(modules, pair, alignment):
    _, cuda_grouped = modules
    row, column = formats_of(pair)
    for sizes in SIZES:
        rows, starts = Sizes.known(sizes, alignment=alignment, capacity=400), []
        x = np.full((400, 40), 1e6, BFLOAT16)  # behind the members and between them
        for i, (start, size) in enumerate(zip(rows.starts.tolist(), sizes, strict=False)):
            x[start : start + size] = testing.matrix("gauss", (size, 40), BFLOAT16) * BFLOAT16.type(i + 1)
            starts.append(start)
        current = np.full(len(sizes) + 2, -1, np.float32)
        current[1:-1] = 0
        values, whole = placed(x), np.full(len(sizes), AMAX, np.float32)
        plan = cuda_grouped._plan(values, rows, row, column, True)
        parts = plan.empty(rows)
        plan.launch(values.data.ptr, values.strides[0], rows, parts, at(whole), zeros_rest=True, record=at(current[1:]))
        wanted = [largest(x[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
        assert current.tolist() == [-1, *wanted, -1]
        own = np.zeros(len(sizes), np.float32)
        expected = reference_grouped.quantize_groups(x, rows, row, column, whole, record=own)
        testing.assert_bitwise_equal(own, current[1:-1])
        for part, other in zip(parts, expected, strict=True):
            if part is not None:
                codes = part.layout.codes_nbytes
                testing.assert_bitwise_equal(part.memory.bytes[:codes], other.base[:codes])
