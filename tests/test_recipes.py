"""Recipes: names, pairs, and which part of an operand each product reads."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hqarray as hq
from hqarray.recipes import PRODUCTS, ROLES, Delayed, Recipe, as_recipe


@pytest.mark.parametrize("name", hq.RECIPES)
def test_name_and_recipe_are_inverse(name: str) -> None:
    recipe = hq.RECIPES[name]
    assert recipe.name == name
    assert as_recipe(name) is recipe
    assert as_recipe(recipe) is recipe
    assert hash(recipe) == hash(Recipe(*(recipe[role] for role in ROLES), recipe.from_rows, recipe.delayed))


@pytest.mark.parametrize("name", hq.FORMATS)
def test_format_makes_the_uniform_recipe(name: str) -> None:
    format = hq.FORMATS[name]
    recipe = as_recipe(format)
    assert recipe.formats == (format,)
    assert all(recipe[role] == (format, format) for role in ROLES)
    if name not in hq.RECIPES:
        assert as_recipe(name) == recipe


def test_formats_of_the_named_recipes() -> None:
    def names(recipe: str) -> list[str]:
        return ["/".join(format.name for format in hq.RECIPES[recipe][role]) for role in ROLES]

    assert names("fp8") == ["fp8_e4m3/fp8_e4m3"] * 3
    for name in ("fp8_current", "fp8_delayed"):
        assert names(name) == ["fp8_e4m3/fp8_e4m3"] * 2 + ["fp8_e5m2/fp8_e5m2"]
    gradient = "nvfp4(rounding=stochastic)/nvfp4(rht=true,rounding=stochastic)"
    assert names("mxfp8_forward_nvfp4_backward") == ["mxfp8/nvfp4(rht=true)", "mxfp8/nvfp4", gradient]
    assert names("nvfp4") == ["nvfp4/nvfp4(rht=true)", "nvfp4_16x16/nvfp4_16x16", gradient]
    assert names("nvfp4_row_forward_mxfp8_backward") == ["nvfp4_row/mxfp8", "nvfp4/mxfp8", "mxfp8/mxfp8"]
    assert names("nvfp4_forward_bf16_backward") == ["nvfp4/bf16"] * 2 + ["bf16/bf16"]
    block = "fp8_block_128x128_pow2/fp8_block_128x128_pow2"
    assert names("mxfp8_fp8_block_weight") == ["mxfp8/mxfp8", block, "mxfp8/mxfp8"]
    assert names("nvfp4_nearest") == ["nvfp4/nvfp4", "nvfp4_16x16/nvfp4_16x16", "nvfp4/nvfp4"]


def test_hybrid_products_read_the_formats_they_are_named_for() -> None:
    recipe = hq.RECIPES["mxfp8_forward_nvfp4_backward"]
    mxfp8, nvfp4 = hq.MX(), hq.NVFP4()
    assert {product: recipe.product(product) for product in PRODUCTS} == {
        "fprop": (mxfp8, mxfp8), "dgrad": (hq.NVFP4(rounding="stochastic"), nvfp4),
        "wgrad": (hq.NVFP4(rht=True, rounding="stochastic"), hq.NVFP4(rht=True)),
    }


def test_recipes_of_nvfp4_round_gradients_alone_at_random_and_rotate_both_operands_of_wgrad() -> None:
    for name in ("nvfp4", "nvfp4_1d_weight", "mxfp8_forward_nvfp4_backward"):
        recipe = hq.RECIPES[name]
        assert [recipe.stochastic(role) for role in ROLES] == [False, False, True]
        for product in PRODUCTS:
            assert [format.storage.rht for format in recipe.product(product)] == [product == "wgrad"] * 2
    assert not any(hq.RECIPES["nvfp4_nearest"].stochastic(role) for role in ROLES)


def test_products_table_says_what_matmul_reads() -> None:
    """Six different formats; each product fails exactly where one of its two parts is missing."""
    shapes = {"input": (4, 6), "weight": (5, 6), "grad_output": (4, 5)}
    multiply = {
        "fprop": lambda a: a["input"] @ a["weight"].T,
        "dgrad": lambda a: a["grad_output"] @ a["weight"],
        "wgrad": lambda a: a["grad_output"].T @ a["input"],
    }
    arrays = {
        role: hq.quantize(np.ones(shape, np.float32), rowwise="mxfp8", columnwise="nvfp4")
        for role, shape in shapes.items()
    }
    for product, operands in PRODUCTS.items():
        for role in ROLES:
            for index, direction in enumerate(("rowwise", "columnwise")):
                lacking = {**arrays, role: arrays[role].drop(**{direction: True})}
                if (role, index) in operands:
                    with pytest.raises(ValueError, match="this HybridArray"):
                        multiply[product](lacking)
                else:
                    multiply[product](lacking)


def test_former_name_is_still_understood() -> None:
    assert as_recipe("fp8_e5m2_gradient") is hq.RECIPES["fp8_current"]


def test_columns_come_from_rows_where_the_backward_pass_should_see_the_forward_one() -> None:
    """TransformerEngine's factories take weights, and for a wide backward pass inputs, from what the rows became."""
    from_rows = {name: recipe.from_rows for name, recipe in hq.RECIPES.items() if recipe.from_rows}
    both = ("input", "weight")
    assert from_rows == {
        "nvfp4_1d_weight": ("weight",), "mxfp8_forward_nvfp4_backward": ("weight",),
        "mxfp8_forward_bf16_backward": both, "nvfp4_forward_bf16_backward": both,
        "nvfp4_row_forward_bf16_backward": both, "nvfp4_row_forward_mxfp8_backward": both,
    }
    recipe = Recipe("mxfp8", "mxfp8", "mxfp8", from_rows=["weight", "input"])  # type: ignore[arg-type]
    assert recipe.from_rows == both and recipe == Recipe("mxfp8", "mxfp8", "mxfp8", both)
    assert [recipe.source(role) for role in ROLES] == ["rowwise_dequantized"] * 2 + ["original"]


