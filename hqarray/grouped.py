"""GroupedArray: many matrices in up to two parts, each part one buffer, sizes on the host or on a device.

Like the containers of arrays.py it is frozen, compares by identity and does no numerics: methods that compute
import the public functions of grouped_ops inside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from types import ModuleType, NoneType
from typing import Any, NoReturn, TypeAlias

import numpy as np

from .arrays import (
    DIRECTIONS,
    FLOAT32,
    NOMINAL,
    PICKLE_VERSION,
    Direction,
    HybridArray,
    _is_operand,
    _undefined,
    describe_bytes,
    describe_device,
    engine_facts,
)
from .display import html_card
from .formats import Format
from .grouped_parts import GroupedPart, ScatteredPart, known, on_device, picture_of_members, read_sizes, some_sizes
from .groups import Sizes, Span, span_starts
from .layout import Array, namespace

Part: TypeAlias = GroupedPart | ScatteredPart

_PART = (GroupedPart, ScatteredPart, NoneType)

SHOWN_SIZES = 16
"""How many sizes a table lists."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GroupedArray:
    """Matrices X_i of one format pair: views into one buffer for each direction.

    rowwise    of all X_i, blocks along their last axis; read by `X @ b`
    columnwise the rowwise part of all X_i.T; read by `a @ X`
    rows       sizes of their first axis; sizes that differ are ragged, and the host may not know them
    columns    sizes of their last axis
    dtype      nominal dtype: float32, float16 or bfloat16

        X[i] == HybridArray(rowwise.member(i), columnwise.member(i))

    A part is ragged along "outer" or "k", whichever axis of the X_i is; members that differ along both axes have
    ScatteredParts, whose shapes the host knows. Equality is identity.
    """

    rowwise: Part | None
    columnwise: Part | None
    rows: Sizes
    columns: Sizes
    dtype: np.dtype[Any] = FLOAT32

    def __post_init__(self) -> None:
        given: tuple[Any, Any] = (self.rowwise, self.columnwise)
        for name, part in zip(DIRECTIONS, given, strict=True):
            if not isinstance(part, _PART):
                raise TypeError(f"{name} is a GroupedPart, not {type(part).__name__}; grouped_quantize(...) makes one")
        if given == (None, None):
            raise ValueError("a GroupedArray holds at least one part; pass rowwise= or columnwise=")
        if self.rows.num_groups != self.columns.num_groups:
            raise ValueError(f"rows has {self.rows.num_groups} sizes, columns {self.columns.num_groups}")
        dtype: Any = self.dtype
        if not isinstance(dtype, np.dtype):
            object.__setattr__(self, "dtype", np.dtype(dtype))
        if self.dtype not in NOMINAL:
            raise TypeError(f"the nominal dtype is float32, float16 or bfloat16, not {self.dtype}")
        parts = dict(self.parts())
        if len({part.ordinal for part in parts.values()}) > 1:
            places = " and ".join(f"{name} on {describe_device(part.device)}" for name, part in parts.items())
            raise ValueError(f"both parts of a GroupedArray lie on one device, not {places}; move one")
        for name, part in parts.items():
            self._check_part(name, part)

    def _check_part(self, name: Direction, part: Part) -> None:
        outer, k = (self.rows, self.columns) if name == "rowwise" else (self.columns, self.rows)
        fits: bool
        if isinstance(part, ScatteredPart):
            fits = outer.each is k.each is None and outer.is_known and k.is_known
            fits = fits and [p.shape for p in part.parts] == list(zip(outer.values, k.values, strict=True))
        else:
            ragged, each = ("outer", k.each) if k.each is not None else ("k", outer.each)
            sizes = outer if ragged == "outer" else k
            fits = each is not None and (part.layout.ragged, part.layout.each) == (ragged, each)
            fits = fits and part.num_groups == self.num_groups and part.sizes.capacity == sizes.capacity
        if not fits:
            raise ValueError(f"{name} {part!r} does not lie as members of shape {self.shape} do")

    # --- facts ---

    @property
    def num_groups(self) -> int:
        return self.rows.num_groups

    @property
    def shape(self) -> tuple[int, int | None, int | None]:
        """(num_groups, rows, columns) of the members, None for sizes that differ."""
        return self.num_groups, self.rows.each, self.columns.each

    @property
    def ragged(self) -> Sizes | None:
        """The sizes that differ, where they do along one axis; rows where they are all the same."""
        if self.rows.each is None and self.columns.each is None:
            return None
        return self.columns if self.columns.each is None else self.rows

    @property
    def alignment(self) -> int:
        """Members begin on a multiple of this in the stacked array."""
        return 1 if self.ragged is None else self.ragged.alignment

    @property
    def is_known(self) -> bool:
        """Whether the host knows all sizes."""
        return self.rows.is_known and self.columns.is_known

    @property
    def offsets(self) -> Array:
        """Where each member begins in the stacked array, and where the last one ends: int64 (num_groups + 1,).

        A NumPy array where the sizes are on the host, else an array on their device, computed there.
        """
        sizes = self.ragged
        if sizes is None:
            raise ValueError(f"members of {self.shape} differ along both axes and are not stacked; use their shapes")
        if sizes.is_known:
            return np.minimum(sizes.starts, sizes.capacity)
        assert sizes.device is not None
        module = namespace(sizes.device)
        with on_device(self.device):
            stored = sizes.device.astype(np.int64)
            if sizes.kind == "ends":
                stored[1:] -= sizes.device[:-1]
            stored = module.clip(stored, 0, sizes.capacity)
            offsets = module.zeros(self.num_groups + 1, np.int64)
            offsets[1:] = module.cumsum(Span(1, sizes.alignment).units(stored))
            return module.minimum(offsets, sizes.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes held by both parts, padding included."""
        return sum(part.nbytes for _, part in self.parts())

    @property
    def ordinal(self) -> int:
        """The CUDA device that holds the buffers; -1 for the host."""
        return next(self.parts())[1].ordinal

    @property
    def device(self) -> Any:
        return next(self.parts())[1].device

    def parts(self) -> Iterator[tuple[Direction, Part]]:
        """The parts that are there, with their names."""
        if self.rowwise is not None:
            yield "rowwise", self.rowwise
        if self.columnwise is not None:
            yield "columnwise", self.columnwise

    def part(self, direction: Direction, wanted_by: str = "this call") -> Part:
        """The part of that name. Raises ValueError where it is missing, saying which are there."""
        part = self.rowwise if direction == "rowwise" else self.columnwise
        if part is None:
            other, there = next(self.parts())
            raise ValueError(
                f"{wanted_by} needs the {direction} part, but this GroupedArray {self.shape} holds only "
                f"{other} ({there.format.name}); quantize with {direction}=... or use .T"
            )
        return part

    # --- making one ---

    @classmethod
    def from_arrays(
        cls, arrays: Any, *, rowwise: Format | str | None = None, columnwise: Format | str | None = None,
        seed: Any = None,
    ) -> GroupedArray:
        """A list of matrices as one group.

        arrays   plain 2-D arrays of one dtype, quantized here (unquantized rowwise where no format is given); or
                 2-D HybridArrays of equal formats, whose codes and scales are copied and not quantized anew
        rowwise, columnwise  formats; of HybridArrays theirs, or None
        seed     as in grouped_quantize
        Shapes may differ along rows, columns or both. Raises ValueError for HybridArrays of different formats.
        """
        from . import grouped_ops

        return grouped_ops.from_arrays(list(arrays), rowwise, columnwise, seed)

    @classmethod
    def from_stacked(
        cls, values: Any, *, rowwise: Format | str | None = None, columnwise: Format | str | None = None,
        seed: Any = None,
    ) -> GroupedArray:
        """A (num_groups, n, k) array as a group of equal shapes.

        Without formats, or with an unquantized rowwise format of its own dtype, the rowwise part is the array's
        memory and nothing is copied, if it is C-contiguous and rows take a multiple of 16 bytes. seed: as in
        grouped_quantize.
        """
        from . import grouped_ops

        return grouped_ops.from_stacked(values, rowwise, columnwise, seed)

    # --- same buffers, another view ---

    @property
    def T(self) -> GroupedArray:
        """The X_i.T: the two parts change places; no data moves."""
        return unchecked(self.columnwise, self.rowwise, self.columns, self.rows, self.dtype)

    def drop(self, *, rowwise: bool = False, columnwise: bool = False) -> GroupedArray:
        """Without the named part; its memory is freed with the last array that holds it.

        Raises ValueError, and changes nothing, when the part is not there or it is the last.
        """
        dropped = [name for name, wanted in zip(DIRECTIONS, (rowwise, columnwise), strict=True) if wanted]
        for direction in dropped:
            self.part(direction, f"drop({direction}=True)")
        kept = {direction: part for direction, part in self.parts() if direction not in dropped}
        if not kept:
            raise ValueError(f"drop({', '.join(dropped)}) would leave no part in this GroupedArray {self.shape}")
        return GroupedArray(kept.get("rowwise"), kept.get("columnwise"), self.rows, self.columns, self.dtype)

    def copy(self) -> GroupedArray:
        """Same values in buffers of its own; sizes on a device are shared."""
        rows, columns = (None if part is None else part.copy() for part in (self.rowwise, self.columnwise))
        return GroupedArray(rows, columns, self.rows, self.columns, self.dtype)

    def to_host(self) -> GroupedArray:
        """The same buffers, with sizes that the host knows: what they are now, clamped. Synchronises."""
        rows, columns = known(self.rows), known(self.columns)
        return self._with(lambda part, sizes: part.with_sizes(sizes), rows, columns)

    def _with(self, change: Callable[[Any, Sizes], Part], rows: Sizes, columns: Sizes) -> GroupedArray:
        """This array with other sizes and each part changed by change(part, sizes of its ragged axis)."""
        parts = {}
        for direction, part in self.parts():
            ragged = "outer" if isinstance(part, ScatteredPart) else part.layout.ragged
            parts[direction] = change(part, rows if (direction == "rowwise") == (ragged == "outer") else columns)
        return GroupedArray(parts.get("rowwise"), parts.get("columnwise"), rows, columns, self.dtype)

    def split(self, count: int) -> list[GroupedArray]:
        """Count GroupedArrays of num_groups / count members each, over the same buffers."""
        count = operator.index(count)
        if count < 1 or self.num_groups % count:
            raise ValueError(f"split({count}) of {self.num_groups} members: give a number that divides it")
        self._expect_known("split")
        size = self.num_groups // count
        return [self._some(i * size, (i + 1) * size) for i in range(count)]

    def _some(self, first: int, last: int) -> GroupedArray:
        rows, columns = (some_sizes(sizes, first, last) for sizes in (self.rows, self.columns))
        return self._with(lambda part, sizes: part.some(first, last, sizes), rows, columns)

    def _expect_known(self, wanted_by: str) -> None:
        if not self.is_known:
            raise ValueError(
                f"{wanted_by} needs the sizes on the host, and those of this GroupedArray {self.shape} are on "
                f"{describe_device(self.device)}; g.to_host() copies them (and synchronises)"
            )

    def __getitem__(self, index: int) -> HybridArray:
        """One member, as views."""
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(f"g[i] takes an integer, not {index!r}; split(n) gives ranges of members") from None
        if not -self.num_groups <= number < self.num_groups:
            raise IndexError(f"member {number} of {self.num_groups}")
        self._expect_known("g[i]")
        number %= self.num_groups
        rows, columns = (None if p is None else p.member(number) for p in (self.rowwise, self.columnwise))
        return HybridArray(rows, columns, dtype=self.dtype)

    def __iter__(self) -> Iterator[HybridArray]:
        self._expect_known("iteration")
        none = [None] * self.num_groups
        rows, columns = (none if p is None else p.members() for p in (self.rowwise, self.columnwise))
        return (HybridArray(row, column, dtype=self.dtype) for row, column in zip(rows, columns, strict=True))

    def __len__(self) -> int:
        return self.num_groups

    # --- operations ---

    def validate(self) -> None:
        """Read the sizes and raise ValueError where one is negative or they pass the capacity. Synchronises.

        Kernels trust no sizes on a device: they take a negative one as 0 and cut off what passes the capacity.
        """
        for name, sizes in (("rows", self.rows), ("columns", self.columns)):
            stored = read_sizes(sizes)
            for i in np.flatnonzero(stored < 0)[:1]:
                raise ValueError(f"{name} of group {i} are {stored[i]}; a size is 0 or more")
            ends = span_starts(Span(1, sizes.alignment), stored)[:-1] + stored
            for i in np.flatnonzero((ends > sizes.capacity) & (stored > 0))[:1]:
                raise ValueError(
                    f"{name} of group {i}, {stored[i]} of them, end at {ends[i]}, beyond the capacity {sizes.capacity}"
                )

    def dequantize(self, *, source: Direction | None = None, dtype: Any = None) -> Array | list[Array]:
        """The values, decoded. See grouped_ops.dequantize."""
        from . import grouped_ops

        return grouped_ops.dequantize(self, source=source, dtype=dtype)

    def __matmul__(self, other: Any) -> Any:
        if not isinstance(other, (GroupedArray, HybridArray)) and not _is_operand(other):
            return NotImplemented
        return _grouped_ops().grouped_matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        if not isinstance(other, HybridArray) and not _is_operand(other):
            return NotImplemented
        from . import grouped_ops

        return grouped_ops.grouped_matmul(other, self)

    def __bool__(self) -> NoReturn:
        raise TypeError("the truth value of a GroupedArray is not defined; use .dequantize()")

    # --- NumPy protocols ---

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.device != "cpu":
            raise TypeError("this GroupedArray is on a GPU; use .dequantize() and cupy.asnumpy()")
        if copy is False:
            raise ValueError("a GroupedArray becomes a NumPy array only by decoding, which copies; use .dequantize()")
        values = self.dequantize()
        if isinstance(values, list):
            raise TypeError(f"members of {self.shape} differ along both axes and make no array; use .dequantize()")
        decoded: np.ndarray[Any, Any] = values
        return decoded if dtype is None else decoded.astype(dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if getattr(ufunc, "__name__", "") != "matmul" or method != "__call__":
            raise TypeError(_undefined(f"ufunc {getattr(ufunc, '__name__', ufunc)}"))
        if options:
            raise TypeError(f"matmul of quantized arrays takes no {', '.join(options)}; hqarray.matmul has options")
        from . import grouped_ops

        return grouped_ops.grouped_matmul(*inputs, out=out[0] if isinstance(out, tuple) else out)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.shape:
            return self.shape
        if function is np.ndim:
            return 3
        if function is np.size and len(args) + len(kwargs) == 1 and None not in self.shape:
            return prod(n for n in self.shape if n is not None)
        raise TypeError(_undefined(f"numpy.{getattr(function, '__name__', function)}"))

    # --- pickle and display ---

    def __reduce__(self) -> tuple[Any, ...]:
        parts = (self.rowwise, self.columnwise)
        return _unpickle_grouped, (PICKLE_VERSION, *parts, self.rows, self.columns, self.dtype.name)

    def __repr__(self) -> str:
        parts = "".join(f", {direction}={part.format.name}" for direction, part in self.parts())
        sizes = "" if self.is_known else ", sizes on the device"
        return (
            f"GroupedArray({self.shape} {self.dtype.name}{parts}{sizes}, {describe_device(self.device)}, "
            f"{describe_bytes(self.nbytes)})"
        )

    def _repr_html_(self) -> str:
        facts = [("shape", str(self.shape)), ("dtype", self.dtype.name)]
        for direction, part in self.parts():
            lies = f", ragged {part.layout.ragged}" if isinstance(part, GroupedPart) and None in self.shape else ""
            facts += [(direction, f"{part.format.name}{lies}, {describe_bytes(part.nbytes)}")]
        facts += [(name, _describe(sizes)) for name, sizes in (("rows", self.rows), ("columns", self.columns))]
        facts += [*engine_facts(self.parts()), ("device", describe_device(self.device))]
        pictures = [picture_of_members(f"{direction} scales", part) for direction, part in self.parts()]
        return html_card("GroupedArray", [*facts, ("bytes", describe_bytes(self.nbytes))], pictures)


@cache
def _grouped_ops() -> ModuleType:
    """For calls so short that an import statement shows."""
    from . import grouped_ops

    return grouped_ops


_new = object.__new__
_set = tuple(getattr(GroupedArray, name).__set__ for name in GroupedArray.__slots__)


def unchecked(
    rowwise: Part | None, columnwise: Part | None, rows: Sizes, columns: Sizes, dtype: np.dtype[Any]
) -> GroupedArray:
    """GroupedArray(...) of parts that are known to fit: the checks take longer than all else in a warm call."""
    array = _new(GroupedArray)
    set_rowwise, set_columnwise, set_rows, set_columns, set_dtype = _set
    set_rowwise(array, rowwise)
    set_columnwise(array, columnwise)
    set_rows(array, rows)
    set_columns(array, columns)
    set_dtype(array, dtype)
    return array


def _describe(sizes: Sizes) -> str:
    if sizes.each is not None:
        return f"{sizes.num_groups} x {sizes.each}"
    aligned = f", aligned to {sizes.alignment}" if sizes.alignment > 1 else ""
    if sizes.host is None:
        return f"{sizes.num_groups} on the device ({sizes.kind}), together at most {sizes.capacity}{aligned}"
    shown = ", ".join(map(str, sizes.host[:SHOWN_SIZES])) + (", ..." if len(sizes.host) > SHOWN_SIZES else "")
    return f"{shown}; together {sum(sizes.host)} of {sizes.capacity}{aligned}"


def _unpickle_grouped(
    version: int, rowwise: Part | None, columnwise: Part | None, rows: Sizes, columns: Sizes, dtype: str
) -> GroupedArray:
    if version > PICKLE_VERSION:
        raise ValueError(f"this group was pickled by a newer hqarray (pickle version {version} > {PICKLE_VERSION})")
    from .formats import ELEMENTS

    return GroupedArray(rowwise, columnwise, rows, columns, ELEMENTS[dtype].dtype)


__all__ = ["GroupedArray", "GroupedPart", "Part", "ScatteredPart"]
