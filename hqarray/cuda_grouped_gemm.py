"""Products of groups on CuPy: one grouped cuBLASLt call for all members, whose sizes the host need not know.

As in cuda_gemm a product is made into a call the first time, and looked up afterwards. Work goes to CuPy's current
stream on the arrays' device, nothing synchronises, and a captured graph follows sizes that change.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import cupy  # noqa: TID253  this module is imported only once a CuPy array has arrived
import numpy as np
from cupy.cuda import alloc  # noqa: TID253
from cupy_backends.cuda.api.runtime import getDevice, memsetAsync, streamIsCapturing

from . import cublaslt, cublaslt_grouped, cuda, gemm
from .cublaslt_grouped import Arrays, Plan, Product, Unavailable
from .cuda_calls import Scratch, _constants, workspace
from .cuda_gemm import MOST_CALLS, _name, chip_of
from .cuda_grouped import Groups, groups_of
from .cuda_grouped_sides import OUT, SCRATCH, A, B, Decode, Rows, Side, Target, side_of, uniform
from .cuda_launch import Kernel, captured, kernel_of, stream_of
from .formats import ROW
from .grouped_gemm import Request
from .grouped_parts import GroupedPart
from .groups import Sizes
from .layout import Array, round_up
from .rawkernels import geometry, traits

# Structs of the kernels: every field takes eight bytes.
_SET_UP = struct.Struct("=36q")
_FINISH = struct.Struct("=19q")

# --- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetUp:
    """The kernel that fills `Arrays`, and its constant arguments."""

    kernel: Any
    targets: tuple[Target, ...]  # codes of B and A, the result, scales of B and A
    constants: tuple[int, ...]   # ragged axis; m, n, k; unit and terms of k; pitch of the result
    nbytes: int                  # of the arrays
    row_bytes: int               # of the result, where the kernel zeroes rows behind the last member; else 0

    def launch(self, bases: tuple[int, int, int, int], groups: Groups, arrays: int, stream: int) -> None:
        b, a, result, scales_b, scales_a = self.targets
        self.kernel.launch(
            stream, _SET_UP, *groups, bases[b.base] + b.offset, *b.units, bases[a.base] + a.offset, *a.units,
            bases[result.base] + result.offset, *result.units, bases[scales_b.base] + scales_b.offset, *scales_b.units,
            bases[scales_a.base] + scales_a.offset, *scales_a.units, *self.constants, arrays,
            bases[OUT] if self.row_bytes else 0, self.row_bytes,
        )


@dataclass(frozen=True, slots=True)
class Finish:
    """The finishing kernel over float32 sums in scratch memory, stacked along rows."""

    kernel: Any
    groups: Groups | None  # None: the ragged sizes of the product
    n: int
    row_bytes: int
    zeros_rest: bool
    bias_bytes: int  # between rows of the bias
    scalars: tuple[int, int] = (0, 0)  # offsets in the parts
    sum: int = -1                      # offset in scratch memory; -1: a sum over nothing
    sum_pitch: int = 0

    def launch(self, bases: tuple[int, int, int, int], groups: Groups, bias: int, stream: int) -> None:
        a, b, out, scratch = bases
        of_a, of_b = self.scalars
        self.kernel.launch(
            stream, _FINISH, scratch + self.sum if self.sum >= 0 else 0, self.sum_pitch, bias, out, self.row_bytes,
            0, 0, 0, self.n, *(groups if self.groups is None else self.groups), self.bias_bytes,
            a + of_a if of_a else 0, b + of_b if of_b else 0, self.zeros_rest,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A product of groups but for its pointers.

    keeps     the layouts whose identity stands for them in a key
    sizes     name of the request's sizes that are ragged, None where all members are alike
    capacity  of those sizes, in both parts
    decodes   kernels that make operands, each with what it reads: A or B
    scalars   pointers to alpha and beta
    arrays    one block of `Arrays` for each stream: a call waits there for the one before
    """

    keeps: tuple[Any, ...]
    device: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_empty: bool
    groups: Groups
    sizes: str | None
    capacity: int
    decodes: tuple[tuple[int, Decode], ...] = ()
    set_up: SetUp | None = None
    plan: Plan | None = None
    scalars: tuple[int, int] = (0, 0)
    zero_first: int = 0  # bytes of the result that are zeroed before
    finish: Finish | None = None
    scratch_bytes: int = 0
    arrays: dict[int, Any] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def __call__(self, request: Request) -> Array:
        """Launch for a request like the one it was made for."""
        sizes = request.m if self.sizes is None else getattr(request, self.sizes)
        return self.run(request.a, request.b, sizes, request.out, request.bias)

    def run(self, a: GroupedPart, b: GroupedPart, ragged: Sizes, out: Array | None, bias: Array | None) -> Array:
        """Launch for the pieces of such a request; ragged are its sizes that are, any where none are."""
        if getDevice() != self.device:
            with cupy.cuda.Device(self.device):
                return self.run(a, b, ragged, out, bias)
        if out is None:
            out = cupy.ndarray(self.shape, self.dtype)
        if self.is_empty:
            return out
        stream = stream_of(self.device)
        groups = self.groups
        if self.sizes is not None:
            pointer, kind, count, each, _, alignment = groups_of(ragged)
            groups = (pointer, kind, count, each, self.capacity, alignment)
        is_capturing, base = streamIsCapturing(stream), 0
        if self.scratch_bytes:
            memory = alloc(self.scratch_bytes)  # freed after this call, in the stream's order
            base = memory.ptr
            if is_capturing:
                captured.append(memory)
        bases = (a.memory.ptr, b.memory.ptr, out.data.ptr, base)
        if self.plan is not None:
            self._multiply(bases, groups, stream, is_capturing)
        if self.finish is not None:
            self.finish.launch(bases, groups, 0 if bias is None else bias.data.ptr, stream)
        return out

    def _multiply(self, bases: tuple[int, int, int, int], groups: Groups, stream: int, is_capturing: bool) -> None:
        plan, set_up = self.plan, self.set_up
        assert plan is not None and set_up is not None
        for source, decode in self.decodes:
            decode.launch(bases[source], bases[SCRATCH], groups, stream)
        if self.zero_first:
            memsetAsync(bases[OUT], 0, self.zero_first, stream)
        space = workspace(self.device, stream, "grouped")
        with self.lock:  # another thread on this stream would fill the same arrays
            arrays = self.arrays_of(stream, is_capturing)
            set_up.launch(bases, groups, arrays, stream)
            plan.run(arrays, self.scalars, space, stream)

    def arrays_of(self, stream: int, is_capturing: bool) -> int:
        """Pointer to a block of `Arrays`: this stream's, or one of a graph's own."""
        assert self.set_up is not None
        if is_capturing:
            memory = alloc(self.set_up.nbytes)
            captured.append((memory, self.keeps))
            return memory.ptr  # type: ignore[no-any-return]
        memory = self.arrays.get(stream)
        if memory is None:
            memory = self.arrays[stream] = alloc(self.set_up.nbytes)
        return memory.ptr  # type: ignore[no-any-return]


