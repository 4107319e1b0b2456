"""Containers: two independent parts, free views, someone else's buffers, Python's and NumPy's protocols."""

import copy
import pickle
import re

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import arrays, testing
from hqarray.formats import FORMATS

named = pytest.mark.parametrize
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def hybrid(rowwise="mxfp8", columnwise="nvfp4", shape=(20, 48), **options):
    return hq.quantize(testing.matrix("gauss", shape), rowwise=rowwise, columnwise=columnwise, **options)


def addresses(array):
    return [part.buffers.base.__array_interface__["data"][0] for _, part in array.parts()]


# --- two parts ------------------------------------------------------------------------------------


@named("columnwise", FORMATS)
@named("rowwise", FORMATS)
def test_each_part_equals_the_one_direction_quantize(rowwise, columnwise):
    values = testing.matrix("wide", (37, 51))
    both = hq.quantize(values, rowwise=rowwise, columnwise=columnwise)
    testing.assert_bitwise_equal(both.rowwise, hq.quantize(values, rowwise=rowwise).rowwise)
    testing.assert_bitwise_equal(both.columnwise, hq.quantize(values, columnwise=columnwise).columnwise)
    assert not np.shares_memory(both.rowwise.buffers.base, both.columnwise.buffers.base)


@named("columnwise", FORMATS)
@named("rowwise", FORMATS)
def test_derived_columns_are_quantized_from_what_rows_decode_to(rowwise, columnwise):
    values = testing.matrix("wide", (37, 51))
    array = hq.quantize(values, rowwise=rowwise, columnwise=columnwise, columnwise_source="rowwise_dequantized")
    rows = hq.quantize(values, rowwise=rowwise)
    testing.assert_bitwise_equal(array.rowwise, rows.rowwise)
    expected = hq.quantize(rows.dequantize(dtype=np.float32), columnwise=columnwise)
    testing.assert_bitwise_equal(array.columnwise, expected.columnwise)
    assert array.columnwise_source == "rowwise_dequantized" and array.derived == "columnwise"
    assert array.T.derived == "rowwise" and array.T.T.derived == "columnwise"


def test_the_source_of_columns_is_original_by_default():
    assert hybrid().columnwise_source == hybrid("mxfp8", None).columnwise_source == "original"
    only_rows = hq.quantize(np.ones((2, 2), np.float32), rowwise="mxfp8", columnwise_source="rowwise_dequantized")
    assert only_rows.derived is None


def test_shapes_of_the_parts_are_those_of_x_and_of_its_transpose():
    array = hybrid(shape=(20, 48))
    assert (array.shape, array.rowwise.shape, array.columnwise.shape) == ((20, 48), (20, 48), (48, 20))
    assert (array.ndim, array.size, len(array), array.dtype, array.device) == (2, 960, 20, np.float32, "cpu")
    deep = hybrid(shape=(3, 5, 34))
    assert (deep.shape, deep.rowwise.shape, deep.columnwise.shape) == ((3, 5, 34), (15, 34), (34, 15))
    assert (deep.ndim, deep.size, len(deep)) == (3, 510, 3)


@named(("dtype", "nominal"), [(np.float32, np.float32), (np.float16, np.float16), (BFLOAT16, BFLOAT16),
                              (np.float64, np.float32)])
def test_the_nominal_dtype_is_the_inputs(dtype, nominal):
    array = hq.quantize(np.ones((4, 32), dtype), rowwise="mxfp8")
    assert array.dtype == nominal and array.dequantize().dtype == nominal


