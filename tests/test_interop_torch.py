"""Parts as torch tensors and back, on the CPU and on a GPU: the same memory, torch's types, nothing that leaks."""

import gc
import weakref

import numpy as np
import pytest

import hqarray as hq
from hqarray import testing
from hqarray.layout import Tiled128x4

torch = pytest.importorskip("torch")

from hqarray.interop import torch as hqt  # noqa: E402
from hqarray.interop.torch_arrays import as_array, as_tensor  # noqa: E402
from hqarray.interop.torch_scaled_mm import tiled, untiled  # noqa: E402


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def numpy_or_cupy(device):
    return np if device == "cpu" else pytest.importorskip("cupy")


def quantized(device, shape=(40, 72), name="gauss", dtype=np.float32, seed=0, **formats):
    return hq.quantize(numpy_or_cupy(device).asarray(testing.matrix(name, shape, dtype, seed=seed)), **formats)


def host(array):
    if isinstance(array, torch.Tensor):
        array = as_array(array.cpu())
    return array.get() if hasattr(array, "get") else np.asarray(array)


def pointer(array):
    if isinstance(array, torch.Tensor):
        return array.data_ptr()
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def assert_same_part(actual, expected):
    assert (actual.format.storage, actual.shape) == (expected.format.storage, expected.shape)
    for field in ("codes", "scales", "global_scale"):
        ours, theirs = getattr(actual, field), getattr(expected, field)
        assert (ours is None) == (theirs is None), field
        if ours is not None and theirs.size:
            assert pointer(ours) == pointer(theirs), f"{field} is a copy"
            testing.assert_bitwise_equal(ours, theirs, name=field)


TYPES = {
    "fp8_e4m3": (torch.float8_e4m3fn, torch.float32), "fp8_e5m2": (torch.float8_e5m2, torch.float32),
    "fp8_block_128x128": (torch.float8_e4m3fn, torch.float32), "mxfp8": (torch.float8_e4m3fn, torch.float8_e8m0fnu),
    "mxfp8_e5m2": (torch.float8_e5m2, torch.float8_e8m0fnu), "mxfp6_e2m3": (torch.uint8, torch.float8_e8m0fnu),
    "mxfp4": (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu), "nvfp4": (torch.float4_e2m1fn_x2, torch.float8_e4m3fn),
    "bf16": (torch.bfloat16, None), "fp16": (torch.float16, None), "fp32": (torch.float32, None),
}

SHAPES = [(40, 72), (1, 128), (33, 259), (0, 48), (5, 0), (17, 1)]


# --- out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
def test_tensors_have_torchs_types(name, device):
    part = quantized(device, rowwise=name).rowwise
    codes, scales, whole = hqt.to_torch(part)
    assert codes.dtype == TYPES[name][0] and codes.device.type == device
    assert (None if scales is None else scales.dtype) == TYPES[name][1]
    assert (whole is not None) == part.format.storage.global_scale
    assert tuple(codes.shape) == part.codes.shape
    assert scales is None or tuple(scales.shape) == part.scales.shape


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", hq.FORMATS)
def test_a_pair_comes_back_bit_for_bit_in_the_same_memory(name, shape, device):
    array = quantized(device, shape, "wide", rowwise=name, columnwise=name)
    pair = hqt.to_torch(array)
    for tensors, part in zip(pair, (array.rowwise, array.columnwise), strict=True):
        for tensor, stored in zip(tensors, (part.codes, part.scales, part.global_scale), strict=True):
            if tensor is not None and tensor.numel():
                assert tensor.data_ptr() == pointer(stored)
                assert (host(tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor) == host(stored)).all()
    back = hqt.from_torch(pair, format=name, shape=shape, dtype=torch.float32)
    assert (back.shape, back.dtype) == (shape, np.float32)
    for direction, part in array.parts():
        assert_same_part(back.part(direction), part)
        assert back.part(direction).format == part.format


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp8_block_1x128", "mxfp8", "mxfp8_e5m2"])
def test_torch_decodes_codes_and_scales_to_the_same_values(name, device):
    """Oracle: torch's own casts from its types."""
    part = quantized(device, (40, 256), "wide", rowwise=name).rowwise
    codes, scales, _ = hqt.to_torch(part)
    rows, columns = part.format.storage.block or part.shape
    scales = scales.to(torch.float32).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    decoded = codes.to(torch.float32) * scales[: part.shape[0], : part.shape[1]]
    testing.assert_bitwise_equal(host(decoded), host(hq.HybridArray(part).dequantize()))


