"""The public functions: what they accept, what they refuse and how they say it, and rewriting in place."""

import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import testing
from hqarray.formats import FORMATS

named = pytest.mark.parametrize
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
X = testing.matrix("gauss", (20, 48))


def addresses(array):
    return [part.buffers.base.__array_interface__["data"][0] for _, part in array.parts()]


# --- quantize -------------------------------------------------------------------------------------


@named("dtype", [np.int8, np.int32, np.int64, np.uint8, bool, np.complex64, ml_dtypes.float8_e4m3fn], ids=str)
@named("call", [lambda x: hq.quantize(x, rowwise="mxfp8"), lambda x: hq.fake_quantize(x, "mxfp8"), hq.amax,
                lambda x: hq.requantize(hq.quantize(X, rowwise="mxfp8"), x), lambda x: hq.matmul(x, X.T),
                lambda x: hq.engine_for(X.T, x)],
       ids=["quantize", "fake_quantize", "amax", "requantize", "matmul", "engine_for"])
def test_a_dtype_that_is_no_float_is_a_type_error(call, dtype):
    with pytest.raises(TypeError, match=r"has dtype .*; float32, float16, bfloat16 and float64 are read, use \.astype"):
        call(np.zeros((20, 48), dtype))


@named("values", [[[1.0, 2.0]], 3.0, "text", None], ids=str)
def test_what_is_no_array_is_a_type_error_with_the_remedy(values):
    with pytest.raises(TypeError, match=r"values is .*; pass a NumPy or CuPy array, or one that offers DLPack"):
        hq.quantize(values, rowwise="mxfp8")


@named(("options", "error", "message"), [
    ({}, ValueError, "quantize needs rowwise=, columnwise= or both, for example rowwise='mxfp8'"),
    ({"rowwise": "mxfp9"}, ValueError, "unknown format 'mxfp9'"),
    ({"rowwise": 8}, TypeError, "a format is a short name or a Format"),
    ({"rowwise": "mxfp8", "columnwise_source": "rows"}, ValueError,
     "columnwise_source='rows' is not 'original' or 'rowwise_dequantized'"),
    ({"columnwise": "mxfp8", "columnwise_source": "rowwise_dequantized"}, ValueError,
     "columnwise_source='rowwise_dequantized' needs rowwise= as well"),
    ({"rowwise": "mxfp8", "columnwise": "bf16", "amax": 1.0}, ValueError,
     r"amax= is for formats with one amax per matrix \(FP8, NVFP4\), and mxfp8, bf16 have none"),
    ({"rowwise": "nvfp4", "amax": np.ones(2, np.float32)}, ValueError,
     r"amax is one float32 \(hq.amax\(x\) makes it\), not float32 of shape \(2,\)"),
    ({"rowwise": "nvfp4", "amax": np.ones(1)}, ValueError, "amax is one float32 .*not float64"),
    ({"rowwise": "nvfp4", "amax": "1"}, ValueError, "amax is one float32 .*not str"),
])
def test_quantize_says_what_it_expected(options, error, message):
    with pytest.raises(error, match=message):
        hq.quantize(X, **options)


@named("amax", [0.0, float("inf"), *(np.array([value], np.float32) for value in (0, -1, np.nan, np.inf))], ids=repr)
def test_a_given_amax_that_scales_nothing_means_scale_one(amax):
    array = hq.quantize(X, rowwise="fp8_e4m3", columnwise="nvfp4", amax=amax)
    assert array.rowwise.scales.item() == array.columnwise.global_scale.item() == 1.0
    testing.assert_in_rounding_cell(X, array)


@named("amax", [-1.0, float("nan"), -1, np.float32(-2)], ids=repr)
def test_a_number_that_is_no_magnitude_is_refused_as_amax(amax):
    with pytest.raises(ValueError, match=f"amax is a magnitude, not {float(amax)}"):
        hq.quantize(X, rowwise="fp8_e4m3", amax=amax)


def test_a_matrix_of_numpy_is_read_as_an_array():
    matrix = np.asarray(X).view(np.matrix)
    testing.assert_bitwise_equal(hq.quantize(matrix, rowwise="mxfp8"), hq.quantize(X, rowwise="mxfp8"))
    product = hq.matmul(matrix, matrix.T, activation="gelu")
    testing.assert_bitwise_equal(product, hq.matmul(X, X.T, activation="gelu"))


def test_a_masked_array_is_refused():
    with pytest.raises(TypeError, match=re.escape("values is a masked array, and a mask has no code; use .filled(")):
        hq.quantize(np.ma.masked_array(X, X > 0), rowwise="mxfp8")


