"""NVFP4's options on the GPU against the reference, bit for bit: rotation, draws, choices of scales, scales of rows."""

import numpy as np
import pytest
from test_grouped_cuda import assert_same

import hqarray as hq
from hqarray import testing
from hqarray.formats import BFLOAT16

pytestmark = pytest.mark.gpu

SEED = 0xDEADBEEF_12345678
NVFP4 = hq.NVFP4
OPTIONS = {
    "rotated": NVFP4(rht=True),
    "rotated squares": NVFP4((16, 16), rht=True),
    "at random": NVFP4(rounding="stochastic"),
    "squares at random": NVFP4((16, 16), rounding="stochastic"),
    "absolute": NVFP4(four_over_six="mae"),
    "squared": NVFP4(four_over_six="mse", global_bound=256),
    "absolute squares": NVFP4((16, 16), four_over_six="mae", global_bound=256),
    "squared squares": NVFP4((16, 16), four_over_six="mse"),
    "256": NVFP4(global_bound=256),
    "rows": NVFP4(per_row=True),
    "rows, all": NVFP4(rht=True, rounding="stochastic", four_over_six="mse", per_row=True),
    "all": NVFP4(rht=True, rounding="stochastic", four_over_six="mae"),
    "all squares": NVFP4((16, 16), rht=True, rounding="stochastic", four_over_six="mse", global_bound=256),
    "fp8 rows": hq.FP8(per_row=True),
    "fp8 rows pow2": hq.FP8("e5m2", pow2=True, epsilon=1e-3, per_row=True),
    "mx squares": hq.MX(block=(32, 32)),
    "mxfp4 squares": hq.MX("e2m1", rule="even", block=(32, 32)),
    "mxfp6 squares": hq.MX("e3m2", block=(32, 32)),
}
DTYPES = [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)]
named = pytest.mark.parametrize


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def check(cupy, x, view=lambda x: x, seed=SEED, **formats):
    expected = hq.quantize(view(x), seed=seed, **formats)
    actual = hq.quantize(view(cupy.asarray(x)), seed=seed, **formats)
    testing.assert_bitwise_equal(actual, expected)
    for _, part in actual.parts():
        testing.assert_code_padding_is_zero(part)


@named("dtype", DTYPES, ids=str)
@named("name", OPTIONS)
def test_every_matrix_equals_the_reference(cupy, name, dtype):
    one = OPTIONS[name]
    for kind in testing.MATRICES:
        x = testing.matrix(kind, (145, 280), dtype)
        check(cupy, x, rowwise=one, columnwise=one)
        check(cupy, x, rowwise=one)
        check(cupy, x, columnwise=one)


@named("name", OPTIONS)
def test_every_shape_and_view_equals_the_reference(cupy, name):
    one = OPTIONS[name]
    for dtype in DTYPES:
        for shape in testing.SHAPES.values():
            check(cupy, testing.matrix("wide", shape, dtype), rowwise=one, columnwise=one)
        x = testing.matrix("gauss", (150, 150), dtype)
        for view in testing.VIEWS.values():
            check(cupy, x, view, rowwise=one, columnwise=one)


@named("column", OPTIONS)
@named("row", ["nvfp4", "fp8_block_128x128", "all"])
def test_every_pair_equals_the_reference(cupy, row, column):
    for kind in ("wide", "infinities"):
        x = testing.matrix(kind, (131, 264), BFLOAT16)
        check(cupy, x, rowwise=OPTIONS.get(row, row), columnwise=OPTIONS[column])
        check(cupy, x, rowwise=OPTIONS[column], columnwise=OPTIONS.get(row, row))


@named("name", OPTIONS)
def test_any_magnitude_equals_the_reference(cupy, name):
    """From subnormal matrices to ones whose sums overflow."""
    one = OPTIONS[name]
    x = testing.matrix("gauss", (64, 96), np.float32)
    with np.errstate(all="ignore"):
        for exponent in (-149, -140, -126, -110, -90, -60, 60, 100, 110, 120, 125, 127):
            check(cupy, np.ldexp(x, exponent).astype(np.float32), rowwise=one, columnwise=one)
        rows = np.ldexp(x, np.arange(64)[:, None] * 4 - 130).astype(np.float32)
        check(cupy, rows, rowwise=one, columnwise=one)