# --- the first time -----------------------------------------------------------------------------

Key: TypeAlias = tuple[Any, ...]
_calls: dict[Key, Call] = {}
_plans: dict[tuple[int, Product], Plan] = {}


def multiply(request: Request) -> Array:
    """See grouped_gemm.multiply. Raises Unavailable where the members must be multiplied one by one."""
    key = _key(request)
    call = _calls.get(key)
    if call is not None:
        return call(request)
    with cuda._on_device_of(request.a.memory):
        readable = _readable(request)
        call = _make(readable)
        if readable is not request and streamIsCapturing(stream_of(call.device)):
            captured.append(readable)
        if readable is request:
            if len(_calls) >= MOST_CALLS:
                _calls.clear()
            _calls[key] = call
        return call(readable)


def call_of(request: Request) -> Call | None:
    """The call that multiplied a request before; None where its arrays were copied first."""
    return _calls.get(_key(request))


def _key(request: Request) -> Key:
    """What a call depends on."""
    a, b, out, bias, m, k = request.a, request.b, request.out, request.bias, request.m, request.k
    memory, other, engine = a.memory, b.memory, request.engine
    return (
        id(a.layout), id(b.layout), memory.device_id, (memory.ptr | other.ptr) & 15, request.ragged, m.capacity,
        m.alignment, k.capacity, b.sizes.capacity, request.dtype, None if out is None else out.data.ptr & 15,
        None if bias is None else (bias.dtype, bias.strides), request.activation, request.accumulate, engine.name,
        engine.fast_accumulate, engine.reason == "asked for",
    )


