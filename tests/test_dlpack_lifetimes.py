"""Who keeps memory alive that goes through DLPack, and that nothing is left: capsules made by hand, torch and JAX."""

import contextlib
import ctypes
import gc
import struct
import sys
import tracemalloc
import weakref

import numpy as np
import pytest

from hqarray.dlpack import Typed, from_dlpack

named = pytest.mark.parametrize

pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Counted:
    """A producer in ctypes that counts the calls of its deleter, and keeps its capsule."""

    def __init__(self, *, versioned=True, type=(10, 8, 1), data=True, major=1, device=1):
        self.calls, self.memory = 0, np.arange(16, dtype=np.uint8)
        self.name = b"dltensor_versioned" if versioned else b"dltensor"
        self.sizes = np.array([4, 4, 4, 1])
        self.deleter = DELETER(self.delete)
        at = self.sizes.ctypes.data
        tensor = struct.pack("<QiiiBBHQQQ", self.memory.ctypes.data if data else 0, device, 0, 2, *type, at, at + 16, 0)
        function = ctypes.cast(self.deleter, ctypes.c_void_p).value
        managed = struct.pack("<IIQQQ", major, 0, 0, function, 0) + tensor if versioned else (
            tensor + struct.pack("<QQ", 0, function))
        self.managed = ctypes.create_string_buffer(managed, len(managed))

    def delete(self, _):
        self.calls += 1

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        self.capsule = new_capsule(ctypes.addressof(self.managed), self.name, None)
        return self.capsule


@named("versioned", [True, False])
@named("type", [(10, 8, 1), (4, 16, 1), (1, 8, 1)], ids=str)
def test_the_producer_is_let_go_once_and_with_the_last_array(versioned, type):
    for _ in range(300):
        producer = Counted(versioned=versioned, type=type)
        back = from_dlpack(producer)
        view = back.array[1:]
        assert back.array.ctypes.data == producer.memory.ctypes.data
        del back
        assert producer.calls == 0
        del view
        assert producer.calls == 1


@named("options", [{"type": (17, 4, 1)}, {"type": (99, 8, 1)}, {"type": (2, 128, 1)}, {"type": (10, 8, 2)},
                   {"data": False}, {"major": 2}, {"device": 8}], ids=str)
def test_a_refused_capsule_is_left_to_its_producer(options):
    """Not consumed, and nobody holds it: the producer's own destructor of the capsule lets go."""
    for _ in range(30):
        producer, refused = Counted(**options), False
        try:
            from_dlpack(producer)
        except (BufferError, RuntimeError):  # the second is NumPy's up to 2.4
            refused = True
        assert refused and producer.calls == 0
        assert pointer(producer.capsule, producer.name) == ctypes.addressof(producer.managed)
        references = sys.getrefcount(producer.capsule)
        assert references == 2


def test_the_version_of_a_capsule_that_is_too_new_is_not_read():
    with pytest.raises((BufferError, RuntimeError), match="major version is too"):
        from_dlpack(Counted(major=2, type=(99, 8, 1)))


@named("library", ["torch", "jax.numpy", "none"])
@named("name", ["float8_e4m3fn", "bfloat16", "uint8"])
def test_an_exported_array_lives_as_long_as_its_consumer(name, library):
    module = None if library == "none" else pytest.importorskip(library)
    for _ in range(300):
        array = np.zeros((64, 64), "uint8" if name == "float8_e4m3fn" else name)
        alive = weakref.ref(array)
        there = Typed(array, name).__dlpack__() if module is None else module.from_dlpack(Typed(array, name))
        del array
        if library != "jax.numpy":  # which copies what is not aligned
            assert alive() is not None
        del there
        assert alive() is None


def test_nothing_is_left_after_many_rounds():
    torch = pytest.importorskip("torch")
    array = np.zeros((64, 64), np.uint8)

    def rounds(count):
        for _ in range(count):
            tensor = torch.from_dlpack(Typed(array, "float8_e4m3fn"))
            from_dlpack(tensor)
            Typed(array, "float8_e5m2").__dlpack__(max_version=(1, 0))
            with contextlib.suppress(BufferError):
                Typed(array, "float8_e5m2").__dlpack__(dl_device=(2, 0))

    def growth():
        before, objects = tracemalloc.get_traced_memory()[0], len(gc.get_objects())
        rounds(2000)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before, len(gc.get_objects()) - objects

    rounds(50)
    gc.collect()
    tracemalloc.start()
    try:
        found = [growth() for _ in range(3)]  # a leak grows each time; what other threads do meanwhile does not
        assert min(grown for grown, _ in found) < 4000 and min(objects for _, objects in found) < 100, found
    finally:
        tracemalloc.stop()
