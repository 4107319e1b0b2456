"""matmul on the GPU: against float64 of the decoded operands, against torch bit for bit, and against itself."""

import itertools
import threading

import numpy as np
import pytest

import hqarray as hq
from hqarray import testing
from hqarray.arrays import QuantizedArray
from hqarray.buffers import Packed
from hqarray.formats import BFLOAT16, FORMATS
from hqarray.layout import Tiled128x4
from hqarray.rawkernels import traits

pytestmark = pytest.mark.gpu

named = pytest.mark.parametrize
NAMES = list(FORMATS)
DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
RAGGED = ((5, 33, 7), (1, 1, 1), (17, 127, 31), (3, 129, 2), (66, 300, 37))
PAIRS = (("fp8_e4m3", "fp8_e5m2"), ("fp8_block_1x128", "fp8_block_1x128"), ("fp8_block_1x128", "fp8_block_128x128"),
         ("fp8_block_128x128", "fp8_block_1x128"), ("mxfp8", "nvfp4"), ("nvfp4", "nvfp4_16x16"), ("fp8_e5m2", "mxfp4"),
         ("fp8_block_1x128", "mxfp8"), ("fp8_block_128x128", "fp8_block_128x128"), ("bf16", "bf16"), ("fp16", "fp16"),
         ("fp32", "fp32"), ("bf16", "fp32"))
"""Every engine, and every way in which an operand comes to cuBLASLt."""

EXACT = ("fp8_e4m3", "fp8_block_1x128_pow2", "nvfp4", "bf16")
"""Formats that one bf16 number holds, by each kind of scale."""


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def on_gpu(cupy, kind, shape, dtype=np.float32, seed=0):
    return cupy.asarray(np.clip(testing.matrix(kind, shape, seed=seed), -3e4, 3e4).astype(dtype))


def operands(cupy, a, b, m, k, n, kind="wide", dtype=np.float32):
    return (hq.quantize(on_gpu(cupy, kind, (m, k), dtype), rowwise=a),
            hq.quantize(on_gpu(cupy, kind, (k, n), dtype, 1), columnwise=b))


def values(x):
    """float64 of what an operand holds; CuPy's cast flushes float32's subnormals, which `exactly` keeps."""
    return (x.dequantize(dtype=np.float32) if isinstance(x, hq.HybridArray) else x).astype(np.float64)


def exactly(array):
    return array.get().astype(np.float64)


def bound(engine, a, b):
    """Largest error of a row's sums in units of its sum of magnitudes.

    A float32 sum loses 2^-24 an addition. FP8 tensor cores on Hopper keep 13 bits behind the largest of 32 products, so
    each of a few may lose 2^-13 of it; of 32 no more than half are lost in sum, nor of the 128 that are summed before
    cuBLASLt adds to float32, since their largest differ.
    """
    k = a.shape[-1]
    fp8 = engine == "native" and isinstance(a, hq.HybridArray) and a.rowwise.format.storage.scale != "none"
    additions = 3 * k if engine == "bf16x3" else k
    return (additions + 4) * 2.0**-24 + (min(k, 16) * 2.0**-13 + 2.0**-15) * fp8


