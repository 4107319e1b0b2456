"""Typed DLPack: types, versions, flags, strides and streams, with torch and JAX."""

import contextlib
import ctypes
import re
import struct
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import dlpack, testing
from hqarray.dlpack import TYPES, Typed, from_dlpack
from hqarray.formats import ELEMENTS, FORMATS, scale_values

named = pytest.mark.parametrize
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BYTES = np.arange(256, dtype=np.uint8).reshape(8, 32)
CODES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float8_e8m0fnu": "e8m0"}
"""Types that parts have, by the name of our table of their values."""

pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def read_capsule(capsule):
    """A capsule by the byte offsets of dlpack.h: a second reading, without the structures of dlpack.py."""
    is_versioned = "dltensor_versioned" in repr(capsule)
    address = pointer(capsule, b"dltensor_versioned" if is_versioned else b"dltensor")
    fields = {"versioned": is_versioned, "flags": None}
    if is_versioned:
        fields["version"] = struct.unpack("<II", ctypes.string_at(address, 8))
        (fields["flags"],) = struct.unpack("<Q", ctypes.string_at(address + 24, 8))
        address += 32
    data, device, ordinal, ndim, code, bits, lanes, shape, strides, offset = struct.unpack(
        "<QiiiBBHQQQ", ctypes.string_at(address, 48)
    )
    sizes = [struct.unpack(f"<{ndim}q", ctypes.string_at(at, 8 * ndim)) if at else None for at in (shape, strides)]
    return fields | {"data": data + offset, "device": (device, ordinal), "type": (code, bits, lanes),
                     "shape": sizes[0] or (), "strides": sizes[1] or ()}


class Opaque:
    """What offers DLPack and is neither NumPy's nor Typed."""

    def __init__(self, exporter, **forced):
        self.exporter, self.forced, self.asked = exporter, forced, []

    def __dlpack_device__(self):
        return self.exporter.__dlpack_device__()

    def __dlpack__(self, **options):
        self.asked.append(options)
        return self.exporter.__dlpack__(**{**options, **self.forced})


# --- types ----------------------------------------------------------------------------------------


def test_types_are_those_of_the_header():
    torch = pytest.importorskip("torch")
    header = (Path(torch.__file__).parent / "include" / "ATen" / "dlpack.h").read_text()
    there = {name.lower(): int(code) for name, code in re.findall(r"kDL(\w+) = (\d+)U", header)}
    assert len(there) >= 18
    for name, (code, bits, lanes) in TYPES.items():
        assert there[{"bfloat16": "bfloat"}.get(name, name.removesuffix("_x2"))] == code
        assert bits == int(re.search(r"float(\d+)", name)[1]) and bits * lanes % 8 == 0
    plain = {there[name] for name in ("int", "uint", "float", "complex", "bool")}
    assert plain == dlpack.PLAIN


@named("max_version", [None, (0, 8), (1, 0), (1, 3)], ids=str)
@named("name", [*TYPES, "uint8", "float32", "float16", "int64"])
def test_a_capsule_has_the_type_and_the_memory(name, max_version):
    array = np.zeros((3, 5), "uint8" if "float4" in name or "float8" in name else name)
    fields = read_capsule(Typed(array, name).__dlpack__(max_version=max_version))
    plain = {"uint8": (1, 8, 1), "float32": (2, 32, 1), "float16": (2, 16, 1), "int64": (0, 64, 1)}
    assert fields["type"] == {**TYPES, **plain}[name]
    assert fields["versioned"] == (max_version is not None and max_version[0] == 1)
    assert fields["flags"] in (0, None) and fields.get("version", (1, 0))[0] == 1
    assert fields["data"] == array.ctypes.data and fields["device"] == (1, 0)
    assert (fields["shape"], fields["strides"]) == ((3, 5), (5, 1))