@named(("make", "message"), [
    (lambda: hq.HybridArray(), "holds at least one part; pass rowwise= or columnwise="),
    (lambda: hq.HybridArray(hybrid().rowwise, hybrid().rowwise),
     re.escape("columnwise is the rowwise part of X.T: beside rowwise (20, 48) it must be (48, 20), not (20, 48)")),
    (lambda: hq.HybridArray(hybrid().rowwise, shape=(10, 48)),
     re.escape("shape (10, 48) does not flatten to the parts' matrix (20, 48)")),
    (lambda: hq.HybridArray(hybrid().rowwise, shape=()), "does not flatten"),
    (lambda: hq.HybridArray(hybrid().rowwise, derived="rows"), "derived='rows' is not the name of a part"),
    (lambda: hq.HybridArray(hybrid().rowwise, derived="columnwise"), "derived='columnwise' is not the name of a part"),
    (lambda: hq.HybridArray(hybrid().rowwise, shape=(-4, -5, 48)), "does not flatten to the parts' matrix"),
])
def test_parts_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_parts_of_one_array_make_another():
    array = hybrid()
    again = hq.HybridArray(rowwise=array.rowwise, columnwise=array.columnwise)
    testing.assert_bitwise_equal(again, array)
    assert again.rowwise is array.rowwise
    assert hq.HybridArray(columnwise=array.columnwise).shape == (20, 48)


def test_containers_are_frozen_and_compare_by_identity():
    array = hybrid()
    for container, field in ((array, "rowwise"), (array.rowwise, "format")):
        with pytest.raises(AttributeError):
            setattr(container, field, None)
        assert container == container and container != container.copy()
        assert len({container, container.copy()}) == 2


# --- views ----------------------------------------------------------------------------------------


def test_transposing_swaps_the_parts_and_moves_nothing():
    array = hybrid()
    turned = array.T
    assert turned.rowwise is array.columnwise and turned.columnwise is array.rowwise
    assert turned.shape == (48, 20) and turned.dtype == array.dtype
    np.testing.assert_array_equal(turned.dequantize(source="columnwise"), array.dequantize(source="rowwise").T)
    assert hybrid("mxfp8", None).T.rowwise is None
    with pytest.raises(ValueError, match=re.escape(".T needs 2-D, this HybridArray is (3, 5, 34); reshape(-1, 34)")):
        _ = hybrid(shape=(3, 5, 34)).T


@named(("shape", "to", "expected"), [
    ((3, 5, 34), (-1, 34), (15, 34)), ((3, 5, 34), (15, 34), (15, 34)), ((15, 34), (5, -1, 34), (5, 3, 34)),
    ((15, 34), (15, -1), (15, 34)), ((1, 34), (-1,), (34,)), ((0, 34), (-1, 34), (0, 34)),
    ((0, 34), (0, 7, 34), (0, 7, 34)), ((5, 0), (-1, 0), (5, 0)),
], ids=str)
def test_reshape_regroups_leading_axes_and_keeps_the_parts(shape, to, expected):
    array = hybrid(shape=shape)
    for reshaped in (array.reshape(*to), array.reshape(to)):
        assert reshaped.shape == expected
        assert reshaped.rowwise is array.rowwise and reshaped.columnwise is array.columnwise
        assert reshaped.dequantize().shape == expected


@named(("to", "message"), [
    ((7, 34), r"reshape of \(15, 34\) to \(7, 34\): 510 elements do not fill that shape"),
    ((-1, 7, 34), "510 elements do not fill that shape"), ((), "510 elements do not fill"),
    ((-1, -1, 34), "one of them may be -1"), ((-3, -5, 34), "sizes are 0 or more"),
], ids=str)
def test_reshape_to_an_impossible_shape_is_refused(to, message):
    with pytest.raises(ValueError, match=message):
        hybrid(shape=(15, 34)).reshape(*to)


def test_reshape_takes_whole_numbers():
    with pytest.raises(TypeError, match="float"):
        hybrid(shape=(15, 34)).reshape(15.0, 34)


@named(("options", "message"), [
    ({"rowwise": np.zeros((4, 4))}, "rowwise is a QuantizedArray, not ndarray"),
    ({"dtype": int}, "the nominal dtype is float32, float16 or bfloat16, not int64"),
    ({"dtype": np.float64}, "not float64"),
])
def test_a_field_of_the_wrong_kind_is_refused(options, message):
    with pytest.raises(TypeError, match=message):
        hq.HybridArray(**{"rowwise": hybrid().rowwise, **options})