def _readable(request: Request) -> Request:
    """The request with parts on 16 bytes and a bias whose elements lie side by side."""
    left, right = (part.copy() if part.memory.ptr % 16 else part for part in (request.a, request.b))
    bias = request.bias
    if bias is not None:
        if bias.dtype == np.float64:
            bias = bias.astype(np.float32)
        if bias.shape[1] > 1 and bias.strides[1] != bias.itemsize:
            bias = cupy.ascontiguousarray(bias)
    if left is request.a and right is request.b and bias is request.bias:
        return request
    return replace(request, a=left, b=right, bias=bias)


def _make(request: Request) -> Call:
    """The call of a request whose arrays can be read in place."""
    a, b, m, n, num_groups = request.a, request.b, request.m, request.n.each, request.a.num_groups
    assert n is not None
    device, dtype, out, bias = getDevice(), request.dtype, request.out, request.bias
    axis = {"rows": "m", "k": "k", "none": None}[request.ragged]
    ragged = m if axis == "m" else replace(request.k, capacity=min(a.sizes.capacity, b.sizes.capacity))
    capacity = m.capacity if m.each is None else num_groups * m.each  # stacked rows
    groups = uniform(num_groups, m.each or 0)
    call = Call(
        (a.layout, b.layout), device, request.shape, dtype, not (capacity and n), groups, axis,
        ragged.capacity if axis else capacity,
    )
    if call.is_empty:
        return call
    zeros_rest = axis == "m" and out is None
    finish = Finish(None, None if axis == "m" else groups, n, n * dtype.itemsize, zeros_rest,
                    0 if bias is None else bias.strides[0])
    what = traits.Finish(dtype.name, _name(bias), None, request.activation == "gelu", request.accumulate, grouped=True)
    if not (request.k.each if axis != "k" else ragged.capacity):
        return replace(call, finish=replace(finish, kernel=_finish_kernel(what, capacity, num_groups, n, device)))
    engine = _engine(request, chip_of(device))
    scratch = Scratch()
    sides = _sides(request, engine, ragged if axis == "k" else a.sizes, ragged if axis == "k" else b.sizes, scratch,
                   device)
    scalars = (sides[0].scalars_offset, sides[1].scalars_offset)
    refused = ""
    for product, pitch, is_direct in _attempts(request, sides, ragged if axis == "k" else None, capacity, scalars):
        try:
            plan = _plan_of(product, device, call)
        except cublaslt.Refused as error:
            refused = f"{error} of {product}"
            continue
        itemsize = dtype.itemsize if is_direct else 4
        sum_offset = -1 if is_direct else scratch.take(capacity * pitch * 4)
        source, offset = (OUT, 0) if is_direct else (SCRATCH, sum_offset)
        target = Rows(capacity, m.each).target(source, offset, pitch * itemsize)
        gaps = is_direct and zeros_rest and m.alignment > 1  # rows between members, not just behind the last
        by_kernel = is_direct and zeros_rest and not gaps
        k_unit, k_terms = sides[0].k_unit, sides[0].k_terms
        set_up = SetUp(
            kernel_of(traits.group_gemm_launch(), geometry.setup_grid(by_kernel), device),
            (sides[1].codes, sides[0].codes, target, sides[1].scales, sides[0].scales),
            ({"none": 0, "rows": 1, "k": 2}[request.ragged], m.each or 0, n, request.k.each or 0, k_unit, k_terms,
             pitch), Arrays(num_groups).nbytes, pitch * itemsize if by_kernel else 0,
        )
        last = None
        if not is_direct:
            what = replace(what, scaled=any(scalars))
            kernel = _finish_kernel(what, capacity, num_groups, n, device)
            last = replace(finish, kernel=kernel, scalars=scalars, sum=sum_offset, sum_pitch=pitch)
        decodes = tuple((source, side.decode) for source, side in zip((A, B), sides, strict=True)
                        if side.decode is not None)
        return replace(
            call, decodes=decodes, set_up=set_up, plan=plan, finish=last,
            scalars=_scalars(int(request.accumulate and is_direct), device),
            zero_first=capacity * pitch * itemsize if gaps else 0, scratch_bytes=scratch.nbytes,
        )
    version = cublaslt.version_text(cublaslt.library().get_version())
    raise Unavailable(f"cuBLASLt {version} refuses a grouped product: {refused}; give the sizes on the host, so that "
                      f"members are multiplied one by one")


