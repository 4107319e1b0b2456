"""The Hadamard transform against its matrix, and what the algebra promises."""

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import hadamard, reference, testing

named = pytest.mark.parametrize

INDEX = np.arange(16)
SYLVESTER = np.array([[(-1) ** bin(i & j).count("1") for j in INDEX] for i in INDEX])
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
MATRIX = SIGNS[:, None] * SYLVESTER / 4


def bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_the_matrix_is_orthogonal():
    np.testing.assert_array_equal(MATRIX @ MATRIX.T, np.eye(16))
    np.testing.assert_array_equal(SYLVESTER, SYLVESTER.T)


@named("k", [0, 1, 15, 16, 17, 32, 77])
def test_rotating_multiplies_whole_groups_and_leaves_a_ragged_end(k):
    """Small integers, of which every sum is exact."""
    values = np.random.default_rng(k).integers(-8, 9, (5, k)).astype(np.float32)
    expected = values.astype(np.float64)
    for left in range(0, k - 15, 16):
        expected[:, left : left + 16] = expected[:, left : left + 16] @ MATRIX
    ours = hadamard.rotate(values.copy(), k)
    np.testing.assert_array_equal(ours, bfloat16(expected.astype(np.float32)))
    back = ours.copy()
    hadamard.rotate_back(back)
    undone = ours.astype(np.float64)
    for left in range(0, k - 15, 16):
        undone[:, left : left + 16] = undone[:, left : left + 16] @ MATRIX.T
    np.testing.assert_allclose(back, undone, rtol=0, atol=1e-5)


def test_sums_are_made_in_the_order_written():
    """Single float32 operations, one by one, on numbers whose sums round: another order gives other bits."""
    x = testing.matrix("wide", (20000, 16))

    def rotated(order):
        z = [x[:, i] * np.float32(d / 4) for i, d in enumerate(SIGNS)]
        for h in order:
            for i in range(16):
                if not i & h:
                    z[i], z[i + h] = z[i] + z[i + h], z[i] - z[i + h]
        return bfloat16(np.stack(z, axis=1))

    testing.assert_bitwise_equal(hadamard.rotate(x.copy(), 16), rotated((1, 2, 4, 8)))
    assert (rotated((8, 4, 2, 1)) != rotated((1, 2, 4, 8))).any()


@named("format", ["nvfp4(rht=true)", "nvfp4_16x16(rht=true)", "nvfp4_row(rht=true,four_over_six=mae)"])
@named("shape", [(33, 64), (17, 77), (3, 15), (0, 16), (5, 0)], ids=str)
def test_a_rotated_part_is_the_part_of_rotated_values(format, shape):
    """Quantizing rotated values without the option gives the same codes and scales; decoding rotates back."""
    values = testing.matrix("gauss", shape)
    array = hq.quantize(values, rowwise=format, columnwise=format)
    for part, source in ((array.rowwise, values), (array.columnwise, values.T)):
        rotated = hadamard.rotate(np.array(source, np.float32), source.shape[1])
        plain = hq.quantize(rotated, rowwise=str(part.format.name).replace("rht=true,", "").replace("rht=true", ""))
        testing.assert_bitwise_equal(part.codes, plain.rowwise.codes)
        testing.assert_bitwise_equal(np.ascontiguousarray(part.scales), np.ascontiguousarray(plain.rowwise.scales))
        testing.assert_bitwise_equal(part.global_scale, plain.rowwise.global_scale)
        assert part.amax is None or part.amax == plain.rowwise.amax
        stored = reference.dequantize_part(part, np.dtype(np.float32), rotated=True)
        testing.assert_bitwise_equal(stored, plain.dequantize())
        back = stored.copy()
        hadamard.rotate_back(back)
        testing.assert_bitwise_equal(reference.dequantize_part(part, np.dtype(np.float32)), back)


def test_decoding_gives_the_values_back_within_the_error_of_the_format():
    values = testing.matrix("gauss", (64, 96))
    for part in ("rowwise", "columnwise"):
        array = hq.quantize(values, **{part: "nvfp4(rht=true)"})
        error = np.linalg.norm(array.dequantize() - values) / np.linalg.norm(values)
        assert error < 0.11  # NVFP4 of normal numbers: 0.095


def test_a_product_of_two_rotated_operands_is_that_of_what_they_decode_to():
    x, w = testing.matrix("gauss", (40, 80)), testing.matrix("gauss", (24, 80), seed=1)
    hx, hw = (hq.quantize(v, rowwise="nvfp4(rht=true)") for v in (x, w))
    exact = hx.dequantize().astype(np.float64) @ hw.dequantize().astype(np.float64).T
    stored = [reference.dequantize_part(h.rowwise, np.dtype(np.float32), rotated=True) for h in (hx, hw)]
    testing.assert_bitwise_equal(hx @ hw.T, stored[0] @ stored[1].T)
    np.testing.assert_allclose(hx @ hw.T, exact, atol=1e-4)
    with pytest.raises(ValueError, match="one operand is Hadamard-rotated"):
        hx @ w.T


def test_a_nan_spreads_over_its_sixteen_and_no_further():
    values = testing.matrix("gauss", (4, 48))
    values[2, 20] = np.nan
    decoded = hq.fake_quantize(values, "nvfp4(rht=true)")
    expected = np.zeros(values.shape, bool)
    expected[2, 16:32] = True
    np.testing.assert_array_equal(np.isnan(decoded), expected)


def test_one_amax_does_not_serve_rotated_and_other_values():
    x = testing.matrix("gauss", (32, 32))
    array = hq.quantize(x, rowwise="nvfp4", columnwise="nvfp4(rht=true)")
    assert array.rowwise.amax == np.abs(x).max()
    rotated = hadamard.rotate(x.T.copy(), 32)
    assert array.columnwise.amax == np.abs(rotated).max() != array.rowwise.amax
    again = hq.quantize(x, columnwise="nvfp4(rht=true)", amax=array.columnwise.amax)
    testing.assert_bitwise_equal(again.columnwise, array.columnwise)
    with pytest.raises(ValueError, match="amax= is one number, and a rotated part"):
        hq.quantize(x, rowwise="nvfp4", columnwise="nvfp4(rht=true)", amax=np.float32(1))
    with pytest.raises(ValueError, match="amax= is one number, and a rotated part"):
        hq.grouped_quantize(x, [32], rowwise="nvfp4", columnwise="nvfp4(rht=true)", amax=np.ones(1, np.float32))
