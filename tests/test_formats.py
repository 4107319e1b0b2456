"""The table of formats: its rows, its names, its errors."""

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray.formats import ELEMENTS, FORMATS, ROW, SCALES, Format, as_format, scale_values

named = pytest.mark.parametrize

ELEMENT_FACTS = {  # bits, largest, max_exponent, significand bits, NaN code, smallest positive
    "e4m3": (8, 448.0, 8, 4, 0x7F, 2.0**-9),
    "e5m2": (8, 57344.0, 15, 3, 0x7F, 2.0**-16),
    "e2m3": (6, 7.5, 2, 4, None, 0.125),
    "e3m2": (6, 28.0, 4, 3, None, 0.0625),
    "e2m1": (4, 6.0, 2, 2, None, 0.5),
}
FORMAT_FACTS = {  # element, block, scale kind, global scale, amax block, measures amax
    "fp8_e4m3": ("e4m3", None, "float32", False, None, True),
    "fp8_e5m2": ("e5m2", None, "float32", False, None, True),
    "fp8_row_e4m3": ("e4m3", (1, ROW), "float32", False, (1, ROW), False),
    "fp8_block_1x128": ("e4m3", (1, 128), "float32", False, (1, 128), False),
    "fp8_block_1x128_pow2": ("e4m3", (1, 128), "float32", False, (1, 128), False),
    "fp8_block_128x128": ("e4m3", (128, 128), "float32", False, (128, 128), False),
    "fp8_block_128x128_pow2": ("e4m3", (128, 128), "float32", False, (128, 128), False),
    "mxfp8": ("e4m3", (1, 32), "e8m0", False, (1, 32), False),
    "mxfp8_e5m2": ("e5m2", (1, 32), "e8m0", False, (1, 32), False),
    "mxfp8_32x32": ("e4m3", (1, 32), "e8m0", False, (32, 32), False),
    "mxfp6_e2m3": ("e2m3", (1, 32), "e8m0", False, (1, 32), False),
    "mxfp6_e3m2": ("e3m2", (1, 32), "e8m0", False, (1, 32), False),
    "mxfp4": ("e2m1", (1, 32), "e8m0", False, (1, 32), False),
    "nvfp4": ("e2m1", (1, 16), "e4m3", True, (1, 16), True),
    "nvfp4_16x16": ("e2m1", (1, 16), "e4m3", True, (16, 16), True),
    "nvfp4_row": ("e2m1", (1, 16), "e4m3", True, (1, 16), False),
    "bf16": ("bfloat16", None, "none", False, None, False),
    "fp16": ("float16", None, "none", False, None, False),
    "fp32": ("float32", None, "none", False, None, False),
}


@named("name", ELEMENT_FACTS)
def test_an_element_has_the_range_of_its_specification(name):
    element = ELEMENTS[name]
    facts = (element.bits, element.max, element.max_exponent, element.significand_bits, element.nan_code,
             element.values[1])
    assert facts == ELEMENT_FACTS[name]
    assert element.values[element.max_code] == element.max


@named(("name", "dtype"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)])
def test_a_wide_element_has_the_range_of_its_dtype(name, dtype):
    element, info = ELEMENTS[name], ml_dtypes.finfo(dtype)
    assert element.dtype == dtype and element.max == float(info.max) and element.bits == info.bits
    assert element.significand_bits == info.nmant + 1 and element.max_exponent == info.maxexp - 1
    assert np.isnan(np.array([element.nan_code], f"u{element.bits // 8}").view(dtype)[0])
    with pytest.raises(ValueError, match="there is no table"):
        _ = element.values


def test_the_table_holds_the_rows_of_the_design():
    assert list(FORMATS) == list(FORMAT_FACTS)
    assert list(ELEMENTS)[:5] == list(ELEMENT_FACTS)


@named("name", FORMATS)
def test_a_row_stores_what_the_design_says(name):
    format = FORMATS[name]
    storage = format.storage
    assert FORMAT_FACTS[name] == (
        storage.element.name, storage.block, storage.scale, storage.global_scale, format.amax_block,
        format.measures_amax,
    )


