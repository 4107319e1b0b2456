"""What every example needs: this process's ranks and device, under torchrun."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hqarray.interop.distributed import as_ranks
from hqarray.interop.torch import on_torch


@contextmanager
def torchrun() -> Iterator[tuple[Any, torch.device]]:
    """NCCL where there are GPUs, each process on its own, else gloo; CuPy then works on torch's stream and memory."""
    has_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    try:
        with on_torch(device):
            yield as_ranks(), device
    finally:
        dist.destroy_process_group()
