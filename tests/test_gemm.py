"""Which parts a product reads, which engine multiplies them, and the product itself."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import gemm, testing
from hqarray.formats import FORMATS

named = pytest.mark.parametrize
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def quantized(kind, shape, rowwise=None, columnwise=None, seed=0):
    return hq.quantize(testing.matrix(kind, shape, seed=seed), rowwise=rowwise, columnwise=columnwise)


def assert_product(actual, a, b, rounding=2.0**-24):
    """Row by row within (k + 2) 2^-24 of the float64 product's sum of magnitudes, plus one rounding of the result."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    exact, magnitude = a @ b, np.abs(a) @ np.abs(b)
    bound = (a.shape[-1] + 2) * 2.0**-24 * magnitude + rounding * np.abs(exact) + 2.0**-149
    outside = np.abs(np.asarray(actual, np.float64) - exact) > bound
    assert not outside.any(), f"rows {np.unique(np.argwhere(outside)[:, 0])} are outside the bound"


# --- the product ----------------------------------------------------------------------------------


@named("b_format", FORMATS)
@named("a_format", FORMATS)
def test_a_product_is_within_the_bound_of_its_decoded_operands(a_format, b_format):
    for m, k, n in ((5, 33, 7), (1, 1, 1), (17, 127, 31), (3, 129, 2)):
        x, y = (np.clip(testing.matrix("wide", shape), -3e4, 3e4) for shape in ((m, k), (k, n)))  # within float16
        a, b = hq.quantize(x, rowwise=a_format), hq.quantize(y, columnwise=b_format)
        assert_product(a @ b, a.dequantize(), b.dequantize())


@named("k", [1, 15, 17, 31, 33, 127, 129, 2000])
def test_the_bound_holds_for_ragged_and_long_k(k):
    a, b = quantized("gauss", (9, k), rowwise="mxfp8"), quantized("gauss", (k, 11), columnwise="nvfp4", seed=1)
    assert_product(a @ b, a.dequantize(), b.dequantize())


