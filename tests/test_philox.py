"""Random bits against published ones, and against a scalar transcription of what the docstring says."""

import numpy as np
import pytest

from hqarray.philox import Draws, PartDraws, philox

named = pytest.mark.parametrize

ONES = 0xFFFFFFFF
KNOWN = [  # Random123 1.14, tests/kat_vectors, philox4x32 of 10 rounds: counter, key, words
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def scalar_philox(counter, key):
    """One call in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & ONES, first >> 32 ^ c[3] ^ k[1], first & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return tuple(c)


def draw(seed, part, row, column):
    """The 16 bits of one element, as philox.py's docstring has them."""
    piece, i = divmod(column, 8)
    counter = (piece & ONES, row & ONES, row >> 32, part + 2 * (piece >> 32))
    word = scalar_philox(counter, (seed & ONES, seed >> 32))[i // 2]
    return word >> 16 * (i % 2) & 0xFFFF


@named(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(counter, key, words):
    assert tuple(int(word) for word in philox(counter, key)) == words == scalar_philox(counter, key)


@named("seed", [0, 1, 0x123456789ABCDEF0, 2**64 - 1])
@named("part", [0, 1])
@named("at", [(0, 0), (3, 16), (2**32 - 2, 8), (2**40 + 5, 8 * (2**32 - 1))], ids=str)
def test_a_draw_is_a_function_of_seed_part_row_and_column(seed, part, at):
    bits = PartDraws(seed, part).bits(*at, 4, 24)
    expected = [[draw(seed, part, at[0] + i, at[1] + j) for j in range(24)] for i in range(4)]
    np.testing.assert_array_equal(bits, expected)


def test_a_tile_draws_what_the_matrix_does_there():
    draws = Draws(7).of("columnwise")
    np.testing.assert_array_equal(draws.bits(0, 0, 20, 64)[5:9, 16:40], draws.bits(5, 16, 4, 24))


def test_a_seed_in_memory_is_read_as_64_bits_when_codes_are_made():
    seed = np.array([-1], np.int64)
    draws = Draws(seed)
    assert draws.of("rowwise") == Draws(2**64 - 1).of("rowwise")
    seed[0] = 3
    assert draws.of("rowwise") == Draws(3).of("rowwise") != draws.of("columnwise")


def test_the_parts_of_a_transposed_matrix_draw_crosswise():
    draws = Draws(9)
    assert draws.T.of("rowwise") == draws.of("columnwise") and draws == draws.T.T


def test_bits_are_even():
    """Each of the 16 bits is set in half of the draws, within 5 sigma."""
    bits = PartDraws(11, 0).bits(0, 0, 256, 1024)
    for bit in range(16):
        assert abs((bits >> bit & 1).mean() - 0.5) < 5 * 0.5 / bits.size**0.5
