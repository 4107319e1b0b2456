"""HybridArrays, GroupedArrays and plain arrays in safetensors files, ours and other programs'.

    save("w.safetensors", {"w": hq.quantize(w, rowwise="mxfp8", columnwise="nvfp4")})
    arrays = load("w.safetensors")          # a mapping; arrays["w"] is the HybridArray, its buffers mapped

The format is read and written by hqarray.tensorfile, without the safetensors package: its NumPy side has neither
bfloat16 nor float8, it holds a file's tensors in memory to write them, and it accepts names that occur twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from hqarray.arrays import HybridArray, QuantizedArray
from hqarray.explore import host
from hqarray.grouped import GroupedArray
from hqarray.indexfile import Index, index_in
from hqarray.layout import Array
from hqarray.tensorfile import METADATA, FileError, Planned, Put, TensorFile, writing

from . import checkpoints, ownfile
from .sources import Source, Stored, plain

Item: TypeAlias = "HybridArray | GroupedArray | Array"

STYLES = (ownfile.FORMAT, *checkpoints.STYLES)
"""What save writes: "hqarray" holds everything, the others are what checkpoints of weights look like."""


class Checkpoint(Mapping[str, Item]):
    """A file as a mapping from names to arrays: HybridArray, GroupedArray or NumPy arrays.

    An array is made when it is asked for. Buffers of plain arrays and of HybridArrays are the file, mapped and
    read-only (.copy() makes an array of its own); those of GroupedArrays are copies. Quantized weights are under the
    name of the weight, the tensors of their scales are not listed; `stored` gives any tensor as it is.

    file      the header, checked
    metadata  texts of whoever wrote it
    """

    def __init__(self, file: TensorFile, dtype: Any = np.float32) -> None:
        self.file = file
        own = ownfile.is_own(file)
        self.sources: dict[str, Source] = ownfile.sources(file) if own else checkpoints.sources(file, np.dtype(dtype))
        self.metadata = {key: text for key, text in file.metadata.items() if not (own and key in ownfile.KEYS)}

    def __getitem__(self, name: str) -> Item:
        return self.sources[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def stored(self, name: str) -> Array:
        """A tensor of the file as it is stored, mapped; file.tensors lists them."""
        return self.file.array(name)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.file.path)!r}, {len(self)} arrays in {len(self.file.tensors)} tensors)"


class Checkpoints(Mapping[str, Item]):
    """The files of an index as one mapping, each read as a Checkpoint.

    files  in the order of the index
    """

    def __init__(self, index: Index, dtype: Any = np.float32) -> None:
        self.path = index.path
        self.files = tuple(Checkpoint(TensorFile.open(path), dtype) for path in index.files)
        self._where: dict[str, Checkpoint] = {}
        for file in self.files:
            for name in file:
                if name in self._where:
                    raise FileError(f"{index.path}: {name!r} is in {self._where[name].file.path.name} and in "
                                    f"{file.file.path.name}")
                self._where[name] = file

    def __getitem__(self, name: str) -> Item:
        return self._where[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.path)!r}, {len(self)} arrays in {len(self.files)} files)"


def load(path: str | os.PathLike[str], *, dtype: Any = np.float32) -> Checkpoint | Checkpoints:
    """Read a safetensors file, or those of an index, as a mapping from names to arrays; only headers are read at once.

    path     a file that save wrote, or a checkpoint: FP8 with `weight_scale` or 128x128 `weight_scale_inv`, MXFP8,
             MXFP4 as `*_blocks` and `*_scales` or `weight_packed`, NVFP4 with `weight_scale` and `weight_scale_2` or
             `weight_packed` and `weight_global_scale`. Codes are not quantized anew, nor copied. Or the index of
             several such files, or the folder that holds it.
    dtype    nominal dtype of HybridArrays in checkpoints, which do not say one

    Raises FileError (a ValueError) for a file that is no such file or whose header does not fit it; asking for a
    tensor under a convention that is not known raises NotImplementedError, which names it.
    """
    index = index_in(path)
    return Checkpoint(TensorFile.open(path), dtype) if index is None else Checkpoints(Index.open(index), dtype)


def save(
    path: str | os.PathLike[str], arrays: Mapping[str, Item], *, style: str = ownfile.FORMAT,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays to one safetensors file, which appears complete or not at all.

    arrays    HybridArrays, GroupedArrays and plain arrays (NumPy, CuPy, or with DLPack, as torch's and JAX's) by name
    style     "hqarray": everything, bit for bit, sizes on a device as they are now. Or the tensors of a checkpoint, for
              rowwise parts alone: "fp8" (X, X_scale), "fp8_block" (X, X_scale_inv), "mxfp4" (X_blocks, X_scales),
              "nvfp4" (X, X_scale, X_scale_2)
    metadata  texts to keep beside them

    Codes of FP8 and scales of NVFP4 are typed F8_E4M3 or F8_E5M2; E8M0 scales and FP4 and FP6 codes are U8, since
    safetensors.torch opens no file with F8_E8M0, F4 or F6 in it.
    Raises TypeError or ValueError for what the style cannot hold; then there is no file.
    """
    if style not in STYLES:
        raise ValueError(f"style={style!r} is not one of {', '.join(map(repr, STYLES))}")
    described: dict[str, Any] = {}
    stored: dict[str, Stored] = {}
    for name, item in arrays.items():
        add(stored, tensors_of(name, item, style, described), name)
    planned = {name: Planned(each.type, each.array.shape) for name, each in stored.items()}
    with writing(path, planned, metadata_of(style, described, metadata or {})) as put:
        put_all(put, stored)


def tensors_of(name: str, item: Any, style: str, described: dict[str, Any]) -> dict[str, Stored]:
    """The tensors of an array in a style; what the style's metadata must say of it is added to described."""
    if isinstance(item, QuantizedArray):
        raise TypeError(f"{name!r} is one part of an array; wrap it: HybridArray(rowwise=part)")
    if not isinstance(item, (HybridArray, GroupedArray)):
        return {name: plain(name, item)}
    if style != ownfile.FORMAT:
        return checkpoints.tensors_of(name, item, style)
    tensors, described[name] = ownfile.tensors_of(name, item)
    return tensors


def add(target: dict[str, Any], tensors: Mapping[str, Any], name: str) -> None:
    """Add tensors of the array `name`. Raises ValueError where one is there already."""
    for tensor in tensors:
        if tensor in target:
            raise ValueError(f"{name!r} needs a tensor {tensor!r}, and another array has one of that name; rename it")
    target.update(tensors)


def metadata_of(style: str, described: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file in a style, the user's included. Raises ValueError for a key of ours."""
    if style != ownfile.FORMAT:
        return {"format": "pt", **metadata}  # transformers opens no other
    taken = sorted(set(metadata) & set(ownfile.KEYS))
    if taken:
        raise ValueError(f"metadata {', '.join(taken)}: these keys say that a file is hqarray's; use other ones")
    return {**metadata, **ownfile.metadata_of(described)}


def put_all(put: Put, stored: Mapping[str, Stored]) -> None:
    for name, each in stored.items():
        put(name, host(each.array))


__all__ = ["METADATA", "STYLES", "Checkpoint", "Checkpoints", "FileError", "Item", "load", "save"]