@named("name", CODES)
def test_torch_reads_every_code_as_we_do(name):
    """Two oracles: our table of values, torch's own cast; and the bits."""
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(Typed(BYTES, name))
    assert tensor.dtype == getattr(torch, name) and tensor.data_ptr() == BYTES.ctypes.data
    table = scale_values("e8m0") if name == "float8_e8m0fnu" else ELEMENTS[CODES[name]].values
    np.testing.assert_array_equal(tensor.float().numpy().ravel(), table)
    back = from_dlpack(tensor)
    testing.assert_bitwise_equal(back.array, BYTES)
    assert back.name == name and np.shares_memory(back.array, BYTES) and not back.read_only


@named("name", CODES)
def test_jax_reads_every_code_as_we_do(name):
    jnp = pytest.importorskip("jax.numpy")
    array = jnp.from_dlpack(Typed(BYTES, name))
    assert array.dtype.name == name
    table = scale_values("e8m0") if name == "float8_e8m0fnu" else ELEMENTS[CODES[name]].values
    np.testing.assert_array_equal(np.asarray(array.astype(jnp.float32)).ravel(), table)
    back = from_dlpack(array)
    testing.assert_bitwise_equal(back.array, BYTES)
    assert back.name == name and back.array.ctypes.data == array.unsafe_buffer_pointer()
    assert back.read_only and not back.array.flags.writeable  # an unversioned capsule does not say


@named("library", ["torch", "jax.numpy"])
def test_every_bfloat16_goes_and_comes(library):
    module = pytest.importorskip(library)
    values = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16).reshape(256, 256)
    there = module.from_dlpack(Typed(values))
    assert there.dtype == module.bfloat16
    back = from_dlpack(there)
    testing.assert_bitwise_equal(back.array, values)
    assert back.array.dtype == BFLOAT16 and back.name == "bfloat16"


def test_torch_gives_and_takes_two_fp4_codes_a_byte():
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(Typed(BYTES, "float4_e2m1fn_x2"))
    assert tensor.dtype == torch.float4_e2m1fn_x2
    back = from_dlpack(tensor)
    assert back.name == "float4_e2m1fn_x2"
    testing.assert_bitwise_equal(back.array, BYTES)


@named("format", FORMATS)
def test_parts_are_given_with_their_types(format):
    torch = pytest.importorskip("torch")
    part = hq.quantize(testing.matrix("gauss", (20, 48)), rowwise=format).rowwise
    codes, scales = dlpack.codes_of(part), dlpack.scales_of(part)
    for typed, array in ((codes, part.codes), (scales, part.scales)):
        tensor = torch.from_dlpack(typed)
        assert str(tensor.dtype) == f"torch.{typed.name}" and tuple(tensor.shape) == array.shape
        back = from_dlpack(tensor).array
        testing.assert_bitwise_equal(back, array)
        assert not array.size or back.ctypes.data == array.ctypes.data
    element = part.format.storage.element
    assert codes.name == ("uint8" if element.bits < 8 else element.dtype_name)


def test_arrays_of_ml_dtypes_keep_their_type():
    for name in (*CODES, "float8_e4m3fnuz"):
        array = BYTES.view(getattr(ml_dtypes, name))
        assert Typed(array).name == name
        assert read_capsule(Typed(array).__dlpack__())["type"] == TYPES[name]


@named(("array", "name"), [
    (BYTES, "float8"), (BYTES, "bfloat16"), (BYTES, "float32"), (BYTES.view(np.uint16), "float8_e5m2"),
    (BYTES.view(np.float32), "bfloat16"), (BYTES.view(np.int8), "float8_e5m2"),
    (BYTES.view(ml_dtypes.float8_e5m2), "float8_e4m3fn"),
])
def test_a_name_that_is_not_what_the_array_holds_is_refused(array, name):
    with pytest.raises(TypeError, match=f"'{name}' is no type of {array.dtype.name} elements; DLPack types of bytes:"):
        Typed(array, name)


def test_what_fills_no_byte_is_refused():
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(BufferError, match=re.escape("elements of DLPack type (17, 4, 1) (code, bits, lanes) fill no")):
        from_dlpack(jnp.zeros((4, 4), jnp.float4_e2m1fn))


