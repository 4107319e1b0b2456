"""Expert parallelism: tokens quantized where they are, sent to the ranks of their experts, and what comes back.

    route = make_route(choices, num_experts, ranks)          # choices (tokens, top): the experts of each token
    g = dispatch(x, route, ranks, "mxfp8")                   # this rank's experts, a GroupedArray: not quantized anew
    y = combine(g @ gw.T, route, ranks, weights=weights)     # (tokens, n)

A token's codes and scales travel as one record. Rank r has experts r * local to (r + 1) * local. Rows of an expert lie
in the order of ranks, then of tokens, as a stable sort of all tokens on one rank puts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hqarray import ops
from hqarray.arrays import HybridArray, QuantizedArray, zeros_part
from hqarray.formats import Format, HighPrecision, as_format
from hqarray.grouped import GroupedArray
from hqarray.grouped_making import backend_on, grouped_quantize
from hqarray.grouped_parts import GroupedPart, on_device, zeros_group
from hqarray.groups import Sizes
from hqarray.inputs import as_array, as_ours, place
from hqarray.layout import Array, namespace, part_layout

from .distributed import Ranks, as_ranks

# --- where tokens go ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where each token goes, and where it comes back from.

    tokens, top  choices are (tokens, top); a slot is one of them
    order        int64 (slots,): slots sorted by expert
    lengths      int64 (experts,): slots of each expert, on all ranks' experts
    wanted       int64 (ranks,): slots for each rank, those beyond the capacity included
    received     int64 (ranks, local): rows from each rank for each expert of this one
    capacity     rows that are sent to each rank, whatever the sizes, which the host then does not know; None: just
                 those that are wanted
    shares       rows for each rank and from each, on the host; None with a capacity
    places       int64 (rows,): for each row as this rank's experts have them, where it is among those that arrive
    is_there     bool (rows,): whether it is some expert's; what is not is counted as row 0
    sizes        int64 (local,): rows of each of this rank's experts
    """

    tokens: int
    top: int
    order: Array
    lengths: Array
    wanted: Array
    received: Array
    capacity: int | None
    shares: tuple[list[int], list[int]] | None
    places: Array
    is_there: Array
    sizes: Array

    @property
    def num_local(self) -> int:
        """Experts of this rank."""
        return int(self.received.shape[1])

    @property
    def arriving(self) -> int:
        """Rows that arrive, or that there is room for."""
        return len(self.places)


def _places(received: Array, count: int, capacity: int | None) -> tuple[Array, Array]:
    """Where each row, as experts have them, is among those that arrive; and which rows are some expert's."""
    module, (size, local) = namespace(received), received.shape
    before = _starts(received.reshape(-1)).reshape(size, local)  # rank by rank, as they arrive
    if capacity is not None:
        before = before - before[:, :1] + capacity * module.arange(size)[:, None]
    row, run, is_there = _runs(received.T.reshape(-1), count)  # expert by expert, of each rank by rank
    return row + before.T.reshape(-1)[run], is_there


