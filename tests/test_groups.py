"""Where members lie: spans, starts and what bounds them, against parts alone and plain loops."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hqarray as hq
from hqarray import testing
from hqarray.formats import FORMATS
from hqarray.grouped_parts import clamp, known, layout_of, read_sizes, some_sizes
from hqarray.groups import Sizes, Span, grouped_layout, span_starts
from hqarray.layout import ALIGNMENT, PITCH

named = pytest.mark.parametrize

PATTERNS = {
    "mixed": [0, 128, 0, 130, 65, 0],
    "all_zero": [0, 0, 0],
    "first_empty": [0, 5, 17],
    "last_empty": [33, 17, 0],
    "one_each": [1] * 40,
    "one_group": [257],
    "no_groups": [],
}


def formats():
    return named("format", FORMATS.values(), ids=FORMATS)


# --- spans ----------------------------------------------------------------------------------------


@given(st.integers(0, 5000), st.sampled_from([1, 2, 16, 32, 128]), st.sampled_from([1, 4, 8, 16, 128]))
def test_a_span_is_the_least_multiple_that_holds_the_blocks(size, divide, multiple):
    units = 0
    while units * divide < size or units % multiple:
        units += 1
    assert Span(divide, multiple).units(size) == units
    assert Span(divide, multiple).units(np.array([size]))[0] == units


@given(st.lists(st.integers(0, 400), max_size=30), st.integers(0, 50), st.sampled_from([1, 2, 16, 32, 128]),
       st.sampled_from([1, 4, 8, 16, 128]), st.sampled_from([1, 7]))
def test_most_bounds_members_of_up_to_the_capacity(sizes, spare, divide, multiple, nbytes):
    span = Span(divide, multiple, nbytes)
    taken = int(span_starts(span, np.array(sizes, np.int64))[-1]) * nbytes
    assert taken <= span.most(sum(sizes) + spare, len(sizes))


@named(("divide", "multiple"), [(1, 1), (1, 16), (128, 1), (128, 4), (32, 1), (2, 16)])
def test_most_is_reached_but_for_a_block(divide, multiple):
    """Members one more than a whole number of spans: the bound is not much larger than what they take."""
    span, groups = Span(divide, multiple), 64
    sizes = np.full(groups, divide * multiple + 1)
    taken = int(span_starts(span, sizes)[-1])
    assert taken <= span.most(int(sizes.sum()), groups) < taken + groups + 1


# --- sizes ----------------------------------------------------------------------------------------


@named("alignment", [1, 16, 128])
@named("pattern", PATTERNS)
def test_members_start_on_the_alignment_after_those_before(pattern, alignment):
    sizes, start, starts = PATTERNS[pattern], 0, []
    for size in sizes:
        starts.append(start)
        start += -(-size // alignment) * alignment
    made = Sizes.known(sizes, alignment=alignment)
    assert made.starts.tolist() == [*starts, start] and made.capacity == start
    assert made.values.tolist() == sizes and made.is_known and made.each is None


def test_uniform_sizes_are_known():
    sizes = Sizes.uniform(3, 5)
    assert sizes.values.tolist() == [5, 5, 5] and sizes.starts.tolist() == [0, 5, 10, 15]
    assert sizes.is_known and sizes.capacity == 15


def clamp_by_loop(sizes, capacity, alignment):
    end, kept = 0, []
    for size in (max(int(size), 0) for size in sizes):
        start = min(capacity, end)
        kept.append(min(size, capacity - start))
        end += -(-size // alignment) * alignment
    return kept


@settings(max_examples=300)
@given(st.lists(st.integers(-50, 300), max_size=20), st.integers(0, 500), st.sampled_from([1, 16, 128]))
def test_clamped_sizes_are_what_the_rule_says_and_never_pass_the_capacity(sizes, capacity, alignment):
    kept = clamp(np.array(sizes, np.int64), capacity, alignment)
    assert kept.tolist() == clamp_by_loop(sizes, capacity, alignment)
    starts = Sizes.known(kept, capacity, alignment).starts[:-1]
    assert ((starts + kept <= capacity) | (kept == 0)).all()


def test_enormous_sizes_are_clamped_without_overflow():
    huge = np.array([2**62, 2**63 - 1, -(2**63), 2**62], np.int64)
    assert clamp(huge, 100, 128).tolist() == [100, 0, 0, 0]


@named(("kind", "stored"), [("int32", [3, -1, 4]), ("int64", [3, -1, 4]), ("ends", [3, 2, 6])])
def test_sizes_on_a_device_are_read_as_their_kind_says(kind, stored):
    array = np.array(stored, np.int64 if kind == "int64" else np.int32)
    sizes = Sizes(3, None, None, array, kind, 5)
    assert read_sizes(sizes).tolist() == [3, -1, 4] and not sizes.is_known
    assert known(sizes).host == (3, 0, 2) and known(sizes).capacity == 5
    assert array.tolist() == stored


@named("alignment", [1, 16])
def test_some_sizes_keep_their_starts_and_reach_up_to_the_next_member(alignment):
    sizes = Sizes.known([5, 0, 17, 3], 60, alignment)
    for first in range(4):
        for last in range(first, 5):
            some = some_sizes(sizes, first, last)
            assert some.values.tolist() == sizes.values[first:last].tolist()
            assert (some.starts[:-1] + sizes.starts[first]).tolist() == sizes.starts[first:last].tolist()
            end = 60 if last == 4 else sizes.starts[last]
            assert some.capacity == end - sizes.starts[first]


# --- layouts --------------------------------------------------------------------------------------


@named("each", [0, 1, 33, 130])
@named("ragged", ["outer", "k"])
@formats()
def test_members_lie_apart_and_within_their_segments(format, ragged, each):
    storage = format.storage
    for sizes in PATTERNS.values():
        for alignment, spare in ((1, 0), (1, 9), (128, 0)):
            known_sizes = Sizes.known(sizes, alignment=alignment)
            known_sizes = Sizes.known(sizes, known_sizes.capacity + spare, alignment)
            layout = layout_of(format, ragged, each, known_sizes)
            codes, scales = layout.starts(known_sizes.values)
            if ragged == "outer":  # rows as they come
                pitch = hq.layout.part_layout(storage, (1, each)).codes
                np.testing.assert_array_equal(codes, known_sizes.starts[:-1] * pitch.pitch * pitch.itemsize)
            code_end, scale_end, globals_of_all = 0, layout.scales_offset, 0
            for size, code, scale in zip(sizes, codes, scales, strict=True):
                alone = hq.layout.part_layout(storage, layout.shape(size))
                globals_of_all += alone.num_global_scales
                assert code >= code_end and code % PITCH == 0
                assert scale >= scale_end
                code_end = code + layout.shape(size)[0] * alone.codes.pitch * alone.codes.itemsize
                count = 1 if storage.block is None else int(np.prod(alone.scales_shape))
                scale_end = scale + count * (0 if storage.scale == "none" else alone.scales_dtype.itemsize)
                assert storage.block is None or scale % (4 * alone.scales_dtype.itemsize) == 0
            assert code_end <= layout.codes_nbytes <= layout.scales_offset
            assert scale_end <= layout.scales_offset + layout.scales_nbytes <= layout.global_scale_offset
            offsets = (layout.scales_offset, layout.global_scale_offset)
            assert all(offset % ALIGNMENT == 0 for offset in offsets)
            scalars = [layout.global_scale_offset, layout.amax_offset, layout.work_offset, layout.nbytes]
            counts = (globals_of_all, len(sizes), len(sizes))
            assert all(b - a >= 4 * count for (a, b), count in zip(pairwise(scalars), counts, strict=True))


@named("direction", ["rowwise", "columnwise"])
@formats()
def test_bytes_of_a_member_are_those_of_a_part_alone_without_the_rows_up_to_16(format, direction):
    for k in (1, 33, 130):
        for alignment in (1, 128):
            sizes = Sizes.known(PATTERNS["mixed"], alignment=alignment)
            values = testing.matrix("wide", (sizes.capacity, k))
            group = hq.grouped_quantize(values, list(sizes.host), alignment=alignment, **{direction: format})
            part = group.part(direction)
            base = part.base
            codes, scales = part.layout.starts(sizes.values)
            globals_before = 0
            for i, (start, size) in enumerate(zip(sizes.starts, sizes.host, strict=False)):
                alone = getattr(hq.quantize(values[start : start + size], **{direction: format}), direction)
                packed, layout = alone.buffers.base, alone.buffers.layout
                nbytes = alone.shape[0] * layout.codes.pitch * layout.codes.itemsize
                np.testing.assert_array_equal(base[codes[i] : codes[i] + nbytes], packed[:nbytes])
                one = format.storage.block is None
                scale_bytes = alone.scales.nbytes if one else int(np.prod(layout.scales_shape)) * alone.scales.itemsize
                there = packed[layout.scales_offset : layout.scales_offset + scale_bytes]
                np.testing.assert_array_equal(base[scales[i] : scales[i] + scale_bytes], there)
                for name, before in (("global_scale", globals_before), ("amax", i)):
                    wanted = getattr(alone, name)
                    if wanted is not None:
                        at = getattr(part.layout, f"{name}_offset") + 4 * before
                        np.testing.assert_array_equal(base[at : at + wanted.nbytes], wanted.view(np.uint8))
                globals_before += layout.num_global_scales


@formats()
def test_uniform_members_lie_alike_whichever_axis_is_read_as_ragged(format):
    for outer, k in ((1, 1), (33, 130), (128, 128), (5, 16)):
        sizes = {"outer": np.full(3, outer), "k": np.full(3, k)}
        outers = grouped_layout(format.storage, 3, "outer", k, 3 * outer)
        ks = grouped_layout(format.storage, 3, "k", outer, 3 * k)
        for first, second, begin in zip(outers.starts(sizes["outer"]), ks.starts(sizes["k"]),
                                        ((0, 0), (outers.scales_offset, ks.scales_offset)), strict=True):
            np.testing.assert_array_equal(first - begin[0], second - begin[1])