def test_what_torch_writes_is_what_the_part_holds(device):
    part = quantized(device, rowwise="nvfp4").rowwise
    codes, scales, whole = hqt.to_torch(part)
    codes.view(torch.uint8).fill_(0x21)
    scales.view(torch.uint8).fill_(0x38)  # 1.0
    whole.fill_(2.0)
    values = host(hq.HybridArray(part).dequantize())
    assert (values[:, 0::2] == 1).all() and (values[:, 1::2] == 2).all()


def test_a_part_of_somebody_elses_buffers_is_given_in_place(device):
    xp = numpy_or_cupy(device)
    codes, scales = xp.zeros((6, 64), np.uint8)[:, :48], xp.ones((6, 4), np.uint8)[:, ::2]
    part = hq.QuantizedArray.from_buffers(codes, scales, "mxfp8", (6, 48))
    tensors = hqt.to_torch(part)
    assert (tensors.codes.stride(), tensors.scales.stride()) == ((64, 1), (4, 2))
    assert_same_part(hqt.from_torch(tensors), part)


def test_read_only_memory_is_copied(device):
    """Torch cannot be told not to write into it."""
    if device != "cpu":
        pytest.skip("CuPy has no read-only memory")
    part = quantized(device, rowwise="nvfp4").rowwise
    part.buffers.memory.setflags(write=False)
    codes = hqt.to_torch(part).codes
    before = part.codes.copy()
    codes.view(torch.uint8).zero_()
    testing.assert_bitwise_equal(part.codes, before)
    frozen = np.zeros((6, 64), np.uint8)
    frozen.setflags(write=False)
    foreign = hq.QuantizedArray.from_buffers(frozen, np.ones((6, 2), np.uint8), "mxfp8", (6, 64))
    hqt.to_torch(foreign).codes.view(torch.uint8).fill_(1)
    assert not frozen.any()


def test_a_missing_part_is_none_in_the_pair(device):
    pair = hqt.to_torch(quantized(device, columnwise="mxfp8"))
    assert pair.rowwise is None
    back = hqt.from_torch(pair)
    assert (back.rowwise, back.shape) == (None, (40, 72))


def test_an_array_of_more_axes_keeps_its_shape_and_dtype(device):
    array = quantized(device, (2, 5, 64), rowwise="mxfp8", columnwise="nvfp4")
    back = hqt.from_torch(hqt.to_torch(array), shape=array.shape, dtype=torch.bfloat16)
    assert (back.shape, back.dtype.name) == ((2, 5, 64), "bfloat16")
    testing.assert_bitwise_equal(host(back.dequantize(dtype=np.float32)), host(array.dequantize()))


# --- in -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_block_1x128", "mxfp8", "mxfp4", "nvfp4", "bf16", "fp16", "fp32"])
def test_a_format_is_told_from_types_and_shapes(name, device):
    part = quantized(device, (256, 512), rowwise=name).rowwise
    assert hqt.from_torch(hqt.to_torch(part)).format == part.format


def test_codes_that_torch_made_are_taken(device):
    x = torch.linspace(-3, 3, 6 * 32, device=device).reshape(6, 32)
    part = hqt.from_torch((x.to(torch.float8_e5m2), torch.full((), 0.5, device=device), None))
    testing.assert_bitwise_equal(host(hq.HybridArray(part).dequantize()), host(x.to(torch.float8_e5m2).float() * 0.5))


def test_an_array_made_of_tensors_multiplies_like_the_one_they_are_of(device):
    a, b = (quantized(device, rowwise=f, seed=i) for i, f in enumerate(("fp8_block_1x128", "fp8_block_128x128")))
    again = hqt.from_torch(hqt.TorchPair(hqt.to_torch(a.rowwise)), format=a.rowwise.format)
    assert type(again.rowwise.buffers).__name__ == "Packed", "the GEMM would copy it"
    testing.assert_bitwise_equal(host(again @ b.T), host(a @ b.T))


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4", "mxfp6_e2m3"])
def test_a_part_may_go_there_and_back_again_and_again(name, device):
    """Its memory is then a tensor of torch's types, whose views are taken anew."""
    part = quantized(device, (33, 259), rowwise=name).rowwise
    tensors = hqt.to_torch(part)
    for _ in range(3):
        again = hqt.from_torch(tensors, format=name, shape=part.shape)
        tensors = hqt.to_torch(again)
        assert type(again.buffers).__name__ == "Packed"
        assert_same_part(again, part)
        assert tensors.codes.data_ptr() == pointer(part.codes)


