"""GroupedArrays as torch tensors with torch's float8 types and back: each part one buffer of all members."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch  # noqa: TID253  this module names torch

from hqarray.arrays import Direction
from hqarray.formats import Format, as_format
from hqarray.grouped import GroupedArray
from hqarray.grouped_parts import GroupedPart, layout_of
from hqarray.groups import GroupedLayout, Sizes
from hqarray.layout import part_layout, scale_layout

from .fitting import expect_shape
from .torch_arrays import TorchPart, _check_tensors, _cuda, _fitting, _types, _View, as_tensor, nominal_of


class TorchGroup(NamedTuple):
    """The parts of a GroupedArray as tensors over all members; columnwise is that of the X_i.T.

    rowwise, columnwise  TorchPart; its global_scale is float32 (num_groups,) where the format has one
        members of one shape   codes (num_groups, outer, k), scales (num_groups, rows, blocks)
        members of one k       codes (T, k), rows of all; scales one dimension, the members' one after another
        members of one outer   codes and scales one dimension, the members' one after another
    rows, columns        sizes of the members' axes, hqarray's Sizes; None for members of one shape
    """

    rowwise: TorchPart | None = None
    columnwise: TorchPart | None = None
    rows: Sizes | None = None
    columns: Sizes | None = None


_Views = tuple[_View, _View | None, _View | None]


@lru_cache(maxsize=1024)
def _views(format: Format, layout: GroupedLayout, size: int | None, capacity: int) -> _Views:
    """Where codes, scales and global scales of a part lie; size is every member's along the ragged axis, or None."""
    storage, groups = layout.storage, layout.num_groups
    codes_type, scales_type = _types(storage)
    itemsize = storage.element.dtype.itemsize
    scale_size = 4 if storage.scale == "float32" else 1
    shape = None if size is None else layout.shape(size)
    columns = part_layout(storage, (1, layout.each)).codes.columns
    if layout.ragged != "outer":
        codes = _View(codes_type, 0, (layout.codes_nbytes // itemsize,), (1,))
    elif shape is None:
        codes = _View(codes_type, 0, (capacity, columns), (layout.codes.nbytes // itemsize, 1))
    else:
        pitch = layout.codes.nbytes // itemsize
        codes = _View(codes_type, 0, (groups, shape[0], columns), (shape[0] * pitch, pitch, 1))
    scales = whole = None
    if storage.scale != "none":
        start, count = layout.scales_offset // scale_size, layout.scales_nbytes // scale_size
        if shape is None:
            scales = _View(scales_type, start, (count,), (1,))
        elif layout.scales is None:
            scales = _View(scales_type, start, (groups, 1, 1), (1, 1, 1))
        else:
            alone = part_layout(storage, shape)
            probe = scale_layout(storage).untile(torch.empty(alone.scales_shape, device="meta"), *alone.num_scales)
            step = layout.scales.units(size) * layout.scales.nbytes // scale_size
            scales = _View(scales_type, start, (groups, *probe.shape), (step, *probe.stride()))
    if storage.global_scale:
        count = layout.num_global_scales
        by_member = shape is not None and storage.global_per_row
        each = count // max(groups, 1)
        whole = _View(torch.float32, layout.global_scale_offset // 4, (groups, each) if by_member else (count,),
                      (each, 1) if by_member else (1,))
    return codes, scales, whole


def _views_of(part: GroupedPart) -> _Views:
    return _views(part.format, part.layout, part.sizes.each, part.sizes.capacity)


# --- out ----------------------------------------------------------------------------------------


def group_to_torch(array: GroupedArray) -> TorchGroup:
    """The parts as tensors, sharing memory. Raises ValueError for members that differ along both axes."""
    parts: dict[str, TorchPart] = {}
    for direction, part in array.parts():
        if not isinstance(part, GroupedPart):
            raise ValueError(
                f"members of {array.shape} differ along both axes and make no tensor; "
                f"[to_torch(member) for member in g] gives a pair for each"
            )
        parts[direction] = _tensors(part)
    return TorchGroup(parts.get("rowwise"), parts.get("columnwise"), array.rows, array.columns)


def _tensors(part: GroupedPart) -> TorchPart:
    layout = part.layout
    nbytes = layout.codes_nbytes if layout.storage.scale == "none" else layout.nbytes
    if isinstance(part.memory, np.ndarray):
        whole = as_tensor(part.memory)
        flat, start = whole[: len(whole) & -16], 0
    else:
        flat, start = _cuda().flat(part.memory, nbytes)
    return TorchPart(*(None if view is None else view.of(flat, start) for view in _views_of(part)))


# --- in -----------------------------------------------------------------------------------------


def group_from_torch(
    group: TorchGroup, formats: tuple[Any, Any], shape: tuple[int, ...] | None, dtype: Any
) -> GroupedArray:
    """The inverse of group_to_torch: over the same memory where it gave the tensors, else a copy of them."""
    rows, columns = _sizes(group, formats, shape)
    parts: dict[Direction, GroupedPart] = {}
    if group.rowwise is not None:
        parts["rowwise"] = _part_of(group.rowwise, formats[0], rows, columns)
    if group.columnwise is not None:
        parts["columnwise"] = _part_of(group.columnwise, formats[1], columns, rows)
    return GroupedArray(parts.get("rowwise"), parts.get("columnwise"), rows, columns, nominal_of(dtype))


def _sizes(group: TorchGroup, formats: tuple[Any, Any], shape: tuple[int, ...] | None) -> tuple[Sizes, Sizes]:
    """The sizes that are given, else those of 3-D codes."""
    if (group.rows is None) != (group.columns is None) or group.rowwise is group.columnwise is None:
        raise ValueError("a TorchGroup has a part at least, and both rows and columns or neither")
    if group.rows is not None and group.columns is not None:
        for name, sizes in (("rows", group.rows), ("columns", group.columns)):
            if not isinstance(sizes, Sizes):
                raise TypeError(f"{name} are Sizes as to_torch gives them, not {type(sizes).__name__}; "
                                f"hqarray.grouped_quantize makes groups of values and sizes")
        return group.rows, group.columns
    given = group.columnwise if group.rowwise is None else group.rowwise
    part = _checked(given)  # type: ignore[arg-type]
    if part.codes.ndim != 3:
        raise ValueError(f"codes of members of one shape are (num_groups, outer, k), these are "
                         f"{tuple(part.codes.shape)}; sizes that differ need rows and columns, as to_torch gives them")
    groups, outer, columns = part.codes.shape
    turned = group.rowwise is None
    if shape is None:
        format = _fitting(_first(part), None) if formats[turned] is None else as_format(formats[turned])
        k = columns * 2 if format.storage.element.stored_bits == 4 else columns
        shape = (groups, k, outer) if turned else (groups, outer, k)
    if len(shape) != 3:
        raise ValueError(f"shape of a group is (num_groups, rows, columns), not {tuple(shape)}")
    expect_shape(shape[:0:-1] if turned else shape[1:], (outer, columns))
    return Sizes.uniform(shape[0], shape[1]), Sizes.uniform(shape[0], shape[2])


def _checked(given: TorchPart | tuple[Any, ...]) -> TorchPart:
    """The tensors; one scale for each member of one shape may also be (num_groups,)."""
    part = TorchPart(*given)
    _check_tensors(part)
    scales = part.scales
    if part.codes.ndim != 3 or scales is None or scales.ndim == 3 or scales.numel() != part.codes.shape[0]:
        return part
    return part._replace(scales=scales.reshape(-1, 1, 1))


def _first(part: TorchPart) -> TorchPart:
    """A member's tensors, by whose types and shapes its format is told."""
    scales, whole = part.scales, part.global_scale
    if scales is not None and scales.ndim == 3:
        scales = scales[0]
    if whole is not None and len(part.codes) and whole.numel() % len(part.codes) == 0:
        whole = whole.reshape(len(part.codes), -1)[0]
    return TorchPart(part.codes[0], scales, whole)


def _part_of(part: TorchPart, given: Any, outer: Sizes, k: Sizes) -> GroupedPart:
    part = _checked(part)
    if k.each is None:
        ragged, each, sizes = "k", outer.each, k
    else:
        ragged, each, sizes = "outer", k.each, outer
    if each is None:
        raise ValueError("members that differ along both axes make no tensor; use GroupedArray.from_arrays([...])")
    if given is not None:
        format = as_format(given)
    elif part.codes.ndim == 3:
        format = _fitting(_first(part), (outer.each, each))  # type: ignore[arg-type]
    else:
        raise ValueError("types and shapes of groups whose sizes differ do not tell the format; pass format=")
    layout = layout_of(format, ragged, each, sizes)  # type: ignore[arg-type]
    views = _views(format, layout, sizes.each, sizes.capacity)
    for name, tensor, view in zip(TorchPart._fields, part, views, strict=True):
        if (tensor is None) != (view is None):
            raise ValueError(f"{format.name} {'needs' if tensor is None else 'has no'} {name}")
        if view is None:
            continue
        if tensor.dtype not in (view.dtype, torch.uint8):
            raise TypeError(f"{name} of {format.name} are {view.dtype}, these are {tensor.dtype}")
        if tensor.shape != view.shape:
            raise ValueError(f"{name} of such a group in {format.name} have shape {view.shape}, these have "
                             f"{tuple(tensor.shape)}; of members of a larger group pass to_torch(g.copy())")
    if part.codes.is_cuda:
        _cuda().order(part.codes.get_device(), torch_first=True)
    flat = _flat_of_ours(part, layout, views)
    if flat is None:
        flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device=part.codes.device)
        for tensor, view in zip(part, views, strict=True):
            if view is not None:
                _as_plain(view.of(flat, 0)).copy_(_as_plain(tensor))
        if flat.is_cuda:
            _cuda().order(flat.get_device(), torch_first=True)
    memory = _cuda().pointer_to(flat) if flat.is_cuda else flat.numpy()
    return GroupedPart(format, layout, sizes, memory, False)


def _flat_of_ours(part: TorchPart, layout: GroupedLayout, views: _Views) -> Any:
    """The bytes that the tensors lie in as our own layout has them: padding is zero then; None where they do not."""
    storage = part.codes.untyped_storage()
    start = storage.data_ptr()
    if not start or storage.nbytes() != layout.nbytes:
        return None
    if any(view is not None and not view.is_of(tensor, start) for tensor, view in zip(part, views, strict=True)):
        return None
    return torch.empty(0, dtype=torch.uint8, device=part.codes.device).set_(storage, 0, (layout.nbytes,), (1,))


def _as_plain(tensor: Any) -> Any:
    """One-byte types as bytes: torch copies not all of them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


__all__ = ["TorchGroup", "group_from_torch", "group_to_torch"]
