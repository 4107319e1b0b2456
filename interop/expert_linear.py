"""A linear layer of experts on several ranks, forward and backward, on dispatch, grouped products and combine.

    y, saved = experts_forward(x, w, route, "mxfp8", ranks, weights=weights)     # w: this rank's experts
    dx, dw, dweights = experts_backward(dy, saved, ranks)

Layers one after another send their tokens once: the first with combines=False gives the experts' rows, the last with
dispatches=False takes such rows, and what is between them is done row by row.

With Alone() it is the reference on one rank: operands are the same bytes on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hqarray import ops
from hqarray.formats import Format, HighPrecision
from hqarray.grouped import GroupedArray
from hqarray.grouped_making import grouped_quantize
from hqarray.grouped_parts import GroupedPart, on_device
from hqarray.inputs import as_array
from hqarray.layout import Array
from hqarray.linear import seed_of
from hqarray.recipes import ROLES, Recipe, Role, as_recipe
from hqarray.record_ops import dots, weighted_sum
from hqarray.records import can_travel

from .distributed import Ranks, as_ranks
from .experts import Route, as_weights, combine, dispatch, returned


@dataclass(frozen=True, slots=True, eq=False)
class SavedExperts:
    """What the backward pass reads: columnwise parts of the tokens that arrived and of the weights.

    x, w      None where the gradient of the other is not needed
    n         columns of y
    weights   float32 (tokens, top), or None
    returned  the rows that came back for all choices, for the gradient of weights; None where it is not needed
    sent      whether the layer dispatched, and whether it combined
    """

    x: GroupedArray | None
    w: GroupedArray | None
    n: int
    route: Route
    recipe: Recipe
    weights: Array | None
    returned: Array | None
    seed: Any = None
    sent: tuple[bool, bool] = (True, True)


def experts_forward(
    x: Any, w: Any, route: Route, recipe: Recipe | Format | str, ranks: Any, *, weights: Any = None, seed: Any = None,
    dispatches: bool = True, combines: bool = True, needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Array, SavedExperts]:
    """What the experts make of each token, weighted and summed; all ranks call it.

    x           (tokens, k) float array, this rank's
    w           (local, n, k) float array: the weights of this rank's experts
    route       of this rank's tokens: make_route
    recipe      of x, w and dy. Tokens travel in the rowwise format where it is one of single rows (can_travel), and
                columns are quantized from what arrived; else they travel unquantized.
    weights     float32 (tokens, top); None: 1
    seed        as in linear_forward, the same on all ranks
    dispatches  False: x are rows of this rank's experts already, (route.arriving, k), and nothing is sent first
    combines    False: y are the rows of this rank's experts, (route.arriving, n), without weights, and nothing is sent
                back
    needs       whether the gradients of x, w and weights will be asked for, the same on all ranks; what none of them
                reads is neither quantized nor kept
    returns     y (tokens, n), or (route.arriving, n) where it does not combine, and what experts_backward takes

    Rows of no expert, which a capacity leaves behind the others, are neither read nor of any meaning.

    Raises ValueError for operands that are not the route's, and for delayed scaling: which tokens an expert has differs
    from step to step.
    """
    ranks = as_ranks(ranks)
    with ranks.agreement("experts_forward") as said:
        recipe = as_recipe(recipe)
        x, w = as_array(x, "x"), as_array(w, "w")
        if recipe.delayed is not None:
            raise ValueError(f"the recipe {recipe.name} takes amaxes of earlier steps, which experts do not keep; give "
                             f"the recipe without delayed=")
        _check_shapes(x, w, route, ranks, dispatches)
        if weights is not None and not combines:
            raise ValueError(f"weights on {ranks} are those of the sum over a token's choices; give them to the layer "
                             f"that combines")
        weights = None if weights is None else as_weights(weights, route, ranks)
        if seed is None and any(recipe.stochastic(role) for role in ROLES[:2]):
            raise ValueError(f"the recipe {recipe.name} rounds at random and needs seed=, the same on all ranks")
        said += recipe.name, w.shape, w.dtype, x.dtype, dispatches, combines, needs, seed
    needs_x, needs_w, needs_weights = needs
    take = _arrived if dispatches else _here
    gx = take(x, route, recipe, "input", ranks, seed, columns=needs_w)
    gw = _quantized(w, None, recipe, "weight", seed, columns=needs_x)
    y, back = ops.matmul(gx, gw.T), None
    if combines:
        back, index, _ = returned(y, route, ranks)
        with on_device(back.device):
            y = weighted_sum(back, (route.tokens, route.top), index, weights)
    return y, SavedExperts(
        gx.drop(rowwise=True) if needs_w else None, gw.drop(rowwise=True) if needs_x else None, w.shape[1], route,
        recipe, weights, back if needs_weights and weights is not None else None, seed, (dispatches, combines),
    )


def experts_backward(dy: Any, saved: SavedExperts, ranks: Any) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of experts_forward; all ranks call it.

    dy       of y's shape
    returns  dx of x's shape; dw (local, n, k), zero for an expert without tokens; dweights float32 (tokens, top), None
             where there were no weights. None for one that experts_forward was told is not needed

    Raises ValueError for a dy of another shape.
    """
    ranks, route, (dispatched, combined) = as_ranks(ranks), saved.route, saved.sent
    with ranks.agreement("experts_backward") as said:
        dy = as_array(dy, "dy")
        route.expect(dy, "dy", ranks)
        shape = route.tokens if combined else route.arriving, saved.n
        if dy.shape != shape:
            raise ValueError(f"dy on {ranks} has the shape of y, {shape}, not {dy.shape}")
        said += saved.recipe.name, dy.dtype, saved.x is None, saved.w is None, saved.seed
    dx = dw = dweights = None
    if saved.x is not None or saved.w is not None:
        take = _arrived if combined else _here
        gdy = take(dy, route, saved.recipe, "grad_output", ranks, saved.seed, weights=saved.weights,
                   rows=saved.w is not None, columns=saved.x is not None)
        if saved.w is not None:
            dx = ops.matmul(gdy, saved.w)
            dx = combine(dx, route, ranks) if dispatched else dx
        if saved.x is not None:
            dw = ops.matmul(gdy.T, saved.x)
    if saved.returned is not None:
        with on_device(dy.device):
            dweights = dots(saved.returned, dy, route.top, route.sent_at)
    return dx, dw, dweights


