"""torchao's MX and NVFP4 tensors: HybridArrays as these and back, codes sharing memory.

torchao keeps them in its prototype folder; this follows torchao 0.18 (mx_tensor.py, nvfp4_tensor.py).
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: TID253  this module names torch

from hqarray.arrays import Direction, HybridArray, QuantizedArray
from hqarray.formats import FORMATS, Storage

from .torch_arrays import NUMPY_DTYPES, TORCH_DTYPES, TorchPart, from_torch, to_torch, torch_type
from .torch_scaled_mm import tiled, untiled

PACKAGED_TYPES = {"e2m3": "fp6_e2m3", "e3m2": "fp6_e3m2"}
"""torchao's names of elements that are no dtype of torch."""


def to_torchao(array: HybridArray, *, source: Direction = "rowwise", swizzled: bool = False) -> Any:
    """A part as torchao's MXTensor or NVFP4Tensor of the array's shape.

    array     2-D, in an MX or NVFP4 format, k (along the blocks) a multiple of the block
    source    the part: columnwise gives the transpose (.t()) of a tensor of X.T
    swizzled  scales in the 128x4 tiles of cuBLASLt
    Codes share memory where a row has no padding; scales are copied to torchao's layout.
    Raises ValueError for a format or shape that torchao does not have.
    """
    if not isinstance(array, HybridArray):
        raise TypeError(f"to_torchao takes a HybridArray, not {type(array).__name__}")
    part = array.part(source, "to_torchao")
    if array.ndim != 2:
        raise ValueError(f"to_torchao takes a 2-D array, this is {array.shape}; use .reshape(-1, {array.shape[-1]})")
    tensor = _tensor(part, TORCH_DTYPES[array.dtype], swizzled)
    return tensor if source == "rowwise" else tensor.t()


def _tensor(part: QuantizedArray, dtype: Any, swizzled: bool) -> Any:
    storage, (outer, k) = part.format.storage, part.shape
    if storage.scale not in ("e8m0", "e4m3") or storage.block is None:
        raise ValueError(f"torchao has MX and NVFP4 tensors, this part is {part.format.name}; use to_torch")
    if storage.rht or storage.global_per_row:
        raise ValueError(
            f"torchao's NVFP4 tensors hold values that are not rotated, under one global scale; this part is "
            f"{part.format.name}; use to_torch, or quantize anew"
        )
    block = storage.block[1]
    if k % block:
        raise ValueError(f"torchao takes k of a multiple of the block, {block}, this part is {part.shape}")
    tensors = to_torch(part)
    assert isinstance(tensors, TorchPart)
    codes, scales = (_contiguous(tensor) for tensor in (tensors.codes, tensors.scales))
    if swizzled:
        blocks = k // block
        scales = tiled(scales, outer, blocks).view(-(-outer // 128) * 32, -(-blocks // 4) * 16)
    if storage.global_scale:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

        whole = tensors.global_scale.view(())
        return NVFP4Tensor(codes.view(torch.uint8), scales, block, dtype, whole, is_swizzled_scales=swizzled)
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common import KernelPreference

    codes = codes.view(torch.uint8) if storage.element.stored_bits == 4 else codes
    return MXTensor(codes, scales, _element_type(storage), block, dtype, KernelPreference.EMULATED, None, swizzled)


def _contiguous(tensor: Any) -> Any:
    """Torch copies bytes wherever it knows bytes, and not every one-byte type."""
    return tensor if tensor.is_contiguous() else tensor.view(torch.uint8).contiguous().view(tensor.dtype)


def from_torchao(tensor: Any) -> HybridArray:
    """Torchao's MXTensor or NVFP4Tensor (2-D) as a HybridArray of its shape: rowwise, or columnwise of a transpose.

    Codes and scales share memory; scales in tiles are copied out of them. An NVFP4Tensor without a scale of the whole
    tensor has 1. Raises TypeError for another tensor, ValueError for a block that no format has.
    """
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    if not isinstance(tensor, (MXTensor, NVFP4Tensor)):
        raise TypeError(f"from_torchao takes an MXTensor or NVFP4Tensor, not {type(tensor).__name__}")
    codes, scales = tensor.qdata, tensor.scale
    if codes.ndim != 2:
        raise ValueError(f"from_torchao takes a 2-D tensor, this is {tuple(tensor.shape)}; take one matrix")
    turned = codes.stride(0) < codes.stride(1)
    if turned:
        codes, scales = codes.t(), scales.t()
    shape = tuple(tensor.shape)[::-1] if turned else tuple(tensor.shape)
    if tensor.is_swizzled_scales:
        scales = untiled(scales.contiguous(), shape[0], -(-shape[1] // tensor.block_size))
    part = _part(tensor, codes, scales, shape)
    array: Any = {"columnwise" if turned else "rowwise": part}
    return HybridArray(**array, dtype=NUMPY_DTYPES[tensor.orig_dtype])


def _part(tensor: Any, codes: Any, scales: Any, shape: tuple[int, int]) -> QuantizedArray:
    element, block, whole = getattr(tensor, "elem_dtype", torch.float4_e2m1fn_x2), tensor.block_size, None
    if not hasattr(tensor, "elem_dtype"):  # an NVFP4Tensor
        given = tensor.per_tensor_scale
        whole = torch.ones(1, device=codes.device) if given is None else given.reshape(1)
    for format in FORMATS.values():
        storage = format.storage
        if (
            _element_type(storage) == element
            and storage.block == (1, block)
            and torch_type(storage.scale_dtype_name) == scales.dtype
        ):
            part = from_torch(TorchPart(codes, scales, whole), format=format, shape=shape)
            assert isinstance(part, QuantizedArray)
            return part
    raise ValueError(f"no format has {element} elements in blocks of {block} with scales {scales.dtype}")


def _element_type(storage: Storage) -> Any:
    """Torchao's elem_dtype."""
    return PACKAGED_TYPES.get(storage.element.name) or torch_type(storage.element.dtype_name)


__all__ = ["from_torchao", "to_torchao"]