def test_names_tell_recipes_apart() -> None:
    plain = Recipe("fp8_e5m2", "fp8_e5m2", "fp8_e5m2")
    derived = Recipe("fp8_e5m2", "fp8_e5m2", "fp8_e5m2", ("input",))
    delayed = Recipe("fp8_e5m2", "fp8_e5m2", "fp8_e5m2", (), Delayed(16, "most_recent"))
    assert plain.name == "fp8_e5m2"
    assert derived.name.endswith(",from_rows=input")
    assert delayed.name.endswith(",delayed=most_recent16")
    rules = [
        Delayed(length, take, margin)  # type: ignore[arg-type]
        for length in (1, 10, 1024) for take in ("max", "most_recent") for margin in (-1, 0, 1, 10)
    ]
    assert len({replace(plain, delayed=rule).name for rule in rules}) == len(rules)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"from_rows": "weight"}, ValueError, "from_rows='weight' is not a tuple of 'input', 'weight', 'grad_output'"),
        ({"from_rows": ("output",)}, ValueError, "is not a tuple of 'input'"),
        ({"delayed": 16}, TypeError, "delayed=16 is int; give Delayed"),
        ({"delayed": Delayed()}, ValueError, "FP8, NVFP4.; mxfp8 measure each block"),
    ],
)
def test_fields_beside_formats_are_checked(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Recipe("mxfp8", "mxfp8", "mxfp8", **given)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_1d_weight", "mxfp8_forward_nvfp4_backward"])
def test_delayed_scaling_of_a_rotated_part_is_refused_when_the_recipe_is_made(name: str) -> None:
    """Its scale is made of the amax of rotated values, which no step records."""
    with pytest.raises(ValueError, match=r"the input has a part nvfp4\(rht=true\), .*; use formats without rht"):
        replace(hq.RECIPES[name], delayed=Delayed())
    with pytest.raises(ValueError, match=r"the weight has a part nvfp4\(rht=true\)"):
        Recipe(("mxfp8", "mxfp8"), ("fp8_e4m3", "nvfp4(rht=true)"), ("nvfp4(rht=true)", "mxfp8"), delayed=Delayed())


def test_delayed_scaling_of_rotated_rows_that_have_a_scale_each_is_legal() -> None:
    rotated = "nvfp4(rht=true,per_row=true)"
    recipe = Recipe((rotated, "fp8_e4m3"), (rotated, "fp8_e4m3"), "fp8_e5m2", delayed=Delayed())
    assert recipe.measures_amax("input")


def test_a_rule_of_delayed_scaling_takes_any_integer() -> None:
    assert Delayed(np.int64(4), margin=np.int8(2)) == Delayed(4, margin=2)  # type: ignore[arg-type]
    assert repr(Delayed(np.int64(4))) == repr(Delayed(4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"length": 0}, ValueError, "length=0 keeps nothing"),
        ({"length": 2.0}, TypeError, "length=2.0 is float; give an integer"),
        ({"margin": True}, TypeError, "margin=True is bool"),
        ({"margin": np.True_}, TypeError, "margin=.* is bool"),
        ({"margin": 200}, ValueError, "margin=200 must be an exponent of two between -100 and 100"),
        ({"take": "mean"}, ValueError, "take='mean' is not 'max' or 'most_recent'"),
    ],
)
def test_rule_of_delayed_scaling_is_checked(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Delayed(**given)


def test_fields_take_names_formats_and_pairs() -> None:
    recipe = Recipe("mxfp8", ["mxfp8", "nvfp4"], (hq.MX(), hq.NVFP4()))  # type: ignore[arg-type]
    assert recipe.input == (hq.MX(), hq.MX())
    assert recipe.weight == recipe.grad_output == (hq.MX(), hq.NVFP4())
    assert recipe.name == "input=mxfp8,weight=mxfp8/nvfp4,grad_output=mxfp8/nvfp4"
    assert recipe["weight"] == recipe.weight


def test_uniform_nvfp4_is_not_named_as_the_recipe_with_square_weights() -> None:
    assert as_recipe(hq.FORMATS["nvfp4"]).name == "input=nvfp4,weight=nvfp4,grad_output=nvfp4"
    assert as_recipe("nvfp4") != as_recipe(hq.FORMATS["nvfp4"])


def test_name_with_options_is_a_uniform_recipe() -> None:
    recipe = as_recipe(" mxfp8(rule=floor)")
    assert recipe.formats == (hq.MX(rule="floor"),)
    assert recipe.name == "mxfp8(rule=floor)"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("nvfp5", ValueError, "unknown recipe or format 'nvfp5'; did you mean 'nvfp4'"),
        ("", ValueError, "unknown recipe or format ''; known: bf16"),
        ("mxfp8(rule=up", ValueError, "lacks the closing bracket"),
        (7, TypeError, "not int: 7"),
    ],
)
def test_errors_say_what_is_known(given: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        as_recipe(given)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize("pair", [("mxfp8",), ("mxfp8", "mxfp8", "mxfp8"), 3, None])
def test_pair_is_one_format_or_two(pair: object) -> None:
    with pytest.raises(TypeError, match="weight is a format or a"):
        Recipe("mxfp8", pair, "mxfp8")  # type: ignore[arg-type]


def test_role_that_does_not_exist_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="input, weight, grad_output"):
        hq.RECIPES["fp8"]["output"]  # type: ignore[index]
