"""Expert parallelism on 2 and 4 ranks against all tokens on one rank: the same bytes, the same sums."""

import numpy as np
import pytest

pytest.importorskip("torch")

import rank_work
from rank_pool import Failed, Pool
from rank_work import EXPERTS, TOKENS, K, N
from test_distributed import PATIENCE, pool  # noqa: F401  a fixture
from test_parallel import Two

import hqarray as hq
from hqarray.formats import as_format
from hqarray.interop import expert_linear, experts
from hqarray.interop.distributed import Alone
from hqarray.interop.expert_linear import experts_backward, experts_forward
from hqarray.interop.experts import combine, dispatch, make_route
from hqarray.records import can_travel

ROOM = 2 * (TOKENS + 3)
"""Rows for each rank that are enough for all that any rank has."""

TRAVELLING = [name for name in (*hq.FORMATS, "nvfp4(rht=True)", "nvfp4(four_over_six=mse)", "mxfp8(rule=floor)")
              if can_travel(as_format(name).resolve(np.dtype(np.float32)))]


def everyone(size):
    """Tokens of all ranks, one after another, and how many each has."""
    each = [rank_work.tokens_of(rank) for rank in range(size)]
    return [np.concatenate(arrays) for arrays in zip(*each, strict=True)], [len(x) for x, *_ in each]