@named("name", FORMATS)
def test_a_name_and_its_format_stand_for_each_other(name):
    format = as_format(name)
    assert format is FORMATS[name] and format.name == name and as_format(format) is format
    assert isinstance(hash(format), int) and len({format, as_format(f" {name} ")}) == 1


@named(("text", "format"), [
    ("mxfp8(rule=floor)", hq.MX("e4m3", "floor")),
    ("fp8_e4m3(pow2=true,epsilon=1e-06)", hq.FP8("e4m3", True, 1e-6)),
    ("fp8_e4m3(epsilon=0.25)", hq.FP8(epsilon=0.25)),
    ("fp8_block_1x128(element=e5m2)", hq.FP8Block("e5m2")),
    ("fp8_block_128x128(element=e5m2,pow2=true)", hq.FP8Block("e5m2", (128, 128), True)),
    ("mxfp6_e3m2(rule=even)", hq.MX("e3m2", "even")),
])
def test_a_bracket_names_the_fields_that_differ(text, format):
    assert as_format(text) == format
    assert as_format(format.name) == format


@named("format", [hq.HighPrecision(), hq.FP8(epsilon=1), hq.FP8(epsilon=np.float32(0.1)), hq.FP8Block(pow2=True),
                  hq.MX("e5m2", "even")], ids=lambda format: format.name)
def test_every_name_parses_back(format):
    assert as_format(format.name) == format


@named(("text", "format"), [
    ("nvfp4(block=16x16)", hq.NVFP4((16, 16))), ("mxfp8()", hq.MX()), ("mxfp8( rule = even , )", hq.MX(rule="even")),
    ("bf16(dtype=none)", hq.HighPrecision()), ("fp8_e4m3(pow2=False)", hq.FP8()),
])
def test_a_bracket_reads_blocks_words_and_spaces(text, format):
    assert as_format(text) == format


def test_formats_are_equal_by_value_and_frozen():
    assert hq.MX() == hq.MX("e4m3", "up") != hq.MX("e4m3", "floor")
    assert hq.NVFP4() == FORMATS["nvfp4"] and hash(hq.NVFP4()) == hash(FORMATS["nvfp4"])
    with pytest.raises(AttributeError):
        hq.MX().element = "e5m2"


def test_storage_forgets_how_a_part_was_rounded():
    assert hq.MX(rule="floor").storage == hq.MX(rule="up").storage
    assert hq.NVFP4((16, 16)).storage == hq.NVFP4().storage
    assert hq.FP8(epsilon=1.0, pow2=True).storage == hq.FP8().storage
    assert hq.FP8Block(epsilon=1.0).storage == hq.FP8Block().storage
    assert hq.FP8Block(block=(128, 128)).storage != hq.FP8Block().storage
    assert hq.FP8Block(pow2=True).storage != hq.FP8Block().storage  # decides whether bf16 holds it exactly


def test_high_precision_takes_its_dtype_from_the_array():
    assert hq.HighPrecision().resolve(np.dtype(np.float16)) == FORMATS["fp16"]
    assert hq.HighPrecision().resolve(np.dtype(ml_dtypes.bfloat16)) == FORMATS["bf16"]
    assert hq.HighPrecision("float32").resolve(np.dtype(np.float16)) == FORMATS["fp32"]
    with pytest.raises(ValueError, match="takes its dtype from an array; name one"):
        _ = hq.HighPrecision().storage


