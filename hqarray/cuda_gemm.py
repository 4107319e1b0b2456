"""matmul on CuPy: the first time a product is asked for it is made into a call, afterwards it is a look-up.

Which engine multiplies is gemm.choose_engine's choice; how its operands come to cuBLASLt is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import cupy  # noqa: TID253  this module is imported only once a CuPy array has arrived
import numpy as np
from cupy_backends.cuda.api.runtime import getDevice

from . import cublaslt, cuda, gemm
from .arrays import HybridArray, QuantizedArray
from .buffers import Packed
from .cuda_calls import Call, Decode, Finish, Scratch, Side, Spread, Tile, memory_of
from .cuda_launch import Kernel
from .formats import ROW, HighPrecision, Storage
from .layout import Array, PartLayout, Tiled128x4, part_layout, round_up
from .rawkernels import traits

MOST_CALLS = 4096

SCALE_MODES: dict[tuple[str, tuple[int, int] | None], str] = {
    ("float32", None): "SCALAR_32F",
    ("float32", (1, ROW)): "OUTER_VEC_32F",
    ("float32", (1, 128)): "VEC128_32F",
    ("float32", (128, 128)): "BLK128x128_32F",
    ("e8m0", (1, 32)): "VEC32_UE8M0",
    ("e4m3", (1, 16)): "VEC16_UE4M3",
}
"""CuBLASLt's name of how a stored format is scaled, by kind of scale and block."""


@cache
def chip_of(device: int) -> tuple[int, int]:
    """Compute capability of a device."""
    digits = cupy.cuda.Device(device).compute_capability
    return int(digits[:-1]), int(digits[-1])


# --- warm ---------------------------------------------------------------------------------------

Key: TypeAlias = tuple[Any, ...]
_calls: dict[Key, Call] = {}


def _array_key(x: Any) -> Key | None:
    if x is None:
        return None
    memory = x.data
    return x.shape, x.strides, x.dtype, memory.device_id, memory.ptr & 255


def _hybrid_key(x: HybridArray, part: Any) -> Key:
    buffers = part.buffers
    memory = buffers.memory
    return id(buffers.layout), x.shape, x.dtype, memory.device_id, memory.ptr & 255


def _key(a: Any, b: Any, out: Any, bias: Any, choices: Key) -> Key | None:
    """What a call depends on. Raises AttributeError for what is no packed part and no CuPy array."""
    return (
        _hybrid_key(a, a.rowwise) if type(a) is HybridArray else _array_key(a),
        _hybrid_key(b, b.columnwise) if type(b) is HybridArray else _array_key(b),
        (_array_key(out[0]), _array_key(out[1])) if type(out) is tuple else _array_key(out),
        _array_key(bias),
        choices,
    )


def warm(a: Any, b: Any, out: Any, bias: Any, choices: Key) -> Array | None:
    """The product, if the same one was made before; None for the first time, or where something must be checked.

    choices  what else the caller's arguments were
    """
    try:
        call = _calls.get(_key(a, b, out, bias, choices))  # type: ignore[arg-type]
    except (TypeError, AttributeError):  # not arrays, or choices that are none: the checks will say so
        return None
    if call is None:
        return None
    left = a.rowwise if type(a) is HybridArray else a
    right = b.columnwise if type(b) is HybridArray else b
    return call(left, right, out[0], out[1], bias) if type(out) is tuple else call(left, right, out, None, bias)


def call_of(a: Any, b: Any, out: Array, bias: Array | None = None) -> Call | None:
    """The call that multiplied a HybridArray by another one into out, with no other choices, where one was kept."""
    return _calls.get(_key(a, b, out, bias, (None, None, False, None)))  # type: ignore[arg-type]


