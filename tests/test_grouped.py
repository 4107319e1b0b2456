"""GroupedArray: members as views, packing, ranges of members, sizes the host does not know, Python's protocols."""

import copy
import pickle
import re

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import arrays, grouped, grouped_parts, testing
from hqarray.formats import FORMATS
from hqarray.grouped import GroupedArray, GroupedPart, ScatteredPart
from hqarray.groups import Sizes

named = pytest.mark.parametrize
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SIZES = [0, 128, 0, 130, 65, 0]


def values(rows=400, k=48, dtype=np.float32):
    return testing.matrix("wide", (rows, k), dtype)


def group(rowwise="mxfp8", columnwise="nvfp4", sizes=SIZES, k=48, **options):
    return hq.grouped_quantize(values(k=k), sizes, rowwise=rowwise, columnwise=columnwise, **options)


def uniform(rowwise="mxfp8", columnwise="nvfp4"):
    return GroupedArray.from_stacked(values(60).reshape(6, 10, 48), rowwise=rowwise, columnwise=columnwise)


def scattered(rowwise="mxfp8", columnwise="nvfp4"):
    shapes = [(3, 40), (0, 7), (130, 33), (17, 0)]
    return GroupedArray.from_arrays([testing.matrix("wide", s) for s in shapes], rowwise=rowwise, columnwise=columnwise)


KINDS = {
    "rows_ragged": group, "columns_ragged": lambda *formats: group(*formats[::-1]).T, "uniform": uniform,
    "both_ragged": scattered, "aligned": lambda *formats: group(*formats, sizes=[100, 0, 30], alignment=128),
    "no_groups": lambda *formats: group(*formats, sizes=[]),
}
kinds = named("make", KINDS.values(), ids=KINDS)


def on_device(array, stored=(5, 0, 9), kind="int32", capacity=400):
    """The array as if its row sizes were where the host cannot see them."""
    stored = np.array(stored, np.int64 if kind == "int64" else np.int32)
    rows = Sizes(len(stored), None, None, stored, kind, capacity)
    parts = (None if part is None else part.with_sizes(rows) for part in (array.rowwise, array.columnwise))
    return GroupedArray(*parts, rows, array.columns, array.dtype)


def three(**options):
    return on_device(group(sizes=[5, 0, 9]), **options)


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        testing.assert_bitwise_equal(ours, theirs)


# --- members --------------------------------------------------------------------------------------


@kinds
def test_members_are_views_of_the_one_buffer(make):
    array = make("mxfp8", "nvfp4")
    for i, member in enumerate(array):
        for direction, part in member.parts():
            memory = array.part(direction).memory
            assert all(np.shares_memory(buffer, memory) for buffer in (part.codes, part.scales) if buffer.size)
            part.codes[...] = i + 1
            assert (getattr(array[i], direction).codes == i + 1).all()


@named("format", FORMATS)
@kinds
def test_members_do_not_overlap(make, format):
    array = make(format, format)
    for _, part in array.parts():
        for i, member in enumerate(part.members()):
            testing.poison(member, i)
        for i, member in enumerate(part.members()):
            for buffer in (member.codes, member.scales, member.global_scale, member.amax):
                assert buffer is None or (np.ascontiguousarray(buffer).view(np.uint8) == i).all()


def test_indexing_is_like_that_of_a_list():
    array = group()
    for i in range(-6, 6):
        testing.assert_bitwise_equal(array[i], list(array)[i])
    assert len(array) == 6 and array[np.int64(1)].shape == (128, 48)
    for i in (6, -7):
        with pytest.raises(IndexError, match=f"member {i} of 6"):
            array[i]
    for i in (slice(2), None, 1.0, (1, 2)):
        with pytest.raises(TypeError, match=r"g\[i\] takes an integer, not .*; split\(n\) gives ranges"):
            array[i]


def test_facts_are_read_without_the_sizes_where_they_can_be():
    array = group()
    assert array.shape == (6, None, 48) and array.T.shape == (6, 48, None) and uniform().shape == (6, 10, 48)
    assert scattered().shape == (4, None, None)
    facts = (array.num_groups, array.dtype, array.device, array.alignment, array.ordinal)
    assert facts == (6, np.float32, "cpu", 1, -1)
    assert array.nbytes == array.rowwise.nbytes + array.columnwise.nbytes
    assert group(sizes=[100], alignment=128).alignment == 128
    hidden = three()
    assert hidden.shape == (3, None, 48) and not hidden.is_known and hidden.nbytes > 0


