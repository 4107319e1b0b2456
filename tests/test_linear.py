"""linear_forward and linear_backward against the three products they are, on NumPy and on a GPU."""

import numpy as np
import pytest

import hqarray as hq
from hqarray import testing
from hqarray.formats import BFLOAT16
from hqarray.linear import STEP


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    return np if request.param == "numpy" else pytest.importorskip("cupy")


def operands(xp, lead=(24,), n=40, k=72, dtype=np.float32):
    shapes = ((*lead, k), (n, k), (*lead, n))
    return [xp.asarray(testing.matrix("gauss", shape, dtype, seed=seed)) for seed, shape in enumerate(shapes)]


AMAX = np.array([5, 3, 7], np.float32)


def given(xp, recipe):
    """What a recipe needs besides the operands."""
    return {"seed": 5, "amax": xp.asarray(AMAX) if hq.RECIPES[recipe].delayed else None}


@pytest.mark.parametrize("recipe", hq.RECIPES)
def test_the_three_products_are_those_of_the_recipes_formats(xp, recipe):
    x, w, dy = operands(xp)
    y, saved = hq.linear_forward(x, w, recipe, **given(xp, recipe))
    dx, dw = hq.linear_backward(dy, saved)
    pairs = hq.as_recipe(recipe)
    hx, hw, hdy = (
        hq.quantize(values, rowwise=pairs[role][0], columnwise=pairs[role][1], columnwise_source=pairs.source(role),
                    amax=AMAX[i] if pairs.delayed else None, seed=5 + i * STEP % 2**64)
        for i, (role, values) in enumerate((("input", x), ("weight", w), ("grad_output", dy)))
    )
    testing.assert_bitwise_equal(y, hx @ hw.T)
    testing.assert_bitwise_equal(dx, hdy @ hw)
    testing.assert_bitwise_equal(dw, hdy.T @ hx)


@pytest.mark.parametrize("recipe", hq.RECIPES)
def test_gradients_that_are_not_needed_cost_nothing_and_change_no_others(xp, recipe):
    x, w, dy = operands(xp)
    y, saved = hq.linear_forward(x, w, recipe, **given(xp, recipe))
    wanted = hq.linear_backward(dy, saved)
    for needs in ((True, False), (False, True), (False, False)):
        again, saved = hq.linear_forward(x, w, recipe, needs=needs, **given(xp, recipe))
        testing.assert_bitwise_equal(again, y)
        assert (saved.w is not None, saved.x is not None) == needs and (saved.nbytes > 0) == any(needs)
        for needed, gradient, expected in zip(needs, hq.linear_backward(dy, saved), wanted, strict=True):
            assert (gradient is not None) == needed
            if needed:
                testing.assert_bitwise_equal(gradient, expected)


def test_operands_quantized_in_one_direction_serve_where_no_gradient_is_needed():
    x, w, _ = operands(np)
    hx, hw = (hq.quantize(values, rowwise="mxfp8") for values in (x, w))
    y, _ = hq.linear_forward(hx, hw, "mxfp8", needs=(False, False))
    testing.assert_bitwise_equal(y, hq.linear_forward(x, w, "mxfp8")[0])
    with pytest.raises(ValueError, match=r"x is HybridArray.*the recipe wants rowwise=mxfp8, columnwise=mxfp8"):
        hq.linear_forward(hx, hw, "mxfp8")


@pytest.mark.parametrize("recipe", hq.RECIPES)
def test_gradients_are_close_to_the_unquantized_ones(xp, recipe):
    x, w, dy = operands(xp)
    y, saved = hq.linear_forward(x, w, recipe, **given(xp, recipe))
    results = (y, *hq.linear_backward(dy, saved))
    for actual, exact in zip(results, (x @ w.T, dy @ w, dy.T @ x), strict=True):
        error = float(xp.linalg.norm(actual - exact) / xp.linalg.norm(exact))
        assert error < (0.3 if "nvfp4" in recipe else 0.1), f"{recipe}: {error}"


def test_saved_holds_columnwise_parts_only_and_the_recipe(xp):
    x, w, _ = operands(xp)
    _, saved = hq.linear_forward(x, w, "mxfp8_forward_nvfp4_backward")
    for array in (saved.x, saved.w):
        assert [(name, type(part.format)) for name, part in array.parts()] == [("columnwise", hq.NVFP4)]
    assert saved.recipe is hq.RECIPES["mxfp8_forward_nvfp4_backward"]
    assert saved.nbytes == saved.x.nbytes + saved.w.nbytes


