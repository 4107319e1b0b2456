"""Delayed scaling against TransformerEngine's formulas in plain Python, and what a slot records."""

import itertools
import math

import numpy as np
import pytest

import hqarray as hq
from hqarray import reference, testing
from hqarray.formats import BFLOAT16
from hqarray.inputs import Slots


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    return np if request.param == "numpy" else pytest.importorskip("cupy")


def host(array):
    return array.get() if hasattr(array, "get") else array


# --- formulas -----------------------------------------------------------------------------------


class Transcription:
    """One tensor as TransformerEngine keeps it: slot 0 of the history is the current step, and what is kept is a scale.

    Its update after a reduction: nothing moves where the step recorded nothing.
    """

    def __init__(self, length, take, margin, largest):
        self.history, self.scale = [np.float32(0)] * length, np.float32(1)
        self.take, self.scaled_max = take, np.float32(np.float32(largest) * np.float32(2.0**-margin))

    def update(self):
        last, older = self.history[0], self.history[1:]
        if last == 0:
            return
        amax = last if self.take == "most_recent" else max([*older, last])
        self.history = [np.float32(0), *older[1:], last][: len(self.history)]
        if 0 < amax < math.inf:
            with np.errstate(over="ignore"):
                scale = np.float32(self.scaled_max / amax)
            self.scale = scale if scale < math.inf else np.finfo(np.float32).max


@pytest.mark.parametrize("margin", [0, 2, -1])
@pytest.mark.parametrize("take", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5, 300])
def test_scales_are_those_of_the_formulas(xp, length, take, margin):
    """Six matrices over steps with random amaxes, 16 orders of magnitude apart, and some steps that record nothing."""
    rng = np.random.default_rng(length)
    state = hq.DelayedScaling(6, hq.Delayed(length, take, margin), like=xp.zeros(1, np.float32))
    theirs = [Transcription(length, take, margin, 448) for _ in range(6)]
    values = xp.ones((1, 16), np.float32)
    for _ in range(12 if length < 100 else 320):
        amaxes = np.exp(rng.uniform(-18, 18, 6)).astype(np.float32) * (rng.random(6) < 0.8)
        state.current[...] = xp.asarray(amaxes.astype(np.float32))
        for transcription, amax in zip(theirs, amaxes, strict=True):
            transcription.history[0] = np.float32(amax)
            transcription.update()
        state.update()
        assert not host(state.current).any()
    with np.errstate(divide="ignore"):
        for i, transcription in enumerate(theirs):
            part = hq.quantize(values, rowwise="fp8_e4m3", amax=state[i]).rowwise
            assert host(part.scales)[0, 0] == np.float32(1) / transcription.scale
            assert host(state.history)[i, 1:].tolist() == transcription.history[1:]


def test_history_holds_the_last_amaxes_oldest_first(xp):
    state = hq.DelayedScaling(1, hq.Delayed(3), like=xp.zeros(1, np.float32))
    for amax, history, taken in ((5, [0, 0, 5], 5), (2, [0, 5, 2], 5), (3, [5, 2, 3], 5), (1, [2, 3, 1], 3)):
        state.current[...] = amax
        state.update()
        assert host(state.history).tolist() == [history]
        assert host(state.amax).tolist() == [taken]


@pytest.mark.parametrize("recorded", [0.0, math.inf], ids=["nothing", "inf"])
def test_a_step_that_recorded_nothing_usable_changes_nothing(xp, recorded):
    state = hq.DelayedScaling(2, hq.Delayed(2, "most_recent"), like=xp.zeros(1, np.float32))
    state.current[...] = 7
    state.update()
    state.current[...] = xp.asarray(np.array([recorded, 3], np.float32))
    state.update()
    assert host(state.amax).tolist() == [7, 3]
    assert host(state.history).tolist() == [[0, 7], [7, 3]]
    assert host(state.current).tolist() == [0, 0]


def test_a_margin_beyond_the_largest_float_is_capped(xp):
    state = hq.DelayedScaling(1, hq.Delayed(2, margin=100), like=xp.zeros(1, np.float32))
    state.current[...] = 1e30
    state.update()
    assert host(state.amax)[0] == np.finfo(np.float32).max


def test_a_state_of_nothing_is_legal(xp):
    state = hq.DelayedScaling(0, like=xp.zeros(1, np.float32))
    state.update()
    assert len(state) == 0 and len(state[0:0]) == 0


# --- quantizing with it -------------------------------------------------------------------------


