"""Our own files: typed tensors, and metadata that says which of them make which array.

    X.rowwise.codes, X.rowwise.scales, X.rowwise.global_scale, X.rowwise.amax, X.columnwise...
    X.rows, X.columns       sizes of a GroupedArray's members, where they differ

Codes and scales of a HybridArray have their logical shapes; a GroupedArray's lie as in its buffers. Metadata: format
"hqarray", version, and in `arrays` a JSON object with a description of each array that is not a plain tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hqarray.arrays import DIRECTIONS, NOMINAL, Direction, HybridArray, QuantizedArray
from hqarray.buffers import Separate
from hqarray.formats import Format, as_format
from hqarray.grouped import GroupedArray, Part
from hqarray.grouped_parts import GroupedPart, ScatteredPart, layout_of, scatter, zeros_group
from hqarray.groups import Axis, Sizes, Span, span_starts
from hqarray.layout import part_layout
from hqarray.tensorfile import FileError, TensorFile, Values

from .sources import Source, Stored, typed

FORMAT = "hqarray"
VERSION = 1
KEYS = ("format", "version", "arrays")
"""Keys of the metadata that are ours."""

SCALARS = ("global_scale", "amax")

MOST_GROUPS = 1 << 31


def is_own(file: TensorFile) -> bool:
    return file.metadata.get("format") == FORMAT


def metadata_of(described: Mapping[str, Any]) -> dict[str, str]:
    return {"format": FORMAT, "version": str(VERSION), "arrays": json.dumps(described, separators=(",", ":"))}


# --- writing ------------------------------------------------------------------------------------


def tensors_of(name: str, array: HybridArray | GroupedArray) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors of an array, and its description."""
    tensors: dict[str, Stored] = {}
    formats: dict[str, str] = {}
    array = array.to_host() if isinstance(array, GroupedArray) else array
    for direction, part in array.parts():
        formats[direction] = part.format.name
        if isinstance(part, ScatteredPart):
            for number, member in enumerate(part.parts):
                tensors.update(_part_tensors(f"{name}.{direction}.{number}", member))
        else:
            tensors.update(_part_tensors(f"{name}.{direction}", _laid_out(part)))
    described: dict[str, Any] = {"kind": "hybrid", "dtype": array.dtype.name, **formats}
    if isinstance(array, HybridArray):
        return tensors, {**described, "shape": list(array.shape), "derived": array.derived}
    for axis, sizes in (("rows", array.rows), ("columns", array.columns)):
        if sizes.each is None:
            tensors[f"{name}.{axis}"] = Stored("I64", sizes.values)
            described[axis] = {"groups": sizes.num_groups, "capacity": sizes.capacity, "alignment": sizes.alignment}
        else:
            described[axis] = {"groups": sizes.num_groups, "each": sizes.each}
    return tensors, {**described, "kind": "grouped"}


def _laid_out(part: QuantizedArray | GroupedPart) -> QuantizedArray | GroupedPart:
    """The part itself; a copy of a range of another one's members, whose layout is not its own."""
    if isinstance(part, QuantizedArray):
        return part
    whole = part.layout == layout_of(part.format, part.layout.ragged, part.layout.each, part.sizes)
    return part if whole else part.copy()


def _part_tensors(name: str, part: QuantizedArray | GroupedPart) -> dict[str, Stored]:
    storage = part.format.storage
    tensors = {f"{name}.codes": typed(storage.element.dtype_name, part.codes)}
    if storage.scale != "none":
        tensors[f"{name}.scales"] = typed(storage.scale_dtype_name, part.scales)
    for what in SCALARS:
        scalars = getattr(part, what)
        if scalars is not None:
            tensors[f"{name}.{what}"] = Stored("F32", scalars)
    return tensors


# --- reading ------------------------------------------------------------------------------------


