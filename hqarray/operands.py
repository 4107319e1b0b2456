"""Operands from files: every 2-D float array in .npy, .npz and .safetensors, and the x / w / dy triples among them.

Reads with NumPy alone. Nothing in a file is executed: pickled objects are refused.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .formats import BFLOAT16
from .indexfile import Index, index_in
from .tensorfile import TYPES, FileError, TensorFile

Values: TypeAlias = npt.NDArray[Any]

ROLE_NAMES = ("x", "w", "dy")

BFLOAT16_SUFFIX = re.compile(r"[._/]bfloat16$")
ROLE_SUFFIX = re.compile(r"^(?:(?P<layer>.*)[._/])?(?P<role>x|w|dy)$")


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One 2-D float array and where it came from."""

    name: str
    source: str
    values: Values


@dataclass(frozen=True, slots=True, eq=False)
class Triple:
    """The operands of a linear layer: x (m, k), w (n, k), dy (m, n)."""

    name: str
    x: Matrix
    w: Matrix
    dy: Matrix


@dataclass(frozen=True, slots=True)
class Operands:
    """What files hold: triples, the matrices that belong to none, and why arrays were skipped."""

    triples: tuple[Triple, ...]
    matrices: tuple[Matrix, ...]
    notes: tuple[str, ...]


def read_operands(paths: Iterable[str | Path]) -> Operands:
    """Read every 2-D float array of the files and group them.

    Names that end in x, w and dy (after ".", "_" or "/", or nothing else) make a triple where their shapes fit.
    bfloat16 is read from safetensors, from the two-byte void that np.save makes of it, and from uint16 under a
    name ending in ".bfloat16". Raises FileError for a file that cannot be read.
    """
    notes: list[str] = []
    matrices: dict[tuple[str, str], Matrix] = {}
    for path in map(Path, paths):
        for raw, array in _read(path):
            name = "".join(c if c.isprintable() else "\ufffd" for c in raw)  # no control codes for a terminal
            matrix, note = _matrix(name, str(path), array)
            if matrix is not None:
                matrices.setdefault((str(path.resolve()), matrix.name), matrix)
            else:
                notes.append(f"skipped {name} ({path.name}): {note}")
    return _group(list(matrices.values()), notes)


def default_operands() -> Operands:
    """The two real layers that come with the library."""
    return read_operands([Path(__file__).parent / "data" / "linear_layers.npz"])


# --- files --------------------------------------------------------------------------------------


