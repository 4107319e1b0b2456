"""Stochastic rounding: one element in exact arithmetic, the mean of many, and that a draw is an element's own."""

from fractions import Fraction

import numpy as np
import pytest
from test_philox import draw

import hqarray as hq
from hqarray import codec, testing
from hqarray.formats import ELEMENTS
from hqarray.layout import unpack_nibbles

named = pytest.mark.parametrize

E2M1 = ELEMENTS["e2m1"]
GRID = [Fraction(x) for x in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
SR = "nvfp4(rounding=stochastic)"
ONE = np.float32(448 * 6)
"""An amax under which the global scale is 1, and one in a block with 6 gives a block scale of 1."""

OPTIONS = ["nvfp4(rounding=stochastic)", "nvfp4_16x16(rounding=stochastic)", "nvfp4(rounding=stochastic,rht=true)",
           "nvfp4(rounding=stochastic,four_over_six=mae)", "nvfp4_row(rounding=stochastic)",
           "nvfp4(rounding=stochastic,rht=true,four_over_six=mse,global_bound=256)"]


def codes_of(part):
    return unpack_nibbles(part.codes, part.shape[1])


def rounded(x, bits):
    """Code of one float32 in fractions: steps of 1/512 of a spacing, rounded to even, a draw of them, rounded down."""
    sign = 8 * int(np.signbit(x))
    a = abs(Fraction(float(x)))
    if a >= 6:
        return sign | 7
    below = max(code for code, value in enumerate(GRID) if value <= a)
    steps = 512 * below + round((a - GRID[below]) / (GRID[below + 1] - GRID[below]) * 512)
    return sign | (steps + int(bits)) >> 9


def midpoints():
    """All numbers half way between two of float16 that matter, their neighbours in float32, and float16's own."""
    halves = np.arange(0x0F00, dtype=np.uint16).view(np.float16).astype(np.float32) * np.float32(2**14)
    middle = (halves[1:] + halves[:-1]) / 2
    return np.concatenate([halves, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(99))])


@named("draw", [0, 1, 255, 256, 510, 511])
def test_every_number_of_float16_and_every_tie_is_rounded_as_the_definition_says(draw):
    x = midpoints()
    x[1::2] *= -1
    draws = np.full(x.shape, draw, np.uint16)
    assert codec.encode_stochastic(x, E2M1, draws).tolist() == [rounded(v, draw) for v in x]


def test_every_draw_rounds_as_the_definition_says():
    every = np.arange(512, dtype=np.uint16)
    numbers = [1e-4, 2**-11, 2**-10, 0.001, 0.25, 0.3, 0.6, 0.9999, 1.2, -1.7, 2.4, 3.3, -4.1, 5.9, 5.9999, 6, 6.2]
    for x in np.float32(numbers):
        codes = codec.encode_stochastic(np.full(every.shape, x), E2M1, every)
        assert codes.tolist() == [rounded(x, bits) for bits in every]


@named("kind", ["gauss", "ties", "powers_of_two", "negative_zeros"])
def test_an_element_is_rounded_as_the_definition_says(kind):
    x = np.clip(testing.matrix(kind, (64, 32)) * (1 if kind != "gauss" else 3), -1e5, 1e5)
    bits = np.random.default_rng(1).integers(0, 512, x.shape, np.uint16)
    bits[0], bits[1] = 0, 511
    expected = [[rounded(a, b) for a, b in zip(*row, strict=True)] for row in zip(x, bits, strict=True)]
    np.testing.assert_array_equal(codec.encode_stochastic(x, E2M1, bits), expected)


def test_a_value_that_has_a_code_keeps_it_for_every_draw():
    every = np.arange(512, dtype=np.uint16)
    for code, value in enumerate(E2M1.values):
        codes = codec.encode_stochastic(np.full(every.shape, value), E2M1, every)
        assert (codes == code).all()  # of -0 too


@named("x", [0.6, 0.1, 1e-3, 1.25, 1.9, 2.7, 3.999, 4.5, 5.9, 2.0**-17, 1e-30])
def test_the_mean_over_all_draws_is_the_value_within_the_resolution(x):
    x = np.float32(x)
    every = np.arange(512, dtype=np.uint16)
    for sign in (1, -1):
        codes = codec.encode_stochastic(np.full(every.shape, sign * x), E2M1, every)
        decoded = E2M1.values.take(codes).astype(np.float64)
        below = max(g for g in GRID if g <= Fraction(float(x)))
        step = float(GRID[GRID.index(below) + 1] - below)
        assert set(np.unique(np.abs(decoded))) <= {float(below), float(below) + step}
        assert abs(decoded.mean() - sign * x) <= step * 2.0**-10


