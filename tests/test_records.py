"""Rows as records and back, and sums of rows by weight: NumPy, the kernels by g++ (host_kernels.py), and a GPU."""

import shutil
from dataclasses import fields, replace
from types import SimpleNamespace

import host_kernels
import numpy as np
import pytest

import hqarray as hq
from hqarray import records, reference_records, testing
from hqarray.arrays import zeros_part
from hqarray.formats import BFLOAT16
from hqarray.groups import span_starts
from hqarray.record_ops import dots, pack, unpack, weighted_sum
from hqarray.records import Lines, Record

FORMATS = ["bf16", "fp8_e4m3", "fp8_block_1x128", "fp8_row_e4m3", "mxfp8", "mxfp4", "mxfp6_e2m3", "nvfp4_row"]
SHAPES = [(1, 32), (70, 96), (33, 4500), (5, 33), (0, 64)]


class Placed:
    """An array at its address, as CuPy's are."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.strides, self.itemsize = array.strides, array.itemsize
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=0)

    def __len__(self):
        return len(self.array)


def aligned(array):
    """A copy that begins on 16 bytes, as what is allocated on a GPU does."""
    memory = np.empty(array.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Numpy:
    """The reference."""

    pack, unpack, weighted_sum, dots = map(staticmethod, (pack, unpack, weighted_sum, dots))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    return host_kernels.Compiler(tmp_path_factory.mktemp("kernels"))


class Fibers:
    """The kernels on the host."""

    def __init__(self, monkeypatch, compiler):
        pytest.importorskip("cupy")
        from hqarray import cuda_records

        self.module = cuda_records
        for name, stand_in in {"kernel_of": compiler.kernel_of, "stream_of": lambda device: 0, "cupy": SimpleNamespace(
                ndarray=host_kernels.Array, ascontiguousarray=lambda x: x)}.items():
            monkeypatch.setattr(cuda_records, name, stand_in)
        cuda_records._records_kernel.cache_clear()
        cuda_records._combine_kernel.cache_clear()
        cuda_records._dot_kernel.cache_clear()

    @staticmethod
    def place(value):
        return Placed(value) if isinstance(value, np.ndarray) else value

    def lines(self, lines):
        return replace(lines, **{field.name: self.place(getattr(lines, field.name)) for field in fields(lines)})

    def pack(self, lines, places=None, count=None):
        count = len(lines.codes) if count is None else count
        messages = aligned(np.full((count, lines.record.nbytes), 0xA5, np.uint8))
        self.module.pack(self.lines(lines), self.place(places), Placed(messages))
        return messages

    def unpack(self, messages, lines, index):
        self.module.unpack(Placed(aligned(messages)), self.lines(lines), Placed(index))

    def weighted_sum(self, rows, shape, index=None, weights=None):
        sums = self.module.weighted_sum(Placed(rows), shape, self.place(index),
                                        None if weights is None else Placed(np.ascontiguousarray(weights)))
        return sums.values

    def dots(self, rows, other, choices, index=None):
        return self.module.dots(Placed(rows), Placed(other), choices, self.place(index)).values


class Gpu:
    """The kernels where they belong."""

    def __init__(self, cupy):
        self.cupy = cupy

    def place(self, value):
        return self.cupy.asarray(value) if isinstance(value, np.ndarray) else value

    def lines(self, lines):
        return replace(lines, **{field.name: self.place(getattr(lines, field.name)) for field in fields(lines)})

    def pack(self, lines, places=None, count=None):
        return pack(self.lines(lines), self.place(places), count).get()

    def unpack(self, messages, lines, index):
        there = self.lines(lines)
        unpack(self.place(messages), there, self.place(index))
        for name in ("codes", "scales", "globals"):
            if getattr(lines, name) is not None:
                getattr(lines, name)[...] = getattr(there, name).get()

    def weighted_sum(self, rows, shape, index=None, weights=None):
        return weighted_sum(self.place(rows), shape, self.place(index), self.place(weights)).get()

    def dots(self, rows, other, choices, index=None):
        return dots(self.place(rows), self.place(other), choices, self.place(index)).get()


ENGINES = ["numpy", pytest.param("g++", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")),
           pytest.param("cupy", marks=pytest.mark.gpu)]


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    if request.param == "cupy":
        return Gpu(pytest.importorskip("cupy"))
    if request.param == "numpy":
        return Numpy
    return Fibers(monkeypatch, request.getfixturevalue("compiler"))


def values(shape):
    return testing.matrix("wide", shape, BFLOAT16, seed=4)


def rows_of(part):
    lines = Lines.of_part(part)
    return replace(lines, codes=aligned(lines.codes))


def copied(rows, copies, seed=2):
    """Places of so many copies of each row, and which row each record then is."""
    order = np.random.default_rng(seed).permutation(rows * copies)
    return np.argsort(order).reshape(rows, copies), order // max(copies, 1)


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_went_as_records_are_those_rows_quantized(name, shape, copies, engine):
    """The oracle: a row's codes and scales are its own, so that chosen rows quantized are the rows chosen."""
    x, (places, index) = values(shape), copied(shape[0], copies)
    part = hq.quantize(x, rowwise=name).rowwise
    messages = engine.pack(rows_of(part), places if copies > 1 else places[:, 0], len(index))
    assert messages.shape == (len(index), Record(part.format, shape[1]).nbytes)
    order = np.random.default_rng(3).permutation(len(index))
    amax = np.abs(x.astype(np.float32)).max() if x.size and part.format.measures_amax else None
    expected = hq.quantize(x[index[order]], rowwise=name, amax=amax).rowwise
    found = zeros_part(part.format, expected.shape, np)
    testing.poison(found)
    lines = rows_of(found)
    engine.unpack(messages, lines, order)
    np.testing.assert_array_equal(lines.codes, Lines.of_part(expected).codes)
    if lines.scales is not None:
        np.testing.assert_array_equal(found.scales, expected.scales)
    if lines.globals is not None:
        np.testing.assert_array_equal(lines.globals, expected.global_scale)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_without_a_place_go_nowhere_and_rows_without_a_record_are_zeros(name, engine):
    part = hq.quantize(values((9, 100)), rowwise=name).rowwise
    places = np.full((9, 2), 5)
    places[[0, 8, 3, 0], [0, 0, 1, 1]] = [1, 2, 4, 99]
    messages = engine.pack(rows_of(part), places, 5)
    expected = reference(rows_of(part), places, 5)
    np.testing.assert_array_equal(messages[[1, 2, 4]], expected[[1, 2, 4]])
    assert expected[[1, 2, 4]].any(axis=1).all() and not expected[[0, 3]].any()
    found = zeros_part(part.format, (4, 100), np)
    testing.poison(found)
    lines = rows_of(found)
    engine.unpack(messages, lines, np.array([1, 5, 2, 99]))
    assert not lines.codes[[1, 3]].any() and lines.codes[[0, 2]].any(axis=1).all()
    if lines.scales is not None:
        assert not found.scales[[1, 3]].any()
        np.testing.assert_array_equal(found.scales[[0, 2]], part.scales[[0, 8]])
    if lines.globals is not None:
        assert lines.globals.tolist() == [part.global_scale[0], 0, part.global_scale[8], 0]


