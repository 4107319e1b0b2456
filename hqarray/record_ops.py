"""Rows of parts to records and back, and sums of rows by weight, where the arrays are.

    messages = pack(lines, places, n)      # uint8 (n, record.nbytes): row i becomes record places[i]
    unpack(messages, lines, index)         # row i becomes record index[i]

Nothing here knows of ranks.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from . import reference_records
from .layout import Array, namespace
from .records import Lines


def pack(lines: Lines, places: Array | None = None, count: int | None = None) -> Array:
    """uint8 (count, record.nbytes), where each row goes to its places; records that no row goes to hold anything.

    places  int64 (rows,) or (rows, copies), from count on none; None: rows in order, which are codes alone without a
            copy where a row has nothing else
    count   of records; None: as many as rows
    """
    if places is None and lines.record.nbytes == lines.record.pitch:
        return lines.codes[:count]
    count = len(lines.codes) if count is None else count
    messages: Array = namespace(lines.codes).empty((count, lines.record.nbytes), np.uint8)
    if messages.size and lines.codes.shape[0] and (places is None or places.size):
        _backend(messages).pack(lines, places, messages)
    return messages


def unpack(messages: Array, lines: Lines, index: Array) -> None:
    """Each row becomes the record that the index names, or zeros if there is no such record; inverse of pack."""
    if lines.codes.size or lines.globals is not None:
        _backend(messages).unpack(messages, lines, index)


def weighted_sum(
    rows: Array, shape: tuple[int, int], index: Array | None = None, weights: Array | None = None
) -> Array:
    """Of each token the sum over its choices of weight times row, in float32 and the order of the choices.

    rows     (n, columns) float
    shape    (tokens, choices)
    index    int64 (tokens * choices,), which row is a choice's; where there is no such row: zeros. None: in order
    weights  float32 (tokens, choices); None: 1
    returns  (tokens, columns) of rows' dtype, rounded once
    """
    sum_: Array = _backend(rows).weighted_sum(rows, shape, index, weights)
    return sum_


def dots(rows: Array, other: Array, choices: int, index: Array | None = None) -> Array:
    """Of each choice of a token the product of its row and the token's: the gradient of the weights of weighted_sum.

    rows     (n, columns) float
    other    (tokens, columns) float
    index    as in weighted_sum
    returns  float32 (tokens, choices): float32 products, summed in an order that differs between CPU and GPU
    """
    products: Array = _backend(rows).dots(rows, other, choices, index)
    return products


def _backend(array: Array) -> ModuleType:
    if isinstance(array, np.ndarray):
        return reference_records
    from . import cuda_records

    return cuda_records


__all__ = ["dots", "pack", "unpack", "weighted_sum"]