def test_buffers_in_another_byte_order_are_refused():
    ones = np.ones((8, 128), np.float32)
    with pytest.raises(TypeError, match="codes of fp32 are float32, these are >f4, in another byte order"):
        hq.QuantizedArray.from_buffers(ones.astype(">f4"), None, "fp32", (8, 128))
    with pytest.raises(TypeError, match="scales of fp8_block_1x128 are float32, these are >f4"):
        codes = np.zeros((8, 128), np.uint8)
        hq.QuantizedArray.from_buffers(codes, ones[:, :1].astype(">f4"), "fp8_block_1x128", (8, 128))


def test_options_of_numpys_matmul_are_refused():
    with pytest.raises(TypeError, match="matmul of quantized arrays takes no dtype;"):
        np.matmul(hybrid(), np.ones((48, 2), np.float32), dtype=np.float64)


@named("to", [(34, 15), (-1, 17), (510,)], ids=str)
def test_reshape_that_moves_the_last_axis_is_refused(to):
    with pytest.raises(ValueError, match=r"must keep the last axis \(34\), which the blocks run along"):
        hybrid(shape=(15, 34)).reshape(*to)


def test_drop_leaves_the_other_part():
    array = hybrid()
    assert array.drop(columnwise=True).rowwise is array.rowwise and array.drop(columnwise=True).columnwise is None
    assert array.drop(rowwise=True).columnwise is array.columnwise and array.drop(rowwise=True).rowwise is None
    assert array.drop().rowwise is array.rowwise
    assert array.drop(columnwise=True).nbytes == array.rowwise.nbytes < array.nbytes


@named(("make", "options", "message"), [
    (lambda: hybrid("mxfp8", None), {"columnwise": True},
     r"drop\(columnwise=True\): this HybridArray \(20, 48\) has no columnwise part, only rowwise \(mxfp8\)"),
    (lambda: hybrid(None, "nvfp4"), {"rowwise": True}, r"has no rowwise part, only columnwise \(nvfp4\)"),
    (lambda: hybrid("mxfp8", None), {"rowwise": True}, r"drop\(rowwise\) would leave no part"),
    (hybrid, {"rowwise": True, "columnwise": True}, r"drop\(rowwise, columnwise\) would leave no part"),
    (lambda: hybrid("mxfp8", None), {"rowwise": True, "columnwise": True}, "has no columnwise part"),
])
def test_a_drop_that_cannot_be_changes_nothing(make, options, message):
    array = make()
    before = array.copy()
    with pytest.raises(ValueError, match=message):
        array.drop(**options)
    testing.assert_bitwise_equal(array, before)


def test_nbytes_counts_padding_and_scales():
    array = hybrid("mxfp8", None, shape=(20, 48))  # 32 x 48 codes, scales (2, pad16(20)), two scalars of 16 bytes
    assert array.nbytes == array.rowwise.nbytes == 32 * 48 + 2 * 32 + 2 * 16
    assert array.nbytes == array.rowwise.buffers.base.nbytes
    codes, scales = np.zeros((20, 48), np.uint8), np.zeros((20, 2), np.uint8)
    borrowed = hq.QuantizedArray.from_buffers(codes, scales, "mxfp8", (20, 48))
    assert borrowed.nbytes == 20 * 48 + 20 * 2


# --- copies ---------------------------------------------------------------------------------------


