"""JAX: parts with JAX's types and back, and fake quantization inside its transformations."""

import dataclasses
import re
import subprocess
import sys
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import testing
from hqarray.formats import FORMATS
from hqarray.layout import unpack_nibbles

jax = pytest.importorskip("jax")
jnp = jax.numpy
from hqarray.interop import jax as hqj  # noqa: E402

named = pytest.mark.parametrize
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [(20, 48), (19, 33), (128, 256), (1, 1), (0, 32), (5, 0)]
X = testing.matrix("gauss", (24, 64))


def aligned(part):
    """The part in memory that begins on a multiple of 64 bytes, as JAX wants it."""
    base = part.buffers.base
    memory = np.zeros(base.size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    memory = memory[start : start + base.size]
    memory[:] = base
    buffers = type(part.buffers).of(memory, part.buffers.layout, part.global_scale is not None, part.amax is not None)
    return hq.QuantizedArray(part.format, part.shape, buffers)


# --- parts ----------------------------------------------------------------------------------------


@named("shape", SHAPES, ids=str)
@named("format", FORMATS)
def test_parts_go_to_jax_and_come_back_bit_for_bit(format, shape):
    part = hq.quantize(testing.matrix("gauss", shape), rowwise=format).rowwise
    there = hqj.to_jax(part)
    storage = part.format.storage
    assert all(isinstance(array, jax.Array) for array in there if array is not None)
    assert (there.scales is None, there.global_scale is None) == (storage.scale == "none", not storage.global_scale)
    back = hqj.from_jax(there, format=part.format, shape=shape)
    assert back.shape == shape and back.format == part.format
    for one, other in ((back.codes, part.codes), (back.scales, part.scales), (back.global_scale, part.global_scale)):
        if other is not None:
            testing.assert_bitwise_equal(np.array(one), np.array(other))
    testing.assert_bitwise_equal(hq.HybridArray(back).dequantize(), hq.HybridArray(part).dequantize())


@named("format", FORMATS)
def test_jax_reads_codes_and_scales_as_we_do(format):
    """A second oracle: JAX's own casts of its types, multiplied as the formats say."""
    part = hq.quantize(X, rowwise=format).rowwise
    codes, scales, whole = hqj.to_jax(part)
    storage = part.format.storage
    if storage.element.stored_bits == 4:
        codes = jax.lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(X.shape)
        testing.assert_bitwise_equal(np.asarray(codes).view(np.uint8), unpack_nibbles(part.codes, X.shape[1]))
    elif storage.element.bits == 6:
        codes = np.asarray(codes).view(getattr(ml_dtypes, storage.element.dtype_name))
    else:
        assert codes.dtype.name == storage.element.dtype_name
    values = np.asarray(codes).astype(np.float64)
    if scales is not None:
        assert scales.dtype.name == storage.scale_dtype_name
        rows, columns = np.minimum(storage.block or X.shape, X.shape)
        spread = np.asarray(scales).astype(np.float64).repeat(rows, 0).repeat(columns, 1)
        values *= spread[: X.shape[0], : X.shape[1]]
    values *= 1 if whole is None else np.asarray(whole).astype(np.float64).reshape(-1, 1)
    testing.assert_bitwise_equal(values.astype(np.float32), hq.HybridArray(part).dequantize())


@named("format", FORMATS)
def test_memory_that_jax_can_take_is_shared(format):
    part = aligned(hq.quantize(testing.matrix("gauss", (128, 512)), rowwise=format).rowwise)
    there = hqj.to_jax(part)
    assert there.codes.unsafe_buffer_pointer() == part.codes.ctypes.data
    back = hqj.from_jax(there, format=format)
    assert back.codes.ctypes.data == part.codes.ctypes.data and not back.codes.flags.writeable
    if there.scales is not None and part.scales.ctypes.data % 64 == 0 and (
            part.scales.flags.c_contiguous or part.scales.flags.f_contiguous):
        assert there.scales.unsafe_buffer_pointer() == part.scales.ctypes.data


def test_memory_that_must_not_change_is_copied():
    part = aligned(hq.quantize(testing.matrix("gauss", (128, 512)), rowwise="mxfp8").rowwise)
    part.buffers.memory.setflags(write=False)
    assert hqj.to_jax(part).codes.unsafe_buffer_pointer() != part.codes.ctypes.data


def test_memory_lives_as_long_as_the_array_of_jax():
    x = testing.matrix("gauss", (128, 512))
    part = aligned(hq.quantize(x, rowwise="mxfp8").rowwise)
    there, expected = hqj.to_jax(part), part.codes.copy()
    del part
    noise = [np.full(1 << 16, 0xAA, np.uint8) for _ in range(50)]
    testing.assert_bitwise_equal(np.asarray(there.codes).view(np.uint8), expected)
    assert len(noise) == 50


@named(("rowwise", "columnwise"), [("mxfp8", "nvfp4"), ("nvfp4", None), (None, "mxfp4"), ("bf16", "mxfp6_e2m3")])
def test_a_pair_goes_and_comes(rowwise, columnwise):
    array = hq.quantize(X.astype(BFLOAT16), rowwise=rowwise, columnwise=columnwise)
    pair = hqj.to_jax(array)
    assert (pair.rowwise is None, pair.columnwise is None) == (rowwise is None, columnwise is None)
    back = hqj.from_jax(pair, format=(rowwise, columnwise), shape=X.shape, dtype=jnp.bfloat16)
    assert back.shape == array.shape and back.dtype == array.dtype
    testing.assert_bitwise_equal(back.dequantize(), array.dequantize())
    if columnwise is not None and rowwise is not None:
        testing.assert_bitwise_equal(back.T.dequantize(source="rowwise"), array.T.dequantize(source="rowwise"))
    own = hqj.from_jax(pair, format=(rowwise, columnwise), shape=X.shape).copy()
    hq.requantize(own, X)


@named("format", FORMATS)
def test_a_format_is_told_from_types_and_shapes_but_not_from_bytes(format):
    """Only its scales tell NVFP4: JAX has bytes for FP4 and FP6. How a part was rounded is not told."""
    part = hq.quantize(testing.matrix("gauss", (256, 512)), rowwise=format).rowwise
    if format in ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2"):
        with pytest.raises(ValueError, match=r"may be mxfp6_e2m3, mxfp6_e3m2, mxfp4; pass format="):
            hqj.from_jax(hqj.to_jax(part))
        return
    back = hqj.from_jax(hqj.to_jax(part))
    assert dataclasses.replace(back.format.storage, pow2=part.format.storage.pow2) == part.format.storage
    testing.assert_bitwise_equal(hq.HybridArray(back).dequantize(), hq.HybridArray(part).dequantize())


@named("k", [64, 33])
@named("format", ["mxfp4", "nvfp4"])
def test_fp4_values_of_jax_are_packed_and_tell_their_format(format, k):
    part = hq.quantize(testing.matrix("gauss", (24, k)), rowwise=format).rowwise
    codes, scales, whole = hqj.to_jax(part)
    values = jax.lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(24, -1)[:, :k]
    back = hqj.from_jax((values, scales, whole))
    assert (back.format.storage, back.shape) == (part.format.storage, (24, k))
    testing.assert_bitwise_equal(hq.HybridArray(back).dequantize(), hq.HybridArray(part).dequantize())


def test_the_formats_of_a_pair_are_told_for_each_part():
    array = hq.quantize(testing.matrix("gauss", (256, 512)), rowwise="mxfp8", columnwise="nvfp4")
    back = hqj.from_jax(hqj.to_jax(array))
    assert (back.rowwise.format.name, back.columnwise.format.name) == ("mxfp8", "nvfp4")


@named(("call", "error", "message"), [
    (lambda p: hqj.to_jax(X), TypeError, "to_jax takes a part or a HybridArray, not ndarray"),
    (lambda p: hqj.to_jax(hq.grouped_quantize(X, [len(X)], rowwise="mxfp8")), TypeError,
     "[to_jax(member) for member in g] gives a pair for each"),
    (lambda p: hqj.from_jax(p.codes), TypeError, "not ArrayImpl; hqarray.quantize takes an array of values"),
    (lambda p: hqj.from_jax(hqj.JaxPair(p), format=("mxfp8",) * 3), ValueError, "columnwise), not 3: "),
    (lambda p: hqj.from_jax((np.asarray(p.codes), p.scales), format="mxfp8"), TypeError,
     "codes is ndarray, not a jax.Array; jnp.asarray(...) makes one"),
    (lambda p: hqj.from_jax(p, format="mxfp8_e5m2"), TypeError,
     "codes of mxfp8_e5m2 are uint8 or float8_e5m2, these are float8_e4m3fn"),
    (lambda p: hqj.from_jax(p, format="mxfp8", shape=(3, 3)), ValueError,
     "or half the columns in FP4; these have (24, 64)"),
    (lambda p: hqj.from_jax(p, format=("mxfp8", None)), TypeError, "are those of a JaxPair"),
    (lambda p: hqj.from_jax(p, format="mxfp8", dtype="float32"), TypeError, "are those of a JaxPair"),
    (lambda p: hqj.from_jax((p.codes, jnp.ones((3, 3)))), ValueError, "float32 (3, 3) are of no format; pass format="),
    (lambda p: hqj.from_jax((None, p.scales)), TypeError, "codes is NoneType, not a jax.Array"),
    (lambda p: hqj.from_jax(p._replace(codes=p.codes[None]), format="mxfp8"), ValueError,
     "codes are (outer, k), these are (1, 24, 64)"),
    (lambda p: jax.jit(lambda c: hqj.from_jax((c, p.scales), format="mxfp8").codes)(p.codes), TypeError,
     "codes is traced and has no memory: call from_jax outside jit, grad and vmap"),
])
def test_what_is_no_part_is_refused(call, error, message):
    part = hqj.to_jax(hq.quantize(X, rowwise="mxfp8").rowwise)
    with pytest.raises(error, match=re.escape(message)):
        call(part)


# --- fake quantization ----------------------------------------------------------------------------

TRANSFORMED = {
    "eager": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "primal of grad": lambda f, x: jax.vjp(f, x)[0],
    "primal of jvp in jit": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,))[0])(x),
    "scan": lambda f, x: jax.lax.scan(lambda carry, _: (carry, f(carry)), x, None, length=2)[1][1],
    "checkpoint": lambda f, x: jax.vjp(jax.checkpoint(f), x)[0],
}


