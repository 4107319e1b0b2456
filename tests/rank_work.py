"""What ranks do in the tests of distributed work: functions that tests/rank_pool.py sends to them.

Each makes the whole matrix from a seed, takes its piece, and returns arrays of bytes to be compared with the whole's.
"""

from functools import cache

import numpy as np

import hqarray as hq
from hqarray import testing
from hqarray.interop.distributed import CollectiveError, as_ranks, exchange
from hqarray.interop.expert_linear import experts_backward, experts_forward
from hqarray.interop.experts import combine, dispatch, make_route
from hqarray.interop.parallel import Spread, parallel_backward, parallel_forward
from hqarray.interop.sharding import Sharding, all_gather, quantize_all_gather, quantize_sharded
from hqarray.recipes import as_recipe

SEED = 123


def here(ranks, array):
    """An array where the engine works."""
    if "nccl" not in ranks.engine.lower():
        return array
    import cupy

    array = cupy.asarray(array)
    cupy.cuda.get_current_stream().synchronize()  # it may be handed to torch, which has another stream
    return array


def host(array):
    if not hasattr(array, "get"):
        return array
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    return array.get()


@cache
def matrix(shape, seed=3):
    return testing.matrix("wide", shape, np.float32, seed=seed)


def base(part):
    return None if part is None else host(part.buffers.base)


def collectives(ranks):
    """Each of the four, with sizes alike, unlike and zero."""
    r, n, results = ranks.rank, ranks.size, {}
    mine = here(ranks, np.array([r, -r, np.inf if r == n - 1 else 0], np.float32))
    ranks.all_reduce_max(mine)
    results["max"] = host(mine)
    out = here(ranks, np.zeros((n, 3), np.float32))
    ranks.all_gather(here(ranks, np.full((1, 3), r, np.float32)), out)
    results["alike"] = host(out)
    sizes = [i % 3 for i in range(n)]
    out = here(ranks, np.zeros((sum(sizes), 2), np.uint8))
    ranks.all_gather(here(ranks, np.full((sizes[r], 2), r, np.uint8)), out, sizes)
    results["unlike"] = host(out)
    out = here(ranks, np.zeros((2, 2), np.float32))
    ranks.reduce_scatter(here(ranks, np.arange(n * 4, dtype=np.float32).reshape(n, 2, 2) * (r + 1)), out)
    results["sum"] = host(out)
    sent, received = [(r + i) % 3 for i in range(n)], [(i + r) % 3 for i in range(n)]
    out = here(ranks, np.zeros((sum(received), 1), np.int64))
    ranks.all_to_all(here(ranks, np.repeat(np.arange(n) + 10 * r, sent).reshape(-1, 1)), out, sent, received)
    results["rows"] = host(out)[:, 0]
    out = here(ranks, np.zeros((n, 2), np.int32))
    ranks.all_to_all(here(ranks, np.full((n, 2), r, np.int32)), out)
    results["equal"] = host(out)[:, 0]
    results["said"] = exchange(ranks, (r, r * r), out)
    return results


def quantized_and_gathered(ranks, shape, sharding, formats, options, only=None):
    """Bytes of both parts of the gathered matrix."""
    piece = here(ranks, np.ascontiguousarray(matrix(shape)[sharding.slices(ranks.rank)]))
    assert Sharding.agreed(piece, ranks, axis=sharding.axis) == sharding
    h = quantize_sharded(piece, sharding, ranks, **formats, **options)
    whole = all_gather(h, sharding, ranks, only=only)
    assert whole.shape == shape and whole.derived == (h.derived if only != "rowwise" else None)
    return base(whole.rowwise), base(whole.columnwise)


def gathered_in_chunks(ranks, shape, sharding, formats, options):
    piece = here(ranks, np.ascontiguousarray(matrix(shape)[sharding.slices(ranks.rank)]))
    whole = quantize_all_gather(piece, sharding, ranks, **formats, **options)
    return base(whole.rowwise), base(whole.columnwise)


def of_unlike_pieces(ranks, shapes, dtypes, axis):
    Sharding.agreed(here(ranks, np.ones(shapes[ranks.rank], dtypes[ranks.rank])), ranks, axis=axis)


def cut_block(ranks, sharding):
    quantize_sharded(here(ranks, np.ones(sharding.piece_shape(ranks.rank), np.float32)), sharding, ranks,
                     rowwise="mxfp8")