@named(("make", "message"), [
    (lambda: hq.FP8("e2m1"), "FP8: element='e2m1' is not one of 'e4m3', 'e5m2'"),
    (lambda: hq.FP8(epsilon=-1.0), "FP8: epsilon=-1.0 must be finite in float32 and not negative"),
    (lambda: hq.FP8(epsilon=1e39), r"FP8: epsilon=1e\+39 must be finite in float32"),
    (lambda: hq.FP8Block(pow2="yes"), "FP8Block: pow2='yes' is not one of False, True"),
    (lambda: hq.FP8(pow2=1), "FP8: pow2=1 is not one of False, True"),
    (lambda: hq.FP8Block(block=(1.0, 128.0)), r"FP8Block: block=\(1.0, 128.0\) is not one of \(1, 128\), "),
    (lambda: hq.NVFP4(block=(True, 16)), r"NVFP4: block=\(True, 16\) is not one of \(1, 16\), "),
    (lambda: as_format("fp8"), "unknown format 'fp8'; it is a recipe, .*; give a format, such as 'fp8_e4m3'; known: "),
    (lambda: hq.FP8(epsilon=float("nan")), "FP8: epsilon=nan must be finite"),
    (lambda: hq.FP8Block(block=(64, 64)), r"FP8Block: block=\(64, 64\) is not one of \(1, 128\), \(128, 128\)"),
    (lambda: hq.FP8Block(epsilon=float("inf")), "FP8Block: epsilon=inf must be finite"),
    (lambda: hq.MX("float32"), "MX: element='float32' is not one of 'e4m3', 'e5m2', 'e2m3', 'e3m2', 'e2m1'"),
    (lambda: hq.MX(rule="nearest"), "MX: rule='nearest' is not one of 'up', 'floor', 'even'"),
    (lambda: hq.NVFP4((1, 32)), r"NVFP4: block=\(1, 32\) is not one of \(1, 16\), \(16, 16\)"),
    (lambda: hq.NVFP4(rounding="up"), "NVFP4: rounding='up' is not one of 'nearest', 'stochastic'"),
    (lambda: hq.NVFP4(four_over_six="max"), "NVFP4: four_over_six='max' is not one of None, 'mae', 'mse'"),
    (lambda: hq.HighPrecision("int8"), "HighPrecision: dtype='int8' is not one of None, 'bfloat16'"),
    (lambda: as_format("mxfp9"), "unknown format 'mxfp9'; did you mean 'mxfp8'.* known: fp8_e4m3, "),
    (lambda: as_format("zzz"), "unknown format 'zzz'; known: fp8_e4m3, "),
    (lambda: as_format("mxfp8(rule=floor"), r"lacks the closing bracket; write mxfp8\(field=value, ...\)"),
    (lambda: as_format("mxfp8(rules=up)"), "mxfp8 has no field 'rules'; it has element, rule, block"),
    (lambda: as_format("mxfp8(rht=true)"), r"'mxfp8\(rht=true\)': mxfp8 has no field 'rht'; it has element, rule, "
     "block; rht is a field of nvfp4, nvfp4_16x16, nvfp4_row$"),
    (lambda: as_format("nvfp4(rht=1)"), r"'nvfp4\(rht=1\)': 'rht=1' is not a truth value; write rht=true or rht=false"),
    (lambda: as_format("fp8_e4m3(pow2=yes)"), "write pow2=true or pow2=false"),
    (lambda: as_format("nvfp4(per_row=none)"), "write per_row=true or per_row=false"),
    (lambda: as_format("mxfp8(=up)"), "'=up' must be field=value with one of element, rule"),
    (lambda: as_format("nvfp4(rht=true,rht=false)"), r"'nvfp4\(rht=true,rht=false\)' gives 'rht' twice; give each"),
    (lambda: as_format("mxfp8(rule=up, rule=up)"), "gives 'rule' twice"),
    (lambda: as_format("fp8_e5m2_gradient"), "it is a recipe, .*grad_output fp8_e5m2"),
    (lambda: hq.quantize(np.ones((2, 32), "f4"), rowwise="fp8_current"), "it is a recipe, .*, such as 'fp8_e4m3'"),
    (lambda: as_format("mxfp8(up)"), "'up' must be field=value"),
])
def test_a_wrong_format_says_what_was_expected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@named("format", [None, 8, np.float32, b"mxfp8"], ids=str)
def test_what_is_no_format_is_a_type_error(format):
    with pytest.raises(TypeError, match="a format is a short name or a Format, not"):
        as_format(format)


@named("make", [lambda: hq.FP8(epsilon="a"), lambda: as_format("fp8_e4m3(epsilon=a)"), lambda: hq.FP8(epsilon=True),
                lambda: as_format("fp8_block_1x128(epsilon=true)"), lambda: hq.FP8Block(epsilon=None)],
       ids=["a", "name", "True", "true", "None"])