def reference(lines, places, count):
    messages = np.empty((count, lines.record.nbytes), np.uint8)
    reference_records.pack(lines, places, messages)
    return messages


@pytest.mark.parametrize("name", ["fp8_block_1x128", "mxfp8", "nvfp4_row"])
def test_rows_of_a_groups_members_lie_where_starts_and_steps_say(name, engine):
    """Rows of no member have codes of zero, and nothing is written where a member's scales are."""
    sizes, capacity, k = [3, 0, 40, 1], 50, 300
    group = hq.grouped_quantize(values((capacity, k)), sizes, rowwise=name).rowwise
    blocks, span = group.format.storage.num_scales((1, k))[1], group.layout.scales
    pitches = span.units(np.array(sizes))
    firsts = np.concatenate([[0], np.cumsum(pitches)[:-1]]) * blocks
    assert firsts.tolist() == [n * blocks for n in span_starts(span, np.array(sizes))[:-1]]
    member = np.repeat(np.arange(4), sizes)
    place = np.concatenate([np.arange(n) for n in sizes])
    starts, steps = np.full(capacity, -1), np.zeros(capacity, np.int64)
    starts[: len(member)], steps[: len(member)] = firsts[member] + place, pitches[member]
    lines = replace(Lines.of_group(group, starts, steps), codes=aligned(group.padded_codes.view(np.uint8)))
    index = np.random.default_rng(5).permutation(len(member))
    back = np.full(capacity, len(index))
    back[index] = np.arange(len(index))
    messages = engine.pack(lines, back, len(index))
    np.testing.assert_array_equal(messages, reference(lines, back, len(index)))
    for i, row in enumerate(index[:10]):
        alone = hq.quantize(values((capacity, k))[row : row + 1], rowwise=name).rowwise
        assert np.array_equal(messages[i : i + 1], reference(rows_of(alone), None, 1))
    target = replace(lines, codes=aligned(np.full_like(lines.codes, 0xA5)), scales=np.full_like(lines.scales, 5),
                     globals=None if lines.globals is None else np.full_like(lines.globals, 5))
    engine.unpack(messages, target, back)
    np.testing.assert_array_equal(target.codes[: len(member)], lines.codes[: len(member)])
    assert not target.codes[len(member) :].any()
    places = reference_records._places(lines, np.arange(len(member)))
    np.testing.assert_array_equal(target.scales[places], lines.scales[places])
    rest = np.ones(len(lines.scales), bool)
    rest[places] = False
    assert (target.scales[rest] == 5).all()


