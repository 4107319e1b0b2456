"""The three products of a linear layer as two calls: y = x @ w.T, then dx = dy @ w and dw = dy.T @ x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import ops
from .arrays import DIRECTIONS, HybridArray
from .formats import Format
from .inputs import SEEDS, Slots, as_ours
from .layout import Array
from .recipes import ROLES, Recipe, Role, as_recipe

STEP = 0x9E3779B97F4A7C15
"""Between the seeds of x, w and dy: operands of a product must not round alike. 2^64 over the golden ratio."""


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What the backward pass reads: the columnwise parts of x and w, the recipe, and what was given for all three.

    x, w    None where the gradient of the other is not needed
    shapes  of x and w
    """

    x: HybridArray | None
    w: HybridArray | None
    recipe: Recipe
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    seed: Any = None
    amax: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes held until the backward pass."""
        return sum(0 if array is None else array.nbytes for array in (self.x, self.w))


def linear_forward(
    x: Any, w: Any, recipe: Recipe | Format | str, *, out_dtype: Any = None, seed: Any = None, amax: Any = None,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Array, Saved]:
    """The output of a linear layer, and what its backward pass needs.

    x        (..., k) float array, or a HybridArray with both parts in the recipe's formats
    w        (n, k), likewise: a weight that is multiplied more than once is quantized once
    recipe   a Recipe, or the name of a recipe or format
    seed     of recipes that round at random, as in quantize, another one for each layer and step; x, w and dy draw
             different numbers from it
    amax     of x, w and dy, for formats with one amax per matrix: three slots of a DelayedScaling, which a recipe with
             delayed scaling needs, or float32 (3,); None measures them
    needs    whether the gradients of x and of w will be asked for: that of x reads w's columns, that of w x's, and what
             none of them reads is not quantized. (False, False): inference
    returns  y = x @ w.T (..., n), of the dtype that matmul gives, and Saved, which holds no rowwise part

    Raises ValueError for shapes that do not match, an array quantized in other formats, an amax that the recipe needs
    and is not there, or a missing seed where x or w is rounded at random; that of dy is missed by linear_backward.
    """
    recipe = as_recipe(recipe)
    check_amaxes(recipe, amax)
    hx = quantize_operand(x, recipe, "input", seed=seed, amax=amax, columns=needs[1])
    hw = quantize_operand(w, recipe, "weight", seed=seed, amax=amax, columns=needs[0])
    if len(hw.shape) != 2 or not hx.shape or hx.shape[-1] != hw.shape[1]:
        raise ValueError(f"a linear layer needs x (..., k) and w (n, k), these are {hx.shape} and {hw.shape}")
    y = ops.matmul(hx, hw.T, out_dtype=out_dtype)
    kept_x, kept_w = (h.drop(rowwise=True) if needed else None for h, needed in ((hx, needs[1]), (hw, needs[0])))
    return y, Saved(kept_x, kept_w, recipe, (hx.shape, hw.shape), seed, amax)


def linear_backward(
    dy: Any, saved: Saved, *, dw: Array | None = None, out_dtype: Any = None, seed: Any = None
) -> tuple[Array | None, Array | None]:
    """The gradients of a linear layer.

    dy       (..., n), the gradient of y, or a HybridArray with both parts in the recipe's formats
    saved    what linear_forward returned
    dw       (n, k) array that the gradient of w is added to; None makes a new one
    out_dtype  of dx; default what matmul gives
    seed     as in linear_forward; None takes the one that was given there
    returns  dx = dy @ w (..., k) and dw = dy.T @ x (n, k), sums over all leading axes; None for one that linear_forward
             was told is not needed
    """
    seed = saved.seed if seed is None else seed
    x, w, (x_shape, (n, _)) = saved.x, saved.w, saved.shapes
    if x is None and dw is not None:
        raise ValueError("dw= is given, and linear_forward was told by needs= that the gradient of w is not needed")
    if x is None and w is None:
        return None, None
    hdy = quantize_operand(
        dy, saved.recipe, "grad_output", seed=seed, amax=saved.amax, rows=w is not None, columns=x is not None
    )
    expected = (*x_shape[:-1], n)
    if hdy.shape != expected:
        raise ValueError(f"dy must have the shape of y, {expected}, it has {hdy.shape}")
    dx = None if w is None else ops.matmul(hdy, w, out_dtype=out_dtype)
    if x is None:
        return dx, None
    flat_dy, flat_x = hdy.reshape(-1, hdy.shape[-1]), x.reshape(-1, x.shape[-1])
    return dx, ops.matmul(flat_dy.T, flat_x, out=dw, accumulate=dw is not None)


# --- operands -----------------------------------------------------------------------------------

_SYMBOLS: dict[Role, str] = {"input": "x", "weight": "w", "grad_output": "dy"}


def check_amaxes(recipe: Recipe, amax: Any, num_groups: int = 1) -> None:
    """Raises ValueError where a recipe lacks its amaxes, or they are not those of x, w and dy of each group."""
    count = 3 * num_groups
    if amax is None:
        if recipe.delayed is not None:
            raise ValueError(
                f"the recipe {recipe.name} takes amaxes of earlier steps; pass amax=, {count} slots of "
                f"state = hq.DelayedScaling({count} * layers, recipe.delayed, like=x), state[0:{count}] for the first "
                f"layer, and call state.update() after each step"
            )
        return
    shape = (len(amax),) if isinstance(amax, Slots) else getattr(amax, "shape", type(amax).__name__)
    if shape != (count,):
        raise ValueError(f"amax is {count} slots of a DelayedScaling or float32 ({count},): x, w and dy, not {shape}")


def quantize_operand(
    values: Any, recipe: Recipe, role: Role, *, seed: Any = None, amax: Any = None, rows: bool = True,
    columns: bool = True,
) -> HybridArray:
    """An operand of a linear layer as the recipe has it; one that is quantized already is checked.

    seed, amax     of the layer, as linear_forward takes them
    rows, columns  which parts are read
    """
    if isinstance(values, HybridArray):
        _check_quantized(values, recipe, role, rows, columns)
        return values
    return ops.quantize(values, **operand_options(recipe, role, seed, amax, rows, columns))


def operand_options(
    recipe: Recipe, role: Role, seed: Any, amax: Any, rows: bool = True, columns: bool = True
) -> dict[str, Any]:
    """Keywords of quantize for the parts of an operand that are read; rows are made besides where columns need them."""
    (row, column), source = recipe[role], recipe.source(role)
    rows = rows or source != "original"
    formats = [format for format, is_read in ((row, rows), (column, columns)) if is_read]
    return {
        "rowwise": row if rows else None, "columnwise": column if columns else None,
        "columnwise_source": source if columns else "original", "seed": seed_of(role, seed),
        "amax": amax_of(role, amax) if any(format.measures_amax for format in formats) else None,
    }


def amax_of(role: Role, amax: Any) -> Any:
    """The amaxes of one operand: a third of a layer's."""
    if amax is None:
        return None
    index, count = ROLES.index(role), len(amax) // len(ROLES)
    return amax[index * count : (index + 1) * count]


