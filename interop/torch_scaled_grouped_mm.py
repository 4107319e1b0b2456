"""What torch's own scaled GEMMs of groups take for a pair of GroupedArrays.

Which formats, shapes and strides torch takes: ATen/native/cuda/GroupedBlas.cpp of torch 2.11 to 2.13; how scales of
groups lie: its test_scaled_matmul_cuda.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch  # noqa: TID253  this module names torch

from hqarray.arrays import QuantizedArray
from hqarray.formats import Storage
from hqarray.grouped import GroupedArray
from hqarray.grouped_parts import GroupedPart
from hqarray.groups import Sizes
from hqarray.layout import round_up

from .torch_arrays import _types, shared
from .torch_scaled_mm import side_arguments, tiled


@dataclass(frozen=True, slots=True)
class Taken:
    """A storage that torch multiplies in groups.

    recipe    torch's name of how it is scaled
    multiple  of k, in elements
    functions that take it
    """

    recipe: str
    multiple: int
    functions: tuple[str, ...]


FUNCTIONS = ("_scaled_grouped_mm", "scaled_grouped_mm")

TAKEN: dict[tuple[str, str, tuple[int, int] | None], Taken] = {  # by element, kind of scale, block
    ("e4m3", "float32", None): Taken("RowWise", 16, FUNCTIONS),
    ("e4m3", "e8m0", (1, 32)): Taken("BlockWise1x32", 32, FUNCTIONS),
    ("e2m1", "e8m0", (1, 32)): Taken("BlockWise1x32", 32, FUNCTIONS[1:]),
    ("e2m1", "e4m3", (1, 16)): Taken("BlockWise1x16", 32, FUNCTIONS[1:]),
}

ROWS = 16
"""Torch takes n of a multiple of this."""


def scaled_grouped_mm_arguments(
    a: GroupedArray, b: GroupedArray, *,
    function: Literal["_scaled_grouped_mm", "scaled_grouped_mm"] = "_scaled_grouped_mm",
) -> dict[str, Any]:
    """The arguments of torch._scaled_grouped_mm, or of torch.nn.functional.scaled_grouped_mm, for the product a @ b.

    a, b      members (m_i, k), m_i ragged or all the same, and (k, n) all of one shape (fprop, dgrad); or
              (m, k_i) and (k_i, n) with ragged k (wgrad), whose sizes are multiples of 16, or 32 for MX and NVFP4
    function  which of the two
    returns   a dict: _scaled_grouped_mm(**arguments, out_dtype=torch.bfloat16), scaled_grouped_mm(**arguments); results
              are bfloat16

    Per tensor E4M3 (sm_90; the scale of each group repeated for each of its rows and columns, which torch calls
    row-wise) and MXFP8 (sm_100) by both, MXFP4 and NVFP4 (sm_100) by scaled_grouped_mm only. Codes share the parts'
    memory; of ragged k, which torch wants side by side, they are copied, as are scales in 128x4 tiles: both need
    sizes on the host.
    Raises ValueError for what torch does not take (blocks of 128, E5M2, pairs of two formats); hqarray.matmul does.
    """
    if function not in FUNCTIONS:
        raise ValueError(f"function={function!r} is not {' or '.join(map(repr, FUNCTIONS))}")
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, GroupedArray):
            raise TypeError(f"{name} is {type(x).__name__}; scaled_grouped_mm_arguments takes GroupedArrays")
    left, right = a.part("rowwise", "a @ b"), b.part("columnwise", "a @ b")
    if a.num_groups != b.num_groups or a.columns.each != b.rows.each:
        raise ValueError(f"{a.shape} @ {b.shape} do not fit")
    if not isinstance(left, GroupedPart) or not isinstance(right, GroupedPart) or b.columns.each is None:
        raise ValueError(f"torch takes one ragged axis, the rows of a or k; {a.shape} @ {b.shape} has another; "
                         f"hqarray.matmul takes it")
    taken = _taken(left, right, function)
    n = b.columns.each
    if n % ROWS:
        raise ValueError(f"torch takes n of a multiple of {ROWS}, not {n}; hqarray.matmul takes any")
    if a.columns.each is None:
        mats, scales, ends = _ragged_k(left, right, a.columns, b.rows, taken)
    else:
        mats, scales, ends = _ragged_rows(left, right, a.rows, n, taken)
    offs = {} if ends is None else {"offs": ends}
    if function == "_scaled_grouped_mm":
        return {"input": mats[0], "mat2": mats[1], "scale_a": scales[0], "scale_b": scales[1], **offs}
    arguments: dict[str, Any] = {"mat_a": mats[0], "mat_b": mats[1]}
    for side, part, scale in zip("ab", (left, right), scales, strict=True):
        whole = part.global_scale
        both = (scale,) if whole is None else (scale, shared(whole))
        arguments |= side_arguments(side, taken.recipe, both)
    return {**arguments, **offs}


def _taken(a: GroupedPart, b: GroupedPart, function: str) -> Taken:
    """How torch takes the pair. Raises ValueError where it does not."""
    stored, other = a.format.storage, b.format.storage
    taken = TAKEN.get((stored.element.name, stored.scale, stored.block))
    if taken is None or stored != other:
        raise ValueError(
            f"torch multiplies groups of E4M3 with one scale a group, MXFP8, MXFP4 and NVFP4, both operands alike, not "
            f"{a.format.name} by {b.format.name}; hqarray.matmul does"
        )
    if function not in taken.functions:
        raise ValueError(f"torch.{function} takes no {a.format.name}, torch.nn.functional.scaled_grouped_mm does: "
                         f"pass function='scaled_grouped_mm'")
    if function == "scaled_grouped_mm" and not hasattr(torch.nn.functional, function):
        raise NotImplementedError(f"torch {torch.__version__} has no torch.nn.functional.scaled_grouped_mm (2.10 has); "
                                  f"pass function='_scaled_grouped_mm' for FP8 and MXFP8")
    return taken


_Pairs = tuple[tuple[Any, Any], tuple[Any, Any], Any]
"""Codes of both, K-major and transposed; scales of both; where groups end."""


def _ragged_rows(a: GroupedPart, b: GroupedPart, rows: Sizes, n: int, taken: Taken) -> _Pairs:
    """(T, k) or (num_groups, m, k) by (num_groups, k, n)."""
    k, groups, storage = a.layout.each, a.num_groups, a.format.storage
    if k % taken.multiple:
        raise ValueError(f"torch takes k of a multiple of {taken.multiple}, not {k}; hqarray.matmul takes any")
    codes, weights = (shared(part.codes).view(_types(storage)[0]) for part in (a, b))
    mats = codes if rows.each is None else codes.view(groups, rows.each, -1), weights.view(groups, n, -1).mT
    ends = _ends(rows, codes.device) if rows.each is None else None
    if storage.scale == "float32":
        columns = shared(b.scales)[:, None].expand(-1, n).contiguous()
        return mats, (_of_rows(shared(a.scales), rows, ends), columns), ends
    if rows.each is not None:
        raise ValueError("torch takes scales in tiles with offsets only, a's members are all of one shape; give sizes")
    _expect_known(rows)
    wide = round_up(-(-k // storage.block[1]), 4)  # type: ignore[index]
    kind = _types(storage)[1]
    return mats, (torch.cat(_tiles(a)).view(-1, wide).view(kind), torch.stack(_tiles(b)).view(kind)), ends


def _ragged_k(a: GroupedPart, b: GroupedPart, sizes: Sizes, others: Sizes, taken: Taken) -> _Pairs:
    """(m, K) by (K, n), the groups side by side along K."""
    _expect_known(sizes)
    _expect_known(others)
    values = sizes.values.tolist()
    if values != others.values.tolist():
        raise ValueError(f"a has k of {values}, b of {others.values.tolist()}; they do not fit")
    for i, size in enumerate(values):
        if size % taken.multiple:
            raise ValueError(f"torch takes ragged k of multiples of {taken.multiple}, group {i} has {size}; "
                             f"hqarray.matmul takes any")
    storage = a.format.storage
    mats = [torch.cat([shared(member.codes) for member in part.members()], 1).view(_types(storage)[0])
            for part in (a, b)]
    ends = _ends(Sizes.known(values), mats[0].device)
    if storage.scale == "float32":
        scales = [shared(part.scales).repeat_interleave(part.layout.each) for part in (a, b)]
    else:
        scales = [torch.cat(_tiles(part)).view(round_up(part.layout.each, 128), -1).view(_types(storage)[1])
                  for part in (a, b)]
    return (mats[0], mats[1].t()), (scales[0], scales[1]), ends


def _expect_known(sizes: Sizes) -> None:
    if not sizes.is_known:
        raise ValueError("codes and tiles of scales lie by the sizes, which are on the device; to_host() copies them")


def _ends(sizes: Sizes, device: Any) -> Any:
    """Where each group ends, int32."""
    if sizes.alignment > 1:
        raise ValueError(f"torch takes groups back to back, these begin on multiples of {sizes.alignment}")
    if sizes.is_known:
        return torch.tensor(sizes.starts[1:], dtype=torch.int32, device=device)
    stored = shared(sizes.device)
    return stored if sizes.kind == "ends" else stored.cumsum(0, dtype=torch.int32)


def _of_rows(scales: Any, rows: Sizes, ends: Any) -> Any:
    """One scale for each row of a."""
    if rows.each is not None:
        return scales[:, None].expand(-1, rows.each).contiguous()
    row = torch.arange(rows.capacity, dtype=torch.int32, device=ends.device)
    return scales[torch.searchsorted(ends, row, right=True).clamp_(max=rows.num_groups - 1)]


def _tiles(part: GroupedPart) -> list[Any]:
    """Scales of each member in tiles of its own, flat, as bytes: torch up to 2.11 has no cat of e8m0 on CUDA."""
    return [_tiles_of(member, part.format.storage) for member in part.members()]


def _tiles_of(member: QuantizedArray, storage: Storage) -> Any:
    return tiled(shared(member.scales), *storage.num_scales(member.shape))


__all__ = ["scaled_grouped_mm_arguments"]