def test_another_byte_order_is_refused():
    with pytest.raises(TypeError, match=re.escape("values has dtype >f4; float32, float16, bfloat16 and float64 are "
                                                  "read in this machine's byte order, use .astype('float32')")):
        hq.quantize(X.astype(">f4"), rowwise="mxfp8")


def test_outputs_that_share_memory_are_refused():
    y = np.zeros((X.shape[0], X.shape[0]), np.float32)
    with pytest.raises(ValueError, match="out and aux share memory"):
        hq.matmul(X, X.T, out=(y, y), accumulate=True)
    with pytest.raises(ValueError, match="out has a stride of 0"):
        hq.matmul(X, X.T, out=np.broadcast_to(y[:1], y.shape))
    for out in ((y,), (y, y.copy(), y.copy()), ()):
        with pytest.raises(TypeError, match=re.escape(f"not a tuple of {len(out)}")):
            hq.matmul(X, X.T, out=out)
    with pytest.raises(TypeError, match="out is a NumPy or CuPy array, not list"):
        hq.matmul(X, X.T, out=[1.0])


def test_requantizing_from_the_own_buffers_reads_them_first():
    square = testing.matrix("gauss", (32, 32))
    array = hq.quantize(square, rowwise="fp32", columnwise="fp32")
    hq.requantize(array, array.rowwise.codes.T)
    testing.assert_bitwise_equal(array, hq.quantize(square.T, rowwise="fp32", columnwise="fp32"))


def test_a_read_only_part_is_refused_before_the_other_is_written():
    array = hq.quantize(X, rowwise="mxfp8", columnwise="nvfp4")
    array.columnwise.buffers.memory.setflags(write=False)
    before = array.rowwise.copy()
    with pytest.raises(ValueError, match=r"is read-only; \.copy"):
        hq.requantize(array, X + 1)
    testing.assert_bitwise_equal(array.rowwise, before)


