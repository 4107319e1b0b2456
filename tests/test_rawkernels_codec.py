"""codec.cuh, compiled for the host, against reference.py and the specifications."""

import ctypes
import shutil
import subprocess
from fractions import Fraction
from math import inf

import numpy as np
import oracles
import pytest

from hqarray import reference, scaling, testing
from hqarray.formats import BFLOAT16, ELEMENTS, Element, PowerOfTwo, Reciprocal, TwoLevel
from hqarray.rawkernels import loader

E3M4 = Element("e3m4", 3, 4, 3, "nan")
E4M3_IEEE = Element("e4m3_ieee", 4, 3, 7, "ieee")
ADDED = [E3M4, E4M3_IEEE, Element("e2m2", 2, 2, 1, "none"), Element("e1m2", 1, 2, 1, "none")]
"""Elements that a user might add: the codec must not know the table."""
TABLE = [element for element in ELEMENTS.values() if element.bits <= 8]
SPECIALS = {"none": "hq::FINITE", "nan": "hq::NAN_ONLY", "ieee": "hq::IEEE"}
ROUNDINGS = {"up": "hq::UP", "floor": "hq::FLOOR", "even": "hq::EVEN"}
RULES = [Reciprocal(pow2, epsilon) for pow2 in (False, True) for epsilon in (0.0, 1e-4, 0.5)]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
elements = pytest.mark.parametrize("element", TABLE + ADDED, ids=lambda element: element.name)
table = pytest.mark.parametrize("element", TABLE, ids=lambda element: element.name)

FOR_EVERY_ELEMENT = """
typedef {type} {name};
ENTRY encode_{name}(const u32* x, u8* y, i64 n) {{ for (i64 i = 0; i < n; ++i) y[i] = {name}::encode(x[i]); }}
ENTRY decode_{name}(const u32* x, u32* y, i64 n) {{ for (i64 i = 0; i < n; ++i) y[i] = {name}::decode(x[i]); }}
ENTRY facts_{name}(u32* y) {{ y[0] = {name}::max_bits; y[1] = {name}::max_code; y[2] = {name}::max_exponent; }}
"""
FOR_EVERY_ROUNDING = """
ENTRY scale_{name}_{rule}(const u32* x, u32* y, i64 n) {{
    for (i64 i = 0; i < n; ++i) y[i] = power_of_two_scale<{name}, {rounding}>(x[i]);
}}
"""
SCALES = """
ENTRY factors(const u32* x, u32* y, i64 n) { for (i64 i = 0; i < n; ++i) y[i] = power_of_two_factor(x[i]); }
ENTRY e8m0(const u32* x, u32* y, i64 n) { for (i64 i = 0; i < n; ++i) y[i] = decode_e8m0(x[i]); }
ENTRY reciprocal(const float* x, float* y, i64 n, float max, float epsilon, int pow2) {
    for (i64 i = 0; i < n; ++i) y[i] = reciprocal_factor(x[i], max, epsilon, pow2);
}
ENTRY global(const float* x, float* y, i64 n, float product) {
    for (i64 i = 0; i < n; ++i) y[i] = global_encode_scale(x[i], product);
}
ENTRY two_level(const float* x, float* y, i64 n, float decode_scale) {
    for (i64 i = 0; i < n; ++i) y[i] = two_level_factor(x[i], decode_scale);
}
"""


def type_of(element):
    facts = (element.exponent_bits, element.mantissa_bits, element.bias, SPECIALS[element.specials])
    return f"Element<{', '.join(map(str, facts))}>"


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    """The shim as a ctypes library; g++ neither contracts nor reorders."""
    text = '#include "codec.cuh"\n#define ENTRY extern "C" void\nusing namespace hq;\n' + SCALES
    for element in TABLE + ADDED:
        text += FOR_EVERY_ELEMENT.format(name=element.name, type=type_of(element))
        for rule, rounding in ROUNDINGS.items():
            text += FOR_EVERY_ROUNDING.format(name=element.name, rule=rule, rounding=rounding)
    folder = tmp_path_factory.mktemp("codec")
    (folder / "shim.cpp").write_text(text)
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-fno-fast-math", "-Wall", "-Wextra", "-Werror",
               "-Wno-type-limits", "-shared", "-fPIC", f"-I{loader.SOURCES}", "shim.cpp", "-o", "shim.so"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(folder / "shim.so"))