def test_nan_inf_and_what_is_too_large():
    bits = np.zeros(6, np.uint16)
    codes = codec.encode_stochastic(np.float32([np.nan, np.inf, -np.inf, 7, -3e38, 6.0001]), E2M1, bits)
    assert codes.tolist() == [0, 7, 15, 7, 15, 7]


def test_the_mean_of_4096_draws_of_0_6_is_0_6_within_4_sigma():
    """One element in a block of scale 1, by 4096 seeds; and 4096 elements by one seed."""
    x = np.full((1, 16), 0.6, np.float32)
    x[0, 0] = 6
    drawn = [hq.quantize(x, rowwise=SR, amax=ONE, seed=seed).dequantize()[0, 1:] for seed in range(4096)]
    many = np.full((4096, 16), 0.6, np.float32)
    many[:, 0] = 6
    sigma = np.sqrt(0.2 * 0.8) * 0.5 / 64  # 0.6 is 0.5 with probability 0.8, else 1
    for column in (0, 1, 7, 8, 14):
        assert set(np.float32([d[column] for d in drawn])) == {np.float32(0.5), np.float32(1)}
        assert abs(np.mean([d[column] for d in drawn]) - 0.6) < 4 * sigma
    decoded = hq.quantize(many, rowwise=SR, amax=ONE, seed=1).dequantize()
    assert (np.abs(decoded[:, 1:].mean(axis=0) - 0.6) < 4 * sigma).all()


@named("format", OPTIONS)
def test_a_seed_repeats_two_differ_and_zeros_stay(format):
    x = testing.matrix("gauss", (65, 130))
    x[3:20] = 0
    options = {"rowwise": format, "columnwise": format}
    first, again, other = (hq.quantize(x, **options, seed=seed) for seed in (1, np.uint64(1), 2))
    testing.assert_bitwise_equal(first, again)
    testing.assert_in_rounding_cell(x, first)
    for direction, part in first.parts():
        testing.assert_code_padding_is_zero(part)
        theirs = other.part(direction)
        differ = (codes_of(part) != codes_of(theirs)).mean()
        assert 0.1 < differ < 0.9
        testing.assert_bitwise_equal(np.ascontiguousarray(part.scales), np.ascontiguousarray(theirs.scales))
    assert not first.dequantize(source="rowwise")[3:20].any()


@named("direction", ["rowwise", "columnwise"])
def test_codes_are_those_of_each_elements_own_draw(direction):
    x = testing.matrix("gauss", (37, 45))
    array = hq.quantize(x, **{direction: SR}, seed=2**40 + 3)
    part, source = array.part(direction), x if direction == "rowwise" else x.T
    nearest = hq.quantize(x, **{direction: "nvfp4"}).part(direction)
    testing.assert_bitwise_equal(np.ascontiguousarray(part.scales), np.ascontiguousarray(nearest.scales))
    scales = ELEMENTS["e4m3"].values.take(part.scales) * part.global_scale
    factor = np.repeat(np.float32(1) / scales, 16, axis=1)[:, : source.shape[1]]
    scaled, number = source * factor, int(direction == "columnwise")
    expected = [[rounded(v, draw(2**40 + 3, number, i, j)) for j, v in enumerate(row)] for i, row in enumerate(scaled)]
    np.testing.assert_array_equal(codes_of(part), expected)


@named("tile", [256, 1 << 12])
def test_tiles_strides_and_the_way_there_do_not_matter(monkeypatch, tile):
    x = testing.matrix("gauss", (70, 134))
    options = {"rowwise": OPTIONS[-1], "columnwise": SR, "seed": 5}
    expected = hq.quantize(x, **options)
    testing.assert_bitwise_equal(hq.quantize(np.asfortranarray(x), **options), expected)
    array = hq.quantize(np.zeros_like(x), **options)
    hq.requantize(array, x, seed=np.array([5], np.uint64))
    testing.assert_bitwise_equal(array, expected)
    monkeypatch.setattr("hqarray.reference.TILE_ELEMENTS", tile)
    testing.assert_bitwise_equal(hq.quantize(x, **options), expected)


