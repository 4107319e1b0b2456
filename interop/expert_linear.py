"""A linear layer of experts on several ranks, forward and backward, on dispatch, grouped products and combine.

    y, saved = experts_forward(x, w, route, "mxfp8", ranks, weights=weights)     # w: this rank's experts
    dx, dw, dweights = experts_backward(dy, saved, ranks)

Layers one after another send their tokens once: the first with combines=False gives the experts' rows, the last with
dispatches=False takes such rows, and what is between them is done row by row.

With Alone() it is the reference on one rank: operands are the same bytes on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from hqarray.recipes import Recipe, Role, as_recipe
from hqarray.record_ops import dots, weighted_sum
from hqarray.records import can_travel

from .distributed import Ranks, as_ranks
from .experts import Route, as_weights, combine, dispatch, returned


@dataclass(frozen=True, slots=True, eq=False)
class SavedExperts:
    """What the backward pass reads: columnwise parts of the tokens that arrived and of the weights.

    slots  what came back for each choice, (tokens, top, n), for the gradient of weights; None without weights
    sent   whether the layer dispatched, and whether it combined
    """

    x: GroupedArray
    w: GroupedArray
    route: Route
    recipe: Recipe
    weights: Any
    slots: Array | None
    seed: Any = None
    sent: tuple[bool, bool] = (True, True)


def experts_forward(
    x: Any, w: Any, route: Route, recipe: Recipe | Format | str, ranks: Any, *, weights: Any = None, seed: Any = None,
    dispatches: bool = True, combines: bool = True,
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
    returns     y (tokens, n), and what experts_backward takes

    Rows of no expert, which a capacity leaves behind the others, are neither read nor of any meaning. Raises ValueError
    for delayed scaling: which tokens an expert has differs from step to step.
    """
    ranks, recipe, w = as_ranks(ranks), as_recipe(recipe), as_array(w, "w")
    if recipe.delayed is not None:
        raise ValueError(f"the recipe {recipe.name} takes amaxes of earlier steps, which experts do not keep; give the "
                         f"recipe without delayed=")
    if w.ndim != 3 or len(w) != route.num_local:
        raise ValueError(f"w on {ranks} is (local, n, k) of its {route.num_local} experts, not {w.shape}")
    if weights is not None and not combines:
        raise ValueError(f"weights on {ranks} are those of the sum over a token's choices; give them to the layer that "
                         f"combines")
    take = _arrived if dispatches else _here
    gx = take(x, route, recipe, "input", ranks, seed)
    gw = _quantized(w, None, recipe, "weight", seed)
    rows = ops.matmul(gx, gw.T)
    saved = SavedExperts(
        gx.drop(rowwise=True), gw.drop(rowwise=True), route, recipe, weights, None, seed, (dispatches, combines)
    )
    if not combines:
        return rows, saved
    slots = returned(rows, route, ranks)
    with on_device(slots.device):
        chosen = None if weights is None else as_weights(weights, route)
        y = weighted_sum(slots.reshape(-1, slots.shape[2]), (route.tokens, route.top), None, chosen)
    return y, saved if weights is None else replace(saved, slots=slots)


def experts_backward(dy: Any, saved: SavedExperts, ranks: Any) -> tuple[Array, Array, Array | None]:
    """The gradients of experts_forward; all ranks call it.

    dy       of y's shape
    returns  dx of x's shape; dw (local, n, k), zero for an expert without tokens; dweights float32 (tokens, top), None
             where there were no weights
    """
    ranks, dy, route, (dispatched, combined) = as_ranks(ranks), as_array(dy, "dy"), saved.route, saved.sent
    take = _arrived if combined else _here
    gdy = take(dy, route, saved.recipe, "grad_output", ranks, saved.seed, saved.weights)
    dx, dw = ops.matmul(gdy, saved.w), ops.matmul(gdy.T, saved.x)
    if dispatched:
        dx = combine(dx, route, ranks)
    if saved.slots is None:
        return dx, dw, None
    with on_device(dy.device):
        return dx, dw, dots(saved.slots.reshape(-1, dy.shape[1]), dy, route.top)


def _arrived(
    values: Any, route: Route, recipe: Recipe, role: Role, ranks: Ranks, seed: Any, weights: Any = None
) -> GroupedArray:
    """Tokens, or their gradients, as this rank's experts have them, in both directions."""
    row, column = recipe[role]
    if can_travel(row.resolve(ops._nominal(as_array(values, "values").dtype))):
        group = dispatch(values, route, ranks, row, weights=weights)
        return _with_columns(group, column, seed_of(role, seed))
    group = dispatch(values, route, ranks, HighPrecision(), weights=weights)
    part = group.rowwise
    assert isinstance(part, GroupedPart)
    return _quantized(part.codes, _sizes(group), recipe, role, seed)


def _here(
    values: Any, route: Route, recipe: Recipe, role: Role, ranks: Ranks, seed: Any, weights: Any = None
) -> GroupedArray:
    """Rows as this rank's experts have them, in both directions."""
    values = as_array(values, "values")
    if values.ndim != 2 or len(values) != route.arriving:
        columns = "n" if role == "grad_output" else "k"
        raise ValueError(f"the experts' rows on {ranks} are ({route.arriving}, {columns}), as many as were dispatched, "
                         f"not {values.shape}")
    return _quantized(values, route.sizes, recipe, role, seed)


def _quantized(values: Any, sizes: Any, recipe: Recipe, role: Role, seed: Any) -> GroupedArray:
    """Matrices as a recipe has them."""
    (row, column), seed = recipe[role], seed_of(role, seed)
    if recipe.source(role) == "original":
        return grouped_quantize(values, sizes, rowwise=row, columnwise=column, seed=seed)
    return _with_columns(grouped_quantize(values, sizes, rowwise=row, seed=seed), column, seed)


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
