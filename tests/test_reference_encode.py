"""The element codecs of the reference: every code and every rounding, against oracles of another make."""

import itertools

import ml_dtypes
import numpy as np
import oracles
import pytest

from hqarray import reference, testing
from hqarray.formats import ELEMENTS
from hqarray.layout import pack_nibbles

NARROW = [element for element in ELEMENTS.values() if element.bits <= 8]
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m1": ml_dtypes.float4_e2m1fn,
}
named = pytest.mark.parametrize
elements = named("element", NARROW, ids=lambda element: element.name)


def every_bfloat16():
    return np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def cast(values, element):
    """The code ml_dtypes gives a finite value, clipped first: its NaN and its overflow are not ours."""
    largest = np.float32(float(oracles.SPECIFICATIONS[element.name][2]))
    return np.clip(values, -largest, largest).astype(ML_DTYPES[element.name]).view(np.uint8)


@elements
def test_every_code_decodes_to_what_ml_dtypes_says(element):
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    theirs = codes.view(ML_DTYPES[element.name]).astype(np.float32)
    ours = reference.decode(pack_nibbles(codes[None])[0] if element.bits == 4 else codes, element)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    testing.assert_bitwise_equal(ours[~np.isnan(ours)], theirs[~np.isnan(ours)])


@elements
def test_every_code_decodes_to_its_specification(element):
    half = 1 << (element.bits - 1)
    for code in range(element.max_code + 1):
        assert element.values[code] == oracles.value_of(code, element.name)
        assert element.values[half + code] == -oracles.value_of(code, element.name)
        assert np.signbit(element.values[half + code])


@elements
def test_encoding_a_decoded_code_gives_it_back(element):
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    values = element.values
    again = reference.encode(values, element)
    finite = np.isfinite(values)
    testing.assert_bitwise_equal(again[finite], codes[finite])
    assert (again[np.isnan(values)] == 0x7F).all()


@elements
def test_every_bfloat16_encodes_as_ml_dtypes_does(element):
    values = every_bfloat16()
    finite = ~np.isnan(values)
    ours = reference.encode(values, element)
    testing.assert_bitwise_equal(ours[finite], cast(values[finite], element))
    assert (ours[~finite] == (element.nan_code or 0)).all()


@elements
def test_values_around_every_tie_encode_as_ml_dtypes_does(element):
    finite = np.sort(element.values[np.isfinite(element.values)])
    ties = (finite[:-1] + finite[1:]) / 2
    ladder = [ties, finite]
    for _ in range(3):
        ladder += [np.nextafter(ladder[-2], np.float32(np.inf)), np.nextafter(ladder[-1], np.float32(-np.inf))]
    values = np.concatenate(ladder)
    testing.assert_bitwise_equal(reference.encode(values, element), cast(values, element))


@elements
def test_random_float32_patterns_encode_as_ml_dtypes_does(element):
    bits = np.random.default_rng(7).integers(0, 1 << 32, 300_000, dtype=np.uint32)
    scaled = np.random.default_rng(8).standard_normal(300_000).astype(np.float32)
    for values in (bits.view(np.float32), scaled, scaled * np.float32(element.max)):
        values = values[~np.isnan(values)]
        testing.assert_bitwise_equal(reference.encode(values, element), cast(values, element))


@elements
def test_values_around_every_quarter_step_encode_as_the_specification_says(element):
    grid = element.values[: element.max_code + 1]
    quarters = (grid[:-1] + np.diff(grid) * np.array([[0], [0.25], [0.5], [0.75]], np.float32)).ravel()
    around = [np.nextafter(quarters, np.float32(side)) for side in (-np.inf, np.inf)]
    values = np.concatenate([quarters, *around, grid[-1:] * np.float32(1.5)])
    values = np.concatenate([values, -values])
    sign = np.signbit(values).astype(np.uint8) << (element.bits - 1)
    expected = [oracles.code_of(x, element.name) for x in oracles.magnitudes([values])[0]]
    testing.assert_bitwise_equal(reference.encode(values, element), np.array(expected, np.uint8) | sign)


@elements
def test_encoding_keeps_signs_and_saturates(element):
    values = np.array([0.0, -0.0, np.inf, -np.inf, 3e38, -3e38, 1e-45, -1e-45], np.float32)
    sign, top = 1 << (element.bits - 1), element.max_code
    expected = [0, sign, top, sign | top, top, sign | top, 0, sign]
    assert reference.encode(values, element).tolist() == expected


@named("element", ["e4m3", "e5m2"])
def test_torch_casts_to_the_same_codes(element):
    torch = pytest.importorskip("torch")
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
    row = ELEMENTS[element]
    values = every_bfloat16()
    values = values[~np.isnan(values)]
    clipped = torch.from_numpy(np.clip(values, -row.max, row.max).astype(np.float32))
    theirs = clipped.to(dtype).view(torch.uint8).numpy()
    testing.assert_bitwise_equal(reference.encode(values, row), theirs)


def test_e2m1_ties_go_to_the_even_code():
    values = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, 7.0], np.float32)
    assert reference.encode(values, ELEMENTS["e2m1"]).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7]


def test_encode_tables_name_every_upper_half_once():
    for element, odd in itertools.product(NARROW, (0, 1)):
        values = ((np.arange(1 << 16, dtype=np.uint32) << 16) | odd).view(np.float32)
        indexed = reference.encode_table(element)[np.arange(1 << 16) | odd]
        testing.assert_bitwise_equal(reference.encode(values, element)[~np.isnan(values)], indexed[~np.isnan(values)])