# --- the first time -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """A checked matmul: operands as given and as matrices, shape and dtype of the result, what becomes of it.

    out, aux  arrays of that shape, or None
    choices   what else the caller's arguments were, for `warm`
    """

    a: Any
    b: Any
    left: gemm.Operand
    right: gemm.Operand
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    out: Array | None
    aux: Array | None
    epilogue: gemm.Epilogue
    engine: gemm.Engine
    choices: Key


def multiply(request: Request) -> Array:
    """See gemm.multiply; out where it is given."""
    out, aux, bias, dtype = request.out, request.aux, request.epilogue.bias, request.dtype
    given, n = bias, request.right.shape[0]
    x, y = (side.data.packed() if isinstance(side.data, QuantizedArray) else side.data
            for side in (request.left, request.right))
    with cuda._on_device_of(memory_of(x)):
        if bias is not None:
            bias = cupy.ascontiguousarray(bias, np.float32 if bias.dtype == np.float64 else None)
        target, spare = out, aux
        if out is not None and not _is_writable(out, n):
            target = cupy.ascontiguousarray(out) if request.epilogue.accumulate else cupy.empty(request.shape, dtype)
        if aux is not None and not _is_writable(aux, n):
            spare = cupy.empty(request.shape, aux.dtype)
        call = _make(request, x, y, target, spare, bias)
        if target is out and spare is aux and bias is given and _is_plain(request.a) and _is_plain(request.b):
            if len(_calls) >= MOST_CALLS:
                _calls.clear()
            outs = out if aux is None else (out, aux)
            _calls[_key(request.a, request.b, outs, bias, request.choices)] = call  # type: ignore[index]
        result = call(x, y if isinstance(y, QuantizedArray) else y.T, target, spare, bias)
        for array, written in ((out, target), (aux, spare)):
            if array is not None and written is not array:
                array[...] = written
    return result if out is None else out


def _is_plain(x: Any) -> bool:
    """Whether an operand's pointer and shape alone give its matrix."""
    if isinstance(x, HybridArray):
        return all(isinstance(part.buffers, Packed) for _, part in x.parts())
    return x.ndim == 2 or bool(x.flags.c_contiguous)


def _is_writable(out: Array, n: int) -> bool:
    """Whether rows of n elements, whatever lies between them, can be written in place."""
    return bool(out.flags.c_contiguous) or (out.ndim == 2 and (out.strides[1] == out.dtype.itemsize or n <= 1))


def _make(
    request: Request, x: Any, y: Any, out: Array | None, aux: Array | None, bias: Array | None
) -> Call:
    """The call of a request whose arrays can be read and written in place."""
    left, right, dtype, epilogue = request.left, request.right, request.dtype, request.epilogue
    device = getDevice()
    (m, k), n = left.shape, right.shape[0]
    keeps = tuple(getattr(getattr(side, "buffers", None), "layout", None) for side in (x, y))
    call = Call(keeps, device, request.shape, dtype, m, n)
    if not m or not n:
        return call
    finish = traits.Finish(dtype.name, _name(bias), _name(aux), epilogue.activation == "gelu", epilogue.accumulate)
    if not k:
        return replace(call, finish=Finish(_finish_kernel(finish, m, n, device)))
    scratch = Scratch()
    left_side, right_side = _sides(x, y, left.storage, right.storage, request.engine, scratch, device)
    has_scalars = left_side.scalar_offset > 0 or right_side.scalar_offset > 0
    alpha = -1
    if has_scalars:
        alpha = scratch.take(16)
        if left_side.work is not None:
            left_side = _with_alpha(left_side)
        else:
            right_side = _with_alpha(right_side)
    pointers = [array.data.ptr for array in (out, aux, bias) if array is not None]
    pointers += [memory_of(z).ptr for z, side in ((x, left_side), (y, right_side)) if side.convert is None]
    alignment = 256 if all(pointer % 256 == 0 for pointer in pointers) else 16
    sides = (left_side, right_side)
    base = _Base(sides, has_scalars, request.engine.fast_accumulate, alignment)
    refused = None
    for product, is_direct in _attempts(base, m, n, dtype, out, aux, bias, epilogue):
        try:
            plan = _plan_of(product, device)
        except cublaslt.Refused:
            refused = product
            continue
        sides = (_spread(left_side, product.a, scratch), _spread(right_side, product.b, scratch))
        last = None
        if not is_direct:
            offset = scratch.take(product.a.outer * product.pitch * 4)
            last = Finish(_finish_kernel(finish, m, n, device), offset, product.pitch)
        is_bare = is_direct and not scratch.nbytes and all(side.convert is None for side in sides)
        return replace(call, sides=sides, plan=plan, beta=int(epilogue.accumulate and is_direct), finish=last,
                       scratch_bytes=scratch.nbytes, alpha=alpha, is_bare=is_bare)
    assert refused is not None
    names = " and ".join(f"{side.operand.type} {side.operand.scale or ''}".strip() for side in sides)
    raise cublaslt.Refused(
        f"cuBLASLt {cublaslt.version_text(cublaslt.library().get_version())} refuses {left.shape} @ "
        f"{right.shape[::-1]} of {names}: {cublaslt.reason_of(cublaslt.library(), lambda: _plan_of(refused, device))}; "
        f"another engine= may do"
    )


