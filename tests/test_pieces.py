"""Copies of blocks and rows of bytes: on NumPy against loops, on a GPU against NumPy."""

import numpy as np
import pytest

pytest.importorskip("torch")

from hqarray.interop.pieces import BYTES, Move, block, bytes_of, move, spread_rows


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


@pytest.mark.parametrize("copies", [None, 1, 3])
@pytest.mark.parametrize("width", [0, 1, 2, 6, 8, 24, 48, 4096])
@pytest.mark.parametrize("start", [0, 1, 8])
def test_rows_lie_at_their_places_whatever_their_width_and_alignment(xp, width, start, copies):
    rows, order = random_bytes(40, width), np.random.default_rng(1).permutation(40 * (copies or 1))
    held = xp.zeros(rows.size + 16, np.uint8)
    given = block(memory(held), start, rows.shape)
    given[...] = xp.asarray(rows)
    places, count = np.argsort(order), len(order) - 7  # the last seven have none
    places = places if copies is None else places.reshape(40, copies)
    found = host(spread_rows(given, xp.asarray(places), count))
    np.testing.assert_array_equal(found, rows[order[:count] // (copies or 1)])


def test_no_rows_go_nowhere(xp):
    assert spread_rows(xp.empty((0, 32), BYTES), xp.zeros((0, 2), np.int64), 3).shape == (3, 32)
    assert spread_rows(xp.ones((2, 32), BYTES), xp.zeros((2, 0), np.int64), 0).shape == (0, 32)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.float16])
def test_values_are_seen_as_bytes_of_their_row(xp, dtype):
    values = np.arange(24).reshape(4, 6).astype(dtype)
    found = host(bytes_of(xp.asarray(values).T))
    np.testing.assert_array_equal(found, np.ascontiguousarray(values.T).view(np.uint8))
