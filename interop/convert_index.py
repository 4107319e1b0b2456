"""Checkpoints in several files, converted file by file, by several processes: `convert` for an index."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from hqarray.indexfile import Index, rendered
from hqarray.processes import in_processes
from hqarray.tensorfile import FileError

from .checkpoints import CODE_TYPES, READ
from .convert import Conversion, Plan, Step, Target, convert, left_out, plan


def plan_index(index: Index, target: Target) -> list[Plan]:
    """What becomes of each file, from the headers alone.

    Raises as `plan` does, and NotImplementedError for a weight whose codes and scales lie in two files.
    """
    plans = [plan(path, target) for path in index.files]
    for one in plans:
        for name, tensor in one.checkpoint.file.tensors.items():
            if tensor.type in CODE_TYPES:
                _expect_scales_beside(index, name)
    _expect_names_once(plans, index)
    if not any(wanted for one in plans for *_, wanted in one.jobs):
        raise ValueError(f"{index.path}: {left_out(plans[0])}" if plans else f"{index.path}: it names no file")
    return plans


def _expect_names_once(plans: Sequence[Plan], index: Index) -> None:
    """Raises ValueError for a tensor that would be in two files, of which the index names one."""
    seen: dict[str, str] = {}
    for one, file in zip(plans, index.names, strict=True):
        for tensor in one.planned:
            other = seen.setdefault(tensor, file)
            if other != file:
                raise ValueError(f"{index.path}: a tensor {tensor!r} would be in {other} and in {file}; rename one in "
                                 f"its source, or leave its weight out (--match)")


def _expect_scales_beside(index: Index, codes: str) -> None:
    for convention in READ:
        name = codes.removesuffix(convention.codes)
        if convention.codes and name == codes:
            continue
        other = name + convention.scales
        if index.where.get(other, index.where[codes]) != index.where[codes]:
            raise NotImplementedError(
                f"{codes!r} is in {index.where[codes]} and its scales {other!r} in {index.where[other]}: a weight in "
                f"two files is not read; move its tensors into one file"
            )


def convert_index(
    index: Index, plans: Sequence[Plan], target: Target, written: str | os.PathLike[str], *, jobs: int = 1,
    step: Step = lambda nbytes: None,
) -> Conversion:
    """Write what plan_index planned to a folder: files of the same names, and an index.

    written  a folder that is not there yet; it appears when it is complete
    jobs     processes, each of which has one weight in memory at a time
    """
    written = Path(written)
    if written.suffix == ".safetensors":
        raise FileError(f"{written}: a checkpoint in several files becomes a folder; name one")
    if os.path.lexists(written):
        raise FileError(f"{written}: there is something of that name already; a checkpoint in several files is written "
                        f"to a new folder, and --force replaces files alone")
    temporary = written.with_name(f".{written.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        _make(temporary, written)
        work = [(path, target, temporary / name) for path, name in zip(index.files, index.names, strict=True)]
        made = []
        for one, conversion in zip(plans, in_processes(_convert_file, work, jobs), strict=True):
            made.append(conversion)
            step(one.nbytes)
        where = {tensor: name for one, name in zip(plans, index.names, strict=True) for tensor in one.planned}
        nbytes = sum(tensor.nbytes for one in plans for tensor in one.planned.values())
        (temporary / index.path.name).write_text(rendered(index, where, nbytes), encoding="utf-8")
        os.rename(temporary, written)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Conversion(
        str(index.path), str(written), target, tuple(weight for one in made for weight in one.weights),
        *(sum(getattr(one, name) for one in made) for name in ("copied", "copied_bytes", "before", "after")),
    )


def _make(folder: Path, wanted: Path) -> None:
    """Make a folder; errors name the one that was asked for."""
    try:
        folder.mkdir()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(wanted)) from error


def _convert_file(source: Path, target: Target, written: Path) -> Conversion:
    return convert(plan(source, target), written)


__all__ = ["convert_index", "plan_index"]
