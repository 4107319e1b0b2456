"""Linear layers with autograd: gradients against hqarray.linear_backward and finite differences, and torch's rules."""

import copy
import pickle
import warnings

import numpy as np
import pytest

import hqarray as hq
from hqarray import testing

torch = pytest.importorskip("torch")

from hqarray.interop import torch as hqt  # noqa: E402
from hqarray.interop import torch_linear  # noqa: E402
from hqarray.interop.torch_arrays import as_array  # noqa: E402


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def tensors(device, *shapes, dtype=torch.float32, grad=True):
    made = (torch.from_numpy(testing.matrix("gauss", s, seed=i)).to(device, dtype) for i, s in enumerate(shapes))
    return [tensor.requires_grad_(grad) for tensor in made]


def assert_same(actual, expected, name=""):
    testing.assert_bitwise_equal(host(actual), host(expected), name=name)


def host(array):
    if isinstance(array, torch.Tensor):
        return as_array(array.detach().cpu())
    return array.get() if hasattr(array, "get") else array


def drawn(device, seed=11):
    """What a layer draws next from torch's generator after manual_seed."""
    torch.manual_seed(seed)
    return int(torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=device)) % 2**64


# --- one matrix ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lead", [(24,), (2, 3, 5), (), (0,), (1,)], ids=str)
@pytest.mark.parametrize("recipe", [*hq.RECIPES, "mxfp4", "mxfp6_e2m3", "fp32"])
def test_results_are_those_of_linear_forward_and_backward(recipe, lead, dtype, device):
    x, w, dy = tensors(device, (*lead, 72), (40, 72), (*lead, 40), dtype=dtype)
    amax = torch.tensor([5.0, 3.0, 7.0], device=device) if hq.as_recipe(recipe).delayed else None
    torch.manual_seed(11)
    y = hqt.linear(x, w, recipe, amax=amax)
    dx, dw = torch.autograd.grad(y, (x, w), dy.detach())
    expected, saved = hq.linear_forward(
        as_array(x), as_array(w), recipe, seed=drawn(device), amax=None if amax is None else as_array(amax)
    )
    gradients = hq.linear_backward(as_array(dy), saved)
    for name, actual, wanted in zip(["y", "dx", "dw"], (y, dx, dw), (expected, *gradients), strict=True):
        assert actual.device.type == device and actual.dtype == dtype
        assert_same(actual, wanted, name)


RANDOM = hq.Recipe(
    ("nvfp4", "nvfp4(rht=true)"), "nvfp4", ("nvfp4(rounding=stochastic)", "nvfp4(rounding=stochastic,rht=true)")
)


