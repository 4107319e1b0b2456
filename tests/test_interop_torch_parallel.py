"""Layers over ranks in autograd: the same bits as the calls they are made of."""

import numpy as np
import pytest

pytest.importorskip("torch")

import rank_work
import torch
from test_distributed import pool  # noqa: F401  a fixture
from test_experts import ROOM, run
from test_parallel import SIZES

from hqarray.interop.distributed import Alone
from hqarray.interop.experts import make_route
from hqarray.interop.parallel import Spread
from hqarray.interop.torch import experts_linear, parallel_linear


def expect_equal(every, calls, count):
    """The first so many of what autograd gave on each rank, which is all, and of what the calls gave."""
    for found, wanted in zip(every, calls, strict=True):
        for actual, expected in zip(found, wanted[:count], strict=True):
            assert actual.dtype == np.float32
            np.testing.assert_array_equal(actual, expected.astype(np.float32))


@pytest.mark.parametrize("kind", ["columns", "rows"])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp8_current"])
def test_pieces_and_gradients_are_those_of_the_calls(recipe, kind, pool):  # noqa: F811
    spread = Spread.even(kind, SIZES, pool.size, recipe)
    expect_equal(pool.run(rank_work.torch_linear_layer, spread, recipe, np.float32),
                 pool.run(rank_work.linear_layer, spread, recipe, np.float32), 3)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("capacity", [None, ROOM], ids=["sizes known", "sizes on the device"])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_experts_and_gradients_are_those_of_the_calls(recipe, capacity, weighted, pool):  # noqa: F811
    every = run(pool, rank_work.torch_expert_layer, recipe, capacity, weighted)
    expect_equal(every, pool.run(rank_work.expert_layer, recipe, capacity, weighted), 3 + weighted)


@pytest.mark.parametrize("capacity", [None, ROOM], ids=["sizes known", "sizes on the device"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_network_of_experts_and_its_gradients_are_those_of_the_calls(recipe, capacity, pool):  # noqa: F811
    every = run(pool, rank_work.torch_expert_network, recipe, capacity)
    expect_equal(every, pool.run(rank_work.expert_network, recipe, capacity), 5)


def alone(recipe="mxfp8", kind="columns"):
    x, w = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((64, 96), (32, 96)))
    return x.requires_grad_(), w.requires_grad_(), Spread.even(kind, (64, 32, 96), 1, recipe)


def test_what_is_saved_passes_hooks_and_checkpointing_makes_it_again():
    x, w, spread = alone()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.dtype) or t.clone(), lambda t: t.clone()):
        y = parallel_linear(x, w, "mxfp8", spread, Alone())
    assert seen == [torch.uint8] * 2
    first = torch.autograd.grad(y.square().sum(), (x, w))
    y = torch.utils.checkpoint.checkpoint(parallel_linear, x, w, "mxfp8", spread, Alone(), use_reentrant=False)
    for a, b in zip(first, torch.autograd.grad(y.square().sum(), (x, w)), strict=True):
        assert torch.equal(a, b)


def test_autocast_and_dtypes_of_gradients():
    x, w, spread = alone()
    with torch.autocast("cpu", torch.bfloat16):
        y = parallel_linear(x, w, "mxfp8", spread, Alone())
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    y = parallel_linear(x.double().detach().requires_grad_(), w.half(), "mxfp8", spread, Alone())
    assert y.dtype == torch.float32


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_may_be_changed_in_place(dtype, device):
    x, w, spread = alone()
    x, w = (value.detach().to(device, dtype).requires_grad_() for value in (x, w))
    layers = [lambda: parallel_linear(x, w, "mxfp8", spread, Alone())]
    if device == "cpu":  # groups need a newer cuBLASLt than a GPU may have
        route = make_route(torch.zeros(64, 1, dtype=torch.int64), 1, Alone())
        layers += [lambda: experts_linear(x, w[None], route, "mxfp8", Alone()),
                   lambda: experts_linear(x, w[None], route, "mxfp8", Alone(), combines=False)]
    for layer in layers:
        y = layer()
        y += 1
        first = torch.autograd.grad(torch.relu_(y).sum(), (x, w))
        y = layer()
        for a, b in zip(first, torch.autograd.grad(torch.relu(y + 1).sum(), (x, w)), strict=True):
            assert torch.equal(a, b)


