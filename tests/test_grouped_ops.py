"""Grouped quantize and dequantize against each member alone; formats of a list; errors."""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import reference_grouped, testing
from hqarray.formats import FORMATS
from hqarray.grouped import GroupedArray
from hqarray.groups import Sizes

named = pytest.mark.parametrize
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SIZES = [0, 128, 0, 130, 65, 0]
PATTERNS = {"mixed": SIZES, "all_zero": [0, 0, 0], "first_empty": [0, 5, 17], "last_empty": [33, 17, 0],
            "one_group": [257], "one_each": [1] * 20, "no_groups": []}
OTHER = dict(zip(FORMATS, [*list(FORMATS)[5:], *list(FORMATS)[:5]], strict=True))
"""A different format for the other direction of each."""

EDGES = ["nans", "infinities", "subnormals", "largest", "negative_zeros", "tiny_wide", "all_zero"]


def starts_of(sizes, alignment=1):
    ends = np.cumsum([0, *(-(-n // alignment) * alignment for n in sizes)])
    return ends[:-1].tolist()


def stacked(sizes, k=33, alignment=1, spare=3, kind="wide", dtype=np.float32, seed=0):
    """Values in which rows of no member are NaN, and each member's matrix."""
    starts, end = starts_of(sizes, alignment), sum(-(-n // alignment) * alignment for n in sizes)
    x = np.full((end + spare, k), np.nan, dtype)
    for i, (start, n) in enumerate(zip(starts, sizes, strict=True)):
        x[start : start + n] = testing.matrix(kind, (n, k), dtype, seed=seed + i)
    return x, [x[start : start + n] for start, n in zip(starts, sizes, strict=True)]


def assert_members(group, matrices, **options):
    assert len(group) == len(matrices)
    for i, (member, matrix) in enumerate(zip(group, matrices, strict=True)):
        testing.assert_bitwise_equal(member, hq.quantize(matrix, **options), name=f"group {i}")


def rows_of_no_member(sizes, capacity, alignment=1):
    outside = np.ones(capacity, bool)
    for start, n in zip(starts_of(sizes, alignment), sizes, strict=True):
        outside[start : start + n] = False
    return outside


# --- quantize -------------------------------------------------------------------------------------


@named("alignment", [1, 128])
@named("pattern", PATTERNS)
@named("format", FORMATS)
def test_each_member_is_what_quantize_makes_of_it_alone(format, pattern, alignment):
    sizes = PATTERNS[pattern]
    x, matrices = stacked(sizes, alignment=alignment)
    for options in ({"rowwise": format, "columnwise": OTHER[format]}, {"rowwise": format}, {"columnwise": format}):
        group = hq.grouped_quantize(x, sizes, alignment=alignment, **options)
        assert_members(group, matrices, **options)
        assert (group.shape, group.rows.capacity) == ((len(sizes), None, 33), len(x))


@named("k", [1, 16, 127, 130])
@named("kind", EDGES)
def test_edge_values_and_ragged_columns_are_quantized_alike(kind, k):
    x, matrices = stacked([5, 0, 130], k, kind=kind)
    for format in FORMATS:
        options = {"rowwise": format, "columnwise": OTHER[format]}
        assert_members(hq.grouped_quantize(x, [5, 0, 130], **options), matrices, **options)


@named("dtype", [np.float16, BFLOAT16, np.float64], ids=str)
def test_every_dtype_is_read_and_remembered(dtype):
    x, matrices = stacked(SIZES, dtype=dtype)
    for format in ("mxfp8", "fp8_e4m3", "bf16", hq.HighPrecision()):
        group = hq.grouped_quantize(x, SIZES, rowwise=format, columnwise="nvfp4")
        assert_members(group, matrices, rowwise=format, columnwise="nvfp4")
        assert group.dtype == (np.float32 if dtype == np.float64 else dtype)


def test_a_thousand_groups_of_one_row_each_and_1024_of_a_few():
    rng = np.random.default_rng(0)
    for sizes in ([1] * 1000, rng.integers(0, 4, 1024).tolist()):
        x, matrices = stacked(sizes, 17)
        group = hq.grouped_quantize(x, sizes, rowwise="mxfp8", columnwise="nvfp4")
        for i in range(0, len(sizes), 97):
            testing.assert_bitwise_equal(group[i], hq.quantize(matrices[i], rowwise="mxfp8", columnwise="nvfp4"))
        inside = ~rows_of_no_member(sizes, len(x))
        rows = hq.quantize(x[inside], rowwise="mxfp8").dequantize()
        testing.assert_bitwise_equal(group.dequantize(source="rowwise")[inside], rows)


@named("make", [lambda s: s, tuple, np.array, lambda s: np.array(s, np.int32), lambda s: np.array(s, np.uint8),
                lambda s: map(np.int64, s)])
def test_sizes_are_integers_of_any_kind(make):
    x, matrices = stacked([5, 0, 17])
    assert_members(hq.grouped_quantize(x, make([5, 0, 17]), rowwise="mxfp8"), matrices, rowwise="mxfp8")


@named("alignment", [1, 16])
def test_offsets_are_cumulative_ends(alignment):
    x, matrices = stacked(SIZES, alignment=alignment)
    for ends in (np.cumsum(SIZES), np.cumsum(SIZES).astype(np.int32), np.cumsum(SIZES).tolist()):
        group = hq.grouped_quantize(x, offsets=ends, rowwise="mxfp8", columnwise="mxfp4", alignment=alignment)
        assert_members(group, matrices, rowwise="mxfp8", columnwise="mxfp4")


@named("format", FORMATS)
def test_a_3d_array_is_a_uniform_group(format):
    options = {"rowwise": format, "columnwise": OTHER[format]}
    for shape in ((3, 5, 33), (2, 130, 40), (4, 0, 16), (0, 5, 16), (1, 1, 1)):
        x = testing.matrix("wide", shape)
        assert_members(hq.grouped_quantize(x, **options), list(x), **options)
        assert hq.grouped_quantize(x, **options).shape == shape
    x = testing.matrix("wide", (5, 3, 33)).transpose(1, 0, 2)
    assert_members(hq.grouped_quantize(x, **options), list(x), **options)


@named("view", testing.VIEWS)
def test_strided_values_are_read(view):
    x = testing.VIEWS[view](testing.matrix("wide", (80, 80)))
    sizes = [5, 0, len(x) - 6]
    matrices = [x[start : start + n] for start, n in zip(starts_of(sizes), sizes, strict=True)]
    assert_members(hq.grouped_quantize(x, sizes, rowwise="mxfp8", columnwise="nvfp4"), matrices,
                   rowwise="mxfp8", columnwise="nvfp4")


@named("format", FORMATS)
def test_what_is_allocated_is_zero_outside_the_members(format):
    x, _ = stacked([5, 0, 17], alignment=16, spare=9)
    group = hq.grouped_quantize(x, [5, 0, 17], rowwise=format, columnwise=format, alignment=16)
    for direction, part in group.parts():
        for member in part.members():
            for buffer in (member.codes, member.scales, member.global_scale, member.amax):
                if buffer is not None:
                    buffer[...] = 0
        assert not part.base.any(), direction


def poison(group, byte=0xA5):
    for _, part in group.parts():
        part.base[...] = byte


@named("alignment", [1, 16])
@named("format", FORMATS)
def test_garbage_in_out_is_overwritten_and_rows_of_no_member_are_left(format, alignment):
    options = {"rowwise": format, "columnwise": OTHER[format], "alignment": alignment}
    first, second = [5, 40, 0, 17], [17, 0, 21, 3]
    x, _ = stacked(first, alignment=alignment, spare=64)
    out = hq.grouped_quantize(x, first, **options)
    poison(out)
    y, matrices = stacked(second, alignment=alignment, spare=len(x), seed=9)
    y = y[: len(x)]
    group = hq.grouped_quantize(y, second, out=out, **options)
    del options["alignment"]
    assert_members(group, matrices, **options)
    outside = rows_of_no_member(second, len(x), alignment)
    assert outside.any() and (group.rowwise.padded_codes.view(np.uint8)[outside] == 0xA5).all()
    for direction, part in group.parts():
        assert part.memory is out.part(direction).memory
        for member, padded in part.padded_members():
            padding = padded[:, member.codes.shape[1] :]
            assert not padding.any()
    assert group.rows.host == tuple(second) and out.rows.host == tuple(first)


def test_out_takes_its_formats_and_uniform_arrays_too():
    x = testing.matrix("wide", (3, 5, 33))
    out = hq.grouped_quantize(np.zeros_like(x), rowwise="mxfp8", columnwise="nvfp4")
    poison(out)
    group = hq.grouped_quantize(x, out=out)
    assert_members(group, list(x), rowwise="mxfp8", columnwise="nvfp4")
    assert group.rowwise.memory is out.rowwise.memory
    range_ = group.split(3)[1].copy()
    assert_members(hq.grouped_quantize(x[:1], out=range_), [x[0]], rowwise="mxfp8", columnwise="nvfp4")


@named("noop", [1, True, np.array([1], np.int32)], ids=repr)
def test_a_noop_that_is_not_zero_leaves_out(noop):
    x, matrices = stacked([5, 0, 17])
    out = hq.grouped_quantize(x, [5, 0, 17], rowwise="nvfp4", columnwise="mxfp8")
    before = out.copy()
    same = hq.grouped_quantize(2.5 * x, [5, 0, 17], out=out, noop=noop)
    for ours, theirs in zip(same, before, strict=True):
        testing.assert_bitwise_equal(ours, theirs)
    written = hq.grouped_quantize(np.float32(2.5) * x, [5, 0, 17], out=out, noop=0)
    assert_members(written, [np.float32(2.5) * m for m in matrices], rowwise="nvfp4", columnwise="mxfp8")


@named("format", [name for name, format in FORMATS.items() if format.measures_amax])
def test_a_given_amax_of_each_group_is_used(format):
    x, matrices = stacked([5, 0, 17])
    amaxes = np.array([3, 5, 0.25], np.float32)
    group = hq.grouped_quantize(x, [5, 0, 17], rowwise=format, columnwise="mxfp8", amax=amaxes)
    for member, matrix, amax in zip(group, matrices, amaxes, strict=True):
        testing.assert_bitwise_equal(member, hq.quantize(matrix, rowwise=format, columnwise="mxfp8", amax=amax))
    np.testing.assert_array_equal(group.rowwise.amax, amaxes)


@named(("kind", "stored", "kept"), [
    ("int32", [5, -3, 9, 400, 7], [5, 0, 9, 16, 0]), ("int64", [-(2**63), 2**63 - 1, 1, 0, 0], [0, 30, 0, 0, 0]),
    ("ends", [5, 2, 11, 400, 7], [5, 0, 9, 16, 0]), ("ends", [-4, 5, 5, 6, 30], [0, 9, 0, 1, 20]),
])
def test_sizes_of_a_device_are_clamped(kind, stored, kept):
    """What the kernels are held against: negative sizes are 0, what passes the capacity is cut off."""
    x = testing.matrix("wide", (30, 33))
    rows = Sizes(5, None, None, np.array(stored, np.int64 if kind == "int64" else np.int32), kind, 30)
    row, column = reference_grouped.quantize_groups(x, rows, FORMATS["mxfp8"], FORMATS["nvfp4"])
    group = GroupedArray(row, column, row.sizes, Sizes.uniform(5, 33))
    assert group.rows.host == tuple(kept)
    assert_members(group, [x[start : start + n] for start, n in zip(starts_of(kept), kept, strict=True)],
                   rowwise="mxfp8", columnwise="nvfp4")


X = testing.matrix("gauss", (40, 32))
G = hq.grouped_quantize(X, [5, 0, 17], rowwise="mxfp8", columnwise="nvfp4")


@named(("call", "error", "message"), [
    (lambda: hq.grouped_quantize(X, [5, 6]), ValueError, "grouped_quantize needs rowwise=, columnwise= or both"),
    (lambda: hq.grouped_quantize(X, rowwise="mxfp8"), ValueError, r"values of \(40, 32\) need sizes= .* or offsets="),
    (lambda: hq.grouped_quantize(X, [1], offsets=[1], rowwise="mxfp8"), ValueError, "say the same; pass one of them"),
    (lambda: hq.grouped_quantize(X, [5, -1], rowwise="mxfp8"), ValueError,
     "sizes: group 1 would have -1 rows; a size is"),
    (lambda: hq.grouped_quantize(X, offsets=[5, 4], rowwise="mxfp8"), ValueError,
     "offsets: group 1 would have -1 rows"),
    (lambda: hq.grouped_quantize(X, [20, 21], rowwise="mxfp8"), ValueError,
     "sizes: groups end at row 41, the values hav"),
    (lambda: hq.grouped_quantize(X, [1, 9], rowwise="mxfp8", alignment=32), ValueError,
     "sizes: groups at starts of a multiple of 32 end at row 41, the values have 40"),
    (lambda: hq.grouped_quantize(X, [1.0], rowwise="mxfp8"), TypeError, "sizes are integers, one for each group"),
    (lambda: hq.grouped_quantize(X, 3, rowwise="mxfp8"), TypeError, "sizes are integers, one for each group"),
    (lambda: hq.grouped_quantize(X, np.ones(2), rowwise="mxfp8"), TypeError,
     "one for each group, not float64 of shape"),
    (lambda: hq.grouped_quantize(X, np.ones((1, 2), int), rowwise="mxfp8"), TypeError, r"not int64 of shape \(1, 2\)"),
    (lambda: hq.grouped_quantize(X, [1], rowwise="mxfp8", alignment=0), ValueError, "alignment=0: matrices begin on"),
    (lambda: hq.grouped_quantize(X[0], [1], rowwise="mxfp8"), ValueError, r"or \(num_groups, n, k\), not \(32,\)"),
    (lambda: hq.grouped_quantize(X.reshape(4, 10, 32), [1], rowwise="mxfp8"), ValueError, "are matrices of equal size"),
    (lambda: hq.grouped_quantize(X, [1], rowwise="mxfp8", noop=1), ValueError,
     "noop= leaves out= as it is, and there is"),
    (lambda: hq.grouped_quantize(X, [1], rowwise="mxfp8", amax=np.ones(1, np.float32)), ValueError,
     "one amax per matrix"),
    (lambda: hq.grouped_quantize(X, [1, 2], rowwise="nvfp4", amax=np.ones(1, np.float32)), ValueError,
     r"amax is one float32 for each group, \(2,\), not float32 of shape \(1,\)"),
    (lambda: hq.grouped_quantize(X, [1, 2], rowwise="nvfp4", amax=1.0), ValueError, "not float of shape"),
    (lambda: hq.grouped_quantize(X, [1], out=X), TypeError, "out is a GroupedArray, not ndarray"),
    (lambda: hq.grouped_quantize(X, [1, 2, 3], out=G, rowwise="nvfp4"), ValueError,
     "out holds rowwise mxfp8, not nvfp4"),
    (lambda: hq.grouped_quantize(X, [1, 2], out=G), ValueError,
     re.escape("out is of shape, rows and alignment (3, None, 32), 40, 1; these values need (2, None, 32), 40, 1")),
    (lambda: hq.grouped_quantize(X[:39], [1, 2, 3], out=G), ValueError, r"need \(3, None, 32\), 39, 1"),
    (lambda: hq.grouped_quantize(X[:22], [5, 17], out=hq.grouped_quantize(
        X, [0, 0, 5, 17], rowwise="mxfp8").split(2)[1]), ValueError, "need"),
    (lambda: hq.grouped_quantize(X, [5, 17], out=hq.grouped_quantize(
        X, [0, 0, 5, 17], rowwise="mxfp8").split(2)[1]), ValueError, r"out is a range of another array's .*\.copy\(\)"),
    (lambda: hq.grouped_quantize(G, [1], rowwise="mxfp8"), TypeError,
     "values is a GroupedArray already; .dequantize()"),
    (lambda: hq.requantize(G, X), TypeError, "takes a HybridArray, not GroupedArray; g.* is one; grouped_quantize"),
])
def test_grouped_quantize_says_what_it_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- split_quantize -------------------------------------------------------------------------------


def test_every_entry_of_the_list_has_its_own_formats():
    sizes = [5, 0, 17, 3, 8, 9, 2]
    formats = ["mxfp8", None, ("mxfp8", "nvfp4"), (None, "fp8_e4m3"), "mxfp8", hq.MX("e4m3"), (None, None)]
    x, matrices = stacked(sizes)
    made = hq.split_quantize(x, sizes, formats)
    for i, (entry, matrix, format) in enumerate(zip(made, matrices, formats, strict=True)):
        row, column = format if isinstance(format, tuple) else (format, None)
        if row is None and column is None:
            assert np.shares_memory(entry, x) or not entry.size
            testing.assert_bitwise_equal(entry, matrix)
        else:
            testing.assert_bitwise_equal(entry, hq.quantize(matrix, rowwise=row, columnwise=column), name=str(i))
    same = [made[i].rowwise.codes for i in (0, 4, 5)]
    assert len({id(codes.base if codes.base.base is None else codes.base.base) for codes in same}) == 1
    assert hq.split_quantize(x, [], []) == []


@named("format", FORMATS)
def test_equal_formats_are_quantized_together_to_the_same_bits(format):
    sizes, formats = SIZES, [(format, "mxfp8")] * 3 + [None] + [(format, "mxfp8")] * 2
    x, matrices = stacked(sizes)
    for entry, matrix, wanted in zip(hq.split_quantize(x, sizes, formats), matrices, formats, strict=True):
        if wanted is not None:
            testing.assert_bitwise_equal(entry, hq.quantize(matrix, rowwise=format, columnwise="mxfp8"))


@named(("call", "error", "message"), [
    (lambda: hq.split_quantize(X, [5, 6], ["mxfp8"]), ValueError, "has 2 sizes and 1 formats; give one for each"),
    (lambda: hq.split_quantize(X, [5], [("mxfp8",) * 3]), ValueError, "an entry is None, a format, or"),
    (lambda: hq.split_quantize(X, [5], ["mxfp9"]), ValueError, "unknown format 'mxfp9'"),
    (lambda: hq.split_quantize(X, [50], [None]), ValueError, "end at row 50"),
    (lambda: hq.split_quantize(X[0], [5], [None]), ValueError, r"takes values \(T, k\), not \(32,\)"),
])
def test_split_quantize_says_what_it_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- dequantize -----------------------------------------------------------------------------------


@named("alignment", [1, 16])
@named("format", FORMATS)
def test_decoded_rows_are_those_of_each_member_and_zero_elsewhere(format, alignment):
    x, matrices = stacked(SIZES, alignment=alignment)
    options = {"rowwise": format, "columnwise": OTHER[format]}
    group = hq.grouped_quantize(x, SIZES, alignment=alignment, **options)
    for source, dtype in itertools.product((None, "rowwise", "columnwise"), (np.float32, BFLOAT16)):
        decoded = group.dequantize(source=source, dtype=dtype)
        turned = group.T.dequantize(source=source, dtype=dtype)
        assert decoded.shape == x.shape and turned.shape == x.T.shape and decoded.dtype == dtype
        for start, matrix in zip(starts_of(SIZES, alignment), matrices, strict=True):
            rows = slice(start, start + len(matrix))
            alone = hq.quantize(matrix, **options)
            testing.assert_bitwise_equal(decoded[rows], alone.dequantize(source=source, dtype=dtype))
            testing.assert_bitwise_equal(turned[:, rows], alone.T.dequantize(source=source, dtype=dtype))
        outside = rows_of_no_member(SIZES, len(x), alignment)
        assert not decoded[outside].any() and not turned[:, outside].any()
    testing.assert_bitwise_equal(hq.dequantize(group), group.dequantize())


@named("source", ["rowwise", "columnwise"])
def test_uniform_members_decode_to_a_stack(source):
    x = testing.matrix("wide", (3, 5, 33))
    group = hq.grouped_quantize(x, rowwise="mxfp8", columnwise="nvfp4")
    for array, shape in ((group, (3, 5, 33)), (group.T, (3, 33, 5))):
        decoded = array.dequantize(source=source)
        assert decoded.shape == shape and decoded.flags.c_contiguous
        for ours, member in zip(decoded, array, strict=True):
            testing.assert_bitwise_equal(ours, member.dequantize(source=source))


def test_members_that_differ_along_both_axes_decode_to_a_list():
    matrices = [testing.matrix("wide", shape) for shape in ((3, 7), (0, 5), (130, 33))]
    decoded = GroupedArray.from_arrays(matrices, rowwise="mxfp8", columnwise="bf16").dequantize()
    for ours, matrix in zip(decoded, matrices, strict=True):
        testing.assert_bitwise_equal(ours, hq.quantize(matrix, rowwise="mxfp8", columnwise="bf16").dequantize())


@named(("options", "error", "message"), [
    ({"source": "rows"}, ValueError, "source='rows' is not 'rowwise' or 'columnwise'"),
    ({"dtype": np.int8}, TypeError, "dequantize gives float32, float16 or bfloat16, not int8"),
    ({"source": "columnwise"}, ValueError, r"but this GroupedArray \(3, None, 32\) holds only rowwise \(mxfp8\)"),
])
def test_dequantize_says_what_it_expected(options, error, message):
    with pytest.raises(error, match=message):
        G.drop(columnwise=True).dequantize(**options)