PAIRS = [("fp8_e4m3", "fp8_e5m2"), ("fp8_e5m2", "nvfp4"), ("mxfp8", "fp8_e4m3"), ("nvfp4_16x16", None)]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_both_parts_of_a_hybrid_are_quantized_with_the_slots_amax_and_the_new_one_is_recorded(xp, pair):
    values = xp.asarray(testing.matrix("wide", (40, 72), np.float32))
    state = hq.DelayedScaling(3, like=values)
    state.amax[1:2] = 5
    array = hq.quantize(values, rowwise=pair[0], columnwise=pair[1], amax=state[1])
    testing.assert_bitwise_equal(array, hq.quantize(values, rowwise=pair[0], columnwise=pair[1], amax=5.0))
    largest = float(np.abs(host(values)).max())
    assert host(state.current).tolist() == [0, largest, 0]
    hq.quantize(values / 2, rowwise=pair[0], amax=state[1]) if pair[0] != "mxfp8" else None
    assert host(state.current).tolist() == [0, largest, 0], "the largest of a step stays"
    hq.fake_quantize(values * 2, "fp8_e4m3", amax=state[1])
    assert host(state.current).tolist() == [0, 2 * largest, 0]


def test_nan_is_not_recorded_and_infinity_is(xp):
    values = np.ones((4, 8), np.float32)
    values[1, 2] = np.nan
    state = hq.DelayedScaling(2, like=xp.zeros(1, np.float32))
    hq.quantize(xp.asarray(values), rowwise="fp8_e4m3", amax=state[0])
    values[1, 2] = -np.inf
    hq.quantize(xp.asarray(values), rowwise="fp8_e4m3", amax=state[1])
    assert host(state.current).tolist() == [1, math.inf]


@pytest.mark.parametrize("skipped", [0, 1])
def test_requantize_records_unless_it_is_skipped(xp, skipped):
    values = xp.asarray(testing.matrix("gauss", (16, 32), np.float32))
    array = hq.quantize(values, rowwise="fp8_e4m3", columnwise="nvfp4")
    state = hq.DelayedScaling(1, like=values)
    state.amax[...] = 2
    hq.requantize(array, values, amax=state[0], noop=xp.asarray(np.array([skipped], np.int32)))
    assert (float(host(state.current)[0]) > 0) == (not skipped)
    assert (float(host(array.rowwise.amax)[0]) == 2) == (not skipped)


def test_bfloat16_strided_and_transposed_values_are_recorded(xp):
    values = xp.asarray(testing.matrix("gauss", (24, 40), np.float32))
    state = hq.DelayedScaling(2, like=values)
    hq.quantize(values.T[::2], columnwise="fp8_e4m3", amax=state[0])
    assert float(host(state.current)[0]) == float(abs(values.T[::2]).max())
    narrow = values.astype(np.float16)
    hq.quantize(narrow[:, 1:], rowwise="fp8_e4m3", amax=state[1])
    assert float(host(state.current)[1]) == float(abs(narrow[:, 1:]).max())


@pytest.mark.parametrize("device_sizes", [False, True])
def test_members_of_a_group_have_slots_of_their_own(xp, device_sizes):
    if device_sizes and xp is np:
        pytest.skip("sizes are on the host")
    values, sizes = xp.asarray(testing.matrix("gauss", (130, 48), np.float32)), [30, 0, 100]
    given = xp.asarray(np.array(sizes, np.int32)) if device_sizes else sizes
    state = hq.DelayedScaling(5, like=values)
    state.amax[1:4] = xp.asarray(np.array([2, 3, 4], np.float32))
    group = hq.grouped_quantize(values, given, rowwise="fp8_e4m3", columnwise="nvfp4", amax=state[1:4])
    plain = hq.grouped_quantize(values, given, rowwise="fp8_e4m3", columnwise="nvfp4", amax=state.amax[1:4].copy())
    group, plain = group.to_host(), plain.to_host()
    members = [values[:30], values[30:30], values[30:]]
    for i, member in enumerate(members):
        testing.assert_bitwise_equal(group[i], plain[i])
        alone = hq.quantize(member, rowwise="fp8_e4m3", columnwise="nvfp4", amax=float(i + 2))
        testing.assert_bitwise_equal(group[i], alone)
    largest = [float(abs(member).max()) if member.size else 0.0 for member in members]
    assert host(state.current).tolist() == [0, *largest, 0]
    with pytest.raises(ValueError, match=r"one float32 for each group, \(3,\), not float32 of shape \(2,\)"):
        hq.grouped_quantize(values, sizes, rowwise="fp8_e4m3", amax=state[:2])


