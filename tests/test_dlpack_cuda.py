"""Typed DLPack and inputs of torch on the GPU: types, memory, streams, devices, lifetimes."""

import gc

import numpy as np
import pytest

import hqarray as hq
from hqarray import testing
from hqarray.dlpack import Typed, codes_of, from_dlpack, scales_of
from hqarray.formats import BFLOAT16, FORMATS

pytestmark = pytest.mark.gpu

named = pytest.mark.parametrize
CODES = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def torch():
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch here has no CUDA")
    return module


def tensor_of(torch, array):
    bits = array.view(np.int16) if array.dtype == BFLOAT16 else array
    tensor = torch.from_numpy(np.array(bits)).cuda()
    return tensor.view(torch.bfloat16) if array.dtype == BFLOAT16 else tensor


# --- types and memory -----------------------------------------------------------------------------


@named("name", [*CODES, "float4_e2m1fn_x2", "uint8"])
def test_bytes_go_to_torch_and_come_back(cupy, torch, name):
    array = cupy.arange(256, dtype=np.uint8).reshape(8, 32)
    tensor = torch.from_dlpack(Typed(array, name))
    assert tensor.dtype == getattr(torch, name) and tensor.data_ptr() == array.data.ptr
    back = from_dlpack(tensor)
    assert isinstance(back.array, cupy.ndarray) and back.array.data.ptr == array.data.ptr and back.name == name
    testing.assert_bitwise_equal(back.array.get(), array.get())


def test_bfloat16_goes_to_torch_and_comes_back(cupy, torch):
    values = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    tensor = torch.from_numpy(values.view(np.int16)).cuda().view(torch.bfloat16)
    back = from_dlpack(tensor)
    assert back.array.dtype == BFLOAT16 and back.array.data.ptr == tensor.data_ptr()
    testing.assert_bitwise_equal(back.array.view(np.uint16).get(), values)
    again = torch.from_dlpack(Typed(back.array))
    assert again.dtype == torch.bfloat16 and again.data_ptr() == tensor.data_ptr()


@named("format", FORMATS)
def test_parts_are_given_to_torch_with_their_types(cupy, torch, format):
    part = hq.quantize(cupy.asarray(testing.matrix("gauss", (20, 48))), rowwise=format).rowwise
    for typed, array in ((codes_of(part), part.codes), (scales_of(part), part.scales)):
        tensor = torch.from_dlpack(typed)
        assert str(tensor.dtype) == f"torch.{typed.name}" and tuple(tensor.shape) == array.shape
        assert not array.size or tensor.data_ptr() == array.data.ptr
        testing.assert_bitwise_equal(from_dlpack(tensor).array.get(), array.get())


@named("view", [lambda a: a[:0], lambda a: a[:, :0], lambda a: a[3, 4], lambda a: a.T, lambda a: a[::2, 1::3]])
@named("dtype", [np.uint8, BFLOAT16], ids=str)
def test_any_view_goes_and_comes(cupy, torch, view, dtype):
    array = view(cupy.arange(256, dtype=np.uint8).astype(dtype).reshape(8, 32))
    back = from_dlpack(torch.from_dlpack(Typed(array, "float8_e5m2" if dtype == np.uint8 else ""))).array
    assert back.shape == array.shape and back.dtype == array.dtype
    testing.assert_bitwise_equal(back.get(), array.get())
    assert not array.size or (back.data.ptr == array.data.ptr and back.strides == array.strides)


def test_an_array_goes_to_the_cpu_where_that_is_asked_for(cupy):
    array = cupy.arange(32, dtype=np.uint8)
    typed = Typed(array, "float8_e5m2")
    assert typed.__dlpack_device__() == (2, array.data.device_id)

    class OnHost:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **options):
            return typed.__dlpack__(**{**options, "dl_device": (1, 0)})

    back = from_dlpack(OnHost())
    assert back.name == "float8_e5m2"
    testing.assert_bitwise_equal(back.array.copy(), array.get())


# --- inputs ---------------------------------------------------------------------------------------


