"""grouped_linear against one linear layer for each group, and the module over it."""

import numpy as np
import pytest

import hqarray as hq
from hqarray import testing

torch = pytest.importorskip("torch")

from hqarray.interop import torch as hqt  # noqa: E402
from hqarray.interop import torch_linear  # noqa: E402
from hqarray.interop.torch_arrays import as_array  # noqa: E402
from hqarray.interop.torch_linear import _sums  # noqa: E402


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def tensors(device, *shapes, dtype=torch.float32, grad=True):
    made = (torch.from_numpy(testing.matrix("gauss", s, seed=i)).to(device, dtype) for i, s in enumerate(shapes))
    return [tensor.requires_grad_(grad) for tensor in made]


def host(tensor):
    return as_array(tensor.detach().cpu())


def one_by_one(x, w, dy, sizes, recipe):
    """Oracle: results of linear for the rows of each group; nothing else in y and dx."""
    y, dx, dw = (np.zeros(tuple(t.shape), host(t).dtype) for t in (dy, x, w))
    start = 0
    for i, size in enumerate(sizes):
        rows = slice(start, start + size)
        group, weight = (t.detach().requires_grad_() for t in (x[rows], w[i]))
        result = hqt.linear(group, weight, recipe)
        gradients = torch.autograd.grad(result, (group, weight), dy[rows])
        y[rows], dx[rows], dw[i] = host(result), host(gradients[0]), host(gradients[1])
        start += size
    return y, dx, dw


def assert_near(actual, expected, device, k):
    """Bit for bit on the CPU; on a GPU a group's GEMM may sum in another order: within a bound by k, row by row."""
    if device == "cpu":
        return testing.assert_bitwise_equal(host(actual), expected)
    ours, theirs = host(actual).astype(np.float64), expected.astype(np.float64)
    unit = 2.0**-8 if expected.dtype.itemsize == 2 else 2.0**-13  # FP8 tensor cores keep about 13 bits of a sum
    size = np.abs(theirs).max(-1, keepdims=True)
    assert (np.abs(ours - theirs) <= unit * np.maximum(size, 1e-6) * max(1.0, k / 256)).all()
    return None


