"""The NumPy definition: scale rules, quantize and dequantize, each against oracles of another make."""

import ml_dtypes
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

import hqarray as hq
from hqarray import reference, testing
from hqarray.formats import FORMATS
from hqarray.layout import unpack_nibbles

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m1": ml_dtypes.float4_e2m1fn,
}
QUANTIZED = [name for name, format in FORMATS.items() if format.scaling is not None]
VARIANTS = [  # what the short names leave out
    "mxfp8(rule=floor)", "mxfp8(rule=even)", "mxfp8_e5m2(rule=floor)", "mxfp8_e5m2(rule=even)",
    "mxfp6_e2m3(rule=floor)", "mxfp6_e2m3(rule=even)", "mxfp6_e3m2(rule=floor)", "mxfp6_e3m2(rule=even)",
    "mxfp4(rule=floor)", "mxfp4(rule=even)", "fp8_e4m3(pow2=true)", "fp8_e5m2(epsilon=0.75)",
    "fp8_block_1x128(element=e5m2,epsilon=1e-30)", "fp8_row_e4m3(element=e5m2,epsilon=0.75)", "mxfp4(block=32x32)",
]
named = pytest.mark.parametrize


def part_of(values, format, **options):
    return hq.quantize(values, rowwise=format, **options).rowwise


def codes_of(part):
    return unpack_nibbles(part.codes, part.shape[1]) if part.format.storage.element.bits == 4 else part.codes


# --- quantize: against exact arithmetic -----------------------------------------------------------


@named("kind", testing.MATRICES)
@named("format", QUANTIZED + VARIANTS)
def test_quantize_equals_the_specification_in_exact_arithmetic(format, kind):
    values = testing.matrix(kind, (18, 35))
    part = part_of(values, format)
    codes, scales, global_scale = oracles.part(values, part.format)
    testing.assert_bitwise_equal(codes_of(part), codes)
    testing.assert_bitwise_equal(np.ascontiguousarray(part.scales), scales)
    if global_scale is not None:
        testing.assert_bitwise_equal(part.global_scale, np.ravel(global_scale))


@named("format", ["fp8_block_1x128", "fp8_block_128x128", "fp8_block_128x128_pow2", "mxfp8_32x32", "nvfp4_16x16"])
def test_several_large_blocks_equal_the_specification(format):
    values = testing.matrix("wide", (130, 131))
    part = part_of(values, format)
    codes, scales, _ = oracles.part(values, part.format)
    testing.assert_bitwise_equal(codes_of(part), codes)
    testing.assert_bitwise_equal(np.ascontiguousarray(part.scales), scales)


@named("format", ["mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"])
def test_rule_up_is_exact_at_every_border(format):
    """Byte b up to max * 2^(b - 127), b + 1 from the next float32 on; at b = 0 the quotient is subnormal."""
    largest = FORMATS[format].storage.element.max
    for byte in range(254):
        border = largest * 2.0 ** (byte - 127)
        if border > float(np.finfo(np.float32).max):
            break
        at, above = np.float32(border), np.nextafter(np.float32(border), np.float32(np.inf))
        assert at == border  # exact in float32
        scales = part_of(np.array([[at], [above]], np.float32), format).scales
        assert scales.ravel().tolist() == [byte, byte + 1]


@named("format", QUANTIZED + VARIANTS)
@given(st_np.arrays(np.float32, (3, 17), elements=st.floats(width=32)))
@settings(max_examples=40, deadline=None)
def test_any_matrix_equals_the_specification_in_exact_arithmetic(format, values):
    part = part_of(values, format)
    codes, scales, _ = oracles.part(values, part.format)
    testing.assert_bitwise_equal(codes_of(part), codes)
    testing.assert_bitwise_equal(np.ascontiguousarray(part.scales), scales)


