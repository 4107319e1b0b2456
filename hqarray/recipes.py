"""Recipes: which formats the three operands of a linear layer are held in, for each direction.

A linear layer multiplies three times: fprop y = x @ w.T, dgrad dx = dy @ w, wgrad dw = dy.T @ x. Each product
contracts another axis, so each reads other parts of the operands; PRODUCTS says which.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .formats import FORMATS, Format, as_format

Role: TypeAlias = Literal["input", "weight", "grad_output"]
Product: TypeAlias = Literal["fprop", "dgrad", "wgrad"]
Pair: TypeAlias = tuple[Format, Format]
"""(rowwise, columnwise) formats of one operand."""

ROLES: tuple[Role, ...] = ("input", "weight", "grad_output")

PRODUCTS: dict[Product, tuple[tuple[Role, int], tuple[Role, int]]] = {
    "fprop": (("input", 0), ("weight", 0)),
    "dgrad": (("grad_output", 0), ("weight", 1)),
    "wgrad": (("grad_output", 1), ("input", 1)),
}
"""Operands of each product, and which part of them it reads: 0 rowwise, 1 columnwise."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats of a linear layer: (rowwise, columnwise) for its input, its weight and the gradient of its output.

    Each field takes a pair of formats or short names, or one of them for both directions. Frozen, hashable,
    equal by value.

        Recipe(input=("mxfp8", "nvfp4"), weight=("mxfp8", "nvfp4"), grad_output="nvfp4")
    """

    input: Pair
    weight: Pair
    grad_output: Pair

    def __post_init__(self) -> None:
        for role in ROLES:
            object.__setattr__(self, role, _pair(role, getattr(self, role)))
        for product in PRODUCTS:
            left, right = self.product(product)
            if _is_rotated(left) != _is_rotated(right):
                raise ValueError(
                    f"Recipe: {product} would multiply {left.name} by {right.name}, of which one is Hadamard-rotated "
                    f"(rht) and the other is not; rotate both or neither"
                )

    @property
    def formats(self) -> tuple[Format, ...]:
        """The distinct formats, in the order of the fields."""
        return tuple(dict.fromkeys(format for role in ROLES for format in self[role]))

    @property
    def name(self) -> str:
        """Short name: of the table, of the one format that it uses, or the pairs written out."""
        for name, recipe in RECIPES.items():
            if recipe == self:
                return name
        if len(self.formats) == 1 and self.formats[0].name not in RECIPES:
            return self.formats[0].name
        return ",".join(f"{role}={'/'.join(dict.fromkeys(f.name for f in self[role]))}" for role in ROLES)

    def product(self, product: Product) -> Pair:
        """Formats of the left and the right operand of fprop, dgrad or wgrad."""
        (left, a), (right, b) = PRODUCTS[product]
        return self[left][a], self[right][b]

    def __getitem__(self, role: Role) -> Pair:
        """The pair of a role."""
        if role not in ROLES:
            raise KeyError(f"{role!r} is not one of {', '.join(ROLES)}")
        pair: Pair = getattr(self, role)
        return pair


def _is_rotated(format: Format) -> bool:
    return format.scaling is not None and format.storage.rht


def _pair(role: str, value: object) -> Pair:
    if isinstance(value, (Format, str)):
        return (as_format(value), as_format(value))
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"Recipe: {role} is a format or a (rowwise, columnwise) pair of formats, not {value!r}")
    return (as_format(value[0]), as_format(value[1]))


def _recipe(input: object, weight: object, grad_output: object) -> Recipe:
    return Recipe(_pair("input", input), _pair("weight", weight), _pair("grad_output", grad_output))


RECIPES: dict[str, Recipe] = {
    "bf16": _recipe("bf16", "bf16", "bf16"),
    "fp8": _recipe("fp8_e4m3", "fp8_e4m3", "fp8_e4m3"),
    "fp8_e5m2_gradient": _recipe("fp8_e4m3", "fp8_e4m3", "fp8_e5m2"),
    "fp8_block": _recipe("fp8_block_1x128", "fp8_block_128x128", "fp8_block_1x128"),
    "mxfp8": _recipe("mxfp8", "mxfp8", "mxfp8"),
    "mxfp8_fp8_block_weight": _recipe("mxfp8", "fp8_block_128x128_pow2", "mxfp8"),
    "mxfp8_forward_nvfp4_backward": _recipe(("mxfp8", "nvfp4"), ("mxfp8", "nvfp4"), "nvfp4"),
    "nvfp4": _recipe("nvfp4", "nvfp4_16x16", "nvfp4"),
}
"""The table of named recipes. A row added here is accepted wherever a recipe is."""


def as_recipe(recipe: Recipe | Format | str) -> Recipe:
    """The recipe that a name stands for; a format makes the uniform one.

    A name is looked up in RECIPES first, then in FORMATS: "nvfp4" is the recipe with 16x16 weights, while
    as_recipe(FORMATS["nvfp4"]) holds 1x16 blocks everywhere.
    Raises ValueError for an unknown name, TypeError for anything else.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Format):
        return _recipe(recipe, recipe, recipe)
    if not isinstance(recipe, str):
        raise TypeError(f"a recipe is a name, a format or a Recipe, not {type(recipe).__name__}: {recipe!r}")
    name = recipe.strip()
    if name in RECIPES:
        return RECIPES[name]
    if name.partition("(")[0] in FORMATS:
        return _recipe(name, name, name)
    known = [*RECIPES, *(format for format in FORMATS if format not in RECIPES)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown recipe or format {recipe!r}; {hint}known: {', '.join(known)}")
