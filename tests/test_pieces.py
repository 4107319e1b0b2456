"""Copies of blocks and rows of bytes: on NumPy against loops, on a GPU against NumPy."""

import numpy as np
import pytest

pytest.importorskip("torch")

from hqarray.interop.pieces import BYTES, Move, block, bytes_of, move, take_rows


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    return pytest.importorskip(request.param)


def host(array):
    return array.get() if hasattr(array, "get") else array


def memory(array):
    return array if isinstance(array, np.ndarray) else array.data


def random_bytes(*shape):
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


MOVES = [Move(3, 5, 7, 4, 11, 13), Move(0, 64, 32, 3, 32, 48), Move(100, 0, 1, 1, 1, 1), Move(16, 200, 5, 2, 5, 5)]


@pytest.mark.parametrize("offset", [0, 17])
def test_blocks_arrive_where_a_loop_puts_them_and_nothing_else_changes(xp, offset):
    source, target = random_bytes(300), random_bytes(260)
    expected = target.copy()
    for m in MOVES:
        for row in range(m.height):
            first, to = offset + m.source + row * m.source_pitch, m.target + row * m.target_pitch
            for byte in range(m.width):
                expected[to + byte] = source[first + byte]
    there, here = xp.asarray(target), xp.asarray(source)
    move(memory(there), memory(here), offset, MOVES)
    np.testing.assert_array_equal(host(there), expected)


@pytest.mark.parametrize("width", [0, 1, 2, 6, 8, 24, 48, 4096])
@pytest.mark.parametrize("start", [0, 1, 8])
def test_rows_are_taken_by_an_index_whatever_their_width_and_alignment(xp, width, start):
    rows, index = random_bytes(40, width), np.random.default_rng(1).integers(0, 40, 100)
    held = xp.zeros(rows.size + 16, np.uint8)
    given = block(memory(held), start, rows.shape)
    given[...] = xp.asarray(rows)
    np.testing.assert_array_equal(host(take_rows(given, xp.asarray(index))), rows[index])


def test_of_no_rows_zeros_are_taken(xp):
    found = take_rows(xp.empty((0, 32), BYTES), xp.zeros(3, np.int64))
    assert found.shape == (3, 32) and not host(found).any()


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.float16])
def test_values_are_seen_as_bytes_of_their_row(xp, dtype):
    values = np.arange(24).reshape(4, 6).astype(dtype)
    found = host(bytes_of(xp.asarray(values).T))
    np.testing.assert_array_equal(found, np.ascontiguousarray(values.T).view(np.uint8))
