"""Files of tensors in the safetensors format: read by mapping, written whole or not at all.

8 bytes of header length, a JSON header, the data. Every claim of a header is checked against the file before a
byte of data is touched; tensors lie one after another, without overlap or hole, as the format asks.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .formats import BFLOAT16

Values: TypeAlias = npt.NDArray[Any]

HEADER_LIMIT = 100_000_000
"""Bytes: the format's own limit on its header."""

METADATA = "__metadata__"

ALIGNMENT = 64
"""Bytes: the data of a file written here begins on a multiple of this."""

CHUNK = 1 << 24
"""Bytes that are copied at once where an array is not contiguous."""


class FileError(ValueError):
    """A file that cannot be read, in one line that names it."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type by the name that headers give it; dtype is None where NumPy has none of these bits."""

    bits: int
    dtype: np.dtype[Any] | None


def _type(dtype: npt.DTypeLike) -> TensorType:
    dtype = np.dtype(dtype)
    return TensorType(8 * dtype.itemsize, dtype)


TYPES: dict[str, TensorType] = {
    "F64": _type("<f8"), "F32": _type("<f4"), "F16": _type("<f2"), "BF16": _type(BFLOAT16), "C64": _type("<c8"),
    "I64": _type("<i8"), "I32": _type("<i4"), "I16": _type("<i2"), "I8": _type("i1"),
    "U64": _type("<u8"), "U32": _type("<u4"), "U16": _type("<u2"), "U8": _type("u1"), "BOOL": _type("?"),
    **{name: _type(getattr(ml_dtypes, kind)) for name, kind in (
        ("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("F8_E8M0", "float8_e8m0fnu"),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz"), ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
    )},
    "F4": TensorType(4, None), "F6_E2M3": TensorType(6, None), "F6_E3M2": TensorType(6, None),
}
"""Types whose size is known. A tensor of another one keeps its bytes, and has no array."""

TYPE_NAMES: dict[str, str] = {kind.dtype.name: name for name, kind in TYPES.items() if kind.dtype is not None}
"""The name in a header of a NumPy dtype's name."""