def test_a_seed_may_be_changed_before_the_backward_pass():
    x, w, spread = alone("nvfp4")
    seed = torch.tensor([7])
    y = parallel_linear(x, w, "nvfp4", spread, Alone(), seed=seed)
    seed += 1
    wanted = torch.autograd.grad(parallel_linear(x, w, "nvfp4", spread, Alone(), seed=7).sum(), (x, w))
    for a, b in zip(torch.autograd.grad(y.sum(), (x, w)), wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_only_what_gradients_need_is_gathered_and_kept(kind, monkeypatch):
    x, w, spread = alone(kind=kind)
    sent = []
    spread_bytes = Alone._spread
    monkeypatch.setattr(Alone, "_spread", lambda self, messages, *rest: sent.extend(mine.nbytes for mine, _ in messages)
                        or spread_bytes(self, messages, *rest))
    y = parallel_linear(x, w, "mxfp8", spread, Alone())
    both, sent[:] = sum(sent), []
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    in_backward, sent[:] = sum(sent), []
    with torch.no_grad():
        parallel_linear(x, w, "mxfp8", spread, Alone())
    assert (both, in_backward) == (2 * sum(sent), 0) if kind == "columns" else (not both and in_backward and not sent)
    for values in ((x, w.detach()), (x.detach(), w)):
        leaf = next(value for value in values if value.requires_grad)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # noqa: B023
            y = parallel_linear(*values, "mxfp8", spread, Alone())
        assert len(saved) == 1
        assert torch.equal(torch.autograd.grad(y.sum(), leaf)[0], dx if leaf is x else dw)


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_delayed_amaxes_are_those_of_the_whole(kind, pool):  # noqa: F811
    spread = Spread.even(kind, SIZES, pool.size, "fp8_delayed")
    each = pool.run(rank_work.torch_delayed_layer, spread)
    for amaxes in each:
        np.testing.assert_array_equal(amaxes, each[0])
    wanted = [np.abs(value).max() for value in rank_work.operands(SIZES)]
    np.testing.assert_array_equal(each[0], np.array(wanted, np.float32))


def test_what_is_refused():
    x, w, spread = alone()
    y = parallel_linear(x, w, "mxfp8", spread, Alone())
    gradient, = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        gradient.sum().backward()
    with pytest.raises(TypeError, match=r"x is ndarray, not a torch.Tensor"):
        parallel_linear(np.ones((64, 96)), w, "mxfp8", spread, Alone())
    with pytest.raises(ValueError, match=r"x on rank 0 of 1 .*\(63, 96\).* x\[spread.x.slices\(ranks.rank\)\]"):
        parallel_linear(x[1:], w, "mxfp8", spread, Alone())
    route = make_route(torch.zeros(64, 2, dtype=torch.int64), 1, Alone())
    with pytest.raises(TypeError, match=r"weights are a torch.Tensor on cpu as x is, not list"):
        experts_linear(x, w[None], route, "mxfp8", Alone(), weights=[1.0])
    with pytest.raises(ValueError, match=r"weights on rank 0 of 1 .* are \(64, 2\)"):
        experts_linear(x, w[None], route, "mxfp8", Alone(), weights=torch.ones(64, 3))
    for layer in (lambda: parallel_linear(x, w, "nvfp4", spread, Alone()),
                  lambda: experts_linear(x, w[None], route, "nvfp4", Alone())):
        with pytest.raises(ValueError, match="the recipe nvfp4 rounds at random and needs seed="):
            layer()
        with torch.no_grad():  # x and w are not
            layer()
