"""Quantized weights in other programs' checkpoints: which tensors belong together, and what they mean.

A convention is a row of READ or STYLES: endings of the names of codes, scales and global scale. What the codes are
follows from types and shapes, by the storages of FORMATS; nothing is quantized anew. In all of them FP4 has its even
element in the low nibble, and a scale is multiplied (`weight_scale_inv` too), except `weight_global_scale`, which
divides. Sources: DeepSeek-V3 (README_WEIGHTS), gpt-oss (convert_moe_packed_tensors in transformers), ModelOpt
(NVFP4QTensor), compressed-tensors (pack_fp4_to_uint8, dequantize).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from hqarray.arrays import HybridArray, QuantizedArray
from hqarray.formats import FORMATS, Format, Storage, scale_values
from hqarray.grouped import GroupedArray
from hqarray.layout import Array
from hqarray.tensorfile import Tensor, TensorFile, Values

from .sources import Source, Stored, typed


@dataclass(frozen=True, slots=True)
class Convention:
    """Endings of names after that of the weight.

    divides  the global scale is the reciprocal of ours
    blocked  codes are (..., blocks, bytes of a block)
    """

    codes: str
    scales: str
    global_scale: str | None = None
    divides: bool = False
    blocked: bool = False


GPT_OSS = Convention("_blocks", "_scales", blocked=True)
BLOCK_FP8 = Convention("", "_scale_inv")
MODELOPT = Convention("", "_scale", "_scale_2")

READ = (
    GPT_OSS,
    replace(GPT_OSS, codes=".blocks", scales=".scales"),  # gpt-oss as OpenAI publishes it
    Convention("_packed", "_scale", "_global_scale", divides=True),  # compressed-tensors, FP4
    BLOCK_FP8,
    MODELOPT,  # and FP8 of all kinds
)

STYLES: dict[str, tuple[Convention, tuple[str, ...]]] = {
    "fp8": (replace(MODELOPT, global_scale=None), ("fp8_e4m3", "fp8_e5m2")),
    "fp8_block": (BLOCK_FP8, ("fp8_block_128x128",)),
    "mxfp4": (GPT_OSS, ("mxfp4",)),
    "nvfp4": (MODELOPT, ("nvfp4",)),
}
"""Styles that are written: the convention, and formats whose storage it holds."""

READ_FORMATS = ("fp8_block_128x128", "fp8_block_1x128", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp8_e4m3", "fp8_e5m2")

CODE_TYPES = ("U8", "I8", "I32", "F4", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""Types of what can be codes; a wide float beside a tensor called its scale is a plain tensor."""

SCALE_TYPES: dict[str, tuple[str, ...]] = {
    "float32": ("F32", "BF16", "F16", "F8_E8M0"), "e8m0": ("U8", "F8_E8M0"), "e4m3": ("F8_E4M3",),
}
"""Types that scales of a kind come in; all are exact in ours."""


# --- reading ------------------------------------------------------------------------------------


def sources(file: TensorFile, dtype: np.dtype[Any]) -> dict[str, Source]:
    """The weights and all other tensors of a checkpoint, in the order of the file."""
    weights = dict(_weights(file))
    used = {tensor for _, _, tensors in weights.values() for tensor in tensors}
    found = {}
    for name, tensor in file.tensors.items():
        if name in weights:
            weight, convention, tensors = weights[name]
            read = partial(_read, file, weight, convention, tensors, dtype)
            found[weight] = Source(tensors, read, _shape(tensor, convention))
        elif name not in used:
            found[name] = Source((name,), partial(file.array, name), tensor.shape)
    return found


def _weights(file: TensorFile) -> Iterator[tuple[str, tuple[str, Convention, tuple[str, ...]]]]:
    """The name of the codes, and (name of the weight, its convention, its tensors)."""
    for codes, tensor in file.tensors.items():
        if tensor.type not in CODE_TYPES:
            continue
        for convention in READ:
            name = codes.removesuffix(convention.codes)
            taken = convention.codes != "" and (name == codes or name in file.tensors)
            if taken or name + convention.scales not in file.tensors:
                continue
            tensors = [codes, name + convention.scales]
            if convention.global_scale is not None and name + convention.global_scale in file.tensors:
                tensors.append(name + convention.global_scale)
            yield codes, (name, convention, tuple(tensors))
            break


