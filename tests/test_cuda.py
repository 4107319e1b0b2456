"""The CUDA kernels against reference.py, bit for bit."""

import numpy as np
import pytest

import hqarray as hq
from hqarray import testing
from hqarray.formats import BFLOAT16, FORMATS

pytestmark = pytest.mark.gpu

DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
NAMES = list(FORMATS)
RULES = ["mxfp8(rule=floor)", "mxfp8(rule=even)", "mxfp4(rule=floor)", "mxfp4(rule=even)", "mxfp6_e2m3(rule=even)",
         "fp8_e4m3(pow2=true)", "fp8_e5m2(epsilon=0.5)", "fp8_block_1x128(element=e5m2)",
         "fp8_block_128x128(epsilon=1e-4)"]


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def check(cupy, x, view=lambda x: x, **choices):
    """quantize on the GPU equals the reference, padding included; returns the array on the GPU."""
    expected = hq.quantize(view(x), **choices)
    actual = hq.quantize(view(cupy.asarray(x)), **choices)
    testing.assert_bitwise_equal(actual, expected)
    for _, part in actual.parts():
        testing.assert_code_padding_is_zero(part)
    return actual


@pytest.mark.parametrize("row", NAMES)
@pytest.mark.parametrize("column", NAMES)
def test_every_pair_equals_the_reference(cupy, row, column):
    for kind in ("gauss", "wide", "nans", "infinities"):
        x = testing.matrix(kind, (131, 264), BFLOAT16)
        check(cupy, x, rowwise=row, columnwise=column)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES + RULES)
def test_every_matrix_equals_the_reference(cupy, name, dtype):
    for kind in testing.MATRICES:
        x = testing.matrix(kind, (145, 280), DTYPES[dtype])
        check(cupy, x, rowwise=name, columnwise=name)
        check(cupy, x, rowwise=name)
        check(cupy, x, columnwise=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_shape_equals_the_reference(cupy, name, dtype):
    for shape in testing.SHAPES.values():
        check(cupy, testing.matrix("wide", shape, DTYPES[dtype]), rowwise=name, columnwise=name)


@pytest.mark.parametrize("name", NAMES)
def test_every_view_equals_the_reference(cupy, name):
    for dtype in DTYPES.values():
        x = testing.matrix("gauss", (150, 150), dtype)
        for view in testing.VIEWS.values():
            check(cupy, x, view, rowwise=name, columnwise=name)


@pytest.mark.parametrize("name", NAMES + RULES)
def test_every_bfloat16_equals_the_reference(cupy, name):
    bits = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)
    finite = bits[(bits & 0x7F80) != 0x7F80]
    for chosen in (bits, finite[: len(finite) // 256 * 256], np.arange(1 << 16, dtype=np.uint16)):
        check(cupy, chosen.view(BFLOAT16).reshape(-1, 256), rowwise=name, columnwise=name)


@pytest.mark.parametrize("name", NAMES + RULES)
def test_any_float32_equals_the_reference(cupy, name):
    bits = np.random.default_rng(1).integers(0, 1 << 32, (512, 512), dtype=np.uint64).astype(np.uint32)
    check(cupy, bits.view(np.float32), rowwise=name, columnwise=name)
    exponent = np.random.default_rng(2).integers(90, 160, (512, 512)).astype(np.uint32)
    check(cupy, ((bits & 0x807FFFFF) | exponent << 23).view(np.float32), rowwise=name, columnwise=name)


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_equals_the_reference(cupy, name):
    for dtype in DTYPES.values():
        for kind, shape in (("wide", (145, 280)), ("nans", (33, 129)), ("infinities", (40, 64)), ("gauss", (19, 1))):
            x = testing.matrix(kind, shape, dtype)
            expected = hq.quantize(x, rowwise=name, columnwise=name)
            actual = hq.quantize(cupy.asarray(x), rowwise=name, columnwise=name)
            for source in ("rowwise", "columnwise"):
                for out in DTYPES.values():
                    testing.assert_bitwise_equal(
                        actual.dequantize(source=source, dtype=out), expected.dequantize(source=source, dtype=out)
                    )


@pytest.mark.parametrize("name", NAMES)
def test_derived_columns_equal_the_reference(cupy, name):
    x = testing.matrix("wide", (145, 280), BFLOAT16)
    check(cupy, x, rowwise=name, columnwise="mxfp8", columnwise_source="rowwise_dequantized")
    check(cupy, x, rowwise="nvfp4", columnwise=name, columnwise_source="rowwise_dequantized")


@pytest.mark.parametrize("name", NAMES)
def test_requantize_writes_every_byte_of_the_same_buffers(cupy, name):
    x = testing.matrix("wide", (145, 280), BFLOAT16)
    array = hq.quantize(cupy.asarray(x), rowwise=name, columnwise=name)
    pointers = [part.codes.data.ptr for _, part in array.parts()]
    new = testing.matrix("gauss", (145, 280), BFLOAT16)
    testing.poison(array)
    hq.requantize(array, cupy.asarray(new))
    testing.assert_bitwise_equal(array, hq.quantize(new, rowwise=name, columnwise=name))
    assert pointers == [part.codes.data.ptr for _, part in array.parts()]
    for flag, expected in ((1.0, new), (0.0, x)):
        hq.requantize(array, cupy.asarray(x), noop=cupy.asarray([flag], np.float32))
        testing.assert_bitwise_equal(array, hq.quantize(expected, rowwise=name, columnwise=name))


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].measures_amax])
def test_a_given_amax_is_used(cupy, name):
    x = testing.matrix("gauss", (145, 280), BFLOAT16)
    for amax in (0.5, 100.0, 0.0, float("inf"), 1e-40):
        given = np.array([amax], np.float32)
        expected = hq.quantize(x, rowwise=name, columnwise=name, amax=given)
        actual = hq.quantize(cupy.asarray(x), rowwise=name, columnwise=name, amax=cupy.asarray(given))
        testing.assert_bitwise_equal(actual, expected)