# --- shapes and strides ---------------------------------------------------------------------------

VIEWS = {
    "0-d": lambda a: a[3, 4], "0 rows": lambda a: a[:0], "0 columns": lambda a: a[:, :0], "1-d": lambda a: a[2],
    "3-d": lambda a: a.reshape(2, 4, 32), "transposed": lambda a: a.T, "strided": lambda a: a[::2, 1::3],
    "one row": lambda a: a[1:2], "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "reversed": lambda a: a[::-1, ::-2],
}


@named("dtype", [np.uint8, BFLOAT16, np.float32], ids=str)
@named("view", VIEWS)
def test_any_view_goes_and_comes_without_a_copy(view, dtype):
    array = np.asarray(VIEWS[view](BYTES.astype(dtype)))
    name = "float8_e4m3fn" if dtype == np.uint8 else ""
    back = from_dlpack(Opaque(Typed(array, name)))
    testing.assert_bitwise_equal(np.array(back.array), np.array(array))
    assert back.array.strides == array.strides and back.name == (name or array.dtype.name)
    assert not array.size or back.array.ctypes.data == array.ctypes.data


@named("dtype", ["bfloat16", "float32", "float8_e5m2"])
@named("view", [view for view in VIEWS if view != "reversed"])  # torch has no negative strides
def test_any_view_of_torch_comes_without_a_copy(view, dtype):
    torch = pytest.importorskip("torch")
    base = torch.from_numpy(BYTES.copy())
    base = base.view(torch.float8_e5m2) if dtype == "float8_e5m2" else base.to(getattr(torch, dtype))
    tensor = base[:1].expand(8, 32) if view == "broadcast" else VIEWS[view](base)
    back = from_dlpack(tensor)
    bits = {"bfloat16": torch.int16, "float32": torch.int32, "float8_e5m2": torch.uint8}[dtype]
    expected = np.array(tensor.view(bits).numpy())
    testing.assert_bitwise_equal(np.array(back.array).view(expected.dtype), expected)
    assert back.name == dtype and (not tensor.numel() or back.array.ctypes.data == tensor.data_ptr())


# --- copies and read-only memory ------------------------------------------------------------------


@named("name", ["float8_e4m3fn", "uint8"])
def test_a_copy_is_made_where_it_is_asked_for(name):
    array = BYTES.copy()
    for copy in (None, False, True):
        fields = read_capsule(Typed(array, name).__dlpack__(max_version=(1, 0), copy=copy))
        assert fields["flags"] == (2 if copy else 0) and (fields["data"] != array.ctypes.data) == bool(copy)
        imported = from_dlpack(Opaque(Typed(array, name)), copy=copy).array
        assert np.shares_memory(imported, array) != bool(copy)
        testing.assert_bitwise_equal(imported, array)
        assert np.shares_memory(from_dlpack(array, copy=copy).array, array) != bool(copy)
        assert np.shares_memory(from_dlpack(Typed(array), copy=copy).array, array) != bool(copy)


@named("name", ["float8_e4m3fn", "uint8"])
def test_read_only_memory_says_so_or_is_copied(name):
    array = BYTES.copy()
    array.setflags(write=False)
    typed = Typed(array, name)
    fields = read_capsule(typed.__dlpack__(max_version=(1, 0)))
    assert fields["flags"] == 1 and fields["data"] == array.ctypes.data
    for version in (None, (0, 8)):
        assert read_capsule(typed.__dlpack__(max_version=version))["data"] != array.ctypes.data
        with pytest.raises(BufferError, match="the memory is read-only, which an unversioned capsule cannot say; pass"):
            typed.__dlpack__(max_version=version, copy=False)
    assert read_capsule(typed.__dlpack__(max_version=(1, 0), copy=True))["flags"] == 2
    marked = Typed(BYTES.copy(), name, read_only=True)
    assert read_capsule(marked.__dlpack__(max_version=(1, 0)))["flags"] == 1