def test_parts_show_all_members_at_once():
    array = group("mxfp8", "nvfp4")
    assert array.rowwise.codes.shape == (400, 48) and array.rowwise.codes.dtype == np.uint8
    assert array.rowwise.global_scale is None and array.rowwise.amax is None
    np.testing.assert_array_equal(array.rowwise.codes[128 : 128 + 130], array[3].rowwise.codes)
    assert array.columnwise.codes.ndim == array.columnwise.scales.ndim == 1
    np.testing.assert_array_equal(array.columnwise.global_scale, [m.columnwise.global_scale[0] for m in array])
    np.testing.assert_array_equal(array.columnwise.amax, [m.columnwise.amax[0] for m in array])
    scalar = group("fp8_e4m3", "bf16")
    np.testing.assert_array_equal(scalar.rowwise.scales, [m.rowwise.scales[0, 0] for m in scalar])
    assert scalar.columnwise.codes.dtype == BFLOAT16 and scalar.columnwise.scales.size == 0


@named(("make", "expected"), [
    (group, [0, 0, 128, 128, 258, 323, 323]), (lambda: group().T, [0, 0, 128, 128, 258, 323, 323]),
    (uniform, [0, 10, 20, 30, 40, 50, 60]), (lambda: group(sizes=[100, 0, 130], alignment=128), [0, 128, 128, 384]),
    (lambda: group(sizes=[100, 300]), [0, 100, 400]), (lambda: group(sizes=[399], alignment=128), [0, 400]),
    (three, [0, 5, 5, 14]), (lambda: three(kind="int64"), [0, 5, 5, 14]),
    (lambda: three(stored=(5, 5, 14), kind="ends"), [0, 5, 5, 14]),
    (lambda: three(stored=(5, -3, 900)), [0, 5, 5, 400]),
    (lambda: three(stored=(7, 4, 900), kind="ends"), [0, 7, 7, 400]),
])
def test_offsets_are_where_members_begin_in_the_stacked_array(make, expected):
    assert make().offsets.tolist() == expected and make().offsets.dtype == np.int64


def test_members_that_differ_along_both_axes_have_no_offsets():
    with pytest.raises(ValueError, match="differ along both axes and are not stacked"):
        _ = scattered().offsets


# --- views ----------------------------------------------------------------------------------------


@kinds
def test_transposing_swaps_the_parts_and_moves_nothing(make):
    array = make("mxfp8", "nvfp4")
    turned = array.T
    assert turned.rowwise is array.columnwise and turned.columnwise is array.rowwise and turned.rows is array.columns
    assert_same(turned, [member.T for member in array])
    assert_same(turned.T, list(array))


def test_drop_leaves_the_other_part():
    array = group()
    assert array.drop(columnwise=True).rowwise is array.rowwise and array.drop(columnwise=True).columnwise is None
    assert array.drop(rowwise=True).nbytes == array.columnwise.nbytes
    with pytest.raises(ValueError, match=r"drop\(rowwise, columnwise\) would leave no part in this GroupedArray"):
        array.drop(rowwise=True, columnwise=True)
    with pytest.raises(ValueError, match=re.escape(
        "drop(columnwise=True) needs the columnwise part, but this GroupedArray (6, None, 48) holds only rowwise (mxfp"
    )):
        group("mxfp8", None).drop(columnwise=True)


