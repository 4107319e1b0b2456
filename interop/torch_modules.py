"""Modules over the autograd functions; their state is that of torch's own layers."""

from __future__ import annotations

import math
from typing import Any

import torch  # noqa: TID253  this module names torch

from hqarray.formats import Format
from hqarray.recipes import RECIPES, Recipe, as_recipe

from .torch_linear import grouped_linear, linear


class Linear(torch.nn.Linear):  # type: ignore[misc]
    """torch.nn.Linear whose three products are of operands quantized by a recipe: y = x @ weight.T + bias.

    recipe   a Recipe, or the name of a recipe or format
    Weights stay in dtype, and are quantized in each forward pass. Parameters, their initial values and the state
    dict are torch.nn.Linear's, so either loads the other's.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, recipe: Recipe | Format | str,
        device: Any = None, dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._recipe = _without_history(recipe)

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    def forward(self, x: Any) -> Any:
        """(..., in_features) -> (..., out_features)."""
        return linear(x, self.weight, self._recipe, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={_described(self._recipe)}"


class GroupedLinear(torch.nn.Module):  # type: ignore[misc]
    """num_groups linear layers, each for its own rows: the experts of a mixture.

    weight   (num_groups, out_features, in_features), each group's with torch.nn.Linear's initial values
    bias     (num_groups, out_features), likewise; None unless asked for
    recipe   a Recipe, or the name of a recipe or format
    """

    def __init__(
        self, num_groups: int, in_features: int, out_features: int, bias: bool = False, *,
        recipe: Recipe | Format | str, device: Any = None, dtype: Any = None,
    ) -> None:
        super().__init__()
        self._recipe = _without_history(recipe)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        shape = (num_groups, out_features, in_features)
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        biases = torch.nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", biases)
        self.reset_parameters()

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    def reset_parameters(self) -> None:
        """torch.nn.Linear's initial values, for one group after another."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for i in range(self.num_groups):
            if self.in_features:
                torch.nn.init.kaiming_uniform_(self.weight[i], a=math.sqrt(5))
            if self.bias is not None:
                torch.nn.init.uniform_(self.bias[i], -bound, bound)

    def forward(self, x: Any, sizes: Any) -> Any:
        """(T, in_features) -> (T, out_features); sizes as grouped_linear takes them."""
        return grouped_linear(x, self.weight, sizes, self._recipe, self.bias)

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, recipe={_described(self._recipe)}"
        )


def _without_history(recipe: Recipe | Format | str) -> Recipe:
    """The recipe. Raises ValueError where it needs amaxes of earlier steps, which a module does not keep."""
    recipe = as_recipe(recipe)
    if recipe.delayed is not None:
        raise ValueError(
            f"{recipe.name} takes amaxes of earlier steps, which one state keeps for all layers of a model; call "
            f"linear(..., amax=state[...]) in a module of your own"
        )
    return recipe


def _described(recipe: Recipe) -> str:
    """The name of a recipe that has one, else its formats."""
    for name, row in RECIPES.items():
        if row == recipe:
            return name
    pairs = ("/".join(dict.fromkeys(format.name for format in pair)) for pair in
             (recipe.input, recipe.weight, recipe.grad_output))
    return f"({', '.join(pairs)})"


__all__ = ["GroupedLinear", "Linear"]
