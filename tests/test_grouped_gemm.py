"""Products of groups against those of each member, and float64; what a request says; errors."""

import re

import ml_dtypes
import numpy as np
import pytest
from test_gemm import assert_product
from test_grouped_ops import OTHER, PATTERNS, SIZES, G, X, rows_of_no_member, stacked, starts_of

import hqarray as hq
from hqarray import grouped_gemm, testing
from hqarray.formats import FORMATS
from hqarray.grouped import GroupedArray, ScatteredPart
from hqarray.groups import Sizes

named = pytest.mark.parametrize
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def layer(x_format, w_format, dy_format=None, sizes=SIZES, k=48, n=20, alignment=1, **options):
    """gx (T, k) and gdy (T, n) ragged, gw (n, k) uniform, each with both parts."""
    x, _ = stacked(sizes, k, alignment, kind="gauss")
    dy, _ = stacked(sizes, n, alignment, kind="gauss", seed=50)
    w = testing.matrix("gauss", (len(sizes), n, k), seed=99)
    gx = hq.grouped_quantize(x, sizes, rowwise=x_format, columnwise=x_format, alignment=alignment)
    gw = GroupedArray.from_stacked(w, rowwise=w_format, columnwise=w_format)
    dy_format = dy_format or x_format
    gdy = hq.grouped_quantize(dy, sizes, rowwise=dy_format, columnwise=dy_format, alignment=alignment)
    return gx, gw, gdy


def assert_stacked(actual, members, alignment=1, axis=0):
    """Slices along an axis are the members' products, the rest zero."""
    sizes = [member.shape[axis] for member in members]
    outside = rows_of_no_member(sizes, actual.shape[axis], alignment)
    assert not np.compress(outside, actual, axis).any()
    for start, member in zip(starts_of(sizes, alignment), members, strict=True):
        rows = slice(start, start + member.shape[axis])
        np.testing.assert_array_equal(actual[rows] if axis == 0 else actual[:, rows], member)


@named("alignment", [1, 128])
@named("format", FORMATS)
def test_the_three_products_of_a_layer_are_those_of_each_member(format, alignment):
    """Bit for bit, and within the bound of the decoded members' product in float64."""
    gx, gw, gdy = layer(format, OTHER[format], alignment=alignment)
    starts = starts_of(SIZES, alignment)
    y, dx, dw = gx @ gw.T, gdy @ gw, gdy.T @ gx
    assert (y.shape, dx.shape, dw.shape) == ((gx.rows.capacity, 20), (gx.rows.capacity, 48), (6, 20, 48))
    assert_stacked(y, [a @ b.T for a, b in zip(gx, gw, strict=True)], alignment)
    assert_stacked(dx, [a @ b for a, b in zip(gdy, gw, strict=True)], alignment)
    for i, (a, b, ours) in enumerate(zip(gdy, gx, dw, strict=True)):
        np.testing.assert_array_equal(ours, a.T @ b)
        assert SIZES[i] or not ours.any()
        assert_product(ours, a.dequantize(source="columnwise").T, b.dequantize(source="columnwise"))
        rows = slice(starts[i], starts[i] + SIZES[i])
        assert_product(y[rows], gx[i].dequantize(), gw[i].dequantize().T)


@named("sizes", PATTERNS.values(), ids=PATTERNS)
def test_products_of_every_pattern_of_sizes(sizes):
    gx, gw, gdy = layer("mxfp8", "nvfp4", "fp8_e4m3", sizes)
    assert_stacked(gx @ gw.T, [a @ b.T for a, b in zip(gx, gw, strict=True)])
    assert_stacked(gdy @ gw, [a @ b for a, b in zip(gdy, gw, strict=True)])
    dw = gdy.T @ gx
    assert dw.shape == (len(sizes), 20, 48)
    for a, b, ours in zip(gdy, gx, dw, strict=True):
        np.testing.assert_array_equal(ours, a.T @ b)


def test_a_thousand_groups_multiply():
    sizes = [1] * 1000
    gx, gw, gdy = layer("mxfp8", "mxfp8", sizes=sizes, k=16, n=8)
    x, w = (group.dequantize(dtype=np.float32).astype(np.float64) for group in (gx, gw))
    np.testing.assert_allclose((gx @ gw.T)[:1000], np.einsum("tk,tnk->tn", x[:1000], w), rtol=0, atol=1e-4)
    dy, x = (group.dequantize(source="columnwise")[:1000] for group in (gdy, gx))
    np.testing.assert_array_equal(gdy.T @ gx, dy[:, :, None] * x[:, None, :])


