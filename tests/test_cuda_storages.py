"""Rotated parts, scales of rows and squares of MX on the GPU: decoded, moved and multiplied as the reference does.

The parts are the reference's, copied: what a GPU can quantize does not matter here.
"""

import itertools

import numpy as np
import pytest
from moved import array_on_gpu, on_gpu
from test_gemm_cuda import DTYPES, RAGGED, ROUNDING, bound
from test_grouped_gemm_cuda import some

import hqarray as hq
from hqarray import cublaslt_grouped, reference, testing
from hqarray.formats import BFLOAT16, ROW, as_format
from hqarray.hadamard import SIZE

pytestmark = pytest.mark.gpu

named = pytest.mark.parametrize
ROTATED = ("nvfp4(rht=true)", "nvfp4_16x16(rht=true)", "nvfp4(rht=true,per_row=true)")
BY_ROW = ("fp8_row_e4m3", "fp8_row_e4m3(element=e5m2)", "fp8_row_e4m3(pow2=true)", "nvfp4_row")
NAMES = (*ROTATED, *BY_ROW, "mxfp8_32x32", "nvfp4(four_over_six=mse,global_bound=256)")
PAIRS = (
    *itertools.product(ROTATED, repeat=2), *itertools.product(BY_ROW, repeat=2),
    *((row, other) for row in BY_ROW for other in ("fp8_e4m3", "fp8_block_1x128", "mxfp8", "nvfp4", "bf16", "fp32")),
    *((other, row) for row in BY_ROW for other in ("fp8_e5m2", "fp8_block_128x128", "mxfp4", "nvfp4", "bf16")),
    ("mxfp8_32x32", "mxfp8"), ("nvfp4", "mxfp8_32x32"), ("mxfp8_32x32", "mxfp8_32x32"),
)
SHAPES = [(145, 280), (33, 129), (40, 64), (19, 1), (1, 15), (7, 17), (130, 1000), (300, 47), (0, 48), (5, 0)]
SIZES = {"ragged": [0, 128, 0, 130, 65, 0], "one row each": [1] * 42, "few": [3, 0, 17, 48, 33, 1], "none": [0, 0, 0]}


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def both(name, shape, kind="wide", dtype=BFLOAT16, seed=0):
    """The array with both parts, as the reference quantizes it."""
    return hq.quantize(testing.matrix(kind, shape, dtype, seed=seed), rowwise=name, columnwise=name,
                       **({"seed": 7} if as_format(name).is_stochastic else {}))


# --- decode and move ----------------------------------------------------------------------------


@named("kind", ["wide", "gauss", "nans", "infinities", "huge", "subnormals", "negative_zeros", "zero_rows"])
@named("name", NAMES)
def test_values_are_those_of_the_reference(cupy, name, kind):
    """Both directions, to every dtype, of widths that are no multiple of 16."""
    for shape in SHAPES if kind in ("wide", "nans") else SHAPES[:3]:
        expected = both(name, shape, kind)
        actual = array_on_gpu(cupy, expected)
        for source, out in itertools.product(("rowwise", "columnwise"), DTYPES.values()):
            testing.assert_bitwise_equal(actual.dequantize(source=source, dtype=out),
                                         expected.dequantize(source=source, dtype=out))
            testing.assert_bitwise_equal(actual.T.dequantize(source=source, dtype=out),
                                         expected.T.dequantize(source=source, dtype=out))


@named("name", NAMES)
def test_values_of_any_codes_are_those_of_the_reference(cupy, name):
    """Random bytes for codes and scales: every code beside every other, NaN and subnormal scales among them."""
    rng = np.random.default_rng(0)
    array = both(name, (72, 200), "gauss")
    for _, part in array.parts():
        part.codes[...] = rng.integers(0, 256, part.codes.shape)
        if part.scales.dtype == np.uint8:
            part.scales[...] = rng.integers(0, 256, part.scales.shape)
        else:
            part.scales[...] = testing.matrix("wide", part.scales.shape)
        if part.global_scale is not None:
            part.global_scale[...] = testing.matrix("wide", part.global_scale.shape)
    actual = array_on_gpu(cupy, array)
    for source, out in itertools.product(("rowwise", "columnwise"), DTYPES.values()):
        testing.assert_bitwise_equal(actual.dequantize(source=source, dtype=out),
                                     array.dequantize(source=source, dtype=out))