@named("dtype", ["float32", "float16", "bfloat16"])
@named("kind", testing.MATRICES)
@named("format", [*FORMATS, "mxfp8(rule=floor)", "mxfp4(rule=even)", "fp8_e4m3(pow2=true)"])
def test_every_element_is_a_nearest_neighbour_of_its_value(format, kind, dtype):
    for shape in ((19, 33), (131, 259)):
        values = testing.matrix(kind, shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        array = hq.quantize(values, rowwise=format, columnwise=format)
        testing.assert_in_rounding_cell(values, array)
        for _, part in array.parts():
            testing.assert_code_padding_is_zero(part)


# --- quantize: literal right values ---------------------------------------------------------------


def test_e4m3_at_scale_one_saturates_and_keeps_nan():
    values = np.array([[448, 449, 464, 465, 1e4, np.inf, -np.inf, np.nan]], np.float32)
    for options in ({}, {"amax": np.float32(448)}):  # Inf in it: scale 1; a given amax of 448: scale 1
        part = part_of(values, "fp8_e4m3", **options)
        assert part.scales.item() == 1.0
        assert part.codes.tolist() == [[0x7E] * 6 + [0xFE, 0x7F]]
        decoded = reference.dequantize_part(part, np.dtype(np.float32))[0]
        np.testing.assert_array_equal(decoded, [448, 448, 448, 448, 448, 448, -448, np.nan])


def test_mxfp8_rules_differ_at_957_beside_960():
    values = np.array([[960, 957]], np.float32)
    decoded = {rule: hq.fake_quantize(values, hq.MX(rule=rule)).tolist()[0] for rule in ("up", "floor")}
    assert decoded == {"up": [960.0, 960.0], "floor": [896.0, 896.0]}


def test_nan_codes_and_nan_scales():
    values = np.full((1, 64), 1.0, np.float32)
    values[0, 3] = -np.nan
    expected = {"mxfp8": (0x7F, None), "mxfp8_e5m2": (0x7F, None), "fp8_e4m3": (0x7F, None), "fp8_e5m2": (0x7F, None),
                "fp8_block_1x128": (0x7F, None), "mxfp6_e2m3": (0, 0xFF), "mxfp6_e3m2": (0, 0xFF),
                "mxfp4": (0, 0xFF), "nvfp4": (0, 0x7F), "nvfp4_16x16": (0, 0x7F)}
    for format, (code, scale) in expected.items():
        part = part_of(values, format)
        block = part.format.storage.block
        assert codes_of(part)[0, 3] == code, format
        decoded = hq.fake_quantize(values, format)[0]
        if scale is None:
            assert np.isnan(decoded).tolist() == [i == 3 for i in range(64)], format
        else:
            assert part.scales[0, 0] == scale and part.scales[0, 1] != scale, format
            assert not codes_of(part)[0, : block[1]].any(), format
            assert np.isnan(decoded).tolist() == [i < block[1] for i in range(64)], format


@named("format", QUANTIZED)
def test_infinity_takes_the_largest_element(format):
    values = np.array([[np.inf, -np.inf, 1.0] + [0.5] * 13], np.float32)
    part = part_of(values, format)
    element = part.format.storage.element
    sign = 1 << (element.bits - 1)
    assert codes_of(part)[0, :2].tolist() == [element.max_code, sign | element.max_code]
    stored = {"float32": 1.0, "e8m0": 254, "e4m3": 0x7E}[part.format.storage.scale]
    assert part.scales.item() == stored
    assert part.global_scale is None or (part.global_scale == 1.0).all()


@named("format", QUANTIZED)
def test_negative_zero_keeps_its_sign(format):
    decoded = hq.fake_quantize(np.array([[0.0, -0.0, 1.0, -1e-44]], np.float32), format)[0]
    assert np.signbit(decoded).tolist() == [False, True, False, True]


@named("format", QUANTIZED)
def test_a_zero_matrix_has_the_zero_scale_and_decodes_to_zeros(format):
    part = part_of(np.zeros((20, 40), np.float32), format)
    assert (part.scales == {"float32": 1.0, "e8m0": 0, "e4m3": 0}[part.format.storage.scale]).all()
    assert part.global_scale is None or (part.global_scale == 1.0).all()
    assert part.amax is None or part.amax.item() == 0.0
    assert not reference.dequantize_part(part, np.dtype(np.float32)).any()


@named("format", QUANTIZED)
def test_one_value_among_zeros_decodes_exactly(format):
    values = np.zeros((256, 256), np.float32)
    values[0, 0] = 1
    array = hq.quantize(values, rowwise=format, columnwise=format)
    for direction, part in array.parts():
        assert np.isfinite(part.scales).all() and (part.scales != 255).all()
        testing.assert_bitwise_equal(array.dequantize(source=direction).copy(), values)


@named("format", ["nvfp4", "nvfp4_16x16", "mxfp8", "mxfp4", "fp8_block_1x128", "fp8_block_128x128"])
def test_zero_rows_stay_zero_beside_large_ones(format):
    values = testing.matrix("gauss", (32, 64))
    values[1] = 0
    values[16:] = 0
    decoded = hq.fake_quantize(values, format)
    assert np.isfinite(decoded).all() and not decoded[1].any() and not decoded[16:].any() and decoded[0].any()


def test_all_e8m0_bytes_decode_to_their_power_of_two():
    codes = np.full((256, 1), 0x38, np.uint8)  # 1.0 in E4M3
    part = hq.QuantizedArray.from_buffers(codes, np.arange(256, dtype=np.uint8)[:, None], "mxfp8", (256, 1))
    decoded = reference.dequantize_part(part, np.dtype(np.float32))[:, 0]
    assert decoded[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert decoded[0] == np.float32(5.877472e-39) and np.isnan(decoded[255])


@named("format", QUANTIZED)
def test_float32_subnormals_are_not_flushed(format):
    values = np.array([[2.0**-149, -(2.0**-140), 2.0**-127, 3 * 2.0**-128]], np.float32)
    part = part_of(values, format)
    testing.assert_in_rounding_cell(values, part)
    if part.format.storage.scale == "float32":  # factor FLT_MAX: scale RN(1 / FLT_MAX), or 2^-127 as power of two
        pow2 = part.format.scaling.pow2
        assert part.scales.item() == (2.0**-127 if pow2 else 2.0**-128)


@named("format", [name for name in QUANTIZED if FORMATS[name].measures_amax])
def test_amax_is_measured_or_as_given(format):
    values = testing.matrix("gauss", (5, 40))
    values[2, 2] = np.nan
    measured = hq.amax(values)
    assert measured.dtype == np.float32 and measured.tolist() == [np.nanmax(np.abs(values))]
    testing.assert_bitwise_equal(part_of(values, format).amax, measured)
    testing.assert_bitwise_equal(part_of(values, format, amax=measured), part_of(values, format))
    wider = measured * np.float32(1.7)
    wide = part_of(values, format, amax=wider)
    assert wide.amax.tolist() == wider.tolist()
    testing.assert_in_rounding_cell(values, wide)
    assert not np.array_equal(wide.codes, part_of(values, format).codes)


def test_amax_of_nothing_and_of_nan_is_zero():
    for values in (np.zeros((0, 5), np.float32), np.zeros((5, 0), np.float32), np.full((2, 2), np.nan, np.float32)):
        assert hq.amax(values).tolist() == [0.0]
    assert hq.amax(np.array([-np.inf, np.nan, 1], np.float32)).tolist() == [np.inf]


SQNR = {
    "fp8_e4m3": 31.52, "fp8_block_1x128": 31.80, "mxfp8": 31.52, "mxfp8(rule=floor)": 30.64, "mxfp6_e2m3": 30.96,
    "mxfp4": 18.76, "nvfp4": 20.43, "nvfp4_16x16": 19.07,
}


@pytest.fixture(scope="module")
def normal_matrix():
    return np.random.default_rng(0).standard_normal((4096, 4096), np.float32)


@named("format", SQNR)
def test_sqnr_of_a_normal_matrix(format, normal_matrix):
    error = hq.fake_quantize(normal_matrix, format)
    error -= normal_matrix
    signal = np.vdot(normal_matrix, normal_matrix)
    assert abs(10 * np.log10(signal / np.vdot(error, error)) - SQNR[format]) < 0.02


# --- quantize: shapes and strides -----------------------------------------------------------------


@named("shape", testing.SHAPES)
@named("format", [*FORMATS])
def test_every_shape_quantizes_both_ways_and_decodes(format, shape):
    values = testing.matrix("gauss", testing.SHAPES[shape])
    array = hq.quantize(values, rowwise=format, columnwise=format)
    assert array.shape == values.shape
    testing.assert_in_rounding_cell(values, array)
    for direction, part in array.parts():
        testing.assert_code_padding_is_zero(part)
        assert part.scales.shape == part.format.storage.num_scales(part.shape)
        decoded = array.dequantize(source=direction)
        assert decoded.shape == values.shape and decoded.dtype == np.float32


@named("view", testing.VIEWS)
@named("format", FORMATS)
def test_strides_of_the_input_do_not_matter(format, view):
    values = testing.VIEWS[view](testing.matrix("wide", (70, 134)))
    contiguous = np.ascontiguousarray(values)
    actual = hq.quantize(values, rowwise=format, columnwise=format)
    testing.assert_bitwise_equal(actual, hq.quantize(contiguous, rowwise=format, columnwise=format))


@named("format", FORMATS)
def test_tiles_of_any_size_give_the_same_bytes(format, monkeypatch):
    values = testing.matrix("wide", (300, 290))
    whole = hq.quantize(values, rowwise=format, columnwise=format)
    monkeypatch.setattr(reference, "TILE_ELEMENTS", 100)
    testing.assert_bitwise_equal(hq.quantize(values, rowwise=format, columnwise=format), whole)
    for direction in ("rowwise", "columnwise"):
        small = whole.dequantize(source=direction)
        monkeypatch.undo()
        testing.assert_bitwise_equal(small.copy(), whole.dequantize(source=direction).copy())
        monkeypatch.setattr(reference, "TILE_ELEMENTS", 100)


@named("format", FORMATS)
def test_tiles_that_split_the_rows_give_the_same_bytes(format):
    """4096 columns at a time in C order, 512 in Fortran order."""
    values = testing.matrix("wide", (5, 4500))
    array = hq.quantize(values, rowwise=format, columnwise=format)
    testing.assert_bitwise_equal(hq.quantize(np.asfortranarray(values), rowwise=format, columnwise=format), array)
    testing.assert_in_rounding_cell(values, array)
    decoded = reference.dequantize_part(array.rowwise, np.dtype(np.float32))
    turned = reference.dequantize_part(array.rowwise, np.dtype(np.float32), transposed=True)
    testing.assert_bitwise_equal(turned.T.copy(), decoded)


@named("format", FORMATS)
def test_columns_of_x_are_rows_of_its_transpose(format):
    values = testing.matrix("wide", (65, 130))
    columns = hq.quantize(values, columnwise=format).columnwise
    testing.assert_bitwise_equal(columns, hq.quantize(values.T, rowwise=format).rowwise)


@named("format", FORMATS)
def test_leading_axes_are_flattened(format):
    values = testing.matrix("wide", (3, 5, 34))
    part = part_of(values, format)
    assert part.shape == (15, 34)
    testing.assert_bitwise_equal(part, part_of(values.reshape(15, 34), format))


@named("format", FORMATS)
def test_float64_is_rounded_to_float32_first(format):
    values = np.random.default_rng(3).standard_normal((20, 40))
    actual = hq.quantize(values, rowwise=format, columnwise=format)
    testing.assert_bitwise_equal(actual, hq.quantize(values.astype(np.float32), rowwise=format, columnwise=format))


# --- dequantize -----------------------------------------------------------------------------------


@named("format", [name for name in QUANTIZED if FORMATS[name].storage.scale != "float32"])
@named("g", [1 / 3, 0.1, 3.4e38, 2.0**-128 * 1.7, 1e-44])
def test_every_code_under_every_byte_scale_decodes_as_one_rounding(format, g):
    """The exact product in float64, rounded once to float32; NVFP4 under a global scale that is no power of two."""
    storage = FORMATS[format].storage
    per_block, codes = storage.block[1], 1 << storage.element.bits
    k = -(-codes // per_block) * per_block
    row = np.resize(np.arange(codes, dtype=np.uint8), k)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], k // per_block, axis=1)
    stored = np.tile(row, (256, 1))
    stored = stored[:, ::2] | stored[:, 1::2] << 4 if storage.element.bits == 4 else stored
    g = np.full(storage.num_global_scales((256, k)), g, np.float32) if storage.global_scale else None
    part = hq.QuantizedArray.from_buffers(stored, scales, format, (256, k), global_scale=g)
    by_byte = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    if storage.scale == "e8m0":
        by_byte = np.array([2.0 ** (b - 127) for b in range(255)] + [np.nan])
    exact = row.view(ML_DTYPES[storage.element.name]).astype(np.float64) * by_byte[:, None]
    with np.errstate(all="ignore"):
        expected = (exact * float(1 if g is None else g[0])).astype(np.float32)
    actual = reference.dequantize_part(part, np.dtype(np.float32))
    np.testing.assert_array_equal(actual, expected)
    assert (np.signbit(actual) == np.signbit(expected))[~np.isnan(expected)].all()


@named("format", [name for name in QUANTIZED if FORMATS[name].storage.scale == "float32"])
@named("kind", ["gauss", "tiny_wide", "huge"])
def test_a_float32_scale_is_one_rounding(format, kind):
    part = part_of(testing.matrix(kind, (131, 259)), format)
    rows, columns = np.minimum(part.format.storage.block or part.shape, part.shape)
    scales = np.repeat(np.repeat(part.scales.astype(np.float64), rows, 0), columns, 1)[:131, :259]
    exact = part.codes.view(ML_DTYPES[part.format.storage.element.name]).astype(np.float64) * scales
    testing.assert_bitwise_equal(reference.dequantize_part(part, np.dtype(np.float32)), exact.astype(np.float32))


@named("dtype", ["float16", "bfloat16"])
@named("format", FORMATS)
def test_another_dtype_is_a_cast_of_the_float32(format, dtype):
    wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    part = part_of(testing.matrix("gauss", (19, 33)), format)
    decoded = reference.dequantize_part(part, np.dtype(np.float32))
    testing.assert_bitwise_equal(reference.dequantize_part(part, wanted), decoded.astype(wanted))


@named("format", FORMATS)
def test_a_transposed_decode_is_contiguous_and_equal(format):
    part = part_of(testing.matrix("gauss", (131, 259)), format)
    turned = reference.dequantize_part(part, np.dtype(np.float32), transposed=True)
    assert turned.shape == (259, 131) and turned.flags.c_contiguous
    testing.assert_bitwise_equal(turned.T.copy(), reference.dequantize_part(part, np.dtype(np.float32)))


@named("dtype", ["float16", "float32", "bfloat16"])
@named("format", FORMATS)
def test_every_nan_decodes_to_the_canonical_one(format, dtype):
    words = {"float16": 0xFE01, "float32": 0xFFC00001, "bfloat16": 0xFFC1}
    wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    values = np.full((2, 16), words[dtype], f"u{wanted.itemsize}").view(wanted)
    array = hq.quantize(values, rowwise=format)
    assert (array.dequantize(dtype=np.float32).view(np.uint32) == 0x7FFFFFFF).all()
    for narrow in (np.float16, ml_dtypes.bfloat16):
        assert (array.dequantize(dtype=narrow).view(np.uint16) == 0x7FFF).all()


@named("format", FORMATS)
def test_dequantize_fills_the_given_output(format):
    part = part_of(testing.matrix("gauss", (19, 33)), format)
    poisoned = np.full((19, 33), np.nan, np.float32)
    assert reference.dequantize_part(part, poisoned.dtype, poisoned) is poisoned
    testing.assert_bitwise_equal(poisoned, reference.dequantize_part(part, poisoned.dtype))


@named("format", FORMATS)
def test_decoding_reads_neither_padding_nor_amax(format):
    part = part_of(testing.matrix("gauss", (19, 33)), format)
    expected = reference.dequantize_part(part, np.dtype(np.float32))
    poisoned = part.copy()
    poisoned.buffers.base[:] = 0xFF
    for target, source in ((poisoned.codes, part.codes), (poisoned.scales, part.scales),
                           (poisoned.global_scale, part.global_scale)):
        if target is not None:
            target[...] = source
    testing.assert_bitwise_equal(reference.dequantize_part(poisoned, np.dtype(np.float32)), expected)


# --- columns from rows ----------------------------------------------------------------------------


@named("shape", [(19, 33), (131, 259), (0, 48), (5, 0), (1, 1)], ids=str)
@named("kind", ["gauss", "nans"])
@named("format", [name for name, format in FORMATS.items() if format.transposable])
def test_moved_codes_equal_quantized_ones(format, kind, shape):
    values = testing.matrix(kind, shape)
    part = part_of(values, format)
    turned = reference.transpose_part(part)
    testing.assert_bitwise_equal(turned, hq.quantize(values, columnwise=format).columnwise)
    testing.assert_code_padding_is_zero(turned)


def test_transposable_formats_are_those_of_one_scale_or_square_blocks():
    assert {name for name, format in FORMATS.items() if format.transposable} == {
        "fp8_e4m3", "fp8_e5m2", "fp8_block_128x128", "fp8_block_128x128_pow2", "mxfp8_32x32", "nvfp4_16x16",
        "bf16", "fp16", "fp32",
    }