def test_codes_alone_in_order_are_no_copy():
    part = hq.quantize(values((5, 64)), rowwise="fp8_e4m3").rowwise
    lines = Lines.of_part(part)
    assert np.shares_memory(pack(lines), lines.codes) and pack(lines).shape == (5, 64)
    assert pack(lines, count=3).shape == (3, 64)


def test_what_cannot_travel_is_refused():
    with pytest.raises(ValueError, match="nvfp4_16x16 has blocks of many rows"):
        Record(hq.as_format("nvfp4_16x16"), 64)
    assert not records.can_travel(hq.as_format("nvfp4(rounding=stochastic)"))


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 8, 1030])
@pytest.mark.parametrize("choices", [0, 1, 2, 5])
def test_sums_are_those_of_float32_in_the_order_of_the_choices(choices, columns, dtype, engine):
    if isinstance(engine, Fibers) and dtype == np.float64:
        pytest.skip("CuPy's cast comes first")
    rng, tokens = np.random.default_rng(6), 7
    rows = aligned(testing.matrix("gauss", (11, columns), np.float32, seed=7).astype(dtype))
    rows[3] = -0.0
    index = rng.integers(0, 14, tokens * choices)  # some name no row
    weights = rng.standard_normal((tokens, choices), np.float32)
    for given in (None, weights):
        found = engine.weighted_sum(rows, (tokens, choices), index, given)
        expected = np.zeros((tokens, columns), np.float32)
        for token in range(tokens):
            terms = [(rows[i] if i < 11 else np.zeros(columns, dtype)).astype(np.float32)
                     * (np.float32(1) if given is None else given[token, j])
                     for j, i in enumerate(index[token * choices : (token + 1) * choices])]
            for j, term in enumerate(terms):
                expected[token] = term if j == 0 else expected[token] + term
        assert found.dtype == dtype and found.shape == expected.shape
        np.testing.assert_array_equal(found.view(np.uint8), expected.astype(dtype).view(np.uint8))
    if choices == 1:
        np.testing.assert_array_equal(engine.weighted_sum(rows, (11, 1)).view(np.uint8), rows.view(np.uint8))


@pytest.mark.parametrize(("dtype", "other"), [(BFLOAT16, BFLOAT16), (np.float16, np.float32), (np.float32, BFLOAT16)])
@pytest.mark.parametrize("columns", [1, 6, 1030, 5000])
@pytest.mark.parametrize("choices", [1, 3])
def test_dots_are_within_the_bound_of_float32_sums(choices, columns, dtype, other, engine):
    rows = aligned(testing.matrix("gauss", (5 * choices, columns), np.float32, seed=8).astype(dtype))
    tokens = aligned(testing.matrix("gauss", (5, columns), np.float32, seed=9).astype(other))
    terms = rows.astype(np.float64).reshape(5, choices, columns) * tokens.astype(np.float64)[:, None]
    found = engine.dots(rows, tokens, choices)
    assert found.dtype == np.float32 and found.shape == (5, choices)
    assert (np.abs(found - terms.sum(axis=2)) <= (columns + 2) * 2.0**-24 * np.abs(terms).sum(axis=2)).all()
    order = np.random.default_rng(1).permutation(5 * choices)
    index = np.argsort(order)
    moved = np.where(index == order[0], 5 * choices, index)  # the row of one slot is not there
    wanted = np.where(np.arange(5 * choices) == np.flatnonzero(index == order[0])[0], 0, found.reshape(-1))
    np.testing.assert_array_equal(engine.dots(aligned(rows[order]), tokens, choices, moved).reshape(-1), wanted)


def test_of_no_tokens_there_are_no_dots(engine):
    empty = np.zeros((0, 8), np.float32)
    assert engine.dots(empty, empty, 2).shape == (0, 2)