def _check_shapes(x: Array, w: Array, route: Route, ranks: Ranks, dispatches: bool) -> None:
    for name, array in (("x", x), ("w", w)):
        route.expect(array, name, ranks)
    if w.ndim != 3 or len(w) != route.num_local:
        raise ValueError(f"w on {ranks} is (local, n, k) of its {route.num_local} experts, not {w.shape}")
    rows, what = (route.tokens, "tokens") if dispatches else (route.arriving, "rows of its experts")
    if x.shape != (rows, w.shape[2]):
        raise ValueError(f"x on {ranks} is ({rows}, {w.shape[2]}), the route's {what}, and the k of w {w.shape}, not "
                         f"{x.shape}")


def _arrived(
    values: Array, route: Route, recipe: Recipe, role: Role, ranks: Ranks, seed: Any, *, weights: Any = None,
    rows: bool = True, columns: bool = True,
) -> GroupedArray:
    """Tokens, or their gradients, as this rank's experts have them, in the directions that are read."""
    row, column = recipe[role]
    if can_travel(row.resolve(ops.nominal_dtype(values.dtype))):  # columns come from the rows, read or not
        group = dispatch(values, route, ranks, row, weights=weights)
        return _with_columns(group, column, seed_of(role, seed)) if columns else group
    group = dispatch(values, route, ranks, HighPrecision(), weights=weights)
    part = group.rowwise
    assert isinstance(part, GroupedPart)
    return _quantized(part.codes, _sizes(group), recipe, role, seed, rows=rows, columns=columns)


def _here(
    values: Array, route: Route, recipe: Recipe, role: Role, ranks: Ranks, seed: Any, *, weights: Any = None,
    rows: bool = True, columns: bool = True,
) -> GroupedArray:
    """Rows as this rank's experts have them, in the directions that are read."""
    return _quantized(values, route.sizes, recipe, role, seed, rows=rows, columns=columns)


def _quantized(
    values: Array, sizes: Any, recipe: Recipe, role: Role, seed: Any, *, rows: bool = True, columns: bool = True
) -> GroupedArray:
    """Matrices as a recipe has them, in the directions that are read."""
    (row, column), seed, derived = recipe[role], seed_of(role, seed), recipe.source(role) != "original"
    group = grouped_quantize(
        values, sizes, rowwise=row if rows or derived else None,
        columnwise=column if columns and not derived else None, seed=seed,
    )
    return _with_columns(group, column, seed) if columns and derived else group


def _with_columns(group: GroupedArray, format: Format, seed: Any) -> GroupedArray:
    """The group with a columnwise part quantized from what its rows decode to."""
    values = group.dequantize(source="rowwise", dtype=np.float32)
    made = grouped_quantize(values, _sizes(group), columnwise=format.resolve(group.dtype), seed=seed)
    return GroupedArray(group.rowwise, made.columnwise, group.rows, group.columns, group.dtype)


def _sizes(group: GroupedArray) -> Any:
    """Rows of each member as grouped_quantize takes them; None where they are all the same."""
    rows = group.rows
    return None if rows.each is not None else rows.values if rows.is_known else rows.device


__all__ = ["SavedExperts", "experts_backward", "experts_forward"]