KINDS = ("wide", "nans", "infinities", "subnormals")
RECORDED = [*PAIRS, ("fp8_e4m3", None), (None, "fp8_e4m3"), ("fp8_e4m3", "mxfp8"), ("nvfp4", "nvfp4"), (None, "nvfp4"),
            ("fp8_e4m3", "fp8_row_e4m3"), ("nvfp4(four_over_six=mae)", "mxfp8"), ("fp8_block_128x128", "nvfp4")]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("pair", RECORDED, ids=str)
def test_what_is_recorded_is_the_amax_bit_for_bit(xp, pair, dtype):
    """Of matrices on 16 bytes and on any, as they lie and turned, and of what an array is requantized from."""
    for kind in KINDS:
        wide = testing.matrix(kind, (145, 281), np.float32 if dtype == "float64" else np.dtype(dtype)).astype(dtype)
        for values in (wide, wide[:, 1:], wide.T, wide[3:, ::2], wide[:1, :1], wide[:0]):
            state = hq.DelayedScaling(2, like=xp.zeros(1, np.float32))
            state.amax[...] = 3
            values = placed(xp, wide, values)
            array = hq.quantize(values, rowwise=pair[0], columnwise=pair[1], amax=state[0])
            testing.assert_bitwise_equal(host(state.current[:1]), host(hq.amax(values)))
            testing.assert_bitwise_equal(host(state.current[:1]), reference.amax(host(values)))
            plain = hq.quantize(values, rowwise=pair[0], columnwise=pair[1], amax=3.0)
            testing.assert_bitwise_equal(array, plain)
            hq.requantize(array, values, amax=state[1])
            testing.assert_bitwise_equal(host(state.current[1:]), host(state.current[:1]))


def placed(xp, whole, view):
    """A view of a NumPy array, or the same view of its copy on a GPU."""
    if xp is np:
        return view
    offset = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return xp.ndarray(view.shape, view.dtype, xp.asarray(whole).data + offset, strides=view.strides)


@pytest.mark.parametrize("pair", [("fp8_e4m3", "nvfp4"), ("mxfp8", "fp8_e4m3"), ("nvfp4", "mxfp8")], ids=str)
def test_of_derived_columns_the_amax_of_the_values_is_recorded(xp, pair):
    """Not of what the rows decode to, which saturates here; whichever of the two has the amax."""
    values = xp.asarray(testing.matrix("gauss", (40, 72), np.float32))
    state = hq.DelayedScaling(4, like=values)
    state.amax[...] = 0.25
    given = {"rowwise": pair[0], "columnwise": pair[1], "columnwise_source": "rowwise_dequantized"}
    array = hq.quantize(values, **given, amax=state[0])
    testing.assert_bitwise_equal(array, hq.quantize(values, **given, amax=0.25))
    hq.requantize(array, values, amax=state[1])
    hq.requantize(array.T, values.T, amax=state[2])
    hq.requantize(array, values, amax=state[3], noop=xp.ones(1, np.int32))
    largest = host(hq.amax(values))[0]
    assert host(state.current).tolist() == [largest, largest, largest, 0]


@pytest.mark.parametrize("pair", [("fp8_e4m3", "fp8_e5m2"), ("nvfp4", None), (None, "nvfp4_16x16"),
                                  ("mxfp8", "fp8_e4m3")], ids=str)
