"""Grouped GEMM: which parts a product of groups reads, how its axes vary, and the product on NumPy.

Members a_i (m_i, k_i) @ b_i (k_i, n_i) read a.rowwise and b.columnwise. Along one ragged axis that is a Request,
one call of a backend; a ragged n is the transposed product's ragged m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from . import gemm
from .grouped import GroupedArray, GroupedPart, Part
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


@dataclass(frozen=True, slots=True)
class Product:
    """What a @ b reads and how its axes vary, before what becomes of the result is known."""

    a: Part
    b: Part
    m: Sizes
    n: Sizes
    k: Sizes
    left: gemm.Operand
    right: gemm.Operand

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of the result; None where its members differ along both axes and are no array."""
        m, n = self.m, self.n
        if m.each is not None and n.each is not None:
            return m.num_groups, m.each, n.each
        if n.each is not None:
            return m.capacity, n.each
        return None if m.each is None else (m.each, n.capacity)

    @property
    def is_transposed(self) -> bool:
        """Whether n is the ragged axis, so that the request is that of the transposed product."""
        return self.n.each is None

    @property
    def is_one_call(self) -> bool:
        """Whether it is a Request; else members are multiplied one by one, with sizes on the host."""
        if not (isinstance(self.a, GroupedPart) and isinstance(self.b, GroupedPart)) or self.shape is None:
            return False
        return (self.a.layout.ragged == "k") == (self.b.layout.ragged == "k")

    def request(
        self, dtype: np.dtype[Any], out: Array | None, bias: Array | None, activation: Literal["gelu"] | None,
        accumulate: bool, engine: gemm.Engine,
    ) -> Request:
        """As one call; of a transposed product the result, and so `out`, is the transpose."""
        a, b, m, n, shape = self.a, self.b, self.m, self.n, self.shape
        assert isinstance(a, GroupedPart) and isinstance(b, GroupedPart) and shape is not None
        if self.is_transposed:
            a, b, m, n, shape = b, a, n, m, shape[::-1]
        ragged: Ragged = "rows" if m.each is None else "k" if self.k.each is None else "none"
        return Request(a, b, ragged, m, n, self.k, shape, dtype, out, bias, activation, accumulate, engine)


def product(a: GroupedArray, b: GroupedArray) -> Product:
    """Raises ValueError where a part is missing or sizes that the host knows do not fit."""
    x = a.part("rowwise", "a @ b, which contracts a's last axis,")
    y = b.part("columnwise", "a @ b, which contracts b's first axis,")
    if a.num_groups != b.num_groups:
        raise ValueError(f"a @ b multiplies member by member: a has {a.num_groups} of them, b {b.num_groups}")
    _check_contracted(a, b)
    left, right = (gemm.Operand(part, part.format.storage, of.dtype, ()) for part, of in ((x, a), (y, b)))
    return Product(x, y, a.rows, b.columns, a.columns, left, right)


def _check_contracted(a: GroupedArray, b: GroupedArray) -> None:
    """Sizes of the axis that is summed over must agree; those on a device are trusted to."""
    mine, theirs = a.columns, b.rows
    hint = " (b.T would fit: .T is free)" if _agree(mine, b.columns) and not _agree(mine, theirs) else ""
    if (mine.each is None) != (theirs.each is None) and not (mine.is_known and theirs.is_known):
        raise ValueError(
            f"a @ b contracts a's last axis with b's first, of {a.shape} @ {b.shape} one is ragged with sizes on the "
            f"device and the other uniform{hint}"
        )
    if _agree(mine, theirs):
        return
    if mine.each is not None and theirs.each is not None:
        raise ValueError(f"a @ b contracts a's last axis with b's first: {a.shape} @ {b.shape} do not fit{hint}")
    i = int(np.flatnonzero(mine.values != theirs.values)[0])
    raise ValueError(
        f"a @ b contracts a's last axis with b's first: of group {i} they are {mine.values[i]} and "
        f"{theirs.values[i]}{hint}"
    )


def _agree(first: Sizes, second: Sizes) -> bool:
    """Whether sizes are equal, as far as the host knows."""
    if first is second or (first.each is not None and first.each == second.each):
        return True
    if first.is_known and second.is_known:
        return bool((first.values == second.values).all())
    return first.each is None and second.each is None


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


__all__ = ["Product", "Ragged", "Request", "multiply", "product", "views"]
