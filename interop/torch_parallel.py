"""Layers over several ranks as autograd functions: parallel_forward and experts_forward with their gradients.

    y = hqt.parallel_linear(x, w, "mxfp8", spread, ranks)
    y = hqt.experts_linear(x, w, route, "mxfp8", ranks, weights=weights)

All ranks call them, and their backward passes, in the same order. Work runs on torch's current stream; what the
backward pass reads is saved with save_for_backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch  # noqa: TID253  this module names torch

from hqarray.arrays import HybridArray
from hqarray.formats import Format
from hqarray.grouped import GroupedArray
from hqarray.linear import Saved
from hqarray.recipes import ROLES, Recipe, as_recipe

from .distributed import as_ranks
from .expert_linear import SavedExperts, experts_backward, experts_forward
from .experts import Route, as_weights
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

    Whether x and w need gradients, and whether there are any (no_grad), is alike on all ranks: it says what is sent.
    Autocast, torch.compile and what is refused are as in linear.
    """
    if torch.compiler.is_compiling():
        return _eager_parallel_linear(x, w, recipe, spread, ranks, seed=seed, amax=amax)
    _expect_no_transform()
    ranks = as_ranks(ranks)
    with ranks.agreement("parallel_linear") as said:
        x, w, _ = _checked(x, w, None)
        recipe, needs = as_recipe(recipe), _needs(x, w)
        _expect_seed(recipe, seed, needs)
        said.append(f"gradients of x and w are needed: {needs}")
    return _ParallelLinear.apply(x, w, recipe, spread, ranks, _own(seed), _own(amax), needs)


def experts_linear(
    x: Any, w: Any, route: Route, recipe: Recipe | Format | str, ranks: Any, *, weights: Any = None, seed: Any = None,
    dispatches: bool = True, combines: bool = True,
) -> Any:
    """A linear layer of experts on several ranks (expert parallelism), with gradients.

    x        (tokens, k) float tensor, this rank's
    w        (local, n, k), the weights of this rank's experts, where x is
    weights  float (tokens, top), where x is: of each choice; None: 1
    route, recipe, ranks, seed, dispatches, combines  as in experts_forward; make_route takes tensors
    returns  (tokens, n); (route.arriving, n) with combines=False

    A feed-forward network of experts sends its tokens once:

        h = experts_linear(x, up, route, "mxfp8", ranks, combines=False)     # (route.arriving, n), the experts' rows
        y = experts_linear(act(h), down, route, "mxfp8", ranks, dispatches=False, weights=weights)

    Gradients are those of x, w and weights. Otherwise as parallel_linear.
    """
    if torch.compiler.is_compiling():
        return _eager_experts_linear(x, w, route, recipe, ranks, weights=weights, seed=seed, dispatches=dispatches,
                                     combines=combines)
    _expect_no_transform()
    ranks = as_ranks(ranks)
    with ranks.agreement("experts_linear") as said:
        x, w, _ = _checked(x, w, None)
        if weights is not None and (not isinstance(weights, torch.Tensor) or weights.device != x.device):
            found = f"on {weights.device}" if isinstance(weights, torch.Tensor) else type(weights).__name__
            raise TypeError(f"weights are a torch.Tensor on {x.device} as x is, not {found}")
        recipe, needs = as_recipe(recipe), _needs(x, w, weights)
        _expect_seed(recipe, seed, needs)
        said.append(f"gradients of x, w and weights are needed: {needs}")
    return _ExpertsLinear.apply(x, w, weights, route, recipe, ranks, _own(seed), (dispatches, combines), needs)


# What torch.compile calls without looking inside.
_eager_parallel_linear = torch._disable_dynamo(parallel_linear)
_eager_experts_linear = torch._disable_dynamo(experts_linear)


def _needs(*tensors: Any) -> tuple[bool, ...]:
    """Whether the gradients of tensors, or None, will be asked for."""
    records = torch.is_grad_enabled()
    return tuple(records and tensor is not None and tensor.requires_grad for tensor in tensors)