def test_what_comes_read_only_stays_so():
    array = BYTES.copy()
    assert not from_dlpack(Opaque(Typed(array))).read_only
    array.setflags(write=False)
    back = from_dlpack(Opaque(Typed(array)))
    assert back.read_only and not back.array.flags.writeable
    unversioned = from_dlpack(Opaque(Typed(BYTES.copy()), max_version=None))
    assert unversioned.read_only and not unversioned.array.flags.writeable
    assert from_dlpack(array).read_only


def test_producers_of_older_versions_are_read():
    class Old:
        def __dlpack__(self, stream=None):
            return Typed(BYTES, "float8_e5m2").__dlpack__(stream=stream)

    class Bare:
        def __dlpack__(self):
            return Typed(BYTES, "float8_e5m2").__dlpack__()

    for producer in (Old(), Bare()):
        back = from_dlpack(producer)
        assert back.name == "float8_e5m2" and np.shares_memory(back.array, BYTES)


def test_a_numpy_without_versions_exports_what_it_can(monkeypatch):
    monkeypatch.setattr(dlpack, "NUMPY_KNOWS_VERSIONS", False)
    array = BYTES.copy()
    typed = Typed(array, "float8_e4m3fn")
    for options, shares in (({}, True), ({"max_version": (1, 0)}, True), ({"copy": True}, False),
                            ({"dl_device": (1, 0), "copy": False}, True)):
        fields = read_capsule(typed.__dlpack__(**options))
        assert not fields["versioned"] and fields["type"] == (10, 8, 1)
        assert (fields["data"] == array.ctypes.data) == shares
    with pytest.raises(BufferError, match="unsupported device"):
        typed.__dlpack__(dl_device=(2, 0))
    array.setflags(write=False)
    read_only = Typed(array, "float8_e4m3fn")
    assert read_capsule(read_only.__dlpack__(max_version=(1, 0)))["data"] != array.ctypes.data
    with pytest.raises(BufferError, match="is read-only"):
        read_only.__dlpack__(max_version=(1, 0), copy=False)
    for copy in (None, False, True):
        back = from_dlpack(Opaque(Typed(BYTES)), copy=copy).array
        assert np.shares_memory(back, BYTES) != bool(copy)
        testing.assert_bitwise_equal(back, BYTES)


# --- devices and streams --------------------------------------------------------------------------


def test_other_devices_and_streams_are_refused():
    typed = Typed(BYTES, "float8_e5m2")
    assert typed.__dlpack_device__() == (1, 0)
    assert read_capsule(typed.__dlpack__(dl_device=(1, 0)))["device"] == (1, 0)
    with pytest.raises(BufferError, match="unsupported device"):
        typed.__dlpack__(dl_device=(2, 0))
    with pytest.raises((ValueError, RuntimeError), match="stream=None"):
        typed.__dlpack__(stream=1)


@named("kind", [4, 7, 8, 10, 14, 15])
def test_a_device_that_is_neither_cpu_nor_cuda_is_named(kind):
    class Elsewhere:
        def __dlpack_device__(self):
            return kind, 0

        def __dlpack__(self, **options):
            raise AssertionError("must not be asked")

    with pytest.raises(BufferError, match=re.escape(f"neither the CPU nor CUDA (DLPack's type {kind})")):
        from_dlpack(Elsewhere())


class OnGpu:
    """Stands for a CuPy array: bytes on the host, a device to enter, and a record of what it was asked."""

    def __init__(self, array, log):
        self.array, self.log, self.dtype = array, log, array.dtype

    def view(self, dtype):
        return OnGpu(self.array.view(dtype), self.log)

    @property
    @contextlib.contextmanager
    def device(self):
        self.log.append("enter")
        yield
        self.log.append("leave")

    def __dlpack_device__(self):
        return 2, 1

    def __dlpack__(self, *, stream, **options):
        self.log.append(stream)
        return self.array.__dlpack__(**options)


