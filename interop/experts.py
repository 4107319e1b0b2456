"""Expert parallelism: tokens quantized where they are, sent to the ranks of their experts, and what comes back.

    route = make_route(choices, num_experts, ranks)          # choices (tokens, top): the experts of each token
    g = dispatch(x, route, ranks, "mxfp8")                   # this rank's experts, a GroupedArray: not quantized anew
    y = combine(g @ gw.T, route, ranks, weights=weights)     # (tokens, n)

A token's codes travel as one row of bytes, its scales as another. Rank r has experts r * local to (r + 1) * local. Rows
of an expert lie in the order of ranks, then of tokens, as a stable sort of all tokens on one rank puts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hqarray import ops
from hqarray.arrays import HybridArray, zeros_part
from hqarray.formats import Format, HighPrecision, as_format
from hqarray.grouped import GroupedArray
from hqarray.grouped_making import backend_on, grouped_quantize
from hqarray.grouped_parts import GroupedPart, layout_of, memory_of, on_device
from hqarray.groups import Sizes
from hqarray.inputs import as_array, as_ours, place
from hqarray.layout import Array, namespace, part_layout

from .distributed import Ranks, as_ranks
from .pieces import block, bytes_of, memory_of_part, take_rows

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
    sizes        int64 (local,): rows of each of this rank's experts
    leaving      int64: the sorted slot of each row that is sent; with a capacity what is not wanted is some slot
    places       int64 (rows,): for each row as this rank's experts have them, where it is among those that arrive;
                 where it is no expert's, as for row 0
    sources      the same, but one behind them where it is no expert's
    back         int64 (rows,): for each row that arrived, which of the experts' rows it is
    returning    int64 (slots,): for each slot, which of the rows that come back is its, or one behind them
    found        index arrays that depend on the route alone, by name
    """

    tokens: int
    top: int
    order: Array
    lengths: Array
    wanted: Array
    received: Array
    capacity: int | None
    shares: tuple[list[int], list[int]] | None
    sizes: Array
    leaving: Array
    places: Array
    sources: Array
    back: Array
    returning: Array
    found: dict[Any, Array] = field(default_factory=dict, repr=False)

    @property
    def num_local(self) -> int:
        """Experts of this rank."""
        return int(self.received.shape[1])

    @property
    def arriving(self) -> int:
        """Rows that arrive, or that there is room for."""
        return len(self.sources)

    @property
    def tokens_leaving(self) -> Array:
        """The token of each row that is sent; where there is none, 0."""
        if not len(self.order):
            return self.leaving
        return self.remembered("tokens", lambda: self.order[self.leaving] // self.top)

    @property
    def slot_tokens(self) -> Array:
        """The token of each sorted slot."""
        return self.remembered("all tokens", lambda: self.order // max(self.top, 1))

    def remembered(self, name: Any, make: Callable[[], Array]) -> Array:
        array = self.found.get(name)
        if array is None:
            array = self.found[name] = make()
        return array


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
        places, is_there = _places(received, count, capacity)
        sources = places if capacity is None else module.where(is_there, places, count)
        back = _inverse(sources, count)
        returning, leaving = _inverse(order, len(order)), module.arange(len(order))
        if capacity is not None:
            row, run, _ = _runs(wanted, len(order))
            returning = module.where(row < capacity, row + run * capacity, ranks.size * capacity)[returning]
            leaving = (_starts(wanted)[:, None] + module.arange(capacity)).reshape(-1)
            leaving = module.minimum(leaving, max(len(order) - 1, 0))
        sizes = module.ascontiguousarray(received.sum(axis=0))
    tokens, top = choices.shape
    return Route(tokens, top, order, lengths, wanted, received, capacity, shares, sizes, leaving, places, sources,
                 back, returning)


def _inverse(index: Array, count: int) -> Array:
    """Of each number below count, where in index it is; 0 where it is not."""
    module = namespace(index)
    inverse = module.zeros(count + 1, np.int64)
    inverse[index] = module.arange(len(index))
    return inverse[:count]


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
    """Rows of bytes that leave to the ranks of their experts; those that arrive, and a zero one behind them."""
    arrived = _with_zero_row(route.arriving, rows)
    sent, received = route.shares or (None, None)
    ranks.all_to_all(rows, arrived[:-1], sent, received)
    return arrived


def _send_back(rows: Array, route: Route, ranks: Ranks) -> Array:
    """Rows as this rank's experts have them to where they came from; those that return here, slot by slot."""
    leaving = take_rows(rows, route.back)
    returned = _with_zero_row(len(route.leaving), rows)
    sent, received = route.shares or (None, None)
    ranks.all_to_all(leaving, returned[:-1], received, sent)
    return take_rows(returned, route.returning)


def _with_zero_row(count: int, like: Array) -> Array:
    rows = namespace(like).empty((count + 1, like.shape[1]), like.dtype)
    rows[count:] = 0
    return rows


# --- quantized rows -----------------------------------------------------------------------------


def can_travel(format: Format) -> bool:
    """Whether a row's codes and scales do not depend on where the row lies, nor on its neighbours but for an amax."""
    blocks = [block for block in (format.storage.block, format.amax_block) if block is not None]
    return not format.is_stochastic and all(rows == 1 for rows, _ in blocks)


@dataclass(frozen=True, slots=True)
class Record:
    """How a row of a part travels: its codes with their padding; its scales and global scale, if they are its own."""

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
    def pitch(self) -> int:
        """Bytes of a row of codes."""
        codes = part_layout(self.format.storage, (1, self.k)).codes
        return codes.pitch * codes.itemsize

    def codes(self, memory: Any, count: int) -> Array:
        """The rows of codes that a part's memory begins with, and their padding, as bytes (count, pitch)."""
        return block(memory, 0, (count, self.pitch))

    @property
    def scales(self) -> tuple[np.dtype[Any], int]:
        """Type and number of a row's scales."""
        layout = part_layout(self.format.storage, (1, self.k))
        return layout.scales_dtype, layout.num_scales[1] if self.format.storage.block is not None else 0

    def pack(self, scales: Array, globals_: Array | None) -> Array | None:
        """Scales (n, blocks) and global scales (n,) as bytes; None where rows have none of their own."""
        pieces = [bytes_of(scales)] if self.scales[1] else []
        if self.format.storage.global_per_row:
            assert globals_ is not None
            pieces.append(bytes_of(globals_[:, None]))
        return namespace(pieces[0]).concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0] if pieces else None

    def unpack(self, rows: Array) -> tuple[Array | None, Array | None]:
        """Scales and global scales, each None where rows have none; inverse of pack."""
        (dtype, count), at = self.scales, self.scales[1] * self.scales[0].itemsize
        return _values(rows[:, :at], dtype) if count else None, _values(rows[:, at:], np.dtype(np.float32))


def _values(rows: Array, dtype: np.dtype[Any]) -> Array | None:
    """Bytes (n, width) as (n, values)."""
    if not rows.shape[1]:
        return None
    whole = namespace(rows).ascontiguousarray(rows).reshape(-1)
    return whole.view(dtype).reshape(len(rows), rows.shape[1] // dtype.itemsize)


def _scale_places(part: GroupedPart, route: Route, side: str, count: int) -> Array:
    """Where in part.scales those of each row lie: (count, blocks); of rows of no member those of row 0.

    side  "lengths" or "sizes": of which of the route the part's members are
    """
    blocks, pad = part.format.storage.num_scales((1, part.layout.each))[1], part.layout.scales
    return route.remembered((side, blocks, pad), lambda: _find_scales(part, getattr(route, side), count))


def _find_scales(part: GroupedPart, lengths: Array, count: int) -> Array:
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


def _group_to_fill(format: Format, k: int, sizes: Sizes, module: Any) -> GroupedPart:
    """A group of rows whose codes are not written yet; the rest of it is zero."""
    layout = layout_of(format, "outer", k, sizes)
    base = module.empty(layout.nbytes, np.uint8)
    base[layout.codes_nbytes :] = 0
    return GroupedPart(format, layout, sizes, memory_of(base), format.measures_amax)


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
        tokens, chosen = route.tokens_leaving, route.leaving
        if weights is not None:
            x = _weighted(take_rows(bytes_of(x), route.slot_tokens).view(x.dtype), weights, route)
            tokens = chosen
        if wanted.measures_amax:
            if weights is None:
                x = take_rows(bytes_of(x), route.slot_tokens).view(x.dtype)
            per_expert, scales = _by_expert(x, route, ranks, record)
            codes, extra, tokens = record.codes(per_expert.memory, len(x)), record.pack(scales, None), chosen
        else:
            part = ops.quantize(x, rowwise=wanted).part("rowwise").packed()
            codes, extra = record.codes(memory_of_part(part), len(x)), record.pack(part.scales, part.global_scale)
        arrived = _send(take_rows(codes, tokens), route, ranks)
        count = route.arriving
        group = _group_to_fill(wanted, x.shape[1], _member_sizes(route.sizes, count), module)
        take_rows(arrived, route.sources, record.codes(group.memory, count))
        if extra is not None:
            found = _send(take_rows(extra, tokens), route, ranks)
            scales, globals_ = record.unpack(take_rows(found, route.places))
            if scales is not None and count:
                group.scales[_scale_places(group, route, "sizes", count)] = scales
            if globals_ is not None:
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


def _by_expert(slots: Array, route: Route, ranks: Ranks, record: Record) -> tuple[GroupedPart, Array | None]:
    """The sorted slots quantized by the amax that each expert has on all ranks, and each row's scales."""
    lengths = route.lengths
    rows = _member_sizes(lengths, len(slots))
    sizes: Any = rows.values if rows.is_known else lengths
    if record.format.storage.rht:
        amaxes = grouped_quantize(slots, sizes, rowwise=record.format).rowwise.amax.copy()  # type: ignore[union-attr]
    else:
        amaxes = namespace(slots).zeros(len(lengths), np.float32)
        backend_on(place(slots) < 0).raise_to_amaxes(slots, rows, amaxes)
    ranks.all_reduce_max(amaxes)
    part = grouped_quantize(slots, sizes, rowwise=record.format, amax=amaxes).rowwise
    assert isinstance(part, GroupedPart)
    scales = None
    if part.layout.scales is not None:
        scales = part.scales[_scale_places(part, route, "lengths", len(slots))]
    return part, scales


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
    module, total = namespace(slots), None
    for choice in range(route.top):
        row = slots[:, choice]
        if weights is not None:
            row = module.multiply(row, weights[:, choice, None], dtype=np.float32)
        total = row.astype(np.float32) if total is None else module.add(total, row, out=total)
    if total is None:
        total = module.zeros((route.tokens, slots.shape[2]), np.float32)
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
        shape = (route.tokens, route.top, y.shape[1])
        if format is None:
            return _send_back(bytes_of(y), route, ranks).view(y.dtype).reshape(shape)
        part = ops.quantize(y, rowwise=wanted).part("rowwise").packed()
        extra = record.pack(part.scales, part.global_scale)
        codes = _send_back(record.codes(memory_of_part(part), len(y)), route, ranks)
        arrived = zeros_part(wanted, (len(codes), y.shape[1]), namespace(y))
        record.codes(memory_of_part(arrived), len(codes))[...] = codes
        if extra is not None:
            scales, globals_ = record.unpack(_send_back(extra, route, ranks))
            if scales is not None:
                arrived.scales[...] = scales
            if globals_ is not None:
                assert arrived.global_scale is not None
                arrived.global_scale[...] = globals_[:, 0]
        return HybridArray(arrived, dtype=dtype).dequantize().reshape(shape)


__all__ = ["Record", "Route", "can_travel", "combine", "dispatch", "make_route", "returned", "weighted_sum"]
