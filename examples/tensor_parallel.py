"""A feed-forward network by tensor parallelism: "columns", then "rows", and tokens in between nowhere whole in bf16.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

import torch
from ranks import torchrun

from hqarray.interop.distributed import Alone
from hqarray.interop.parallel import Spread
from hqarray.interop.torch import parallel_linear

TOKENS, MODEL, HIDDEN, RECIPE = 256, 384, 1024, "mxfp8"


def network(x, up, down, ranks):
    """This rank's rows of down(gelu(up(x))) from its rows of x and its pieces of the weights."""
    first = Spread.even("columns", (TOKENS, HIDDEN, MODEL), ranks, RECIPE)  # (m, n, k) of the whole layer
    last = Spread.even("rows", (TOKENS, MODEL, HIDDEN), ranks, RECIPE)
    h = parallel_linear(x[first.x.slices(ranks.rank)], up[first.w.slices(ranks.rank)], RECIPE, first, ranks)
    return parallel_linear(torch.nn.functional.gelu(h), down[last.w.slices(ranks.rank)], RECIPE, last, ranks)


def main(ranks, device):
    """The largest difference from one rank that holds all."""
    rng = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(shape, generator=rng).to(device).requires_grad_()
                   for shape in ((TOKENS, MODEL), (HIDDEN, MODEL), (MODEL, HIDDEN)))
    y = network(x, up, down, ranks)
    y.square().sum().backward()
    pieces = [value.grad for value in (x, up, down)]  # zero but for this rank's piece

    x.grad = up.grad = down.grad = None
    whole = network(x, up, down, Alone())
    whole.square().sum().backward()
    rows = Spread.even("rows", (TOKENS, MODEL, HIDDEN), ranks, RECIPE).y.slices(ranks.rank)
    worst = ((y - whole[rows]).abs().max() / whole.abs().max()).item()
    for piece, value in zip(pieces, (x, up, down), strict=True):
        there = piece != 0
        worst = max(worst, ((piece - value.grad)[there].abs().max() / value.grad.abs().max()).item())
    print(f"rank {ranks.rank}: y {tuple(y.shape)}, largest difference from one rank {worst:.1e} of the largest value")
    return worst


if __name__ == "__main__":
    with torchrun() as (ranks, device):
        assert main(ranks, device) < 1e-2
