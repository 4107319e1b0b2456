"""The marker gpu, and nothing else: a test that carries it is skipped only where there is no device."""

import ctypes

import pytest


def _has_device() -> bool:
    """Whether the CUDA driver reports a device: a broken CuPy must fail a test, not hide it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_device():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no device"))