def sources(file: TensorFile) -> dict[str, Source]:
    """The arrays of a file; all that the metadata claims is held against its tensors. Raises FileError."""
    try:
        version = int(file.metadata["version"])
        described = json.loads(file.metadata["arrays"])
        items = list(described.items())
    except (KeyError, ValueError, AttributeError, RecursionError) as error:
        raise FileError(f"{file.path}: its metadata does not say which arrays it holds: {error!r}") from error
    if version > VERSION:
        raise FileError(f"{file.path}: written by a newer hqarray (file version {version} > {VERSION})")
    found: dict[str, Source] = {}
    used: set[str] = set()
    for name, description in items:
        reader = _Reader(file, name, description)
        try:
            found[name] = reader.source()
        except FileError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, StopIteration, NotImplementedError, OverflowError,
                MemoryError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise FileError(f"{file.path}: what its metadata says of {name!r} cannot be: {reason}") from error
        twice = used & set(reader.used)
        if twice:
            raise FileError(f"{file.path}: {min(twice)!r} belongs to two arrays")
        used |= set(reader.used)
    for name, tensor in file.tensors.items():
        if name in used:
            continue
        if name in found:
            raise FileError(f"{file.path}: {name!r} is a tensor and an array of the metadata")
        found[name] = Source((name,), partial(file.array, name), tensor.shape)
    return found


