"""Checkpoints in several safetensors files: an index, as transformers writes it, that says which tensor is in which.

    {"metadata": {"total_size": ...}, "weight_map": {"model.embed.weight": "model-00001-of-00002.safetensors", ...}}

Only headers are read here. What the index claims is held against the headers before a byte of data is touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .tensorfile import HEADER_LIMIT, FileError, TensorFile

ENDING = ".index.json"


@dataclass(frozen=True, slots=True)
class Index:
    """An index and the names of its files, in the order in which it names them.

    path   of the index
    where  the file of each tensor, a name in the folder of the index
    rest   what else the index says, but for the total size
    """

    path: Path
    where: Mapping[str, str]
    rest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.where.values()))

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.path.parent / name for name in self.names)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Index:
        """Raises FileError for an index that is none, or whose files do not hold what it says."""
        path = Path(path)
        try:
            if path.stat().st_size > HEADER_LIMIT:
                raise FileError(f"{path}: an index of {path.stat().st_size} bytes is beyond {HEADER_LIMIT}")
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise FileError(f"{path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path}: not a readable index: {' '.join(str(error).split())}") from error
        where = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
            raise FileError(f"{path}: not an index of safetensors files: it has no weight_map of names")
        for name in set(where.values()):
            if name != Path(name).name or name in ("", ".", ".."):
                raise FileError(f"{path}: it names a file {name!r}, which is not in its own folder")
        index = cls(path, where, {key: value for key, value in content.items() if key != "weight_map"})
        for name, file in zip(index.names, index.files, strict=True):
            index._check(name, file)
        return index

    def _check(self, name: str, path: Path) -> None:
        try:
            there = set(TensorFile.open(path).tensors)
        except OSError as error:
            raise FileError(f"{path}: {error.strerror or error}, and {self.path.name} names it") from error
        said = {tensor for tensor, file in self.where.items() if file == name}
        for what, names in (("is not in it", said - there), ("is in it, but not in the index", there - said)):
            if names:
                raise FileError(f"{path}: {min(names)!r} {what} ({self.path})")


def index_in(path: str | os.PathLike[str]) -> Path | None:
    """The index that a path is, or that a folder holds; None where it is neither. Raises FileError for several."""
    path = Path(path)
    if not path.is_dir():
        return path if path.name.endswith(ENDING) else None
    found = sorted(path.glob(f"*{ENDING}"))
    if len(found) > 1:
        raise FileError(f"{path}: it holds {len(found)} indices; name one of {', '.join(each.name for each in found)}")
    return found[0] if found else None


def rendered(index: Index, where: Mapping[str, str], nbytes: int) -> str:
    """The text of an index with other tensors in files of the same names."""
    metadata = index.rest.get("metadata")
    metadata = {**metadata, "total_size": nbytes} if isinstance(metadata, dict) else {"total_size": nbytes}
    return json.dumps({**index.rest, "metadata": metadata, "weight_map": dict(where)}, indent=2) + "\n"


__all__ = ["ENDING", "Index", "index_in", "rendered"]
