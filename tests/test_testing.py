"""The assertions fail where they must, and the generators give what they name."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import testing
from hqarray.formats import FORMATS

named = pytest.mark.parametrize


def pair(format="mxfp8", columnwise="nvfp4", kind="gauss", shape=(20, 48)):
    values = testing.matrix(kind, shape)
    return values, hq.quantize(values, rowwise=format, columnwise=columnwise)


# --- assert_bitwise_equal -------------------------------------------------------------------------


@named("format", FORMATS)
def test_a_copy_is_bitwise_equal(format):
    _, array = pair(format, format)
    testing.assert_bitwise_equal(array, array.copy())
    testing.assert_bitwise_equal(array.rowwise, array.rowwise.copy())
    testing.assert_bitwise_equal(array.rowwise.codes, array.rowwise.codes.copy())


def test_a_differing_byte_is_named_with_its_place_and_both_values():
    _, array = pair()
    other = array.copy()
    other.rowwise.codes[3, 17] ^= 0xFF
    other.rowwise.codes[19, 0] ^= 1
    theirs, ours = int(array.rowwise.codes[3, 17]), int(other.rowwise.codes[3, 17])
    message = rf"^rowwise.codes\[3, 17\]: 0x{ours:02X}, expected 0x{theirs:02X}; 2 of 960 differ$"
    with pytest.raises(AssertionError, match=message):
        testing.assert_bitwise_equal(other, array)


def test_a_differing_fp4_byte_names_both_of_its_elements():
    _, array = pair()
    other = array.copy()
    other.columnwise.codes[5, 9] ^= 0x10
    with pytest.raises(AssertionError, match=r"^columnwise.codes\[5, 9\], elements 18 and 19 of row 5: 0x"):
        testing.assert_bitwise_equal(other, array)


@named("field", ["scales", "global_scale", "amax"])
def test_a_differing_scale_is_named(field):
    _, array = pair("nvfp4", None)
    other = array.copy()
    getattr(other.rowwise, field)[...] = 3
    with pytest.raises(AssertionError, match=rf"^rowwise.{field}\[0"):
        testing.assert_bitwise_equal(other, array)


def test_floats_are_compared_by_their_bits():
    zero, nan = np.array([[0.0]], np.float32), np.array([np.nan], np.float32)
    testing.assert_bitwise_equal(nan, nan.copy())
    message = r"array\[0, 0\]: 0x80000000, expected 0x00000000 \(-0.0 for 0.0\); 1 of 1 differ"
    with pytest.raises(AssertionError, match=message):
        testing.assert_bitwise_equal(-zero, zero)
    with pytest.raises(AssertionError, match=r"0xFFC00000, expected 0x7FC00000"):
        testing.assert_bitwise_equal(np.copysign(nan, np.float32(-1)), nan)
    with pytest.raises(AssertionError, match=r"array\[1\]: 0x3F80, expected 0x4000 \(1 for 2\)"):
        testing.assert_bitwise_equal(*(np.array([1, x], ml_dtypes.bfloat16) for x in (1, 2)))


@named(("actual", "expected", "message"), [
    (np.zeros(2), np.zeros(3), r"shape is \(2,\), expected \(3,\)"),
    (np.zeros(2), np.zeros(2, np.float32), "dtype is float64, expected float32"),
    (pair("mxfp8", None)[1], pair("mxfp8")[1], r"parts is \['rowwise'\], expected \['rowwise', 'columnwise'\]"),
    (pair("mxfp8")[1], pair("mxfp8_e5m2")[1], "rowwise: format is MX"),
    (pair("mxfp8")[1].T, pair("mxfp8")[1], r"shape is \(48, 20\), expected \(20, 48\)"),
], ids=["shape", "dtype", "parts", "format", "array shape"])
def test_facts_that_differ_are_named(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        testing.assert_bitwise_equal(actual, expected)


@named(("dtype", "message"), [
    (np.complex128, r"array\[1\]: 0x0{16}40{15}, expected 0x0{16}3FF0{13} \(.*\); 1 of 2 differ"),
    ("U3", r"array\[1\]: 0x0{22}32, expected 0x0{22}31 \(2 for 1\); 1 of 2 differ"),
    (bool, r"array\[1\]: 0x00, expected 0x01"),
], ids=["complex", "text", "bool"])
def test_a_dtype_of_any_size_is_compared_by_its_bytes(dtype, message):
    zero = dtype is bool
    ours, theirs = np.array([0, 0 if zero else 2]).astype(dtype), np.array([0, 1]).astype(dtype)
    testing.assert_bitwise_equal(ours, ours.copy())
    testing.assert_bitwise_equal(ours[1], ours[1].copy())
    with pytest.raises(AssertionError, match=message):
        testing.assert_bitwise_equal(ours, theirs)


def test_objects_have_no_bits_to_compare():
    values = np.array([1, None], object)
    with pytest.raises(TypeError, match="array has dtype object, whose bytes are addresses; compare arrays of numbers"):
        testing.assert_bitwise_equal(values, values)


def test_different_kinds_cannot_be_compared():
    _, array = pair()
    for other in (array.rowwise, np.zeros(3), "mxfp8"):
        with pytest.raises(TypeError, match="cannot compare HybridArray with"):
            testing.assert_bitwise_equal(array, other)


def test_a_missing_amax_is_a_difference():
    _, array = pair("nvfp4", None)
    part = array.rowwise
    bare = hq.QuantizedArray.from_buffers(part.codes, part.scales, "nvfp4", part.shape, global_scale=part.global_scale)
    with pytest.raises(AssertionError, match="amax is None is True, expected False"):
        testing.assert_bitwise_equal(bare, part)


# --- assert_in_rounding_cell ----------------------------------------------------------------------


@named("format", FORMATS)
def test_a_neighbouring_code_is_outside_its_cell(format):
    values = testing.matrix("gauss", (20, 48))
    part = hq.quantize(values, rowwise=format).rowwise
    step = part.codes.view(f"u{part.codes.itemsize}") if part.codes.itemsize > 1 else part.codes
    step[7, 5] ^= 1
    with pytest.raises(AssertionError, match=r"part\[7, 1?\d\]: .* is not in the rounding cell of .*1 of 960 elements"):
        testing.assert_in_rounding_cell(values, part)


@named("format", FORMATS)
def test_a_wrong_sign_is_outside_its_cell(format):
    values = testing.matrix("all_zero", (4, 32))
    part = hq.quantize(values, rowwise=format).rowwise
    with pytest.raises(AssertionError, match="128 of 128"):
        testing.assert_in_rounding_cell(-values, part)


@named("format", FORMATS)
def test_a_lost_nan_is_outside_its_cell(format):
    values = testing.matrix("gauss", (4, 32))
    part = hq.quantize(values, rowwise=format).rowwise
    values[2, 30] = np.nan
    with pytest.raises(AssertionError, match=r"part\[2, 30\]: np.float64\(nan\)"):
        testing.assert_in_rounding_cell(values, part)


@named("format", FORMATS)
def test_an_invented_nan_is_outside_its_cell(format):
    values = testing.matrix("gauss", (4, 32))
    poisoned = values.copy()
    poisoned[2, 30] = np.nan
    part = hq.quantize(poisoned, rowwise=format).rowwise
    with pytest.raises(AssertionError, match="is not in the rounding cell"):
        testing.assert_in_rounding_cell(values, part)


def test_a_tie_away_from_even_is_outside_its_cell():
    values = np.array([[6.0, 2.5]], np.float32)
    part = hq.quantize(values, rowwise="mxfp4").rowwise
    testing.assert_in_rounding_cell(values, part)
    part.codes[...] = 0x57  # 3 for 2.5
    with pytest.raises(AssertionError, match=r"part\[0, 1\]"):
        testing.assert_in_rounding_cell(values, part)


def test_saturation_is_the_last_cell():
    part = hq.quantize(np.array([[448.0, 1.0]], np.float32), rowwise="fp8_e4m3", amax=np.float32(448)).rowwise
    testing.assert_in_rounding_cell(np.array([[1e30, 1.0]], np.float32), part)
    part.codes[0, 0] = 0x7D
    with pytest.raises(AssertionError, match=r"part\[0, 0\]"):
        testing.assert_in_rounding_cell(np.array([[1e30, 1.0]], np.float32), part)


def test_each_part_is_held_against_its_own_source():
    values, array = pair("mxfp4", "mxfp8")
    testing.assert_in_rounding_cell(values, array)
    derived = hq.quantize(values, rowwise="mxfp4", columnwise="mxfp8", columnwise_source="rowwise_dequantized")
    testing.assert_in_rounding_cell(values, derived)
    swapped = hq.HybridArray(derived.rowwise, array.columnwise, derived="columnwise")
    with pytest.raises(AssertionError, match="columnwise"):
        testing.assert_in_rounding_cell(values, swapped)
    with pytest.raises(AssertionError, match="columnwise"):
        testing.assert_in_rounding_cell(values, hq.HybridArray(derived.rowwise, derived.columnwise))


def test_values_of_another_shape_are_not_reshaped():
    values = testing.matrix("gauss", (4, 6, 10))
    array = hq.quantize(values, rowwise="mxfp8", columnwise="nvfp4")
    testing.assert_in_rounding_cell(values, array)
    for other in (values.reshape(24, 10), values.reshape(4, 10, 6), values.reshape(-1), values.T):
        with pytest.raises(AssertionError, match=r"^values: shape is \(.*\), expected \(4, 6, 10\)$"):
            testing.assert_in_rounding_cell(other, array)


# --- padding and poison ---------------------------------------------------------------------------


@named("format", FORMATS)
def test_dirty_code_padding_is_found(format):
    part = hq.quantize(testing.matrix("gauss", (3, 5)), rowwise=format).rowwise
    testing.assert_code_padding_is_zero(part)
    for at in ((0, -1), (-1, 0)):
        dirty = part.copy()
        dirty.buffers.padded_codes[at] = 1
        with pytest.raises(AssertionError, match="code padding of QuantizedArray"):
            testing.assert_code_padding_is_zero(dirty)


def test_the_high_nibble_of_an_odd_row_is_padding():
    part = hq.quantize(testing.matrix("gauss", (3, 5)), rowwise="mxfp4").rowwise
    part.codes[1, 2] |= 0x10
    with pytest.raises(AssertionError, match=r"at \(1, 2\) is .*16.*, not 0; 1 are not"):
        testing.assert_code_padding_is_zero(part)


@named("format", FORMATS)
def test_poison_reaches_all_but_code_padding(format):
    _, array = pair(format, None, shape=(19, 33))
    testing.poison(array, 0xA5)
    part = array.rowwise
    for buffer in (part.codes, part.scales, part.global_scale, part.amax):
        if buffer is not None:
            assert (np.ascontiguousarray(buffer).view(np.uint8) == 0xA5).all()
    # an odd last nibble is the one byte that codes and padding share
    padded = part.buffers.padded_codes.copy()
    padded[: part.codes.shape[0], : part.codes.shape[1]] = 0
    assert not padded.any()


# --- generators -----------------------------------------------------------------------------------


@named("name", testing.MATRICES)
def test_a_matrix_has_its_shape_dtype_and_seed(name):
    for shape in testing.SHAPES.values():
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            values = testing.matrix(name, shape, dtype)
            assert values.shape == shape and values.dtype == dtype
    testing.assert_bitwise_equal(testing.matrix(name, (9, 7)), testing.matrix(name, (9, 7), seed=0))
    if not name.startswith("all_"):
        first, second = (testing.matrix(name, (9, 7), seed=seed) for seed in (0, 1))
        assert first.tobytes() != second.tobytes()


def test_matrices_hold_what_their_names_say():
    x = {name: testing.matrix(name, (64, 64)) for name in testing.MATRICES}
    assert np.isinf(x["infinities"]).sum() > 10 and np.isneginf(x["infinities"]).any()
    assert np.isnan(x["nans"]).sum() > 10 and np.isnan(x["all_nan"]).all() and not x["all_zero"].any()
    assert ((x["subnormals"] != 0) & (np.abs(x["subnormals"]) < 2.0**-126)).sum() > 1000
    assert (np.signbit(x["negative_zeros"]) & (x["negative_zeros"] == 0)).any()
    assert (x["zero_rows"] == 0).all(1).sum() == 32 and (x["zero_blocks"] == 0).all(0).sum() == 32
    assert len(np.unique(x["all_equal"])) == 1 and (np.frexp(x["powers_of_two"])[0] ** 2 == 0.25).all()
    assert np.abs(x["largest"]).min() == np.finfo(np.float32).max
    with pytest.raises(ValueError, match="no matrix 'gaus'; known: gauss, "):
        testing.matrix("gaus", (2, 2))


@named("name", testing.VIEWS)
def test_a_view_is_a_view(name):
    x = testing.matrix("gauss", (8, 10))
    view = testing.VIEWS[name](x)
    assert view.ndim == 2 and not view.flags.c_contiguous
    assert name == "fortran" or np.shares_memory(view, x)


def test_importing_it_needs_numpy_and_ml_dtypes_alone():
    script = (
        "import sys, hqarray.testing\n"
        "heavy = {'pytest', 'hypothesis', 'torch', 'jax', 'cupy', 'rich', 'matplotlib', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