@named("format", ["mxfp8", "nvfp4", "fp8_block_1x128", "bf16"])
def test_a_ragged_n_gives_columns(format):
    gx, gw, _ = layer(format, format)
    y = gw @ gx.T
    assert y.shape == (20, gx.rows.capacity)
    assert not y[:, rows_of_no_member(SIZES, y.shape[1])].any()
    for start, a, b in zip(starts_of(SIZES), gw, gx, strict=True):
        assert_product(y[:, start : start + b.shape[0]], a.dequantize(), b.dequantize().T)
    out = np.full(y.shape, np.nan, np.float32)
    assert hq.matmul(gw, gx.T, out=out) is out
    outside = rows_of_no_member(SIZES, y.shape[1])
    np.testing.assert_array_equal(out[:, ~outside], y[:, ~outside])
    assert np.isnan(out[:, outside]).all()
    fortran = np.zeros(y.shape[::-1], np.float32).T
    np.testing.assert_array_equal(hq.matmul(gw, gx.T, out=fortran), y)


def test_uniform_members_give_a_stack():
    a = GroupedArray.from_stacked(testing.matrix("gauss", (3, 5, 40)), rowwise="mxfp8")
    b = GroupedArray.from_stacked(testing.matrix("gauss", (3, 40, 7), seed=1), columnwise="nvfp4")
    y = a @ b
    assert y.shape == (3, 5, 7)
    for ours, left, right in zip(y, a, b, strict=True):
        np.testing.assert_array_equal(ours, left @ right)
    plain = GroupedArray.from_stacked(testing.matrix("gauss", (3, 5, 40)))
    other = GroupedArray.from_stacked(testing.matrix("gauss", (3, 7, 40), seed=1))
    for ours, left, right in zip(plain @ other.T, plain.dequantize(), other.dequantize(), strict=True):
        assert_product(ours, left, right.T)


def test_rows_and_columns_that_differ_give_an_unquantized_group():
    gx, _, _ = layer("mxfp8", "mxfp8")
    gz = hq.grouped_quantize(testing.matrix("gauss", (40, 48)), [5, 0, 17, 3, 0, 9], rowwise="nvfp4")
    y = hq.matmul(gx, gz.T, out_dtype=BFLOAT16)
    assert y.shape == (6, None, None) and y.dtype == BFLOAT16 and isinstance(y.rowwise, ScatteredPart)
    for ours, a, b in zip(y.dequantize(), gx, gz, strict=True):
        testing.assert_bitwise_equal(ours, hq.matmul(a, b.T, out_dtype=BFLOAT16))


def test_members_that_differ_along_two_axes_multiply_one_by_one():
    """Ragged k with another ragged axis, and ragged k beside a uniform one of the same sizes."""
    shapes = [(3, 40), (0, 7), (130, 33), (17, 0)]
    a = GroupedArray.from_arrays([testing.matrix("gauss", s) for s in shapes], rowwise="mxfp8", columnwise="mxfp8")
    b = GroupedArray.from_arrays([testing.matrix("gauss", (9, k), seed=1) for _, k in shapes], rowwise="nvfp4")
    y = a @ b.T
    assert y.shape == (150, 9)
    assert_stacked(y, [left @ right.T for left, right in zip(a, b, strict=True)])
    turned = b @ a.T
    assert turned.shape == (9, 150)
    assert_stacked(turned, [right @ left.T for left, right in zip(a, b, strict=True)], axis=1)
    for out in (np.full((9, 150), np.nan, np.float32), np.full((150, 9), np.nan, np.float32).T):
        np.testing.assert_array_equal(hq.matmul(b, a.T, out=out), turned)
    ragged = hq.grouped_quantize(X, [16, 16], rowwise="mxfp8", columnwise="mxfp8")
    uniform = GroupedArray.from_stacked(testing.matrix("gauss", (2, 16, 8)), rowwise="mxfp8", columnwise="mxfp8")
    for ours, left, right in zip(ragged.T @ uniform, ragged, uniform, strict=True):
        np.testing.assert_array_equal(ours, left.T @ right)


