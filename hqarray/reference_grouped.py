"""Quantize and decode groups on NumPy: member by member as reference.py does, into the layout of a group."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import reference
from .codec import Floats, Values
from .formats import Format
from .grouped_parts import GroupedPart, known, new_parts, with_sizes
from .groups import Sizes
from .philox import Draws


def quantize_groups(
    values: Values, rows: Sizes, row: Format | None, column: Format | None, whole: Floats | None = None,
    out: tuple[GroupedPart | None, GroupedPart | None] | None = None, noop: Any = None, draws: Draws | None = None,
    record: Floats | None = None,
) -> tuple[GroupedPart | None, GroupedPart | None]:
    """The rowwise and the columnwise part of matrices stacked along rows; None for a format that is None.

    values  (capacity, k); member i is the rows from rows.starts[i]
    whole   float32 (num_groups,) amaxes to use where a format has one per matrix; None measures them
    out     parts to write into, their sizes aside; rows of no member are left as they are, and so is scale padding
    noop    nothing is written or recorded where it is not zero
    draws   of stochastic formats; each member draws as if alone, so all of them by one seed
    record  float32 (num_groups,), raised to the amaxes of the members; as in reference.quantize_parts
    Sizes that the host does not know (ends, or what a device array holds) are read and clamped.
    """
    rows = known(rows)
    parts = new_parts(values.shape[1], rows, row, column) if out is None else with_sizes(out, rows)
    if noop is not None and np.asarray(noop).reshape(()):
        return parts
    starts = np.minimum(rows.starts[:-1], rows.capacity).tolist()
    none = [(None, None)] * rows.num_groups
    pairs = zip(*(none if part is None else part.padded_members() for part in parts), strict=True)
    for i, (start, size, members) in enumerate(zip(starts, rows.values.tolist(), pairs, strict=True)):
        for part, padded in members:
            if part is not None:  # sizes move the members about in a buffer, and with them the padding of their rows
                padded[:, part.codes.shape[1] :] = 0
        one, own = (None if amaxes is None else amaxes[i : i + 1] for amaxes in (whole, record))
        chosen = values[start : start + size]
        reference.requantize_parts(members[0][0], members[1][0], chosen, None, one, draws=draws, record=own)
    return parts


def raise_to_amaxes(values: Values, rows: Sizes, amaxes: Floats) -> None:
    """Raise amaxes, (num_groups,), to that of each member."""
    rows = known(rows)
    starts = np.minimum(rows.starts[:-1], rows.capacity).tolist()
    for i, (start, size) in enumerate(zip(starts, rows.values.tolist(), strict=True)):
        amaxes[i] = max(amaxes[i], reference.amax(values[start : start + size])[0])


def dequantize_groups(part: GroupedPart, dtype: np.dtype[Any], *, transposed: bool = False) -> Values:
    """The stacked values of a part: ragged "outer" (capacity, k), ragged "k" (outer, capacity); values of no member 0.

    transposed  the transpose of that: of a columnwise part the values X, stacked
    """
    layout, sizes = part.layout, part.sizes
    along_rows = (layout.ragged == "outer") != transposed
    shape = (sizes.capacity, layout.each) if along_rows else (layout.each, sizes.capacity)
    result = np.zeros(shape, dtype)
    starts = np.minimum(sizes.starts[:-1], sizes.capacity).tolist()
    for member, start, size in zip(part.members(), starts, sizes.values.tolist(), strict=True):
        one = slice(start, start + size)
        out = result[one] if along_rows else result[:, one]
        reference.dequantize_part(member, dtype, out, transposed=transposed)
    return result