class Planned(NamedTuple):
    """What a header says of a tensor to be written."""

    type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * TYPES[self.type].bits // 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a header says of a tensor; begin and end are bytes of the file."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.type} {list(self.shape)}"


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class TensorFile:
    """A file whose header was read and found true; its data is mapped, and read when it is touched."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    memory: Values

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TensorFile:
        """Raises FileError for a header that is none or does not fit the file, OSError where it cannot be read."""
        path = Path(path)
        try:
            tensors, metadata = _read_header(path)
        except FileError:
            raise
        except (ValueError, RecursionError, MemoryError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise FileError(f"{path}: not a readable safetensors file: {reason}") from error
        return cls(path, tensors, metadata, np.asarray(np.memmap(path, np.uint8, "r")))

    def stored(self, name: str) -> Values:
        """The bytes of a tensor, (n,) uint8, mapped."""
        tensor = self.tensors[name]
        return self.memory[tensor.begin : tensor.end]

    def array(self, name: str) -> Values:
        """A tensor in its dtype and shape, mapped and read-only. Raises NotImplementedError where NumPy lacks it."""
        tensor = self.tensors[name]
        dtype = TYPES[tensor.type].dtype if tensor.type in TYPES else None
        if dtype is None:
            raise NotImplementedError(f"{self.path}: {name!r} is {tensor}, a type that NumPy does not hold")
        try:
            return self.stored(name).view(dtype).reshape(tensor.shape)
        except ValueError as error:
            raise FileError(f"{self.path}: {name!r} of shape {list(tensor.shape)}: {error}") from error


def _read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise FileError(f"{path}: not a safetensors file: its header would be {length} bytes of {size}")
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_without_duplicates)
    if not isinstance(header, dict):
        raise FileError(f"{path}: not a safetensors file: its header is not an object")
    metadata = header.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileError(f"{path}: not a safetensors file: its {METADATA} is not a map of texts")
    start, nbytes = 8 + length, size - 8 - length
    tensors = {name: _tensor(path, name, entry, start, nbytes) for name, entry in header.items()}
    _check_cover(path, tensors, start, size)
    return tensors, metadata


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"its header names {next(n for n in found if names.count(n) > 1)!r} twice")
    for name in found:
        name.encode("utf-8")  # a lone surrogate is no text
    return found


def _tensor(path: Path, name: str, entry: Any, start: int, nbytes: int) -> Tensor:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = isinstance(kind, str) and kind.isidentifier() and isinstance(shape, list)
        whole = whole and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole or not begin <= end <= nbytes:
        raise FileError(f"{path}: the header says of {name!r} what does not fit the file ({nbytes} bytes of data)")
    if kind in TYPES and prod(shape) * TYPES[kind].bits != 8 * (end - begin):
        raise FileError(f"{path}: the header says of {name!r} {kind} {list(shape)} in {end - begin} bytes")
    return Tensor(kind, tuple(shape), start + begin, start + end)


def _check_cover(path: Path, tensors: dict[str, Tensor], start: int, size: int) -> None:
    for name, tensor in sorted(tensors.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if tensor.begin != start:
            what = "overlaps the tensor before it" if tensor.begin < start else "leaves a hole before it"
            raise FileError(f"{path}: {name!r} {what}: it begins at byte {tensor.begin} and not at {start}")
        start = tensor.end
    if start != size:
        raise FileError(f"{path}: {size - start} bytes at the end of the file belong to no tensor")


# --- writing ------------------------------------------------------------------------------------

Put: TypeAlias = Callable[[str, Values], None]
"""put(name, array): write one of the planned tensors."""


def type_name(dtype: np.dtype[Any], what: str) -> str:
    """How a header names a dtype. Raises TypeError, naming `what`, for one that it cannot name."""
    name = TYPE_NAMES.get(dtype.name)
    if name is None or dtype.hasobject:
        raise TypeError(f"{what} has dtype {dtype}; safetensors holds {', '.join(TYPE_NAMES)}")
    return name


@contextmanager
def writing(
    path: str | os.PathLike[str], planned: Mapping[str, Planned], metadata: Mapping[str, str], *, replace: bool = True
) -> Iterator[Put]:
    """A file whose tensors are put one by one, in any order.

    It appears under its name, flushed to the disk, when all of them were put, and replaces what was there; on any
    error nothing is left. replace=False raises FileExistsError where there is a file. Large types come first, so
    that each array is aligned.
    """
    path = Path(path)
    offsets, header = _header(planned, metadata)
    left = set(planned)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:  # from before there is a file: a signal may come as it is opened
        with _naming(path):
            _refuse(path, replace)
            file = open(temporary, "xb")  # noqa: SIM115 - closed below, before it is renamed
        with file:
            with _naming(path):
                file.write(header)

            def put(name: str, array: Values) -> None:
                left.remove(name)
                assert array.nbytes == planned[name].nbytes, (name, planned[name], array.dtype, array.shape)
                with _naming(path):
                    file.seek(len(header) + offsets[name])
                    for chunk in _chunks(array):
                        file.write(chunk)

            yield put
            assert not left, f"planned and not put: {left}"
            with _naming(path):
                file.flush()
                os.fsync(file.fileno())
        with _naming(path):
            _refuse(path, replace)
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _header(planned: Mapping[str, Planned], metadata: Mapping[str, str]) -> tuple[dict[str, int], bytes]:
    """Where the data of each tensor begins after the header, and the bytes before it."""
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    offsets, end = {}, 0
    for name, tensor in sorted(planned.items(), key=lambda pair: -TYPES[pair[1].type].bits):
        if name == METADATA:
            raise ValueError(f"a tensor cannot be called {METADATA}: the format keeps its metadata there")
        offsets[name], end = end, end + tensor.nbytes
        entries[name] = {"dtype": tensor.type, "shape": tensor.shape, "data_offsets": [offsets[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"a header of {len(text)} bytes is beyond the format's limit, {HEADER_LIMIT}")
    return offsets, len(text).to_bytes(8, "little") + text


def _chunks(array: Values) -> Iterator[memoryview]:
    """The bytes of an array in C order, little-endian, with no copy of the whole."""
    if not array.size:
        return
    if array.ndim == 0 or array.dtype.byteorder == ">" or not array.flags.c_contiguous:
        array = array.reshape(1) if array.ndim == 0 else array
        rows = max(1, CHUNK // max(1, array.nbytes // array.shape[0]))
        for top in range(0, array.shape[0], rows):
            chunk = array[top : top + rows]
            chunk = chunk.astype(chunk.dtype.newbyteorder("<")) if chunk.dtype.byteorder == ">" else chunk
            yield np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
        return
    flat = array.reshape(-1).view(np.uint8)
    for begin in range(0, flat.size, CHUNK):
        yield flat[begin : begin + CHUNK].data


def _refuse(path: Path, replace: bool) -> None:
    if path.is_dir():
        raise IsADirectoryError(21, "Is a directory")
    if not replace and os.path.lexists(path):
        raise FileExistsError(17, "there is a file already")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError names the file that was asked for, not a temporary one or none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system opens a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