def test_a_recipe_that_rounds_at_random_draws_from_torchs_generator():
    x, w, dy = tensors("cpu", (24, 64), (40, 64), (24, 40))

    def step(seed):
        torch.manual_seed(seed)
        y = hqt.linear(x, w, RANDOM)
        first = torch.autograd.grad(y, (x, w), dy.detach(), retain_graph=True)
        for once, again in zip(first, torch.autograd.grad(y, (x, w), dy.detach()), strict=True):
            assert_same(once, again)
        g = hqt.grouped_linear(x, w[None], [24], RANDOM)
        return y, *first, g, *torch.autograd.grad(g, (x, w), dy.detach())

    one, same, other = step(1), step(1), step(2)
    for a, b in zip(one, same, strict=True):
        assert_same(a, b)
    for number in (1, 2, 4, 5):  # forward rounds to nearest
        assert not torch.equal(one[number], other[number])
    torch.manual_seed(1)
    state = torch.get_rng_state()
    hqt.linear(x, w, "nvfp4_nearest")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_bias_is_added_in_float32_and_its_gradient_is_a_sum_over_rows(device):
    x, w, b, dy = tensors(device, (3, 8, 64), (32, 64), (32,), (3, 8, 32), dtype=torch.bfloat16)
    y = hqt.linear(x, w, "mxfp8", b)
    db, = torch.autograd.grad(y, b, dy.detach())
    hx, hw = (hq.quantize(as_array(t), rowwise="mxfp8") for t in (x, w))
    assert_same(y, hq.matmul(hx, hw.T, bias=as_array(b)))
    assert db.dtype == torch.bfloat16
    torch.testing.assert_close(db.float(), dy.detach().double().sum((0, 1)).float(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("kinds", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16"),
                                   ("float64", "float64"), ("float64", "bfloat16")], ids="-".join)
def test_gradients_have_the_dtypes_of_what_they_are_of(kinds, device):
    x, w = (t.detach().to(getattr(torch, kind)).requires_grad_() for t, kind in
            zip(tensors(device, (24, 64), (32, 64)), kinds, strict=True))
    y = hqt.linear(x, w, "mxfp8")
    assert y.dtype == torch.float32
    y.sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (x.dtype, w.dtype)
    same = torch.ones_like(y)
    hw, hdy = hq.quantize(as_array(w), columnwise="mxfp8"), hq.quantize(as_array(same), rowwise="mxfp8")
    exact = torch.from_numpy(host(hdy.dequantize(dtype=np.float32)) @ host(hw.dequantize(dtype=np.float32)))
    torch.testing.assert_close(x.grad.cpu().float(), exact, rtol=2**-7, atol=1e-4)


def test_strided_and_expanded_tensors_are_read_as_they_lie(device):
    x, w = tensors(device, (64, 24), (64, 32))
    y = hqt.linear(x.t(), w.t(), "nvfp4_nearest")
    y.sum().backward()  # dy is a scalar expanded
    flat = [t.detach().t().contiguous().requires_grad_() for t in (x, w)]
    same = hqt.linear(*flat, "nvfp4_nearest")
    same.backward(torch.ones_like(same))
    assert_same(y, same)
    for tensor, other in zip((x, w), flat, strict=True):
        assert_same(tensor.grad, other.grad.t().contiguous())


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0, 0, 0)], ids=str)
def test_only_what_a_gradient_needs_is_quantized(needs, device, monkeypatch):
    made = tensors(device, (16, 32), (16, 32), (16,))
    x, w, b = (t.requires_grad_(bool(n)) for t, n in zip(made, needs, strict=True))
    asked = []

    def quantize(values, *, rowwise=None, columnwise=None):  # neither a seed nor an amax
        asked.append((rowwise is not None, columnwise is not None))
        return hq.quantize(values, rowwise=rowwise, columnwise=columnwise)

    monkeypatch.setattr(torch_linear.ops, "quantize", quantize)
    y = hqt.linear(x, w, "mxfp8", b)
    assert asked == [(True, bool(needs[1])), (True, bool(needs[0]))], "a direction of x or w that is not read"
    assert y.requires_grad == any(needs)
    if any(needs):
        y.sum().backward()
        assert asked[2:] == ([(bool(needs[0]), bool(needs[1]))] if needs[0] or needs[1] else [])
        assert [t.grad is not None for t in (x, w, b)] == [bool(n) for n in needs]


def test_without_grad_mode_nothing_is_kept(device, monkeypatch):
    x, w = tensors(device, (16, 32), (16, 32))
    asked = []
    monkeypatch.setattr(torch_linear.ops, "quantize", lambda v, **f: asked.append(f) or hq.quantize(v, **f))
    with torch.no_grad():
        y = hqt.linear(x, w, "mxfp8")
    with torch.inference_mode():
        assert_same(hqt.linear(x, w, "mxfp8"), y)
    assert not y.requires_grad and all(f["columnwise"] is None for f in asked)


# --- finite differences -------------------------------------------------------------------------


def differences(function, at, step):
    """Central differences of a scalar function in float64."""
    gradient = np.zeros_like(at)
    for i in np.ndindex(at.shape):
        moved = at.copy()
        moved[i] += step
        up = function(moved)
        moved[i] -= 2 * step
        gradient[i] = (up - function(moved)) / (2 * step)
    return gradient


def test_gradients_of_an_unquantized_layer_are_its_finite_differences(device):
    x, w, b = tensors(device, (5, 12), (6, 12), (6,))
    weights = torch.from_numpy(testing.matrix("gauss", (5, 6), seed=9)).to(device)

    def loss(x, w, b):
        return (hqt.linear(x, w, "fp32", b).double() * weights).sum()

    gradients = torch.autograd.grad(loss(x, w, b), (x, w, b))
    given = [host(t).astype(np.float64) for t in (x, w, b)]
    for i, gradient in enumerate(gradients):
        def at(values, i=i):
            moved = [torch.from_numpy(v).to(device, torch.float32) for v in (*given[:i], values, *given[i + 1:])]
            return float(loss(*moved))
        np.testing.assert_allclose(host(gradient), differences(at, given[i], 2.0**-4), rtol=1e-3, atol=1e-3)


DETERMINED = [name for name, recipe in hq.RECIPES.items() if recipe.delayed is None and not recipe.from_rows
              and not any(format.is_stochastic or format.storage.rht for format in recipe.formats)]
