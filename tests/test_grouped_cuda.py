"""Groups on a GPU: the bytes of reference_grouped.py, for sizes that the host never reads."""

import numpy as np
import pytest

import hqarray as hq
from hqarray import testing
from hqarray.formats import BFLOAT16, FORMATS
from hqarray.grouped_parts import GroupedPart

pytestmark = pytest.mark.gpu

SIZES = {
    "ragged": [0, 128, 0, 130, 65, 0],
    "first large": [513, 1, 0, 31],
    "last empty": [40, 256, 0],
    "all empty": [0, 0, 0],
}


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def device_sizes(cupy, sizes, kind):
    if kind == "ends":
        return {"offsets": cupy.asarray(np.cumsum(sizes), dtype=np.int32)}
    return {"sizes": cupy.asarray(sizes, dtype=kind)}


def on_host(g):
    """The group with its buffers and sizes copied to the host."""
    g = g.to_host()
    parts = [None if p is None else GroupedPart(p.format, p.layout, p.sizes, p.base.get(), p.has_amax)
             for p in (g.rowwise, g.columnwise)]
    return hq.GroupedArray(*parts, g.rows, g.columns, g.dtype)


def assert_same(ours, theirs):
    """All codes and scalars, padding included; scales, whose padding is free, of some members."""
    ours = on_host(ours)
    for (name, part), (_, wanted) in zip(ours.parts(), theirs.parts(), strict=True):
        for field in ("padded_codes", "global_scale", "amax"):
            mine, other = getattr(part, field), getattr(wanted, field)
            if other is not None:
                np.testing.assert_array_equal(mine.view(np.uint8), other.view(np.uint8), err_msg=f"{name}.{field}")
    for i in range(0, len(theirs), max(1, len(theirs) // 24)):
        testing.assert_bitwise_equal(ours[i], theirs[i])


def values(rows, k, dtype=BFLOAT16, kind="wide"):
    return testing.matrix(kind, (rows, k), dtype)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_the_bytes_of_the_reference(cupy, name, sizes):
    for other, kind in ((name, "wide"), ("mxfp8", "nans"), ("nvfp4", "infinities")):
        x = values(sum(sizes) + 37, 136, kind=kind)
        ours = hq.grouped_quantize(cupy.asarray(x), cupy.asarray(sizes), rowwise=name, columnwise=other)
        assert_same(ours, hq.grouped_quantize(x, sizes, rowwise=name, columnwise=other))


@pytest.mark.parametrize("sizes", [[1] * 1000, [n % 5 for n in range(1024)], [300, *[0] * 70, 3] * 4],
                         ids=["one row each", "1024 groups", "many empty"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_block_128x128", "mxfp8", "nvfp4"])
def test_many_groups_give_the_bytes_of_the_reference(cupy, name, sizes):
    x = values(sum(sizes) + 37, 136)
    ours = hq.grouped_quantize(cupy.asarray(x), cupy.asarray(sizes), rowwise=name, columnwise="mxfp8")
    assert_same(ours, hq.grouped_quantize(x, sizes, rowwise=name, columnwise="mxfp8"))


@pytest.mark.parametrize("kind", ["int32", "int64", "ends", "host"])
@pytest.mark.parametrize(("row", "column"), [("mxfp8", None), (None, "nvfp4"), ("fp8_e4m3", "fp8_block_1x128")])
def test_sizes_come_in_any_form(cupy, row, column, kind):
    sizes = SIZES["ragged"]
    x = values(sum(sizes) + 5, 264)
    theirs = hq.grouped_quantize(x, sizes, rowwise=row, columnwise=column)
    given = {"sizes": sizes} if kind == "host" else device_sizes(cupy, sizes, kind)
    assert_same(hq.grouped_quantize(cupy.asarray(x), **given, rowwise=row, columnwise=column), theirs)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.float64], ids=["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("k", [1, 15, 129, 256])
def test_any_width_and_dtype_gives_the_bytes_of_the_reference(cupy, dtype, k):
    sizes = [3, 0, 257, 128]
    x = values(sum(sizes), k, dtype)
    for row, column in (("nvfp4", "fp8_block_1x128"), ("fp8_block_128x128", "mxfp4"), ("fp8_e5m2", "fp32")):
        ours = hq.grouped_quantize(cupy.asarray(x), cupy.asarray(sizes), rowwise=row, columnwise=column)
        assert_same(ours, hq.grouped_quantize(x, sizes, rowwise=row, columnwise=column))
        wide = hq.grouped_quantize(cupy.asarray(np.ascontiguousarray(x.T)).T, sizes, rowwise=row, columnwise=column)
        assert_same(wide, hq.grouped_quantize(x, sizes, rowwise=row, columnwise=column))


@pytest.mark.parametrize("name", FORMATS)
def test_alignment_and_uniform_shapes_give_the_bytes_of_the_reference(cupy, name):
    x = values(512, 96)
    sizes = [100, 0, 128, 3]
    few = values(2100, 96)  # large members have a tile of their own
    for ends in ([2047], [700, 1400]):
        given = {"rowwise": name, "columnwise": name, "offsets": cupy.asarray(ends, dtype=np.int32)}
        assert_same(hq.grouped_quantize(cupy.asarray(few), **given),
                    hq.grouped_quantize(few, offsets=ends, rowwise=name, columnwise=name))
    aligned = {"rowwise": name, "columnwise": name, "alignment": 128}
    assert_same(hq.grouped_quantize(cupy.asarray(x), cupy.asarray(sizes), **aligned),
                hq.grouped_quantize(x, sizes, **aligned))
    for n in (64, 5):
        stacked = values(3 * n, 96).reshape(3, n, 96)
        assert_same(hq.GroupedArray.from_stacked(cupy.asarray(stacked), rowwise=name, columnwise=name),
                    hq.GroupedArray.from_stacked(stacked, rowwise=name, columnwise=name))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [96, 33])
def test_decoding_gives_the_values_of_the_reference(cupy, name, k):
    sizes = SIZES["ragged"]
    x = values(sum(sizes) + 9, k)
    for alignment in (1, 16):
        aligned = np.concatenate([x, x])
        options = {"rowwise": name, "columnwise": name, "alignment": alignment}
        theirs = hq.grouped_quantize(aligned, sizes, **options)
        ours = hq.grouped_quantize(cupy.asarray(aligned), cupy.asarray(sizes), **options)
        for source in ("rowwise", "columnwise"):
            for dtype in (np.float32, BFLOAT16):
                got = ours.dequantize(source=source, dtype=dtype)
                wanted = theirs.dequantize(source=source, dtype=dtype)
                np.testing.assert_array_equal(got.get().view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8))
                turned = ours.T.dequantize(source=source, dtype=dtype)
                other = np.ascontiguousarray(theirs.T.dequantize(source=source, dtype=dtype))
                np.testing.assert_array_equal(np.ascontiguousarray(turned.get()).view(np.uint8), other.view(np.uint8))


def test_sizes_on_a_device_are_not_trusted(cupy):
    x = values(256, 64)
    guard = cupy.full(1 << 20, 0x5A, np.uint8)
    for sizes in ([-5, 100, 400], [1 << 40, 3, 7], [300, -1, 2], [100, 100, 57]):
        g = hq.grouped_quantize(cupy.asarray(x), cupy.asarray(sizes, dtype=np.int64), rowwise="mxfp8",
                                columnwise="fp8_e4m3")
        with pytest.raises(ValueError, match="group"):
            g.validate()
        clamped = list(g.to_host().rows.values)
        assert_same(g, hq.grouped_quantize(x, clamped, rowwise="mxfp8", columnwise="fp8_e4m3"))
    assert bool((guard == 0x5A).all())


def test_out_is_written_in_place_and_nothing_behind_the_last_member(cupy):
    x = values(512, 128)
    sizes = cupy.asarray([100, 28, 0, 130])
    for row, column in (("mxfp8", "nvfp4"), ("fp8_block_1x128", "fp8_block_128x128"), ("bf16", "fp8_e4m3")):
        out = hq.grouped_quantize(cupy.asarray(x), sizes, rowwise=row, columnwise=column)
        for _, part in out.parts():
            part.base[...] = 0xAB
        again = hq.grouped_quantize(cupy.asarray(x), sizes, out=out)
        assert again.rowwise.memory.ptr == out.rowwise.memory.ptr
        theirs = hq.grouped_quantize(x, [100, 28, 0, 130], rowwise=row, columnwise=column)
        for i, member in enumerate(on_host(again)):
            testing.assert_bitwise_equal(member, theirs[i])
        assert bool((again.rowwise.padded_codes[258:].view(np.uint8) == 0xAB).all())


@pytest.mark.parametrize("kind", ["int32", "int64", "ends"])
@pytest.mark.parametrize(("row", "column"), [("mxfp8", None), ("nvfp4", "fp8_e4m3"), (None, "fp8_block_1x128")])
def test_a_warm_call_reads_the_values_and_sizes_of_that_call(cupy, row, column, kind):
    out = None
    for seed, sizes in enumerate(([5, 0, 131, 1], [100, 0, 0, 37], [0, 137, 0, 0], [0, 0, 0, 0], [34, 34, 34, 35])):
        x = testing.matrix("wide", (140, 136), BFLOAT16, seed=seed)
        theirs = hq.grouped_quantize(x, sizes, rowwise=row, columnwise=column)
        given = device_sizes(cupy, sizes, kind)
        fresh = hq.grouped_quantize(cupy.asarray(x), **given, rowwise=row, columnwise=column)
        assert_same(fresh, theirs)
        out = fresh if out is None else out
        for i, member in enumerate(on_host(hq.grouped_quantize(cupy.asarray(x), **given, out=out))):
            testing.assert_bitwise_equal(member, theirs[i])


def test_a_flag_that_is_set_leaves_the_group_as_it_is(cupy):
    x = cupy.asarray(values(256, 128))
    out = hq.grouped_quantize(x, [128, 128], rowwise="nvfp4", columnwise="mxfp8")
    before = [part.base.copy() for _, part in out.parts()]
    hq.grouped_quantize(x * 2, [128, 128], out=out, noop=cupy.ones(1, np.int32))
    for (_, part), kept in zip(out.parts(), before, strict=True):
        size = part.layout.work_offset
        assert bool((part.base[:size] == kept[:size]).all())


def test_a_graph_is_replayed_with_other_sizes(cupy):
    x = values(2048, 256)
    given, sizes = cupy.asarray(x), cupy.zeros(8, np.int32)
    pairs = [("mxfp8", "nvfp4"), ("fp8_e4m3", "fp8_block_1x128")]
    outs = [hq.grouped_quantize(given, sizes, rowwise=row, columnwise=column) for row, column in pairs]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        again = [hq.grouped_quantize(given, sizes, out=out) for out in outs]
        values_again = [g.dequantize() for g in again]
        graph = stream.end_capture()
    rng = np.random.default_rng(0)
    for _ in range(10):
        chosen = rng.multinomial(rng.integers(0, 2048), np.ones(8) / 8)
        with stream:
            sizes.set(chosen.astype(np.int32))
            graph.launch(stream)
        stream.synchronize()
        for (row, column), g, decoded in zip(pairs, again, values_again, strict=True):
            theirs = hq.grouped_quantize(x, chosen, rowwise=row, columnwise=column)
            for i, member in enumerate(on_host(g)):
                testing.assert_bitwise_equal(member, theirs[i])
            np.testing.assert_array_equal(decoded.get(), theirs.dequantize())


def test_split_quantize_gives_each_member_its_formats(cupy):
    x = values(300, 128)
    formats = ["mxfp8", None, ("nvfp4", "mxfp8"), "mxfp8", ("fp8_e4m3", None)]
    sizes = [100, 20, 0, 130, 50]
    ours = hq.split_quantize(cupy.asarray(x), sizes, formats)
    theirs = hq.split_quantize(x, sizes, formats)
    for mine, wanted in zip(ours, theirs, strict=True):
        if isinstance(wanted, np.ndarray):
            np.testing.assert_array_equal(mine.get(), wanted)
        else:
            testing.assert_bitwise_equal(mine, wanted)


def test_groups_of_more_than_2_31_elements(cupy):
    k = 8192
    sizes = [200_000, 60_000, 3, 2_200]
    x = cupy.random.default_rng(0).integers(0, 1 << 15, (sum(sizes), k), dtype=np.uint16).view(BFLOAT16)
    g = hq.grouped_quantize(x, sizes, rowwise="mxfp8", columnwise="mxfp8")
    last = hq.quantize(x[-2200:], rowwise="mxfp8", columnwise="mxfp8")
    testing.assert_bitwise_equal(g[3], last)
