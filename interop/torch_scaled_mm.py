"""What torch's own scaled GEMMs take for a pair of operands, sharing memory wherever torch reads our layout.

Which pairs, shapes and strides torch takes: ATen/native/cuda/ScaledBlas.cpp of torch 2.11 to 2.13.
"""

from __future__ import annotations

from typing import Any, Literal

import torch  # noqa: TID253  this module names torch

from hqarray.arrays import HybridArray, QuantizedArray
from hqarray.formats import ROW, Storage, block_name
from hqarray.layout import round_up

from .torch_arrays import TorchPart, to_torch

MULTIPLE = 16
"""Torch takes k and n of multiples of this."""

RECIPES: dict[tuple[str, tuple[int, int] | None], str] = {
    ("float32", None): "TensorWise",
    ("float32", (1, ROW)): "RowWise",
    ("float32", (1, 128)): "BlockWise1x128",
    ("float32", (128, 128)): "BlockWise128x128",
    ("e8m0", (1, 32)): "BlockWise1x32",
    ("e4m3", (1, 16)): "BlockWise1x16",
}
"""Torch's name of how a stored format is scaled, by kind of scale and block."""


def scaled_mm_arguments(
    a: HybridArray, b: HybridArray, *, function: Literal["scaled_mm", "_scaled_mm"] = "scaled_mm"
) -> dict[str, Any]:
    """The arguments of torch.nn.functional.scaled_mm, or of torch._scaled_mm, for the product a @ b.

    a, b      (m, k) and (k, n); a.rowwise and b.columnwise are read, as in a @ b
    function  which of the two
    returns   a dict: scaled_mm(**arguments, output_dtype=torch.bfloat16), _scaled_mm(**arguments, out_dtype=...)

    Per tensor, per row (float32 results on sm_90 only), 1x128 with 1x128 or 128x128 (sm_90), MXFP8 and NVFP4 (sm_100;
    scales copied into 128x4 tiles). Codes and float32 scales share the parts' memory; k is padded with the zero codes
    that a part has. The global scales of NVFP4 are arguments of scaled_mm only.
    Raises ValueError for a pair or shape that torch does not take; hqarray.matmul takes every one.
    """
    if function not in ("scaled_mm", "_scaled_mm"):
        raise ValueError(f"function={function!r} is not 'scaled_mm' or '_scaled_mm'")
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, HybridArray):
            raise TypeError(f"{name} is {type(x).__name__}; scaled_mm_arguments takes HybridArrays")
    left = a.part("rowwise", "a @ b, which contracts a's last axis,").packed()
    right = b.part("columnwise", "a @ b, which contracts b's first axis,").packed()
    if len(a.shape) != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"scaled_mm takes a (m, k) and b (k, n), these are {a.shape} and {b.shape}")
    names = _recipes(left.format.storage, right.format.storage, function)
    if right.shape[0] % MULTIPLE:
        raise ValueError(f"torch takes n of a multiple of {MULTIPLE}, not {right.shape[0]}; hqarray.matmul takes any")
    mat_a, mat_b = (_padded_codes(part) for part in (left, right))
    scales_a, scales_b = (_scales(part, function) for part in (left, right))
    if function == "_scaled_mm":
        across = scales_b[0].t() if left.format.storage.scale == "float32" else scales_b[0]
        return {"input": mat_a, "mat2": mat_b.t(), "scale_a": scales_a[0], "scale_b": across}
    functional = torch.nn.functional
    if not hasattr(functional, "scaled_mm"):
        raise NotImplementedError(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm (2.10 has); "
                                  f"pass function='_scaled_mm'")
    if names[1] == "RowWise":  # of mat_b's columns
        scales_b = (scales_b[0].t(),)
    arguments: dict[str, Any] = {"mat_a": mat_a, "mat_b": mat_b.t()}
    for side, name, scales in (("a", names[0], scales_a), ("b", names[1], scales_b)):
        arguments |= side_arguments(side, name, scales)
    return arguments