def _expect_seed(recipe: Recipe, seed: Any, needs: tuple[bool, ...]) -> None:
    """Raises ValueError before anything is sent where a seed is missing, that of gradients included."""
    roles = ROLES if any(needs) else ROLES[:2]
    if seed is None and any(recipe.stochastic(role) for role in roles):
        raise ValueError(f"the recipe {recipe.name} rounds at random and needs seed=, the same on all ranks and "
                         f"another one for each call")


def _own(value: Any) -> Any:
    """An array of a tensor's values as they are now: the caller may change it before the backward pass."""
    return as_array(value.clone()) if isinstance(value, torch.Tensor) else value


def _output(array: Any) -> Any:
    """A tensor over an array, which is no view in the eyes of autograd and may be changed in place."""
    return as_tensor(array).detach()


class _ParallelLinear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Any, w: Any, recipe: Recipe, spread: Spread, ranks: Any, seed: Any, amax: Any,
        needs: tuple[bool, bool],
    ) -> Any:
        after_cupy(x.device)  # which may still be at work on a seed or amaxes
        with on_torch(x.device):
            y, saved = parallel_forward(
                as_array(x), as_array(w), recipe, spread, ranks, seed=seed, amax=amax, needs=needs
            )
            held = saved.linear.x, saved.linear.w
            _save(ctx, [None if array is None else array.columnwise for array in held], ())
        ctx.about = [None if array is None else (array.shape, array.dtype, array.derived) for array in held]
        ctx.given = recipe, saved.linear.shapes, seed, amax
        ctx.spread, ctx.ranks, ctx.types = spread, ranks, (x.dtype, w.dtype)
        return _output(y)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return (*_backward(_parallel_gradients, ctx, dy), *[None] * 6)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD)


def _parallel_gradients(ctx: Any, dy: Any) -> tuple[Any, Any]:
    with on_torch(dy.device):
        x, w = (None if about is None else HybridArray(None, part, *about)
                for part, about in zip(_restored(ctx, ctx.saved_tensors), ctx.about, strict=True))
        saved = SavedSpread(Saved(x, w, *ctx.given), ctx.spread)
        return _typed(parallel_backward(as_array(dy), saved, ctx.ranks), ctx.types)


def _typed(gradients: Sequence[Any], dtypes: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays, or None, as tensors of the dtypes of what they are gradients of."""
    return tuple(None if gradient is None else _of_type(as_tensor(gradient), dtype)
                 for gradient, dtype in zip(gradients, dtypes, strict=True))


class _ExpertsLinear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Any, w: Any, weights: Any, route: Route, recipe: Recipe, ranks: Any, seed: Any,
        sent: tuple[bool, bool], needs: tuple[bool, bool, bool],
    ) -> Any:
        after_cupy(x.device)  # which may still be at work on the route or a seed
        with on_torch(x.device):
            given = None if weights is None else as_array(weights)
            y, saved = experts_forward(
                as_array(x), as_array(w), route, recipe, ranks, weights=given, seed=seed, dispatches=sent[0],
                combines=sent[1], needs=needs,
            )
            held = saved.x, saved.w
            back = None if saved.returned is None else as_tensor(saved.returned)
            _save(ctx, [None if group is None else group.columnwise for group in held], (weights, back))
        ctx.axes = [None if group is None else (group.rows, group.columns, group.dtype) for group in held]
        ctx.given, ctx.ranks = (saved.n, route, recipe, seed, sent), ranks
        ctx.types = x.dtype, w.dtype, None if weights is None else weights.dtype
        return _output(y)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return (*_backward(_experts_gradients, ctx, dy), *[None] * 6)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD)


def _experts_gradients(ctx: Any, dy: Any) -> tuple[Any, Any, Any]:
    with on_torch(dy.device):
        *parts, weights, back = _restored(ctx, ctx.saved_tensors)
        x, w = (None if axes is None else GroupedArray(None, part, *axes)
                for part, axes in zip(parts, ctx.axes, strict=True))
        n, route, recipe, seed, sent = ctx.given
        weights, back = (None if tensor is None else as_array(tensor) for tensor in (weights, back))
        if weights is not None:
            weights = as_weights(weights, route, ctx.ranks)
        saved = SavedExperts(x, w, n, route, recipe, weights, back, seed, sent)
        return _typed(experts_backward(as_array(dy), saved, ctx.ranks), ctx.types)


__all__ = ["experts_linear", "parallel_linear"]