@named(("m", "k", "n"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
@named("format", FORMATS)
def test_a_sum_over_nothing_is_zero_and_nothing_times_something_is_empty(format, m, k, n):
    a, b = quantized("gauss", (m, k), rowwise=format), quantized("gauss", (k, n), columnwise=format)
    y = a @ b
    assert y.shape == (m, n) and y.dtype == np.float32 and not y.any()
    poisoned = np.full((m, n), np.nan, np.float32)
    assert not hq.matmul(a, b, out=poisoned).any()


@named("columnwise", FORMATS)
@named("rowwise", FORMATS)
def test_fprop_reads_the_row_formats_and_dgrad_and_wgrad_the_column_ones(rowwise, columnwise):
    """Bit for bit what arrays of that one format alone give."""
    x, w, dy = (testing.matrix("gauss", shape, seed=i) for i, shape in enumerate(((24, 40), (17, 40), (24, 17))))
    hx, hw, hdy = (hq.quantize(v, rowwise=rowwise, columnwise=columnwise) for v in (x, w, dy))
    rx, rw, rdy = (hq.quantize(v, rowwise=rowwise) for v in (x, w, dy))
    cx, cw, cdy = (hq.quantize(v, columnwise=columnwise) for v in (x, w, dy))
    testing.assert_bitwise_equal(hx @ hw.T, rx @ rw.T)
    testing.assert_bitwise_equal(hdy @ hw, rdy @ cw)
    testing.assert_bitwise_equal(hdy.T @ hx, cdy.T @ cx)
    assert_product(hx @ hw.T, rx.dequantize(), rw.dequantize().T)
    assert_product(hdy @ hw, rdy.dequantize(), cw.dequantize())
    assert_product(hdy.T @ hx, cdy.dequantize().T, cx.dequantize())


@named("format", FORMATS)
def test_a_plain_array_keeps_its_values_on_either_side(format):
    x = testing.matrix("wide", (6, 40))
    h = quantized("gauss", (40, 9), columnwise=format)
    for y in (x @ h, np.matmul(x, h), hq.matmul(x, h), x.__matmul__(h)):
        assert_product(y, x, h.dequantize())
    g = quantized("gauss", (9, 6), rowwise=format)
    for y in (g @ x, np.matmul(g, x), hq.matmul(g, x)):
        assert_product(y, g.dequantize(), x)
    assert_product(hq.matmul(x, x.T), x, x.T)


def test_a_strided_plain_array_gives_the_product_of_its_copy():
    b = quantized("gauss", (33, 9), columnwise="mxfp8")
    for name, view in testing.VIEWS.items():
        x = view(testing.matrix("gauss", (40, 66) if name == "every_second_column" else (33, 7)
                                if name == "transposed" else (41, 36) if name == "offset" else (40, 33)))
        assert_product(x @ b, x, b.dequantize())


def test_a_left_operand_may_have_leading_axes():
    x = testing.matrix("gauss", (2, 3, 5, 34))
    w = quantized("gauss", (34, 7), columnwise="mxfp8")
    a = hq.quantize(x, rowwise="nvfp4")
    y = a @ w
    assert y.shape == (2, 3, 5, 7)
    testing.assert_bitwise_equal(y.reshape(30, 7), a.reshape(-1, 34) @ w)
    assert (x @ w).shape == (2, 3, 5, 7)
    vector = hq.quantize(x[0, 0, 0], rowwise="nvfp4")
    assert (vector @ w).shape == (7,) == (x[0, 0, 0] @ w).shape
    empty = hq.quantize(x[:0], rowwise="nvfp4")
    assert (empty @ w).shape == (0, 3, 5, 7) == (x[:0] @ w).shape


def test_nan_and_infinity_pass_through():
    x = np.ones((3, 32), np.float32)
    x[1, 4] = np.nan
    y = hq.quantize(x, rowwise="mxfp4") @ np.ones((32, 2), np.float32)
    assert np.isnan(y).tolist() == [[False] * 2, [True] * 2, [False] * 2]


# --- out, dtype, epilogue -------------------------------------------------------------------------


@pytest.fixture
def operands():
    return quantized("gauss", (12, 40), rowwise="mxfp8"), quantized("gauss", (40, 7), columnwise="nvfp4", seed=1)


def gelu64(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_out_receives_the_product_and_is_returned(operands):
    a, b = operands
    out = np.full((12, 7), np.nan, np.float32)
    assert hq.matmul(a, b, out=out) is out
    testing.assert_bitwise_equal(out, a @ b)
    assert np.matmul(a, b, out=out) is out
    storage = np.full((7, 24), np.nan, np.float32)
    strided = storage.T[::2]
    assert hq.matmul(a, b, out=strided) is strided
    testing.assert_bitwise_equal(strided.copy(), a @ b)
    assert np.isnan(storage[:, 1::2]).all()


def test_out_of_a_left_operand_with_leading_axes_may_be_strided(operands):
    a, b = operands
    deep = a.reshape(3, 4, 40)
    storage = np.zeros((4, 3, 7), np.float32)
    hq.matmul(deep, b, out=storage.transpose(1, 0, 2))
    testing.assert_bitwise_equal(storage.transpose(1, 0, 2).copy(), (a @ b).reshape(3, 4, 7))
    hq.matmul(deep, b, out=storage.transpose(1, 0, 2), accumulate=True)
    testing.assert_bitwise_equal(storage.transpose(1, 0, 2).copy(), 2 * (a @ b).reshape(3, 4, 7))


@named(("dtype", "rounding"), [(np.float32, 0), (np.float16, 2.0**-11), (BFLOAT16, 2.0**-8)], ids=str)
def test_out_dtype_is_one_rounding_of_the_float32(operands, dtype, rounding):
    a, b = operands
    y = hq.matmul(a, b, out_dtype=dtype)
    assert y.dtype == dtype
    testing.assert_bitwise_equal(y, (a @ b).astype(dtype))
    assert_product(y, a.dequantize(), b.dequantize(), rounding)


DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": BFLOAT16, "float64": np.float64}
RESULTS = {  # what either order gives
    ("float32", "float32"): "float32", ("float32", "float16"): "float32", ("float32", "bfloat16"): "float32",
    ("float16", "float16"): "float16", ("float16", "bfloat16"): "float32", ("bfloat16", "bfloat16"): "bfloat16",
    ("float32", "float64"): "float32", ("float16", "float64"): "float32", ("bfloat16", "float64"): "float32",
    ("float64", "float64"): "float32",
}


@named(("pair", "result"), RESULTS.items(), ids=lambda value: "-".join(value) if isinstance(value, tuple) else value)
def test_the_results_dtype_follows_the_nominal_dtypes(pair, result):
    for left, right in {pair, pair[::-1]}:
        a, b = np.ones((3, 32), DTYPES[left]), np.ones((32, 5), DTYPES[right])
        qa, qb = hq.quantize(a, rowwise="mxfp8"), hq.quantize(b, columnwise="mxfp8")
        for y in (hq.matmul(a, b), qa @ b, hq.matmul(a, qb), qa @ qb):
            assert y.dtype == DTYPES[result] and (y == 32).all()


@named("bias_dtype", [np.float32, np.float16, BFLOAT16, np.float64], ids=str)
def test_bias_is_added_before_the_rounding(operands, bias_dtype):
    a, b = operands
    bias = testing.matrix("gauss", (7,)).astype(bias_dtype)
    y = hq.matmul(a, b, bias=bias)
    testing.assert_bitwise_equal(y, (a @ b) + bias.astype(np.float32))


def test_gelu_is_the_tanh_form_and_aux_what_it_was_applied_to(operands):
    a, b = operands
    bias = testing.matrix("gauss", (7,))
    out, aux = np.full((12, 7), np.nan, np.float32), np.full((12, 7), np.nan, np.float32)
    assert hq.matmul(a, b, bias=bias, activation="gelu", out=(out, aux)) is out
    testing.assert_bitwise_equal(aux, hq.matmul(a, b, bias=bias))
    np.testing.assert_allclose(out, gelu64(aux.astype(np.float64)), rtol=1e-5, atol=1e-6)
    large = np.array([[-1e30, -50, 0, 50, 1e30]], np.float32)
    assert gemm.gelu(large[:, 1:4]).tolist() == [[0.0, 0.0, 50.0]]


def test_accumulate_adds_to_out(operands):
    a, b = operands
    out = testing.matrix("gauss", (12, 7))
    expected = (a @ b) + out
    assert hq.matmul(a, b, out=out, accumulate=True) is out
    testing.assert_bitwise_equal(out, expected)
    for dtype in (np.float16, BFLOAT16):
        half = np.ones((12, 7), dtype)
        hq.matmul(a, b, out=half, accumulate=True)
        testing.assert_bitwise_equal(half, ((a @ b) + np.float32(1)).astype(dtype))


def test_operands_are_left_as_they_were(operands):
    a, b = operands
    x = testing.matrix("gauss", (12, 40))
    before = a.copy(), b.copy(), x.copy()
    hq.matmul(a, b, bias=np.ones(7, np.float32), activation="gelu")
    hq.matmul(x, b, bias=np.ones(7, np.float32), activation="gelu")
    for now, then in zip((a, b, x), before, strict=True):
        testing.assert_bitwise_equal(now, then)


def test_the_epilogue_goes_bias_gelu_accumulate(operands):
    a, b = operands
    bias, out = testing.matrix("gauss", (7,)), np.ones((12, 7), np.float32)
    hq.matmul(a, b, bias=bias, activation="gelu", accumulate=True, out=out)
    testing.assert_bitwise_equal(out, hq.matmul(a, b, bias=bias, activation="gelu") + np.float32(1))


# --- the choice of an engine ----------------------------------------------------------------------

CHIPS = {"numpy": None, "sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}
SHORT = {
    "t3": FORMATS["fp8_e4m3"], "t2": FORMATS["fp8_e5m2"], "v": FORMATS["fp8_block_1x128"],
    "sq": FORMATS["fp8_block_128x128"], "v2": FORMATS["fp8_block_1x128_pow2"],
    "sq2": FORMATS["fp8_block_128x128_pow2"], "mx8": FORMATS["mxfp8"], "mx2": FORMATS["mxfp8_e5m2"],
    "mx6": FORMATS["mxfp6_e2m3"], "mx4": FORMATS["mxfp4"], "nv": FORMATS["nvfp4"], "bf": FORMATS["bf16"],
    "h": FORMATS["fp16"], "f": FORMATS["fp32"], "r": FORMATS["fp8_row_e4m3"],
    "r2": hq.FP8("e5m2", pow2=True, per_row=True), "nr": FORMATS["nvfp4_row"],
    "rot": hq.NVFP4(rht=True),
}
ENGINES = {  # DESIGN section 5: numpy, sm_80, sm_90, sm_100, sm_120
    "t3 t3": "fp32 bf16   native native native",
    "t3 t2": "fp32 bf16   native native native",
    "t2 t2": "fp32 bf16   bf16   bf16   bf16",
    "v v": "  fp32 fp32   native fp32   fp32",
    "v sq": " fp32 fp32   native fp32   fp32",
    "sq sq": "fp32 fp32   fp32   fp32   fp32",
    "v2 sq": "fp32 bf16x3 native bf16x3 bf16x3",
    "v2 sq2": "fp32 bf16  native bf16   bf16",
    "sq2 sq2": "fp32 bf16 bf16   bf16   bf16",
    "sq2 mx8": "fp32 bf16 bf16   bf16   bf16",
    "f v2": " fp32 bf16x3 bf16x3 bf16x3 bf16x3",
    "t3 v": " fp32 bf16x3 bf16x3 bf16x3 bf16x3",
    "mx8 mx8": "fp32 bf16 bf16   native bf16",
    "mx8 mx2": "fp32 bf16 bf16   native bf16",
    "mx2 mx2": "fp32 bf16 bf16   bf16   bf16",
    "mx8 mx4": "fp32 bf16 bf16   bf16   bf16",
    "mx6 mx6": "fp32 bf16 bf16   bf16   bf16",
    "nv nv": "fp32 bf16   bf16   native bf16",
    "nv mx8": "fp32 bf16  bf16   bf16   bf16",
    "t3 mx8": "fp32 bf16  bf16   bf16   bf16",
    "v mx8": "fp32 bf16x3 bf16x3 bf16x3 bf16x3",
    "r r": "  fp32 fp32   native fp32   fp32",
    "r r2": " fp32 bf16x3 native bf16x3 bf16x3",
    "r2 r2": "fp32 bf16   bf16   bf16   bf16",
    "r t3": " fp32 bf16x3 bf16x3 bf16x3 bf16x3",
    "r v": "  fp32 fp32   fp32   fp32   fp32",
    "r sq2": "fp32 bf16x3 bf16x3 bf16x3 bf16x3",
    "r mx8": "fp32 bf16x3 bf16x3 bf16x3 bf16x3",
    "r nr": " fp32 fp32   fp32   fp32   fp32",
    "nr nr": "fp32 fp32   fp32   fp32   fp32",
    "nr nv": "fp32 bf16x3 bf16x3 bf16x3 bf16x3",
    "nr t3": "fp32 bf16x3 bf16x3 bf16x3 bf16x3",
    "rot rot": "fp32 bf16 bf16   native bf16",
    "bf bf": "fp32 native native native native",
    "h h": "  fp32 native native native native",
    "f f": "  fp32 native native native native",
    "bf h": " fp32 bf16x3 bf16x3 bf16x3 bf16x3",
    "bf mx8": "fp32 bf16  bf16   bf16   bf16",
    "f mx8": "fp32 bf16x3 bf16x3 bf16x3 bf16x3",
    "h nv": " fp32 bf16x3 bf16x3 bf16x3 bf16x3",
    "f v": "  fp32 fp32   fp32   fp32   fp32",
    "h f": "  fp32 fp32   fp32   fp32   fp32",
}


@named(("pair", "engines"), ENGINES.items(), ids=lambda value: value if len(value) < 9 else "")
def test_the_engine_is_the_designs(pair, engines):
    left, right = (SHORT[name].storage for name in pair.split())
    for a, b in ((left, right), (right, left)):
        chosen = {name: gemm.choose_engine(a, b, chip) for name, chip in CHIPS.items()}
        assert [engine.name for engine in chosen.values()] == engines.split()
        assert all(engine.reason for engine in chosen.values())


@named("name", FORMATS)
def test_every_pair_has_an_engine_and_a_reason_on_every_chip(name):
    for other, chip in itertools.product(FORMATS, CHIPS.values()):
        engine = gemm.choose_engine(FORMATS[name].storage, FORMATS[other].storage, chip)
        assert engine.name in gemm.ENGINES and engine.reason and str(engine).startswith(f"{engine.name}: ")


@named(("a", "b", "chip", "reason"), [
    ("t2", "t2", (9, 0), "cuBLASLt has no E5M2 x E5M2; both operands are exact in bf16"),
    ("sq", "sq", (9, 0), "cuBLASLt has no 128x128 by 128x128; neither operand is exact in bf16"),
    ("v", "v", (10, 0), "cuBLASLt multiplies fp32 block scales on sm_90 only, not on sm_100"),
    ("mx8", "mx8", (9, 0), "sm_90 has no MXFP8 tensor cores (sm_100 has); both operands are exact in bf16"),
    ("nv", "nv", (9, 0), "sm_90 has no NVFP4 tensor cores"),
    ("t3", "t3", (8, 0), "sm_80 has no FP8 tensor cores (sm_89 has)"),
    ("t3", "t3", (9, 0), "cuBLASLt on sm_90"),
    ("t3", "v", (9, 0), "one operand has block scales, the other a single one; one operand needs three bf16 terms"),
    ("r", "r", (9, 0), "cuBLASLt on sm_90"),
    ("r", "r", (10, 0), "cuBLASLt multiplies fp32 scales of rows on sm_90 only, not on sm_100"),
    ("r", "t3", (9, 0), "one operand has a scale for each row, the other a single one; one operand needs three"),
    ("r", "v", (9, 0), "one operand has a scale for each row, the other for each block"),
    ("nr", "nv", (10, 0), "cuBLASLt has no global scale for each row; one operand needs three bf16 terms"),
    ("mx6", "mx8", (10, 0), "cuBLASLt has no MXFP6 or MXFP4"),
    ("nv", "mx8", (9, 0), "operands are scaled differently"),
    ("bf", "h", (9, 0), "operands have different dtypes; one operand needs three bf16 terms"),
])
def test_the_reason_says_what_native_lacks(a, b, chip, reason):
    assert gemm.choose_engine(SHORT[a].storage, SHORT[b].storage, chip).reason.startswith(reason)


@named("name", FORMATS)
def test_what_bf16_emulation_calls_exact_is_exact(name):
    """Decode with scale and global scale one rounding apart: the codes under their block scales fit bf16's 8 bits."""
    storage = FORMATS[name].storage
    if storage.bf16_terms == 3:
        return
    if storage.element.bits > 8:
        assert storage.element.significand_bits <= 8
        return
    values = storage.element.values[np.isfinite(storage.element.values)]
    scales = {"e4m3": hq.ELEMENTS["e4m3"].values[:0x7F], "e8m0": np.float32(2.0) ** np.arange(-40, 40),
              "float32": np.ones(1, np.float32)}[storage.scale]  # a single scale is left to alpha
    decoded = np.multiply.outer(values, scales).astype(np.float32)
    np.testing.assert_array_equal(decoded.astype(BFLOAT16).astype(np.float32), decoded)


@named("name", ["fp8_block_1x128_pow2", "fp8_block_128x128_pow2"])
def test_pow2_block_scales_need_one_bf16_term(name):
    decoded = quantized("wide", (64, 256), rowwise=name).dequantize()
    np.testing.assert_array_equal(decoded.astype(BFLOAT16).astype(np.float32), decoded)
    assert FORMATS[name].storage.bf16_terms == 1