"""Recipes whose parts are fake_quantize of the operand and its transpose."""


@pytest.mark.parametrize("recipe", [name for name in DETERMINED if name != "bf16"])
def test_gradients_are_finite_differences_of_the_fake_quantized_function(recipe, device):
    """Straight through: each product of float64 matrices that fake_quantize made, moved where it was quantized."""
    x, w, dy = tensors(device, (7, 40), (9, 40), (7, 9))
    y = hqt.linear(x, w, recipe)
    dx, dw = torch.autograd.grad(y, (x, w), dy.detach())
    formats, exact = hq.as_recipe(recipe), [host(t) for t in (x, w, dy)]
    atol = 1e-4 if device == "cpu" else 2e-3  # FP8 tensor cores keep 13 bits of the largest product: here up to 8

    def fake(values, role, direction):
        format = formats[role][direction]
        made = hq.fake_quantize(values, format) if direction == 0 else hq.fake_quantize(values.T, format).T
        return made.astype(np.float64)

    products = {  # the gradient of each: what is moved, and what it is multiplied by
        "dx": (dx, fake(exact[1], "weight", 1), fake(exact[2], "grad_output", 0), exact[0].shape),
        "dw": (dw, fake(exact[0], "input", 1), fake(exact[2], "grad_output", 1).T, exact[1].shape),
    }
    for name, (gradient, other, outer, shape) in products.items():
        at = np.zeros(shape)
        wanted = differences(lambda v, o=other, d=outer: float((d * (v @ o.T)).sum()), at, 1.0)
        np.testing.assert_allclose(host(gradient), wanted, rtol=1e-5, atol=atol, err_msg=name)
    forward = fake(exact[0], "input", 0) @ fake(exact[1], "weight", 0).T
    np.testing.assert_allclose(host(y), forward, rtol=1e-5, atol=atol)


def test_seeds_come_from_torchs_generator_and_each_call_draws_another(device):
    x, w, dy = tensors(device, (16, 64), (32, 64), (16, 32))

    def gradients(seed):
        torch.manual_seed(seed)
        results = [torch.autograd.grad(hqt.linear(x, w, "nvfp4"), (x, w), dy.detach()) for _ in range(2)]
        return [host(gradient) for pair in results for gradient in pair]

    first, again, other = gradients(1), gradients(1), gradients(2)
    for actual, wanted in zip(first, again, strict=True):
        testing.assert_bitwise_equal(actual, wanted)
    assert not np.array_equal(first[0], first[2]), "two calls"
    assert not np.array_equal(first[0], other[0]), "two seeds"


def test_checkpointing_repeats_the_draws(device):
    x, w, dy = tensors(device, (16, 64), (32, 64), (16, 32))
    recipe = hq.Recipe(("nvfp4(rounding=stochastic)", "nvfp4"), "nvfp4", "nvfp4(rounding=stochastic)")
    torch.manual_seed(3)
    plain = torch.autograd.grad(hqt.linear(x, w, recipe), (x, w), dy.detach())
    torch.manual_seed(3)
    kept = torch.utils.checkpoint.checkpoint(lambda a, b: hqt.linear(a, b, recipe), x, w, use_reentrant=False)
    for actual, wanted in zip(torch.autograd.grad(kept, (x, w), dy.detach()), plain, strict=True):
        assert_same(actual, wanted)


def test_slots_of_delayed_scaling_record_over_the_backward_pass(device):
    x, w, dy = tensors(device, (16, 64), (32, 64), (16, 32))
    state = hq.DelayedScaling(6, hq.Delayed(4), like=x)
    for _ in range(2):
        y = hqt.linear(x, w, "fp8_delayed", amax=state[3:])
        y.backward(dy.detach())
        assert host(state.current).tolist() == [0, 0, 0, *(float(t.detach().abs().max()) for t in (x, w, dy))]
        state.update()
    assert host(state.amax).tolist()[3:] == [float(t.detach().abs().max()) for t in (x, w, dy)]
    with pytest.raises(ValueError, match="fp8_delayed takes amaxes of earlier steps; pass amax=, 3 slots"):
        hqt.linear(x, w, "fp8_delayed")
    with pytest.raises(ValueError, match=r"amax is 3 slots of a DelayedScaling or float32 \(3,\): x, w and dy, not"):
        hqt.linear(x, w, "fp8_delayed", amax=torch.ones(2, device=device))
    for module in (hqt.Linear, lambda *given, **named: hqt.GroupedLinear(2, *given, **named)):
        with pytest.raises(ValueError, match=r"call linear\(..., amax=state"):
            module(8, 8, recipe="fp8_delayed")