class _Reader:
    """Makes one array of a description; remembers which tensors it used."""

    def __init__(self, file: TensorFile, name: str, description: dict[str, Any]) -> None:
        self.file, self.name, self.description = file, name, description
        self.used: list[str] = []

    def source(self) -> Source:
        kind = self.description["kind"]
        if kind == "hybrid":
            array = self._hybrid()
            return Source(tuple(self.used), lambda: array, array.shape, self.description)
        if kind == "grouped":
            make = self._grouped()  # uses tensors: before they are counted
            return Source(tuple(self.used), make, None, self.description)
        raise ValueError(f"an array is hybrid or grouped, not {kind!r}")

    def _formats(self) -> dict[Direction, Format]:
        return {d: as_format(self.description[d]) for d in DIRECTIONS if self.description.get(d) is not None}

    def _dtype(self) -> np.dtype[Any]:
        return next(dtype for dtype in NOMINAL if dtype.name == self.description["dtype"])

    def _take(self, name: str, kind: str, shape: tuple[int, ...]) -> Values:
        """A tensor, which must be of that type and shape, as stored numbers."""
        tensor = self.file.tensors.get(name)
        if tensor is None or (tensor.type, tensor.shape) != (kind, shape):
            raise FileError(f"{self.file.path}: {name!r} must be {kind} {list(shape)}, it is {tensor or 'not there'}")
        self.used.append(name)
        array = self.file.array(name)
        return array.view(np.uint8) if array.itemsize == 1 else array

    def _part(self, name: str, format: Format, shape: tuple[int, int]) -> QuantizedArray:
        storage, layout = format.storage, part_layout(format.storage, shape)
        codes = self._take(
            f"{name}.codes", typed(storage.element.dtype_name, None).type, (shape[0], layout.codes.columns)
        )
        scales = None
        if storage.scale != "none":
            scales = self._take(f"{name}.scales", typed(storage.scale_dtype_name, None).type, layout.num_scales)
        global_scale = None
        if storage.global_scale:
            global_scale = self._take(f"{name}.global_scale", "F32", (layout.num_global_scales,))
        part = QuantizedArray.from_buffers(codes, scales, format, shape, global_scale=global_scale)
        if f"{name}.amax" in self.file.tensors:
            assert isinstance(part.buffers, Separate)
            part = replace(part, buffers=replace(part.buffers, amax=self._take(f"{name}.amax", "F32", (1,))))
        return part

    def _hybrid(self) -> HybridArray:
        shape = tuple(_size(n) for n in self.description["shape"])
        k = shape[-1]
        outer = int(np.prod(shape[:-1], dtype=object)) if len(shape) > 1 else 1
        shapes = {"rowwise": (outer, k), "columnwise": (k, outer)}
        parts = {d: self._part(f"{self.name}.{d}", f, shapes[d]) for d, f in self._formats().items()}
        return HybridArray(
            parts.get("rowwise"), parts.get("columnwise"), shape, self._dtype(), self.description["derived"]
        )

    # --- groups ---

    def _sizes(self, axis: str) -> Sizes:
        described = self.description[axis]
        groups = _size(described["groups"])
        if groups >= MOST_GROUPS:
            raise ValueError(f"{groups} members")
        if "each" in described:
            return Sizes.uniform(groups, _size(described["each"]))
        values = self._take(f"{self.name}.{axis}", "I64", (groups,))
        capacity, alignment = _size(described["capacity"]), _size(described["alignment"])
        if alignment < 1:
            raise ValueError(f"alignment {alignment}")
        if values.min(initial=0) < 0 or values.max(initial=0) > capacity or capacity >= 1 << 62:
            raise ValueError(f"{axis} from {values.min()} to {values.max()}, of {capacity} together")
        ends = span_starts(Span(1, alignment), values)[:-1] + values
        if ((ends > capacity) & (values > 0) | (ends < 0)).any():
            raise ValueError(f"{axis} that end at {ends.max()}, beyond {capacity}")
        return Sizes.known(values, capacity, alignment)

    def _grouped(self) -> Callable[[], GroupedArray]:
        """What makes the array; its tensors were found and have the right types and shapes."""
        rows, columns, dtype = self._sizes("rows"), self._sizes("columns"), self._dtype()
        if rows.num_groups != columns.num_groups:
            raise ValueError(f"{rows.num_groups} rows and {columns.num_groups} columns")
        parts: dict[str, Callable[[], Part]] = {}
        for direction, format in self._formats().items():
            outer, k = (rows, columns) if direction == "rowwise" else (columns, rows)
            name = f"{self.name}.{direction}"
            if outer.each is None and k.each is None:
                members = tuple(
                    self._part(f"{name}.{i}", format, (int(m), int(n)))
                    for i, (m, n) in enumerate(zip(outer.values, k.values, strict=True))
                )
                parts[direction] = partial(scatter, format, members, np)
            elif k.each is not None:
                parts[direction] = self._group(name, format, "outer", k.each, outer)
            else:
                assert outer.each is not None
                parts[direction] = self._group(name, format, "k", outer.each, k)
        if not parts:
            raise ValueError("an array without parts")

        def make() -> GroupedArray:
            made = {direction: part() for direction, part in parts.items()}
            return GroupedArray(made.get("rowwise"), made.get("columnwise"), rows, columns, dtype)

        return make

    def _group(self, name: str, format: Format, ragged: Axis, each: int, sizes: Sizes) -> Callable[[], GroupedPart]:
        storage, layout = format.storage, layout_of(format, ragged, each, sizes)
        itemsize = storage.element.dtype.itemsize
        columns = part_layout(storage, (1, each)).codes.columns
        count = layout.codes_nbytes // itemsize
        kind = typed(storage.element.dtype_name, None).type
        shape = (sizes.capacity, columns) if ragged == "outer" else (count,)
        stored = {"codes": self._take(f"{name}.codes", kind, shape)}
        if storage.scale != "none":
            kind = typed(storage.scale_dtype_name, None).type
            scales = layout.scales_nbytes // (4 if storage.scale == "float32" else 1)
            stored["scales"] = self._take(f"{name}.scales", kind, (scales,))
        if storage.global_scale:
            stored["global_scale"] = self._take(f"{name}.global_scale", "F32", (layout.num_global_scales,))
        if f"{name}.amax" in self.file.tensors:
            stored["amax"] = self._take(f"{name}.amax", "F32", (sizes.num_groups,))

        def make() -> GroupedPart:
            part = zeros_group(format, ragged, each, sizes, has_amax="amax" in stored)
            for what, source in stored.items():
                getattr(part, what)[...] = source
            return part

        return make


def _size(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"a size is a number from 0, not {number!r}")
    return number