@named(("call", "message"), [
    (hq.dequantize, "dequantize takes a HybridArray, not QuantizedArray; wrap it: HybridArray("),
    (lambda part: hq.requantize(part, X), "requantize takes a HybridArray, not QuantizedArray; wrap it: HybridArray"),
    (lambda part: hq.with_columnwise(X), "with_columnwise takes a HybridArray, not ndarray; quantize(x, ...) makes"),
    (lambda part: hq.matmul(part, X.T), "a is one part of an array; wrap it: HybridArray(rowwise=part)"),
    (lambda part: hq.quantize(hq.HybridArray(part), rowwise="mxfp8"), "values is a HybridArray already; .dequantize()"),
])
def test_a_container_in_the_wrong_place_says_what_to_do(call, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        call(hq.quantize(X, rowwise="mxfp8").rowwise)


@named("noop", ["no", [1], None, {}], ids=repr)
def test_a_flag_is_one_number(noop):
    array = hq.quantize(X, rowwise="mxfp8")
    if noop is None:
        hq.requantize(array, X, noop=noop)
        return
    with pytest.raises(TypeError, match="noop is an array of one number"):
        hq.requantize(array, X, noop=noop)


def test_matmul_leaves_operands_it_does_not_know_to_them():
    class Other:
        def __rmatmul__(self, left):
            return "theirs"

    assert hq.quantize(X, rowwise="mxfp8") @ Other() == "theirs"


def test_a_scalar_has_no_last_axis():
    for call in (lambda x: hq.quantize(x, rowwise="mxfp8"), hq.amax):
        with pytest.raises(ValueError, match=re.escape("values is 0-D; a matrix has at least one axis, reshape it")):
            call(np.array(1.0, np.float32))


@named("amax", [3.0, 3, np.float32(3), *(np.full(shape, 3, np.float32) for shape in ((), (1,), (1, 1)))], ids=repr)
def test_a_given_amax_may_be_a_number_or_an_array(amax):
    array = hq.quantize(X, rowwise="fp8_e4m3", columnwise="nvfp4", amax=amax)
    assert array.rowwise.amax.tolist() == array.columnwise.amax.tolist() == [3.0]


def test_a_given_amax_is_used_by_the_parts_that_have_one():
    array = hq.quantize(X, rowwise="mxfp8", columnwise="fp8_e4m3", amax=3.0)
    testing.assert_bitwise_equal(array.rowwise, hq.quantize(X, rowwise="mxfp8").rowwise)
    assert array.rowwise.amax is None and array.columnwise.amax.item() == 3.0


def test_quantizing_does_not_touch_its_input_or_share_with_it():
    for format in FORMATS:
        values = X.copy()
        values.setflags(write=False)
        array = hq.quantize(values, rowwise=format, columnwise=format)
        testing.assert_bitwise_equal(values, X)
        assert all(not np.shares_memory(part.buffers.base, values) for _, part in array.parts())


@named("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@named("format", FORMATS)
def test_fake_quantize_is_quantize_and_decode(format, dtype):
    values = X.astype(dtype)
    actual = hq.fake_quantize(values, format)
    testing.assert_bitwise_equal(actual, hq.quantize(values, rowwise=format).dequantize())
    assert actual.dtype == dtype and actual.shape == values.shape


@named("format", ["fp32", hq.HighPrecision()], ids=str)
def test_an_unquantized_part_is_a_copy_of_the_values(format):
    array = hq.quantize(X, rowwise=format, columnwise=format)
    testing.assert_bitwise_equal(array.rowwise.codes.copy(), X)
    testing.assert_bitwise_equal(array.columnwise.codes.copy(), X.T.copy())
    assert array.rowwise.scales.shape == (0, 0) and array.rowwise.format.name == "fp32"


# --- requantize -----------------------------------------------------------------------------------


@named("source", ["original", "rowwise_dequantized"])
@named("columnwise", [None, "nvfp4", "fp8_block_128x128", "bf16"])
@named("rowwise", FORMATS)
def test_requantize_rewrites_poisoned_buffers_in_place(rowwise, columnwise, source):
    for shape in ((20, 48), (19, 33), (0, 5)):
        first, second = (testing.matrix("wide", shape, seed=seed) for seed in (0, 1))
        options = {"rowwise": rowwise, "columnwise": columnwise, "columnwise_source": source}
        array = hq.quantize(first, **options)
        before, parts = addresses(array), list(array.parts())
        testing.poison(array)
        hq.requantize(array, second)
        testing.assert_bitwise_equal(array, hq.quantize(second, **options))
        assert addresses(array) == before and [part for _, part in parts] == [part for _, part in array.parts()]
        for _, part in array.parts():
            testing.assert_code_padding_is_zero(part)


@named("noop", [1, 1.0, True, np.float32(1), np.array([1], np.float32), np.array(1, np.int32)], ids=repr)
def test_a_noop_that_is_not_zero_leaves_everything(noop):
    array = hq.quantize(X, rowwise="nvfp4", columnwise="mxfp8")
    before = array.copy()
    hq.requantize(array, 2.5 * X, noop=noop)
    testing.assert_bitwise_equal(array, before)


@named("noop", [None, 0, 0.0, False, np.array([0], np.float32)], ids=repr)
def test_a_noop_of_zero_quantizes(noop):
    array = hq.quantize(X, rowwise="nvfp4", columnwise="mxfp8")
    hq.requantize(array, 2.5 * X, noop=noop)
    testing.assert_bitwise_equal(array, hq.quantize(np.float32(2.5) * X, rowwise="nvfp4", columnwise="mxfp8"))


def test_requantize_of_a_transpose_rewrites_the_same_buffers():
    for source in ("original", "rowwise_dequantized"):
        options = {"rowwise": "mxfp8", "columnwise": "nvfp4", "columnwise_source": source}
        array = hq.quantize(X, **options)
        hq.requantize(array.T, (X * np.float32(1.5)).T)
        testing.assert_bitwise_equal(array, hq.quantize(X * np.float32(1.5), **options))


def test_requantize_of_borrowed_buffers_writes_into_them():
    part = hq.quantize(X, rowwise="nvfp4").rowwise
    codes, scales, g = part.codes.copy(), part.scales.copy(), part.global_scale.copy()
    array = hq.HybridArray(hq.QuantizedArray.from_buffers(codes, scales, "nvfp4", X.shape, global_scale=g))
    hq.requantize(array, X * np.float32(1.7))
    expected = hq.quantize(X * np.float32(1.7), rowwise="nvfp4").rowwise
    for ours, theirs in ((codes, expected.codes), (scales, expected.scales), (g, expected.global_scale)):
        testing.assert_bitwise_equal(ours, theirs.copy())


def test_requantize_refuses_what_does_not_fit_and_changes_nothing():
    derived = hq.quantize(X, rowwise="mxfp8", columnwise="nvfp4", columnwise_source="rowwise_dequantized")
    for array, values, options, message in (
        (derived, X[:, :47], {}, r"requantize needs values of shape \(20, 48\), these have \(20, 47\)"),
        (derived, X, {"noop": np.zeros(2)}, r"noop is one element, not \(2,\)"),
        (derived.drop(rowwise=True), X, {},
         "the columnwise part was quantized from what the rowwise part decodes to, and that was dropped"),
    ):
        before = array.copy()
        with pytest.raises(ValueError, match=message):
            hq.requantize(array, values, **options)
        testing.assert_bitwise_equal(array, before)


def test_rows_stay_requantizable_when_derived_columns_are_dropped():
    options = {"rowwise": "mxfp8", "columnwise": "nvfp4", "columnwise_source": "rowwise_dequantized"}
    rows = hq.quantize(X, **options).drop(columnwise=True)
    hq.requantize(rows, 2 * X)
    testing.assert_bitwise_equal(rows.rowwise, hq.quantize(2 * X, rowwise="mxfp8").rowwise)


# --- dequantize -----------------------------------------------------------------------------------


@named(("rowwise", "columnwise", "source"), [
    ("mxfp8", "nvfp4", "rowwise"), ("nvfp4", "mxfp8", "columnwise"), ("mxfp8", "fp8_e4m3", "rowwise"),
    ("mxfp8_e5m2", "mxfp8", "columnwise"), ("mxfp8", "bf16", "columnwise"), ("fp16", "bf16", "rowwise"),
    ("mxfp4", None, "rowwise"), (None, "mxfp4", "columnwise"), ("mxfp6_e3m2", "mxfp6_e2m3", "columnwise"),
])
def test_the_more_precise_part_is_decoded_rows_on_a_tie(rowwise, columnwise, source):
    array = hq.quantize(X, rowwise=rowwise, columnwise=columnwise)
    testing.assert_bitwise_equal(array.dequantize(), array.dequantize(source=source))


def test_the_source_of_derived_columns_is_decoded():
    array = hq.quantize(X, rowwise="mxfp4", columnwise="bf16", columnwise_source="rowwise_dequantized")
    testing.assert_bitwise_equal(array.dequantize(), array.dequantize(source="rowwise"))
    testing.assert_bitwise_equal(array.T.dequantize(), array.dequantize().T)


@named("dtype", [np.float32, np.float16, BFLOAT16, "float16", "bfloat16"], ids=str)
def test_dequantize_gives_the_dtype_asked_for(dtype):
    array = hq.quantize(X, rowwise="mxfp8")
    expected = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    testing.assert_bitwise_equal(array.dequantize(dtype=dtype), array.dequantize().astype(expected))


@named(("make", "options", "error", "message"), [
    (lambda: hq.quantize(X, rowwise="mxfp8"), {"source": "columnwise"}, ValueError,
     r"dequantize needs the columnwise part, but this HybridArray \(20, 48\) holds only rowwise \(mxfp8\); quantize"),
    (lambda: hq.quantize(X, rowwise="mxfp8"), {"source": "rows"}, ValueError, "source='rows' is not 'rowwise' or"),
    (lambda: hq.quantize(X, rowwise="mxfp8"), {"dtype": np.float64}, TypeError,
     "dequantize gives float32, float16 or bfloat16, not float64; use .astype"),
    (lambda: hq.quantize(X, rowwise="mxfp8"), {"dtype": np.int8}, TypeError, "not int8"),
])
def test_dequantize_says_what_it_expected(make, options, error, message):
    with pytest.raises(error, match=message):
        make().dequantize(**options)


# --- with_columnwise ------------------------------------------------------------------------------


@named("format", FORMATS)
def test_columns_are_moved_where_that_loses_nothing_and_derived_otherwise(format):
    values = testing.matrix("wide", (37, 51))
    rows = hq.quantize(values, rowwise=format)
    array = rows.with_columnwise()
    if FORMATS[format].transposable:
        testing.assert_bitwise_equal(array, hq.quantize(values, rowwise=format, columnwise=format))
        assert array.derived is None
    else:
        options = {"columnwise": format, "columnwise_source": "rowwise_dequantized"}
        testing.assert_bitwise_equal(array, hq.quantize(values, rowwise=format, **options))
    assert array.rowwise is rows.rowwise and rows.columnwise is None
    for _, part in array.parts():
        testing.assert_code_padding_is_zero(part)


def test_columns_of_another_format_are_derived():
    options = {"columnwise": "nvfp4", "columnwise_source": "rowwise_dequantized"}
    expected = hq.quantize(X, rowwise="fp8_e4m3", **options)
    testing.assert_bitwise_equal(hq.quantize(X, rowwise="fp8_e4m3").with_columnwise("nvfp4"), expected)
    half = hq.quantize(X.astype(np.float16), rowwise="mxfp8")
    assert hq.with_columnwise(half, hq.HighPrecision()).columnwise.format.name == "fp16"


def test_a_second_columnwise_part_is_refused():
    array = hq.quantize(X, rowwise="mxfp8", columnwise="nvfp4")
    with pytest.raises(ValueError, match=r"has a columnwise part \(nvfp4\); drop\(columnwise=True\) first"):
        array.with_columnwise()
    with pytest.raises(ValueError, match="with_columnwise needs the rowwise part"):
        array.drop(rowwise=True).with_columnwise()


# --- matmul ---------------------------------------------------------------------------------------

A = hq.quantize(X, rowwise="mxfp8")
B = hq.quantize(X.T, columnwise="mxfp8")


@named(("call", "error", "message"), [
    (lambda: B @ A, ValueError, re.escape(
        "a @ b, which contracts a's last axis, needs the rowwise part, but this HybridArray (48, 20) holds only "
        "columnwise (mxfp8); quantize with rowwise=... or use .T")),
    (lambda: A @ A.T.T, ValueError, re.escape("(20, 48) @ (20, 48) do not fit (b.T would fit: .T is free)")),
    (lambda: A @ X[:7], ValueError, re.escape("(20, 48) @ (7, 48) do not fit (b.T would fit")),
    (lambda: A @ np.ones((7, 5), np.float32), ValueError, r"\(20, 48\) @ \(7, 5\) do not fit$"),
    (lambda: A @ np.ones((2, 48, 3), np.float32), ValueError, r"b must be \(k, n\), it is \(2, 48, 3\); reshape it"),
    (lambda: A @ np.ones(48, np.float32), ValueError, r"b must be \(k, n\), it is \(48,\)"),
    (lambda: hq.matmul(np.float32(1) * np.ones((), np.float32).reshape(()), B), TypeError, "a is float32; pass"),
    (lambda: hq.matmul(np.ones((), np.float32), B), ValueError, "a is 0-D"),
    (lambda: hq.matmul(A, B, out=np.zeros((20, 19), np.float32)), ValueError,
     re.escape("out must have shape (20, 20) for (20, 48) @ (48, 20), it has (20, 19)")),
    (lambda: hq.matmul(A, B, out=(np.zeros((20, 20), np.float32), np.zeros((20, 1), np.float32))), ValueError,
     r"aux must have shape \(20, 20\)"),
    (lambda: hq.matmul(A, B, out=np.zeros((20, 20))), TypeError, "the result is float32, float16 or bfloat16, not"),
    (lambda: hq.matmul(A, B, out=np.zeros((20, 20), np.float16), out_dtype=np.float32), TypeError,
     "out has dtype float16, out_dtype=float32; give one of them, or the same"),
    (lambda: hq.matmul(A, B, out_dtype=np.int32), TypeError, "the result is float32, float16 or bfloat16, not int32"),
    (lambda: hq.matmul(A, B, accumulate=True), ValueError, "accumulate=True adds to out; pass out="),
    (lambda: hq.matmul(A, B, activation="relu"), ValueError, "activation='relu' is not 'gelu'"),
    (lambda: hq.matmul(A, B, bias=np.ones(9, np.float32)), ValueError, r"bias must have shape \(20,\), it has \(9,\)"),
    (lambda: hq.matmul(A, B, bias=np.ones(20, np.int32)), TypeError, "bias has dtype int32"),
    (lambda: hq.matmul(A, B, engine="turbo"), ValueError, "engine='turbo' is not one of native, bf16, bf16x3, fp32"),
    (lambda: hq.matmul(A, B, engine="native"), ValueError, "='native' runs on a GPU; on NumPy the engine is fp32"),
    (lambda: hq.matmul(A, B, engine=hq.Engine("bf16")), ValueError, "engine='bf16' runs on a GPU"),
    (lambda: A @ "text", TypeError, "b is str; pass a NumPy or CuPy array"),
    (lambda: A @ [[1.0]], TypeError, r"b is list; .*np.asarray\(...\) makes one"),
])
def test_matmul_says_what_it_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_engine_on_numpy_is_fp32_by_name_or_value():
    for engine in (None, "fp32", hq.Engine("fp32"), hq.engine_for(A, B)):
        testing.assert_bitwise_equal(hq.matmul(A, B, engine=engine), A @ B)
    assert str(hq.engine_for(A, B)) == "fp32: NumPy: operands decoded to float32, BLAS"
    assert hq.engine_for(X, B).name == "fp32"
    with pytest.raises(ValueError, match="needs the rowwise part"):
        hq.engine_for(B, A)


def test_importing_the_library_loads_numpy_and_ml_dtypes_alone():
    script = (
        "import sys, hqarray\n"
        "heavy = {'cupy', 'torch', 'jax', 'rich', 'matplotlib', 'scipy', 'safetensors', 'nvmath'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