def _name(array: Array | None) -> str | None:
    return None if array is None else array.dtype.name


def _finish_kernel(finish: traits.Finish, m: int, n: int, device: int) -> Kernel:
    return cuda._kernel(traits.finish_launch(finish), m, n, device)


# --- sides --------------------------------------------------------------------------------------


def _sides(
    x: Any, y: Any, a: Storage, b: Storage, engine: gemm.Engine, scratch: Scratch, device: int
) -> tuple[Side, Side]:
    if engine.name != "bf16x3":
        return (_side(x, a, engine.name, 1, False, scratch, device),
                _side(y, b, engine.name, 1, False, scratch, device))
    split_right = b.bf16_terms > 1
    return (_side(x, a, engine.name, 3, not split_right, scratch, device),
            _side(y, b, engine.name, 3, split_right, scratch, device))


def _side(x: Any, storage: Storage, engine: str, terms: int, split: bool, scratch: Scratch, device: int) -> Side:
    """One operand (outer, k), a packed part or a plain matrix, of a product by an engine.

    terms, split  of bf16x3: how many bf16 numbers an element becomes, and whether they add up to it
    """
    wanted = {"native": storage.element.name, "fp32": "float32"}.get(engine, "bfloat16")
    is_ready = storage.scale == "none" and storage.element.name == wanted and terms == 1
    convert = None
    if not isinstance(x, QuantizedArray):
        operand = _lies(x) if is_ready and x.dtype.name == wanted else None
        if operand is not None:
            return Side(operand)
        convert = HighPrecision(storage.element.name)
    outer, k = x.shape
    layout = part_layout(storage, (outer, k))
    row_bytes = layout.codes.pitch * layout.codes.itemsize
    pitch = row_bytes * 8 // storage.element.stored_bits
    if is_ready:
        return Side(cublaslt.Operand(wanted, outer, pitch, pitch), convert)
    if engine == "native":
        return _native_side(storage, layout, pitch, scratch, device)
    width = round_up(k, 8)
    target_bytes = terms * width * (4 if wanted == "float32" else 2)
    kernel = cuda._kernel(traits.decode_launch(storage, wanted, terms, split), outer, width, device)
    target = scratch.take(outer * target_bytes)
    own = layout.global_scale_offset if storage.global_per_row else 0
    work = Decode(kernel, row_bytes, layout.scales_shape[1], target, target_bytes, outer, width, own)
    scalar_offset = 0
    if traits.left_to_alpha(storage)[1]:
        scalar_offset = layout.global_scale_offset if storage.global_scale else layout.scales_offset
    operand = cublaslt.Operand(wanted, outer, terms * width, terms * width)
    return Side(operand, convert, layout.scales_offset, scalar_offset, work)


