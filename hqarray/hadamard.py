"""The random Hadamard transform of NVFP4: 16 values at a time, so that no outlier has a block to itself.

    y = (x * d) @ H / 4        H[i, j] = (-1)^popcount(i & j) (Sylvester), d = SIGNS, x 16 consecutive values of a row

H is symmetric and H @ H = 16, so a product of two operands that are rotated along the axis it contracts is that of the
unrotated ones. The order of operations is that of the fast transform, all in float32: multiply by d_i / 4; then for
h = 1, 2, 4, 8 replace each pair (i, i + h), where i has no bit h, by its sum and its difference; then round to
bfloat16, nearest even, beyond the largest to infinity. Values of a ragged end, k % 16 of them, are not rotated, but
rounded all the same. An infinity or NaN spreads over its 16 values, and values beyond a quarter of FLT_MAX may become
infinities in the sums, or NaN where two of these meet.
Source: TransformerEngine's 16x16 transform with the same signs, which adds in the order of its tensor cores: where the
float32 sums are not exact, a last bit of bfloat16 may differ.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .elements import BFLOAT16

SIZE = 16

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

_SIGNS = np.array(SIGNS, np.float32)[:, None]


def rotate(values: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.float32]:
    """Rotate the first k columns of a float32 tile, which begins on a multiple of 16; rounded to bfloat16."""
    _transform(values[:, : k // SIZE * SIZE], before=_SIGNS / np.float32(4), after=None)
    with np.errstate(all="ignore"):
        return values.astype(BFLOAT16).astype(np.float32)


def rotate_back(values: npt.NDArray[np.float32]) -> None:
    """Undo rotate in place, but for its rounding: y / 4, the same sums and differences, then times d."""
    k = values.shape[1] // SIZE * SIZE
    _transform(values[:, :k], before=np.full((SIZE, 1), 0.25, np.float32), after=_SIGNS)


def _transform(
    whole: npt.NDArray[np.float32], before: npt.NDArray[np.float32], after: npt.NDArray[np.float32] | None
) -> None:
    """In place (whole * before) @ H * after, by sums and differences; factors are (16, 1)."""
    rows, groups = whole.shape[0], whole.shape[1] // SIZE
    with np.errstate(all="ignore"):
        across = np.ascontiguousarray(whole.reshape(rows * groups, SIZE).T)  # long rows to add
        across *= before
        for h in (1, 2, 4, 8):
            pairs = across.reshape(SIZE // (2 * h), 2, h, rows * groups)
            first, second = pairs[:, 0], pairs[:, 1]
            total = first + second
            np.subtract(first, second, out=second)
            first[...] = total
        if after is not None:
            across *= after
        whole[...] = across.T.reshape(whole.shape)