@named("out_dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@named("activation", [None, "gelu"])
@named("shared", [False, True])
def test_bias_activation_and_accumulation_are_those_of_each_member(shared, activation, out_dtype):
    gx, gw, gdy = layer("mxfp8", "mxfp8", alignment=16)
    options = {"activation": activation, "accumulate": True}
    for a, b, n in ((gx, gw.T, 20), (gdy.T, gx, 48)):
        bias = testing.matrix("gauss", (n,) if shared else (6, n), seed=3)
        shape = (gx.rows.capacity, n) if n == 20 else (6, 20, n)
        out = testing.matrix("gauss", shape, seed=4).astype(out_dtype)
        expected = out.copy()
        targets = grouped_gemm.views(expected, a.rows)
        for i, (left, right, target) in enumerate(zip(a, b, targets, strict=True)):
            hq.matmul(left, right, out=target, bias=bias if shared else bias[i], **options)
        assert hq.matmul(a, b, out=out, bias=bias, **options) is out
        testing.assert_bitwise_equal(out, expected)


def test_rows_of_no_member_stay_in_a_given_out_and_empty_groups_leave_theirs_when_accumulating():
    gx, gw, gdy = layer("mxfp8", "mxfp8")
    out = np.full((gx.rows.capacity, 20), np.nan, np.float32)
    assert hq.matmul(gx, gw.T, out=out) is out
    outside = rows_of_no_member(SIZES, len(out))
    assert np.isnan(out[outside]).all() and not np.isnan(out[~outside]).any()
    dw = np.full((6, 20, 48), 7, np.float32)
    hq.matmul(gdy.T, gx, out=dw, accumulate=True)
    assert all((dw[i] == 7).all() == (size == 0) for i, size in enumerate(SIZES))
    hq.matmul(gdy.T, gx, out=dw)
    assert not dw[np.array(SIZES) == 0].any()
    strided = np.zeros((6, 20, 96), np.float32)[:, :, ::2]
    assert hq.matmul(gdy.T, gx, out=strided) is strided
    np.testing.assert_array_equal(strided, dw)


def test_every_way_to_multiply_is_the_same():
    gx, gw, _ = layer("mxfp8", "nvfp4")
    y = gx @ gw.T
    for other in (hq.matmul(gx, gw.T), np.matmul(gx, gw.T), hq.matmul(gx, gw.T, engine="fp32"),
                  hq.matmul(gx, gw.T, engine=hq.engine_for(gx, gw.T)), np.matmul(gx, gw.T, out=np.zeros_like(y))):
        testing.assert_bitwise_equal(other, y)
    assert str(hq.engine_for(gx, gw.T)) == "fp32: NumPy: operands decoded to float32, BLAS"


def hidden(group, stored=None):
    """Row sizes where the host cannot see them."""
    array = np.array(group.rows.host if stored is None else stored, np.int32)
    rows = Sizes(len(array), None, None, array, "int32", group.rows.capacity)
    parts = (None if part is None else part.with_sizes(rows) for part in (group.rowwise, group.columnwise))
    return GroupedArray(*parts, rows, group.columns, group.dtype)


def request(a, b):
    return grouped_gemm.product(a, b).request(np.dtype(np.float32), None, None, None, False, hq.Engine("fp32"))


def test_a_request_says_which_axis_is_ragged_and_needs_no_sizes_on_the_host():
    gx, gw, gdy = layer("mxfp8", "nvfp4")
    gx, gdy = hidden(gx), hidden(gdy)
    T = gx.rows.capacity
    for a, b, ragged, shape in ((gx, gw.T, "rows", (T, 20)), (gdy, gw, "rows", (T, 48)), (gdy.T, gx, "k", (6, 20, 48)),
                                (gw, gw.T, "none", (6, 20, 20))):
        asked = request(a, b)
        assert (asked.ragged, asked.shape, asked.a, asked.b) == (ragged, shape, a.rowwise, b.columnwise)
        assert (asked.m, asked.n, asked.k) == (a.rows, b.columns, a.columns)
        assert grouped_gemm.product(a, b).is_one_call
    turned = request(gw, gx.T)
    assert (turned.ragged, turned.shape) == ("rows", (T, 20)) and grouped_gemm.product(gw, gx.T).is_transposed
    assert (turned.a, turned.b, turned.m, turned.n) == (gx.rowwise, gw.rowwise, gx.rows, gw.rows)


def test_what_is_no_single_call_needs_the_sizes():
    gx, _, _ = layer("mxfp8", "nvfp4")
    shy = hidden(gx)
    assert not grouped_gemm.product(gx, gx.T).is_one_call
    with pytest.raises(ValueError, match=r"needs the sizes on the host.*g.to_host\(\) copies them"):
        _ = shy @ shy.T


B = hq.GroupedArray.from_stacked(testing.matrix("gauss", (3, 32, 8)), columnwise="mxfp8")


@named(("call", "error", "message"), [
    (lambda: G @ X, TypeError, r"b is ndarray beside a GroupedArray; .*from_stacked.*grouped_quantize\(..., sizes\)"),
    (lambda: X @ G, TypeError, "a is ndarray beside a GroupedArray"),
    (lambda: G @ hq.quantize(X, rowwise="mxfp8"), TypeError, "b is HybridArray beside a GroupedArray"),
    (lambda: hq.quantize(X, rowwise="mxfp8") @ G, TypeError, "a is HybridArray beside a GroupedArray"),
    (lambda: hq.matmul([1.0], G), TypeError, "a is list beside a GroupedArray"),
    (lambda: hq.engine_for(X, G), TypeError, "a is ndarray beside a GroupedArray"),
    (lambda: G @ B.split(3)[0], ValueError, "multiplies member by member: a has 3 of them, b 1"),
    (lambda: G.T @ B, ValueError, re.escape("of group 0 they are 5 and 32")),
    (lambda: G @ GroupedArray.from_stacked(np.ones((3, 8, 32), np.float32), columnwise="mxfp8"), ValueError,
     re.escape("(3, None, 32) @ (3, 8, 32) do not fit (b.T would fit: .T is free)")),
    (lambda: hidden(G).T @ B, ValueError, "one is ragged with sizes on the device and the other uniform"),
    (lambda: B @ G, ValueError, r"needs the rowwise part, but this GroupedArray \(3, 32, 8\) holds only columnwise"),
    (lambda: G @ G.drop(columnwise=True), ValueError, "contracts b's first axis, needs the columnwise part"),
    (lambda: G.T @ hq.grouped_quantize(X, [5, 1, 16], columnwise="mxfp8"), ValueError, "of group 1 they are 0 and 1"),
    (lambda: hq.matmul(G, B, out=np.zeros((39, 8), np.float32)), ValueError,
     re.escape("out must have shape (40, 8) for (3, None, 32) @ (3, 32, 8), it has (39, 8)")),
    (lambda: hq.matmul(G, B, out=np.zeros((40, 8))), TypeError, "the result is float32, float16 or bfloat16, not"),
    (lambda: hq.matmul(G, B, out=[1]), TypeError, "out is a NumPy or CuPy array, not list"),
    (lambda: hq.matmul(G, B, out=(X, X)), NotImplementedError, r"out=\(y, aux\) is not built for groups"),
    (lambda: hq.matmul(G, B, accumulate=True), ValueError, "accumulate=True adds to out; pass out="),
    (lambda: hq.matmul(G, B, activation="relu"), ValueError, "activation='relu' is not 'gelu'"),
    (lambda: hq.matmul(G, B, bias=np.ones(9, np.float32)), ValueError,
     r"bias must have shape \(3, 8\) or \(8,\), it has"),
    (lambda: hq.matmul(G, B, engine="native"), ValueError, "='native' runs on a GPU; on NumPy the engine is fp32"),
    (lambda: hq.matmul(G, B, engine="turbo"), ValueError, "engine='turbo' is not one of"),
    (lambda: hq.matmul(B.T, G.drop(columnwise=True).T, bias=np.ones(40, np.float32)), NotImplementedError, "ragged n"),
    (lambda: hq.matmul(G, G.drop(columnwise=True).T, out=X), NotImplementedError,
     "differ along both axes; leave it out"),
    (lambda: G @ "text", TypeError, "b is str beside a GroupedArray"),
])
def test_matmul_says_what_it_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()