def _shape(codes: Tensor, convention: Convention) -> tuple[int, ...]:
    """Shape of the weight."""
    if convention.blocked and len(codes.shape) > 1:
        return (*codes.shape[:-2], 2 * codes.shape[-2] * codes.shape[-1])
    return (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.type == "U8" and codes.shape else codes.shape


def _read(
    file: TensorFile, name: str, convention: Convention, tensors: tuple[str, ...], dtype: np.dtype[Any]
) -> HybridArray:
    shape = _shape(file.tensors[tensors[0]], convention)
    format = _format(file, convention, tensors, shape)
    if format is None:
        said = ", ".join(f"{tensor!r} {file.tensors[tensor]}" for tensor in tensors)
        raise NotImplementedError(
            f"{file.path}: {name!r}: no format has codes and scales like {said}; .stored(name) gives them as they are"
        )
    storage = format.storage
    matrix = (prod(shape[:-1]), shape[-1])
    columns = -(-matrix[1] * storage.element.stored_bits // 8)
    codes = file.array(tensors[0]).view(np.uint8).reshape(matrix[0], columns)
    scales = _scales(file, tensors[1], storage).reshape(storage.num_scales(matrix))
    global_scale = None
    if storage.global_scale:
        global_scale = file.array(tensors[2]).reshape(1)
        if convention.divides:
            with np.errstate(all="ignore"):
                global_scale = np.float32(1) / global_scale
    part = QuantizedArray.from_buffers(codes, scales, format, matrix, global_scale=global_scale)
    return HybridArray(part, shape=shape, dtype=dtype)


def _scales(file: TensorFile, name: str, storage: Storage) -> Values:
    scales = file.array(name)
    if storage.scale != "float32":
        return scales.view(np.uint8)
    if file.tensors[name].type == "F8_E8M0":
        table = scale_values("e8m0")
        assert table is not None
        return np.asarray(table.take(scales.view(np.uint8)))
    return scales.astype(np.float32, copy=False)


def _format(
    file: TensorFile, convention: Convention, tensors: tuple[str, ...], shape: tuple[int, ...]
) -> Format | None:
    """The format whose storage the tensors are; None where there is none."""
    codes, scales, *globals_ = (file.tensors[name] for name in tensors)
    if not shape or len(codes.shape) < 1 + convention.blocked:
        return None
    for name in READ_FORMATS:
        format = FORMATS[name]
        storage = format.storage
        if codes.type != typed(storage.element.dtype_name, None).type or scales.type not in SCALE_TYPES[storage.scale]:
            continue
        if convention.blocked and (storage.block is None or codes.shape[-1] * 8 != storage.block[1] * 4):
            continue
        if storage.global_scale != bool(globals_) or any(g.type != "F32" or prod(g.shape) != 1 for g in globals_):
            continue
        # a (1, 1) is a block's scale under the name that means blocks, and a matrix's under the other
        if storage.block is None or (prod(scales.shape) == 1 and len(scales.shape) < 2):
            wanted = storage.block is None and prod(scales.shape) == 1
        else:
            wanted = scales.shape == _scale_shape(storage, shape)
            wanted = wanted and not (scales.shape == (1, 1) and convention is MODELOPT and storage.block[0] > 1)
        if wanted:
            powers = storage.scale == "float32" and scales.type == "F8_E8M0" and storage.block is not None
            return FORMATS[f"{name}_pow2"] if powers else format
    return None


def _scale_shape(storage: Storage, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of the block scales of an (..., n, k) weight; None where blocks would run from one matrix into the next."""
    assert storage.block is not None
    if len(shape) < 2:
        return None
    *lead, n, k = shape
    rows, columns = storage.block
    if lead and n % rows:
        return None
    return (*lead, -(-n // rows), -(-k // columns))


# --- writing ------------------------------------------------------------------------------------


def tensors_of(name: str, array: HybridArray | GroupedArray, style: str) -> dict[str, Stored]:
    """The tensors of a weight in a style. Raises ValueError or NotImplementedError, naming it, where it has none."""
    convention, formats = STYLES[style]
    if isinstance(array, GroupedArray):
        raise NotImplementedError(f"{name!r} is a GroupedArray; style {style!r} holds single matrices, save each g[i]")
    if array.columnwise is not None:
        remedy = "use array.T" if array.rowwise is None else "drop(columnwise=True) first"
        raise ValueError(f"{name!r} has a columnwise part, and style {style!r} holds the rowwise one alone; {remedy}")
    part = array.part("rowwise")
    storage = part.format.storage
    if replace(storage, pow2=False) not in [FORMATS[each].storage for each in formats]:
        raise ValueError(f"{name!r} is {part.format.name}, and style {style!r} holds {' or '.join(formats)}")
    shape, k = array.shape, array.shape[-1]
    if storage.element.stored_bits == 4:
        assert storage.block is not None
        if k % storage.block[1]:
            raise ValueError(
                f"{name!r} is {shape}, and style {style!r} needs a last axis of a multiple of {storage.block[1]}; "
                f"leave it as it is, or use style 'hqarray'"
            )
    scale_shape: tuple[int, ...] | None = ()
    if storage.block is not None:
        scale_shape = _scale_shape(storage, shape)
    if scale_shape is None or len(shape) < 2:
        raise NotImplementedError(
            f"{name!r} is {shape}: style {style!r} holds matrices whose blocks do not run from one into the next"
        )
    columns = part.codes.shape[1]
    wanted = (*shape[:-1], columns)
    if convention.blocked:
        assert storage.block is not None
        block = storage.block[1] // 2
        wanted = (*shape[:-1], columns // block, block)
    tensors = {
        name + convention.codes: typed(storage.element.dtype_name, _reshape(part.codes, wanted)),
        name + convention.scales: typed(storage.scale_dtype_name, _reshape(part.scales, scale_shape)),
    }
    if convention.global_scale is not None:
        tensors[name + convention.global_scale] = Stored("F32", part.global_scale.reshape(()))  # type: ignore[union-attr]
    return tensors


def _reshape(array: Array, shape: tuple[int, ...]) -> Array:
    return array if array.shape == shape else array.reshape(shape)
