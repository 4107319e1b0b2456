"""Records of rows, and sums of rows by weight, on NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .codec import Codes, Floats, Values
from .layout import Array
from .records import Lines

Index = npt.NDArray[np.int64]


def pack(lines: Lines, places: Index | None, messages: Codes) -> None:
    """See record_ops.pack; into messages."""
    record, rows = lines.record, np.arange(len(lines.codes))
    records = np.zeros((len(rows), record.nbytes), np.uint8)
    records[:, : record.pitch] = lines.codes
    if lines.scales is not None:
        there = rows if lines.starts is None else np.flatnonzero(lines.starts >= 0)
        scales = lines.scales[_places(lines, there)].view(np.uint8)
        records[there, record.pitch : record.pitch + scales.shape[1]] = scales
    if lines.globals is not None:
        records[:, record.global_offset : record.global_offset + 4] = lines.globals[:, None].view(np.uint8)
    messages[...] = 0
    spread(records, rows if places is None else places, messages)


def spread(rows: Array, places: Index, out: Array) -> None:
    """Rows to their places in out."""
    there = places < len(out)
    out[places[there]] = rows[np.nonzero(there)[0]]


def unpack(messages: Codes, lines: Lines, index: Index) -> None:
    """See record_ops.unpack."""
    found, record = take(messages, index), lines.record
    lines.codes[...] = found[:, : record.pitch]
    if lines.scales is not None:
        rows = np.arange(len(index)) if lines.starts is None else np.flatnonzero(lines.starts >= 0)
        dtype, count = record.scales
        scales = found[rows, record.pitch : record.pitch + count * dtype.itemsize]
        lines.scales[_places(lines, rows)] = np.ascontiguousarray(scales).view(dtype)
    if lines.globals is not None:
        numbers = np.ascontiguousarray(found[:, record.global_offset : record.global_offset + 4])
        lines.globals[...] = numbers.view(np.float32)[:, 0]


def _places(lines: Lines, rows: Index) -> Index:
    """Where the scales of rows lie: (rows, blocks)."""
    starts: Array = rows if lines.starts is None else lines.starts[rows]
    steps: Array = np.int64(lines.step) if lines.steps is None else lines.steps[rows, None]
    places: Index = starts[:, None] + np.arange(lines.record.scales[1]) * steps
    return places


def take(rows: Array, index: Index) -> Array:
    """Those rows, and zeros where there is no such row."""
    found = np.zeros((len(index), rows.shape[1]), rows.dtype)
    there = index < len(rows)
    found[there] = rows[index[there]]
    return found


def weighted_sum(rows: Values, shape: tuple[int, int], index: Index | None, weights: Floats | None) -> Values:
    """See record_ops.weighted_sum."""
    tokens, choices = shape
    index = np.arange(tokens * choices) if index is None else index
    total = np.zeros((tokens, rows.shape[1]), np.float32)
    for choice in range(choices):
        row = take(rows, index[choice::choices]).astype(np.float32)
        if weights is not None:
            row *= weights[:, choice, None]
        total = row if choice == 0 else total + row
    sums: Values = total.astype(rows.dtype)
    return sums


def dots(rows: Values, other: Values, choices: int, index: Index | None) -> Floats:
    """See record_ops.dots."""
    tokens = len(other)
    index = np.arange(tokens * choices) if index is None else index
    products = np.zeros((tokens, choices), np.float32)
    for choice in range(choices):
        slots = index[choice::choices]
        there = slots < len(rows)
        product = rows[slots[there]].astype(np.float32) * other[there].astype(np.float32)
        products[there, choice] = product.sum(axis=1)
    return products


__all__ = ["dots", "pack", "spread", "unpack", "weighted_sum"]