def grouped(size, name):
    """What one process makes of all tokens: sorted by expert, quantized as a group."""
    (x, choices, *_), _ = everyone(size)
    slots = np.argsort(choices.reshape(-1), kind="stable")
    sizes = [int((choices == expert).sum()) for expert in range(EXPERTS)]
    return hq.grouped_quantize(x[slots // choices.shape[1]], sizes, rowwise=name)


@pytest.mark.parametrize("capacity", [None, ROOM], ids=["sizes known", "sizes on the device"])
@pytest.mark.parametrize("name", TRAVELLING)
def test_tokens_arrive_as_the_group_that_one_process_would_quantize(name, capacity, pool):  # noqa: F811
    wanted = rank_work.members(grouped(pool.size, name))
    found = pool.run(rank_work.dispatched, name, capacity)
    members = [member for rank, _ in found for member in rank]
    assert len(members) == EXPERTS
    for actual, expected in zip(members, wanted, strict=True):
        for a, b in zip(actual, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_array_equal(a, b)
    assert all(is_zero for _, is_zero in found)  # rows of no expert


@pytest.mark.parametrize("capacity", [None, ROOM], ids=["sizes known", "sizes on the device"])
def test_what_goes_there_and_back_is_weighted_and_summed_in_place(capacity, pool):  # noqa: F811
    for rank, found in enumerate(pool.run(rank_work.there_and_back, capacity, None)):
        x, _, weights, _ = rank_work.tokens_of(rank)
        np.testing.assert_array_equal(found, x * weights[:, :1] + x * weights[:, 1:])
    for rank, found in enumerate(pool.run(rank_work.there_and_back, capacity, "mxfp8")):
        x, _, weights, _ = rank_work.tokens_of(rank)
        x = hq.fake_quantize(x, "mxfp8")
        np.testing.assert_array_equal(found, x * weights[:, :1] + x * weights[:, 1:])


def test_rows_beyond_the_capacity_come_back_as_zeros(pool):  # noqa: F811
    capacity = 11
    for rank, found in enumerate(pool.run(rank_work.there_and_back, capacity, None)):
        x, choices, weights, _ = rank_work.tokens_of(rank)
        order = np.argsort(choices.reshape(-1), kind="stable")
        owner = choices.reshape(-1)[order] // (EXPERTS // pool.size)
        kept = np.zeros(choices.size, np.float32)
        for peer in range(pool.size):
            kept[order[owner == peer][:capacity]] = 1
        kept = kept.reshape(choices.shape)
        np.testing.assert_array_equal(found, x * (weights * kept)[:, :1] + x * (weights * kept)[:, 1:])
        assert rank == 1 or kept.min() == 0


RECIPES = ["bf16", "mxfp8", "fp8_current", "nvfp4", "mxfp8_forward_bf16_backward", "fp8_block"]


def run(pool, layer, *args):  # noqa: F811
    """What a layer gives on each rank; skips where grouped products cannot be had."""
    try:
        return pool.run(layer, *args)
    except Failed as error:
        if "Unavailable: cuBLASLt" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise


def gathered(pool, layer, *args):  # noqa: F811
    """The same of all ranks, one after another."""
    return [np.concatenate(pieces) for pieces in zip(*run(pool, layer, *args), strict=True)]


def expect_near(found, wanted, pool, recipe):  # noqa: F811
    # Hopper's FP8 tensor cores keep 13 bits: 16 products at most lose 2^-13 of the largest (test_gemm_cuda.py)
    loose = 2.0**-9 if pool.backend != "gloo" and recipe.startswith("fp8") else 1e-6
    for actual, expected in zip(found, wanted, strict=True):
        assert actual.shape == expected.shape
        scale = np.abs(expected).max()
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=loose * scale)


@pytest.mark.parametrize("capacity", [None, ROOM], ids=["sizes known", "sizes on the device"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_of_experts_is_that_of_one_rank(recipe, capacity, pool):  # noqa: F811
    (x, choices, weights, dy), counts = everyone(pool.size)
    route = make_route(choices, EXPERTS, Alone())
    y, saved = experts_forward(x, rank_work.expert_weights(), route, recipe, Alone(), weights=weights,
                               seed=rank_work.SEED)
    wanted = [y, *experts_backward(dy, saved, Alone())]
    found = gathered(pool, rank_work.expert_layer, recipe, capacity)
    assert sum(counts) == len(found[0])
    expect_near(found, wanted, pool, recipe)
    assert not found[2][5].any()  # the expert that nobody chose


@pytest.mark.parametrize("capacity", [None, ROOM], ids=["sizes known", "sizes on the device"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_of_experts_one_after_another_send_their_tokens_once(recipe, capacity, pool):  # noqa: F811
    (x, choices, weights, dy), _ = everyone(pool.size)
    up = rank_work.expert_weights()
    down = up.transpose(0, 2, 1)[:, :N].copy()
    route = make_route(choices, EXPERTS, Alone())
    h, first = experts_forward(x, up, route, recipe, Alone(), seed=rank_work.SEED, combines=False)
    # the experts' rows are the products of all slots, sorted by expert
    slots = np.argsort(choices.reshape(-1), kind="stable")
    each, _ = experts_forward(x[slots // 2], up, make_route(choices.reshape(-1, 1)[slots], EXPERTS, Alone()), recipe,
                              Alone(), seed=rank_work.SEED)
    np.testing.assert_array_equal(h, each)
    *found, found_h, found_dh = gathered(pool, rank_work.expert_network, recipe, capacity)
    expect_near([found_h], [h], pool, recipe)
    # from here on with theirs: another last bit of a product is another code
    y, second = experts_forward(found_h * (found_h > 0), down, route, recipe, Alone(), weights=weights,
                                seed=rank_work.SEED, dispatches=False)
    dh, ddown, dweights = experts_backward(dy, second, Alone())
    expect_near([found_dh], [dh], pool, recipe)
    dx, dup, _ = experts_backward(found_dh * (found_h > 0), first, Alone())
    expect_near(found, [y, dx, dup, ddown, dweights], pool, recipe)


def test_one_rank_is_what_the_formulas_say():
    """y = sum of weights times products, and its gradients, token by token, from fake-quantized operands."""
    x, choices, weights, dy = rank_work.tokens_of(0)
    w = rank_work.expert_weights()
    route = make_route(choices, EXPERTS, Alone())
    y, saved = experts_forward(x, w, route, "bf16", Alone(), weights=weights)
    dx, dw, dweights = experts_backward(dy, saved, Alone())
    qx, qw = hq.fake_quantize(x, "bf16").astype(np.float64), hq.fake_quantize(w.reshape(-1, K), "bf16").reshape(w.shape)
    products = np.einsum("tk,tjnk->tjn", qx, qw[choices].astype(np.float64))
    scaled = hq.fake_quantize((dy[:, None] * weights[..., None]).reshape(-1, N), "bf16").reshape(*choices.shape, N)
    wanted = np.zeros_like(w, np.float64)
    for token, chosen in enumerate(choices):
        for choice, expert in enumerate(chosen):
            wanted[expert] += np.outer(scaled[token, choice], qx[token])
    for found, value in (
        (y, np.einsum("tj,tjn->tn", weights, products)), (dweights, np.einsum("tn,tjn->tj", dy, products)),
        (dx, np.einsum("tjn,tjnk->tk", scaled, qw[choices])), (dw, wanted),
    ):
        np.testing.assert_allclose(found, value, atol=1e-5 * np.abs(value).max())
    y, saved = experts_forward(x, w, route, "mxfp8", Alone())
    assert experts_backward(dy, saved, Alone())[2] is None


WEIGHTS = rank_work.expert_weights()


@pytest.mark.parametrize("capacity", [0.5, True, "8"])
def test_a_capacity_is_a_number_of_rows(capacity):
    with pytest.raises(TypeError, match="no number of rows for each rank; a capacity factor"):
        make_route(np.zeros((4, 1), np.int64), EXPERTS, Alone(), capacity=capacity)


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "mxfp8", "nvfp4", "nvfp4_row", "fp8_block_1x128"])
@pytest.mark.parametrize(("tokens", "top", "k", "n"), [(6, 2, 0, 4), (6, 0, 32, 4), (0, 2, 32, 4), (6, 2, 32, 0)])
def test_a_layer_without_tokens_choices_or_columns_is_legal(tokens, top, k, n, name):
    x, w, dy = (np.ones(shape, np.float32) for shape in ((tokens, k), (EXPERTS, n, k), (tokens, n)))
    for capacity in (None, 3):
        route = make_route(np.ones((tokens, top), np.int64), EXPERTS, Alone(), capacity=capacity)
        assert dispatch(x, route, Alone(), name).dequantize().shape == (route.arriving, k)
        weights = np.ones((tokens, top), np.float32)
        y, saved = experts_forward(x, w, route, name, Alone(), weights=weights, seed=1)
        dx, dw, dweights = experts_backward(dy, saved, Alone())
        assert y.shape == dy.shape and dx.shape == x.shape and dw.shape == w.shape and dweights.shape == weights.shape
        assert (k and top) or not y.any()


def test_what_a_capacity_leaves_out_is_counted_and_has_no_gradient():
    x, dy = np.ones((4, 32), np.float32), np.full((4, 8), 2, np.float32)
    dy[3] = np.inf
    route = make_route(np.zeros((4, 1), np.int64), 1, Alone(), capacity=2)
    assert route.dropped.tolist() == [2]
    assert make_route(np.zeros((4, 1), np.int64), 1, Alone()).dropped.tolist() == [0]
    y, saved = experts_forward(x, np.ones((1, 8, 32), np.float32), route, "bf16", Alone(),
                               weights=np.ones((4, 1), np.float32))
    dx, _, dweights = experts_backward(dy, saved, Alone())
    assert y[:, 0].tolist() == [32, 32, 0, 0] and dx[:, 0].tolist() == [16, 16, 0, 0]
    assert dweights[:, 0].tolist() == [512, 512, 0, 0]


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("capacity", [None, 3, 5])
def test_a_choice_that_is_no_expert_goes_nowhere(name, capacity, monkeypatch):
    """On a GPU nobody looks at choices; NumPy stands for it."""
    monkeypatch.setattr(experts, "_choices", lambda choices, *_: choices)
    choices, x = np.array([[1], [8], [0], [1], [2]]), np.arange(1, 6)[:, None] * np.ones((5, 32), np.float32)
    route = make_route(choices, EXPERTS, Alone(), capacity=capacity)
    assert route.sizes[:3].tolist() == ([1, 2, 1] if capacity != 3 else [1, 2, 0])
    for weights in (None, np.ones((5, 1), np.float32)):
        y = combine(dispatch(x, route, Alone(), name, weights=weights).dequantize(), route, Alone())
        np.testing.assert_allclose(y[:, 0], [1, 0, 3, 4, 5 if capacity != 3 else 0], rtol=0.1)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_comes_back_has_the_dtype_of_what_went(dtype):
    route = make_route(np.array([[1], [0]]), 2, Alone())
    for format in (None, "bf16", "mxfp8"):
        assert combine(np.ones((2, 32), dtype), route, Alone(), format=format).dtype == dtype


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp8_forward_bf16_backward", "fp8_block", "fp8_current"])
def test_gradients_that_are_not_needed_cost_nothing_and_change_no_others(recipe, monkeypatch):
    x, choices, weights, dy = rank_work.tokens_of(0)
    route, columns = make_route(choices, EXPERTS, Alone()), []
    quantize = expert_linear.grouped_quantize
    monkeypatch.setattr(expert_linear, "grouped_quantize", lambda values, sizes, *, columnwise=None, **options: (
        columns.append(columnwise is not None) or quantize(values, sizes, columnwise=columnwise, **options)))

    def layer(needs):
        y, saved = experts_forward(x, WEIGHTS, route, recipe, Alone(), weights=weights, seed=1, needs=needs)
        return y, experts_backward(dy, saved, Alone()), saved

    y, wanted, _ = layer((True, True, True))
    for needs in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        columns.clear()
        again, found, saved = layer(needs)
        np.testing.assert_array_equal(y, again)
        for needed, gradient, expected in zip(needs, found, wanted, strict=True):
            assert (gradient is not None) == needed
            if needed:
                np.testing.assert_array_equal(gradient, expected)
        assert sum(columns) == needs[0] + 2 * needs[1]  # of w; of x and dy
        kept = saved.w, saved.x, saved.returned
        assert [array is not None for array in kept] == list(needs)


@pytest.mark.parametrize(("call", "message"), [
    (lambda c, x: make_route(c, 7, Alone()), "choices on rank 0 of 1 .* from 0 to 7, the experts 0 to 6"),
    (lambda c, x: make_route(c - 1, EXPERTS, Alone()), "choices on rank 0 of 1 .* from -1 to 6, the experts 0 to 7"),
    (lambda c, x: make_route(c.astype(np.float32), EXPERTS, Alone()), r"integers \(tokens, top\), not float32"),
    (lambda c, x: make_route(c, EXPERTS, Alone(), capacity=-1), "capacity=-1"),
    (lambda c, x: dispatch(x[1:], make_route(c, EXPERTS, Alone()), Alone()), r"route's 37 tokens, not \(36, 96\)"),
    (lambda c, x: dispatch(x, make_route(c, EXPERTS, Alone()), Alone(), "nvfp4_16x16"), "blocks of many rows"),
    (lambda c, x: dispatch(x, make_route(c, EXPERTS, Alone()), Alone(), "nvfp4(rounding=stochastic)"), "at random"),
    (lambda c, x: combine(x, make_route(c, EXPERTS, Alone()), Alone()), r"of the 74 rows of dispatch's group"),
    (lambda c, x: combine(np.ones((74, 4), np.float32), make_route(c, EXPERTS, Alone()), Alone(), format="nvfp4"),
     "nvfp4 has one amax for all rows"),
    (lambda c, x: combine(np.ones((74, 4), np.float32), make_route(c, EXPERTS, Alone()), Alone(), weights=x),
     r"weights on rank 0 of 1 .* are \(37, 2\)"),
    (lambda c, x: experts_forward(x, x, make_route(c, EXPERTS, Alone()), "mxfp8", Alone()), r"w .* \(local, n, k\)"),
    (lambda c, x: experts_forward(x, x, make_route(c, EXPERTS, Alone()), "fp8_delayed", Alone()), "earlier steps"),
    (lambda c, x: experts_forward(x, WEIGHTS[:, :, :32], make_route(c, EXPERTS, Alone()), "mxfp8", Alone()),
     r"x on rank 0 of 1 .* is \(37, 32\), the route's tokens, and the k of w \(8, 48, 32\), not \(37, 96\)"),
    (lambda c, x: experts_forward(x, WEIGHTS, make_route(c, EXPERTS, Alone()), "mxfp8", Alone(), dispatches=False),
     r"is \(74, 96\), the route's rows of its experts"),
    (lambda c, x: experts_forward(x, WEIGHTS, make_route(c, EXPERTS, Alone()), "mxfp8", Alone(), combines=False,
                                  weights=np.ones((37, 2), np.float32)), "give them to the layer that combines"),
    (lambda c, x: experts_backward(x, experts_forward(x, WEIGHTS, make_route(c, EXPERTS, Alone()), "mxfp8", Alone())[1],
                                   Alone()), r"dy on rank 0 of 1 .* the shape of y, \(37, 48\), not \(37, 96\)"),
    (lambda c, x: dispatch(x, make_route(c, EXPERTS, Alone(), capacity=80), Two()),
     r"this Route is of 1 ranks, and rank 0 of 2 .* is one of 2"),
])
def test_what_is_no_dispatch_is_refused(call, message):
    x, choices, *_ = rank_work.tokens_of(0)
    with pytest.raises(ValueError, match=message):
        call(choices, x)


def test_tokens_that_are_not_the_routes_end_with_an_error_on_every_rank_and_no_hang():
    with Pool(2, engine_timeout=PATIENCE) as two:
        with pytest.raises(Failed) as caught:
            two.run(rank_work.unlike_tokens)
        assert "ValueError: x on rank 1 of 2" in str(caught.value)
        assert "CollectiveError: all_reduce_max failed on rank 0 of 2" in str(caught.value)