@named("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@named("transformed", TRANSFORMED)
@named("format", ["fp8_e4m3", "fp8_block_128x128", "mxfp8", "mxfp6_e3m2", "mxfp4", "nvfp4", "nvfp4_16x16", "bf16"])
def test_fake_quantize_has_the_bits_of_the_library(format, transformed, dtype):
    with np.errstate(over="ignore"):
        values = testing.matrix("wide", (24, 40)).astype(dtype)
    actual = TRANSFORMED[transformed](partial(hqj.fake_quantize, format=format), jnp.asarray(values))
    assert isinstance(actual, jax.Array) and actual.dtype == values.dtype
    testing.assert_bitwise_equal(np.asarray(actual), hq.fake_quantize(values, format))


@named("in_jit", [False, True])
@named("shape", [(0, 32), (3, 0), (7,), (2, 3, 40)], ids=str)
def test_any_shape_is_taken(shape, in_jit):
    values = testing.matrix("gauss", (6, 40)).ravel()[: int(np.prod(shape))].reshape(shape)
    f = partial(hqj.fake_quantize, format="mxfp8")
    actual = (jax.jit(f) if in_jit else f)(jnp.asarray(values))
    testing.assert_bitwise_equal(np.asarray(actual), hq.fake_quantize(values, "mxfp8"))


@named("dtype", [np.float32, BFLOAT16], ids=str)
@named("format", ["fp8_e4m3", "fp8_block_1x128", "mxfp8", "nvfp4"])
def test_subnormals_are_not_flushed_inside_jit(format, dtype):
    """XLA's threads have the processor's flush-to-zero set."""
    values = (testing.matrix("gauss", (64, 128)) * np.float32(1e-39)).astype(dtype)
    f = jax.jit(lambda x: hqj.fake_quantize(x, format))
    expected = hq.fake_quantize(values, format)
    testing.assert_bitwise_equal(np.asarray(f(jnp.asarray(values))), expected)
    assert np.count_nonzero(expected)


@named("in_jit", [False, True])
def test_a_given_amax_may_be_traced(in_jit):
    f = lambda x, a: hqj.fake_quantize(x, "nvfp4", amax=a)  # noqa: E731
    for amax in (3.0, jnp.float32(3), jnp.full((1, 1), 3, jnp.float32)):
        actual = (jax.jit(f) if in_jit else f)(jnp.asarray(X), amax)
        testing.assert_bitwise_equal(np.asarray(actual), hq.fake_quantize(X, "nvfp4", amax=3.0))


def test_vmap_quantizes_each_example_as_if_alone():
    stack = X.reshape(3, 8, 64) * np.array([1, 10, 100], np.float32)[:, None, None]
    for format in ("fp8_e4m3", "nvfp4_16x16"):
        f = jax.vmap(partial(hqj.fake_quantize, format=format))
        expected = np.stack([hq.fake_quantize(matrix, format) for matrix in stack])
        for call in (f, jax.jit(f)):
            testing.assert_bitwise_equal(np.asarray(call(jnp.asarray(stack))), expected)


@named("in_jit", [False, True])
@named("format", ["mxfp8", "nvfp4"])
def test_the_derivative_is_that_of_the_identity(format, in_jit):
    """By the chain rule on paper: d/dx sum(fq(x)^2 c) = 2 fq(x) c, and along t the sum of that times t."""
    c = testing.matrix("gauss", X.shape, seed=3)
    f = lambda x: (hqj.fake_quantize(x, format) ** 2 * c).sum()  # noqa: E731
    gradient = jax.grad(f)
    x, expected = jnp.asarray(X), 2 * hq.fake_quantize(X, format) * c
    np.testing.assert_allclose((jax.jit(gradient) if in_jit else gradient)(x), expected, rtol=1e-6)
    tangent = jax.jvp(f, (x,), (jnp.ones_like(x),))[1]
    np.testing.assert_allclose(tangent, expected.astype(np.float64).sum(), rtol=1e-5)
    scaled = jax.grad(lambda x, a: hqj.fake_quantize(x, "fp8_e4m3", amax=a).sum(), argnums=(0, 1))(x, jnp.float32(0.5))
    assert (scaled[0] == 1).all() and scaled[1] == 0


def test_a_step_of_training_with_fake_quantized_operands_descends():
    """The straight-through gradient as a whole: the loss of a small regression falls under jit."""
    target = testing.matrix("gauss", (64, 8), seed=5)
    x, y = jnp.asarray(X), jnp.asarray(X @ target)

    @jax.jit
    def step(w):
        def loss(w):
            return jnp.mean((hqj.fake_quantize(x, "mxfp8") @ hqj.fake_quantize(w.T, "mxfp8").T - y) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return value, w - 0.3 * gradient

    w, losses = jnp.zeros((64, 8)), []
    for _ in range(40):
        value, w = step(w)
        losses.append(float(value))
    assert losses[-1] < 0.05 * losses[0]


@named("in_jit", [False, True])
@named(("call", "error", "message"), [
    (lambda x: hqj.fake_quantize(x.astype(jnp.int32), "mxfp8"), TypeError, "values has dtype int32; float32"),
    (lambda x: hqj.fake_quantize(x[0, 0], "mxfp8"), ValueError, "values is 0-D"),
    (lambda x: hqj.fake_quantize(x, "mxfp9"), ValueError, "unknown format 'mxfp9'"),
    (lambda x: hqj.fake_quantize(x, "mxfp8", amax=1.0), ValueError, "amax= is for formats with one amax per matrix"),
    (lambda x: hqj.fake_quantize(x, "nvfp4", amax=x), ValueError, "amax is one float32 (hq.amax(x) makes it), not of"),
    (lambda x: hqj.fake_quantize(x, hq.NVFP4(rounding="stochastic")), ValueError, "rounds at random and needs seed="),
    (lambda x: hqj.fake_quantize(x, "nvfp4", seed=jnp.uint32(1)), TypeError, "seed is an integer here, which is fixed"),
])
def test_what_cannot_be_quantized_is_refused_when_it_is_traced(call, error, message, in_jit):
    with pytest.raises(error, match=re.escape(message)):
        (jax.jit(call) if in_jit else call)(jnp.asarray(X))


def test_sharded_arrays_and_float64_are_taken():
    code = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_x64", True)
import numpy as np, jax.numpy as jnp, hqarray as hq
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from hqarray.interop import jax as hqj
x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
sharded = jax.device_put(x, NamedSharding(Mesh(jax.devices(), "i"), PartitionSpec("i")))
assert len(sharded.devices()) == 2
f = lambda x: hqj.fake_quantize(x, "fp8_e4m3")
for y in (f(sharded), jax.jit(f)(sharded)):
    assert (np.asarray(y) == hq.fake_quantize(x, "fp8_e4m3")).all()
wide = jnp.asarray(x, jnp.float64)
for call in (f, jax.jit(f)):
    assert (np.asarray(call(wide)) == hq.fake_quantize(x, "fp8_e4m3")).all() and call(wide).dtype == jnp.float32
assert jax.grad(lambda x: f(x).sum())(wide).dtype == jnp.float64
print("done")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "done\n", run.stderr


def test_without_jax_the_error_says_what_to_install():
    code = "import sys; sys.modules['jax'] = None\nimport hqarray.interop.jax"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: hqarray.interop.jax needs JAX: pip install 'hqarray[jax]'" in run.stderr


# --- GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@named("format", ["fp8_e4m3", "mxfp8", "nvfp4", "bf16"])
def test_parts_and_fake_quantization_on_a_gpu(format):
    cupy = pytest.importorskip("cupy")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX here has no CUDA")
    x = testing.matrix("gauss", (256, 512))
    part = hq.quantize(cupy.asarray(x), rowwise=format).rowwise
    there = hqj.to_jax(part)
    assert there.codes.unsafe_buffer_pointer() == part.codes.data.ptr
    back = hqj.from_jax(there, format=part.format)
    assert back.codes.data.ptr == part.codes.data.ptr
    cupy.testing.assert_array_equal(hq.HybridArray(back).dequantize(), hq.HybridArray(part).dequantize())
    f = partial(hqj.fake_quantize, format=format)
    for call in (f, jax.jit(f)):
        testing.assert_bitwise_equal(np.asarray(call(jnp.asarray(x))), hq.fake_quantize(x, format))


def test_random_rounding_in_jit_is_that_of_its_seed():
    x, name = jnp.asarray(testing.matrix("gauss", (32, 48))), "nvfp4(rounding=stochastic,rht=true)"
    compiled = jax.jit(lambda x: hqj.fake_quantize(x, name, seed=5))
    expected = hq.fake_quantize(np.asarray(x), name, seed=5)
    for y in (compiled(x), compiled(x), hqj.fake_quantize(x, name, seed=5)):
        testing.assert_bitwise_equal(np.asarray(y), expected)
    assert (np.asarray(hqj.fake_quantize(x, name, seed=6)) != expected).any()
