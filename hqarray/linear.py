"""The three products of a linear layer as two calls: y = x @ w.T, then dx = dy @ w and dw = dy.T @ x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import ops
from .arrays import HybridArray
from .formats import Format
from .inputs import as_ours
from .layout import Array
from .recipes import Pair, Recipe, as_recipe

_WEIGHTS = 0x9E3779B97F4A7C15
"""Added to the seed for w, mod 2^64: operands of a product must not round alike. 2^64 over the golden ratio."""


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What the backward pass reads: the columnwise parts of x and w, and the recipe."""

    x: HybridArray
    w: HybridArray
    recipe: Recipe

    @property
    def nbytes(self) -> int:
        """Bytes held until the backward pass."""
        return self.x.nbytes + self.w.nbytes


def linear_forward(
    x: Any, w: Any, recipe: Recipe | Format | str, *, out_dtype: Any = None, seed: Any = None
) -> tuple[Array, Saved]:
    """The output of a linear layer, and what its backward pass needs.

    x        (..., k) float array, or a HybridArray with both parts in the recipe's formats
    w        (n, k), likewise: a weight that is multiplied more than once is quantized once
    recipe   a Recipe, or the name of a recipe or format
    seed     of formats that round at random, as in quantize; w draws other numbers than x
    returns  y = x @ w.T (..., n), of the dtype that matmul gives, and Saved, which holds no rowwise part

    Raises ValueError for shapes that do not match, or an array quantized in other formats.
    """
    recipe = as_recipe(recipe)
    hx, hw = _quantized(x, recipe.input, "x", seed), _quantized(w, recipe.weight, "w", _of_weights(seed))
    if len(hw.shape) != 2 or not hx.shape or hx.shape[-1] != hw.shape[1]:
        raise ValueError(f"a linear layer needs x (..., k) and w (n, k), these are {hx.shape} and {hw.shape}")
    y = ops.matmul(hx, hw.T, out_dtype=out_dtype)
    return y, Saved(hx.drop(rowwise=True), hw.drop(rowwise=True), recipe)


def linear_backward(dy: Any, saved: Saved, *, dw: Array | None = None, seed: Any = None) -> tuple[Array, Array]:
    """The gradients of a linear layer.

    dy       (..., n), the gradient of y, or a HybridArray with both parts in the recipe's formats
    saved    what linear_forward returned
    dw       (n, k) array that the gradient of w is added to; None makes a new one
    seed     as in linear_forward, and another one than there
    returns  dx = dy @ w (..., k) and dw = dy.T @ x (n, k), sums over all leading axes
    """
    hdy = _quantized(dy, saved.recipe.grad_output, "dy", seed)
    expected = (*saved.x.shape[:-1], saved.w.shape[0])
    if hdy.shape != expected:
        raise ValueError(f"dy must have the shape of y, {expected}, it has {hdy.shape}")
    dx = ops.matmul(hdy, saved.w)
    flat_dy, flat_x = hdy.reshape(-1, hdy.shape[-1]), saved.x.reshape(-1, saved.x.shape[-1])
    return dx, ops.matmul(flat_dy.T, flat_x, out=dw, accumulate=dw is not None)


def _of_weights(seed: Any) -> Any:
    if seed is None or isinstance(seed, (int, np.integer)):
        return seed if seed is None else (int(seed) + _WEIGHTS) % (1 << 64)
    array = as_ours(seed, "seed")
    return array.astype(np.uint64, copy=False) + np.uint64(_WEIGHTS) if hasattr(array, "astype") else seed


def _quantized(values: Any, pair: Pair, what: str, seed: Any) -> HybridArray:
    if not isinstance(values, HybridArray):
        return ops.quantize(values, rowwise=pair[0], columnwise=pair[1], seed=seed)
    wanted = dict(zip(("rowwise", "columnwise"), (format.resolve(values.dtype) for format in pair), strict=True))
    there = {direction: part.format for direction, part in values.parts()}
    if there != wanted:
        raise ValueError(f"{what} is {values!r}; the recipe wants rowwise={pair[0].name}, columnwise={pair[1].name}")
    return values


__all__ = ["Saved", "linear_backward", "linear_forward"]