@named("dtype", DTYPES)
@named("kind", ["plain", "grad", "strided", "transposed"])
def test_tensors_give_the_bits_of_numpy_arrays(torch, kind, dtype):
    values = testing.matrix("gauss", (48, 96)).astype(DTYPES[dtype])
    tensor = tensor_of(torch, values)
    if kind == "grad":
        tensor.requires_grad_()
    elif kind == "strided":
        wider = tensor.new_zeros(97, 193)
        wider[1::2, 1::2] = tensor
        tensor = wider[1::2, 1::2]
    elif kind == "transposed":
        tensor = tensor_of(torch, np.ascontiguousarray(values.T)).T
    for rowwise, columnwise in (("mxfp8", "nvfp4"), ("fp8_e4m3", None), ("bf16", "fp8_block_128x128")):
        actual = hq.quantize(tensor, rowwise=rowwise, columnwise=columnwise)
        expected = hq.quantize(values, rowwise=rowwise, columnwise=columnwise)
        for (_, one), (_, other) in zip(actual.parts(), expected.parts(), strict=True):
            testing.assert_bitwise_equal(one.codes.get(), np.array(other.codes))
            testing.assert_bitwise_equal(one.scales.get(), np.array(other.scales))
    assert hq.amax(tensor).get() == hq.amax(values)


def test_other_functions_take_tensors(cupy, torch):
    x, w = (testing.matrix("gauss", shape, seed=i) for i, shape in enumerate(((64, 128), (48, 128))))
    tx, tw = tensor_of(torch, x), tensor_of(torch, w)
    cx, cw = cupy.asarray(x), cupy.asarray(w)
    hw = hq.quantize(cw, rowwise="mxfp8", columnwise="mxfp8")
    cupy.testing.assert_array_equal(tx @ hw.T, cx @ hw.T)
    cupy.testing.assert_array_equal(hq.matmul(tx, tw.T, bias=tw[:, 0]), hq.matmul(cx, cw.T, bias=cw[:, 0].copy()))
    assert hq.engine_for(tx, hw.T) == hq.engine_for(cx, hw.T)
    out, aux = torch.ones(64, 48, device="cuda"), torch.ones(64, 48, device="cuda")
    expected, spare = cupy.ones((64, 48), np.float32), cupy.ones((64, 48), np.float32)
    hx = hq.quantize(tx, rowwise="mxfp8")
    for _ in range(2):
        hq.matmul(hx, hw.T, out=(expected, spare), activation="gelu", accumulate=True)
        assert hq.matmul(hx, hw.T, out=(out, aux), activation="gelu", accumulate=True) is out
    torch.cuda.synchronize()
    testing.assert_bitwise_equal(out.cpu().numpy(), expected.get())
    testing.assert_bitwise_equal(aux.cpu().numpy(), spare.get())
    noop = torch.ones(1, dtype=torch.int32, device="cuda")
    before = hx.rowwise.codes.get()
    hq.requantize(hx, 2 * tx, noop=noop)
    testing.assert_bitwise_equal(hx.rowwise.codes.get(), before)
    whole = torch.full((1,), 3.0, device="cuda")
    assert hq.quantize(tx, rowwise="nvfp4", amax=whole).rowwise.amax.get() == 3
    fake = hq.fake_quantize(tx, "mxfp8")
    testing.assert_bitwise_equal(fake.get(), hq.fake_quantize(x, "mxfp8"))


@named("dtype", ["int32", "int64"])
def test_sizes_on_the_device_are_a_tensor(torch, dtype):
    x = testing.matrix("gauss", (64, 128))
    sizes = torch.tensor([10, 0, 54], dtype=getattr(torch, dtype), device="cuda")
    actual = hq.grouped_quantize(tensor_of(torch, x), sizes, rowwise="mxfp8")
    expected = hq.grouped_quantize(x, [10, 0, 54], rowwise="mxfp8")
    testing.assert_bitwise_equal(actual.dequantize().get(), expected.dequantize())
    ends = torch.tensor([10, 10, 64], dtype=torch.int32, device="cuda")
    again = hq.grouped_quantize(tensor_of(torch, x), offsets=ends, rowwise="mxfp8")
    testing.assert_bitwise_equal(again.dequantize().get(), expected.dequantize())


def test_operands_in_two_places_are_refused(cupy, torch):
    x = testing.matrix("gauss", (32, 32))
    for a, b in ((tensor_of(torch, x), x), (cupy.asarray(x), torch.from_numpy(x))):
        with pytest.raises(TypeError, match="a @ b needs both operands in one place"):
            hq.matmul(a, b)
    with pytest.raises(ValueError, match="amax is on the host and the values are on cuda:0"):
        hq.quantize(tensor_of(torch, x), rowwise="fp8_e4m3", amax=torch.ones(1))
    with pytest.raises(TypeError, match="out is on the host, a on cuda:0"):
        hq.matmul(tensor_of(torch, x), tensor_of(torch, x), out=torch.zeros(32, 32))


