"""Checkpoints from one form to another, tensor by tensor: what `python -m hqarray convert` does."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hqarray import ops
from hqarray.arrays import DIRECTIONS, NOMINAL, Direction, HybridArray, QuantizedArray, describe_bytes
from hqarray.explore import Tally, TextTable, decibels, rows_of
from hqarray.formats import ROW, Format, as_format
from hqarray.inputs import as_draws
from hqarray.layout import Array
from hqarray.tensorfile import TYPES, FileError, Planned, Put, TensorFile, writing

from . import checkpoints, ownfile
from .safetensors import STYLES, Checkpoint, add, metadata_of, put_all, tensors_of
from .sources import Source, placeholder

Step: TypeAlias = Callable[[int], None]
"""Called with the bytes of the source that have been dealt with."""

FLOATS = tuple(name for name, kind in TYPES.items() if kind.dtype in (*NOMINAL, np.dtype(np.float64)))

SLAB = 1 << 20
"""Elements that are decoded at once to measure the error."""

SQUARE = 128
"""Rows: every block of every format fits this a whole number of times."""

NAMED = 3
"""Names that an error lists."""

SHOWN = 24
"""Converted tensors that a table lists: of more, those with the lowest SQNR."""


# --- what is done -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """What weights become.

    rowwise, columnwise  formats; None leaves the part out
    style  of the file, see interop.safetensors.save
    match  patterns, one of which the names of weights fit
    seed   of formats that round at random, the same for each weight
    """

    rowwise: Format | None
    columnwise: Format | None
    style: str
    match: tuple[str, ...]
    seed: int = 0

    @property
    def formats(self) -> Iterator[tuple[Direction, Format]]:
        for direction, format in zip(DIRECTIONS, (self.rowwise, self.columnwise), strict=True):
            if format is not None:
                yield direction, format


def target(
    rowwise: str | None = None, columnwise: str | None = None, style: str = ownfile.FORMAT, match: Sequence[str] = (),
    seed: int = 0,
) -> Target:
    """Check what was asked for. rowwise is the format of the style where it is None and there is one.

    Raises ValueError for formats or a style that are not known, or a style that does not hold the formats.
    """
    if style not in STYLES:
        raise ValueError(f"style {style!r} is not one of {', '.join(STYLES)}")
    if style != ownfile.FORMAT:
        _, formats = checkpoints.STYLES[style]
        rowwise = formats[0] if rowwise is None else rowwise
        if columnwise is not None:
            raise ValueError(f"style {style!r} holds rowwise parts alone; columnwise needs style {ownfile.FORMAT!r}")
    elif rowwise is None and columnwise is None:
        raise ValueError("give rowwise, columnwise or both, for example rowwise mxfp8")
    row, column = (None if name is None else as_format(name) for name in (rowwise, columnwise))
    as_draws(seed, (), np.empty(0))  # raises where it is none
    made = Target(row, column, style, tuple(match) or ("*",), seed)
    if style != ownfile.FORMAT:
        assert row is not None
        columns = max(row.storage.block[1] if row.storage.block not in (None, (1, ROW)) else 1, 2)
        tensors_of("weights", HybridArray(placeholder(row, (2, columns))), style, {})  # raises where it holds others
    return made


@dataclass(frozen=True, slots=True)
class Converted:
    """One weight: what it was, bytes of its tensors before and after, and SQNR of the parts in dB.

    SQNR is against what was in the file, decoded where it was quantized; NaN where an element was lost; None of a
    part whose codes were kept.
    """

    name: str
    before: int
    after: int
    sqnr_db: dict[Direction, float | None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a file became. Print it with rich."""

    source: str
    written: str
    target: Target
    weights: tuple[Converted, ...]
    copied: int
    copied_bytes: int
    before: int
    after: int

    def table(self) -> TextTable:
        directions = [direction for direction, _ in self.target.formats]
        ranked = sorted(self.weights, key=lambda w: _rank(w.sqnr_db.values()))
        shown = set(map(id, ranked[:SHOWN]))
        rows = [
            (_printable(w.name), describe_bytes(w.before), describe_bytes(w.after),
             *(_decibels(w.sqnr_db.get(direction)) for direction in directions))
            for w in self.weights if id(w) in shown
        ]
        none = ("",) * len(directions)
        rule = len(rows)
        if len(ranked) > SHOWN:
            rest = ranked[SHOWN:]
            rows.append((f"{len(rest)} more, better", *_sums(rest), *none))
        if self.copied:
            rows.append((f"{self.copied} copied unchanged", *[describe_bytes(self.copied_bytes)] * 2, *none))
        rows.append(("file", describe_bytes(self.before), describe_bytes(self.after), *none))
        formats = ", ".join(f"{direction} {format.name}" for direction, format in self.target.formats)
        head = ("weight", "before", "after", *(f"{direction}\ndB" for direction in directions))
        title = f"{_printable(self.source)} -> {_printable(self.written)}: {formats}, style {self.target.style}"
        return TextTable(head, tuple(rows), title, (rule,))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[TextTable]:
        yield self.table()