@named("name", ["at random", "all", "all squares"])
@named("dtype", [np.uint64, np.int64])
def test_a_seed_is_read_where_it_lies(cupy, name, dtype):
    x = testing.matrix("gauss", (100, 200), BFLOAT16)
    for seed in (0, 1, SEED, (1 << 64) - 1):
        there = cupy.asarray(np.array([seed], np.uint64).view(dtype))
        expected = hq.quantize(x, rowwise=OPTIONS[name], columnwise=OPTIONS[name], seed=seed)
        actual = hq.quantize(cupy.asarray(x), rowwise=OPTIONS[name], columnwise=OPTIONS[name], seed=there)
        testing.assert_bitwise_equal(actual, expected)


def test_a_captured_graph_draws_anew(cupy):
    one = OPTIONS["all"]
    x = testing.matrix("gauss", (145, 280), BFLOAT16)
    values, seed = cupy.asarray(x), cupy.zeros(1, np.uint64)
    array = hq.quantize(values, rowwise=one, columnwise=one, seed=seed)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        hq.requantize(array, values, seed=seed)
        stream.synchronize()
        stream.begin_capture()
        hq.requantize(array, values, seed=seed)
        graph = stream.end_capture()
        for number in (5, 6, SEED):
            seed[...] = number
            graph.launch(stream)
            stream.synchronize()
            testing.assert_bitwise_equal(array, hq.quantize(x, rowwise=one, columnwise=one, seed=number))


@named("name", OPTIONS)
def test_a_given_amax_and_a_flag_are_used(cupy, name):
    one = OPTIONS[name]
    x = testing.matrix("gauss", (70, 90), BFLOAT16)
    if one.measures_amax:
        for amax in (0.7, 9.5):
            expected = hq.quantize(x, rowwise=one, columnwise=one, amax=amax, seed=SEED)
            actual = hq.quantize(cupy.asarray(x), rowwise=one, columnwise=one, amax=amax, seed=SEED)
            testing.assert_bitwise_equal(actual, expected)
    array = hq.quantize(cupy.asarray(x), rowwise=one, columnwise=one, seed=1)
    before = array.copy()
    hq.requantize(array, cupy.asarray(x) * 2, noop=cupy.ones(1, np.int32), seed=2)
    testing.assert_bitwise_equal(array, before)


@named("sizes", [[0, 128, 0, 130, 65, 0], [1, 7, 379, 0, 130], [513], [16] * 9, [0, 0]], ids=str)
@named("name", OPTIONS)
def test_groups_equal_the_reference(cupy, name, sizes):
    one = OPTIONS[name]
    x = testing.matrix("wide", (sum(sizes) + 37, 136), BFLOAT16)
    for alignment in (1, 16):
        if sum(-(-n // alignment) * alignment for n in sizes) > len(x):
            continue
        for row, column in ((one, one), ("mxfp8", one), (one, "nvfp4")):
            given = {"rowwise": row, "columnwise": column, "seed": SEED, "alignment": alignment}
            ours = hq.grouped_quantize(cupy.asarray(x), cupy.asarray(sizes), **given)
            assert_same(ours, hq.grouped_quantize(x, sizes, **given))


@named("name", ["at random", "all", "all squares"])
def test_a_shard_draws_as_in_the_whole(cupy, name):
    one = OPTIONS[name]
    x = testing.matrix("gauss", (160, 192), BFLOAT16)
    places = ((slice(0, 48), slice(64, 192)), (slice(48, 160), slice(0, 64)), (slice(16, 32), slice(32, 96)))
    for rows, columns in places:
        shard = hq.Shard((rows.start, columns.start), x.shape)
        given = {"rowwise": one, "columnwise": one, "amax": 4.0, "seed": SEED}
        expected = hq.quantize_shard(x[rows, columns], shard, **given)
        testing.assert_bitwise_equal(hq.quantize_shard(cupy.asarray(x)[rows, columns], shard, **given), expected)
        turned = cupy.asarray(np.ascontiguousarray(x[rows, columns].T)).T
        testing.assert_bitwise_equal(hq.quantize_shard(turned, shard, **given), expected)


@named("name", ["at random", "all"])
def test_a_shard_that_begins_with_an_odd_row_draws_as_in_the_whole(cupy, name):
    """And where the word of a counter that says which pair of rows it is overflows within it."""
    x = testing.matrix("gauss", (70, 192), BFLOAT16)
    for first in (1, 35, 2**33 - 4, 2**33 - 7):
        for direction, place in (("rowwise", (first, 32)), ("columnwise", (32, first))):
            values = x if direction == "rowwise" else x.T
            given = {direction: OPTIONS[name], "seed": SEED, "amax": 4.0}
            shard = hq.Shard(place, (2**34, 2**34))
            expected = hq.quantize_shard(values, shard, **given)
            testing.assert_bitwise_equal(hq.quantize_shard(cupy.asarray(values), shard, **given), expected)