def _recipes(a: Storage, b: Storage, function: str) -> tuple[str, str]:
    """Torch's names for the pair. Raises ValueError for one that it does not take."""
    kinds = {a.element.name, b.element.name}
    names = RECIPES.get((a.scale, a.block)), RECIPES.get((b.scale, b.block))
    reason = None
    by_row = [s.block == (1, ROW) for s in (a, b)]
    if None in names or (a.scale == "e8m0" and kinds - {"e4m3", "e5m2"}):
        reason = "torch's GEMM on NVIDIA GPUs takes no such operand"
    elif a.global_per_row or b.global_per_row:
        reason = "it takes one global scale, not one for each row"
    elif a.scale != b.scale or (a.block is None) != (b.block is None) or by_row[0] != by_row[1]:
        reason = "operands are scaled differently"
    elif a.rht != b.rht:
        reason = "one operand is Hadamard-rotated"
    elif kinds == {"e5m2"}:
        reason = "there is no E5M2 x E5M2"
    elif a.block == b.block == (128, 128):
        reason = "there is no 128x128 by 128x128"
    elif a.global_scale and function == "_scaled_mm":
        reason = "torch._scaled_mm takes no global scales, torch.nn.functional.scaled_mm does"
    if reason is not None:
        described = " by ".join(f"{s.element.name} ({s.scale} scales, {block_name(s.block)})" for s in (a, b))
        raise ValueError(f"torch does not multiply {described}: {reason}; hqarray.matmul does")
    return names  # type: ignore[return-value]


def side_arguments(side: str, name: str, scales: tuple[Any, ...]) -> dict[str, Any]:
    """Scales of one operand under the names that torch.nn.functional's functions have for them."""
    types, swizzles = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    recipes = [getattr(types, name), *([types.TensorWise] if len(scales) > 1 else [])]
    is_tiled = scales[0].dtype != torch.float32
    tiling = [swizzles.SWIZZLE_32_4_4 if is_tiled else swizzles.NO_SWIZZLE, swizzles.NO_SWIZZLE][: len(scales)]
    return {f"scale_{side}": list(scales), f"scale_recipe_{side}": recipes, f"swizzle_{side}": tiling}


def _padded_codes(part: QuantizedArray) -> Any:
    """Codes with k up to a multiple of 16: whole rows, whose padding is zero; of FP4 whole 16 bytes."""
    codes = to_torch(part).codes  # type: ignore[union-attr]
    return codes.as_strided((codes.shape[0], codes.stride(0)), codes.stride())


def _scales(part: QuantizedArray, function: str) -> tuple[Any, ...]:
    """Scales as torch reads them, with NVFP4's global one."""
    tensors, storage = to_torch(part), part.format.storage
    assert isinstance(tensors, TorchPart)
    scales, whole = tensors.scales, tensors.global_scale
    if storage.scale != "float32":
        rows, columns = part.shape[0], tensors.codes.stride(0) * (8 // storage.element.stored_bits)
        return (tiled(scales, rows, -(-columns // storage.block[1])), *(() if whole is None else (whole,)))  # type: ignore
    if storage.block is None:
        return (scales,)
    if storage.block == (1, ROW):  # (outer, 1), whose second stride torch wants to be 1
        return (scales.as_strided(scales.shape, (1, 1)),)
    if storage.block[0] == 1:
        if part.shape[0] % 4:
            raise ValueError(
                f"torch takes 1x128 scales of a multiple of 4 rows, these are {part.shape[0]}; hqarray.matmul takes any"
            )
        return (scales,)
    blocks = scales.shape[1]
    if function == "scaled_mm":  # (k blocks up to a multiple of 4, outer blocks)
        return (scales.as_strided((scales.shape[0], scales.stride(0)), scales.stride()).t(),)
    if blocks % 4:
        raise ValueError(f"torch._scaled_mm takes 128x128 scales of a multiple of 4 blocks along k, these are "
                         f"{blocks}; torch.nn.functional.scaled_mm and hqarray.matmul take any")
    return (scales,)


def tiled(scales: Any, rows: int, blocks: int) -> Any:
    """Byte scales of a part of so many rows and blocks copied into tiles of 128 x 4, flat; what lies between is zero.

    Scale (i, j) lies at ((i/128) * tiles + j/4) * 512 + (i%32) * 16 + (i%128)/32 * 4 + j%4: cuBLASLt's layout.
    """
    high, wide = round_up(rows, 128), round_up(blocks, 4)
    padded = torch.zeros((high, wide), dtype=torch.uint8, device=scales.device)
    padded[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = padded.view(high // 128, 4, 32, wide // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def untiled(tiles: Any, rows: int, blocks: int) -> Any:
    """Tiles of 128 x 4 -> scales (rows, blocks), a copy; inverse of tiled."""
    high, wide = round_up(rows, 128), round_up(blocks, 4)
    padded = tiles.view(torch.uint8).reshape(high // 128, wide // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return padded.reshape(high, wide)[:rows, :blocks].view(tiles.dtype)


__all__ = ["scaled_mm_arguments", "tiled", "untiled"]