def call(function, x, dtype, *arguments):
    """function(x, y, n, *arguments) of the shim; returns y."""
    x = np.ascontiguousarray(x)
    y = np.full(x.shape, 0x5A, dtype)
    numbers = [ctypes.c_float(a) if isinstance(a, (float, np.floating)) else ctypes.c_int(a) for a in arguments]
    function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_longlong(x.size), *numbers)
    return y


def every_bfloat16():
    return np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16).astype(np.float32)


def around(values, steps=3):
    """float32 values, their neighbours on both sides and all of them negated."""
    bits = np.asarray(values, np.float32).view(np.int32)
    near = (bits[:, None] + np.arange(-steps, steps + 1)).ravel()
    near = near[(near >= 0) & (near <= 0x7F800001)].astype(np.int32).view(np.float32)
    return np.concatenate([near, -near])


def random_float32(count=1_000_000):
    return np.random.default_rng(3).integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)


def borders(element):
    """Every value of an element and every midpoint of two neighbours."""
    values = element.values[: element.max_code + 1].astype(np.float64)
    beyond = values[-1] + (values[-1] - values[-2]) / 2
    return np.concatenate([values, (values[:-1] + values[1:]) / 2, [beyond, 2 * values[-1]]])


def amaxes(*more):
    """Magnitudes: all of bfloat16, random ones, 0, subnormals, huge, Inf; borders and their neighbours."""
    values = [every_bfloat16(), random_float32(), around([0, 1e-45, 1e-40, 1.2e-38, 7.9e-36, 1, 3.4028235e38, inf])]
    values += [around(border) for border in more]
    magnitudes = np.abs(np.concatenate(values))
    return magnitudes[~np.isnan(magnitudes)]


def same(ours, theirs):
    """Bit for bit, a NaN like any other."""
    assert (np.isnan(ours) == np.isnan(theirs)).all()
    testing.assert_bitwise_equal(ours[~np.isnan(ours)], theirs[~np.isnan(theirs)])


# --- elements -----------------------------------------------------------------------------------


@elements
@pytest.mark.parametrize("values", [every_bfloat16, random_float32, "borders"])
def test_encode_equals_the_reference(codec, element, values):
    x = around(borders(element)) if values == "borders" else values()
    codes = call(codec[f"encode_{element.name}"], x, np.uint8)
    testing.assert_bitwise_equal(codes, reference.encode(x, element))


@table
def test_encode_equals_the_specification_at_every_border(codec, element):
    x = around(borders(element), steps=1)
    codes = call(codec[f"encode_{element.name}"], x, np.uint8)
    expected = [oracles.code_of(abs(Fraction(float(value))), element.name) for value in x]
    sign = np.signbit(x).astype(np.uint8) << (element.bits - 1)
    testing.assert_bitwise_equal(codes, np.array(expected, np.uint8) | sign)


@elements
def test_decode_equals_the_reference_for_every_code(codec, element):
    codes = np.arange(1 << element.bits, dtype=np.uint32)
    bits = call(codec[f"decode_{element.name}"], codes, np.uint32)
    same(bits.view(np.float32), element.values)
    assert (bits[np.isnan(element.values)] == 0x7FFFFFFF).all()


@elements
def test_derived_numbers_equal_those_of_the_row(codec, element):
    facts = np.zeros(3, np.uint32)
    codec[f"facts_{element.name}"](ctypes.c_void_p(facts.ctypes.data))
    assert facts[:1].view(np.float32)[0] == element.max
    assert facts[1:].tolist() == [element.max_code, element.max_exponent]


# --- scales -------------------------------------------------------------------------------------


@elements
@pytest.mark.parametrize("rule", ROUNDINGS)
def test_power_of_two_scale_equals_the_reference(codec, element, rule):
    powers = 2.0 ** np.arange(-149, 128)
    carry = 2 - 2.0 ** -(element.mantissa_bits + 1)  # where "even" goes up
    x = amaxes(powers, powers[powers < 2e38 / element.max] * element.max, powers * carry)
    stored, factor = scaling._power_of_two(x, PowerOfTwo(rule), element, None)
    bytes_ = call(codec[f"scale_{element.name}_{rule}"], x, np.uint32)
    testing.assert_bitwise_equal(bytes_.astype(np.uint8), stored)
    testing.assert_bitwise_equal(call(codec.factors, bytes_, np.uint32).view(np.float32), factor)


