"""Parts of a group: one direction of all its members in one allocation, and sizes as the host reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import PICKLE_VERSION, QuantizedArray, describe_bytes, describe_device, engine_fact
from .buffers import Packed, Separate, ordinal_of
from .display import SAMPLE, Picture, html_card, sample_scales, spread
from .formats import Format, as_format
from .groups import Axis, GroupedLayout, Sizes, Span, grouped_layout, span_starts
from .layout import ALIGNMENT, Array, namespace, part_layout, round_up, scale_layout

SHOWN_SHAPES = 8
"""How many shapes of members that differ along both axes a card lists."""

# --- sizes --------------------------------------------------------------------------------------


def read_sizes(sizes: Sizes) -> npt.NDArray[np.int64]:
    """Sizes as they are stored, a device's copied to the host: nothing is cut off."""
    if sizes.device is None or sizes.is_known:
        return sizes.values
    stored = sizes.device.get() if hasattr(sizes.device, "get") else sizes.device
    numbers = np.array(stored, np.int64)
    if sizes.kind == "ends":
        numbers[1:] -= numbers[:-1].copy()
    return numbers


def clamp(sizes: npt.NDArray[np.int64], capacity: int, alignment: int) -> npt.NDArray[np.int64]:
    """Sizes as kernels take them: negative ones are 0, and what passes the capacity is cut off."""
    sizes = np.clip(sizes, 0, capacity)
    starts = np.minimum(span_starts(Span(1, alignment), sizes)[:-1], capacity)
    clamped: npt.NDArray[np.int64] = np.minimum(sizes, capacity - starts)
    return clamped


def known(sizes: Sizes) -> Sizes:
    """The sizes on the host: themselves where they are there, else a copy, clamped."""
    if sizes.is_known:
        return sizes
    host = clamp(read_sizes(sizes), sizes.capacity, sizes.alignment)
    return Sizes.known(host, sizes.capacity, sizes.alignment)


def some_sizes(sizes: Sizes, first: int, last: int) -> Sizes:
    """Sizes of members first to last, which must be known; the capacity up to where the next one begins."""
    if sizes.each is not None:
        return Sizes.uniform(last - first, sizes.each)
    starts = np.minimum(sizes.starts, sizes.capacity)
    end = sizes.capacity if last == sizes.num_groups else int(starts[last])
    return Sizes.known(sizes.values[first:last], end - int(starts[first]), sizes.alignment)


