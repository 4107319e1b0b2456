"""Parts that the reference made, copied to a GPU byte for byte, whatever CuPy can quantize itself."""

import numpy as np

import hqarray as hq
from hqarray.arrays import QuantizedArray
from hqarray.buffers import Packed
from hqarray.grouped_parts import GroupedPart
from hqarray.layout import part_layout


def poisoned(part):
    """The part in the library's own layout, with NaN in what lies between its scales and behind."""
    layout = part_layout(part.format.storage, part.shape)
    buffers = Packed.of(np.full(layout.nbytes, 0xFF, np.uint8), layout, layout.has_global_scale, part.amax is not None)
    buffers.padded_codes.view(np.uint8)[...] = 0
    packed = part.packed()
    for target, source in ((buffers.codes, packed.codes), (buffers.scales, packed.scales),
                           (buffers.global_scale, packed.global_scale), (buffers.amax, packed.amax)):
        if target is not None:
            target[...] = source
    return QuantizedArray(part.format, part.shape, buffers)


def on_gpu(cupy, part):
    """A part with poisoned padding of scales, on the GPU."""
    buffers = poisoned(part).buffers
    moved = Packed.of(cupy.asarray(buffers.base), buffers.layout, buffers.has_global_scale, buffers.has_amax)
    return QuantizedArray(part.format, part.shape, moved)


def array_on_gpu(cupy, array):
    """A HybridArray, or a group with its sizes on the host, on the GPU."""
    if isinstance(array, hq.GroupedArray):
        parts = [None if part is None else _group_on_gpu(cupy, part) for part in (array.rowwise, array.columnwise)]
        return hq.GroupedArray(*parts, array.rows, array.columns, array.dtype)
    parts = [None if part is None else on_gpu(cupy, part) for part in (array.rowwise, array.columnwise)]
    return hq.HybridArray(*parts, shape=array.shape, dtype=array.dtype)


def _group_on_gpu(cupy, part):
    return GroupedPart(part.format, part.layout, part.sizes, cupy.asarray(part.base).data, part.has_amax)