def test_leading_axes_are_summed_into_the_weights_gradient(xp):
    x, w, dy = operands(xp, lead=(2, 3, 5))
    y, saved = hq.linear_forward(x, w, "mxfp8")
    dx, dw = hq.linear_backward(dy, saved)
    assert (y.shape, dx.shape, dw.shape) == ((2, 3, 5, 40), (2, 3, 5, 72), (40, 72))
    flat_y, flat_saved = hq.linear_forward(x.reshape(30, 72), w, "mxfp8")
    flat_dx, flat_dw = hq.linear_backward(dy.reshape(30, 40), flat_saved)
    for actual, flat in ((y, flat_y), (dx, flat_dx), (dw, flat_dw)):
        testing.assert_bitwise_equal(actual.reshape(flat.shape), flat)


def test_the_weights_gradient_accumulates_where_an_array_is_given(xp):
    x, w, dy = (values.astype(BFLOAT16) for values in operands(xp))
    y, saved = hq.linear_forward(x, w, "fp8")
    assert y.dtype == BFLOAT16
    total = xp.ones((40, 72), np.float32)
    _, dw = hq.linear_backward(dy, saved, dw=total)
    assert dw is total
    _, again = hq.linear_backward(dy, saved, dw=total)
    once = hq.matmul(*_wgrad(dy, saved), out_dtype=np.float32)
    np.testing.assert_allclose(_host(again), _host(1 + 2 * once), rtol=1e-5, atol=1e-4)


def _wgrad(dy, saved):
    return hq.quantize(dy, columnwise=saved.recipe.grad_output[1]).T, saved.x


def _host(array):
    return array.get() if hasattr(array, "get") else array


def test_a_weight_is_quantized_once_where_it_is_passed_quantized(xp):
    x, w, dy = operands(xp)
    hw = hq.quantize(w, rowwise="nvfp4_16x16", columnwise="nvfp4_16x16")
    y, saved = hq.linear_forward(x, hw, "nvfp4_nearest")
    testing.assert_bitwise_equal(y, hq.linear_forward(x, w, "nvfp4_nearest")[0])
    assert saved.w.columnwise is hw.columnwise
    with pytest.raises(ValueError, match=r"w is HybridArray.*the recipe wants rowwise=mxfp8, columnwise=mxfp8"):
        hq.linear_forward(x, hw, "mxfp8")
    del dy


def test_a_format_or_recipe_value_is_taken_for_a_recipe(xp):
    x, w, _ = operands(xp)
    for recipe in (hq.MX(), hq.Recipe("mxfp8", "mxfp8", "nvfp4"), "bf16", "fp32", "mxfp8(rule=floor)"):
        assert hq.linear_forward(x, w, recipe)[0].shape == (24, 40)


def test_unquantized_directions_take_the_dtype_of_their_array(xp):
    x, w, dy = operands(xp)
    recipe = hq.Recipe((hq.HighPrecision(), "mxfp8"), (hq.HighPrecision(), "mxfp8"), "mxfp8")
    y, saved = hq.linear_forward(x, w, recipe)
    np.testing.assert_allclose(_host(y), _host(x @ w.T), rtol=1e-4, atol=1e-4)
    hq.linear_backward(dy, saved)


def test_delayed_scaling_needs_its_amaxes_and_says_how(xp):
    x, w, _ = operands(xp)
    with pytest.raises(ValueError, match=r"pass amax=, 3 slots of state = hq.DelayedScaling\(3 \* layers"):
        hq.linear_forward(x, w, "fp8_delayed")
    for wrong in (xp.ones(2, np.float32), hq.DelayedScaling(4, like=x)[:]):
        with pytest.raises(ValueError, match=r"amax is 3 slots of a DelayedScaling or float32 \(3,\): x, w"):
            hq.linear_forward(x, w, "fp8_delayed", amax=wrong)


