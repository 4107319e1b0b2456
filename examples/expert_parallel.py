"""A mixture of experts on several ranks: each token goes to two experts as MXFP8, once there and once back.

    torchrun --nproc-per-node 2 examples/expert_parallel.py
"""

import torch
from ranks import torchrun

from hqarray.interop.experts import make_route
from hqarray.interop.torch import experts_linear

TOKENS, MODEL, HIDDEN, EXPERTS, TOP, RECIPE = 96, 256, 512, 8, 2, "mxfp8"


def main(ranks, device):
    """The relative error against each token's experts in float32."""
    rng = torch.Generator().manual_seed(0)
    up, down = (torch.randn(shape, generator=rng).to(device) / 16
                for shape in ((EXPERTS, HIDDEN, MODEL), (EXPERTS, MODEL, HIDDEN)))
    router = torch.randn(EXPERTS, MODEL, generator=rng).to(device)
    x = torch.randn(TOKENS, MODEL, generator=torch.Generator().manual_seed(1 + ranks.rank)).to(device)
    weights, choices = (x @ router.T).softmax(dim=1).topk(TOP)

    local = slice(ranks.rank * EXPERTS // ranks.size, (ranks.rank + 1) * EXPERTS // ranks.size)
    mine = [w[local].clone().requires_grad_() for w in (up, down)]
    x, weights = x.requires_grad_(), weights.detach().requires_grad_()
    route = make_route(choices, EXPERTS, ranks)
    h = experts_linear(x, mine[0], route, RECIPE, ranks, combines=False)  # rows of this rank's experts
    h = torch.nn.functional.gelu(h)
    y = experts_linear(h, mine[1], route, RECIPE, ranks, dispatches=False, weights=weights)
    y.square().sum().backward()

    hidden = torch.nn.functional.gelu(torch.einsum("tk,tjnk->tjn", x, up[choices]))
    exact = torch.einsum("tjn,tjkn,tj->tk", hidden, down[choices], weights)
    error = ((y - exact).norm() / exact.norm()).item()
    print(f"rank {ranks.rank}: {route.arriving} rows arrived, sizes {route.sizes.tolist()}, error {error:.3f}")
    return error


if __name__ == "__main__":
    with torchrun() as (ranks, device):
        assert main(ranks, device) < 0.1