# --- parts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GroupedPart:
    """One direction of all members: K-major matrices of one format in one buffer, where the layout says.

    sizes   of the layout's ragged axis
    memory  a NumPy array of at least layout.nbytes bytes, or CuPy's MemoryPointer to them; of an unquantized format
            the codes alone may be there (layout.codes_nbytes): a stacked array that nobody copied

    A range of members is a GroupedPart too: its memory begins at the first one's codes, and its layout counts the
    other offsets, which then lie anywhere (on their own itemsize), from there.
    """

    format: Format
    layout: GroupedLayout
    sizes: Sizes
    memory: Any
    has_amax: bool

    @property
    def num_groups(self) -> int:
        return self.layout.num_groups

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and scalars, padding included."""
        layout = self.layout
        scalars = 0 if layout.storage.scale == "none" else layout.globals_nbytes + 2 * 4 * layout.num_groups
        return layout.codes_nbytes + layout.scales_nbytes + scalars

    @property
    def ordinal(self) -> int:
        """The CUDA device that holds it; -1 for the host."""
        return ordinal_of(self.memory)

    @property
    def device(self) -> Any:
        """The CuPy device of CuPy buffers; "cpu" for NumPy's."""
        return self.memory.device

    @property
    def base(self) -> Array:
        """The bytes as an array, from the codes of the first member to the end of the layout."""
        layout = self.layout
        nbytes = layout.codes_nbytes if layout.storage.scale == "none" else layout.nbytes
        if isinstance(self.memory, np.ndarray):
            return self.memory[:nbytes]
        return namespace(self.memory).ndarray((nbytes,), np.uint8, self.memory)

    @property
    def padded_codes(self) -> Array:
        """Ragged "outer": (capacity, pitch) rows of all members; ragged "k": the members' codes one after another."""
        layout, dtype = self.layout, self.format.storage.element.dtype
        codes = self.base[: layout.codes_nbytes].view(dtype)
        pitch = layout.codes.nbytes // dtype.itemsize
        return codes.reshape(self.sizes.capacity, pitch) if layout.ragged == "outer" else codes

    @property
    def codes(self) -> Array:
        """padded_codes, of rows the logical columns."""
        codes = self.padded_codes
        return codes[:, : self._columns(self.layout.each)] if self.layout.ragged == "outer" else codes

    @property
    def scales(self) -> Array:
        """All scales, one dimension; (num_groups,) where a member has one."""
        layout = self.layout
        return self._segment(layout.scales_offset, layout.scales_nbytes).view(_scale_dtype(self.format))

    @property
    def global_scale(self) -> Array | None:
        """float32 (num_groups,) where the format has one; one a row of all members, one after another, where it has."""
        layout = self.layout
        return self._floats(layout.global_scale_offset, layout.num_global_scales) if layout.has_global_scale else None

    @property
    def amax(self) -> Array | None:
        """float32 (num_groups,), measured or given; None where none is."""
        return self._floats(self.layout.amax_offset, self.num_groups) if self.has_amax else None

    def _columns(self, k: int) -> int:
        element = self.format.storage.element
        return -(-k * element.stored_bits // (8 * element.dtype.itemsize))

    def _segment(self, offset: int, nbytes: int) -> Array:
        return self.base[offset : offset + nbytes]

    def _floats(self, offset: int, count: int) -> Array:
        return self._segment(offset, 4 * count).view(np.float32)

    def _globals_of(self, sizes: npt.NDArray[np.int64]) -> list[int]:
        """Where each member's global scales begin among all, and where the last one's end."""
        span = self.layout.globals
        if span is None:
            return list(range(self.num_groups + 1))
        return [int(start) * span.nbytes // 4 for start in span_starts(span, sizes)]

    def member(self, index: int) -> QuantizedArray:
        """Views of one member's buffers; its size must be known to the host."""
        return next(self._members(index, index + 1))[0]

    def members(self) -> list[QuantizedArray]:
        """All of them."""
        return [part for part, _ in self._members(0, self.num_groups)]

    def padded_members(self) -> Iterator[tuple[QuantizedArray, Array]]:
        """Each member, and its codes with the padding of their rows."""
        return self._members(0, self.num_groups)

    def _members(self, first: int, last: int) -> Iterator[tuple[QuantizedArray, Array]]:
        layout, storage, sizes = self.layout, self.format.storage, self.sizes.values
        codes_at, scales_at = (starts.tolist() for starts in layout.starts(sizes))
        dtype, itemsize = storage.element.dtype, storage.element.dtype.itemsize
        base, scale_dtype, amax, global_scale = self.base, _scale_dtype(self.format), self.amax, self.global_scale
        globals_at = self._globals_of(sizes)
        for i in range(first, last):
            shape = layout.shape(int(sizes[i]))
            alone = part_layout(storage, shape)
            nbytes = shape[0] * alone.codes.pitch * itemsize
            padded = base[codes_at[i] : codes_at[i] + nbytes].view(dtype).reshape(shape[0], alone.codes.pitch)
            tile = alone.scales_shape
            scales = base[scales_at[i] : scales_at[i] + prod(tile) * scale_dtype.itemsize].view(scale_dtype)
            if storage.block is None:  # one for each member, or none
                scales = scales[: prod(alone.num_scales)].reshape(alone.num_scales)
            else:
                scales = scale_layout(storage).untile(scales.reshape(tile), *alone.num_scales)
            own = None if global_scale is None else global_scale[globals_at[i] : globals_at[i + 1]]
            buffers = Separate(
                padded[:, : alone.codes.columns], scales, own, None if amax is None else amax[i : i + 1]
            )
            yield QuantizedArray(self.format, shape, buffers), padded

    def with_sizes(self, sizes: Sizes) -> GroupedPart:
        """The same buffer, read with other sizes of the same capacity."""
        return GroupedPart(self.format, self.layout, sizes, self.memory, self.has_amax)

    def some(self, first: int, last: int, sizes: Sizes) -> GroupedPart:
        """Members first to last in the same memory; sizes are theirs. All sizes must be known to the host."""
        layout, values = self.layout, self.sizes.values
        ends = [span_starts(layout.codes, values)[n] * layout.codes.nbytes for n in (first, last)]
        start, end = (min(int(n), layout.codes_nbytes) for n in ends)
        codes_nbytes = sizes.capacity * layout.codes.nbytes if layout.ragged == "outer" else end - start
        if layout.scales is None:
            each = 4 if layout.storage.scale == "float32" else 0
            scales = [n * each for n in (first, last)]
        else:
            scales = [int(span_starts(layout.scales, values)[n]) * layout.scales.nbytes for n in (first, last)]
        own = [4 * self._globals_of(values)[n] for n in (first, last)]
        shift = 4 * first - start
        moved = replace(
            layout, num_groups=last - first, codes_nbytes=codes_nbytes,
            scales_offset=layout.scales_offset + scales[0] - start, scales_nbytes=scales[1] - scales[0],
            global_scale_offset=layout.global_scale_offset + own[0] - start, globals_nbytes=own[1] - own[0],
            amax_offset=layout.amax_offset + shift,
            work_offset=layout.work_offset + shift, nbytes=layout.work_offset + shift + 4 * (last - first),
        )
        return GroupedPart(self.format, moved, sizes, memory_of(self.base[start:]), self.has_amax)

    def copy(self) -> GroupedPart:
        """The same in a buffer of its own, laid out anew."""
        layout = self.layout
        with on_device(self.device):
            part = zeros_group(
                self.format, layout.ragged, layout.each, self.sizes, namespace(self.memory), has_amax=self.has_amax
            )
            for target, source in zip(part._stored(), self._stored(), strict=True):
                if target is not None:
                    target[: source.shape[0]] = source
        return part

    def _stored(self) -> tuple[Array, Array, Array | None, Array | None]:
        return self.base[: self.layout.codes_nbytes], self.scales, self.global_scale, self.amax

    def __reduce__(self) -> tuple[Any, ...]:
        layout = self.layout
        stored = tuple(None if array is None else array.copy() for array in self._stored())
        return _unpickle_group, (PICKLE_VERSION, self.format.name, layout.ragged, layout.each, self.sizes, stored)

    def __repr__(self) -> str:
        members = f"{self.num_groups} members, ragged {self.layout.ragged}, each {self.layout.each}"
        where = f"{describe_device(self.device)}, {describe_bytes(self.nbytes)}"
        return f"GroupedPart({members}, {self.format.name}, {where})"

    def _repr_html_(self) -> str:
        each, ragged = self.layout.each, self.layout.ragged
        shape = f"(ragged, {each})" if ragged == "outer" else f"({each}, ragged)"
        return _card(self, f"{self.num_groups} of {shape}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScatteredPart:
    """One direction of members that differ along both axes, in one allocation; the host knows their shapes.

    parts   of the members, each laid out as a part alone is, at a multiple of 256 bytes
    memory  the bytes they lie in
    """

    format: Format
    parts: tuple[QuantizedArray, ...]
    memory: Any

    @property
    def num_groups(self) -> int:
        return len(self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all members, padding included."""
        return sum(part.nbytes for part in self.parts)

    @property
    def ordinal(self) -> int:
        """The CUDA device that holds it; -1 for the host."""
        return ordinal_of(self.memory)

    @property
    def device(self) -> Any:
        """The CuPy device of CuPy buffers; "cpu" for NumPy's."""
        return self.memory.device

    def member(self, index: int) -> QuantizedArray:
        return self.parts[index]

    def members(self) -> list[QuantizedArray]:
        return list(self.parts)

    def with_sizes(self, sizes: Sizes) -> ScatteredPart:
        """Itself: its shapes are known."""
        return self

    def some(self, first: int, last: int, sizes: Sizes) -> ScatteredPart:
        """Members first to last in the same memory."""
        return ScatteredPart(self.format, self.parts[first:last], self.memory)

    def copy(self) -> ScatteredPart:
        """The same in a buffer of its own."""
        with on_device(self.device):
            return scatter(self.format, self.parts, namespace(self.memory))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_scattered, (PICKLE_VERSION, self.format.name, self.parts)

    def __repr__(self) -> str:
        where = f"{describe_device(self.device)}, {describe_bytes(self.nbytes)}"
        return f"ScatteredPart({self.num_groups} members, {self.format.name}, {where})"

    def _repr_html_(self) -> str:
        shown = ", ".join(str(part.shape) for part in self.parts[:SHOWN_SHAPES])
        return _card(self, shown + (", ..." if self.num_groups > SHOWN_SHAPES else ""))


# --- display ------------------------------------------------------------------------------------


def picture_of_members(name: str, part: GroupedPart | ScatteredPart) -> Picture:
    """Samples of the scales of some members that are not empty; all scales where a member has one.

    Waits for a device: for its sizes, where the host does not know them, and for the samples.
    """
    storage = part.format.storage
    if storage.scale == "none" or not part.num_groups:
        return Picture(name, ())
    if isinstance(part, ScatteredPart):
        sizes = [prod(member.shape) for member in part.parts]
    elif storage.block is None:
        return Picture(f"{name}, one for each member", (sample_scales(part.scales.reshape(1, -1), storage),))
    else:
        part = part.with_sizes(known(part.sizes))
        sizes = part.sizes.values.tolist()
    shown = list(spread([i for i, size in enumerate(sizes) if size]))
    most = (SAMPLE[0], max(1, SAMPLE[1] // max(1, len(shown))))
    members = (part.member(i) for i in shown)
    samples = tuple(sample_scales(m.scales, storage, m.global_scale, most) for m in members)
    return Picture(f"{name} of members {', '.join(map(str, shown))}", samples)


def _card(part: GroupedPart | ScatteredPart, shapes: str) -> str:
    facts = [
        ("shapes", shapes), ("format", part.format.name), ("engine", engine_fact(part)),
        ("device", describe_device(part.device)), ("bytes", describe_bytes(part.nbytes)),
    ]
    return html_card(type(part).__name__, facts, [picture_of_members("scales", part)])


def memory_of(base: Array) -> Any:
    """What a part holds of an array of bytes."""
    return base if isinstance(base, np.ndarray) else base.data


def _scale_dtype(format: Format) -> np.dtype[Any]:
    return np.dtype(np.float32 if format.storage.scale == "float32" else np.uint8)


def on_device(device: Any) -> Any:
    """A context in which arrays are allocated there."""
    return nullcontext() if isinstance(device, str) else device


# --- making parts -------------------------------------------------------------------------------


def layout_of(format: Format, ragged: Axis, each: int, sizes: Sizes) -> GroupedLayout:
    """The layout of a part that is no range of another one's members; sizes are of its ragged axis."""
    alignment = sizes.alignment if ragged == "outer" else 1
    return grouped_layout(format.storage, sizes.num_groups, ragged, each, sizes.capacity, alignment)


def zeros_group(
    format: Format, ragged: Axis, each: int, sizes: Sizes, module: Any = np, *, has_amax: bool | None = None
) -> GroupedPart:
    """A part of zero bytes in one allocation; module is numpy or cupy."""
    layout = layout_of(format, ragged, each, sizes)
    memory = memory_of(module.zeros(layout.nbytes, np.uint8))
    return GroupedPart(format, layout, sizes, memory, format.measures_amax if has_amax is None else has_amax)


def new_parts(
    k: int, rows: Sizes, row: Format | None, column: Format | None, module: Any = np
) -> tuple[GroupedPart | None, GroupedPart | None]:
    """Zero parts of matrices of so many rows and k columns; None for a format that is None."""
    rowwise = None if row is None else zeros_group(row, "outer", k, rows, module)
    if column is None:
        return rowwise, None
    if rows.each is None:
        return rowwise, zeros_group(column, "k", k, rows, module)
    return rowwise, zeros_group(column, "outer", rows.each, Sizes.uniform(rows.num_groups, k), module)


def with_sizes(
    parts: tuple[GroupedPart | None, GroupedPart | None], rows: Sizes
) -> tuple[GroupedPart | None, GroupedPart | None]:
    """The parts of row-ragged matrices with other sizes, in the same buffers; uniform ones as they are."""
    if rows.each is not None:
        return parts
    rowwise, columnwise = parts
    return (None if rowwise is None else rowwise.with_sizes(rows),
            None if columnwise is None else columnwise.with_sizes(rows))


def zeros_scattered(
    format: Format, shapes: list[tuple[int, int]], module: Any = np, *, has_amax: bool | None = None
) -> ScatteredPart:
    """Parts of those shapes, zero bytes, in one allocation."""
    has_amax = format.measures_amax if has_amax is None else has_amax
    layouts = [part_layout(format.storage, shape) for shape in shapes]
    starts = np.cumsum([0, *(round_up(layout.nbytes, ALIGNMENT) for layout in layouts)]).tolist()
    base = module.zeros(starts[-1], np.uint8)
    packed = partial(Packed.of, has_global_scale=format.storage.global_scale, has_amax=has_amax)
    parts = tuple(
        QuantizedArray(format, shape, packed(base[start : start + layout.nbytes], layout))
        for shape, layout, start in zip(shapes, layouts, starts, strict=False)
    )
    return ScatteredPart(format, parts, memory_of(base))


def copy_member(target: QuantizedArray, source: QuantizedArray) -> None:
    """One part's codes, scales and scalars into the buffers of another of the same format and shape."""
    for ours, theirs in (
        (target.codes, source.codes), (target.scales, source.scales),
        (target.global_scale, source.global_scale), (target.amax, source.amax),
    ):
        if ours is not None:
            ours[...] = theirs
    if target.format.storage.element.stored_bits == 4 and target.shape[1] % 2:
        target.codes[:, -1] &= 0x0F  # the nibble behind an odd k is code padding


def _have_amax(parts: tuple[QuantizedArray, ...]) -> bool:
    return all(part.amax is not None for part in parts)


def scatter(format: Format, members: tuple[QuantizedArray, ...], module: Any) -> ScatteredPart:
    """Copies of parts of one format, whatever their shapes, in one allocation."""
    part = zeros_scattered(format, [member.shape for member in members], module, has_amax=_have_amax(members))
    for target, source in zip(part.parts, members, strict=True):
        copy_member(target, source)
    return part


def gather(
    format: Format, members: tuple[QuantizedArray, ...], ragged: Axis, each: int, sizes: Sizes, module: Any
) -> GroupedPart:
    """Copies of parts of one format whose shapes differ along one axis, in one buffer; nothing is requantized."""
    part = zeros_group(format, ragged, each, sizes, module, has_amax=_have_amax(members))
    for target, source in zip(part.members(), members, strict=True):
        copy_member(target, source)
    return part


def _expect_version(version: int) -> None:
    if version > PICKLE_VERSION:
        raise ValueError(f"this group was pickled by a newer hqarray (pickle version {version} > {PICKLE_VERSION})")


def _unpickle_group(
    version: int, name: str, ragged: Axis, each: int, sizes: Sizes, stored: tuple[Array | None, ...]
) -> GroupedPart:
    _expect_version(version)
    part = zeros_group(as_format(name), ragged, each, sizes, namespace(stored[0]), has_amax=stored[3] is not None)
    for target, source in zip(part._stored(), stored, strict=True):
        if target is not None and source is not None:
            target[: source.shape[0]] = source
    return part


def _unpickle_scattered(version: int, name: str, parts: tuple[QuantizedArray, ...]) -> ScatteredPart:
    _expect_version(version)
    module = namespace(parts[0].codes) if parts else np
    return scatter(as_format(name), parts, module)
