"""A weight in shards, as FSDP and ZeRO keep it: quantized where it lies, gathered as codes and scales.

    torchrun --nproc-per-node 2 examples/gather_shards.py
"""

import torch
from ranks import torchrun

import hqarray as hq
from hqarray.interop.sharding import Sharding, quantize_all_gather


def main(ranks, device):
    """Whether what is gathered has the bytes of the whole weight quantized on one rank."""
    whole = torch.randn(1024, 768, generator=torch.Generator().manual_seed(0)).to(device)
    sharding = Sharding.even((1024, 768), ranks.size)  # mxfp8 rows may be cut anywhere; hq.shard_alignment says
    shard = whole[sharding.slices(ranks.rank)]  # of a DTensor: .to_local()

    gathered = quantize_all_gather(shard, sharding, ranks, rowwise="mxfp8")
    expected = hq.quantize(whole, rowwise="mxfp8")

    sent, values = gathered.rowwise.nbytes // ranks.size, 2 * shard.numel()
    print(f"rank {ranks.rank} of {shard.shape[0]} rows sent {sent} bytes, in bf16 {values}; it has {gathered!r}")
    return bool((gathered.rowwise.codes == expected.rowwise.codes).all())


if __name__ == "__main__":
    with torchrun() as (ranks, device):
        assert main(ranks, device)