@named("stream", [None, -1, 1, 2, 140_000_000])
def test_the_stream_of_the_consumer_is_passed_on_the_device_of_the_array(stream):
    log = []
    typed = Typed(OnGpu(BYTES, log), "float8_e4m3fn")
    assert typed.__dlpack_device__() == (2, 1)
    assert read_capsule(typed.__dlpack__(stream=stream, max_version=(1, 0)))["type"] == (10, 8, 1)
    assert log == ["enter", stream, "leave"]


@named("device", [2, 13])
def test_cupy_is_the_consumer_of_what_is_on_a_gpu(device, monkeypatch):
    """CuPy asks with its own stream; what it is handed are bytes."""

    class CuPy:
        @staticmethod
        def from_dlpack(x, **options):
            assert x.__dlpack_device__() == (device, 3)
            capsule = x.__dlpack__(stream=7, max_version=(1, 0), **options)
            assert read_capsule(capsule)["type"] == (1, 16, 1)
            return np.from_dlpack(type("Holder", (), {"__dlpack__": lambda self, **_: capsule})())

    class Producer(Opaque):
        def __dlpack_device__(self):
            return device, 3

    values = np.arange(6, dtype=np.float32).astype(BFLOAT16)
    monkeypatch.setattr(dlpack, "_cupy", lambda: CuPy)
    producer = Producer(Typed(values), stream=None)
    back = from_dlpack(producer)
    assert [options["stream"] for options in producer.asked] == [7]
    testing.assert_bitwise_equal(back.array, values)


@named(("forced", "flagged", "read_only"), [
    ({}, False, False), ({}, True, True), ({"max_version": None}, False, True),
])
def test_cupy_arrays_are_read_only_where_the_producer_says_so_or_nothing(forced, flagged, read_only, monkeypatch):
    """CuPy's arrays have no flag of their own."""

    class CuPy:
        @staticmethod
        def from_dlpack(x, **options):
            return np.from_dlpack(type("Holder", (), {
                "__dlpack__": lambda self, **_: x.__dlpack__(max_version=(1, 0), **options)})()).copy()

    class Producer(Opaque):
        def __dlpack_device__(self):
            return 2, 0

    monkeypatch.setattr(dlpack, "_cupy", lambda: CuPy)
    for copy in (None, False, True):
        back = from_dlpack(Producer(Typed(BYTES.copy(), "float8_e5m2", read_only=flagged), **forced), copy=copy)
        assert back.read_only == (read_only and not copy) and back.name == "float8_e5m2"


def test_without_cupy_an_array_on_a_gpu_is_refused(monkeypatch):
    class Producer:
        def __dlpack_device__(self):
            return 2, 0

        def __dlpack__(self, **options):
            raise AssertionError("must not be asked")

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BufferError, match=re.escape("read by CuPy: pip install 'hqarray[cuda13]'")):
        from_dlpack(Producer())


# --- tensors that are more than memory ------------------------------------------------------------


def test_a_tensor_that_requires_grad_is_detached():
    torch = pytest.importorskip("torch")
    for tensor in (torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3)), 2 * torch.ones(
            3, requires_grad=True)):
        back = from_dlpack(tensor)
        assert back.array.tolist() == tensor.tolist() and back.array.ctypes.data == tensor.data_ptr()


def test_a_sign_kept_beside_the_memory_is_applied():
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert tensor.is_neg()
    assert from_dlpack(tensor).array.tolist() == [-2, 4]


def test_a_tensor_without_memory_is_refused():
    """NumPy would make an array of whatever its allocator gives."""
    torch = pytest.importorskip("torch")

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2, 2), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return False if function is torch.ops.aten.is_pinned.default else NotImplemented

    with pytest.raises(BufferError, match="it has no memory of its own"):
        from_dlpack(Wrapper())
    assert from_dlpack(torch.empty(0, 3)).array.shape == (0, 3)


@named("x", [[1.0], 1.0, None, "text"], ids=repr)
def test_what_offers_no_dlpack_is_a_type_error(x):
    with pytest.raises(TypeError, match=f"{type(x).__name__} is no NumPy or CuPy array and offers no DLPack"):
        from_dlpack(x)