def test_slots_of_delayed_scaling_are_used_and_record_the_operands(xp):
    x, w, dy = operands(xp)
    state = hq.DelayedScaling(6, hq.Delayed(length=4), like=x)
    state.amax[3:] = xp.asarray(AMAX)
    y, saved = hq.linear_forward(x, w, "fp8_delayed", amax=state[3:])
    dx, dw = hq.linear_backward(dy, saved)
    plain, kept = hq.linear_forward(x, w, "fp8_delayed", amax=xp.asarray(AMAX))
    for actual, wanted in zip((y, dx, dw), (plain, *hq.linear_backward(dy, kept)), strict=True):
        testing.assert_bitwise_equal(actual, wanted)
    assert _host(state.current).tolist() == [0, 0, 0, *(float(abs(values).max()) for values in (x, w, dy))]


def test_amaxes_are_given_to_formats_that_have_one_alone(xp):
    """Static scaling: float32 (3,) with any recipe; the input is MXFP8 in both directions here."""
    x, w, dy = operands(xp)
    recipe = hq.Recipe("mxfp8", ("mxfp8", "fp8_e4m3"), ("fp8_e4m3", "mxfp8"))
    _, saved = hq.linear_forward(x, w, recipe, amax=xp.asarray(AMAX))
    assert _host(saved.w.columnwise.amax).tolist() == [3]
    dx, _ = hq.linear_backward(dy, saved)
    testing.assert_bitwise_equal(dx, hq.quantize(dy, rowwise="fp8_e4m3", amax=7.0) @ saved.w)


def test_shapes_that_do_not_fit_are_named(xp):
    x, w, dy = operands(xp)
    with pytest.raises(ValueError, match=r"needs x \(\.\.\., k\) and w \(n, k\), these are \(24, 72\) and \(72, 40\)"):
        hq.linear_forward(x, w.T, "fp8")
    _, saved = hq.linear_forward(x, w, "fp8")
    with pytest.raises(ValueError, match=r"dy must have the shape of y, \(24, 40\), it has \(40, 24\)"):
        hq.linear_backward(dy.T, saved)


def test_a_recipe_that_rotates_one_operand_only_is_refused_when_it_is_made():
    rotated = hq.NVFP4(rht=True)
    hq.Recipe(("nvfp4", rotated), "nvfp4", ("nvfp4", rotated))
    with pytest.raises(ValueError, match=r"wgrad would multiply nvfp4 by nvfp4.*one is Hadamard-rotated"):
        hq.Recipe(("nvfp4", rotated), "nvfp4", "nvfp4")


RANDOM = hq.Recipe(
    ("nvfp4", "nvfp4(rht=true)"), "nvfp4(rounding=stochastic)",
    ("nvfp4(rounding=stochastic)", "nvfp4(rounding=stochastic,rht=true)"),
)


def test_seeds_decide_what_a_stochastic_recipe_gives():
    x, w, dy = (testing.matrix("gauss", shape, seed=i) for i, shape in enumerate(((40, 64), (24, 64), (40, 24))))

    def step(forward, backward):
        y, saved = hq.linear_forward(x, w, RANDOM, seed=forward)
        return y, *hq.linear_backward(dy, saved, seed=backward)

    first = step(1, 2)
    for ours, theirs in zip(first, step(np.array([1], np.uint64), np.array([2], np.int64)), strict=True):
        testing.assert_bitwise_equal(ours, theirs)
    for ours, other in zip(first, step(3, 4), strict=True):
        assert not np.array_equal(ours, other)
    exact = (x @ w.T, dy @ w, dy.T @ x)
    assert all(np.linalg.norm(a - b) < 0.3 * np.linalg.norm(b) for a, b in zip(first, exact, strict=True))
    with pytest.raises(ValueError, match=r"nvfp4\(rounding=stochastic\) rounds at random and needs seed="):
        hq.linear_forward(x, w, RANDOM)


def test_x_and_w_of_one_seed_draw_other_numbers():
    x = testing.matrix("gauss", (32, 64))
    _, saved = hq.linear_forward(x, x, "nvfp4(rounding=stochastic)", seed=5)
    assert not np.array_equal(saved.x.columnwise.codes, saved.w.columnwise.codes)


@pytest.mark.parametrize("seed", [np.float64(1.5), np.array([3.7]), np.array([3], np.int32), [True], np.array(["a"])],
                         ids=str)
def test_seeds_of_later_operands_are_checked_as_the_first_one_is(seed):
    x = testing.matrix("gauss", (32, 64), np.float32)
    _, saved = hq.linear_forward(x, x, "nvfp4", seed=7)
    with pytest.raises(TypeError, match="seed is an integer or an array of one uint64 or int64"):
        hq.linear_backward(np.ones((32, 32), np.float32), saved, seed=seed)