def seed_of(role: Role, seed: Any) -> Any:
    """The seed of an operand: that of the layer and a multiple of STEP, mod 2^64."""
    step = ROLES.index(role) * STEP % (1 << 64)
    if seed is None or not step:
        return seed
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        return (int(seed) + step) % (1 << 64) if 0 <= seed < 1 << 64 else seed
    array = as_ours(seed, "seed")
    if getattr(array, "dtype", None) not in SEEDS or array.size != 1:
        return seed  # quantize says what is wrong with it
    return array.astype(np.uint64, copy=False) + np.uint64(step)


def _check_quantized(values: HybridArray, recipe: Recipe, role: Role, *is_read: bool) -> None:
    """Whether the parts that are read are there, and all that are there are the recipe's."""
    pair = recipe[role]
    wanted = dict(zip(DIRECTIONS, (format.resolve(values.dtype) for format in pair), strict=True))
    there = {direction: part.format for direction, part in values.parts()}
    missing = [name for name, needed in zip(DIRECTIONS, is_read, strict=True) if needed and name not in there]
    if missing or any(wanted[name] != format for name, format in there.items()):
        raise ValueError(
            f"{_SYMBOLS[role]} is {values!r}; the recipe wants rowwise={pair[0].name}, columnwise={pair[1].name}"
        )


__all__ = ["Saved", "linear_backward", "linear_forward"]