@named("format", OPTIONS)
def test_members_of_a_group_are_those_quantized_alone(format):
    sizes = [33, 0, 16, 70]
    x = testing.matrix("gauss", (sum(sizes), 75))
    options = {"rowwise": format, "columnwise": format, "seed": 9}
    g = hq.grouped_quantize(x, sizes, **options)
    split = hq.split_quantize(x, sizes, [(format, format), None, (format, format), (format, format)], seed=9)
    starts = np.cumsum([0, *sizes])
    for i, size in enumerate(sizes):
        alone = hq.quantize(x[starts[i] : starts[i] + size], **options)
        testing.assert_bitwise_equal(g[i], alone)
        if split[i].shape[0]:
            testing.assert_bitwise_equal(split[i], alone)
    g.dequantize()


@named("shapes", [((20, 48), (33, 48)), ((20, 48), (20, 33)), ((5, 48), (20, 33))], ids=["rows", "columns", "both"])
def test_arrays_gathered_into_a_group_are_those_quantized_alone(shapes):
    arrays = [testing.matrix("gauss", shape, seed=i) for i, shape in enumerate(shapes)]
    options = {"rowwise": SR, "columnwise": "nvfp4(rounding=stochastic,rht=true)", "seed": 4}
    for member, x in zip(hq.GroupedArray.from_arrays(arrays, **options), arrays, strict=True):
        testing.assert_bitwise_equal(member, hq.quantize(x, **options))
    stacked = np.stack([arrays[0]] * 2)
    for member in hq.GroupedArray.from_stacked(stacked, **options):
        testing.assert_bitwise_equal(member, hq.quantize(arrays[0], **options))


def test_columns_derived_from_rows_draw_as_columns():
    x = testing.matrix("gauss", (40, 64))
    array = hq.quantize(x, rowwise="mxfp8", columnwise=SR, columnwise_source="rowwise_dequantized", seed=3)
    rows = hq.quantize(x, rowwise="mxfp8")
    testing.assert_bitwise_equal(array.columnwise, hq.quantize(rows.dequantize(), columnwise=SR, seed=3).columnwise)
    testing.assert_bitwise_equal(rows.with_columnwise(SR, seed=3), array)
    with pytest.raises(ValueError, match="needs seed="):
        rows.with_columnwise(SR)


def test_squares_are_moved_without_a_draw():
    square = "nvfp4_16x16(rounding=stochastic)"
    rows = hq.quantize(testing.matrix("gauss", (40, 64)), rowwise=square, seed=3)
    testing.assert_bitwise_equal(
        rows.with_columnwise().dequantize(source="columnwise").copy(), rows.dequantize(source="rowwise")
    )


def test_a_seed_that_is_none_or_no_seed_says_what_it_must_be():
    x = np.ones((16, 16), np.float32)
    calls = (
        lambda seed: hq.quantize(x, rowwise=SR, seed=seed),
        lambda seed: hq.fake_quantize(x, SR, seed=seed),
        lambda seed: hq.grouped_quantize(x, [16], columnwise=SR, seed=seed),
        lambda seed: hq.split_quantize(x, [16], [SR], seed=seed),
        lambda seed: hq.GroupedArray.from_arrays([x], rowwise=SR, seed=seed),
        lambda seed: hq.GroupedArray.from_stacked(x[None], rowwise=SR, seed=seed),
        lambda seed: hq.requantize(hq.quantize(x, rowwise=SR, seed=1), x, seed=seed),
    )
    for call in calls:
        call(7)
        with pytest.raises(ValueError, match=r"nvfp4\(rounding=stochastic\) rounds at random and needs seed=: an int"):
            call(None)
        with pytest.raises(ValueError, match=r"seed=-1 is not from 0 to 2\*\*64 - 1"):
            call(-1)
        for wrong, said in ((True, "bool"), (1.5, "float"), (np.array([1], np.int32), "int32")):
            with pytest.raises(TypeError, match=f"seed is an integer or an array of one uint64 or int64, not {said}"):
                call(wrong)
        with pytest.raises(ValueError, match=r"seed is one element, not \(2,\)"):
            call(np.array([1, 2], np.uint64))


def test_formats_that_round_to_nearest_ignore_a_seed():
    x = testing.matrix("gauss", (16, 16))
    testing.assert_bitwise_equal(hq.quantize(x, rowwise="nvfp4", seed=3), hq.quantize(x, rowwise="nvfp4"))
    with pytest.raises(ValueError, match="seed=-3"):
        hq.quantize(x, rowwise="nvfp4", seed=-3)
