"""What the public functions are given: tensors of torch and arrays of JAX give the bits that NumPy arrays give."""

import re
from dataclasses import is_dataclass

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import testing
from hqarray.arrays import QuantizedArray
from hqarray.dlpack import Typed

named = pytest.mark.parametrize
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]
X = testing.matrix("gauss", (24, 48))
W = testing.matrix("gauss", (40, 48), seed=1)
STACK = testing.matrix("gauss", (24, 48), seed=2).reshape(3, 8, 48)


# --- arrays of other libraries --------------------------------------------------------------------


def _torch(array):
    torch = pytest.importorskip("torch")
    bits = array.view(np.int16) if array.dtype == BFLOAT16 else array
    tensor = torch.from_numpy(np.array(bits))
    return tensor.view(torch.bfloat16) if array.dtype == BFLOAT16 else tensor


def _torch_grad(array):
    tensor = _torch(array)
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def _torch_strided(array):
    """Every second element of a larger tensor, along both axes."""
    tensor = _torch(array)
    wider = tensor.new_zeros([2 * n + 1 for n in tensor.shape])
    view = wider[tuple(slice(1, None, 2) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


def _torch_transposed(array):
    return _torch(array.T).permute(*reversed(range(array.ndim)))


def _jax(array):
    jnp = pytest.importorskip("jax.numpy")
    if array.dtype.itemsize == 8:  # JAX has 32-bit integers unless it is asked
        array = array.astype(np.int32)
    return jnp.asarray(array)


LIBRARIES = {"torch": _torch, "torch grad": _torch_grad, "torch strided": _torch_strided,
             "torch transposed": _torch_transposed, "jax": _jax}

CALLS = {
    "quantize": lambda f, x, w, s: hq.quantize(f(x), rowwise="mxfp8", columnwise="nvfp4"),
    "quantize derived": lambda f, x, w, s: hq.quantize(
        f(x), rowwise="mxfp4", columnwise="fp8_block_128x128", columnwise_source="rowwise_dequantized"),
    "quantize unquantized": lambda f, x, w, s: hq.quantize(f(x), rowwise=hq.HighPrecision(), columnwise="bf16"),
    "quantize amax": lambda f, x, w, s: hq.quantize(f(x), rowwise="fp8_e4m3", amax=f(np.array([3], np.float32))),
    "requantize": lambda f, x, w, s: _after(
        hq.quantize(x, rowwise="mxfp8", columnwise="nvfp4"), lambda a: hq.requantize(a, f(2 * x))),
    "requantize noop": lambda f, x, w, s: _after(
        hq.quantize(x, rowwise="mxfp8"), lambda a: hq.requantize(a, f(2 * x), noop=f(np.array([1], np.int32)))),
    "amax": lambda f, x, w, s: hq.amax(f(x)),
    "fake_quantize": lambda f, x, w, s: hq.fake_quantize(f(x), "mxfp8"),
    "compare": lambda f, x, w, s: hq.compare(f(x), ["mxfp8", "nvfp4"]).to_dict(),
    "engine_for": lambda f, x, w, s: hq.engine_for(f(x), f(w.T)),
    "matmul plain": lambda f, x, w, s: hq.matmul(f(x), f(w.T), bias=f(w[:, 0].copy()), activation="gelu"),
    "matmul right": lambda f, x, w, s: hq.quantize(x, rowwise="mxfp8") @ f(w.T),
    "matmul left": lambda f, x, w, s: f(x) @ hq.quantize(w.T, columnwise="mxfp8"),
    "linear": lambda f, x, w, s: _linear(f(x), f(w), f),
    "grouped_quantize sizes": lambda f, x, w, s: hq.grouped_quantize(
        f(x), f(np.array([5, 0, 19])), rowwise="mxfp8", columnwise="nvfp4"),
    "grouped_quantize offsets": lambda f, x, w, s: hq.grouped_quantize(
        f(x), offsets=f(np.array([5, 5, 24], np.int32)), rowwise="nvfp4", amax=f(np.array([1, 2, 3], np.float32))),
    "grouped_quantize out": lambda f, x, w, s: hq.grouped_quantize(
        f(2 * x), f(np.array([5, 19])), out=hq.grouped_quantize(x, [5, 19], rowwise="mxfp8"),
        noop=f(np.zeros(1, np.float32))),
    "split_quantize": lambda f, x, w, s: hq.split_quantize(
        f(x), f(np.array([4, 8, 12])), ["mxfp8", None, ("nvfp4", "mxfp8")]),
    "from_stacked": lambda f, x, w, s: hq.GroupedArray.from_stacked(f(s), rowwise="mxfp8"),
    "from_stacked unquantized": lambda f, x, w, s: hq.GroupedArray.from_stacked(f(s)),
    "from_arrays": lambda f, x, w, s: hq.GroupedArray.from_arrays([f(x), f(w)], rowwise="mxfp8", columnwise="mxfp4"),
    "grouped matmul bias": lambda f, x, w, s: hq.matmul(
        hq.GroupedArray.from_stacked(s, rowwise="mxfp8"),
        hq.GroupedArray.from_stacked(s, rowwise="mxfp8").T, bias=f(s[0, :, 0].copy())),
}


def _after(array, change):
    change(array)
    return array


def _linear(x, w, f):
    y, saved = hq.linear_forward(x, w, "mxfp8")
    return [y, *hq.linear_backward(f(y), saved)]


def assert_same(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict) or (is_dataclass(expected) and isinstance(expected, hq.Engine)):
        assert actual == expected
    elif isinstance(expected, hq.GroupedArray):
        assert_same(list(actual), list(expected))
    else:
        testing.assert_bitwise_equal(actual, expected)


@named("dtype", DTYPES, ids=str)
@named("library", LIBRARIES)
@named("call", CALLS)
def test_arrays_of_other_libraries_give_the_bits_of_numpy_ones(call, library, dtype):
    values = [array.astype(dtype) for array in (X, W, STACK)]
    expected = CALLS[call](lambda array: array, *values)
    assert_same(CALLS[call](LIBRARIES[library], *values), expected)


@named("library", ["torch", "jax"])
def test_values_of_other_libraries_arrive_bit_for_bit(library):
    """A second oracle: an unquantized part holds the very bits of a bfloat16 tensor, all that there are."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    part = hq.quantize(LIBRARIES[library](bits.view(BFLOAT16)), rowwise="bf16").rowwise
    finite = np.isfinite(bits.view(BFLOAT16).astype(np.float32))
    testing.assert_bitwise_equal(part.codes.view(np.uint16)[finite], bits[finite])


def test_fp8_codes_are_those_of_torch():
    """A second oracle: torch's own cast of what has scale one (E4M3 saturates here, torch's makes NaN: in range)."""
    torch = pytest.importorskip("torch")
    tensor = (torch.from_numpy(X) * 4).clamp(-448, 448).bfloat16()
    array = hq.quantize(tensor, rowwise="fp8_e4m3", amax=torch.tensor([448.0]))
    testing.assert_bitwise_equal(
        array.rowwise.codes.copy(), tensor.to(torch.float8_e4m3fn).view(torch.uint8).numpy())


# --- outputs --------------------------------------------------------------------------------------


@named("dtype", DTYPES, ids=str)
@named("make", ["torch", "torch strided", "torch transposed"])
def test_products_are_written_into_tensors(make, dtype):
    torch = pytest.importorskip("torch")
    a, b = hq.quantize(X, rowwise="mxfp8"), hq.quantize(W.T, columnwise="mxfp8")
    expected, spare = (np.ones((24, 40), dtype) for _ in range(2))
    hq.matmul(a, b, out=(expected, spare), activation="gelu", accumulate=True)
    out, aux = (LIBRARIES[make](np.ones((24, 40), dtype)) for _ in range(2))
    assert hq.matmul(a, b, out=(out, aux), activation="gelu", accumulate=True) is out
    for tensor, array in ((out, expected), (aux, spare)):
        assert_same(tensor.float().numpy(), array.astype(np.float32))
    group = hq.GroupedArray.from_stacked(STACK, rowwise="mxfp8")
    tensor = torch.zeros(3, 8, 8)
    assert hq.matmul(group, group.T, out=tensor) is tensor
    assert_same(tensor.numpy(), group @ group.T)


def test_the_gradient_of_a_weight_is_added_to_a_tensor():
    torch = pytest.importorskip("torch")
    y, saved = hq.linear_forward(X, W, "mxfp8")
    total = torch.ones(W.shape)
    _, dw = hq.linear_backward(y, saved, dw=total)
    assert dw is total
    assert_same(total.numpy(), hq.linear_backward(y, saved, dw=np.ones(W.shape, np.float32))[1])


def test_what_must_not_be_written_is_refused_as_output():
    jnp, torch = pytest.importorskip("jax.numpy"), pytest.importorskip("torch")
    frozen = np.zeros((24, 24), np.float32)
    frozen.setflags(write=False)
    for out, message in (
        (jnp.zeros((24, 24)), r"out \(ArrayImpl\) is read-only, or its library does not say otherwise; leave it out"),
        (torch.zeros(24, 24, requires_grad=True), r"out requires grad, .*; pass out\.detach\(\)"),
        (frozen, "out is read-only; pass an array that may be written"),
        (Typed(frozen), r"out \(Typed\) is read-only"),
    ):
        with pytest.raises(ValueError, match=message):
            hq.matmul(X, X.T, out=out)
    with pytest.raises(ValueError, match="aux requires grad"):
        hq.matmul(X, X.T, out=(torch.zeros(24, 24), torch.zeros(24, 24, requires_grad=True)))
    with pytest.raises(ValueError, match="out and aux share memory"):
        hq.matmul(X, X.T, out=[(t := torch.zeros(24, 24)), (t, t)][1])


# --- somebody else's parts ------------------------------------------------------------------------


@named("library", ["torch", "jax"])
@named("format", ["fp8_e4m3", "fp8_e5m2", "fp8_block_1x128", "fp8_block_128x128", "mxfp8", "mxfp4", "nvfp4", "bf16"])
def test_a_part_is_made_from_typed_tensors_and_from_bytes(format, library):
    module = pytest.importorskip("torch" if library == "torch" else "jax.numpy")
    part = hq.quantize(X, rowwise=format).rowwise
    storage = part.format.storage
    names = [name if name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu") else ""
             for name in (storage.element.dtype_name, storage.scale_dtype_name)]
    for chosen in ([names, ["", ""]] if names != ["", ""] else [names]):
        codes, scales = (module.from_dlpack(Typed(np.ascontiguousarray(array), name))
                         for array, name in zip((part.codes, part.scales), chosen, strict=True))
        whole = None if part.global_scale is None else module.from_dlpack(Typed(part.global_scale))
        made = QuantizedArray.from_buffers(
            codes, None if storage.scale == "none" else scales, format, part.shape, global_scale=whole)
        testing.assert_bitwise_equal(hq.HybridArray(made).dequantize(), hq.HybridArray(part).dequantize())
        pointer = codes.data_ptr() if library == "torch" else codes.unsafe_buffer_pointer()
        assert made.codes.ctypes.data == pointer


def test_fp4_codes_of_torch_are_a_part():
    torch = pytest.importorskip("torch")
    part = hq.quantize(X, rowwise="mxfp4").rowwise
    codes = torch.from_numpy(part.codes.copy()).view(torch.float4_e2m1fn_x2)
    scales = torch.from_numpy(part.scales.copy()).view(torch.float8_e8m0fnu)
    made = QuantizedArray.from_buffers(codes, scales, "mxfp4", part.shape)
    testing.assert_bitwise_equal(made.codes.copy(), part.codes.copy())


def test_codes_of_another_type_are_refused():
    torch = pytest.importorskip("torch")
    part = hq.quantize(X, rowwise="mxfp8").rowwise
    codes, scales = (torch.from_numpy(array.copy()) for array in (part.codes, part.scales))
    for options, message in (
        ((codes.view(torch.float8_e5m2), scales), "codes of mxfp8 are uint8 or float8_e4m3fn, these are float8_e5m2"),
        ((codes, scales.view(torch.float8_e4m3fn)), "scales of mxfp8 are uint8 or float8_e8m0fnu, these are float8"),
        ((codes.view(torch.int8), scales), "codes of mxfp8 are uint8 or float8_e4m3fn, these are int8"),
    ):
        with pytest.raises(TypeError, match=message):
            QuantizedArray.from_buffers(*options, "mxfp8", part.shape)


# --- errors ---------------------------------------------------------------------------------------


def test_a_tensor_elsewhere_is_refused_with_the_remedy():
    torch = pytest.importorskip("torch")
    remedy = re.escape("; pass a dense copy of it on the CPU or a CUDA device, in float32 if its type is not known")
    for tensor, what in ((torch.empty(4, 4, device="meta"), "meta"), (torch.eye(4).to_sparse(), "layout")):
        with pytest.raises(TypeError, match=rf"values \(Tensor, torch.float32\) cannot be read .*{what}.*{remedy}"):
            hq.quantize(tensor, rowwise="mxfp8")

    class Metal:
        def __dlpack_device__(self):
            return 8, 0

        def __dlpack__(self, **options):
            raise AssertionError

    with pytest.raises(TypeError, match=rf"neither the CPU nor CUDA \(DLPack's type 8\){remedy}"):
        hq.amax(Metal())


def test_codes_are_no_values():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"values has dtype float8_e4m3fn; float32, .* are read, use \.astype, or Q"):
        hq.quantize(torch.zeros(4, 4, dtype=torch.float8_e4m3fn), rowwise="mxfp8")
    with pytest.raises(TypeError, match=r"values has dtype int64; float32, float16, bfloat16 and float64 are read"):
        hq.quantize(torch.zeros(4, 4, dtype=torch.int64), rowwise="mxfp8")


def test_an_array_inside_jit_is_refused():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"DLPack: Abstract tracer value.*interop\.jax\.fake_quantize alone runs"):
        jax.jit(lambda x: hq.fake_quantize(x, "mxfp8"))(X)