@named("make", [*KINDS.values(), lambda *f: group(*f, sizes=[7, 0, 150, 3], alignment=16)], ids=[*KINDS, "aligned_16"])
def test_split_gives_ranges_of_members_over_the_same_memory(make):
    for formats in (("mxfp8", "nvfp4"), ("fp8_e4m3", "fp8_block_128x128"), ("fp8_block_1x128", "bf16")):
        array = make(*formats)
        for count in (n for n in range(1, 7) if len(array) % n == 0):
            pieces = array.split(count)
            assert [len(piece) for piece in pieces] == [len(array) // count] * count
            assert_same([member for piece in pieces for member in piece], list(array))
            for piece in pieces:
                for direction, part in piece.parts():
                    whole = array.part(direction)
                    assert not part.nbytes or not len(piece) or np.shares_memory(part.memory, whole.memory)
                    assert isinstance(part, ScatteredPart) or part.layout.codes_nbytes <= whole.layout.codes_nbytes
                assert_same(piece.copy(), list(piece))
                assert_same(pickle.loads(pickle.dumps(piece)), list(piece))


def test_ranges_of_members_are_whole_arrays():
    """A range decodes, multiplies and is split again; its stacked array ends where the next one begins."""
    array = group("mxfp8", "mxfp8")
    stacked, offsets = array.dequantize(), array.offsets
    w = np.ones((3, 48, 4), np.float32)
    for i, piece in enumerate(array.split(2)):
        first, last = offsets[3 * i], offsets[3 * i + 3] if i == 0 else 400
        for source in ("rowwise", "columnwise"):
            testing.assert_bitwise_equal(piece.dequantize(source=source),
                                         array.dequantize(source=source)[first:last].copy())
        product = piece @ GroupedArray.from_stacked(np.ascontiguousarray(w.transpose(0, 2, 1))).T
        testing.assert_bitwise_equal(product, np.concatenate(
            [stacked[a:b] @ w[0] for a, b in zip(offsets[3 * i :], offsets[3 * i + 1 :][:3], strict=False)]
            + [np.zeros((last - offsets[3 * i + 3], 4), np.float32)]))
        assert_same([m for half in piece.split(3) for m in half], list(piece))
    split = array.split(2)
    assert split[0].nbytes + split[1].nbytes <= array.nbytes
    split[1].rowwise.codes[...] = 7
    assert (array[3].rowwise.codes == 7).all() and not (array[1].rowwise.codes == 7).all()


@named("count", [0, -1, 4, 12])
def test_split_refuses_what_does_not_divide(count):
    with pytest.raises(ValueError, match=re.escape(f"split({count}) of 6 members: give a number that divides it")):
        group().split(count)


# --- sizes the host does not know -----------------------------------------------------------------


@named("call", [lambda g: g[0], list, lambda g: g.split(3)], ids=["g[i]", "iteration", "split"])
def test_what_needs_the_sizes_on_the_host_names_to_host(call):
    hidden = three()
    with pytest.raises(ValueError, match=r"needs the sizes on the host, .* are on cpu; g.to_host\(\) copies them"):
        call(hidden)
    call(hidden.to_host())


@named(("stored", "kind"), [((5, 0, 9), "int32"), ((5, 0, 9), "int64"), ((5, 5, 14), "ends")])
def test_to_host_reads_the_sizes_and_shares_the_buffers(stored, kind):
    expected = group(sizes=[5, 0, 9])
    hidden = on_device(expected, stored, kind)
    shown = hidden.to_host()
    assert shown.rows.host == (5, 0, 9) and shown.rowwise.memory is hidden.rowwise.memory
    assert_same(shown, list(expected))
    assert group().to_host().rows.host == tuple(SIZES)


def test_to_host_clamps_what_cannot_be():
    assert three(stored=(300, -7, 200)).to_host().rows.host == (300, 0, 100)


@named(("make", "message"), [
    (lambda: three(stored=(5, -3, 9)), "rows of group 1 are -3; a size is 0 or more"),
    (lambda: three(stored=(5, 4, 9), kind="ends"), "rows of group 1 are -1; a size is 0 or more"),
    (lambda: three(stored=(300, 0, 101)), "rows of group 2, 101 of them, end at 401, beyond the capacity 400"),
    (lambda: three(stored=(300, 101, 401), kind="ends"), "rows of group 1 are -199"),
    (lambda: three(stored=(300, 401, 401), kind="ends"),
     "rows of group 1, 101 of them, end at 401, beyond the capacity"),
    (lambda: three(stored=(5, -3, 9)).T, "columns of group 1 are -3"),
])
def test_validate_says_which_group_and_what(make, message):
    with pytest.raises(ValueError, match=message):
        make().validate()


def test_validate_passes_what_can_be():
    for array in (three(), three(stored=(400, 0, 0)), group(), uniform(), scattered(), group(sizes=[]),
                  group(sizes=[399], alignment=128)):
        array.validate()


# --- making ---------------------------------------------------------------------------------------


def test_stacked_values_that_stay_unquantized_are_not_copied():
    for dtype, name in ((np.float32, "fp32"), (np.float16, "fp16"), (BFLOAT16, "bf16")):
        x = values(60, dtype=dtype).reshape(6, 10, 48)
        both = {"rowwise": name, "columnwise": "mxfp8"}
        for options in ({}, {"rowwise": name}, {"rowwise": hq.HighPrecision()}, both):
            array = GroupedArray.from_stacked(x, **options)
            assert array.rowwise.memory.ctypes.data == x.ctypes.data and array.rowwise.nbytes == x.nbytes
            assert_same([m.drop(columnwise="columnwise" in options) for m in array],
                        [hq.quantize(matrix, rowwise=name) for matrix in x])
        testing.assert_bitwise_equal(array.dequantize(source="rowwise"), x)
        assert_same([m.drop(rowwise=True) for m in array], [hq.quantize(matrix, columnwise="mxfp8") for matrix in x])


@named("make", [lambda: values(60, 46).reshape(6, 10, 46)[:, :, :45], lambda: values(120).reshape(6, 20, 48)[:, ::2],
                lambda: values(60, 45).reshape(6, 10, 45), lambda: values(60).reshape(10, 6, 48).transpose(1, 0, 2),
                lambda: np.zeros(20 * 16 + 1, np.float32)[1:].reshape(2, 10, 16)])
def test_stacked_values_that_a_gemm_cannot_read_are_copied(make):
    x = make()
    array = GroupedArray.from_stacked(x)
    assert not np.shares_memory(array.rowwise.memory, x)
    assert_same(array, [hq.quantize(matrix, rowwise="fp32") for matrix in x])


def test_stacked_values_are_quantized_where_a_format_says_so():
    x = values(60).reshape(6, 10, 48)
    for options in ({"rowwise": "mxfp8", "columnwise": "nvfp4"}, {"rowwise": "bf16"}, {"columnwise": "fp32"}):
        array = GroupedArray.from_stacked(x, **options)
        assert not any(np.shares_memory(part.memory, x) for _, part in array.parts())
        assert_same(array, [hq.quantize(matrix, **options) for matrix in x])
    with pytest.raises(ValueError, match=r"from_stacked takes \(num_groups, n, k\), not \(60, 48\)"):
        GroupedArray.from_stacked(values(60))
    assert GroupedArray.from_stacked(np.ones((2, 3, 4))).dtype == np.float32


SHAPES = {
    "uniform": [(10, 33)] * 3, "rows": [(5, 33), (0, 33), (130, 33)], "columns": [(33, 5), (33, 0), (33, 130)],
    "both": [(5, 7), (0, 33), (130, 0), (17, 130)], "one": [(17, 33)],
}


@named("shapes", SHAPES.values(), ids=SHAPES)
@named("format", FORMATS)
def test_a_list_becomes_a_group_quantized_or_packed(format, shapes):
    columnwise = "mxfp8" if format != "mxfp8" else "nvfp4"
    matrices = [testing.matrix("wide", shape, seed=i) for i, shape in enumerate(shapes)]
    for options in ({"rowwise": format, "columnwise": columnwise}, {"columnwise": format}):
        alone = [hq.quantize(matrix, **options) for matrix in matrices]
        assert_same(GroupedArray.from_arrays(matrices, **options), alone)
        for given in ({}, options):
            packed = GroupedArray.from_arrays(alone, **given)
            assert_same(packed, alone)
            assert not any(np.shares_memory(part.memory, member.part(direction).buffers.base)
                           for direction, part in packed.parts() for member in alone if member.size)


def test_arrays_without_a_format_stay_as_they_are():
    matrices = [testing.matrix("wide", shape, BFLOAT16) for shape in SHAPES["rows"]]
    assert_same(GroupedArray.from_arrays(matrices), [hq.quantize(x, rowwise="bf16") for x in matrices])


def test_packing_takes_borrowed_buffers_and_clears_what_follows_an_odd_row():
    part = hq.quantize(testing.matrix("gauss", (4, 33)), rowwise="mxfp4").rowwise
    dirty = part.codes.copy()
    dirty[:, -1] |= 0x70
    borrowed = hq.HybridArray(hq.QuantizedArray.from_buffers(dirty, part.scales, "mxfp4", (4, 33)))
    packed = GroupedArray.from_arrays([borrowed, borrowed])
    assert_same(packed, [hq.HybridArray(part)] * 2)
    assert packed.rowwise.amax is None


def hybrid(rowwise="mxfp8", columnwise=None, shape=(4, 32), dtype=np.float32):
    return hq.quantize(np.ones(shape, dtype), rowwise=rowwise, columnwise=columnwise)


@named(("arrays", "options", "error", "message"), [
    ([], {}, ValueError, "from_arrays needs at least one array"),
    ([hybrid(), hybrid("nvfp4")], {}, ValueError,
     r"arrays\[1\] is .*nvfp4.*, arrays\[0\] .*mxfp8.*one pair of formats and one dtype; keep mixed .*split_quantize"),
    ([hybrid(), hybrid("mxfp8", "mxfp8")], {}, ValueError, "keep mixed ones in a list, as split_quantize gives them"),
    ([hybrid(), hybrid(dtype=np.float16)], {}, ValueError, "one dtype"),
    ([hybrid()], {"rowwise": "nvfp4"}, ValueError,
     "rowwise=nvfp4, but the arrays' rowwise part is mxfp8; from_arrays does"),
    ([hybrid()], {"columnwise": "nvfp4"}, ValueError, "columnwise=nvfp4, but the arrays' columnwise part is missing"),
    ([hybrid(), np.ones((4, 32), np.float32)], {}, TypeError,
     r"arrays\[1\] is ndarray beside HybridArrays; quantize it"),
    ([hybrid(shape=(2, 2, 32))], {}, ValueError, r"arrays\[0\] is \(2, 2, 32\); members are 2-D, reshape\(-1, 32\)"),
    ([np.ones((2, 2, 2), np.float32)], {}, ValueError, r"arrays\[0\] is \(2, 2, 2\); members are 2-D"),
    ([np.ones((2, 2), np.float32), np.ones((2, 2), np.float16)], {}, TypeError,
     r"arrays\[1\] is float16, arrays\[0\] fl"),
    ([np.ones((2, 2), int)], {}, TypeError, r"arrays\[0\] has dtype int64"),
])
def test_arrays_that_make_no_group_are_refused(arrays, options, error, message):
    with pytest.raises(error, match=message):
        GroupedArray.from_arrays(arrays, **options)


@named(("make", "error", "message"), [
    (lambda g: GroupedArray(None, None, g.rows, g.columns), ValueError, "holds at least one part"),
    (lambda g: GroupedArray(g[0].rowwise, None, g.rows, g.columns), TypeError,
     "rowwise is a GroupedPart, not Quantized"),
    (lambda g: GroupedArray(g.rowwise, None, g.rows, Sizes.uniform(5, 48)), ValueError, "rows has 6 sizes, columns 5"),
    (lambda g: GroupedArray(g.columnwise, None, g.rows, g.columns), ValueError,
     r"rowwise GroupedPart\(.*\) does not lie as members of shape \(6, None, 48\) do"),
    (lambda g: GroupedArray(g.rowwise, None, g.rows, Sizes.uniform(6, 47)), ValueError, "does not lie as members"),
    (lambda g: GroupedArray(g.rowwise, None, Sizes.known(SIZES, 401), g.columns), ValueError, "does not lie"),
    (lambda g: GroupedArray(scattered().rowwise, None, g.rows, g.columns), ValueError, "does not lie"),
    (lambda g: GroupedArray(g.rowwise, None, g.rows, g.columns, np.float64), TypeError, "not float64"),
])
def test_parts_that_do_not_fit_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make(group())


def test_containers_are_frozen_and_compare_by_identity():
    array = group()
    for container, field in ((array, "rowwise"), (array.rowwise, "format"), (scattered().rowwise, "parts")):
        with pytest.raises(AttributeError):
            setattr(container, field, None)
        assert container == container and container != container.copy() and len({container, container.copy()}) == 2


# --- copies ---------------------------------------------------------------------------------------


@named("duplicate", [lambda x: x.copy(), copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
       ids=["copy", "deepcopy", "pickle"])
@kinds
def test_a_duplicate_has_the_same_members_in_buffers_of_its_own(make, duplicate):
    for formats in (("mxfp8", "nvfp4"), ("fp8_e4m3", "bf16")):
        array = make(*formats)
        again = duplicate(array)
        assert_same(again, list(array))
        assert (again.shape, again.dtype, again.nbytes) == (array.shape, array.dtype, array.nbytes)
        assert (again.rows.host, again.rows.capacity) == (array.rows.host, array.rows.capacity)
        for direction, part in again.parts():
            assert not np.shares_memory(part.memory, array.part(direction).memory)
    hidden = duplicate(three())
    assert not hidden.is_known and hidden.rows is hidden.rowwise.sizes
    assert_same(hidden.to_host(), list(group(sizes=[5, 0, 9])))


def test_a_pickle_holds_the_format_by_name_and_a_version():
    array = group("mxfp8(rule=floor)", None)
    assert b"mxfp8(rule=floor)" in pickle.dumps(array) and b"GroupedLayout" not in pickle.dumps(array)
    for container, unpickle in ((array, grouped._unpickle_grouped), (array.rowwise, grouped_parts._unpickle_group),
                                (scattered().rowwise, grouped_parts._unpickle_scattered)):
        _, arguments = container.__reduce__()
        assert arguments[0] == arrays.PICKLE_VERSION
        with pytest.raises(ValueError, match=r"pickled by a newer hqarray \(pickle version 99 > 1\)"):
            unpickle(99, *arguments[1:])


# --- display --------------------------------------------------------------------------------------


class Unreadable:
    """A buffer that only answers what a repr may ask."""

    device = "cpu"


def test_a_repr_is_one_line_and_reads_no_data():
    array = group()
    assert repr(array) == "GroupedArray((6, None, 48) float32, rowwise=mxfp8, columnwise=nvfp4, cpu, 35.2 KiB)"
    assert "sizes on the device, cpu" in repr(three())
    assert repr(array.rowwise).startswith("GroupedPart(6 members, ragged outer, each 48, mxfp8, cpu, ")
    assert repr(scattered().rowwise).startswith("ScatteredPart(4 members, mxfp8, cpu, ")
    part = array.rowwise
    hollow = GroupedPart(part.format, part.layout, part.sizes, Unreadable(), False)
    assert repr(hollow) == repr(part)


def test_html_is_a_table_of_parts_and_sizes():
    for text in ("<table", "GroupedArray", "(6, None, 48)", "mxfp8, ragged outer", "nvfp4, ragged k",
                 "0, 128, 0, 130, 65, 0; together 323 of 400", "6 x 48"):
        assert text in group()._repr_html_()
    assert "3 on the device (int32), together at most 400" in three()._repr_html_()
    many = group(sizes=[1] * 40, alignment=2)._repr_html_()
    shown, _, rest = many.partition(", ...; together 40 of 400, aligned to 2")
    assert rest and shown.count("1, ") == grouped.SHOWN_SIZES - 1
    assert ">mxfp8, 3.2 KiB</td>" in uniform()._repr_html_() and "3, 0, 130, 17" in scattered()._repr_html_()


# --- NumPy protocols ------------------------------------------------------------------------------


def test_asarray_decodes_a_copy():
    testing.assert_bitwise_equal(np.asarray(group()), group().dequantize())
    assert np.asarray(uniform(), np.float64).shape == (6, 10, 48)
    with pytest.raises(ValueError, match="only by decoding, which copies"):
        np.array(group(), copy=False)
    with pytest.raises(TypeError, match="differ along both axes and make no array"):
        np.asarray(scattered())


@named("call", [lambda x: x + 1, lambda x: 1 + x, lambda x: -x, np.exp, np.sum, np.mean, lambda x: np.dot(x, x),
                lambda x: np.concatenate([x, x]), lambda x: np.transpose(x), lambda x: np.ones(3) * x,
                lambda x: np.size(x)])
def test_other_numpy_functions_are_a_type_error_that_names_dequantize(call):
    with pytest.raises(TypeError, match=r"dequantize\(\)|unsupported operand|bad operand"):
        call(group())


def test_shape_and_ndim_are_answered_without_decoding():
    assert np.shape(group()) == (6, None, 48) and np.ndim(group()) == 3 and np.size(uniform()) == 2880
    with pytest.raises(TypeError, match="truth value of a GroupedArray is not defined"):
        bool(group())
    with pytest.raises(TypeError, match="matmul of quantized arrays takes no dtype"):
        np.matmul(group(), group(), dtype=np.float64)