def _lies(x: Array) -> cublaslt.Operand | None:
    """A plain matrix (outer, k) as cuBLASLt can read it in place; None where it cannot."""
    size, (outer, k) = x.dtype.itemsize, x.shape
    if x.data.ptr % 16 or not x.size:
        return None
    for k_major, (line, step), length in ((True, x.strides, k), (False, x.strides[::-1], outer)):
        if step == size and line % 16 == 0 and line >= length * size:
            return cublaslt.Operand(x.dtype.name, outer, k, line // size, k_major)
    return None


def _native_side(storage: Storage, layout: PartLayout, pitch: int, scratch: Scratch, device: int) -> Side:
    """A part that cuBLASLt multiplies as stored; on Blackwell with its scales in tiles."""
    outer, mode = layout.codes.outer, SCALE_MODES[storage.scale, storage.block]
    if storage.scale == "float32":
        operand = cublaslt.Operand(storage.element.name, outer, pitch, pitch, scale=mode)
        return Side(operand, scales_offset=layout.scales_offset)
    assert storage.block is not None
    wider, rows, bits = round_up(pitch, 32), layout.codes.rows, storage.element.stored_bits
    lines, blocks = layout.num_scales
    tiles = scratch.take(int(np.prod(Tiled128x4().buffer_shape(rows, wider // storage.block[1]))))
    codes = scratch.take(rows * wider * bits // 8) if wider != pitch else -1
    kernel = cuda._kernel(traits.tile_scales_launch(), lines, blocks, device)
    work = Tile(kernel, layout.scales_shape[1], lines, blocks, tiles, codes, rows, pitch * bits // 8, wider * bits // 8)
    operand = cublaslt.Operand(storage.element.name, outer, wider, wider, scale=mode)
    return Side(operand, None, layout.scales_offset, layout.global_scale_offset if storage.global_scale else 0, work)


def _with_alpha(side: Side) -> Side:
    """The side whose kernel also writes alpha."""
    assert isinstance(side.work, (Decode, Tile))
    return replace(side, work=replace(side.work, writes_alpha=True))


def _spread(side: Side, operand: cublaslt.Operand, scratch: Scratch) -> Side:
    """The side with its scales for as many lines as the product has."""
    pitch, wider = round_up(side.operand.outer, 4), round_up(operand.outer, 4)
    if operand.scale not in ("VEC128_32F", "OUTER_VEC_32F") or pitch == wider:
        return side
    blocks = -(-operand.k // 128) if operand.scale == "VEC128_32F" else 1
    return replace(side, work=Spread(4 * pitch, 4 * wider, blocks, scratch.take(4 * wider * blocks)))


# --- attempts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Base:
    """What all attempts at a product have in common."""

    sides: tuple[Side, Side]
    device_scalars: bool
    fast_accumulate: bool
    alignment: int

    @property
    def is_scaled(self) -> bool:
        return self.sides[0].operand.scale is not None

    def product(self, m: int, n: int, type: str, pitch: int, bias: str | None = None) -> cublaslt.Product:
        k = min(side.operand.k for side in self.sides)  # what lies beyond is zero in both
        a, b = (replace(side.operand, outer=outer, k=k) for side, outer in zip(self.sides, (m, n), strict=True))
        return cublaslt.Product(a, b, type, pitch, bias, self.device_scalars, self.fast_accumulate and self.is_scaled,
                                self.alignment)


def _attempts(
    base: _Base, m: int, n: int, dtype: np.dtype[Any], out: Array | None, aux: Array | None, bias: Array | None,
    epilogue: gemm.Epilogue,
) -> Iterator[tuple[cublaslt.Product, bool]]:
    """Products that would do, best first, and whether each writes the result itself or a sum to be finished.

    Scaled codes have zero rows up to a multiple of 16. cuBLASLt 13.1 on sm_90 wants n % 8 == 0, and m % 4 == 0 where
    the left operand has 1x128 blocks.
    """
    pitch = _pitch(out, n, dtype.itemsize)
    if (
        pitch
        and epilogue.activation is None  # cuBLASLt's gelu is off by more than bf16 rounds
        and aux is None
        and not (epilogue.accumulate and dtype.itemsize < 4 and not base.is_scaled)  # it rounds the product first
        and (bias is None or (bias.dtype == dtype and bias.data.ptr % 16 == 0))
    ):
        yield base.product(m, n, dtype.name, pitch, _name(bias)), True
    for multiple in (1, 4, 8, 16) if base.is_scaled else (1,):
        rows, columns = round_up(m, multiple), round_up(n, max(multiple, 8) if multiple > 1 else 1)
        yield base.product(rows, columns, "float32", round_up(columns, 8)), False


def _pitch(out: Array | None, n: int, itemsize: int) -> int:
    """Elements between rows where cuBLASLt can write them in place; 0 where it cannot."""
    row_bytes = n * itemsize
    if out is not None:
        if out.ndim == 2 and not out.flags.c_contiguous:
            row_bytes = out.strides[0]
        if out.data.ptr % 16:
            return 0
    return row_bytes // itemsize if row_bytes % 16 == 0 and row_bytes >= n * itemsize else 0


_plans: dict[tuple[int, cublaslt.Product], cublaslt.Plan] = {}


def _plan_of(product: cublaslt.Product, device: int) -> cublaslt.Plan:
    plan = _plans.get((device, product))
    if plan is None:
        if len(_plans) >= MOST_CALLS:
            _plans.clear()
        plan = cublaslt.Plan(cublaslt.library(), cublaslt.handles.of(device), product)
        _plans[device, product] = plan
    return plan