def test_other_memory_is_never_taken_for_our_layout(device):
    """Codes whose padding may hold anything: they are copied at the GEMM, not read as they lie."""
    part = quantized(device, (16, 48), rowwise="mxfp8").rowwise
    codes, scales, _ = hqt.to_torch(part)
    moved = torch.full((16, 64), 0x7F, dtype=torch.uint8, device=device)
    moved[:, :48] = codes.view(torch.uint8)
    taken = hqt.from_torch((moved[:, :48].view(torch.float8_e4m3fn), scales, None))
    assert type(taken.buffers).__name__ == "Separate"
    testing.assert_bitwise_equal(host(hq.HybridArray(taken) @ hq.HybridArray(part).T),
                                 host(hq.HybridArray(part) @ hq.HybridArray(part).T))
    beside = torch.zeros(part.nbytes + 512, dtype=torch.uint8, device=device)  # as ours, in memory that is not
    for tensor in (codes, scales):
        start = tensor.data_ptr() - codes.data_ptr()
        beside.as_strided(tensor.shape, tensor.stride(), start).copy_(tensor.view(torch.uint8))
    views = [beside.as_strided(t.shape, t.stride(), t.data_ptr() - codes.data_ptr()) for t in (codes, scales)]
    taken = hqt.from_torch((*views, None), format="mxfp8")
    assert type(taken.buffers).__name__ == "Separate"
    testing.assert_bitwise_equal(host(taken.codes), host(part.codes))


