"""Linear layers by pointers: what is kept of a call of linear gives the same bits for the next tensors of its kind."""

import gc
import threading

import numpy as np
import pytest

import hqarray as hq
from hqarray import testing

torch = pytest.importorskip("torch")

from hqarray.interop import torch as hqt  # noqa: E402
from hqarray.interop.torch_arrays import as_array  # noqa: E402

pytestmark = pytest.mark.gpu


def tensors(*shapes, dtype=torch.bfloat16, first=0):
    for seed, shape in enumerate(shapes, first):
        yield torch.from_numpy(testing.matrix("gauss", shape, np.float32, seed=seed)).to("cuda", dtype)


@pytest.fixture
def taken(monkeypatch):
    """Which calls went the short way: True or False for each forward ("y") and backward ("dx")."""
    from hqarray.interop import torch_steps

    torch_steps._steps.clear()
    ways = []

    def counted(call):
        def run(*args):
            done = call(*args)
            ways.append(done is not None)
            return done

        return run

    for name in ("run", "run_backward"):
        monkeypatch.setattr(torch_steps.Step, name, counted(getattr(torch_steps.Step, name)))
    return ways


def step(x, w, dy, recipe, bias=None, **given):
    """y and all gradients."""
    inputs = [t.requires_grad_() for t in (x, w, bias) if t is not None]
    torch.manual_seed(3)
    y = hqt.linear(x, w, recipe, bias, **given)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def assert_equal(actual, expected):
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        testing.assert_bitwise_equal(as_array(a).get(), as_array(b).get(), name=f"result {number}")


RECIPES = [name for name, recipe in hq.RECIPES.items() if recipe.delayed is None]
FROM_ROWS = [name for name in RECIPES if hq.RECIPES[name].from_rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lead", [(24,), (2, 3, 5), (), (1,), (1000,)], ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp4", "mxfp6_e2m3", "fp32", "fp8_row_e4m3", "nvfp4_row"])
def test_the_short_way_gives_the_bits_of_the_long_way(recipe, lead, dtype, taken):
    from hqarray.interop import torch_steps

    shapes = (*lead, 72), (40, 72), (*lead, 40)
    for first in (0, 10, 20):
        x, w, dy = tensors(*shapes, dtype=dtype, first=first)
        short = step(x, w, dy, recipe)
        kept = dict(torch_steps._steps)
        torch_steps._steps.clear()
        long = step(x.detach().clone(), w.detach().clone(), dy, recipe)
        assert_equal(short, long)
        torch_steps._steps.clear()
        torch_steps._steps.update(kept)
    assert taken.count(True) == (0 if recipe in FROM_ROWS else 4), "forward and backward of two calls of three"


@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_is_another_kind_and_is_added(bias, taken):
    shapes = (64, 128), (96, 128), (64, 96)
    for first in (0, 10, 20):
        x, w, dy = tensors(*shapes, first=first)
        added, = tensors((96,), dtype=bias, first=first)
        y, dx, dw, db = step(x, w, dy, "mxfp8", added)
        hx, hw = (hq.quantize(as_array(t), rowwise="mxfp8") for t in (x, w))
        testing.assert_bitwise_equal(as_array(y).get(), hq.matmul(hx, hw.T, bias=as_array(added)).get())
        assert_equal([dx, dw], step(x.detach(), w.detach(), dy, "mxfp8")[1:])
        torch.testing.assert_close(db.float(), dy.float().sum(0), rtol=2**-7, atol=1e-3)
    assert taken.count(True) >= 4


@pytest.mark.parametrize("needs", [(1, 0), (0, 1), (0, 0)], ids=str)
def test_only_what_a_gradient_needs_is_kept_and_computed(needs, taken):
    shapes = (64, 128), (96, 128), (64, 96)
    for first in (0, 10):
        x, w, dy = tensors(*shapes, first=first)
        wanted = step(x.clone(), w.clone(), dy, "fp8")
        inputs = [t.requires_grad_(bool(n)) for t, n in zip((x, w), needs, strict=True)]
        y = hqt.linear(x, w, "fp8")
        assert_equal([y.detach()], wanted[:1])
        assert y.requires_grad == any(needs)
        if any(needs):
            saved = [t for t in y.grad_fn.saved_tensors if t is not None]
            assert len(saved) == sum(needs)
            own = [t for t in inputs if t.requires_grad]
            expected = [t for t, n in zip(wanted[1:], needs, strict=True) if n]
            assert_equal(torch.autograd.grad(y, own, dy), expected)
    assert True in taken


def test_what_is_read_in_another_way_is_another_kind(taken):
    """Turned and padded matrices, rows that start between 16 bytes, gradients that are expanded or turned."""
    base = list(tensors((65, 136), (136, 65), (96, 128), (96, 64)))
    dys = [base[3].t(), base[3][:1, :1].expand(64, 96), base[3].t().contiguous()]
    views = [base[0][1:, 8:], base[1].t()[1:, 8:], base[0][:64, 4:132], base[0][:64, 1:129], base[1].t()[:64, :128]]
    for _ in range(3):
        for x in views:
            for dy in dys:
                w = base[2].detach()
                got = step(x.detach(), w, dy, "mxfp8")
                plain = step(x.detach().contiguous().clone(), w.clone(), dy.contiguous().clone(), "mxfp8")
                assert_equal(got, plain)
    assert taken.count(True) > 40


