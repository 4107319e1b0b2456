"""Which format a framework's arrays are of, told from their types and shapes."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from hqarray.formats import FORMATS, Format, Storage

BYTES = "uint8"
"""What codes are where a framework has no type for an element."""


def fitting(
    kinds: tuple[str, ...], sizes: tuple[tuple[int, ...], ...], num_global: int | None, *,
    shape: tuple[int, ...] | None, typed: frozenset[str],
) -> Format:
    """The one format whose types and shapes a part's arrays have; of those stored alike the first in FORMATS.

    kinds  names of the dtypes of codes and scales, scales only where there are any
    sizes  their shapes
    num_global  how many global scales there are; None: none are given
    shape  (outer, k) where it is known; else that of codes, k even for FP4
    typed  elements (by dtype_name) that the framework has a type for; the codes of others are uint8

    Bytes are never told by shapes alone. Raises ValueError where no format fits, or more than one.
    """
    found = _found(kinds, sizes, num_global, shape, typed)
    if len(found) == 1:
        return found[0]
    described = " with scales ".join(f"{kind} {size}" for kind, size in zip(kinds, sizes, strict=True))
    if not found:
        raise ValueError(f"codes {described} are of no format; pass format= to hear what one expects")
    raise ValueError(f"codes {described} may be {', '.join(format.name for format in found)}; pass format=")


def expect_shape(shape: tuple[int, ...], codes: tuple[int, ...]) -> None:
    """Raise where a shape is none that codes (outer, columns) may have, two FP4 codes to a column at most."""
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise ValueError(f"the shape of a part is (outer, k), not {shape}")
    if shape[0] != codes[0] or not codes[1] <= shape[1] <= 2 * codes[1]:
        raise ValueError(f"codes of a part {tuple(shape)} have shape {tuple(shape)}, or half the columns in FP4; these "
                         f"have {tuple(codes)}")


@lru_cache(maxsize=4096)
def _found(
    kinds: tuple[str, ...], sizes: tuple[tuple[int, ...], ...], num_global: int | None,
    shape: tuple[int, ...] | None, typed: frozenset[str],
) -> tuple[Format, ...]:
    alike: dict[Storage, Format] = {}
    for format in FORMATS.values():
        storage = format.storage
        element = storage.element.dtype_name
        types = (element if element in typed else BYTES, storage.scale_dtype_name)
        if kinds == types[: 1 if storage.scale == "none" else 2] and (
            (num_global is not None) == storage.global_scale and not storage.pow2
            and (num_global not in (None, 1)) == storage.global_per_row  # of one row it is the scale of the matrix
        ):
            alike.setdefault(storage, format)
    if kinds[0] == BYTES and len(alike) > 1:
        return tuple(alike.values())
    return tuple(format for storage, format in alike.items() if _fits(storage, sizes, num_global, shape))


def _fits(
    storage: Storage, sizes: tuple[tuple[int, ...], ...], num_global: int | None, shape: tuple[int, ...] | None
) -> bool:
    """Whether scales of these sizes are those of codes of these."""
    outer, columns = sizes[0]
    matrix = (outer, columns * 2 if storage.element.stored_bits == 4 else columns) if shape is None else shape
    if storage.global_per_row and num_global != storage.num_global_scales(matrix):  # type: ignore[arg-type]
        return False
    if len(sizes) == 1 or (storage.block is None and prod(sizes[1]) == 1):
        return True
    return sizes[1] == storage.num_scales(matrix)  # type: ignore[arg-type]


__all__ = ["expect_shape", "fitting"]