def gather_from_all(ranks):
    """A gather in which a rank that is not there is waited for: what it said."""
    try:
        ranks.all_gather(np.ones((1, 4), np.float32), np.ones((ranks.size, 4), np.float32))
    except CollectiveError as error:
        return str(error)
    return "all were there"


def gather_on_a_gpu(ranks):
    """The same with NCCL, whose host waits for the device alone: its watchdog ends a process that waits too long."""
    import cupy

    ranks.all_gather(*(cupy.ones((rows, 4), np.float32) for rows in (1, ranks.size)))
    cupy.cuda.runtime.deviceSynchronize()
    return "all were there"


def changed_piece(ranks, sharding):
    """The last rank holds another number of rows than was agreed on, and calls are not compared."""
    rows = 4 + (ranks.rank == ranks.size - 1)
    quantize_sharded(here(ranks, np.ones((rows, 64), np.float32)), sharding, as_ranks(ranks, check=False),
                     rowwise="fp8_e4m3")


def unlike_calls(ranks, what):
    """Rank 0 gives something else to a call than the others."""
    ranks, first = as_ranks(ranks, check=True), ranks.rank == 0
    x = here(ranks, np.ones((32, 64), np.float32))
    sharding = Sharding((32 * ranks.size, 64), tuple(range(0, 32 * ranks.size + 1, 32)))
    route = make_route(here(ranks, np.full((32, 1), ranks.rank)), ranks.size, ranks, capacity=32)
    if what == "format":
        quantize_all_gather(x, sharding, ranks, rowwise="mxfp8" if first else "mxfp8_e5m2")
    elif what == "direction":
        all_gather(hq.quantize(x, rowwise="mxfp8", columnwise="mxfp8"), sharding, ranks,
                   only="rowwise" if first else None)
    elif what == "capacity":
        make_route(here(ranks, np.zeros((32, 1), np.int64)), ranks.size, ranks, capacity=8 if first else None)
    elif what == "columns":
        dispatch(x[:, :32].copy() if first else x, route, ranks, "mxfp8")
    elif what == "dtype":
        combine(here(ranks, np.ones((route.arriving, 4), np.float16 if first else np.float32)), route, ranks)
    elif what == "call":
        if first:
            dispatch(x, route, ranks, "mxfp8")
        else:
            quantize_sharded(x, sharding, ranks, rowwise="mxfp8")
    elif what == "amax":
        all_gather(hq.quantize(x * (ranks.rank + 1), rowwise="nvfp4"), sharding, ranks)
    elif what == "given amax":
        quantize_all_gather(x, sharding, ranks, rowwise="nvfp4", amax=1.0 if first else 1.0000001)
    elif what == "seed":
        quantize_sharded(x, sharding, ranks, rowwise="nvfp4(rounding=stochastic)", seed=1 if first else 2)
    elif what == "needs":
        spread = Spread.even("columns", (*sharding.shape, 64), ranks, "mxfp8")
        parallel_forward(x, here(ranks, np.ones(spread.w.piece_shape(ranks.rank), np.float32)), "mxfp8", spread, ranks,
                         needs=(first, True))
    elif what == "much":  # more than fits into what is told, and alike as far as that
        shape, wide = (4000 * ranks.size, 64), np.arange(4000) * ranks.size
        borders = (*range(ranks.size), shape[0]) if first else (*range(ranks.size - 1), ranks.size, shape[0])
        with ranks.agreement("much") as said:
            said += wide.tolist(), borders
    elif what == "refusal":
        make_route(here(ranks, np.zeros((32, 1), np.float32 if first else np.int64)), ranks.size, ranks)


# --- a linear layer -----------------------------------------------------------------------------


def operands(sizes):
    m, n, k = sizes
    return (testing.matrix("gauss", shape, np.float32, seed=i) for i, shape in enumerate([(m, k), (n, k), (m, n)]))


def linear_layer(ranks, spread, recipe, dtype, is_quantized=False):
    """Pieces of y, dx and dw, and the bytes of what was saved; w as values, or quantized before."""
    x, w, dy = (value.astype(dtype) for value in operands(spread.sizes))
    x, w, dy = (here(ranks, np.ascontiguousarray(value[sharding.slices(ranks.rank)]))
                for value, sharding in ((x, spread.x), (w, spread.w), (dy, spread.y)))
    if is_quantized:
        row, column = as_recipe(recipe)["weight"]
        w = quantize_sharded(w, spread.w, ranks, rowwise=row, columnwise=column)
    y, saved = parallel_forward(x, w, recipe, spread, ranks, seed=SEED)
    dx, dw = parallel_backward(dy, saved, ranks)
    return host(y), host(dx), host(dw), base(saved.linear.x.columnwise), saved.nbytes


