"""Expert parallelism: tokens quantized where they are, sent to the ranks of their experts, and what comes back.

    route = make_route(choices, num_experts, ranks)          # choices (tokens, top): the experts of each token
    g = dispatch(x, route, ranks, "mxfp8")                   # this rank's experts, a GroupedArray: not quantized anew
    y = combine(g @ gw.T, route, ranks, weights=weights)     # (tokens, n)

A token travels as one record, its codes and scales. Rank r has experts r * local to (r + 1) * local. Rows of an expert
lie in the order of ranks, then of tokens, as a stable sort of all tokens on one rank puts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hqarray import ops
from hqarray.arrays import HybridArray, zeros_part
from hqarray.formats import Format, HighPrecision, as_format
from hqarray.grouped import GroupedArray
from hqarray.grouped_making import backend_on, grouped_quantize
from hqarray.grouped_parts import GroupedPart, layout_of, memory_of, on_device
from hqarray.groups import Sizes
from hqarray.inputs import as_array, as_ours, place
from hqarray.layout import PITCH, Array, namespace
from hqarray.record_ops import pack, unpack, weighted_sum
from hqarray.records import Lines, Record

from .distributed import Ranks, as_ranks
from .pieces import bytes_of, spread_rows

# --- where tokens go ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where each token goes, and where it comes back from.

    tokens, top  choices are (tokens, top); a slot is one of them
    order        int64 (slots,): slots sorted by expert
    sorted_at    int64 (slots,): for each slot, where it is in that order
    lengths      int64 (experts,): slots of each expert, on all ranks' experts
    wanted       int64 (ranks,): slots for each rank, those beyond the capacity included
    received     int64 (ranks, local): rows from each rank for each expert of this one
    capacity     rows that are sent to each rank, whatever the sizes, which the host then does not know; None: just
                 those that are wanted
    shares       rows for each rank and from each, on the host; None with a capacity
    sizes        int64 (local,): rows of each of this rank's experts
    sent_at      int64 (slots,): for each slot, where it is among the rows that are sent, and that come back; beyond the
                 capacity, one behind them
    sources      int64 (rows,): for each row as this rank's experts have them, where it is among those that arrive; one
                 behind them where it is no expert's
    found        index arrays that depend on the route and a format, by stream; what a graph captures is not kept
    """

    tokens: int
    top: int
    order: Array
    sorted_at: Array
    lengths: Array
    wanted: Array
    received: Array
    capacity: int | None
    shares: tuple[list[int], list[int]] | None
    sizes: Array
    sent_at: Array
    sources: Array
    found: dict[Any, Array] = field(default_factory=dict, repr=False)

    @property
    def num_local(self) -> int:
        """Experts of this rank."""
        return int(self.received.shape[1])

    @property
    def leaving(self) -> int:
        """Rows that are sent, wanted or not."""
        return sum(self.shares[0]) if self.shares is not None else len(self.wanted) * (self.capacity or 0)

    @property
    def arriving(self) -> int:
        """Rows that arrive, or that there is room for."""
        return len(self.sources)

    @property
    def dropped(self) -> Array:
        """int64 (ranks,), where the route lies: this rank's slots for each rank that are beyond the capacity."""
        if self.capacity is None:
            return namespace(self.wanted).zeros_like(self.wanted)
        return namespace(self.wanted).maximum(self.wanted - self.capacity, 0)

    def remembered(self, name: tuple[Any, ...], make: Callable[[], Array]) -> Array:
        """What was made under this name, which says all that it depends on beside the route, or is made now."""
        if isinstance(self.order, np.ndarray):
            name = *name, None
        else:
            from hqarray.cuda_launch import is_capturing, stream_of

            stream = stream_of(self.order.data.device_id)
            if is_capturing(stream):
                return make()
            name = *name, stream
        array = self.found.get(name)
        if array is None:
            array = self.found[name] = make()
        return array

    def expect(self, array: Array, what: str, ranks: Ranks) -> None:
        """Raises ValueError for other ranks than the route's, or an array that does not lie where the route does."""
        if len(self.wanted) != ranks.size:
            raise ValueError(f"this Route is of {len(self.wanted)} ranks, and {ranks} is one of {ranks.size}; make it "
                             f"by make_route(choices, num_experts, ranks)")
        where, own = ("the host" if ordinal < 0 else f"cuda:{ordinal}" for ordinal in (place(array), place(self.order)))
        if where != own:
            raise ValueError(f"{what} on {ranks} lies on {where} and the route on {own}; make_route takes choices that "
                             f"lie where the tokens do")


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
                 Else so many rows are sent from this rank to each rank, not to each expert; the sizes stay on the
                 device, and nothing synchronises. Slots for a rank are sent by expert: those beyond the capacity, which
                 are of its last experts, are left out and come back as zeros; Route.dropped counts them.

    Raises ValueError for choices that are none; on a GPU they are not looked at.
    """
    ranks = as_ranks(ranks)
    with ranks.agreement("make_route") as said:
        choices = _choices(choices, num_experts, ranks, capacity)
        said += f"{num_experts} experts", f"capacity {capacity}"
    with on_device(choices.device):
        return _routed(choices, num_experts, ranks, capacity)


def _choices(choices: Any, num_experts: int, ranks: Ranks, capacity: int | None) -> Array:
    """The choices as an array; raises TypeError or ValueError for what is no route."""
    choices = as_ours(choices, "choices")
    if getattr(choices, "ndim", 0) != 2 or choices.dtype.kind not in "iu":
        found = f"{getattr(choices, 'dtype', type(choices).__name__)} {getattr(choices, 'shape', '')}"
        raise ValueError(f"choices on {ranks} are integers (tokens, top), not {found}")
    if not isinstance(num_experts, (int, np.integer)) or num_experts < 1 or num_experts % ranks.size:
        raise ValueError(f"{num_experts} experts on {ranks.size} ranks: each rank has as many; give a multiple")
    if isinstance(choices, np.ndarray) and choices.size and not 0 <= choices.min() <= choices.max() < num_experts:
        raise ValueError(f"choices on {ranks} are from {choices.min()} to {choices.max()}, the experts 0 to "
                         f"{num_experts - 1}")
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer))):
        raise TypeError(f"capacity={capacity!r} is no number of rows for each rank; a capacity factor makes "
                        f"math.ceil(factor * tokens * top / ranks)")
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity={capacity}: rows for each rank, 0 or more")
    return choices


def _routed(choices: Array, num_experts: int, ranks: Ranks, capacity: int | None) -> Route:
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
    sorted_at = sent_at = _inverse(order)
    if capacity is not None:
        row, run, is_wanted = _runs(wanted, len(order))
        sent_at = module.where(is_wanted & (row < capacity), row + run * capacity, ranks.size * capacity)[sorted_at]
    tokens, top = choices.shape
    return Route(
        tokens, top, order, sorted_at, lengths, wanted, received, capacity, shares,
        module.ascontiguousarray(received.sum(axis=0)), sent_at, sources,
    )


def _inverse(order: Array) -> Array:
    """Where each number is in a permutation."""
    module = namespace(order)
    inverse = module.empty_like(order)
    inverse[order] = module.arange(len(order))
    return inverse


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
    """Rows of bytes that leave to the ranks of their experts; those that arrive."""
    arrived = namespace(rows).empty((route.arriving, rows.shape[1]), rows.dtype)
    sent, received = route.shares or (None, None)
    ranks.all_to_all(rows, arrived, sent, received)
    return arrived


def _send_back(rows: Array, route: Route, ranks: Ranks) -> Array:
    """Rows of bytes as they arrived to where they came from; route.sent_at names a slot's, or none of them."""
    returned = namespace(rows).empty((route.leaving, rows.shape[1]), rows.dtype)
    sent, received = route.shares or (None, None)
    ranks.all_to_all(rows, returned, received, sent)
    return returned