SIZES = {"ragged": [3, 0, 40, 7], "all_empty": [0, 0, 0, 0], "one": [0, 50, 0, 0], "short_of_T": [5, 9, 0, 16]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("recipe", [name for name, recipe in hq.RECIPES.items() if recipe.delayed is None])
def test_results_are_those_of_a_layer_for_each_group(recipe, case, dtype, device, monkeypatch):
    """All draw by one seed: a member of a group draws as if alone."""
    draw = torch_linear._seeds
    monkeypatch.setattr(torch_linear, "_seeds", lambda *given: torch.manual_seed(4) and draw(*given))
    sizes = SIZES[case]
    x, w, dy = tensors(device, (50, 64), (4, 48, 64), (50, 48), dtype=dtype)
    y = hqt.grouped_linear(x, w, sizes, recipe)
    dx, dw = torch.autograd.grad(y, (x, w), dy.detach())
    wanted = one_by_one(x, w, dy.detach(), sizes, recipe)
    for name, actual, expected, k in zip(("y", "dx", "dw"), (y, dx, dw), wanted, (64, 48, 50), strict=True):
        assert (actual.dtype, actual.device.type, tuple(actual.shape)) == (dtype, device, expected.shape), name
        assert_near(actual, expected, device, k)
    for i, size in enumerate(sizes):
        assert size or not dw[i].any(), "an empty group has a gradient"
    assert not y[sum(sizes):].any() and not dx[sum(sizes):].any(), "rows of no group"


def test_delayed_scaling_has_a_slot_for_each_group_of_each_operand(device):
    sizes = SIZES["ragged"]
    x, w, dy = tensors(device, (50, 64), (4, 48, 64), (50, 48))
    state = hq.DelayedScaling(12, like=x)
    amaxes = np.arange(1, 13, dtype=np.float32)
    state.amax[...] = as_array(torch.from_numpy(amaxes).to(device))
    y = hqt.grouped_linear(x, w, sizes, "fp8_delayed", amax=state[:])
    y.backward(dy.detach())
    for i, (start, size) in enumerate(zip((0, 3, 3, 43), sizes, strict=True)):
        rows = slice(start, start + size)
        given = torch.from_numpy(amaxes[i::4].copy()).to(device)
        alone = hqt.linear(x.detach()[rows], w.detach()[i], "fp8_delayed", amax=given)
        assert_near(y[rows], host(alone), device, 64)
        recorded = [float(state.current[j]) for j in (i, 4 + i, 8 + i)]
        largest = [float(t.detach().abs().max()) if t.numel() else 0.0 for t in (x[rows], w[i], dy[rows])]
        assert recorded == largest
    with pytest.raises(ValueError, match=r"amax is 12 slots of a DelayedScaling or float32 \(12,\)"):
        hqt.grouped_linear(x, w, sizes, "fp8_delayed", amax=state[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["host", "on_device"])
@pytest.mark.parametrize("case", SIZES)
def test_each_group_has_its_bias(case, dtype, on_device, device):
    """Oracle: linear with a bias for each group; its gradient is the float64 sum of the group's rows."""
    if on_device and device == "cpu":
        pytest.skip("sizes lie on a device beside tensors there")
    sizes = SIZES[case]
    x, w, dy, bias = tensors(device, (50, 64), (4, 48, 64), (50, 48), (4, 48), dtype=dtype)
    given = torch.tensor(sizes, device=device) if on_device else sizes
    y = hqt.grouped_linear(x, w, given, "mxfp8", bias)
    dx, dw, db = torch.autograd.grad(y, (x, w, bias), dy.detach())
    plain = torch.autograd.grad(hqt.grouped_linear(x, w, given, "mxfp8"), (x, w), dy.detach())
    assert torch.equal(dx, plain[0]) and torch.equal(dw, plain[1])
    start = 0
    for i, size in enumerate(sizes):
        rows = slice(start, start + size)
        assert_near(y[rows], host(hqt.linear(x[rows], w[i], "mxfp8", bias[i])), device, 64)
        exact = host(dy).astype(np.float64)[rows].sum(0)
        unit = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-20
        error = np.abs(host(db[i]).astype(np.float64) - exact)
        assert (error <= unit * np.abs(host(dy).astype(np.float64)[rows]).sum(0)).all()
        start += size
    assert db.dtype == dtype and not y[start:].any(), "rows of no group have a bias"


@pytest.mark.parametrize("case", SIZES)
def test_sums_of_groups_are_the_same_where_the_host_does_not_know_the_sizes(case, device):
    values = torch.arange(50 * 3, device=device, dtype=torch.bfloat16).reshape(50, 3) % 64
    sizes = torch.tensor(SIZES[case], device=device)
    assert torch.equal(_sums(values, sizes, ()), _sums(values, None, tuple(SIZES[case])))
    wrong = torch.tensor([-4, 10, 60, 5], device=device)  # cut off as the kernels do
    assert torch.equal(_sums(values, wrong, ()), _sums(values, None, (0, 10, 40, 0)))


def test_a_bias_alone_has_its_gradient(device):
    x, w, bias = tensors(device, (50, 64), (4, 48, 64), (4, 48))
    y = hqt.grouped_linear(x.detach(), w.detach(), SIZES["short_of_T"], "fp8", bias)
    db, = torch.autograd.grad(y.sum(), bias)
    assert host(db).tolist() == [[float(n)] * 48 for n in SIZES["short_of_T"]]


@pytest.mark.parametrize("make", [
    list, tuple, np.array, torch.tensor, lambda s: torch.tensor(s, dtype=torch.int32), lambda s: map(np.int64, s),
], ids=["list", "tuple", "numpy", "int64", "int32", "iterator"])
def test_sizes_are_integers_however_they_come(make):
    x, w = tensors("cpu", (50, 64), (4, 48, 64))
    wanted = hqt.grouped_linear(x, w, SIZES["ragged"], "mxfp8")
    y = hqt.grouped_linear(x, w, make(SIZES["ragged"]), "mxfp8")
    testing.assert_bitwise_equal(host(y), host(wanted))
    y.sum().backward()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", SIZES)
def test_sizes_on_a_gpu_are_not_read_by_the_host(case, dtype):
    x, w, dy = tensors("cuda", (50, 64), (4, 48, 64), (50, 48), dtype=torch.bfloat16)
    sizes = torch.tensor(SIZES[case], dtype=dtype, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        y = hqt.grouped_linear(x, w, sizes, "fp8")
        dx, dw = torch.autograd.grad(y, (x, w), dy.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for actual, expected, k in zip((y, dx, dw), one_by_one(x, w, dy.detach(), SIZES[case], "fp8"), (64, 48, 50),
                                   strict=True):
        assert_near(actual, expected, "cuda", k)


@pytest.mark.parametrize("needs", [(1, 0), (0, 1), (0, 0)], ids=str)
def test_gradients_are_computed_where_they_are_needed(needs, device):
    x, w = (t.requires_grad_(bool(n)) for t, n in zip(tensors(device, (50, 64), (4, 48, 64)), needs, strict=True))
    y = hqt.grouped_linear(x, w, SIZES["ragged"], "mxfp8")
    assert y.requires_grad == any(needs)
    if any(needs):
        y.sum().backward()
    assert [t.grad is not None for t in (x, w)] == [bool(n) for n in needs]


def test_a_second_derivative_is_refused(device):
    x, w = tensors(device, (50, 64), (4, 48, 64))
    dx, = torch.autograd.grad(hqt.grouped_linear(x, w, SIZES["ragged"], "mxfp8").sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        dx.sum().backward()


BAD = {
    "count": (lambda x, w: (x, w, [1, 2, 3], "fp8"), ValueError, "3 sizes and 4 weights"),
    "too_many": (lambda x, w: (x, w, [1, 2, 3, 45], "fp8"), ValueError, "end at row 51, the values have 50"),
    "negative": (lambda x, w: (x, w, [1, -2, 3, 4], "fp8"), ValueError, "group 1 would have -2 rows"),
    "floats": (lambda x, w: (x, w, torch.ones(4), "fp8"), TypeError, "sizes are integers, one for each group, not tor"),
    "one_number": (lambda x, w: (x, w, 50, "fp8"), TypeError, "sizes are integers, one for each group, not 50"),
    "bias": (lambda x, w: (x, w, [50, 0, 0, 0], "fp8", x[0]), ValueError, r"bias must have shape \(4, 48\), it has \("),
    "2-D": (lambda x, w: (x, w[0], [50], "fp8"), ValueError, r"needs x \(T, k\) and w \(num_groups, n, k\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case):
    make, error, text = BAD[case]
    with pytest.raises(error, match=text):
        hqt.grouped_linear(*make(*tensors("cpu", (50, 64), (4, 48, 64), grad=False)))


def test_a_module_has_a_weight_for_each_group_with_torchs_values(device):
    torch.manual_seed(0)
    layer = hqt.GroupedLinear(4, 64, 48, recipe="mxfp8", device=device)
    torch.manual_seed(0)
    for weight in layer.weight:
        testing.assert_bitwise_equal(host(weight), host(torch.nn.Linear(64, 48, False, device=device).weight))
    other = hqt.GroupedLinear(4, 64, 48, recipe="mxfp8", device=device)
    other.load_state_dict(layer.state_dict())
    x, = tensors(device, (50, 64))
    testing.assert_bitwise_equal(host(other(x, SIZES["ragged"])), host(layer(x, SIZES["ragged"])))
    assert hqt.GroupedLinear(2, 0, 4, recipe="fp8", dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_a_module_with_bias_has_torchs_values(device):
    torch.manual_seed(0)
    layer = hqt.GroupedLinear(3, 64, 48, bias=True, recipe="mxfp8", device=device)
    torch.manual_seed(0)
    for weight, bias in zip(layer.weight, layer.bias, strict=True):
        alone = torch.nn.Linear(64, 48, device=device)
        testing.assert_bitwise_equal(host(weight), host(alone.weight))
        testing.assert_bitwise_equal(host(bias), host(alone.bias))
    assert "bias=True" in repr(layer) and set(layer.state_dict()) == {"weight", "bias"}
    x, = tensors(device, (50, 64))
    y = hqt.grouped_linear(x, layer.weight, [50, 0, 0], "mxfp8", layer.bias)
    testing.assert_bitwise_equal(host(layer(x, [50, 0, 0])), host(y))


def test_experts_learn(device):
    torch.manual_seed(0)
    sizes = [96, 0, 64, 96]
    layer = hqt.GroupedLinear(4, 32, 16, recipe="mxfp8").to(device)
    x, truth = torch.randn(256, 32).to(device), torch.randn(4, 16, 32).to(device) / 6
    target = torch.cat([g @ truth[i].t() for i, g in enumerate(x.split(sizes))])
    optimizer, losses, idle = torch.optim.Adam(layer.parameters(), 1e-2), [], layer.weight[1].detach().clone()
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(layer(x, sizes), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0], losses[::10]
    assert torch.equal(layer.weight[1], idle), "the weight of an expert without rows moved"


# --- torch's streams, memory and graphs -----------------------------------------------------------


@pytest.mark.gpu
def test_work_runs_on_torchs_current_stream():
    """A kernel that another stream's work would overtake: values are written late, and read after that."""
    x, w = tensors("cuda", (2048, 2048), (2048, 2048), dtype=torch.bfloat16)
    wanted = torch.autograd.grad(hqt.linear(x, w, "fp8").sum(), (x, w))
    late = torch.zeros_like(x).requires_grad_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            late.copy_(x)
        actual = torch.autograd.grad(hqt.linear(late, w, "fp8").sum(), (late, w))
    stream.synchronize()
    for one, other in zip(actual, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_all_memory_is_torchs_and_goes_back():
    import cupy

    x, w = tensors("cuda", (1024, 1024), (1024, 1024), dtype=torch.bfloat16)
    (w0, sizes) = w.detach().reshape(4, 256, 1024).requires_grad_(), torch.tensor([1, 0, 500, 2], device="cuda")

    def step():
        loss = hqt.linear(x, w, "mxfp8").float().sum() + hqt.grouped_linear(x, w0, sizes, "fp8").float().sum()
        torch.autograd.grad(loss, (x, w, w0))

    step()
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes(), torch.cuda.memory_allocated()
    for _ in range(5):
        step()
    assert (pool.used_bytes(), torch.cuda.memory_allocated()) == before


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
def test_a_captured_step_replays_with_other_sizes(recipe):
    x, w, dy = tensors("cuda", (512, 256), (4, 128, 256), (512, 128), dtype=torch.bfloat16)
    sizes = torch.tensor([128, 128, 128, 128], dtype=torch.int32, device="cuda")

    def step():
        y = hqt.grouped_linear(x, w, sizes, recipe)
        return (y, *torch.autograd.grad(y, (x, w), dy.detach()))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for given in ([1, 300, 0, 211], [0, 0, 512, 0], [16, 32, 48, 64]):
        sizes.copy_(torch.tensor(given, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        wanted = one_by_one(x, w, dy.detach(), given, recipe)
        for actual, expected, k in zip(results, wanted, (256, 128, 512), strict=True):
            assert_near(actual, expected, "cuda", k)