def make_route(choices: Any, num_experts: int, ranks: Any, *, capacity: int | None = None) -> Route:
    """Sort this rank's tokens by expert, and tell the other ranks how many come; all of them call it.

    choices      (tokens, top) integers, the experts of each token, below num_experts
    num_experts  on all ranks together: a multiple of their number
    capacity     None: the host reads how many rows go where (it waits for the device once) and just these are sent.
                 Else so many rows are sent to each rank, the sizes stay on the device, and nothing synchronises; rows
                 for a rank beyond that many are left out, and come back as zeros.

    Raises ValueError for choices that are none; on a GPU they are not looked at.
    """
    ranks, choices = as_ranks(ranks), as_ours(choices, "choices")
    if getattr(choices, "ndim", 0) != 2 or choices.dtype.kind not in "iu":
        found = f"{getattr(choices, 'dtype', type(choices).__name__)} {getattr(choices, 'shape', '')}"
        raise ValueError(f"choices are integers (tokens, top), not {found}")
    if num_experts < 1 or num_experts % ranks.size:
        raise ValueError(f"{num_experts} experts on {ranks.size} ranks: each rank has as many; give a multiple")
    if isinstance(choices, np.ndarray) and choices.size and not 0 <= choices.min() <= choices.max() < num_experts:
        raise ValueError(f"choices on {ranks} are from {choices.min()} to {choices.max()}, the experts 0 to "
                         f"{num_experts - 1}")
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity={capacity}: rows for each rank, 0 or more")
    with on_device(choices.device):
        module, flat = namespace(choices), choices.reshape(-1).astype(np.int64)
        order = module.argsort(flat, kind="stable")
        ends = module.searchsorted(flat[order], module.arange(num_experts), side="right")
        lengths = _sizes_of(ends)
        sent = lengths.reshape(ranks.size, num_experts // ranks.size)
        wanted = sent.sum(axis=1)
        if capacity is not None:
            ends = module.minimum(module.cumsum(sent, axis=1), capacity)
            sent = module.concatenate([ends[:, :1], ends[:, 1:] - ends[:, :-1]], axis=1)
        sent = module.ascontiguousarray(sent, np.int64)
        received = module.empty_like(sent)
        ranks.all_to_all(sent, received)
        shares = None
        if capacity is None:
            both = module.stack([sent.sum(axis=1), received.sum(axis=1)])
            outgoing, incoming = (both.get() if hasattr(both, "get") else both).tolist()
            shares = outgoing, incoming
        count = sum(shares[1]) if shares is not None else ranks.size * (capacity or 0)
        places = _places(received, count, capacity)
        sizes = module.ascontiguousarray(received.sum(axis=0))
    tokens, top = choices.shape
    return Route(tokens, top, order, lengths, wanted, received, capacity, shares, *places, sizes)


def _sizes_of(ends: Array) -> Array:
    return namespace(ends).diff(ends, prepend=namespace(ends).zeros(1, ends.dtype))


def _starts(sizes: Array) -> Array:
    return namespace(sizes).cumsum(sizes) - sizes


def _runs(lengths: Array, count: int) -> tuple[Array, Array, Array]:
    """Rows 0 to count of runs of such lengths: the place in its run, its run, and whether it is in any.

    A row of none is given row 0's.
    """
    module = namespace(lengths)
    ends = module.cumsum(lengths)
    rows = module.arange(count)
    is_there = rows < ends[-1]
    rows = module.where(is_there, rows, 0)
    run = module.minimum(module.searchsorted(ends, rows, side="right"), len(lengths) - 1)
    return rows - (ends - lengths)[run], run, is_there


# --- rows there and back ------------------------------------------------------------------------


def _send(rows: Array, route: Route, ranks: Ranks) -> Array:
    """Rows of the sorted slots to the ranks of their experts; those that arrive here, expert by expert.

    Rows of no expert, where there is room for more, are copies of the first one.
    """
    module = namespace(rows)
    arrived = module.empty((route.arriving, rows.shape[1]), rows.dtype)
    if route.shares is not None:
        ranks.all_to_all(rows, arrived, *route.shares)
        return arrived[route.places]
    assert route.capacity is not None
    chosen = _starts(route.wanted)[:, None] + module.arange(route.capacity)
    chosen = module.minimum(chosen.reshape(-1), max(len(rows) - 1, 0))  # what is not wanted is some row
    leaving = rows[chosen] if len(rows) else module.zeros((len(chosen), rows.shape[1]), rows.dtype)
    ranks.all_to_all(leaving, arrived)
    return arrived[route.places]


def _send_back(rows: Array, route: Route, ranks: Ranks) -> Array:
    """Rows as this rank's experts have them to where they came from; those that return here, slot by slot."""
    module = namespace(rows)
    slots = module.empty((len(route.order), rows.shape[1]), rows.dtype)
    if route.shares is not None:
        leaving = module.empty_like(rows)
        leaving[route.places] = rows
        returned = module.empty_like(slots)
        ranks.all_to_all(leaving, returned, *route.shares[::-1])
    else:
        assert route.capacity is not None
        leaving = module.zeros((len(rows) + 1, rows.shape[1]), rows.dtype)
        leaving[module.where(route.is_there, route.places, len(rows))] = rows  # rows of no expert go where nobody looks
        shares = module.empty_like(rows)
        ranks.all_to_all(leaving[:-1], shares)
        row, run, _ = _runs(route.wanted, len(slots))
        has_room = row < route.capacity
        found = module.where(has_room, row + run * route.capacity, len(rows))
        returned = module.concatenate([shares, module.zeros((1, rows.shape[1]), rows.dtype)])[found]
    slots[route.order] = returned
    return slots


# --- quantized rows -----------------------------------------------------------------------------


def can_travel(format: Format) -> bool:
    """Whether a row's codes and scales do not depend on where the row lies, nor on its neighbours but for an amax."""
    blocks = [block for block in (format.storage.block, format.amax_block) if block is not None]
    return not format.is_stochastic and all(rows == 1 for rows, _ in blocks)


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a part as bytes: its codes, its scales, its global scale, whichever the format has for each row."""

    format: Format
    k: int

    def __post_init__(self) -> None:
        if not can_travel(self.format):
            why = "rounds at random by a row's place" if self.format.is_stochastic else "has blocks of many rows"
            raise ValueError(
                f"{self.format.name} {why}, and a token that is sent has codes of its own; send another format (mxfp8, "
                f"fp8_block_1x128, nvfp4, ...), or bf16 and quantize where it arrives"
            )

    @property
    def fields(self) -> list[tuple[np.dtype[Any], int]]:
        """Type and number of codes, scales and global scales of a row."""
        storage = self.format.storage
        layout = part_layout(storage, (1, self.k))
        scales = layout.num_scales[1] if storage.block is not None else 0
        globals_ = layout.num_global_scales if storage.global_per_row else 0
        return [(layout.codes_dtype, layout.codes.columns), (layout.scales_dtype, scales),
                (np.dtype(np.float32), globals_)]

    def pack(self, rows: Array, codes: Array, scales: Array | None, globals_: Array | None) -> Array:
        """Those rows of codes (n, columns), scales (n, blocks) and global scales (n,) as bytes."""
        module, pieces = namespace(codes), []
        for (dtype, count), array in zip(self.fields, (codes, scales, globals_), strict=True):
            if count and array is not None:
                chosen = module.ascontiguousarray(array[rows]).reshape(-1).view(np.uint8)
                pieces.append(chosen.reshape(len(rows), count * dtype.itemsize))
        return module.concatenate(pieces, axis=1) if pieces else module.empty((len(rows), 0), np.uint8)

    def unpack(self, records: Array) -> list[Array]:
        """Codes, scales and global scales, each (n, count); inverse of pack."""
        module, arrays, at = namespace(records), [], 0
        for dtype, count in self.fields:
            piece = records[:, at : at + count * dtype.itemsize]
            if dtype != np.uint8:  # bytes stay where they are, and are copied once, to their place
                piece = module.ascontiguousarray(piece).reshape(-1).view(dtype).reshape(len(records), count)
            arrays.append(piece)
            at += count * dtype.itemsize
        return arrays


def _scale_places(part: GroupedPart, lengths: Array, count: int) -> Array:
    """Where in part.scales those of each row lie: (count, blocks); of rows of no member those of row 0."""
    span, blocks = part.layout.scales, part.format.storage.num_scales((1, part.layout.each))[1]
    assert span is not None
    row, run, _ = _runs(lengths, count)
    pitch = span.units(lengths)  # a member's scales lie (blocks, pitch)
    first = _starts(pitch) * blocks
    return first[run][:, None] + namespace(lengths).arange(blocks) * pitch[run][:, None] + row[:, None]


def _member_sizes(lengths: Array, capacity: int) -> Sizes:
    """Sizes on the host where the array is there, else on its device."""
    if isinstance(lengths, np.ndarray):
        return Sizes.known(lengths, capacity)
    return Sizes(len(lengths), None, None, lengths, "int64", capacity)


# --- dispatch and combine -----------------------------------------------------------------------


def dispatch(
    x: Any, route: Route, ranks: Any, format: Format | str = "mxfp8", *, weights: Any = None
) -> GroupedArray:
    """Tokens to their experts, quantized before they are sent; all ranks call it.

    x        (tokens, k) float array
    format   of the rowwise part; each row has scales of its own, or (FP8, NVFP4) each expert has one amax, the largest
             of its tokens on all ranks. bf16, fp16 and fp32 send the values.
    weights  float32 (tokens, top) that the slots are multiplied by first: the gradient of `combine`
    returns  GroupedArray of this rank's experts with a rowwise part: the bytes that grouped_quantize makes of all
             tokens on one rank

    Raises ValueError for a format whose blocks are of several rows, or that rounds at random.
    """
    ranks, x = as_ranks(ranks), as_array(x, "x")
    if x.ndim != 2 or len(x) != route.tokens:
        raise ValueError(f"x on {ranks} is (tokens, k) of the route's {route.tokens} tokens, not {x.shape}")
    wanted = as_format(format).resolve(ops._nominal(x.dtype))
    record = Record(wanted, x.shape[1])
    with on_device(x.device):
        module, per_expert = namespace(x), None
        slots = route.order // max(route.top, 1)
        if weights is not None:
            x = _weighted(x[slots], weights, route)
            slots = module.arange(len(slots))
        if wanted.measures_amax:
            rows, per_expert = _by_expert(x[slots], route, ranks, record)
        else:
            part = ops.quantize(x, rowwise=wanted).part("rowwise")
            rows = record.pack(slots, part.codes, part.scales, part.global_scale)
        arrived = _send(rows, route, ranks)
        sizes = route.sizes
        group = zeros_group(wanted, "outer", x.shape[1], _member_sizes(sizes, len(arrived)), module)
        codes, scales, globals_ = record.unpack(arrived)
        group.codes[...] = codes
        if route.capacity:  # rows of no expert become zero, as bytes: 0 times NaN is NaN
            stored = group.base[: group.layout.codes_nbytes].reshape(len(arrived), -1)
            stored *= route.is_there[:, None]
        if scales.size:
            group.scales[_scale_places(group, sizes, len(arrived))] = scales
        if globals_.size:
            assert group.global_scale is not None
            group.global_scale[...] = globals_[:, 0]
        if per_expert is not None:
            mine = slice(ranks.rank * route.num_local, (ranks.rank + 1) * route.num_local)
            for name in ("scales", "global_scale", "amax"):
                source, target = getattr(per_expert, name), getattr(group, name)
                if target is not None and (name != "scales" or wanted.storage.block is None):
                    target[...] = source[mine]
        columns = Sizes.uniform(route.num_local, x.shape[1])
        return GroupedArray(group, None, group.sizes, columns, ops._nominal(x.dtype))


def _weighted(slots: Array, weights: Any, route: Route) -> Array:
    """Sorted slots times their weights, rounded once to their dtype."""
    weights = _as_weights(weights, route).reshape(-1)[route.order]
    return (slots.astype(np.float32) * weights[:, None]).astype(slots.dtype)


def _as_weights(weights: Any, route: Route) -> Array:
    weights = as_array(weights, "weights")
    if weights.shape != (route.tokens, route.top):
        raise ValueError(f"weights are {(route.tokens, route.top)}, one for each choice, not {weights.shape}")
    return weights.astype(np.float32, copy=False)


def _by_expert(slots: Array, route: Route, ranks: Ranks, record: Record) -> tuple[Array, GroupedPart]:
    """Records of the sorted slots by the amax that each expert has on all ranks, and the part with these amaxes."""
    lengths = route.lengths
    rows = _member_sizes(lengths, len(slots))
    sizes: Any = rows.values if rows.is_known else lengths
    if record.format.storage.rht:
        amaxes = grouped_quantize(slots, sizes, rowwise=record.format).rowwise.amax.copy()  # type: ignore[union-attr]
    else:
        amaxes = namespace(slots).zeros(len(lengths), np.float32)
        backend_on(place(slots) < 0).record_amaxes(slots, rows, amaxes)
    ranks.all_reduce_max(amaxes)
    part = grouped_quantize(slots, sizes, rowwise=record.format, amax=amaxes).rowwise
    assert isinstance(part, GroupedPart)
    scales = None
    if part.layout.scales is not None:
        scales = part.scales[_scale_places(part, lengths, len(slots))]
    return record.pack(namespace(slots).arange(len(slots)), part.codes, scales, None), part


def combine(
    y: Any, route: Route, ranks: Any, *, weights: Any = None, format: Format | str | None = None
) -> Array:
    """What experts made of tokens back to the tokens' ranks, summed over the choices; all ranks call it.

    y        (rows, n), as dispatch's group multiplied by the experts' weights gives it
    weights  float32 (tokens, top) that choices are multiplied by; None: 1
    format   of the way back, each row by itself; None sends the values
    returns  (tokens, n) of y's dtype, summed in float32 in the order of the choices
    """
    slots = returned(y, route, ranks, format=format)
    with on_device(slots.device):
        return weighted_sum(slots, route, weights)


def weighted_sum(slots: Array, route: Route, weights: Any = None) -> Array:
    """(tokens, top, n) times weights (tokens, top), summed over the choices in float32: (tokens, n)."""
    weights = None if weights is None else _as_weights(weights, route)
    total = namespace(slots).zeros((route.tokens, slots.shape[2]), np.float32)
    for choice in range(route.top):
        row = slots[:, choice].astype(np.float32)
        total += row if weights is None else row * weights[:, choice, None]
    return total.astype(slots.dtype)


def returned(y: Any, route: Route, ranks: Any, *, format: Format | str | None = None) -> Array:
    """What came back for each choice, not summed: (tokens, top, n)."""
    ranks, y = as_ranks(ranks), as_array(y, "y")
    if y.ndim != 2 or len(y) != route.arriving:
        raise ValueError(f"y on {ranks} is (rows, n) of the {route.arriving} rows of dispatch's group, not {y.shape}")
    dtype = ops._nominal(y.dtype)
    wanted = (HighPrecision() if format is None else as_format(format)).resolve(dtype)
    if wanted.measures_amax:
        raise ValueError(f"{wanted.name} has one amax for all rows; the way back takes a format with scales for each "
                         f"row, or None")
    record = Record(wanted, y.shape[1])
    with on_device(y.device):
        module = namespace(y)
        shape = (route.tokens, route.top, y.shape[1])
        if format is None:
            rows = module.ascontiguousarray(y).reshape(-1).view(np.uint8).reshape(len(y), y.shape[1] * y.itemsize)
            return _send_back(rows, route, ranks).reshape(-1).view(y.dtype).reshape(shape)
        part = ops.quantize(y, rowwise=wanted).part("rowwise")
        rows = record.pack(module.arange(len(y)), part.codes, part.scales, part.global_scale)
        codes, scales, globals_ = record.unpack(_send_back(rows, route, ranks))
        arrived = zeros_part(wanted, (len(codes), y.shape[1]), module)
        _fill(arrived, codes, scales, globals_)
        return HybridArray(arrived, dtype=dtype).dequantize().reshape(shape)


def _fill(part: QuantizedArray, codes: Array, scales: Array, globals_: Array) -> None:
    part.codes[...] = codes
    if scales.size:
        part.scales[...] = scales
    if globals_.size:
        assert part.global_scale is not None
        part.global_scale[...] = globals_[:, 0]


__all__ = ["Record", "Route", "can_travel", "combine", "dispatch", "make_route", "returned", "weighted_sum"]