def _read(path: Path) -> Iterator[tuple[str, Values | str]]:
    """Name and array, or the reason why there is none, for each entry of a file."""
    index = index_in(path)
    if index is not None:
        for file in Index.open(index).files:
            yield from _read(file)
        return
    readers = {".npy": _read_npy, ".npz": _read_npz, ".safetensors": _read_safetensors}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise FileError(f"{path}: not a file this reads; give .npy, .npz or .safetensors, or the index of several")
    try:
        yield from reader(path)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except (ValueError, EOFError, TypeError, KeyError, RuntimeError, SyntaxError, MemoryError, OverflowError,
            zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileError(f"{path}: not a readable {path.suffix[1:]} file: {reason}") from error


def _read_npy(path: Path) -> Iterator[tuple[str, Values | str]]:
    with path.open("rb") as file:
        magic = file.read(6)
    if magic != b"\x93NUMPY":
        raise FileError(f"{path}: not an npy file (it begins with {magic!r})" if magic else f"{path}: empty file")
    yield path.stem, _load_npy(path)


def _load_npy(path: Path) -> Values | str:
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        _, _, dtype = header(file)
    if dtype.hasobject:
        return "it holds Python objects (pickle), which are not loaded"
    mapped: Values = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


def _read_npz(path: Path) -> Iterator[tuple[str, Values | str]]:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        for name in names:
            with archive.open(name) as file:
                if not name.endswith(".npy"):
                    yield name, "not an array"
                    continue
                if file.read(6) != b"\x93NUMPY":
                    raise FileError(f"{path}: {name} in it is not an npy file")
            array: Values | str
            try:
                with archive.open(name) as file:
                    array = np.lib.format.read_array(file, allow_pickle=False)
            except ValueError as error:
                if "allow_pickle" not in str(error):
                    raise
                array = "it holds Python objects (pickle), which are not loaded"
            yield name.removesuffix(".npy"), array


CODES = re.compile(r"(_packed|_blocks|\.blocks|\.codes)$")
SCALES = re.compile(r"[._](global_)?scales?(_inv|_2)?$")
"""Endings of the names of codes and of scales, in the styles of checkpoints that are read, and in our own."""


def _itemsize(type: str) -> float:
    """Bytes of an element, half ones of FP4."""
    return TYPES[type].bits / 8 if type in TYPES else 0


def _is_no_float(type: str) -> bool:
    dtype = TYPES[type].dtype if type in TYPES else None
    return dtype is None or (dtype.itemsize == 1 and dtype.kind not in "iub")


def _read_safetensors(path: Path) -> Iterator[tuple[str, Values | str]]:
    file = TensorFile.open(path)
    codes = {CODES.sub("", name): name for name, tensor in file.tensors.items() if _itemsize(tensor.type) < 2}
    for name, tensor in file.tensors.items():
        scale = SCALES.search(name)
        owner = codes.get(name[: scale.start()]) if scale is not None else None
        if owner not in (None, name):
            yield name, f"it is a scale of the quantized {owner}"
        elif _is_no_float(tensor.type):
            yield name, f"{tensor.type} is not a float type this quantizes; hqarray.interop.safetensors.load decodes it"
        elif len(tensor.shape) != 2 and tensor.begin < tensor.end:
            yield name, f"{len(tensor.shape)}-D"
        else:
            yield name, file.array(name)


# --- arrays -------------------------------------------------------------------------------------


def _matrix(name: str, source: str, array: Values | str) -> tuple[Matrix | None, str]:
    """The array as a matrix of native floats, or why it is none."""
    if isinstance(array, str):
        return None, array
    suffix = BFLOAT16_SUFFIX.search(name)
    if array.dtype == np.uint16 and suffix:
        array, name = array.view(BFLOAT16), name[: suffix.start()]
    elif array.dtype == np.dtype("V2"):
        array = array.view(BFLOAT16)
    elif array.dtype == np.uint16:
        return None, "uint16; end its name in .bfloat16 if these are the bits of bfloat16"
    if array.dtype != BFLOAT16 and (array.dtype.kind != "f" or array.dtype.itemsize > 8):
        return None, f"dtype {array.dtype}; float16, bfloat16, float32 and float64 are read"
    if array.ndim != 2:
        return None, f"{array.ndim}-D"
    if not array.size:
        return None, f"empty, shape {array.shape}"
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return Matrix(name, source, array), ""


def _group(matrices: list[Matrix], notes: list[str]) -> Operands:
    layers: dict[tuple[str, str], dict[str, Matrix]] = {}
    for matrix in matrices:
        match = ROLE_SUFFIX.match(matrix.name)
        if match:
            source = Path(matrix.source)
            place = str(source.parent if source.suffix.lower() == ".npy" else source)
            layers.setdefault((place, match["layer"] or ""), {})[match["role"]] = matrix
    triples, used = [], set()
    for (place, layer), roles in layers.items():
        if len(roles) < len(ROLE_NAMES):
            continue
        name = layer or Path(place).stem
        x, w, dy = (roles[role] for role in ROLE_NAMES)
        if dy.values.shape != (x.values.shape[0], w.values.shape[0]) or x.values.shape[1] != w.values.shape[1]:
            shapes = ", ".join(f"{role} {roles[role].values.shape}" for role in ROLE_NAMES)
            notes.append(f"{name}: no triple, {shapes} do not fit x (m, k), w (n, k), dy (m, n)")
            continue
        triples.append(Triple(name, x, w, dy))
        used |= {id(x), id(w), id(dy)}
    return Operands(tuple(triples), tuple(m for m in matrices if id(m) not in used), tuple(notes))
