"""Grouped GEMM: which parts a product of groups reads, how its axes vary, and the product on NumPy.

Members a_i (m_i, k_i) @ b_i (k_i, n_i) read a.rowwise and b.columnwise. Along one ragged axis that is a Request,
one call of a backend; a ragged n is the transposed product's ragged m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from . import gemm
from .grouped import GroupedArray, GroupedPart
from .groups import Sizes
from .layout import Array

Ragged: TypeAlias = Literal["none", "rows", "k"]


@dataclass(frozen=True, slots=True)
class Request:
    """A checked product of groups: out_i = [out_i +] activation(a_i @ b_i.T + bias_i).

    a, b     K-major members (m_i, k_i) and (n_i, k_i): a.rowwise and b.columnwise
    ragged   "none": all uniform. "rows": m is ragged, a lies ragged "outer", b is uniform. "k": k is ragged, a and b
             both lie ragged "k", m and n are uniform; each part's sizes are its own and equal (device ones: trusted)
    m, n, k  sizes of the three axes
    shape    of the result: (num_groups, m, n), or (m.capacity, n) where rows are ragged, member i at m.starts[i]
    dtype    of the result, and of out
    out      C-contiguous, of that shape, or None: then the result is allocated, rows of no member zero. Rows of no
             member are never written in a given one.
    bias     (num_groups, n), any float dtype, any strides (one bias for all has a stride of 0); None for none
    accumulate  add to out, which is given
    """

    a: GroupedPart
    b: GroupedPart
    ragged: Ragged
    m: Sizes
    n: Sizes
    k: Sizes
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    out: Array | None
    bias: Array | None
    activation: Literal["gelu"] | None
    accumulate: bool
    engine: gemm.Engine


def multiply(request: Request) -> Array:
    """The product on NumPy, member by member as gemm.multiply defines it; out where it is given."""
    out = np.zeros(request.shape, request.dtype) if request.out is None else request.out
    pairs = zip(request.a.members(), request.b.members(), strict=True)
    for i, ((a, b), target) in enumerate(zip(pairs, views(out, request.m), strict=True)):
        bias = None if request.bias is None else request.bias[i]
        left, right = (gemm.Operand(x, x.format.storage, request.dtype, x.shape[:1]) for x in (a, b))
        gemm.multiply(left, right, gemm.Epilogue(bias, request.activation, request.accumulate), target)
    return out


def views(out: Array, m: Sizes) -> list[Array]:
    """The result of each member in out: its matrix, or its rows where those are ragged."""
    if m.each is not None:
        return list(out)
    starts = np.minimum(m.starts[:-1], m.capacity).tolist()
    return [out[start : start + size] for start, size in zip(starts, m.values.tolist(), strict=True)]


__all__ = ["GroupedArray", "Ragged", "Request", "multiply", "views"]