def test_foreign_buffers_are_packed_first(cupy):
    for name in NAMES:
        part = both(name, (37, 66)).rowwise
        buffers = [None if array is None else cupy.asarray(array) for array in (part.codes, part.scales,
                                                                              part.global_scale)]
        theirs = hq.QuantizedArray.from_buffers(*buffers[:2], part.format, part.shape, global_scale=buffers[2])
        testing.assert_bitwise_equal(hq.HybridArray(theirs).dequantize(), hq.HybridArray(part).dequantize())


@named("shape", [shape for shape in SHAPES if all(shape)], ids=str)
@named("name", [name for name in NAMES if as_format(name).transposable])
def test_columns_by_moving_codes_are_those_of_the_reference(cupy, name, shape):
    expected = hq.quantize(testing.matrix("wide", shape, BFLOAT16), rowwise=name)
    actual = array_on_gpu(cupy, expected).with_columnwise()
    testing.assert_bitwise_equal(actual, expected.with_columnwise())
    for _, part in actual.parts():
        testing.assert_code_padding_is_zero(part)


@named("alignment", [1, 16])
@named("k", [96, 33, 200])
@named("sizes", SIZES.values(), ids=SIZES)
@named("name", NAMES)
def test_values_of_groups_are_those_of_the_reference(cupy, name, sizes, k, alignment):
    rows = sum(-(-n // alignment) * alignment for n in sizes) + 9
    x = testing.matrix("wide", (rows, k), BFLOAT16)
    expected = hq.grouped_quantize(x, sizes, rowwise=name, columnwise=name, alignment=alignment)
    actual = array_on_gpu(cupy, expected)
    for source, out in itertools.product(("rowwise", "columnwise"), (BFLOAT16, np.dtype(np.float32))):
        testing.assert_bitwise_equal(actual.dequantize(source=source, dtype=out),
                                     expected.dequantize(source=source, dtype=out))
    for i in some(len(sizes)):
        testing.assert_bitwise_equal(actual[i].dequantize(), expected[i].dequantize())
    for ours, theirs in zip(actual.split(3), expected.split(3), strict=True):
        testing.assert_bitwise_equal(ours.dequantize(), theirs.dequantize())


@named("name", NAMES)
def test_values_of_members_of_one_shape_are_those_of_the_reference(cupy, name):
    for n in (64, 5):
        stacked = testing.matrix("wide", (3 * n, 96), BFLOAT16).reshape(3, n, 96)
        expected = hq.GroupedArray.from_stacked(stacked, rowwise=name, columnwise=name)
        actual = array_on_gpu(cupy, expected)
        for source in ("rowwise", "columnwise"):
            testing.assert_bitwise_equal(actual.dequantize(source=source), expected.dequantize(source=source))


# --- products -------------------------------------------------------------------------------------


def operands(cupy, names, m, k, n, kind="wide"):
    """Parts of a (m, k) and of b (n, k) as the reference made them, and the arrays a (m, k) and b (k, n) on the GPU."""
    parts = [hq.quantize(np.clip(testing.matrix(kind, (outer, k), seed=i), -3e4, 3e4), rowwise=name).rowwise
             for i, (name, outer) in enumerate(zip(names, (m, n), strict=True))]
    left, right = (on_gpu(cupy, part) for part in parts)
    return parts, hq.HybridArray(left), hq.HybridArray(right).T


def stored(part):
    """float64 of what a product multiplies: rotated values stay so."""
    return reference.dequantize_part(part, np.dtype(np.float32), rotated=True).astype(np.float64)


def assert_product(actual, parts, a, engine, bias=None, added=None, where=""):
    """Row by row within the bound of the float64 product of the reference's operands."""
    x, y = (stored(part) for part in parts)
    exact, magnitude = x @ y.T, np.abs(x) @ np.abs(y).T
    tolerance = bound(engine, a, None) * magnitude
    if bias is not None:
        exact = exact + bias
        tolerance += 2.0**-23 * (np.abs(bias) + np.abs(exact))
    if added is not None:
        exact = exact + added
    tolerance += ROUNDING[actual.dtype.name] * np.abs(exact) + 2.0**-126
    error = np.abs(actual.get().astype(np.float64) - exact)
    wrong = ~(error <= tolerance)
    assert not wrong.any(), f"{where} rows {np.flatnonzero(wrong.any(1))[:8]}: {(error / tolerance).max()} of the bound"


@named("names", PAIRS, ids="-".join)
def test_a_product_is_within_the_bound_of_its_operands(cupy, names):
    for m, k, n in (*RAGGED, (128, 256, 64), (200, 1000, 136)):
        parts, a, b = operands(cupy, names, m, k, n)
        assert_product(a @ b, parts, a, hq.engine_for(a, b).name, where=f"{m, k, n}")


@named("names", [("fp8_row_e4m3", "fp8_row_e4m3"), ("fp8_row_e4m3", "fp8_row_e4m3(element=e5m2)"),
                 ("fp8_row_e4m3(element=e5m2)", "fp8_row_e4m3(pow2=true)")], ids="-".join)
def test_scales_of_rows_are_multiplied_natively_on_hopper(cupy, names):
    """Every way out of cuBLASLt: in place, padded, with a bias, added to what is there, in each dtype."""
    for m, k, n in (*RAGGED, (128, 256, 64), (200, 1000, 136), (16, 16, 16), (1, 4096, 8), (257, 77, 8)):
        parts, a, b = operands(cupy, names, m, k, n, "gauss")  # float16 holds the sums
        engine = hq.engine_for(a, b)
        if cupy.cuda.Device().compute_capability != "90":
            assert engine.name != "native" and "sm_90 only" in engine.reason
            return
        assert engine.name == "native"
        for dtype in DTYPES.values():
            assert_product(hq.matmul(a, b, out_dtype=dtype), parts, a, "native", where=f"{m, k, n} {dtype}")
            bias = testing.matrix("gauss", (n,), dtype)
            y = hq.matmul(a, b, out_dtype=dtype, bias=cupy.asarray(bias))
            assert_product(y, parts, a, "native", bias.astype(np.float64), where=f"{m, k, n} {dtype} with a bias")
        out = cupy.asarray(testing.matrix("gauss", (m, n)))
        before = out.get().astype(np.float64)
        assert hq.matmul(a, b, out=out, accumulate=True) is out
        assert_product(out, parts, a, "native", added=before, where=f"{m, k, n} added")
        wide = cupy.full((m, n + 24), np.nan, np.float32)
        hq.matmul(a, b, out=wide[:, :n])
        assert_product(wide[:, :n], parts, a, "native", where=f"{m, k, n} in a view")
        assert cupy.isnan(wide[:, n:]).all()


def test_each_row_of_a_native_product_has_its_own_scale(cupy):
    """Scales that differ from row to row by powers of two: no row or column takes a neighbour's."""
    m, k, n = 37, 48, 50
    parts, a, b = operands(cupy, ("fp8_row_e4m3", "fp8_row_e4m3"), m, k, n, "gauss")
    rows, columns = (2.0 ** (np.arange(count) % 21 - 10) for count in (m, n))
    for part, moved, scales in zip(parts, (a.rowwise, b.columnwise), (rows, columns), strict=True):
        part.scales[...] = scales[:, None]
        moved.scales[...] = cupy.asarray(scales.astype(np.float32))[:, None]
    assert_product(a @ b, parts, a, hq.engine_for(a, b).name)


@named("name", BY_ROW)
def test_emulated_operands_are_exact(cupy, name):
    """A product with the unit matrix gives each value back, scales of its row and all."""
    unit = cupy.eye(90, dtype=np.float32).astype(BFLOAT16)
    engine = "bf16" if as_format(name).storage.bf16_terms == 1 else "bf16x3"
    for kind in ("wide", "ties", "tiny", "huge", "subnormals"):
        array = hq.quantize(testing.matrix(kind, (37, 90)), rowwise=name)
        y = hq.matmul(array_on_gpu(cupy, array), unit, engine=engine, out_dtype=np.float32)
        expected = stored(array.rowwise)
        slack = 2.0**-23 if engine == "bf16x3" else 0  # the tensor core's last bit
        assert (np.abs(y.get().astype(np.float64) - expected) <= slack * np.abs(expected) + 2.0**-126).all(), kind


@named("engine", ["bf16x3", "fp32"])
@named("name", BY_ROW)
def test_an_engine_that_is_asked_for_multiplies(cupy, engine, name):
    for m, k, n in RAGGED:
        parts, a, b = operands(cupy, (name, "mxfp8"), m, k, n)
        assert_product(hq.matmul(a, b, engine=engine), parts, a, engine)
        parts, a, b = operands(cupy, ("mxfp8", name), m, k, n)
        assert_product(hq.matmul(a, b, engine=engine), parts, a, engine)


# --- products of groups ---------------------------------------------------------------------------

GROUPED = (("nvfp4(rht=true)", "nvfp4_16x16(rht=true)"), ("nvfp4_row", "mxfp8"), ("bf16", "nvfp4_row"),
           ("fp8_row_e4m3", "nvfp4"), ("fp8_e4m3", "fp8_row_e4m3"), ("mxfp8_32x32", "nvfp4_row"),
           ("fp8_row_e4m3(pow2=true)", "mxfp8"), ("nvfp4(rht=true,per_row=true)", "nvfp4(rht=true)"))
"""Every new operand beside one that bf16 holds, so that a grouped product has an engine for the two."""


def has_grouped(cupy):
    from hqarray import cublaslt

    chip = int(cupy.cuda.Device().compute_capability[:-1])
    return cublaslt.library().get_version() >= cublaslt_grouped.OLDEST.get(chip, 1 << 30)


def groups(cupy, names, sizes, ragged, each=(48, 64, 96)):
    """The reference's members (left and right parts) and the group on the GPU: ragged rows, or ragged k."""
    m, n, k = each
    total = sum(sizes)
    if ragged == "rows":
        x, w = testing.matrix("gauss", (total, k)), testing.matrix("gauss", (len(sizes) * n, k), seed=1)
        a = hq.grouped_quantize(x, sizes, rowwise=names[0])
        b = hq.GroupedArray.from_stacked(w.reshape(len(sizes), n, k), rowwise=names[1]).T
    else:
        x, y = testing.matrix("gauss", (total, m)), testing.matrix("gauss", (total, n), seed=1)
        a = hq.grouped_quantize(x, sizes, columnwise=names[0]).T
        b = hq.grouped_quantize(y, sizes, columnwise=names[1])
    members = list(zip(a.rowwise.members(), b.columnwise.members(), strict=True))
    return members, array_on_gpu(cupy, a), array_on_gpu(cupy, b)


def assert_members(cupy, y, members, a, sizes, ragged, engine):
    starts = np.cumsum([0, *sizes])
    for i in some(len(sizes)):
        actual = y[starts[i] : starts[i + 1]] if ragged == "rows" else y[i]
        if actual.size and sizes[i]:
            left = hq.HybridArray(on_gpu(cupy, members[i][0]))
            assert_product(actual, members[i], left, engine, where=f"member {i}")
        else:
            assert not actual.any()


@named("sizes", SIZES.values(), ids=SIZES)
@named("ragged", ["rows", "k"])
@named("names", GROUPED, ids="-".join)
def test_products_of_groups_are_within_the_bound(cupy, names, ragged, sizes):
    if not has_grouped(cupy):
        pytest.skip("this cuBLASLt has no grouped products for this chip")
    members, a, b = groups(cupy, names, sizes, ragged)
    terms = sorted(as_format(name).storage.bf16_terms for name in names)
    engine = "bf16" if terms == [1, 1] else "bf16x3"
    assert_members(cupy, hq.matmul(a, b, out_dtype=np.float32), members, a, sizes, ragged, engine)


@named("ragged", ["rows", "k"])
def test_groups_with_a_scale_for_each_row_are_multiplied_one_by_one(cupy, ragged):
    """cuBLASLt has no grouped layout for them: natively member by member, where the sizes are on the host."""
    sizes = SIZES["few"]
    members, a, b = groups(cupy, ("fp8_row_e4m3", "fp8_row_e4m3"), sizes, ragged)
    engine = hq.engine_for(a[2], b[2]).name
    assert_members(cupy, hq.matmul(a, b, out_dtype=np.float32), members, a, sizes, ragged, engine)


def test_lengths_of_rotated_rows_that_are_no_multiple_of_16_were_tested():
    assert any(k % SIZE for _, k in SHAPES) and max(k for _, k in SHAPES) < ROW