# --- streams --------------------------------------------------------------------------------------


def busy(cupy, seconds=0.05):
    """Keeps the current stream busy, so that whatever does not wait for it comes too early."""
    kernel = cupy.RawKernel(
        'extern "C" __global__ void wait(long long n) { long long t = clock64(); while (clock64() - t < n); }', "wait")
    kernel((1,), (1,), (np.int64(seconds * 1.5e9),))


@named("ours", ["null", "per thread", "non blocking"])
@named("theirs", ["default", "side"])
def test_our_stream_waits_for_that_of_torch(cupy, torch, ours, theirs):
    stream = {"null": cupy.cuda.Stream.null, "per thread": cupy.cuda.Stream.ptds,
              "non blocking": cupy.cuda.Stream(non_blocking=True)}[ours]
    x = testing.matrix("gauss", (64, 128))
    expected = hq.fake_quantize(x, "mxfp8")
    source, target = tensor_of(torch, x), torch.zeros(64, 128, device="cuda")
    hq.fake_quantize(cupy.asarray(x), "mxfp8")  # compiled before it is timed
    torch.cuda.synchronize()
    side = torch.cuda.default_stream() if theirs == "default" else torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        target.copy_(source)
        with stream:
            if ours == "per thread":  # which torch does not wait for, and says so
                with pytest.raises(TypeError, match="per-thread default stream is not supported"):
                    hq.fake_quantize(target, "mxfp8")
                return
            actual = hq.fake_quantize(target, "mxfp8")
            stream.synchronize()
    testing.assert_bitwise_equal(actual.get(), expected)


@named("side", [False, True])
def test_the_stream_of_torch_waits_for_ours(cupy, torch, side):
    stream = cupy.cuda.Stream(non_blocking=True)
    array = cupy.zeros(1 << 20, np.uint8)
    busy(cupy, 0.001)
    cupy.cuda.Device().synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
        with stream:
            busy(cupy)
            array.fill(7)
            tensor = torch.from_dlpack(Typed(array, "float8_e5m2"))
        total = tensor.view(torch.uint8).long().sum().item()
    assert total == 7 << 20


@named("stream", [-1, 1, 2], ids=["no order", "legacy default", "per thread"])
def test_every_stream_of_the_standard_is_taken(cupy, stream):
    array = cupy.arange(16, dtype=np.uint8)
    capsule = Typed(array, "float8_e4m3fn").__dlpack__(stream=stream, max_version=(1, 0))
    assert "dltensor_versioned" in repr(capsule)


# --- lifetimes ------------------------------------------------------------------------------------


def test_memory_is_freed_with_the_last_that_holds_it(cupy, torch):
    pool = cupy.get_default_memory_pool()
    gc.collect()
    before = pool.used_bytes()
    for _ in range(200):
        array = cupy.zeros(1 << 20, np.uint8)
        tensor = torch.from_dlpack(Typed(array, "float8_e4m3fn"))
        back = from_dlpack(tensor)
        del array, tensor
        assert pool.used_bytes() == before + (1 << 20)
        del back
        assert pool.used_bytes() == before
    torch.cuda.synchronize()
    ours = torch.cuda.memory_allocated()
    for _ in range(200):
        tensor = torch.zeros(1 << 20, device="cuda")
        view = from_dlpack(tensor).array[1:]
        del tensor
        assert torch.cuda.memory_allocated() == ours + (4 << 20)
        del view
        assert torch.cuda.memory_allocated() == ours
    assert pool.used_bytes() == before


def test_work_on_another_device_is_ordered_there(cupy, torch):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one device")
    x = testing.matrix("gauss", (64, 128))
    tensor = tensor_of(torch, x).to("cuda:1")
    actual = hq.fake_quantize(tensor, "mxfp8")
    assert actual.device.id == 1
    testing.assert_bitwise_equal(actual.get(), hq.fake_quantize(x, "mxfp8"))
    back = torch.from_dlpack(Typed(hq.quantize(tensor, rowwise="mxfp8").rowwise.codes, "float8_e4m3fn"))
    assert back.device.index == 1
