"""Random bits by counter, for stochastic rounding: Philox4x32-10 (Salmon et al., SC 2011).

The draw of an element is a function of the seed, the part, and the element's row and column in the part, of nothing
else: neither of the launch, nor of the tile, nor of where a matrix lies in a group. One call of Philox serves 16
elements: columns 8 j to 8 j + 7, "a piece", of rows 2 r and 2 r + 1 of the part:

    key      (seed mod 2^32, seed / 2^32), the seed as 64 unsigned bits
    counter  (j mod 2^32, r mod 2^32, r / 2^32, part + 2 * (j / 2^32)), part 0 rowwise, 1 columnwise
    draw     of element i of the piece: 9 bits, (half >> 7 * (i % 2)) & 0x1FF, where half is 16 bits of word (i % 4) / 2
             of the row's two, the low ones where i < 4, else the high ones; row 2 r has the first two words

Each draw is uniform on 0 to 511. Elements 2 i and 2 i + 1 of a piece share 2 bits, the highest of the former, which
are the lowest of the latter: their draws correlate by 0.0073, and whether one goes up and whether the other does by a
covariance of 0 to 2^-9. All others are independent.

Rows and columns are those of the K-major part, so a row of the columnwise part is a column of X; of N-D arrays they
are those of the 2-D view, of a member of a group its own. The columns of a ragged end draw as if the piece were whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]

PIECE = 8
"""Consecutive elements of a row that one call serves, in each of two rows."""

DRAW_BITS = 9
"""Of an element: a draw is below 2^9."""

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Four random words, below 2^32 in uint64, for counters of four words each, which broadcast, and a key of two."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    for number in range(ROUNDS):
        k0, k1 = (np.uint64((word + number * step) & 0xFFFFFFFF) for word, step in zip(key, WEYL, strict=True))
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> HALF) ^ c1 ^ k0, second & LOW, (first >> HALF) ^ c3 ^ k1, first & LOW
    return c0, c1, c2, c3


@dataclass(frozen=True, slots=True)
class Draws:
    """Where the random numbers of a call come from.

    seed    an integer below 2^64, or an array of one uint64 or int64 in the memory of the values, read when codes are
            made: a captured CUDA graph draws anew when the caller changes it
    turned  the matrix is X.T: what is called its rowwise part is the columnwise one, and draws as that
    first   (row, column) of X's first element in a matrix that it is a shard of, which draws as there
    """

    seed: Any
    turned: bool = False
    first: tuple[int, int] = (0, 0)

    @property
    def T(self) -> Draws:
        """Of the transposed matrix."""
        return Draws(self.seed, not self.turned, self.first)

    def of(self, direction: Literal["rowwise", "columnwise"]) -> PartDraws:
        """Of one part, for NumPy: an array's seed is read here."""
        seed = self.seed if isinstance(self.seed, int) else int(self.seed.reshape(()))
        part = int((direction == "columnwise") != self.turned)
        return PartDraws(seed % (1 << 64), part, self.first[::-1] if part else self.first)


@dataclass(frozen=True, slots=True)
class PartDraws:
    """The draws of one part: a seed, 0 for the rowwise or 1 for the columnwise one, and where it begins."""

    seed: int
    part: int
    first: tuple[int, int] = (0, 0)

    def bits(self, top: int, left: int, rows: int, columns: int) -> npt.NDArray[np.uint16]:
        """Draws of a tile from (top, left), uint16 (rows, columns), below 2^9; left and columns are whole pieces."""
        top, left = top + self.first[0], left + self.first[1]
        assert left % PIECE == 0 and columns % PIECE == 0
        pair = np.arange(top // 2, (top + rows + 1) // 2, dtype=np.uint64)[:, None]
        piece = np.arange(left // PIECE, (left + columns) // PIECE, dtype=np.uint64)[None, :]
        last = np.uint64(self.part) + (piece >> HALF) * np.uint64(2)
        words = philox((piece & LOW, pair & LOW, pair >> HALF, last), (self.seed & 0xFFFFFFFF, self.seed >> 32))
        stored = np.empty((len(pair), 2, columns // PIECE, 2), "<u4")
        for number, word in enumerate(words):
            stored[:, number // 2, :, number % 2] = word
        own = stored.reshape(2 * len(pair), columns // PIECE, 2)[top % 2 : top % 2 + rows]
        draws = np.empty((rows, columns // PIECE, 2, 2, 2), np.uint16)  # element 4 a + 2 b + c: half a of word b
        halves = own.view("<u2").reshape(rows, columns // PIECE, 2, 2).swapaxes(2, 3)
        draws[..., 0] = halves & np.uint16((1 << DRAW_BITS) - 1)
        draws[..., 1] = halves >> np.uint16(16 - DRAW_BITS)
        return draws.reshape(rows, columns)