def torch_linear_layer(ranks, spread, recipe, dtype):
    """The same three through autograd, and what a frozen weight and another gradient of the output change."""
    from hqarray.interop.torch import parallel_linear
    from hqarray.interop.torch_arrays import as_array, as_tensor

    x, w, dy = (value.astype(dtype) for value in operands(spread.sizes))
    x, w, dy = (as_tensor(here(ranks, np.ascontiguousarray(value[sharding.slices(ranks.rank)])))
                for value, sharding in ((x, spread.x), (w, spread.w), (dy, spread.y)))
    y = parallel_linear(x.requires_grad_(), w.requires_grad_(), recipe, spread, ranks, seed=SEED)
    y.backward(dy)
    frozen = parallel_linear(x, w.detach(), recipe, spread, ranks, seed=SEED)
    again, = torch_grad(frozen, [x], dy)
    assert y.requires_grad and (again == x.grad).all()
    return [host(as_array(value)) for value in (y, x.grad, w.grad)]


def torch_delayed_layer(ranks, spread):
    """The amaxes after three steps of a layer with delayed scaling."""
    from hqarray.interop.torch import parallel_linear
    from hqarray.interop.torch_arrays import as_tensor

    x, w, dy = (as_tensor(here(ranks, np.ascontiguousarray(value[sharding.slices(ranks.rank)])))
                for value, sharding in zip(operands(spread.sizes), (spread.x, spread.w, spread.y), strict=True))
    state = hq.DelayedScaling(3, like=here(ranks, np.zeros(1, np.float32)))
    for _ in range(3):
        y = parallel_linear(x.requires_grad_(), w.requires_grad_(), "fp8_delayed", spread, ranks, amax=state[0:3])
        y.backward(dy)
        after_torch(ranks)
        ranks.all_reduce_max(state.current)
        state.update()
    return host(state.amax)


def after_torch(ranks):
    """CuPy's stream goes on where torch's is."""
    if "nccl" in ranks.engine.lower():
        import torch

        torch.cuda.synchronize()


def torch_grad(y, inputs, dy):
    import torch

    return torch.autograd.grad(y, inputs, dy)


def example(ranks, folder, name):
    """What a program of examples/ finds."""
    import importlib
    import sys

    import torch

    from hqarray.interop.torch import on_torch

    sys.path.insert(0, folder)
    try:
        program = importlib.import_module(name)
    finally:
        sys.path.remove(folder)
    on_gpu = "nccl" in ranks.engine.lower()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    with on_torch(device):
        return program.main(ranks, device)


# --- experts ------------------------------------------------------------------------------------

EXPERTS, TOP, TOKENS, N, K = 8, 2, 37, 48, 96


def tokens_of(rank, top=TOP):
    """x, choices, weights and dy of a rank's tokens; expert 5 gets none, and rank 1 has no tokens."""
    count, rng = (0 if rank == 1 else TOKENS + rank), np.random.default_rng(rank)
    x = testing.matrix("wide", (count, K), np.float32, seed=10 + rank)
    chosen = [rng.permutation([0, 1, 2, 3, 4, 6, 7])[:top] for _ in range(count)]
    choices = np.array(chosen, np.int64).reshape(count, top)
    weights = rng.random((count, top), np.float32)
    return x, choices, weights, testing.matrix("gauss", (count, N), np.float32, seed=20 + rank)


def expert_weights():
    return testing.matrix("gauss", (EXPERTS * N, K), np.float32, seed=30).reshape(EXPERTS, N, K)


def mine(ranks, experts):
    local = EXPERTS // ranks.size
    return experts[ranks.rank * local : (ranks.rank + 1) * local]


def members(group):
    """Codes, scales, global scale and amax of each member of a rowwise part."""
    group = group.to_host()
    found = []
    for i in range(len(group)):
        part = group[i].rowwise
        found.append([None if x is None else host(x) for x in (part.codes, part.scales, part.global_scale, part.amax)])
    return found


def dispatched(ranks, name, capacity):
    x, choices, *_ = tokens_of(ranks.rank)
    route = make_route(here(ranks, choices), EXPERTS, ranks, capacity=capacity)
    group = dispatch(here(ranks, x), route, ranks, name)
    beyond = host(group.rowwise.codes)[int(host(route.sizes).sum()) :]
    return members(group), not beyond.view(np.uint8).any()


