"""Recipes: which formats the three operands of a linear layer are held in, for each direction.

A linear layer multiplies three times: fprop y = x @ w.T, dgrad dx = dy @ w, wgrad dw = dy.T @ x. Each product
contracts another axis, so each reads other parts of the operands; PRODUCTS says which.
"""

from __future__ import annotations

import difflib
import operator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .formats import FORMATS, Format, as_format
from .names import EXPLANATIONS

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
class Delayed:
    """How an amax is taken from those of earlier steps. Source: TransformerEngine's delayed scaling.

    length  amaxes kept of each tensor
    take    "max": the largest of them; "most_recent": the last
    margin  the amax counts as 2**margin times as large, so that the scale leaves room
    """

    length: int = 1024
    take: Literal["max", "most_recent"] = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        for field in ("length", "margin"):
            value = getattr(self, field)
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"Delayed: {field}={value!r} is {type(value).__name__}; give an integer")
            object.__setattr__(self, field, operator.index(value))
        if self.length < 1:
            raise ValueError(f"Delayed: length={self.length} keeps nothing; give 1 or more")
        if self.take not in ("max", "most_recent"):
            raise ValueError(f"Delayed: take={self.take!r} is not 'max' or 'most_recent'")
        if not -100 <= self.margin <= 100:  # 2**margin is then a normal float32
            raise ValueError(f"Delayed: margin={self.margin} must be an exponent of two between -100 and 100")

    @property
    def name(self) -> str:
        """Short text that differs wherever two rules do."""
        return f"{self.take}{self.length}" + (f"/margin={self.margin}" if self.margin else "")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Formats of a linear layer: (rowwise, columnwise) for its input, its weight and the gradient of its output.

    input, weight, grad_output  a pair of formats or short names, or one of them for both directions
    from_rows  roles whose columnwise part is quantized from what the rowwise one decodes to
    delayed    amaxes come from earlier steps, as this says; None: of the matrix itself

    Frozen, hashable, equal by value.

        Recipe(input=("mxfp8", "nvfp4"), weight=("mxfp8", "nvfp4"), grad_output="nvfp4", from_rows=("weight",))
        dataclasses.replace(RECIPES["mxfp8"], grad_output="mxfp8_e5m2")
    """

    input: Pair
    weight: Pair
    grad_output: Pair
    from_rows: tuple[Role, ...] = ()
    delayed: Delayed | None = None

    def __post_init__(self) -> None:
        for role in ROLES:
            object.__setattr__(self, role, _pair(role, getattr(self, role)))
        if not isinstance(self.from_rows, (tuple, list)) or not set(self.from_rows) <= set(ROLES):
            raise ValueError(f"Recipe: from_rows={self.from_rows!r} is not a tuple of {', '.join(map(repr, ROLES))}")
        object.__setattr__(self, "from_rows", tuple(role for role in ROLES if role in self.from_rows))
        if self.delayed is not None and not isinstance(self.delayed, Delayed):
            raise TypeError(f"Recipe: delayed={self.delayed!r} is {type(self.delayed).__name__}; give Delayed(...)")
        if self.delayed is not None and not any(format.measures_amax for format in self.formats):
            raise ValueError(
                f"Recipe: delayed= gives formats with one amax per matrix theirs (FP8, NVFP4); "
                f"{', '.join(format.name for format in self.formats)} measure each block"
            )
        if self.delayed is not None:
            self._refuse_rotated_amaxes()
        for product in PRODUCTS:
            left, right = self.product(product)
            if _is_rotated(left) != _is_rotated(right):
                raise ValueError(
                    f"Recipe: {product} would multiply {left.name} by {right.name}, of which one is Hadamard-rotated "
                    f"(rht) and the other is not; rotate both or neither"
                )

    def _refuse_rotated_amaxes(self) -> None:
        for role in ROLES:
            rotated = next((format for format in self[role] if format.measures_amax and _is_rotated(format)), None)
            if rotated is not None:
                raise ValueError(
                    f"Recipe: delayed= gives each operand the amax of its values in earlier steps, but the {role} has "
                    f"a part {rotated.name}, which is scaled by the amax of Hadamard-rotated ones (rht); use formats "
                    f"without rht, or leave delayed= out"
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
        if self == as_recipe(self.formats[0]) and self.formats[0].name not in RECIPES:
            return self.formats[0].name
        fields = [f"{role}={'/'.join(dict.fromkeys(f.name for f in self[role]))}" for role in ROLES]
        fields += [f"from_rows={'/'.join(self.from_rows)}"] if self.from_rows else []
        fields += [f"delayed={self.delayed.name}"] if self.delayed is not None else []
        return ",".join(fields)

    def stochastic(self, role: Role) -> bool:
        """Whether an operand is rounded at random, so that quantizing it needs a seed."""
        return any(format.is_stochastic for format in self[role])

    def measures_amax(self, role: Role) -> bool:
        """Whether an operand has one amax for the whole matrix, which may be given or delayed."""
        return any(format.measures_amax for format in self[role])

    def source(self, role: Role) -> Literal["original", "rowwise_dequantized"]:
        """columnwise_source of an operand."""
        return "rowwise_dequantized" if role in self.from_rows else "original"

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


def _recipe(
    input: object, weight: object, grad_output: object, *, from_rows: tuple[Role, ...] = (),
    delayed: Delayed | None = None,
) -> Recipe:
    return Recipe(
        _pair("input", input), _pair("weight", weight), _pair("grad_output", grad_output), from_rows, delayed
    )


# NVFP4 as it is trained with (arXiv 2509.25149): both operands of wgrad are rotated, gradients rounded at random.
_ROTATED = "nvfp4(rht=True)"
_GRADIENT = ("nvfp4(rounding=stochastic)", "nvfp4(rht=True,rounding=stochastic)")

RECIPES: dict[str, Recipe] = {
    "bf16": _recipe("bf16", "bf16", "bf16"),
    "fp8": _recipe("fp8_e4m3", "fp8_e4m3", "fp8_e4m3"),
    "fp8_current": _recipe("fp8_e4m3", "fp8_e4m3", "fp8_e5m2"),
    "fp8_delayed": _recipe("fp8_e4m3", "fp8_e4m3", "fp8_e5m2", delayed=Delayed()),
    "fp8_block": _recipe("fp8_block_1x128", "fp8_block_128x128", "fp8_block_1x128"),
    "mxfp8": _recipe("mxfp8", "mxfp8", "mxfp8"),
    "mxfp8_2d_weight": _recipe("mxfp8", "mxfp8_32x32", "mxfp8"),
    "mxfp8_fp8_block_weight": _recipe("mxfp8", "fp8_block_128x128_pow2", "mxfp8"),
    "nvfp4": _recipe(("nvfp4", _ROTATED), "nvfp4_16x16", _GRADIENT),
    "nvfp4_1d_weight": _recipe(("nvfp4", _ROTATED), "nvfp4", _GRADIENT, from_rows=("weight",)),
    "nvfp4_nearest": _recipe("nvfp4", "nvfp4_16x16", "nvfp4"),
    "mxfp8_forward_nvfp4_backward": _recipe(
        ("mxfp8", _ROTATED), ("mxfp8", "nvfp4"), _GRADIENT, from_rows=("weight",)
    ),
    "bf16_forward_mxfp8_backward": _recipe(("bf16", "mxfp8"), ("bf16", "mxfp8"), "mxfp8"),
    "mxfp8_forward_bf16_backward": _recipe(
        ("mxfp8", "bf16"), ("mxfp8", "bf16"), "bf16", from_rows=("input", "weight")
    ),
    "nvfp4_forward_bf16_backward": _recipe(
        ("nvfp4", "bf16"), ("nvfp4", "bf16"), "bf16", from_rows=("input", "weight")
    ),
    "nvfp4_row_forward_bf16_backward": _recipe(
        ("nvfp4_row", "bf16"), ("nvfp4", "bf16"), "bf16", from_rows=("input", "weight")
    ),
    "nvfp4_row_forward_mxfp8_backward": _recipe(
        ("nvfp4_row", "mxfp8"), ("nvfp4", "mxfp8"), "mxfp8", from_rows=("input", "weight")
    ),
}
"""The table of named recipes. A row added here is accepted wherever a recipe is.

fp8_current and fp8_delayed are TransformerEngine's HYBRID; those of two formats are its factories for hybrid layers.
"""

_FORMER_NAMES = {"fp8_e5m2_gradient": "fp8_current"}


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
    name = _FORMER_NAMES.get(recipe.strip(), recipe.strip())
    if name in RECIPES:
        return RECIPES[name]
    if name.partition("(")[0] in FORMATS:
        return _recipe(name, name, name)
    known = [*RECIPES, *(format for format in FORMATS if format not in RECIPES)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown recipe or format {recipe!r}; {hint}known: {', '.join(known)}")


def _explain(name: str) -> str:
    """What a name is that was given for a format and stands for a recipe; "" for all others."""
    recipe = RECIPES.get(_FORMER_NAMES.get(name, name))
    if recipe is None:
        return ""
    pairs = (f"{role} {'/'.join(dict.fromkeys(f.name for f in recipe[role]))}" for role in ROLES)
    return (
        f"it is a recipe, which names formats for the three operands of a layer ({', '.join(pairs)}); give a format, "
        f"such as {recipe.input[0].name!r}; "
    )


EXPLANATIONS.append(_explain)
