"""PyTorch: parts as tensors and back, torch's scaled GEMMs, torchao's tensors, and linear layers with autograd.

    from hqarray.interop import torch as hqt
    codes, scales, _ = hqt.to_torch(hx.rowwise)         # float8_e4m3fn, float32: the same memory
    y = hqt.linear(x, w, "mxfp8")                       # forward and backward by hqarray's GEMMs

Nothing is copied and nothing synchronises; on CUDA, layers run on torch's current stream in torch's memory.
"""

from .torch_ao import from_torchao, to_torchao
from .torch_arrays import TorchPair, TorchPart, from_torch, on_torch, to_torch
from .torch_groups import TorchGroup
from .torch_linear import grouped_linear, linear
from .torch_modules import GroupedLinear, Linear
from .torch_parallel import experts_linear, parallel_linear
from .torch_scaled_grouped_mm import scaled_grouped_mm_arguments
from .torch_scaled_mm import scaled_mm_arguments

__all__ = [
    "GroupedLinear",
    "Linear",
    "TorchGroup",
    "TorchPair",
    "TorchPart",
    "experts_linear",
    "from_torch",
    "from_torchao",
    "grouped_linear",
    "linear",
    "on_torch",
    "parallel_linear",
    "scaled_grouped_mm_arguments",
    "scaled_mm_arguments",
    "to_torch",
    "to_torchao",
]