REFUSED = {
    "ambiguous_scale": (lambda t: t("fp8_e4m3", (40, 72)), {}, ValueError, r"may be fp8_e4m3, fp8_block_128x128; pass"),
    "no_global_scale": (lambda t: t("nvfp4", (40, 72))._replace(global_scale=None), {}, ValueError, "are of no format"),
    "ambiguous_fp6": (lambda t: t("mxfp6_e2m3", (40, 72)), {}, ValueError, r"may be mxfp6_e2m3, mxfp6_e3m2; pass form"),
    "no_format": (lambda t: t("mxfp8", (40, 72))._replace(scales=torch.ones(3, 3)), {}, ValueError, "of no format"),
    "other_codes": (lambda t: t("mxfp8", (40, 72)), {"format": "mxfp8_e5m2"}, TypeError, "codes of mxfp8_e5m2 are"),
    "other_scales": (lambda t: t("mxfp8", (40, 72)), {"format": "fp8_e4m3"}, TypeError, "scales of fp8_e4m3 are torch"),
    "no_tensor": (lambda t: (np.zeros((4, 4)), None, None), {}, TypeError, "codes is ndarray, not a torch.Tensor"),
    "3-D": (lambda t: (torch.zeros(2, 3, 4), None, None), {}, ValueError, r"codes are \(outer, k\), these are \(2, 3"),
    "shape": (lambda t: t("mxfp8", (40, 72)), {"format": "mxfp8", "shape": (40, 71)}, ValueError, "have shape"),
    "device": (lambda t: t("mxfp8", (40, 72))._replace(scales=torch.zeros(2, device="meta")), {}, ValueError, "on met"),
    "tensor": (lambda t: torch.zeros(4, 4), {}, TypeError, "or TorchGroup, not Tensor; hqarray.quantize takes a tens"),
    "four": (lambda t: (None,) * 4, {}, TypeError, "from_torch takes a TorchPart"),
    "three_formats": (lambda t: hqt.TorchPair(t("mxfp8", (40, 72))), {"format": ("mxfp8",) * 3}, ValueError, "not 3: "),
    "nominal": (lambda t: hqt.TorchPair(t("mxfp8", (40, 72))), {"dtype": torch.float8_e5m2}, TypeError, "not torch.fl"),
    "3-D_shape": (lambda t: t("mxfp8", (40, 72)), {"shape": (2, 20, 72)}, ValueError, r"\(outer, k\), not \(2, 20, 72"),
    "other_shape": (lambda t: t("mxfp8", (40, 72)), {"shape": (20, 72)}, ValueError, "or half the columns in FP4; th"),
    "pair_format": (lambda t: t("mxfp8", (40, 72)), {"format": ("mxfp8", None)}, TypeError, "are those of a TorchPair"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_taken_is_refused(case):
    make, options, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        hqt.from_torch(make(lambda name, shape: hqt.to_torch(quantized("cpu", shape, rowwise=name).rowwise)), **options)


def test_what_is_no_part_is_refused():
    with pytest.raises(TypeError, match=r"takes a part, HybridArray or GroupedArray, not Tensor"):
        hqt.to_torch(torch.zeros(3))
    with pytest.raises(TypeError, match=r"dtype torch.complex64, which is not read"):
        as_array(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="dense tensors on the CPU or CUDA"):
        as_array(torch.zeros(3, device="meta"))


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8"])
def test_arrays_share_memory_whatever_their_strides(dtype, device):
    x = torch.arange(24, device=device).reshape(4, 6).to(getattr(torch, dtype))
    for view in (x, x.t(), x[:, ::2], x[1:, 2:], x[:0], x[:1].expand(3, 6)):
        array = as_array(view)
        assert (array.shape, array.dtype.name) == (tuple(view.shape), dtype)
        assert (host(array).astype(np.float64) == view.cpu().double().numpy()).all()
        back = as_tensor(array)
        assert back.dtype == view.dtype and torch.equal(back, view)
        if view.numel():
            assert back.data_ptr() == view.data_ptr() == pointer(array)


def test_tensors_outlive_the_part_and_free_it():
    array = quantized("cpu", rowwise="nvfp4", columnwise="mxfp8")
    expected = host(array.rowwise.codes).copy()
    memory = weakref.ref(array.rowwise.buffers.memory)
    pair = hqt.to_torch(array)
    del array
    gc.collect()
    assert memory() is not None and (host(pair.rowwise.codes.view(torch.uint8)) == expected).all()
    back = hqt.from_torch(pair, format=("nvfp4", "mxfp8"))
    del pair
    assert memory() is not None and (host(back.rowwise.codes) == expected).all()
    del back
    gc.collect()
    assert memory() is None, "the memory of a part leaks"


@pytest.mark.gpu
def test_memory_on_a_gpu_goes_back_to_whom_it_is_of():
    import cupy

    pool = cupy.get_default_memory_pool()
    x = cupy.ones((512, 512), np.float32)
    hq.quantize(x, rowwise="mxfp8")
    before = pool.used_bytes(), torch.cuda.memory_allocated()
    for _ in range(5):
        pair = hqt.to_torch(hq.quantize(x, rowwise="mxfp8", columnwise="nvfp4"))
        back = hqt.from_torch(pair)
        assert pool.used_bytes() > before[0]
        del pair, back
        with hqt.on_torch("cuda"):
            array = hq.quantize(x, rowwise="mxfp8")
            assert torch.cuda.memory_allocated() > before[1], "memory is not from torch's allocator"
        part = hqt.to_torch(array.rowwise)
        assert part.codes.untyped_storage().data_ptr() == pointer(array.rowwise.codes)
        del array, part
    gc.collect()
    assert (pool.used_bytes(), torch.cuda.memory_allocated()) == before


@pytest.mark.gpu
def test_torchs_stream_waits_for_cupys_and_cupys_for_torchs():
    import cupy

    x = cupy.asarray(testing.matrix("gauss", (4096, 4096)))
    expected = host(hq.quantize(x, rowwise="mxfp8").rowwise.codes)
    cupys, torchs = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(3):
        with cupys, torch.cuda.stream(torchs):
            for _ in range(20):
                part = hq.quantize(x, rowwise="mxfp8").rowwise  # work that torch would overtake
            copy = hqt.to_torch(part).codes.clone()
            copy.view(torch.uint8).add_(0)
            back = hqt.from_torch((copy, hqt.to_torch(part).scales, None), format="mxfp8")
            taken = back.codes.copy()
        torch.cuda.synchronize()
        assert (host(copy.view(torch.uint8)) == expected).all() and (host(taken) == expected).all()


# --- tiles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 9), (300, 3)], ids=str)
def test_tiles_are_those_of_cublaslt(shape):
    scales = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    given = torch.from_numpy(scales).view(torch.float8_e8m0fnu)
    made = tiled(given, *shape)
    assert (host(made.view(torch.uint8)) == Tiled128x4().tile(scales).reshape(-1)).all()
    assert (host(untiled(made, *shape).view(torch.uint8)) == scales).all()
    i, j = np.indices(shape)
    tiles = -(-shape[1] // 4)
    at = ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
    assert (host(made.view(torch.uint8))[at] == scales).all()