def test_streams_have_workspaces_of_their_own_and_threads_share_what_is_kept(taken):
    x, w, dy = tensors((128, 128), (128, 128), (128, 128))
    expected = step(x, w, dy, "fp8")
    found = {}

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(3):
                found[number] = step(x.detach(), w.detach(), dy, "fp8")
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        assert_equal(found[number], expected)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "fp8_block"])
def test_a_captured_graph_replays_a_step_on_new_values(recipe, taken):
    x, w, dy = tensors((64, 128), (96, 128), (64, 96))
    x.requires_grad_(), w.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(hqt.linear(x, w, recipe), (x, w), dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = hqt.linear(x, w, recipe)
        gradients = torch.autograd.grad(y, (x, w), dy)
    assert taken[-2:] == [True, True]
    new = list(tensors((64, 128), (96, 128), (64, 96), first=30))
    with torch.no_grad():
        for tensor, values in zip((x, w, dy), new, strict=True):
            tensor.copy_(values)
    graph.replay()
    torch.cuda.synchronize()
    if recipe == "nvfp4":  # draws, of torch's generator
        once = [t.clone() for t in gradients]
        graph.replay()
        torch.cuda.synchronize()
        assert not all(torch.equal(a, b) for a, b in zip(once, gradients, strict=True))
        assert_equal([y.detach()], step(*new, recipe)[:1])
    else:
        assert_equal([y.detach(), *gradients], step(*new, recipe))


def test_backward_keeps_the_columnwise_parts_alone():
    x, w, dy = tensors((256, 512), (256, 512), (256, 256))
    step(x, w, dy, "mxfp8")
    step(x, w, dy, "mxfp8")
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = hqt.linear(x, w, "mxfp8")
    parts = sum(hq.quantize(as_array(t.detach()), columnwise="mxfp8").nbytes for t in (x, w))
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    assert parts <= kept <= parts + 2 * 512


def test_hooks_on_saved_tensors_and_retained_graphs_work(taken):
    x, w, dy = tensors((64, 128), (96, 128), (64, 96))
    expected = step(x, w, dy, "fp8")
    for pack, unpack in ((lambda t: t.cpu(), lambda t: t.cuda()),
                         (lambda t: t, lambda t: torch.cat([t.new_zeros(8), t])[8:])):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = hqt.linear(x, w, "fp8")
        for _ in range(2):
            assert_equal(torch.autograd.grad(y, (x, w), dy, retain_graph=True), expected[1:])


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current"])
def test_slots_of_delayed_scaling_are_taken_and_recorded(recipe, taken):
    states = [hq.DelayedScaling(3, hq.Delayed(4), like=as_array(torch.zeros(1, device="cuda"))) for _ in range(2)]
    for first in (0, 10, 20, 30):
        x, w, dy = tensors((64, 128), (96, 128), (64, 96), first=first)
        y, dx, dw = step(x, w, dy, recipe, amax=states[0][0:3])
        expected, saved = hq.linear_forward(as_array(x), as_array(w), recipe, amax=states[1][0:3])
        others = hq.linear_backward(as_array(dy), saved)
        for actual, wanted in zip((y, dx, dw), (expected, *others), strict=True):
            testing.assert_bitwise_equal(as_array(actual).get(), wanted.get())
        np.testing.assert_array_equal(*(state.current.get() for state in states))
        for state in states:
            state.update()
    given = torch.tensor([4.0, 2.0, 8.0], device="cuda")
    for first in (0, 10, 20):
        x, w, dy = tensors((64, 128), (96, 128), (64, 96), first=first)
        y = step(x, w, dy, recipe, amax=given)[0]
        testing.assert_bitwise_equal(
            as_array(y).get(), hq.linear_forward(as_array(x), as_array(w), recipe, amax=as_array(given))[0].get())
    assert taken.count(True) == 10


def test_autocast_and_other_recipes_are_not_taken_for_what_is_kept(taken):
    x, w, dy = tensors((64, 128), (96, 128), (64, 96), dtype=torch.float32)
    step(x, w, dy, "fp8")
    with torch.autocast("cuda", torch.bfloat16):
        assert hqt.linear(x, w, "fp8").dtype == torch.bfloat16
    assert hqt.linear(x, w, "fp8").dtype == torch.float32
    for number in range(20):  # objects that come and go, each with the address of another, perhaps
        recipe = hq.Recipe(*[hq.MX("e2m1") if number % 2 else hq.MX()] * 3)
        wanted = hqt.linear(x, w, "mxfp4" if number % 2 else "mxfp8")
        assert torch.equal(hqt.linear(x, w, recipe), wanted)
        del recipe
        gc.collect()
    with pytest.raises(ValueError, match="linear needs x"):
        hqt.linear(x, w[:, :64], "fp8")
