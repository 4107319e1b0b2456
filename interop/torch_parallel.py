"""Layers over several ranks as autograd functions: parallel_forward and experts_forward with their gradients.

    y = hqt.parallel_linear(x, w, "mxfp8", spread, ranks)
    y = hqt.experts_linear(x, w, route, "mxfp8", ranks, weights=weights)

All ranks call them, and their backward passes, in the same order. Work runs on torch's current stream; what the
backward pass reads is saved with save_for_backward.
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: TID253  this module names torch

from hqarray.arrays import HybridArray
from hqarray.formats import Format
from hqarray.grouped import GroupedArray
from hqarray.linear import Saved
from hqarray.recipes import Recipe, as_recipe

from .distributed import as_ranks
from .expert_linear import SavedExperts, experts_backward, experts_forward
from .experts import Route
from .parallel import SavedSpread, Spread, parallel_backward, parallel_forward
from .torch_arrays import after_cupy, as_array, as_tensor, on_torch
from .torch_linear import FORWARD, _backward, _checked, _expect_no_transform, _of_type, _restored, _save


def parallel_linear(
    x: Any, w: Any, recipe: Recipe | Format | str, spread: Spread, ranks: Any, *, seed: Any = None, amax: Any = None
) -> Any:
    """A linear layer that is spread over ranks (tensor parallelism), with gradients.

    x, w     this rank's pieces as 2-D float tensors, as the spread has them
    recipe, spread, ranks, seed, amax  as in parallel_forward; a recipe that rounds at random needs a seed, the same on
             all ranks and another one for each call
    returns  this rank's piece of x @ w.T

    Autocast, torch.compile and what is refused are as in linear.
    """
    if torch.compiler.is_compiling():
        return _eager_parallel_linear(x, w, recipe, spread, ranks, seed=seed, amax=amax)
    _expect_no_transform()
    x, w, _ = _checked(x, w, None)
    return _ParallelLinear.apply(x, w, as_recipe(recipe), spread, as_ranks(ranks), _ours(seed), _ours(amax))


def experts_linear(
    x: Any, w: Any, route: Route, recipe: Recipe | Format | str, ranks: Any, *, weights: Any = None, seed: Any = None,
    dispatches: bool = True, combines: bool = True,
) -> Any:
    """A linear layer of experts on several ranks (expert parallelism), with gradients.

    x        (tokens, k) float tensor, this rank's
    w        (local, n, k), the weights of this rank's experts, where x is
    weights  float (tokens, top), where x is: of each choice; None: 1
    route, recipe, ranks, seed, dispatches, combines  as in experts_forward; make_route takes tensors
    returns  (tokens, n)

    A feed-forward network of experts sends its tokens once:

        h = experts_linear(x, up, route, "mxfp8", ranks, combines=False)     # (route.arriving, n), the experts' rows
        y = experts_linear(act(h), down, route, "mxfp8", ranks, dispatches=False, weights=weights)

    Gradients are those of x, w and weights. Otherwise as parallel_linear.
    """
    if torch.compiler.is_compiling():
        return _eager_experts_linear(x, w, route, recipe, ranks, weights=weights, seed=seed, dispatches=dispatches,
                                     combines=combines)
    _expect_no_transform()
    x, w, _ = _checked(x, w, None)
    if weights is not None and (not isinstance(weights, torch.Tensor) or weights.device != x.device):
        found = f"on {weights.device}" if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise TypeError(f"weights are a torch.Tensor on {x.device} as x is, not {found}")
    return _ExpertsLinear.apply(
        x, w, weights, route, as_recipe(recipe), as_ranks(ranks), _ours(seed), (dispatches, combines)
    )


# What torch.compile calls without looking inside.
_eager_parallel_linear = torch._disable_dynamo(parallel_linear)
_eager_experts_linear = torch._disable_dynamo(experts_linear)


def _ours(value: Any) -> Any:
    return as_array(value) if isinstance(value, torch.Tensor) else value


class _ParallelLinear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Any, w: Any, recipe: Recipe, spread: Spread, ranks: Any, seed: Any, amax: Any
    ) -> Any:
        after_cupy(x.device)  # which may still be at work on the route, a seed or amaxes
        with on_torch(x.device):
            y, saved = parallel_forward(as_array(x), as_array(w), recipe, spread, ranks, seed=seed, amax=amax)
            held = saved.linear.x, saved.linear.w
            _save(ctx, [array.columnwise for array in held], ())
        ctx.about = [(array.shape, array.dtype, array.derived) for array in held]
        ctx.given, ctx.spread, ctx.ranks, ctx.types = (recipe, seed, amax), spread, ranks, (x.dtype, w.dtype)
        return as_tensor(y)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return (*_backward(_parallel_gradients, ctx, dy), None, None, None, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD)


def _parallel_gradients(ctx: Any, dy: Any) -> tuple[Any, Any]:
    with on_torch(dy.device):
        x, w = (HybridArray(None, part, *about)
                for part, about in zip(_restored(ctx, ctx.saved_tensors), ctx.about, strict=True))
        saved = SavedSpread(Saved(x, w, *ctx.given), ctx.spread)
        dx, dw = parallel_backward(as_array(dy), saved, ctx.ranks)
    return _of_type(as_tensor(dx), ctx.types[0]), _of_type(as_tensor(dw), ctx.types[1])


class _ExpertsLinear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Any, w: Any, weights: Any, route: Route, recipe: Recipe, ranks: Any, seed: Any,
        sent: tuple[bool, bool],
    ) -> Any:
        after_cupy(x.device)  # which may still be at work on the route, a seed or amaxes
        with on_torch(x.device):
            given = None if weights is None else as_array(weights)
            y, saved = experts_forward(
                as_array(x), as_array(w), route, recipe, ranks, weights=given, seed=seed, dispatches=sent[0],
                combines=sent[1],
            )
            slots = None if saved.slots is None else as_tensor(saved.slots)
            _save(ctx, [group.columnwise for group in (saved.x, saved.w)], (weights, slots))
        ctx.axes = [(group.rows, group.columns, group.dtype) for group in (saved.x, saved.w)]
        ctx.given, ctx.ranks = (route, recipe, seed, sent), ranks
        ctx.types = x.dtype, w.dtype, None if weights is None else weights.dtype
        return as_tensor(y)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return (*_backward(_experts_gradients, ctx, dy), None, None, None, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD)


def _experts_gradients(ctx: Any, dy: Any) -> tuple[Any, Any, Any]:
    with on_torch(dy.device):
        *parts, weights, slots = _restored(ctx, ctx.saved_tensors)
        x, w = (GroupedArray(None, part, *axes) for part, axes in zip(parts, ctx.axes, strict=True))
        route, recipe, seed, sent = ctx.given
        saved = SavedExperts(x, w, route, recipe, _ours(weights), _ours(slots), seed, sent)
        dx, dw, dweights = experts_backward(as_array(dy), saved, ctx.ranks)
    found = (None if gradient is None else as_tensor(gradient) for gradient in (dx, dw, dweights))
    dx, dw, dweights = (_of_type(gradient, dtype) for gradient, dtype in zip(found, ctx.types, strict=True))
    return dx, dw, dweights


__all__ = ["experts_linear", "parallel_linear"]