def test_amax_equals_the_reference(cupy):
    for dtype in DTYPES.values():
        for kind in testing.MATRICES:
            for shape in testing.SHAPES.values():
                x = testing.matrix(kind, shape, dtype)
                testing.assert_bitwise_equal(hq.amax(cupy.asarray(x)), hq.amax(x))




@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].transposable])
def test_moved_codes_equal_quantized_columns(cupy, name):
    for shape in ((145, 280), (256, 128), (1, 33), (300, 17), (0, 5), (5, 0)):
        x = testing.matrix("wide", shape, BFLOAT16)
        expected = hq.quantize(x, rowwise=name, columnwise=name)
        array = hq.quantize(cupy.asarray(x), rowwise=name).with_columnwise()
        testing.assert_bitwise_equal(array.columnwise, expected.columnwise)
        testing.assert_code_padding_is_zero(array.columnwise)


def test_float64_is_rounded_as_the_reference_does(cupy):
    wide = np.random.default_rng(0).integers(0, 1 << 63, (145, 280), dtype=np.int64).view(np.float64)
    near = testing.matrix("subnormals", (145, 280)).astype(np.float64) * 1.37
    for x in (wide, near, testing.matrix("gauss", (145, 280)).astype(np.float64) * (1 + 2.0**-40)):
        for view in testing.VIEWS.values():
            check(cupy, x, view, rowwise="mxfp8", columnwise="nvfp4")
            check(cupy, x, view, rowwise="fp32")
        testing.assert_bitwise_equal(hq.amax(cupy.asarray(x)), hq.amax(x))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_flag_of_four_bytes_is_read(cupy, dtype):
    x = testing.matrix("gauss", (33, 64), BFLOAT16)
    array = hq.quantize(cupy.asarray(x), rowwise="nvfp4", columnwise="mxfp8")
    flags = cupy.asarray(np.array([-0.0, 1, 0, -3], dtype))
    for number, skipped in enumerate((False, True, False, True)):
        hq.requantize(array, cupy.asarray(x) * 2, noop=flags[number : number + 1])
        doubled = testing.matrix("gauss", (33, 64), BFLOAT16) * 2
        expected = hq.quantize(x if skipped else doubled, rowwise="nvfp4", columnwise="mxfp8")
        testing.assert_bitwise_equal(array, expected)
        hq.requantize(array, cupy.asarray(x))


def test_what_lies_elsewhere_is_refused(cupy):
    x = testing.matrix("gauss", (33, 64))
    array = hq.quantize(cupy.asarray(x), rowwise="nvfp4")
    host = hq.quantize(x, rowwise="nvfp4")
    for call, error, message in (
        (lambda: hq.requantize(array, x), ValueError, "the array is on cuda:0 and the values are on the host"),
        (lambda: hq.requantize(host, cupy.asarray(x)), ValueError, "the array is on the host"),
        (lambda: hq.requantize(array, cupy.asarray(x), noop=np.zeros(1, np.int32)), ValueError, "noop is on the host"),
        (lambda: hq.requantize(array, cupy.asarray(x), noop=1), TypeError, "not a number"),
        (lambda: hq.requantize(array, cupy.asarray(x), noop=cupy.ones(1)), TypeError, "float32 or int32, not float64"),
        (lambda: hq.quantize(cupy.asarray(x), rowwise="nvfp4", amax=np.ones(1, np.float32)), ValueError, "amax is on"),
        (lambda: hq.HybridArray(array.rowwise, hq.quantize(x, columnwise="bf16").columnwise), ValueError, "one device"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_a_number_is_taken_as_amax(cupy):
    x = testing.matrix("gauss", (33, 64))
    testing.assert_bitwise_equal(hq.quantize(cupy.asarray(x), rowwise="nvfp4", columnwise="fp8_e4m3", amax=3.5),
                                 hq.quantize(x, rowwise="nvfp4", columnwise="fp8_e4m3", amax=3.5))