def there_and_back(ranks, capacity, format):
    """Tokens sent to experts that leave them alone, and their weighted sums."""
    x, choices, weights, _ = tokens_of(ranks.rank)
    route = make_route(here(ranks, choices), EXPERTS, ranks, capacity=capacity)
    y = dispatch(here(ranks, x), route, ranks, "fp32").rowwise.codes
    return host(combine(y, route, ranks, weights=here(ranks, weights), format=format))


def expert_layer(ranks, recipe, capacity, weighted=True):
    x, choices, weights, dy = tokens_of(ranks.rank)
    route = make_route(here(ranks, choices), EXPERTS, ranks, capacity=capacity)
    w, weights = here(ranks, mine(ranks, expert_weights())), here(ranks, weights) if weighted else None
    y, saved = experts_forward(here(ranks, x), w, route, recipe, ranks, weights=weights, seed=SEED)
    gradients = experts_backward(here(ranks, dy), saved, ranks)
    return [None if value is None else host(value) for value in (y, *gradients)]


def expert_network(ranks, recipe, capacity):
    """Two layers with a relu between them, tokens sent once: y, and gradients of x, both weights and the choices'."""
    x, choices, weights, dy = tokens_of(ranks.rank)
    route = make_route(here(ranks, choices), EXPERTS, ranks, capacity=capacity)
    up, down, x, dy, weights = (here(ranks, value) for value in (
        mine(ranks, expert_weights()), mine(ranks, expert_weights().transpose(0, 2, 1)[:, :N].copy()), x, dy, weights))
    h, first = experts_forward(x, up, route, recipe, ranks, seed=SEED, combines=False)
    y, second = experts_forward(h * (h > 0), down, route, recipe, ranks, weights=weights, seed=SEED, dispatches=False)
    dh, ddown, dweights = experts_backward(dy, second, ranks)
    dx, dup, none = experts_backward(dh * (h > 0), first, ranks)
    assert none is None and len(h) == len(dh) == route.arriving
    count = int(host(route.sizes).sum())
    return [host(value) for value in (y, dx, dup, ddown, dweights, h[:count], dh[:count])]


def torch_expert_network(ranks, recipe, capacity):
    """The same through autograd."""
    import torch

    from hqarray.interop.torch import experts_linear
    from hqarray.interop.torch_arrays import as_array, as_tensor

    x, choices, weights, dy = (as_tensor(here(ranks, value)) for value in tokens_of(ranks.rank))
    up, down = (as_tensor(here(ranks, value)) for value in (
        mine(ranks, expert_weights()), mine(ranks, expert_weights().transpose(0, 2, 1)[:, :N].copy())))
    route = make_route(choices, EXPERTS, ranks, capacity=capacity)
    leaves = [value.requires_grad_() for value in (x, up, down, weights)]
    h = experts_linear(x, up, route, recipe, ranks, seed=SEED, combines=False)
    y = experts_linear(torch.relu(h), down, route, recipe, ranks, weights=weights, seed=SEED, dispatches=False)
    y.backward(dy)
    return [host(as_array(value)) for value in (y, *(leaf.grad for leaf in leaves))]


def torch_expert_layer(ranks, recipe, capacity, weighted=True):
    """The same through autograd."""
    from hqarray.interop.torch import experts_linear
    from hqarray.interop.torch_arrays import as_array, as_tensor

    x, choices, weights, dy = tokens_of(ranks.rank)
    x, choices, weights, dy, w = (as_tensor(here(ranks, value)) for value in (
        x, choices, weights, dy, mine(ranks, expert_weights())))
    route = make_route(choices, EXPERTS, ranks, capacity=capacity)
    leaves = [x.requires_grad_(), w.requires_grad_(), *([weights.requires_grad_()] if weighted else [])]
    y = experts_linear(x, w, route, recipe, ranks, weights=weights if weighted else None, seed=SEED)
    y.backward(dy)
    return [host(as_array(value)) for value in (y, *(leaf.grad for leaf in leaves))]


def unlike_tokens(ranks):
    """The last rank's tokens are not those of its route, and calls are not compared."""
    ranks = as_ranks(ranks, check=False)
    x, choices, *_ = tokens_of(0)
    route = make_route(choices, EXPERTS, ranks)
    dispatch(x[: len(x) - (ranks.rank == ranks.size - 1)], route, ranks, "fp8_e4m3")