# --- torch's rules ------------------------------------------------------------------------------


def test_a_second_derivative_is_refused(device):
    x, w, dy = tensors(device, (8, 32), (8, 32), (8, 8))
    for output_gradient in (dy, torch.ones_like(dy)):
        y = hqt.linear(x, w, "mxfp8")
        dx, = torch.autograd.grad(y, x, output_gradient, create_graph=True)
        plain, = torch.autograd.grad(hqt.linear(x, w, "mxfp8"), x, output_gradient.detach())
        assert_same(dx, plain)
        with pytest.raises(NotImplementedError, match=r"cannot be differentiated twice.*torch\.nn\.functional\.linear"):
            dx.square().sum().backward()


def test_another_kind_of_device_is_refused():
    x = torch.zeros(4, 32, device="meta")
    with pytest.raises(TypeError, match="x is on meta; hqarray computes on the CPU and on CUDA devices"):
        hqt.linear(x, x, "mxfp8")


TRANSFORMS = {
    "grad": lambda f, w: torch.func.grad(lambda w: f(w).sum())(w),
    "vmap": lambda f, w: torch.vmap(f)(torch.stack([w, w])),
    "jvp": lambda f, w: torch.func.jvp(f, (w,), (w,)),
    "jacrev": lambda f, w: torch.func.jacrev(f)(w),
    "forward_mode": lambda f, w: forward_mode(f, w),
    "batched_grads": lambda f, w: torch.autograd.functional.jacobian(lambda w: f(w).sum(), w, vectorize=True),
}


def forward_mode(f, w):
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(w, w))


@pytest.mark.filterwarnings("ignore:`torch.jit")  # by torch's own forward mode
@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped_linear"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_that_need_rules_of_their_own_are_refused_by_name(transform, grouped, device):
    x, w = (torch.randn(*shape).to(device) for shape in ((6, 32), (16, 32)))

    def layer(w):
        return hqt.grouped_linear(x, w[None], [6], "mxfp8") if grouped else hqt.linear(x, w, "mxfp8")

    with pytest.raises(NotImplementedError, match=r"hqarray's linear layers .*(autograd\.grad|leave out is_grads_ba)"):
        TRANSFORMS[transform](layer, w)


def test_a_module_is_called_with_other_parameters(device):
    layer = hqt.Linear(32, 16, recipe="mxfp8").to(device)
    x, other = torch.randn(4, 32).to(device), torch.randn(16, 32).to(device)
    y = torch.func.functional_call(layer, {"weight": other}, x)
    assert torch.equal(y, hqt.linear(x, other, "mxfp8", layer.bias))


def test_backward_twice_needs_retain_graph_and_saved_memory_is_freed(device):
    x, w = tensors(device, (64, 128), (32, 128))
    y = hqt.linear(x, w, "mxfp8").sum()
    first = torch.autograd.grad(y, (x, w), retain_graph=True)
    second = torch.autograd.grad(y, (x, w))
    for one, other in zip(first, second, strict=True):
        assert_same(one, other)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, (x, w))


def test_saved_is_the_memory_of_the_columnwise_parts(device):
    x, w = tensors(device, (64, 128), (32, 128))
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to(device)):
        y = hqt.linear(x, w, "fp8")
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    parts = [hq.quantize(as_array(t), columnwise="fp8_e4m3").columnwise for t in (x, w)]
    assert [(t.dtype, t.numel()) for t in seen] == [(torch.uint8, part.nbytes) for part in parts]
    for actual, wanted in zip((dx, dw), torch.autograd.grad(hqt.linear(x, w, "fp8").sum(), (x, w)), strict=True):
        assert_same(actual, wanted)


def test_checkpointing_gives_the_same_gradients(device):
    from torch.utils.checkpoint import checkpoint

    x, w = tensors(device, (16, 64), (64, 64))
    gradients = []
    for run in (lambda f, *t: f(*t), lambda f, *t: checkpoint(f, *t, use_reentrant=False)):
        y = run(lambda x, w: hqt.linear(torch.relu(hqt.linear(x, w, "mxfp8")), w, "mxfp8"), x, w)
        gradients.append(torch.autograd.grad(y.sum(), (x, w)))
    for one, other in zip(*gradients, strict=True):
        assert_same(one, other)