@pytest.mark.parametrize("sizes", [[0, 128, 0, 130, 65, 0], [1, 7, 379, 0], [0, 0]], ids=str)
def test_members_record_their_own_amax_and_rows_of_none_nothing(xp, pair, sizes):
    for kind, alignment in itertools.product(KINDS, (1, 16)):
        reach = sum(-(-n // alignment) * alignment for n in sizes)
        x = np.full((reach + 200, 136), np.inf, BFLOAT16)
        state = hq.DelayedScaling(len(sizes) + 1, like=xp.zeros(1, np.float32))
        state.amax[...] = 2
        wanted, start = [], 0
        for n in sizes:
            x[start : start + n] = testing.matrix(kind, (n, 136), BFLOAT16)
            wanted.append(reference.amax(x[start : start + n])[0])
            start += -(-n // alignment) * alignment
        values, slots = xp.asarray(x), state[: len(sizes)]
        given = xp.asarray(np.array(sizes, np.int64)) if xp is not np else sizes
        named = {"rowwise": pair[0], "columnwise": pair[1], "alignment": alignment}
        group = hq.grouped_quantize(values, given, **named, amax=slots)
        testing.assert_bitwise_equal(host(state.current), np.float32([*wanted, 0]))
        state.current[...] = 0
        for skipped in (1, 0):
            flag = xp.asarray(np.array([skipped], np.int32))
            hq.grouped_quantize(values, given, alignment=alignment, out=group, amax=slots, noop=flag)
            expected = [0] * (len(sizes) + 1) if skipped else [*wanted, 0]
            testing.assert_bitwise_equal(host(state.current), np.float32(expected))


def test_a_rotated_part_has_no_slot():
    state, values = hq.DelayedScaling(1), np.ones((16, 16), np.float32)
    with pytest.raises(ValueError, match=r"a rotated part .rht. is scaled by that of rotated"):
        hq.quantize(values, rowwise="nvfp4(rht=True)", amax=state[0])
    with pytest.raises(ValueError, match=r"a rotated part .rht. is scaled by that of rotated"):
        hq.grouped_quantize(values, [16], rowwise="nvfp4(rht=True)", amax=state[:])
    assert not state.current.any()


# --- slots --------------------------------------------------------------------------------------


def test_slots_are_views_by_number_and_by_range():
    state = hq.DelayedScaling(5)
    slots = state[1:4]
    assert isinstance(slots, Slots) and len(slots) == 3
    slots[-1].amax[...] = 9
    slots[0:1].current[...] = 4
    assert state.amax.tolist() == [0, 0, 0, 9, 0] and state.current.tolist() == [0, 4, 0, 0, 0]
    assert state[np.int64(2)].amax.shape == (1,) and len(state[5:]) == 0
    for number in (5, -6):
        with pytest.raises(IndexError, match=rf"^state\[{number}\]: there are 5 slots, 0 to 4$"):
            state[number]
    with pytest.raises(IndexError, match=r"there are 0 slots$"):
        hq.DelayedScaling(0)[0]
    for strange in ("a", 1.0, None):
        with pytest.raises(TypeError, match="a slot is an integer, several are a slice; there are 5 slots, 0 to 4"):
            state[strange]


def test_several_slots_are_not_one_amax():
    state = hq.DelayedScaling(5)
    with pytest.raises(ValueError, match=r"amax is one float32.*not float32 of shape \(2,\)"):
        hq.quantize(np.ones((4, 4), np.float32), rowwise="fp8_e4m3", amax=state[1:3])
    with pytest.raises(ValueError, match="mxfp8 has none"):
        hq.quantize(np.ones((4, 4), np.float32), rowwise="mxfp8", amax=state[1])
    assert not state.current.any(), "nothing is recorded by a call that fails"


def test_state_lies_where_like_lies_and_tensors_are_read():
    torch = pytest.importorskip("torch")
    state = hq.DelayedScaling(2, hq.Delayed(4), like=torch.ones(3))
    assert state.history.shape == (2, 4) and state.history.dtype == np.float32
    assert len(hq.DelayedScaling(np.int64(3))) == 3
    assert repr(state) == "DelayedScaling(2, Delayed(length=4, take='max', margin=0))"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [((-1,), ValueError, "not -1"), ((2.0,), ValueError, "not 2.0"), ((True,), ValueError, "not True"),
     ((2, 16), TypeError, "rule is int; give a Delayed"), ((2, "max"), TypeError, "rule is str")],
)
def test_what_is_no_state_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        hq.DelayedScaling(*arguments)


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_captured_step_replays_with_new_values():
    """Quantize and update in a graph: each replay uses the amaxes of the one before."""
    cupy = pytest.importorskip("cupy")
    values = cupy.ones((64, 64), np.float32)
    state = hq.DelayedScaling(1, hq.Delayed(2, "most_recent"), like=values)
    array = hq.quantize(values, rowwise="fp8_e4m3", columnwise="nvfp4")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        hq.requantize(array, values, amax=state[0])
        state.update()
        stream.begin_capture()
        hq.requantize(array, values, amax=state[0])
        state.update()
        graph = stream.end_capture()
        for step in range(2, 6):
            values[...] = step
            graph.launch(stream)
            assert float(array.rowwise.amax[0]) == (step - 1 if step > 2 else 1)
            assert float(state.amax[0]) == step


@pytest.mark.gpu
def test_many_histories_of_many_lengths_are_moved_in_place():
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    for count, length in ((1, 1), (3, 255), (5, 256), (70, 257), (1000, 1024)):
        ours, wanted = (hq.DelayedScaling(count, hq.Delayed(length), like=xp.zeros(1, np.float32)) for xp in (cupy, np))
        history = rng.random((count, length), np.float32)
        current = np.where(rng.random(count) < 0.7, rng.random(count), 0).astype(np.float32)
        for state in (ours, wanted):
            module = np if state is wanted else cupy
            state.history[...] = module.asarray(history)
            state.current[...] = module.asarray(current)
            state.update()
        for name in ("history", "current", "amax"):
            testing.assert_bitwise_equal(getattr(ours, name).get(), getattr(wanted, name))