def _rank(values: Any) -> float:
    """NaN, then low to high; codes that were kept last."""
    return min((-math.inf if math.isnan(v) else v for v in values if v is not None), default=math.inf)


def _decibels(value: float | None) -> str:
    return "kept" if value is None else decibels(value)


def _sums(weights: Sequence[Converted]) -> tuple[str, str]:
    return describe_bytes(sum(w.before for w in weights)), describe_bytes(sum(w.after for w in weights))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


# --- converting ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a file will hold, found from its header alone.

    jobs     name of an array, where it comes from, and whether it is converted
    planned  the tensors to be written
    """

    checkpoint: Checkpoint
    target: Target
    jobs: tuple[tuple[str, Source, bool], ...]
    planned: Mapping[str, Planned]
    described: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the source's tensors."""
        return sum(_nbytes(self.checkpoint, source) for _, source, _ in self.jobs)


def plan(source: str | os.PathLike[str], target: Target) -> Plan:
    """Read a header and decide what becomes of each array.

    2-D weights that fit a pattern are converted: tensors of a float type, and quantized ones, whose parts are kept
    where they are stored as asked for, and otherwise quantized from what is there, decoded. All others are copied,
    byte for byte.
    Raises FileError for a file that cannot be read, ValueError or NotImplementedError for a weight that cannot become
    what is asked, naming it.
    """
    checkpoint = Checkpoint(TensorFile.open(source))
    jobs: list[tuple[str, Source, bool]] = []
    planned: dict[str, Planned] = {}
    described: dict[str, Any] = {}
    for name, origin in checkpoint.sources.items():
        convert = _is_weight(checkpoint, origin) and any(fnmatchcase(name, pattern) for pattern in target.match)
        if convert:
            tensors = tensors_of(name, _what_becomes(checkpoint, origin, target), target.style, described)
            add(planned, {tensor: Planned(s.type, s.array.shape) for tensor, s in tensors.items()}, name)
        else:
            if origin.described is not None:
                if target.style != ownfile.FORMAT:
                    raise NotImplementedError(f"{name!r} is not converted, and style {target.style!r} cannot hold it")
                described[name] = origin.described
            add(planned, {tensor: _as_it_is(checkpoint, tensor) for tensor in origin.tensors}, name)
        jobs.append((name, origin, convert))
    return Plan(checkpoint, target, tuple(jobs), planned, described)


def left_out(plan: Plan) -> str:
    """Why there is nothing to convert: what the names asked for are, where there are any."""
    names = [(name, source) for name, source, _ in plan.jobs
             if any(fnmatchcase(name, pattern) for pattern in plan.target.match)]
    said = f"no 2-D weight of a name like {' or '.join(plan.target.match)}"
    if not names:
        there = ", ".join(repr(name) for name, *_ in plan.jobs[:NAMED])
        return f"{said}; it holds {there or 'nothing'}{' ...' if len(plan.jobs) > NAMED else ''}"
    tensors = plan.checkpoint.file.tensors
    found = [f"{name!r} {tensors[source.tensors[0]].type} {list(source.shape or ())}" for name, source in names[:NAMED]]
    return (f"{said}; integers, codes without scales, groups and arrays that are not 2-D are copied alone, as here "
            f"{', '.join(found)}{' ...' if len(names) > NAMED else ''}")


def _is_weight(checkpoint: Checkpoint, source: Source) -> bool:
    if source.shape is None or len(source.shape) != 2:
        return False
    return _is_quantized(source) or checkpoint.file.tensors[source.tensors[0]].type in FLOATS


def _is_quantized(source: Source) -> bool:
    return len(source.tensors) > 1 or source.described is not None


def _what_becomes(checkpoint: Checkpoint, source: Source, target: Target) -> HybridArray:
    """An array of the tensors that a weight becomes, with placeholders for parts that are quantized."""
    if _is_quantized(source):
        item = source.read()
        kept, dtype = _kept(item, target), item.dtype
        derived = _derived(item, kept, target)
    else:
        stored = checkpoint.file.array(source.tensors[0]).dtype
        kept, derived, dtype = {}, None, stored if stored in NOMINAL else np.dtype(np.float32)
    assert source.shape is not None
    m, n = source.shape
    parts = {
        direction: placeholder(format.resolve(dtype), (m, n) if direction == "rowwise" else (n, m))
        for direction, format in target.formats if direction not in kept
    }
    return _array({**parts, **kept}, derived, dtype)


def _kept(item: HybridArray, target: Target) -> dict[Direction, QuantizedArray]:
    """The parts that are stored as asked for already."""
    asked = dict(target.formats)
    return {
        direction: part for direction, part in item.parts()
        if direction in asked and part.format.storage == asked[direction].resolve(item.dtype).storage
    }