def test_autocast_gives_its_dtype_and_gradients_of_the_parameters(device):
    x, w, b = tensors(device, (16, 64), (32, 64), (32,))
    with torch.autocast(device, torch.bfloat16):
        y = hqt.linear(x, w, "mxfp8", b)
    assert y.dtype == torch.bfloat16
    assert_same(y, hqt.linear(x.bfloat16(), w.bfloat16(), "mxfp8", b.bfloat16()))
    y.sum().backward()
    assert {t.grad.dtype for t in (x, w, b)} == {torch.float32}


def test_what_is_written_to_an_input_afterwards_does_not_change_gradients(device):
    x, w = tensors(device, (16, 64), (32, 64))
    y = hqt.linear(x, w, "bf16")
    wanted = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    with torch.no_grad():
        x.zero_()
        w.zero_()
    for actual, other in zip(torch.autograd.grad(y.sum(), (x, w)), wanted, strict=True):
        assert_same(actual, other)


@pytest.mark.parametrize("needs_grad", [True, False], ids=["training", "inference"])
def test_torch_compile_breaks_its_graph_and_computes_the_same(needs_grad):
    x, w = tensors("cpu", (16, 32), (24, 32), grad=needs_grad)

    def layer(x, w):
        return torch.relu(hqt.linear(torch.sin(x), w, "mxfp8")) * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler
        y = torch.compile(layer, backend="eager")(x, w)
    assert_same(y, layer(x, w))
    if needs_grad:
        for one, other in zip(*(torch.autograd.grad(z.sum(), (x, w)) for z in (y, layer(x, w))), strict=True):
            assert_same(one, other)


BAD = {
    "array": (lambda x, w: (x.numpy(), w, "fp8"), TypeError, "x is ndarray, not a torch.Tensor"),
    "integers": (lambda x, w: (x.int(), w, "fp8"), TypeError, "x has dtype torch.int32; float32"),
    "shape": (lambda x, w: (x, w.t(), "fp8"), ValueError, r"needs x \(\.\.\., k\) and w \(n, k\), these are \(8, 32\)"),
    "bias": (lambda x, w: (x, w, "fp8", torch.ones(3)), ValueError, r"bias must have shape \(16,\), it has \(3,\)"),
    "device": (lambda x, w: (x, w.to("meta"), "fp8"), ValueError, "w is on meta, x on cpu; move one"),
    "recipe": (lambda x, w: (x, w, "fp7"), ValueError, "unknown recipe or format 'fp7'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case):
    make, error, text = BAD[case]
    with pytest.raises(error, match=text):
        hqt.linear(*make(*tensors("cpu", (8, 32), (16, 32), grad=False)))


# --- modules ------------------------------------------------------------------------------------


def test_a_module_has_the_parameters_and_values_of_torchs(device):
    torch.manual_seed(0)
    ours = hqt.Linear(64, 32, recipe="mxfp8", device=device, dtype=torch.bfloat16)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(64, 32, device=device, dtype=torch.bfloat16)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert_same(ours.state_dict()[name], value, name)
    theirs.reset_parameters()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert repr(ours) == "Linear(in_features=64, out_features=32, bias=True, recipe=mxfp8)"
    x, = tensors(device, (8, 64), dtype=torch.bfloat16)
    assert_same(ours(x), hqt.linear(x, ours.weight, "mxfp8", ours.bias))
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other.recipe == ours.recipe
        assert_same(other(x), ours(x))
    assert hqt.Linear(64, 32, False, recipe="nvfp4", device="meta").to_empty(device=device).bias is None


def test_a_module_says_its_formats_where_its_recipe_has_no_name():
    recipe = hq.Recipe("mxfp8", ("mxfp8", "nvfp4"), "nvfp4")
    assert "recipe=(mxfp8, mxfp8/nvfp4, nvfp4)" in repr(hqt.Linear(4, 4, recipe=recipe))
    assert repr(hqt.GroupedLinear(2, 4, 8, recipe="fp8")) == (
        "GroupedLinear(num_groups=2, in_features=4, out_features=8, bias=False, recipe=fp8)"
    )


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8_block", "mxfp8", "mxfp8_forward_nvfp4_backward", "nvfp4"])
def test_a_small_network_learns(recipe, device):
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        hqt.Linear(32, 64, recipe=recipe), torch.nn.Tanh(), hqt.Linear(64, 16, recipe=recipe)
    ).to(device)
    x = torch.randn(256, 32).to(device)
    target = torch.tanh(x @ torch.randn(32, 16).to(device) / 6)
    optimizer, losses = torch.optim.Adam(net.parameters(), 1e-2), []
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < (0.12 if "nvfp4" in recipe else 0.05) * losses[0], losses[::10]
