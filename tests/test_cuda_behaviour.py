"""What the CUDA backend does beyond the bits: golden vectors, large arrays, graphs, streams, memory."""

import numpy as np
import pytest
from test_reference_vectors import VECTORS, cases, format_of, input_of

import hqarray as hq
from hqarray import testing
from hqarray.formats import BFLOAT16, FORMATS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.mark.parametrize(("name", "source"), cases())
def test_both_parts_equal_the_golden_bytes(cupy, name, source):
    array = hq.quantize(cupy.asarray(input_of(source)), rowwise=format_of(name), columnwise=format_of(name))
    for direction, part in (("row", array.rowwise), ("col", array.columnwise)):
        for field, ours in (("data", part.codes), ("scale", part.scales), ("amax", part.amax)):
            key = f"out/{name}/{source}/{direction}/{field}"
            if key in VECTORS:
                theirs = VECTORS[key].reshape(ours.shape)
                testing.assert_bitwise_equal(np.ascontiguousarray(ours.get()), theirs, name=key)


PERIOD = 4096


@pytest.fixture(scope="module")
def large(cupy):
    """2.156e9 elements, more than an int32 counts: 4096 random rows, 256 times."""
    rows = testing.matrix("wide", (PERIOD, 2056), BFLOAT16)
    x = cupy.empty((256 * PERIOD, 2056), BFLOAT16)
    x.reshape(256, PERIOD, 2056)[...] = cupy.asarray(rows)
    assert x.size > 1 << 31
    yield rows, x
    del x
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize(("row", "column"), [("mxfp8", "nvfp4"), ("fp8_block_128x128", "fp8_e4m3"), ("nvfp4", "bf16")])
def test_more_elements_than_an_int32_counts(cupy, large, row, column):
    rows, x = large
    amax = hq.amax(x)
    testing.assert_bitwise_equal(amax, hq.amax(rows))
    array = hq.quantize(x, rowwise=row, columnwise=column)
    expected = hq.quantize(rows, rowwise=row, columnwise=column)
    periods = array.rowwise.codes.reshape(256, PERIOD, -1)
    assert bool((periods == cupy.asarray(expected.rowwise.codes)).all())
    testing.assert_bitwise_equal(array.rowwise.scales[-PERIOD // 128 :], expected.rowwise.scales[-PERIOD // 128 :])
    columns = array.columnwise.codes.reshape(2056, 256, -1)
    assert bool((columns == cupy.asarray(expected.columnwise.codes)[:, None]).all())
    for source in ("rowwise", "columnwise"):
        decoded = array.dequantize(source=source)
        wanted = cupy.asarray(expected.dequantize(source=source))
        assert bool((decoded.reshape(256, PERIOD, -1).view(cupy.uint16) == wanted.view(cupy.uint16)).all())
        del decoded
    del array, periods, columns
    cupy.get_default_memory_pool().free_all_blocks()


def test_rows_that_start_beyond_2_to_the_31(cupy, large):
    rows, x = large
    views = (lambda a: a[-300:, 8:1000], lambda a: a[-5:, 1::2], lambda a: a[-300:].T)
    for view, expected in ((cut(x), cut(rows)) for cut in views):
        for name in ("mxfp8", "nvfp4"):
            testing.assert_bitwise_equal(
                hq.quantize(view, rowwise=name, columnwise=name), hq.quantize(expected, rowwise=name, columnwise=name)
            )


def test_more_row_tiles_than_a_grid_axis_holds(cupy):
    rows = testing.matrix("gauss", (PERIOD, 8), BFLOAT16)
    x = cupy.tile(cupy.asarray(rows), (2600, 1))  # 41,600 tiles of 256 rows, 83,200 of 128
    for name in ("mxfp8", "fp8_block_1x128"):
        array = hq.quantize(x, rowwise=name, columnwise=name)
        expected = cupy.asarray(hq.quantize(rows, rowwise=name).rowwise.codes)
        assert bool((array.rowwise.codes.reshape(2600, PERIOD, -1) == expected).all())
        decoded = array.dequantize(source="columnwise")
        wanted = cupy.asarray(hq.quantize(rows, columnwise=name).dequantize())
        assert bool((decoded.reshape(2600, PERIOD, -1).view(cupy.uint16) == wanted.view(cupy.uint16)).all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_graph_replays_with_new_values(cupy, name):
    first, second = (testing.matrix(kind, (145, 280), BFLOAT16) for kind in ("gauss", "wide"))
    x = cupy.asarray(first)
    flag = cupy.zeros(1, np.int32)
    array = hq.quantize(x, rowwise=name, columnwise=name)
    array.dequantize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # fills the pool: nothing is allocated while capturing
        hq.quantize(x, rowwise=name, columnwise=name).dequantize()
        stream.synchronize()
        stream.begin_capture()
        hq.requantize(array, x, noop=flag)
        fresh = hq.quantize(x, rowwise=name, columnwise=name)
        decoded = fresh.dequantize()
        graph = stream.end_capture()
        for values in (second, first):
            x.set(values)
            graph.launch(stream)
            stream.synchronize()
            expected = hq.quantize(values, rowwise=name, columnwise=name)
            testing.assert_bitwise_equal(array, expected)
            testing.assert_bitwise_equal(fresh, expected)
            testing.assert_bitwise_equal(decoded, expected.dequantize())
        flag.fill(1)
        x.set(second)
        graph.launch(stream)
        stream.synchronize()
        testing.assert_bitwise_equal(array, hq.quantize(first, rowwise=name, columnwise=name))


def test_no_call_waits_for_the_device(cupy):
    x = cupy.asarray(testing.matrix("gauss", (256, 512), BFLOAT16))
    code = 'extern "C" __global__ void wait() { for (int i = 0; i < 300; ++i) __nanosleep(1000000); }'
    wait = cupy.RawKernel(code, "wait")
    calls = [
        lambda: hq.quantize(x, rowwise="nvfp4", columnwise="fp8_e4m3"),
        lambda: hq.quantize(x.T, rowwise="mxfp8", columnwise="bf16"),
        lambda: hq.quantize(x[:, ::2], rowwise="mxfp8"),
        lambda: hq.amax(x),
        lambda: array.dequantize(source="columnwise"),
        lambda: hq.requantize(array, x, noop=flag),
        lambda: square.with_columnwise(),
        lambda: repr(array),  # the HTML card reads a sample of the scales, and so waits
    ]
    flag = cupy.zeros(1, np.int32)
    array = hq.quantize(x, rowwise="mxfp8", columnwise="nvfp4")
    square = hq.quantize(x, rowwise="fp8_block_128x128")
    for call in calls:
        call()
    wait((1,), (1,), ())
    done = cupy.cuda.Event(disable_timing=True)
    done.record()
    for call in calls:
        call()
    assert not done.done
    done.synchronize()


def test_work_goes_to_the_current_stream(cupy):
    x = cupy.asarray(testing.matrix("gauss", (256, 512), BFLOAT16))
    expected = hq.quantize(x.get(), rowwise="nvfp4", columnwise="mxfp8")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y = x * 1
        array = hq.quantize(y, rowwise="nvfp4", columnwise="mxfp8")
        stream.synchronize()
        testing.assert_bitwise_equal(array, expected)


def test_every_byte_is_written(cupy):
    """Two arrays from memory that held ones and zeros are equal to the last byte of padding."""
    x = cupy.asarray(testing.matrix("wide", (133, 293), BFLOAT16))
    for row in FORMATS:
        for column in FORMATS:
            made = []
            for byte in (0x00, 0xFF):
                array = hq.quantize(x, rowwise=row, columnwise=column)
                for part in (array.rowwise, array.columnwise):
                    part.buffers.base[...] = byte
                hq.requantize(array, x)
                made.append(array)
            for direction in ("rowwise", "columnwise"):
                first, second = (getattr(array, direction).buffers for array in made)
                layout = first.layout
                end = layout.scales_offset + int(np.prod(layout.scales_shape)) * layout.scales_dtype.itemsize
                for start, stop in ((0, layout.codes.nbytes), (layout.scales_offset, end)):
                    assert bool((first.base[start:stop] == second.base[start:stop]).all()), (row, column, direction)


def test_other_threads_launch_at_the_same_time(cupy):
    from concurrent.futures import ThreadPoolExecutor

    names = ["mxfp8", "nvfp4", "fp8_e4m3", "mxfp4"]
    inputs = {name: testing.matrix("gauss", (96, 160), BFLOAT16, seed=number) for number, name in enumerate(names)}

    def work(name):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.asarray(inputs[name])
            arrays = [hq.quantize(x, rowwise=name, columnwise=name) for _ in range(50)]
            stream.synchronize()
        return arrays

    with ThreadPoolExecutor(4) as pool:
        for name, arrays in zip(names, pool.map(work, names), strict=True):
            expected = hq.quantize(inputs[name], rowwise=name, columnwise=name)
            for array in arrays:
                testing.assert_bitwise_equal(array, expected)


def test_a_thread_without_a_context_launches(cupy):
    from threading import Thread

    x = testing.matrix("gauss", (96, 160), BFLOAT16)
    values, made = cupy.asarray(x), []
    hq.quantize(values, rowwise="mxfp8").dequantize()  # compiled, and memory of the same sizes is in the pool
    thread = Thread(target=lambda: made.append(hq.quantize(values, rowwise="mxfp8")))
    thread.start()
    thread.join()
    testing.assert_bitwise_equal(made[0], hq.quantize(x, rowwise="mxfp8"))


def test_an_array_is_pickled_and_copied(cupy):
    import pickle

    x = cupy.asarray(testing.matrix("gauss", (37, 50), BFLOAT16))
    array = hq.quantize(x, rowwise="nvfp4", columnwise="mxfp8")
    for other in (pickle.loads(pickle.dumps(array)), array.copy()):
        testing.assert_bitwise_equal(other, array)
        for (_, ours), (_, theirs) in zip(array.parts(), other.parts(), strict=True):
            assert ours.codes.data.ptr != theirs.codes.data.ptr


def test_numpy_asks_for_values_explicitly(cupy):
    array = hq.quantize(cupy.zeros((16, 16), np.float32), rowwise="mxfp8")
    with pytest.raises(TypeError, match="dequantize"):
        np.asarray(array)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.float64])
@pytest.mark.parametrize(("row", "column"), [("mxfp8", "nvfp4"), ("fp8_e4m3", None), (None, "fp8_block_128x128")])
def test_an_equal_call_is_looked_up_and_another_one_is_not(cupy, row, column, dtype):
    """Arrays over the same memory that differ in alignment, strides or shape, each of them three times."""
    views = [
        lambda v: v[:9216].reshape(96, 96), lambda v: v[1:9217].reshape(96, 96), lambda v: v[:9216].reshape(96, 96).T,
        lambda v: v[:9984].reshape(96, 104)[:, :96], lambda v: v[:9696].reshape(96, 101)[:, :96],
        lambda v: v[:9696].reshape(96, 101)[:, :96].T, lambda v: v.reshape(96, 192)[:, ::2],
        lambda v: v[:9216].reshape(4, 24, 96), lambda v: v[:9216].reshape(96, 4, 24), lambda v: v[:96],
        lambda v: v[:192:2], lambda v: v.reshape(96, 2, 96)[:, 0].reshape(4, 24, 96),
    ]
    values = testing.matrix("gauss", (96, 192), np.float32).astype(dtype).ravel()
    there = cupy.asarray(values)
    for _ in range(3):
        for view in views:
            expected = hq.quantize(view(values), rowwise=row, columnwise=column)
            array = hq.quantize(view(there), rowwise=row, columnwise=column)
            assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
            testing.assert_bitwise_equal(array, expected)


def test_a_call_that_is_looked_up_still_checks(cupy):
    x = cupy.ones((32, 64), np.float32)
    for _ in range(2):
        hq.quantize(x, rowwise="mxfp8")
        with pytest.raises(ValueError, match="rowwise= as well"):
            hq.quantize(x, columnwise="mxfp8", columnwise_source="rowwise_dequantized")
        with pytest.raises(ValueError, match="one amax per matrix"):
            hq.quantize(x, rowwise="mxfp8", amax=1.0)
        with pytest.raises(TypeError, match="a format is"):
            hq.quantize(x, rowwise=["mxfp8"])