@named("duplicate", [lambda x: x.copy(), copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
       ids=["copy", "deepcopy", "pickle"])
@named("format", [*FORMATS, "mxfp8(rule=floor)", "fp8_block_1x128(element=e5m2,epsilon=1e-30)",
                  "nvfp4_row(rht=true,four_over_six=mse,global_bound=256)"])
def test_a_duplicate_has_the_same_bytes_in_buffers_of_its_own(format, duplicate):
    array = hybrid(format, format, shape=(3, 5, 33), columnwise_source="rowwise_dequantized")
    again = duplicate(array)
    testing.assert_bitwise_equal(again, array)
    assert again.shape == array.shape and again.nbytes == array.nbytes
    for (_, ours), (_, theirs) in zip(again.parts(), array.parts(), strict=True):
        assert not np.shares_memory(ours.buffers.base, theirs.buffers.base)
        testing.assert_code_padding_is_zero(ours)
    testing.assert_bitwise_equal(duplicate(array.rowwise), array.rowwise)


def test_a_pickle_holds_the_format_by_name_and_a_version():
    data = pickle.dumps(hybrid("mxfp8(rule=floor)", None))
    assert b"mxfp8(rule=floor)" in data and b"Packed" not in data
    part = hybrid().rowwise
    _, arguments = part.__reduce__()
    assert arguments[0] == arrays.PICKLE_VERSION
    with pytest.raises(ValueError, match=r"pickled by a newer hqarray \(pickle version 99 > 1\)"):
        arrays._unpickle_part(99, *arguments[1:])
    with pytest.raises(ValueError, match="pickled by a newer hqarray"):
        arrays._unpickle_hybrid(99, part, None, part.shape, "float32", None)


@named("dtype", [np.float16, BFLOAT16], ids=str)
def test_a_pickle_keeps_the_nominal_dtype(dtype):
    array = hq.quantize(np.ones((2, 3), dtype), rowwise="mxfp8")
    assert pickle.loads(pickle.dumps(array)).dtype == dtype


# --- display --------------------------------------------------------------------------------------


class Unreadable:
    """A buffer that only answers what a repr may ask."""

    device = "cpu"


def test_a_repr_is_one_line_and_reads_no_data():
    array = hybrid()
    assert repr(array) == "HybridArray((20, 48) float32, rowwise=mxfp8, columnwise=nvfp4, cpu, 2.5 KiB)"
    assert repr(array.rowwise) == "QuantizedArray((20, 48) mxfp8, cpu, 1.6 KiB)"
    derived = hybrid(columnwise_source="rowwise_dequantized")
    assert "columnwise=nvfp4, columnwise derived, cpu" in repr(derived)
    part = array.rowwise
    hollow = hq.QuantizedArray(part.format, part.shape, arrays.Packed(Unreadable(), part.buffers.layout, False, False))
    assert repr(hollow) == repr(part)
    assert repr(hq.HybridArray(hollow)).count("\n") == 0


def test_html_is_a_table_that_names_format_shape_and_bytes():
    html = hybrid("mxfp8(rule=floor)", "bf16", columnwise_source="rowwise_dequantized")._repr_html_()
    for text in ("<table", "HybridArray", "(20, 48)", "mxfp8(rule=floor)", "bf16", "e8m0", "rowwise_dequantized"):
        assert text in html
    assert ">QuantizedArray</caption>" in hybrid().rowwise._repr_html_()


# --- NumPy protocols ------------------------------------------------------------------------------


def test_asarray_decodes_a_copy():
    array = hybrid()
    testing.assert_bitwise_equal(np.asarray(array), array.dequantize())
    assert np.asarray(array, np.float64).dtype == np.float64
    assert np.array(array, copy=True).shape == (20, 48)
    with pytest.raises(ValueError, match="only by decoding, which copies"):
        np.array(array, copy=False)


@named("call", [
    lambda x: x + 1, lambda x: 1 + x, lambda x: x * x, lambda x: -x, np.exp, np.sum, np.mean,
    lambda x: np.add(x, 1), lambda x: np.add.reduce(x), lambda x: np.dot(x, x), lambda x: np.concatenate([x, x]),
    lambda x: np.linalg.norm(x), lambda x: np.transpose(x), lambda x: np.size(x, 0),
    lambda x: np.maximum(np.ones(48), x),
])
def test_other_numpy_functions_are_a_type_error_that_names_dequantize(call):
    with pytest.raises(TypeError, match=r"dequantize\(\)|unsupported operand|bad operand"):
        call(hybrid())


def test_numpy_arithmetic_from_the_left_names_dequantize():
    with pytest.raises(TypeError, match=r"ufunc add is not defined on quantized arrays; use .dequantize\(\)"):
        np.ones((20, 48), np.float32) + hybrid()
    with pytest.raises(TypeError, match=r"numpy.mean is not defined on quantized arrays; use .dequantize\(\)"):
        np.mean(hybrid())


def test_a_part_is_no_array():
    for call in (np.asarray, np.exp, lambda part: np.ones((20, 48)) @ part):
        with pytest.raises(TypeError, match=r"HybridArray\(rowwise=part\)\.dequantize\(\) gives the values"):
            call(hybrid().rowwise)
    assert not hasattr(hybrid().rowwise, "T") and not hasattr(hybrid().rowwise, "__matmul__")


def test_shape_ndim_and_size_are_answered_without_decoding():
    array = hybrid(shape=(3, 5, 34))
    assert (np.shape(array), np.ndim(array), np.size(array), len(array)) == ((3, 5, 34), 3, 510, 3)


def test_an_array_has_no_namespace_no_elements_and_no_truth():
    array = hybrid()
    assert not hasattr(array, "__array_namespace__")
    with pytest.raises(TypeError, match="no elements to iterate over"):
        iter(array)
    with pytest.raises(TypeError, match="truth value of a HybridArray is not defined"):
        bool(array)
    with pytest.raises(TypeError):
        _ = array[0]


# --- someone else's buffers -----------------------------------------------------------------------


@named("format", FORMATS)
def test_borrowed_buffers_decode_alike_and_are_not_copied(format):
    values = testing.matrix("gauss", (19, 33))
    part = hq.quantize(values, rowwise=format).rowwise
    codes, scales = part.codes.copy(), np.ascontiguousarray(part.scales)
    borrowed = hq.QuantizedArray.from_buffers(codes, scales, format, (19, 33), global_scale=part.global_scale)
    assert np.shares_memory(borrowed.codes, codes) and borrowed.amax is None
    assert not scales.size or np.shares_memory(borrowed.scales, scales)
    array = hq.HybridArray(borrowed)
    testing.assert_bitwise_equal(array.dequantize(), hq.HybridArray(part).dequantize())
    copied = borrowed.packed()
    testing.assert_code_padding_is_zero(copied)
    testing.assert_bitwise_equal(copied, borrowed)
    assert copied.packed() is copied and borrowed.copy().codes is not codes
    testing.assert_bitwise_equal(pickle.loads(pickle.dumps(array)), array)
    w = testing.matrix("gauss", (33, 8))
    testing.assert_bitwise_equal(array @ w, hq.HybridArray(part) @ w)


def test_borrowed_buffers_may_be_typed_or_strided():
    values = testing.matrix("gauss", (32, 64))
    part = hq.quantize(values, rowwise="mxfp8").rowwise
    wide = np.zeros((32, 200), np.uint8)
    wide[:, 7:71] = part.codes
    typed = hq.QuantizedArray.from_buffers(
        wide[:, 7:71].view(ml_dtypes.float8_e4m3fn), part.scales.view(ml_dtypes.float8_e8m0fnu), "mxfp8", (32, 64)
    )
    testing.assert_bitwise_equal(typed, part)
    assert typed.codes.dtype == typed.scales.dtype == np.uint8


def test_a_scalar_scale_may_have_any_shape():
    codes = np.full((2, 3), 0x38, np.uint8)
    for scale in (np.float32([2]), np.array(2, np.float32), np.float32([[2]])):
        part = hq.QuantizedArray.from_buffers(codes, scale, "fp8_e4m3", (2, 3))
        assert (hq.HybridArray(part).dequantize() == 2).all()


def test_a_dirty_last_nibble_of_borrowed_codes_stays_outside():
    part = hq.quantize(testing.matrix("gauss", (4, 33)), rowwise="mxfp4").rowwise
    dirty = part.codes.copy()
    dirty[:, -1] |= 0x70
    borrowed = hq.QuantizedArray.from_buffers(dirty, part.scales, "mxfp4", (4, 33))
    testing.assert_code_padding_is_zero(borrowed.packed())
    testing.assert_bitwise_equal(borrowed.packed(), part)
    testing.assert_bitwise_equal(hq.HybridArray(borrowed).dequantize(), hq.HybridArray(part).dequantize())


CODES, SCALES = np.zeros((4, 32), np.uint8), np.zeros((4, 1), np.uint8)
PACKED, BLOCKS, ONE = np.zeros((4, 16), np.uint8), np.zeros((4, 2), np.uint8), np.ones(1, np.float32)


@named(("codes", "scales", "format", "options", "error", "message"), [
    (CODES[:, :31], SCALES, "mxfp8", {}, ValueError,
     r"codes of a \(4, 32\) part in mxfp8 have shape \(4, 32\), these have \(4, 31\)"),
    (CODES, SCALES[:3], "mxfp8", {}, ValueError,
     r"scales of a \(4, 32\) part in mxfp8 have shape \(4, 1\), these have \(3, 1\)"),
    (CODES, None, "mxfp8", {}, ValueError, r"mxfp8 needs scales of shape \(4, 1\), scales is None"),
    (CODES.T.copy().T, SCALES, "mxfp8", {}, ValueError,
     "must be contiguous along the last axis, their strides are .*pass a copy"),
    (CODES.astype(np.int32), SCALES, "mxfp8", {}, TypeError,
     "codes of mxfp8 are uint8 or float8_e4m3fn, these are int32"),
    (CODES.view(ml_dtypes.float8_e5m2), SCALES, "mxfp8", {}, TypeError,
     "codes of mxfp8 are uint8 or float8_e4m3fn, these are float8_e5m2"),
    (CODES.view(ml_dtypes.float8_e4m3fn), SCALES, "mxfp8_e5m2", {}, TypeError, "are uint8 or float8_e5m2, these are"),
    (CODES.view(ml_dtypes.float8_e4m3fnuz), SCALES, "mxfp8", {}, TypeError, "these are float8_e4m3fnuz"),
    (CODES.view(bool), SCALES, "mxfp8", {}, TypeError, "these are bool"),
    (CODES, SCALES.view(ml_dtypes.float8_e4m3fn), "mxfp8", {}, TypeError,
     "scales of mxfp8 are uint8 or float8_e8m0fnu, these are float8_e4m3fn"),
    (CODES, SCALES.astype(np.float32), "mxfp8", {}, TypeError, "scales of mxfp8 are uint8.*, these are float32"),
    (CODES, SCALES, "fp8_block_1x128", {}, TypeError, "scales of fp8_block_1x128 are float32, these are uint8"),
    (CODES, SCALES, "mxfp8", {"global_scale": ONE}, ValueError, "mxfp8 has no global_scale"),
    (PACKED, BLOCKS, "nvfp4", {}, ValueError, r"nvfp4 needs a global_scale \(one float32\)"),
    (PACKED, BLOCKS, "nvfp4", {"global_scale": np.ones(2, np.float32)}, TypeError, r"one float32, not float32 \(2,\)"),
    (PACKED, BLOCKS, "nvfp4", {"global_scale": np.ones(1)}, TypeError, r"one float32, not float64 \(1,\)"),
    (CODES, BLOCKS, "nvfp4", {"global_scale": ONE}, ValueError, r"have shape \(4, 16\), these have \(4, 32\)"),
    (CODES.astype(np.float16), None, "bf16", {}, TypeError, "codes of bf16 are bfloat16, these are float16"),
])
def test_buffers_that_do_not_fit_are_refused(codes, scales, format, options, error, message):
    with pytest.raises(error, match=message):
        hq.QuantizedArray.from_buffers(codes, scales, format, (4, 32), **options)