def test_an_epsilon_that_is_no_number_is_a_type_error(make):
    with pytest.raises(TypeError, match=r"^FP8(Block)?: epsilon=('a'|True|None) is \w+; give a number, such as 1e-6"):
        make()


OPTIONS = ("nvfp4(rht=true)", "nvfp4(rounding=stochastic)", "nvfp4_16x16(four_over_six=mae)",
           "nvfp4(four_over_six=mse,global_bound=256)", "nvfp4_row(rht=true,rounding=stochastic,four_over_six=mae)",
           "mxfp4(block=32x32)", "fp8_e5m2(per_row=true)")


@named("name", OPTIONS)
def test_a_format_of_many_options_has_a_name_that_gives_it_back(name):
    format = as_format(name)
    assert as_format(format.name) == format and hash(as_format(format.name)) == hash(format)


def test_what_reading_needs_is_in_the_storage_and_what_rounded_is_not():
    plain = hq.NVFP4().storage
    for rounding in (hq.NVFP4(rounding="stochastic"), hq.NVFP4(four_over_six="mae", global_bound=256)):
        assert rounding.storage == plain
    assert hq.NVFP4(rht=True).storage != plain != hq.NVFP4(per_row=True).storage
    assert hq.MX(block=(32, 32)).storage == hq.MX().storage and hq.MX(block=(32, 32)).transposable


def test_bounds_and_blocks_that_are_not_in_the_table_are_refused():
    with pytest.raises(ValueError, match="global_bound=300 is not one of 448, 256"):
        hq.NVFP4(global_bound=300)
    with pytest.raises(ValueError, match=r"per_row=True needs block=\(1, 16\)"):
        hq.NVFP4((16, 16), per_row=True)
    with pytest.raises(ValueError, match=r"MX: block=\(1, 16\) is not one of \(1, 32\), \(32, 32\)"):
        hq.MX(block=(1, 16))


def test_scale_tables_are_read_only_and_complete():
    e8m0 = scale_values("e8m0")
    assert e8m0[:255].tolist() == [2.0 ** (b - 127) for b in range(255)] and np.isnan(e8m0[255])
    assert e8m0[0] == np.float32(5.877472e-39)
    assert scale_values("float32") is None and scale_values("none") is None
    for table in (e8m0, scale_values("e4m3"), ELEMENTS["e2m1"].values):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 1


def test_the_nan_of_a_scale_decodes_to_nan():
    assert (SCALES["e8m0"].nan, SCALES["e4m3"].nan) == (0xFF, 0x7F)
    for kind, scale in SCALES.items():
        table = scale_values(kind)
        assert scale.nan is None or np.isnan(scale.nan if table is None else table[scale.nan])


@named("name", FORMATS)
def test_scales_cover_every_block(name):
    storage = FORMATS[name].storage
    for shape in ((0, 5), (5, 0), (1, 1), (128, 128), (129, 257)):
        rows, blocks = storage.num_scales(shape)
        if storage.scale == "none":
            assert (rows, blocks) == (0, 0)
        elif storage.block is None:
            assert (rows, blocks) == (1, 1)
        else:
            for count, size, block in zip((rows, blocks), shape, storage.block, strict=True):
                assert count * block >= size > (count - 1) * block or size == count == 0


def test_a_format_is_abstract_or_final():
    with pytest.raises(TypeError, match="abstract"):
        Format()


@named("element", ELEMENTS.values(), ids=lambda element: element.name)
def test_an_element_knows_the_name_of_its_type(element):
    dtype = np.dtype(getattr(ml_dtypes, element.dtype_name, None) or element.dtype_name)
    assert dtype.name == element.dtype_name
    if element.bits <= 8:
        assert ml_dtypes.finfo(dtype).bits == element.bits and float(ml_dtypes.finfo(dtype).max) == element.max


def test_storage_knows_the_name_of_its_scales_type():
    names = {name: FORMATS[name].storage.scale_dtype_name for name in ("mxfp4", "nvfp4", "fp8_e4m3", "bf16")}
    assert names == {"mxfp4": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn", "fp8_e4m3": "float32", "bf16": "uint8"}
    assert ml_dtypes.float8_e8m0fnu and ml_dtypes.float8_e4m3fn
