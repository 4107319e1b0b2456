"""Tensor-parallel linear layers: pieces on 2 and 4 ranks against one rank, operands exactly, products in a bound."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import rank_work
from test_distributed import pool  # noqa: F401  a fixture

import hqarray as hq
from hqarray.formats import BFLOAT16
from hqarray.interop.distributed import Alone
from hqarray.interop.parallel import Spread, parallel_backward, parallel_forward
from hqarray.linear import quantize_operand
from hqarray.recipes import as_recipe

SIZES = (300, 272, 390)  # m, n, k

RECIPES = ["bf16", "fp8_current", "mxfp8", "nvfp4_nearest", "nvfp4", "mxfp8_forward_nvfp4_backward", "fp8_block"]


def bound(a, b, is_fp8=False):
    """Of float32 sums in any order, over ranks too: (k + 8) 2^-24 sum |a_ik b_kj|, for each element.

    is_fp8  multiplied by Hopper's FP8 tensor cores, which keep 13 bits: as test_gemm_cuda.py bounds them
    """
    k = a.shape[1]
    return ((k + 8) * 2.0**-24 + (min(k, 16) * 2.0**-13 + 2.0**-15) * is_fp8) * (np.abs(a) @ np.abs(b)) + 1e-30


def quantized(recipe, sizes, dtype):
    """x, w and dy as one rank has them."""
    return [quantize_operand(value.astype(dtype), as_recipe(recipe), role, seed=rank_work.SEED)
            for value, role in zip(rank_work.operands(sizes), ("input", "weight", "grad_output"), strict=True)]


def decoded(array, direction):
    """The values of a part as the GEMM has them: rotated ones stay rotated, as both operands of a product are."""
    part = array.part(direction)
    if part.format.storage.rht:
        part = hq.QuantizedArray.from_buffers(
            part.codes, part.scales, replace(part.format, rht=False), part.shape, global_scale=part.global_scale
        )
    return hq.HybridArray(part).dequantize(dtype=np.float32).astype(np.float64)


def products(recipe, sizes, dtype=np.float32, *, on_gpu=False):
    """x, and the three products in float64 from the operands of one rank, each with its bound."""
    x, w, dy = quantized(recipe, sizes, dtype)
    pairs = [(decoded(x, "rowwise"), decoded(w, "rowwise").T), (decoded(dy, "rowwise"), decoded(w, "columnwise").T),
             (decoded(dy, "columnwise"), decoded(x, "columnwise").T)]
    is_fp8 = on_gpu and recipe.startswith("fp8")
    return x, [(a @ b, bound(a, b, is_fp8)) for a, b in pairs]


@pytest.mark.parametrize("kind", ["columns", "rows"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_pieces_of_the_three_products_are_within_the_bound_of_one_rank(recipe, kind, pool):  # noqa: F811
    spread = Spread.even(kind, SIZES, pool.size, recipe)
    x, wanted = products(recipe, SIZES, on_gpu=pool.backend != "gloo")
    shardings = (spread.y, spread.x, spread.w)
    for rank, (*found, saved, nbytes) in enumerate(pool.run(rank_work.linear_layer, spread, recipe, np.float32)):
        for piece, (value, most), sharding in zip(found, wanted, shardings, strict=True):
            assert piece.dtype == np.float32 and piece.shape == sharding.piece_shape(rank)
            mine = sharding.slices(rank)
            assert (np.abs(piece - value[mine]) <= most[mine]).all()
        if kind == "columns":  # the gathered operand of wgrad
            assert np.array_equal(saved, x.columnwise.buffers.base)
        assert nbytes > 0


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_sums_over_ranks_are_rounded_once(kind, pool):  # noqa: F811
    """bfloat16 comes of the float32 sum, not of bfloat16 summands."""
    spread = Spread.even(kind, SIZES, pool.size, "mxfp8")
    _, wanted = products("mxfp8", SIZES, BFLOAT16)
    for rank, (*found, _, _) in enumerate(pool.run(rank_work.linear_layer, spread, "mxfp8", BFLOAT16)):
        for piece, (value, most), sharding in zip(found, wanted, (spread.y, spread.x, spread.w), strict=True):
            mine = sharding.slices(rank)
            assert piece.dtype == BFLOAT16
            room = most[mine] + np.abs(value[mine]) * 2.0**-8
            assert (np.abs(piece.astype(np.float64) - value[mine]) <= room).all()


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_one_rank_is_the_layer_itself(kind):
    x, w, dy = rank_work.operands(SIZES)
    spread = Spread.even(kind, SIZES, 1, "mxfp8")
    y, saved = parallel_forward(x, w, "mxfp8", spread, Alone())
    dw = np.ones(w.shape, np.float32)
    dx, same = parallel_backward(dy, saved, Alone(), dw=dw)
    wanted, kept = hq.linear_forward(x, w, "mxfp8")
    dx_wanted, dw_wanted = hq.linear_backward(dy, kept)
    assert same is dw
    for found, value in ((y, wanted), (dx, dx_wanted)):
        np.testing.assert_array_equal(found, value)
    np.testing.assert_allclose(dw - 1, dw_wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["columns", "rows"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_gradients_that_are_not_needed_change_no_others(recipe, kind):
    x, w, dy = rank_work.operands(SIZES)
    spread = Spread.even(kind, SIZES, Alone(), recipe)
    y, saved = parallel_forward(x, w, recipe, spread, Alone(), seed=1)
    wanted = parallel_backward(dy, saved, Alone())
    for needs in ((True, False), (False, True), (False, False)):
        again, saved = parallel_forward(x, w, recipe, spread, Alone(), seed=1, needs=needs)
        np.testing.assert_array_equal(again, y)
        for needed, gradient, expected in zip(needs, parallel_backward(dy, saved, Alone()), wanted, strict=True):
            assert (gradient is not None) == needed
            if needed:
                np.testing.assert_array_equal(gradient, expected)


class Two(Alone):
    """One of two that never talk."""

    size = 2


@pytest.mark.parametrize("kind", ["columns", "rows"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_nearest", "fp8_current"])
def test_a_weight_that_is_quantized_once_serves_many_times(recipe, kind, pool):  # noqa: F811
    spread = Spread.even(kind, SIZES, pool.size, recipe)
    for found, wanted in zip(pool.run(rank_work.linear_layer, spread, recipe, np.float32, True),
                             pool.run(rank_work.linear_layer, spread, recipe, np.float32), strict=True):
        for actual, expected in zip(found[:4], wanted[:4], strict=True):
            np.testing.assert_array_equal(actual, expected)


class Deaf(Alone):
    """One that may not be asked for anything."""

    def _run(self, what, call, *given):
        raise AssertionError(what)


def test_a_weight_in_other_formats_is_refused_before_anything_is_sent():
    x, w, _ = rank_work.operands(SIZES)
    spread = Spread.even("columns", SIZES, 1, "mxfp8")
    with pytest.raises(ValueError, match=r"w is HybridArray.* the recipe wants rowwise=mxfp8, columnwise=mxfp8"):
        parallel_forward(x, hq.quantize(w, rowwise="mxfp8"), "mxfp8", spread, Deaf())


def test_what_is_no_piece_of_a_layer_says_what_is():
    x, w, dy = rank_work.operands(SIZES)
    spread = Spread.even("columns", SIZES, 1, "mxfp8")
    with pytest.raises(ValueError, match=r"w on rank 0 of 1 .*: give it w\[spread.w.slices\(ranks.rank\)\]"):
        parallel_forward(x, w[1:], "mxfp8", spread, Alone())
    with pytest.raises(ValueError, match=r"; x.reshape\(-1, \d+\) is 2-D"):
        parallel_forward(x[None], w, "mxfp8", spread, Alone())
    with pytest.raises(ValueError, match=r"has 2 pieces, and rank 0 of 1 .* Spread.even\('columns'"):
        parallel_forward(x, w, "mxfp8", Spread.even("columns", SIZES, 2, "mxfp8"), Alone())
    with pytest.raises(ValueError, match=r"the recipe fp8_block does not fit this Spread by columns, which Spread"):
        parallel_forward(x[:32], w, "fp8_block", Spread("columns", SIZES, (0, 32, 300), (0, 272, 272)), Two())
    _, saved = parallel_forward(x, w, "mxfp8", spread, Alone())
    with pytest.raises(ValueError, match="dy on rank 0 of 1"):
        parallel_backward(dy[1:], saved, Alone())
    for kind in ("columns", "rows"):
        with pytest.raises(TypeError, match="float32, float16 or bfloat16, not int32"):
            parallel_forward(x, w, "mxfp8", Spread.even(kind, SIZES, 1, "mxfp8"), Alone(), out_dtype=np.int32)


def test_delayed_amaxes_serve_a_spread_layer():
    x, w, dy = rank_work.operands(SIZES)
    state = hq.DelayedScaling(3)
    for _ in range(2):
        _, saved = parallel_forward(x, w, "fp8_delayed", Spread.even("rows", SIZES, 1, "fp8_delayed"), Alone(),
                                    amax=state[0:3])
        parallel_backward(dy, saved, Alone())
        Alone().all_reduce_max(state.current)
        state.update()
    assert state.amax.tolist() == [float(hq.amax(value)[0]) for value in (x, w, dy)]


def test_a_layer_that_cannot_be_spread_says_how_it_could_be():
    with pytest.raises(ValueError, match=r"a scale for each row .* spread by rows, cuts; spread it by columns"):
        Spread.even("rows", SIZES, 2, "nvfp4_row_forward_bf16_backward")
    assert Spread.even("columns", SIZES, 2, "nvfp4_row_forward_bf16_backward").x.sizes == (150, 150)
    with pytest.raises(ValueError, match="kind='both'"):
        Spread("both", SIZES, (0, 300), (0, 272))
    with pytest.raises(ValueError, match="borders rise from 0 to the 272 rows"):
        Spread("columns", SIZES, (0, 300), (0, 271))