# --- quantized rows -----------------------------------------------------------------------------


def _lines(part: GroupedPart, route: Route, side: Literal["lengths", "sizes"], count: int) -> Lines:
    """The rows of a group whose members are those of the route: slots by expert, or rows of this rank's experts."""
    span = part.layout.scales
    if span is None or not Record(part.format, part.layout.each).scales[1]:
        return Lines.of_group(part, None, None)
    blocks, lengths = part.format.storage.num_scales((1, part.layout.each))[1], getattr(route, side)

    def find() -> Array:
        row, run, is_there = _runs(lengths, count)
        pitch = span.units(lengths)  # a member's scales lie (blocks, pitch)
        first = _starts(pitch) * blocks
        module = namespace(lengths)
        return module.stack([module.where(is_there, first[run] + row, -1), pitch[run]])

    starts, steps = route.remembered((side, blocks, span), find)
    return Lines.of_group(part, starts, steps)


def _rows_of(x: Array, record: Record) -> Lines:
    """The rows of a matrix in a record's format; values that fit lie as they are."""
    if not record.scales[1] and record.format.scaling is None and x.dtype == record.format.storage.element.dtype:
        rows = bytes_of(x)
        if rows.shape[1] == record.pitch and (isinstance(rows, np.ndarray) or rows.data.ptr % PITCH == 0):
            return Lines(record, rows)
    return Lines.of_part(ops.quantize(x, rowwise=record.format).part("rowwise").packed())


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
             of its tokens on all ranks, those that a capacity leaves out included. bf16, fp16 and fp32 send the
             values.
    weights  float32 (tokens, top) that the slots are multiplied by first: the gradient of `combine`
    returns  GroupedArray of this rank's experts with a rowwise part: the bytes that grouped_quantize makes of all
             tokens on one rank

    Raises ValueError for tokens or weights that are not the route's, and for a format whose blocks are of several rows,
    or that rounds at random.
    """
    ranks = as_ranks(ranks)
    with ranks.agreement("dispatch") as said:
        x = as_array(x, "x")
        route.expect(x, "x", ranks)
        if x.ndim != 2 or len(x) != route.tokens:
            raise ValueError(f"x on {ranks} is (tokens, k) of the route's {route.tokens} tokens, not {x.shape}")
        wanted = as_format(format).resolve(ops.nominal_dtype(x.dtype))
        record = Record(wanted, x.shape[1])
        weights = None if weights is None else as_weights(weights, route, ranks)
        said += wanted, f"{x.shape[1]} columns", x.dtype
    with on_device(x.device):
        per_expert, places = None, route.sent_at.reshape(route.tokens, route.top)
        if weights is not None or wanted.measures_amax:  # rows are slots in order
            places = None if route.capacity is None else route.sent_at[route.order]
        if weights is not None:
            x = _weighted(x, weights, route)
        if not wanted.measures_amax:
            lines = _rows_of(x, record)
        else:
            if weights is None:
                at = route.sorted_at.reshape(route.tokens, route.top)
                x = spread_rows(bytes_of(x), at, len(route.order)).view(x.dtype)
            per_expert = _by_expert(x, route, ranks, wanted)
            lines = _lines(per_expert, route, "lengths", len(x))
        arrived = _send(pack(lines, places, route.leaving), route, ranks)
        sizes = _member_sizes(route.sizes, route.arriving)
        group = _group_to_fill(wanted, x.shape[1], sizes, namespace(x))
        unpack(arrived, _lines(group, route, "sizes", route.arriving), route.sources)
        if per_expert is not None:
            mine = slice(ranks.rank * route.num_local, (ranks.rank + 1) * route.num_local)
            for name in ("scales", "global_scale", "amax"):
                source, target = getattr(per_expert, name), getattr(group, name)
                if target is not None and (name != "scales" or wanted.storage.block is None):
                    target[...] = source[mine]
        columns = Sizes.uniform(route.num_local, x.shape[1])
        return GroupedArray(group, None, group.sizes, columns, ops.nominal_dtype(x.dtype))


def _weighted(x: Array, weights: Array, route: Route) -> Array:
    """Sorted slots times their weights, rounded once to their dtype."""
    weights = weights.reshape(-1)[route.order]
    return weighted_sum(x, (len(weights), 1), route.order // max(route.top, 1), weights[:, None])


def as_weights(weights: Any, route: Route, ranks: Ranks) -> Array:
    """Weights as float32 (tokens, top). Raises ValueError for another shape or place."""
    weights = as_array(weights, "weights")
    route.expect(weights, "weights", ranks)
    if weights.shape != (route.tokens, route.top):
        raise ValueError(f"weights on {ranks} are {(route.tokens, route.top)}, one for each choice, not "
                         f"{weights.shape}")
    with on_device(weights.device):
        return weights.astype(np.float32, copy=False)


def _by_expert(slots: Array, route: Route, ranks: Ranks, format: Format) -> GroupedPart:
    """The sorted slots quantized by the amax that each expert has on all ranks."""
    lengths = route.lengths
    rows = _member_sizes(lengths, len(slots))
    sizes: Any = rows.values if rows.is_known else lengths
    if format.storage.rht:
        amaxes = grouped_quantize(slots, sizes, rowwise=format).rowwise.amax.copy()  # type: ignore[union-attr]
    else:
        amaxes = namespace(slots).zeros(len(lengths), np.float32)
        backend_on(place(slots) < 0).raise_to_amaxes(slots, rows, amaxes)
    ranks.all_reduce_max(amaxes)
    part = grouped_quantize(slots, sizes, rowwise=format, amax=amaxes).rowwise
    assert isinstance(part, GroupedPart)
    return part


def combine(
    y: Any, route: Route, ranks: Any, *, weights: Any = None, format: Format | str | None = None
) -> Array:
    """What experts made of tokens back to the tokens' ranks, summed over the choices; all ranks call it.

    y        (rows, n), as dispatch's group multiplied by the experts' weights gives it
    weights  float32 (tokens, top) that choices are multiplied by; None: 1
    format   of the way back, each row by itself; None sends the values
    returns  (tokens, n) of y's dtype, summed in float32 in the order of the choices

    Raises ValueError for rows or weights that are not the route's, and for a format with one amax for all rows.
    """
    rows, index, weights = returned(y, route, ranks, weights=weights, format=format)
    with on_device(rows.device):
        return weighted_sum(rows, (route.tokens, route.top), index, weights)


def returned(
    y: Any, route: Route, ranks: Any, *, weights: Any = None, format: Format | str | None = None
) -> tuple[Array, Array | None, Array | None]:
    """What combine sums: the rows that came back, for each slot which is its own (None: in order), and the weights."""
    ranks = as_ranks(ranks)
    with ranks.agreement("combine") as said:
        y = as_array(y, "y")
        route.expect(y, "y", ranks)
        if y.ndim != 2 or len(y) != route.arriving:
            raise ValueError(f"y on {ranks} is (rows, n) of the {route.arriving} rows of dispatch's group, not "
                             f"{y.shape}")
        weights = None if weights is None else as_weights(weights, route, ranks)
        dtype = ops.nominal_dtype(y.dtype)
        wanted = (HighPrecision() if format is None else as_format(format)).resolve(dtype)
        if wanted.measures_amax:
            raise ValueError(f"{wanted.name} has one amax for all rows; the way back takes a format with scales for "
                             f"each row, or None")
        record = Record(wanted, y.shape[1])
        said += wanted, f"{y.shape[1]} columns", y.dtype
    with on_device(y.device):
        if format is None:
            rows = _send_back(spread_rows(bytes_of(y), route.sources, route.arriving), route, ranks).view(y.dtype)
            return rows, route.sent_at, weights
        found = _send_back(pack(_rows_of(y, record), route.sources, route.arriving), route, ranks)
        slots = zeros_part(wanted, (len(route.sent_at), y.shape[1]), namespace(y))
        unpack(found, Lines.of_part(slots), route.sent_at)
        return HybridArray(slots, dtype=dtype).dequantize().astype(y.dtype, copy=False), None, weights


__all__ = ["Route", "combine", "dispatch", "make_route"]
