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
    """The 9 bits of one element, as philox.py's docstring has them."""
    (piece, i), (pair, second) = divmod(column, 8), divmod(row, 2)
    counter = (piece & ONES, pair & ONES, pair >> 32, part + 2 * (piece >> 32))
    word = scalar_philox(counter, (seed & ONES, seed >> 32))[2 * second + i % 4 // 2]
    half = word & 0xFFFF if i < 4 else word >> 16
    return half >> 7 * (i % 2) & 0x1FF


@named(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(counter, key, words):
    assert tuple(int(word) for word in philox(counter, key)) == words == scalar_philox(counter, key)


@named("seed", [0, 1, 0x123456789ABCDEF0, 2**64 - 1])
@named("part", [0, 1])
@named("at", [(0, 0), (3, 16), (2**33 - 2, 8), (2**33 - 3, 0), (2**40 + 5, 8 * (2**32 - 1))], ids=str)
def test_a_draw_is_a_function_of_seed_part_row_and_column(seed, part, at):
    bits = PartDraws(seed, part).bits(*at, 4, 24)
    expected = [[draw(seed, part, at[0] + i, at[1] + j) for j in range(24)] for i in range(4)]
    np.testing.assert_array_equal(bits, expected)


def test_a_tile_draws_what_the_matrix_does_there():
    draws = Draws(7).of("columnwise")
    whole = draws.bits(0, 0, 20, 64)
    for top, rows in ((5, 4), (5, 3), (6, 3), (7, 1), (8, 0), (9, 0)):
        np.testing.assert_array_equal(whole[top : top + rows, 16:40], draws.bits(top, 16, rows, 24))


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
    """Each of the 9 bits is set in half of the draws, within 5 sigma, and no draw has more."""
    bits = PartDraws(11, 0).bits(0, 0, 256, 1024)
    assert bits.max() == 511
    for bit in range(9):
        assert abs((bits >> bit & 1).mean() - 0.5) < 5 * 0.5 / bits.size**0.5


def test_draws_are_uniform():
    """Chi squared of the 512 draws at each place of a piece and of a pair of rows, within 5 sigma of its 511."""
    bits = PartDraws(12, 1).bits(0, 0, 512, 2048).reshape(256, 2, 256, 8)
    for second in (0, 1):
        for i in range(8):
            counts = np.bincount(bits[:, second, :, i].ravel(), minlength=512)
            assert abs(((counts - 128) ** 2 / 128).sum() - 511) < 5 * (2 * 511) ** 0.5


def test_a_half_of_a_word_gives_two_uniform_draws_that_correlate_by_less_than_2_to_the_minus_7():
    halves = np.arange(1 << 16)
    first, second = halves & 0x1FF, halves >> 7
    assert (np.bincount(first) == 128).all() and (np.bincount(second) == 128).all()
    assert np.corrcoef(first, second)[0, 1] == pytest.approx(0.0073242, abs=1e-6)
    both = np.zeros((512, 512))
    np.add.at(both, (first, second), 1 / 65536)
    up = both[::-1, ::-1].cumsum(0).cumsum(1)  # of fractions 1/512, 2/512 ...
    fraction = np.arange(1, 513) / 512
    covariance = up - fraction[:, None] * fraction
    assert covariance.min() >= -1e-12 and covariance.max() == pytest.approx(2.0**-9, abs=1e-12)


def test_draws_correlate_within_pairs_of_neighbours_alone():
    """Over 2^17 pairs of pieces: 0.0073 for elements 2i and 2i + 1, within 5 sigma of it and of 0 for others."""
    bits = PartDraws(13, 0).bits(0, 0, 1024, 2048).reshape(512, 2, 256, 8).transpose(1, 3, 0, 2).reshape(16, -1)
    correlation = np.corrcoef(bits.astype(np.float64))
    for i in range(16):
        for j in range(i):
            expected = 0.0073242 if (i // 2, i % 2) == (j // 2, 1) else 0.0
            assert abs(correlation[i, j] - expected) < 5 / bits.shape[1] ** 0.5