def _scalars(beta: int, device: int) -> tuple[int, int]:
    """Pointers to an alpha of one and a beta of zero or one."""
    if not cublaslt_grouped.DEVICE_SCALARS:
        return cublaslt.HOST_SCALARS[beta]
    constants = _constants(device)
    return constants[1], constants[beta]


def _engine(request: Request, chip: tuple[int, int]) -> gemm.Engine:
    """The engine of a request, checked. Raises Unavailable where no grouped product has it."""
    engine = request.engine
    advice = "give the sizes on the host, so that members are multiplied one by one"
    if engine.name == "fp32":
        raise Unavailable(f"cuBLASLt has no grouped float32 products ({engine.reason or 'asked for'}); {advice}")
    if engine.name == "native" and request.a.layout.storage.block == (1, ROW):
        raise Unavailable(f"cuBLASLt has no grouped products of a scale for each row; {advice}")
    if engine.name == "native" and request.a.layout.storage.scale in ("e8m0", "e4m3"):
        if engine.reason == "asked for":
            raise Unavailable(f"grouped products of byte scales are not built for sm_{chip[0]}{chip[1]}; {advice}, or "
                              f"engine='bf16'")
        return gemm.Engine("bf16", "grouped products of byte scales are emulated")
    return engine


def _sides(
    request: Request, engine: gemm.Engine, a_sizes: Sizes, b_sizes: Sizes, scratch: Scratch, device: int
) -> tuple[Side, Side]:
    a, b, name = request.a, request.b, "bfloat16" if engine.name == "bf16" else engine.name
    terms, split = 1, (False, False)
    if engine.name == "bf16x3":
        is_right = b.layout.storage.bf16_terms > 1
        terms, split = 3, (not is_right, is_right)
    return (side_of(a, A, a_sizes, name, terms, split[0], scratch, device),
            side_of(b, B, b_sizes, name, terms, split[1], scratch, device))


def _attempts(
    request: Request, sides: tuple[Side, Side], ragged_k: Sizes | None, capacity: int, scalars: tuple[int, int]
) -> Iterator[tuple[Product, int, bool]]:
    """Products that would do, best first, the pitch of the result, and whether each writes the result itself."""
    left, right = sides
    out, n, dtype, num_groups = request.out, request.n.each or 0, request.dtype, request.a.num_groups
    k = request.k.each or 0 if ragged_k is None else ragged_k.capacity // num_groups
    scales = None if left.scale is None or right.scale is None else (left.scale, right.scale)
    averages = (max(1, capacity // num_groups), n, left.k_terms * round_up(max(1, k), left.k_unit))
    product = Product(num_groups, left.type, right.type, dtype.name, scales, averages,
                      request.engine.fast_accumulate and scales is not None)
    if (
        n * dtype.itemsize % 16 == 0
        and (out is None or out.data.ptr % 16 == 0)
        and request.bias is None
        and request.activation is None
        and not any(scalars)
        and not (request.accumulate and dtype.itemsize < 4 and scales is None)  # it may round the product first
    ):
        yield product, n, True
    yield replace(product, type="float32"), round_up(n, 8), False


def _finish_kernel(finish: traits.Finish, capacity: int, num_groups: int, n: int, device: int) -> Kernel:
    launch = traits.finish_launch(finish)
    return kernel_of(launch, geometry.grouped_grid(launch.tile, capacity, num_groups, n), device)


def _plan_of(product: Product, device: int, call: Call) -> Plan:
    """Raises Unavailable where there are no grouped products, Refused where there is not this one."""
    plan = _plans.get((device, product))
    if plan is None:
        bindings = cublaslt.library()
        reason = cublaslt_grouped.refusal(bindings, chip_of(device), product)
        if reason is not None:
            raise Unavailable(reason)
        stream = stream_of(device)
        memory = alloc(Arrays(product.num_groups).nbytes)
        if streamIsCapturing(stream):
            captured.append(memory)
        else:
            call.arrays[stream] = memory
        if len(_plans) >= MOST_CALLS:
            _plans.clear()
        plan = _plans[device, product] = Plan(bindings, cublaslt.handles.of(device), product, memory.ptr)
    return plan