def assert_product(cupy, actual, a, b, engine=None, bias=None, gelu=False, added=None):
    """Within the bound of the float64 result."""
    x, y = values(a), values(b)
    assert actual.shape == (*a.shape[:-1], b.shape[1])
    x = x.reshape(-1, x.shape[-1])
    exact, magnitude = x @ y, cupy.abs(x) @ cupy.abs(y)
    tolerance = bound(engine or hq.engine_for(a, b).name, a, b) * magnitude
    if bias is not None:
        exact = exact + values(bias)
        tolerance = tolerance + 2.0**-23 * (cupy.abs(values(bias)) + cupy.abs(exact))
    if gelu:
        tolerance = 1.13 * tolerance + 2.0**-21 * cupy.abs(exact)  # gelu's steepest slope; tanhf and the cube
        exact = exact / 2 * (1 + cupy.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    if added is not None:
        exact = exact + values(added).reshape(exact.shape)
    tolerance = tolerance + ROUNDING[actual.dtype.name] * cupy.abs(exact) + 2.0**-126
    error = cupy.abs(actual.astype(np.float64).reshape(exact.shape) - exact)
    rows = cupy.argwhere(~(error <= tolerance).all(axis=1))
    assert rows.size == 0, f"rows {rows.get().ravel()[:8]}: {float((error / tolerance).max())} of the bound"


# --- the product ----------------------------------------------------------------------------------


@named("b_format", NAMES)
@named("a_format", NAMES)
def test_a_product_is_within_the_bound_of_its_decoded_operands(cupy, a_format, b_format):
    for m, k, n in (*RAGGED, (128, 256, 64), (200, 1000, 136)):
        a, b = operands(cupy, a_format, b_format, m, k, n)
        assert_product(cupy, a @ b, a, b)
    long_a, long_b = operands(cupy, a_format, b_format, 64, 8192, 48, "gauss")
    assert_product(cupy, long_a @ long_b, long_a, long_b)


@named("format", NAMES)
@named(("m", "k", "n"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_a_sum_over_nothing_is_zero_and_nothing_times_something_is_empty(cupy, format, m, k, n):
    a, b = operands(cupy, format, format, m, k, n)
    assert (a @ b).shape == (m, n) and not (a @ b).any()
    poisoned = cupy.full((m, n), np.nan, np.float32)
    assert not hq.matmul(a, b, out=poisoned).any()
    bias, out = on_gpu(cupy, "gauss", (n,)), cupy.ones((m, n), np.float32)
    hq.matmul(a, b, out=out, bias=bias, accumulate=True)
    if k == 0:
        testing.assert_bitwise_equal(out, 1 + cupy.zeros((m, n), np.float32) + bias)


@named("columnwise", NAMES)
@named("rowwise", NAMES)
def test_fprop_dgrad_and_wgrad_read_the_formats_they_are_made_for(cupy, rowwise, columnwise):
    """Bit for bit what arrays of that one format alone give."""
    x, w, dy = (on_gpu(cupy, "gauss", shape, seed=i) for i, shape in enumerate(((24, 40), (20, 40), (24, 20))))
    hx, hw, hdy = (hq.quantize(v, rowwise=rowwise, columnwise=columnwise) for v in (x, w, dy))
    rx, rw, rdy = (hq.quantize(v, rowwise=rowwise) for v in (x, w, dy))
    cx, cw, cdy = (hq.quantize(v, columnwise=columnwise) for v in (x, w, dy))
    for actual, a, b in ((hx @ hw.T, rx, rw.T), (hdy @ hw, rdy, cw), (hdy.T @ hx, cdy.T, cx)):
        testing.assert_bitwise_equal(actual, a @ b)
        assert_product(cupy, actual, a, b)


@named("engine", ["bf16", "bf16x3", "fp32"])
@named("b_format", EXACT)
@named("a_format", EXACT)
def test_an_engine_that_is_asked_for_multiplies(cupy, engine, a_format, b_format):
    for m, k, n in RAGGED:
        a, b = operands(cupy, a_format, b_format, m, k, n)
        assert_product(cupy, hq.matmul(a, b, engine=engine), a, b, engine)


@named("name", NAMES)
def test_decoded_operands_are_exact(cupy, name):
    """A product with the unit matrix gives each value, scales and all, back."""
    unit = cupy.eye(90, dtype=np.float32).astype(BFLOAT16)
    for kind in ("wide", "ties", "tiny", "huge", "subnormals"):
        a = hq.quantize(cupy.asarray(testing.matrix(kind, (37, 90))), rowwise=name)
        engine = "bf16" if FORMATS[name].storage.bf16_terms == 1 else "bf16x3"
        y = hq.matmul(a, unit, engine=engine, out_dtype=np.float32)
        expected = exactly(a.dequantize(dtype=np.float32))
        if not np.isfinite(expected).all():  # fp16
            continue
        error = np.abs(exactly(y) - expected)
        has_alpha = traits.left_to_alpha(FORMATS[name].storage)[1]
        slack = 2.0**-23 if has_alpha or engine == "bf16x3" else 0  # alpha's rounding; the tensor core's last bit
        limit = slack * np.abs(expected) + 2.0**-126  # tensor cores need not keep subnormals
        assert (error <= limit).all(), f"{kind}: {float(error.max())}"


def test_global_scales_far_from_one_neither_overflow_nor_vanish(cupy):
    x, y = (on_gpu(cupy, "gauss", shape, seed=i) for i, shape in enumerate(((33, 64), (64, 40))))
    for name, engine in (("nvfp4", "bf16"), ("fp8_e4m3", "bf16"), ("nvfp4", "fp32"), ("fp8_e5m2", "bf16")):
        for scale in (2.0**-100, 2.0**100, 1.0):
            a = hq.quantize(x * np.float32(scale), rowwise=name)
            b = hq.quantize(y / np.float32(scale), columnwise=name)
            assert_product(cupy, hq.matmul(a, b, engine=engine), a, b, engine)


def test_nan_and_infinity_pass_through_as_on_numpy(cupy):
    x, y = testing.matrix("gauss", (9, 64)), testing.matrix("gauss", (64, 7), seed=1)
    x[1, 4], x[2, 5], x[3, 6] = np.nan, np.inf, -np.inf
    y[9, 3] = np.inf
    for a_format, b_format in itertools.product(("fp32", "bf16", "fp16"), ("fp32", "bf16")):
        a, b = hq.quantize(x, rowwise=a_format), hq.quantize(y, columnwise=b_format)
        with np.errstate(all="ignore"):
            expected = hq.matmul(a, b, out_dtype=np.float32)
        actual = hq.matmul(hq.quantize(cupy.asarray(x), rowwise=a_format),
                           hq.quantize(cupy.asarray(y), columnwise=b_format), out_dtype=np.float32).get()
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
        np.testing.assert_array_equal(actual[~finite], expected[~finite])
    for name in ("mxfp4", "nvfp4", "mxfp8", "fp8_e4m3"):
        y = hq.quantize(cupy.asarray(x), rowwise=name) @ cupy.ones((64, 2), np.float32)
        assert cupy.isnan(y)[1].all() and cupy.isfinite(y)[4:].all()


# --- against torch --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@named("fast", [False, True])
@named(("m", "k", "n"), [(512, 1024, 768), (1024, 4096, 2048), (16, 512, 4096)])
def test_native_fp8_equals_torch_bit_for_bit(cupy, torch, m, k, n, fast):
    a, b = operands(cupy, "fp8_e4m3", "fp8_e4m3", m, k, n, "gauss", BFLOAT16)
    left, right = (torch.from_dlpack(part.codes).view(torch.float8_e4m3fn) for part in (a.rowwise, b.columnwise))
    scales = [torch.from_dlpack(part.scales).reshape(()) for part in (a.rowwise, b.columnwise)]
    for out_dtype, torch_dtype in ((BFLOAT16, torch.bfloat16), (np.float32, torch.float32)):
        expected = torch._scaled_mm(left, right.t(), *scales, out_dtype=torch_dtype, use_fast_accum=fast)
        actual = hq.matmul(a, b, out_dtype=out_dtype, engine=hq.Engine("native", fast_accumulate=fast))
        assert actual.tobytes() == expected.view(torch.uint8).cpu().numpy().tobytes()


@named("b_format", ["fp8_block_1x128", "fp8_block_128x128"])
@named(("m", "k", "n"), [(512, 1024, 768), (1024, 4096, 2048)])
def test_native_blocks_equal_torch_bit_for_bit(cupy, torch, m, k, n, b_format):
    a, b = operands(cupy, "fp8_block_1x128", b_format, m, k, n, "gauss", BFLOAT16)
    left, right = (torch.from_dlpack(part.codes).view(torch.float8_e4m3fn) for part in (a.rowwise, b.columnwise))
    scales = torch.from_dlpack(a.rowwise.scales), torch.from_dlpack(b.columnwise.scales).t()
    expected = torch._scaled_mm(left, right.t(), *scales, out_dtype=torch.bfloat16)
    assert (a @ b).tobytes() == expected.view(torch.uint8).cpu().numpy().tobytes()


# --- poison ---------------------------------------------------------------------------------------


def surrounded(cupy, part):
    """The same part amid bytes of 0xFF, which its scale padding holds too."""
    layout = part.buffers.layout
    memory = cupy.full(layout.nbytes + 2048, 0xFF, np.uint8)
    region = memory[1024 : 1024 + layout.nbytes]
    region[: layout.codes.nbytes] = part.buffers.base[: layout.codes.nbytes]
    copy = QuantizedArray(part.format, part.shape, Packed.of(region, layout, layout.has_global_scale, False))
    if copy.scales.size:
        copy.scales[...] = part.scales
    if copy.global_scale is not None:
        copy.global_scale[...] = part.global_scale
    return copy


@named(("a_format", "b_format"), PAIRS)
def test_what_lies_around_operands_and_results_changes_nothing_and_is_not_changed(cupy, a_format, b_format):
    for m, k, n in (*RAGGED, (130, 272, 136)):
        a, b = operands(cupy, a_format, b_format, m, k, n)
        clean = hq.matmul(a, b, out_dtype=BFLOAT16)
        pa = hq.HybridArray(rowwise=surrounded(cupy, a.rowwise))
        pb = hq.HybridArray(columnwise=surrounded(cupy, b.columnwise))
        testing.assert_bitwise_equal(hq.matmul(pa, pb, out_dtype=BFLOAT16), clean)
        field = cupy.full((m + 16, n + 24), np.nan, np.float32).astype(BFLOAT16)
        before = field.copy()
        for row, column in ((8, 8), (8, 3)):  # on 16 bytes where a row is, and not
            out = field[row : row + m, column : column + n]
            hq.matmul(pa, pb, out=out)
            assert_product(cupy, out, a, b)
            field[row : row + m, column : column + n] = before[:m, :n]
            testing.assert_bitwise_equal(field, before)


@named("name", NAMES)
def test_code_padding_is_zero_after_every_operation_that_makes_a_part(cupy, name):
    x, y = (on_gpu(cupy, "wide", (37, 77), seed=seed) for seed in (0, 1))
    array = hq.quantize(x, rowwise=name, columnwise=name)
    foreign = hq.QuantizedArray.from_buffers(array.rowwise.codes.copy(), array.rowwise.scales, array.rowwise.format,
                                             array.rowwise.shape, global_scale=array.rowwise.global_scale)
    derived = hq.quantize(x, rowwise=name, columnwise=name, columnwise_source="rowwise_dequantized")
    added = hq.quantize(x, rowwise=name).with_columnwise()
    hq.requantize(array, y)
    for whole in (array, derived, added, array.copy()):
        for _, part in whole.parts():
            testing.assert_code_padding_is_zero(part)
    testing.assert_code_padding_is_zero(foreign.packed())
    array @ array.T, array.T @ array
    for _, part in array.parts():
        testing.assert_code_padding_is_zero(part)


def test_foreign_buffers_without_padding_multiply(cupy):
    for name in ("fp8_e4m3", "fp8_block_1x128", "mxfp8", "nvfp4"):
        a, b = operands(cupy, name, name, 19, 77, 23)
        part = a.rowwise
        foreign = hq.QuantizedArray.from_buffers(part.codes.copy(), part.scales.copy(), part.format, part.shape,
                                                 global_scale=part.global_scale)
        testing.assert_bitwise_equal(hq.HybridArray(rowwise=foreign) @ b, a @ b)


# --- out, dtype, epilogue -------------------------------------------------------------------------


@named("dtype", DTYPES)
@named(("a_format", "b_format"), PAIRS)
def test_epilogues_are_within_the_bound(cupy, a_format, b_format, dtype):
    dtype = DTYPES[dtype]
    for m, k, n in ((33, 96, 37), (128, 256, 64)):
        a, b = operands(cupy, a_format, b_format, m, k, n, "gauss")
        for bias_dtype in (None, np.float32, BFLOAT16, np.float16, np.float64):
            bias = None if bias_dtype is None else on_gpu(cupy, "gauss", (n,), bias_dtype, 3)
            assert_product(cupy, hq.matmul(a, b, bias=bias, out_dtype=dtype), a, b, bias=bias)
            out, aux = cupy.full((m, n), np.nan, np.float32).astype(dtype), cupy.empty((m, n), dtype)
            hq.matmul(a, b, bias=bias, activation="gelu", out=(out, aux))
            assert_product(cupy, aux, a, b, bias=bias)
            assert_product(cupy, out, a, b, bias=bias, gelu=True)
            wide = cupy.empty((m, n), np.float32)
            hq.matmul(a, b, bias=bias, out=(out, wide))
            assert_product(cupy, out, a, b, bias=bias)
            assert_product(cupy, wide, a, b, bias=bias)
            for activation in (None, "gelu"):
                total = on_gpu(cupy, "gauss", (m, n), dtype, 4)
                before = total.copy()
                hq.matmul(a, b, bias=bias, activation=activation, out=total, accumulate=True)
                assert_product(cupy, total, a, b, bias=bias, gelu=activation == "gelu", added=before)


@named(("a_format", "b_format"), PAIRS)
def test_any_out_is_written_and_nothing_else(cupy, a_format, b_format):
    a, b = operands(cupy, a_format, b_format, 24, 80, 40, "gauss")
    out = cupy.empty((24, 40), np.float32)
    assert hq.matmul(a, b, out=out) is out
    assert_product(cupy, out, a, b)
    storage = cupy.full((40, 48), np.nan, np.float32)
    strided = storage.T[::2]  # last axis strided
    assert hq.matmul(a, b, out=strided) is strided
    assert_product(cupy, cupy.ascontiguousarray(strided), a, b)
    assert cupy.isnan(storage[:, 1::2]).all()
    backwards = cupy.empty((24, 40), np.float32)[::-1]
    hq.matmul(a, b, out=backwards)
    assert_product(cupy, cupy.ascontiguousarray(backwards), a, b)
    deep, storage = a.reshape(2, 12, 80), cupy.zeros((12, 2, 40), np.float32)
    for times in (1, 2):
        hq.matmul(deep, b, out=storage.transpose(1, 0, 2), accumulate=times > 1)
        np.testing.assert_allclose(cupy.ascontiguousarray(storage.transpose(1, 0, 2)).reshape(24, 40).get(),
                                   times * out.get(), rtol=1e-2, atol=1e-2)
    flat = cupy.empty(24 * 40 + 1, np.float32)[1:].reshape(24, 40)  # a pointer on four bytes
    hq.matmul(a, b, out=flat)
    assert_product(cupy, flat, a, b)


@named("pair", [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "bfloat16"),
                ("float32", "bfloat16"), ("float64", "bfloat16"), ("float64", "float64")])
def test_the_results_dtype_is_numpys(cupy, pair):
    dtypes = DTYPES | {"float64": np.dtype(np.float64)}
    x, y = (np.ones(shape, dtypes[name]) for shape, name in zip(((3, 32), (32, 5)), pair, strict=True))
    for left, right in ((x, y), (y.T, x.T)):
        expected = hq.matmul(left, right)
        gl, gr = cupy.asarray(left), cupy.asarray(right)
        ql, qr = hq.quantize(gl, rowwise="mxfp8"), hq.quantize(gr, columnwise="mxfp8")
        for actual in (hq.matmul(gl, gr), gl @ qr, ql @ gr, ql @ qr, hq.matmul(gl, qr)):
            assert actual.dtype == expected.dtype and (actual == 32).all()


# --- plain arrays ---------------------------------------------------------------------------------


@named("dtype", [*DTYPES, "float64"])
@named("format", ["fp8_e4m3", "fp8_block_1x128", "mxfp8", "nvfp4", "bf16", "fp16", "fp32"])
def test_a_plain_array_keeps_its_values_on_either_side(cupy, format, dtype):
    dtype = DTYPES.get(dtype, np.dtype(np.float64))
    x = on_gpu(cupy, "gauss", (150, 150), dtype)
    for view in testing.VIEWS.values():
        plain = view(x)
        m, k = plain.shape
        h = hq.quantize(on_gpu(cupy, "gauss", (k, 33)), columnwise=format)
        g = hq.quantize(on_gpu(cupy, "gauss", (33, m)), rowwise=format)
        for actual, a, b in ((hq.matmul(plain, h), plain, h), (plain @ h, plain, h), (hq.matmul(g, plain), g, plain),
                             (g @ plain, g, plain)):
            assert isinstance(actual, cupy.ndarray)
            assert_product(cupy, actual, a, b)


@named("dtype", DTYPES)
def test_two_plain_arrays_multiply_in_any_layout(cupy, dtype):
    for m, k, n in ((24, 40, 48), (5, 33, 7), (16, 16, 8)):
        x, y = on_gpu(cupy, "gauss", (m, k), DTYPES[dtype]), on_gpu(cupy, "gauss", (k, n), DTYPES[dtype], 1)
        for a, b in itertools.product((x, cupy.asfortranarray(x)), (y, cupy.asfortranarray(y))):
            assert_product(cupy, hq.matmul(a, b), a, b)


def test_a_left_operand_may_have_leading_axes(cupy):
    x, w = on_gpu(cupy, "gauss", (2, 3, 5, 34)), hq.quantize(on_gpu(cupy, "gauss", (34, 7)), columnwise="mxfp8")
    a = hq.quantize(x, rowwise="nvfp4")
    assert (a @ w).shape == (2, 3, 5, 7) == (x @ w).shape
    testing.assert_bitwise_equal((a @ w).reshape(30, 7), a.reshape(-1, 34) @ w)
    vector = hq.quantize(x[0, 0, 0], rowwise="nvfp4")
    assert (vector @ w).shape == (7,) == (x[0, 0, 0] @ w).shape
    assert (x[:0] @ w).shape == (0, 3, 5, 7)
    strided = x.transpose(1, 0, 2, 3)
    testing.assert_bitwise_equal(strided @ w, cupy.ascontiguousarray(strided) @ w)


# --- warm calls, streams, graphs, threads ---------------------------------------------------------


@named(("a_format", "b_format"), PAIRS)
def test_a_warm_call_reads_the_arrays_of_that_call(cupy, a_format, b_format):
    for seed in range(3):
        x, y = on_gpu(cupy, "gauss", (40, 72), seed=seed), on_gpu(cupy, "gauss", (72, 48), seed=seed + 9)
        a, b = hq.quantize(x, rowwise=a_format), hq.quantize(y, columnwise=b_format)
        for left, right in ((a, b), (x, b), (a, y)):
            assert_product(cupy, hq.matmul(left, right), left, right)


@named(("a_format", "b_format"), PAIRS)
def test_a_captured_quantize_and_matmul_replays_with_new_data(cupy, a_format, b_format):
    x, y = on_gpu(cupy, "gauss", (40, 72)), on_gpu(cupy, "gauss", (72, 52), seed=1)
    a, b = hq.quantize(x, rowwise=a_format), hq.quantize(y, columnwise=b_format)
    out, bias = cupy.empty((40, 52), np.float32), on_gpu(cupy, "gauss", (52,), seed=2)
    stream = cupy.cuda.Stream(non_blocking=True)

    def step():
        hq.requantize(a, x)
        hq.requantize(b, y)
        hq.matmul(a, b, out=out, bias=bias)

    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for seed in (5, 6):
            x[...], y[...] = on_gpu(cupy, "gauss", (40, 72), seed=seed), on_gpu(cupy, "gauss", (72, 52), seed=seed + 9)
            out[...] = np.nan
            others = [cupy.full(1 << 16, np.nan, np.float32) for _ in range(8)]  # what scratch memory may become
            graph.launch(stream)
            stream.synchronize()
            fresh = hq.quantize(x, rowwise=a_format), hq.quantize(y, columnwise=b_format)
            testing.assert_bitwise_equal(out, hq.matmul(*fresh, out_dtype=np.float32, bias=bias))
            assert all(cupy.isnan(other).all() for other in others)


def test_threads_share_plans(cupy):
    pairs = [operands(cupy, "fp8_e4m3", "fp8_e4m3", 64, 128, 48, "gauss") for _ in range(1)]
    pairs += [(hq.quantize(on_gpu(cupy, "gauss", (64, 128)) * s, rowwise="fp8_e4m3"), pairs[0][1]) for s in (2, 3, 5)]
    expected = [(a @ b).get() for a, b in pairs]
    wrong = []

    def work(number):
        a, b = pairs[number]
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(200):
                y = a @ b
            stream.synchronize()
            if (y.get() != expected[number]).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- what is refused ------------------------------------------------------------------------------


def test_operands_in_two_places_are_one_clear_error(cupy):
    x = testing.matrix("gauss", (8, 32))
    a, b = hq.quantize(x, rowwise="mxfp8"), hq.quantize(cupy.asarray(x.T), columnwise="mxfp8")
    for left, right in ((a, b), (x, b)):
        with pytest.raises(TypeError, match=r"both operands in one place; a is \w+ on the host, b is \w+ on a GPU"):
            hq.matmul(left, right)
    g = cupy.asarray(x)
    for more in ({"out": np.empty((8, 8), np.float32)}, {"bias": np.ones(8, np.float32)}):
        with pytest.raises(TypeError, match="is on the host, a on cuda:0"):
            hq.matmul(g, b, **more)
    with pytest.raises(TypeError, match="a and b are on the host"):
        hq.matmul(a, x.T, out=cupy.empty((8, 8), np.float32))


def test_native_is_refused_with_the_reason_and_the_engine_is_named(cupy):
    a, b = operands(cupy, "mxfp8", "mxfp8", 8, 64, 8)
    chip = cupy.cuda.Device().compute_capability
    if chip == "90":
        assert str(hq.engine_for(a, b)) == (
            "bf16: sm_90 has no MXFP8 tensor cores (sm_100 has); both operands are exact in bf16")
        with pytest.raises(ValueError, match="engine='native' cannot multiply these operands: sm_90 has no MXFP8"):
            hq.matmul(a, b, engine="native")
    with pytest.raises(ValueError, match="engine='cutlass' is not one of native"):
        hq.matmul(a, b, engine="cutlass")
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        hq.matmul(a, b, out_dtype=np.int32)
    with pytest.raises(ValueError, match="out must have shape"):
        hq.matmul(a, b, out=cupy.empty((8, 9), np.float32))


def test_scales_are_tiled_on_the_device_as_the_layout_says(cupy):
    from hqarray import cuda
    from hqarray.cuda_calls import Tile
    for name, shape in (("mxfp8", (300, 1000)), ("nvfp4", (1, 16)), ("mxfp8_e5m2", (128, 128)), ("nvfp4", (131, 4000))):
        part = hq.quantize(on_gpu(cupy, "wide", shape), rowwise=name).rowwise
        layout = part.buffers.layout
        lines, blocks = layout.num_scales
        tiles = cupy.full(Tiled128x4().buffer_shape(lines, blocks), 0xFF, np.uint8)
        alpha = cupy.empty(1, np.float32)
        kernel = cuda._kernel(traits.tile_scales_launch(), lines, blocks, 0)
        work = Tile(kernel, layout.scales_shape[1], lines, blocks, 0, -1, 0, 0, 0, part.global_scale is not None)
        base = part.buffers.memory.ptr
        scalar = base + layout.global_scale_offset if part.global_scale is not None else 0
        work.prepare((base, base + layout.scales_offset, scalar, scalar, alpha.data.ptr), tiles.data.ptr, 0)
        testing.assert_bitwise_equal(tiles, Tiled128x4().tile(part.scales.get()))
        if scalar:
            testing.assert_bitwise_equal(alpha, part.global_scale * part.global_scale)
