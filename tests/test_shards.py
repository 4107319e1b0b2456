"""Shards against the whole: the same bytes, for every format, in both directions, on NumPy and on a GPU."""

import math
from itertools import pairwise

import numpy as np
import pytest

import hqarray as hq
from hqarray import testing
from hqarray.formats import ROW, as_format
from hqarray.shards import Shard, quantize_shard, shard_alignment

SHAPE = (600, 500)


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    return np if request.param == "numpy" else pytest.importorskip("cupy")


def host(array):
    return array.get() if hasattr(array, "get") else array


def cuts(length, step, wanted):
    """Borders of unequal shards on multiples of a step, 0 and the length included, empty ones not."""
    return sorted({0, length, *(n // step * step for n in wanted)})


def pieces(step, axis):
    """Unequal shards by rows (axis 0) or by columns: (rows, columns) slices."""
    if step[axis] == ROW:
        pytest.skip("a format whose blocks are rows is not cut there")
    borders = cuts(SHAPE[axis], step[axis], (41, 70, 300, 450))
    assert len(borders) > 2
    for start, stop in pairwise(borders):
        mine, other = slice(start, stop), slice(0, SHAPE[1 - axis])
        yield (mine, other) if axis == 0 else (other, mine)


def cut_out(part, rows, columns):
    """Codes and scales of a part's rows and columns, which lie on block borders."""
    storage = part.format.storage
    packed = 8 // storage.element.stored_bits if storage.element.stored_bits < 8 else 1
    codes = host(part.codes)[rows, columns.start // packed : -(-columns.stop // packed)]
    if storage.block is None:
        return codes, host(part.scales)
    window = tuple(slice(s.start // b, -(-s.stop // b)) for s, b in zip((rows, columns), storage.block, strict=True))
    return codes, host(part.scales)[window]


OPTIONS = ["nvfp4(rht=True)", "nvfp4(rounding=stochastic)", "nvfp4(rht=True,rounding=stochastic)",
           "nvfp4(four_over_six=mse)", "nvfp4_16x16(rounding=stochastic)", "mxfp8(rule=floor)"]
SEED = 123


@pytest.mark.parametrize("axis", [0, 1], ids=["by rows", "by columns"])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", [*hq.FORMATS, *OPTIONS])
def test_bytes_of_unequal_shards_are_those_of_the_whole(name, direction, axis, xp):
    values = testing.matrix("wide", SHAPE, np.float32, seed=3)
    chosen = {direction: name}
    whole = hq.quantize(xp.asarray(values), seed=SEED, **chosen).part(direction)
    cut = list(pieces(shard_alignment(**chosen), axis))
    shards = [xp.asarray(values[piece]) for piece in cut]
    amax = None
    if as_format(name).measures_amax:  # the reduction that NCCL or MPI would do
        measured = [hq.amax(shard.T if direction == "columnwise" else shard, name) for shard in shards]
        amax = max(measured, key=lambda amax: float(amax[0]))
    for piece, shard in zip(cut, shards, strict=True):
        place = Shard((piece[0].start, piece[1].start), SHAPE)
        part = quantize_shard(shard, place, amax=amax, seed=SEED, **chosen).part(direction)
        window = piece if direction == "rowwise" else piece[::-1]
        for actual, wanted in zip((host(part.codes), host(part.scales)), cut_out(whole, *window), strict=True):
            np.testing.assert_array_equal(actual, wanted)
        if part.global_scale is not None:
            wanted = host(whole.global_scale)
            wanted = wanted[window[0]] if part.format.measures_rows else wanted
            assert host(part.global_scale).tolist() == wanted.tolist()


def test_both_parts_are_those_of_two_calls():
    values = testing.matrix("wide", (256, 128), np.float32)
    array = quantize_shard(values[128:], Shard((128, 0), (256, 128)), rowwise="nvfp4", columnwise="mxfp8", amax=3.0)
    whole = hq.quantize(values, rowwise="nvfp4", columnwise="mxfp8", amax=3.0)
    np.testing.assert_array_equal(array.rowwise.codes, whole.rowwise.codes[128:])
    np.testing.assert_array_equal(array.columnwise.codes, whole.columnwise.codes[:, 128:])


def test_shards_that_draw_as_if_they_were_the_first_would_be_noticed():
    values = testing.matrix("gauss", (128, 64), np.float32)
    name = "nvfp4(rounding=stochastic)"
    whole = hq.quantize(values, rowwise=name, seed=SEED, amax=4.0).rowwise.codes[64:]
    shard = hq.quantize(values[64:], rowwise=name, seed=SEED, amax=4.0).rowwise.codes
    assert 0.05 < (whole != shard).mean() < 0.95


def test_a_shard_of_ones_own_amax_would_be_noticed():
    """The oracle: without the reduced amax bytes differ."""
    values = testing.matrix("wide", SHAPE, np.float32, seed=3)
    whole, shard = hq.quantize(values, rowwise="nvfp4"), hq.quantize(values[:64], rowwise="nvfp4")
    assert not np.array_equal(whole.rowwise.codes[:64], shard.rowwise.codes)


def test_alignment_follows_from_the_blocks():
    assert shard_alignment(rowwise="fp8_e4m3", columnwise="bf16") == (1, 1)
    assert shard_alignment(rowwise="mxfp8") == (1, 32)
    assert shard_alignment(columnwise="mxfp8") == (32, 1)
    assert shard_alignment(rowwise="nvfp4", columnwise="mxfp8") == (32, 16)
    assert shard_alignment(rowwise="fp8_block_128x128") == (128, 128)
    assert shard_alignment(rowwise="nvfp4_16x16", columnwise="fp8_block_1x128") == (128, 16)
    assert shard_alignment() == (1, 1)


@pytest.mark.parametrize("name", [name for name in hq.FORMATS if shard_alignment(rowwise=name)[1] > 1])
def test_a_shard_that_cuts_a_block_is_refused_and_one_that_ends_with_the_matrix_is_not(name):
    rows, step = shard_alignment(rowwise=name)
    width, remedy = (300, "shard the other axis, or gather") if step == ROW else (2 * step, "begin shards on multiples")
    whole, amax = (rows, width + 3), 1.0 if as_format(name).measures_amax else None
    for first, columns in ((0, width - 1), (1, width + 2)):
        message = rf"columns {first} to {first + columns} of {width + 3} cuts a block of rowwise={name}.*{remedy}"
        with pytest.raises(ValueError, match=message):
            quantize_shard(np.ones((rows, columns), np.float32), Shard((0, first), whole), rowwise=name, amax=amax)
    if step < ROW:
        quantize_shard(np.ones((rows, 3), np.float32), Shard((0, width), whole), rowwise=name, amax=amax)


def test_empty_shards_are_legal_anywhere(xp):
    array = quantize_shard(xp.ones((0, 64), np.float32), Shard((7, 0), (100, 64)), rowwise="mxfp8", columnwise="mxfp8")
    assert array.shape == (0, 64)


def test_slots_of_delayed_scaling_serve_shards(xp):
    values = xp.asarray(testing.matrix("gauss", SHAPE, np.float32))
    state = hq.DelayedScaling(1, like=values)
    state.amax[...] = 3
    array = quantize_shard(values[:100], Shard((0, 0), SHAPE), rowwise="fp8_e4m3", amax=state[0])
    assert float(array.rowwise.amax[0]) == 3
    assert float(state.current[0]) == float(abs(values[:100]).max())


@pytest.mark.parametrize(
    ("values", "shard", "message"),
    [
        (np.ones((4, 64)), ((0, 0), (8, 64)), r"nvfp4 has one amax for the whole matrix.*all-reduce with MAX"),
        (np.ones((4, 64)), ((6, 0), (8, 64)), r"\(4, 64\) at \(6, 0\) reach beyond the matrix \(8, 64\)"),
        (np.ones((2, 4, 64)), ((0, 0), (8, 64)), r"a shard is 2-D, not \(2, 4, 64\)"),
    ],
)
def test_what_is_no_shard_of_the_matrix_is_refused(values, shard, message):
    with pytest.raises(ValueError, match=message):
        quantize_shard(values.astype(np.float32), Shard(*shard), rowwise="nvfp4")


@pytest.mark.parametrize("pair", [(-1, 0), (1,), (1, 2, 3), (1.5, 2), 3, None, ("a", 1)], ids=str)
def test_places_are_two_integers(pair):
    with pytest.raises(ValueError, match="is not two integers"):
        Shard(pair, (4, 4))
    with pytest.raises(ValueError, match="is not two integers"):
        Shard((0, 0), pair)


def test_the_whole_matrix_is_a_shard_that_needs_no_amax():
    values = testing.matrix("gauss", (40, 50), np.float32)
    array = quantize_shard(values, Shard((0, 0), (40, 50)), rowwise="nvfp4", columnwise="mxfp8")
    same = hq.quantize(values, rowwise="nvfp4", columnwise="mxfp8")
    np.testing.assert_array_equal(array.rowwise.codes, same.rowwise.codes)
    assert math.prod(array.shape) == 2000


def test_a_rotated_columnwise_part_has_the_amax_of_the_turned_pieces():
    x = testing.matrix("gauss", (256, 192), np.float32)
    name, pieces = "nvfp4(rht=true)", (slice(0, 16), slice(16, 256))
    whole = hq.quantize(x, columnwise=name).columnwise
    amax = max(float(hq.amax(x[rows].T, name)[0]) for rows in pieces)
    for rows in pieces:
        shard = quantize_shard(x[rows], Shard((rows.start, 0), x.shape), columnwise=name, amax=amax).columnwise
        np.testing.assert_array_equal(shard.codes, whole.codes[:, rows.start // 2 : rows.stop // 2])
    with pytest.raises(ValueError, match=r"the largest hq.amax\(values.T, format\) of all shards"):
        quantize_shard(x[:16], Shard((0, 0), x.shape), columnwise=name)


def test_a_shard_is_a_shard_and_lies_in_its_matrix():
    with pytest.raises(TypeError, match=r"shard is \(0, 0\); pass hq.Shard\(first, shape\)"):
        quantize_shard(np.ones((16, 32), np.float32), (0, 0), rowwise="mxfp8")
    with pytest.raises(ValueError, match="lies beyond the matrix"):
        Shard((300, 0), (256, 192))
    for pair in ((True, 0), (1 << 70, 0)):
        with pytest.raises(ValueError, match="is not two integers, of rows and columns"):
            Shard((0, 0), pair)