@table
@pytest.mark.parametrize("rule", ROUNDINGS)
def test_power_of_two_scale_equals_the_specification(codec, element, rule):
    x = np.abs(around([*(2.0 ** np.arange(-149, 128, 9)), *(element.max * 2.0 ** np.arange(-120, 100, 9)), inf], 1))
    x = x[~np.isnan(x)]
    expected = [oracles.mx(oracles.magnitudes([[v]])[0][0], element.name, rule)[0] for v in x]
    assert call(codec[f"scale_{element.name}_{rule}"], x, np.uint32).tolist() == expected


def test_decode_e8m0_is_two_to_the_byte_minus_127(codec):
    values = call(codec.e8m0, np.arange(256, dtype=np.uint32), np.uint32).view(np.float32)
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert np.isnan(values[255])


@table
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_reciprocal_factor_equals_the_reference(codec, element, rule):
    x = np.append(amaxes([element.max, rule.epsilon], element.max / 2.0 ** np.arange(-100, 100)), np.float32(np.nan))
    with np.errstate(all="ignore"):
        _, factor = scaling._reciprocal(x, rule, element, None)
    ours = call(codec.reciprocal, x, np.float32, element.max, rule.epsilon, int(rule.pow2))
    testing.assert_bitwise_equal(ours, factor)
    assert ((ours > 0) & (ours < inf)).all()


@table
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_reciprocal_factor_equals_the_specification(codec, element, rule):
    x = np.abs(np.append(random_float32(300), np.float32([0, inf, 1e-45, 448, 3.4e38, 1e-39])))
    x = x[~np.isnan(x)]
    factors = call(codec.reciprocal, x, np.float32, element.max, rule.epsilon, int(rule.pow2))
    for amax, factor in zip(oracles.magnitudes([x])[0], factors, strict=True):
        _, scaled = oracles.reciprocal(amax, element.name, rule.pow2, rule.epsilon)
        assert scaled(Fraction(1)) == Fraction(float(factor))


WHOLE = [0.0, 1e-45, 1e-40, 7.8e-36, 7.9e-36, 8e-36, 1e-20, 0.1, 1.0, 2688.0, 1e4, 1e30, 3.4028235e38, inf, np.nan]


@pytest.mark.parametrize("bound", [448.0, 256.0])
def test_global_encode_scale_equals_the_reference(codec, bound):
    rule, element = TwoLevel(bound), ELEMENTS["e2m1"]
    x = np.append(np.abs(random_float32(2000)), np.float32(WHOLE))
    expected = scaling.global_scales(x, rule, element)[0]
    ours = call(codec["global"], x, np.float32, np.float32(bound) * np.float32(element.max))
    testing.assert_bitwise_equal(ours, expected)


def test_global_encode_scale_equals_the_specification(codec):
    x = np.abs(np.append(random_float32(300), np.float32(WHOLE)))
    x = x[~np.isnan(x)]
    expected = [float(oracles.nvfp4_global(whole)[0]) for whole in oracles.magnitudes([x])[0]]
    assert call(codec["global"], x, np.float32, 2688.0).tolist() == expected


@pytest.mark.parametrize("whole", WHOLE)
def test_two_level_scale_and_factor_equal_the_reference(codec, whole):
    rule, element = TwoLevel(448.0), ELEMENTS["e2m1"]
    x = amaxes(np.float64(whole) * 2.0 ** np.arange(-30, 1)) if whole < inf else amaxes()
    with np.errstate(all="ignore"):
        stored, factor = scaling._two_level(x, rule, element, np.float32([whole]))
        encode_scale, decode_scale = scaling.global_scales(np.float32([whole]), rule, element)
        scaled = x * (encode_scale * scaling.SIXTH)
    ours = call(codec.encode_e4m3, scaled, np.uint8)
    testing.assert_bitwise_equal(ours, stored)
    decoded = call(codec.decode_e4m3, ours.astype(np.uint32), np.uint32).view(np.float32)
    testing.assert_bitwise_equal(call(codec.two_level, decoded, np.float32, decode_scale[0]), factor)