def _derived(item: HybridArray, kept: Mapping[Direction, QuantizedArray], target: Target) -> Direction | None:
    """The part of the result that was quantized from what the other one decodes to."""
    made = [direction for direction, _ in target.formats if direction not in kept]
    if kept and made:
        return made[0]
    return item.derived if item.derived in kept else None


def _array(
    parts: Mapping[Direction, QuantizedArray], derived: Direction | None, dtype: np.dtype[Any]
) -> HybridArray:
    return HybridArray(parts.get("rowwise"), parts.get("columnwise"), dtype=dtype, derived=derived)


def _as_it_is(checkpoint: Checkpoint, tensor: str) -> Planned:
    there = checkpoint.file.tensors[tensor]
    if there.type not in TYPES:
        raise NotImplementedError(f"{checkpoint.file.path}: {tensor!r} is of a type that is not known, {there}")
    return Planned(there.type, there.shape)


def _nbytes(checkpoint: Checkpoint, source: Source) -> int:
    tensors = (checkpoint.file.tensors[tensor] for tensor in source.tensors)
    return sum(tensor.end - tensor.begin for tensor in tensors)


def convert(
    plan: Plan, written: str | os.PathLike[str], *, replace: bool = False, step: Step = lambda nbytes: None
) -> Conversion:
    """Write what was planned; one weight is in memory at a time.

    The file appears when it is complete. Raises FileExistsError where there is one and replace is False, FileError
    where it would be the source itself.
    """
    checkpoint = plan.checkpoint
    refuse_same(checkpoint.file.path, written)
    weights: list[Converted] = []
    copied = copied_bytes = 0
    keys = ownfile.KEYS if plan.target.style == ownfile.FORMAT else ()
    kept = {key: text for key, text in checkpoint.metadata.items() if key not in keys}
    metadata = metadata_of(plan.target.style, plan.described, kept)
    with writing(written, plan.planned, metadata, replace=replace) as put:
        for name, source, wanted in plan.jobs:
            before = _nbytes(checkpoint, source)
            if wanted:
                sqnr, after = _convert_one(name, source, plan.target, put)
                weights.append(Converted(name, before, after, sqnr))
            else:
                for tensor in source.tensors:
                    put(tensor, checkpoint.file.stored(tensor))
                copied, copied_bytes = copied + 1, copied_bytes + before
            step(before)
    before, after = (Path(path).stat().st_size for path in (checkpoint.file.path, written))
    return Conversion(
        str(checkpoint.file.path), str(written), plan.target, tuple(weights), copied, copied_bytes, before, after
    )


def refuse_same(source: str | os.PathLike[str], written: str | os.PathLike[str]) -> None:
    """Raises FileError where both are one file, under whatever names."""
    try:
        same = os.path.samefile(source, written)
    except OSError:
        same = os.path.abspath(source) == os.path.abspath(written)
    if same:
        raise FileError(f"{written}: this is the file that is read; give another name")


def _convert_one(name: str, source: Source, target: Target, put: Put) -> tuple[dict[Direction, float | None], int]:
    """SQNR of the parts, and bytes written."""
    item = values = source.read()
    kept: dict[Direction, QuantizedArray] = {}
    derived: Direction | None = None
    dtype: np.dtype[Any] = item.dtype if item.dtype in NOMINAL else np.dtype(np.float32)
    if isinstance(item, HybridArray):
        kept = _kept(item, target)
        derived = _derived(item, kept, target)
    made = {direction: format.resolve(dtype) for direction, format in target.formats if direction not in kept}
    sqnr: dict[Direction, float | None] = {direction: None for direction, _ in target.formats}
    parts = dict(kept)
    if made:
        if isinstance(item, HybridArray):  # float32: a bfloat16 in between would round once more
            values = item.dequantize(source=next(iter(kept), None), dtype=np.float32)
        array = ops.quantize(values, rowwise=made.get("rowwise"), columnwise=made.get("columnwise"), seed=target.seed)
        for direction, part in array.parts():
            parts[direction] = part
            sqnr[direction] = measure(values if direction == "rowwise" else values.T, part)
    tensors = tensors_of(name, _array(parts, derived, dtype), target.style, {})
    put_all(put, tensors)
    return sqnr, sum(stored.array.nbytes for stored in tensors.values())


def measure(values: Array, part: QuantizedArray) -> float:
    """SQNR of a part in dB against its (outer, k) values, slab by slab; NaN where a finite element became NaN."""
    outer, k = part.shape
    height = max(SQUARE, SLAB // max(k, 1) // SQUARE * SQUARE)
    tally = Tally()
    with np.errstate(all="ignore"):
        for top in range(0, outer, height):
            rows = rows_of(part, top, min(top + height, outer))
            tally.add(values[top : top + height], HybridArray(rows).dequantize(dtype=np.float32))
    return math.nan if tally.lost else tally.sqnr_db


__all__ = [
    "STYLES", "Conversion", "Converted", "Plan", "Target", "convert", "left_out", "plan", "refuse_same", "target",
]
