"""A linear layer on CUDA by pointers: what a call launches once tensors of the same kind have been seen.

The first call checks, makes containers and multiplies as hqarray does everywhere; out of its plans a Step is put
together, which launches the same kernels for the next tensors that differ in their pointers alone. All memory is
torch's: bytes for each columnwise part, which autograd keeps, and bytes for what a call needs until it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch  # noqa: TID253  this module names torch
from cupy_backends.cuda.api.runtime import getDevice

from hqarray import cuda, cuda_gemm
from hqarray.arrays import HybridArray
from hqarray.cuda_calls import Call, Scratch
from hqarray.cuda_launch import NO_SEED
from hqarray.inputs import Slots
from hqarray.layout import Array
from hqarray.recipes import Recipe

from .torch_cuda import current_stream, maker

Key: TypeAlias = tuple[Any, ...]
Operands: TypeAlias = tuple[HybridArray, HybridArray, Array]
"""Left, right and out of a matmul."""

MOST_STEPS = 1024
MOST_BACKWARDS = 16

TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Whose data is where their pointer says; for other classes nothing is kept."""


def key_of(x: Any, w: Any, recipe: Any, bias: Any, amax: Any, needs: tuple[bool, bool]) -> Key | None:
    """What a call of linear depends on beside its pointers; None where nothing can be kept."""
    if type(x) not in TENSORS or type(w) not in TENSORS or torch.is_autocast_enabled("cuda"):
        return None
    try:
        return (
            recipe if type(recipe) is str else id(recipe), needs, _kind(x), _kind(w),
            None if bias is None else (_kind(bias), bias.data_ptr() & 255),
            None if amax is None else _kind_of_amax(amax),
        )
    except (AttributeError, RuntimeError):  # no tensor, or one without strides: the checks will say so
        return None


def _kind(tensor: Any) -> Key:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15


def _kind_of_amax(amax: Any) -> Key:
    array = amax.amax if type(amax) is Slots else amax
    return type(amax), array.shape, array.strides, array.dtype, array.data.device_id


_steps: dict[Key, Step] = {}


def find(key: Key | None) -> Step | None:
    """What is kept for calls of a kind."""
    return None if key is None else _steps.get(key)


# --- operands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix that is quantized: by which plan, and the bytes of its parts, 0 where there is none.

    number  of its seed and its amax among those of x, w and dy
    turned  the plan reads X.T
    takes   an amax that is given
    """

    plan: Any
    turned: bool
    number: int
    takes: bool
    rows: int
    columns: int

    @staticmethod
    def of(values: Array, array: HybridArray, number: int, amax: Any) -> Operand | None:
        """Of values that became an array; None where they are copied first, or empty."""
        if not values.size or (values.ndim != 2 and not values.flags.c_contiguous):
            return None
        row, column = (None if part is None else part.format for part in (array.rowwise, array.columnwise))
        takes = amax is not None and any(format is not None and format.measures_amax for format in (row, column))
        found = cuda.plan_of(values.reshape(-1, values.shape[-1]), row, column, takes)
        if found is None:
            return None
        sizes = (0 if part is None else part.nbytes for part in (array.rowwise, array.columnwise))
        return Operand(*found, number, takes, *sizes)

    def launch(self, stream: int, pointer: int, rows: int, columns: int, lines: int, seeds: Any, amax: Any) -> None:
        """Quantize the matrix at a pointer into parts at others; seeds and amax are those of x, w and dy."""
        seed, given, record = NO_SEED, 0, 0
        if seeds is not None:
            seed = seeds.data_ptr() + seeds.element_size() * self.number, 0, int(self.turned), 0, 0
        if self.takes:
            is_slots = type(amax) is Slots
            array = amax.amax if is_slots else amax
            at = array.strides[0] * self.number
            given, record = array.data.ptr + at, amax.current.data.ptr + at if is_slots else 0
        if self.turned:
            rows, columns = columns, rows
        self.plan.launch_at(stream, pointer, rows, columns, given=given, record=record, seed=seed, lines=lines)


def _places(*sizes: int) -> tuple[tuple[int, ...], int]:
    """Offsets of so many bytes each in one call's memory, and all its bytes."""
    scratch = Scratch()
    return tuple(scratch.take(nbytes) for nbytes in sizes), scratch.nbytes


def _pointer(tensor: Any) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# --- steps --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Product:
    """A product, and how its result is made."""

    call: Call
    make: Callable[..., Any]
    shape: tuple[int, ...]
    row_bytes: int

    @staticmethod
    def of(call: Call | None, tensor: Any) -> Product | None:
        """Of the call that wrote a tensor; None where it was not launched by pointers alone."""
        if call is None or call.plan is None or call.converts:
            return None
        make = maker(tensor.get_device(), tensor.dtype)
        return Product(call, make, tensor.shape, call.n * tensor.element_size())

    def run(self, stream: int, left: int, right: int, scratch: int, bias: int = 0) -> Any:
        """The result, of parts, scratch memory and a bias at pointers."""
        tensor = self.make(self.shape)
        self.call.launch(stream, left, right, (tensor.data_ptr(), self.row_bytes), bias, scratch)
        return tensor


@dataclass(frozen=True, slots=True)
class Backward:
    """dx = dy @ w and dw = dy.T @ x.

    products  the two, None where one is not wanted
    places    of the rowwise and columnwise part of dy, of scratch memory of its plan, and of the GEMMs
    """

    dy: Operand
    products: tuple[Product | None, Product | None]
    places: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """y = x @ w.T, and what backward has been, by kind of dy.

    given   the recipe as it was given: while this is kept, no other object can have its identity
    draws   an operand is rounded at random
    hollow  columnwise parts of x and w without their memory; None where backward does not read them
    places  of the rowwise parts of x and w, of scratch memory of their plans, and of the GEMM
    streams  that have been worked on; cuBLASLt's workspace of another one is made by the first call there
    """

    given: Any
    recipe: Recipe
    draws: bool
    device: int
    x: Operand
    w: Operand
    y: Product
    hollow: list[Any]
    places: tuple[int, ...]
    nbytes: int
    streams: set[int] = field(default_factory=set)
    backwards: dict[Key, Backward] = field(default_factory=dict)

    def run(self, x: Any, w: Any, bias: Any, seeds: Any, amax: Any) -> tuple[Any, tuple[Any, Any]] | None:
        """y, and the bytes that backward reads; None where the call must be made the long way."""
        stream = current_stream(self.device)
        if stream not in self.streams or getDevice() != self.device:
            return None
        empty, left, right = maker(self.device), self.x, self.w
        memory = empty(self.nbytes)
        x_columns, w_columns = (empty(n) if n else None for n in (left.columns, right.columns))
        base, (x_rows, w_rows, x_lines, w_lines, scratch) = memory.data_ptr(), self.places
        left.launch(stream, x.data_ptr(), base + x_rows, _pointer(x_columns), base + x_lines, seeds, amax)
        right.launch(stream, w.data_ptr(), base + w_rows, _pointer(w_columns), base + w_lines, seeds, amax)
        y = self.y.run(stream, base + x_rows, base + w_rows, base + scratch, _pointer(bias))
        return y, (x_columns, w_columns)

    def run_backward(
        self, dy: Any, needs: tuple[bool, bool], saved: Sequence[Any], amax: Any
    ) -> tuple[Any, Any] | None:
        """Gradients of x and w, each None where it is not needed; None where the call must be made the long way.

        saved  what run gave for backward, and the seeds
        """
        backward = self.backwards.get(_backward_key(dy, needs))
        stream = current_stream(self.device)
        if backward is None or stream not in self.streams or getDevice() != self.device:
            return None
        x, w, seeds = saved
        if (_pointer(x) | _pointer(w)) & 255:  # a hook on saved tensors gave others back
            return None
        memory, operand = maker(self.device)(backward.nbytes), backward.dy
        base, (rows, columns, lines, scratch) = memory.data_ptr(), backward.places
        operand.launch(stream, dy.data_ptr(), base + rows, base + columns, base + lines, seeds, amax)
        dgrad, wgrad = backward.products
        dx = None if dgrad is None else dgrad.run(stream, base + rows, w.data_ptr(), base + scratch)
        return dx, None if wgrad is None else wgrad.run(stream, base + columns, x.data_ptr(), base + scratch)

    def keep_backward(
        self, dy: Any, needs: tuple[bool, bool], values: Array, array: HybridArray,
        products: Sequence[Operands | None], gradients: Sequence[Any], amax: Any,
    ) -> None:
        """Keep what backward did for the next dy of its kind; values, dy's, became an array that was multiplied."""
        self.streams.add(current_stream(self.device))
        operand = Operand.of(values, array, 2, amax)
        made = [None if operands is None else Product.of(cuda_gemm.call_of(*operands), gradient)
                for operands, gradient in zip(products, gradients, strict=True)]
        if operand is None or any(product is None and operands is not None
                                  for product, operands in zip(made, products, strict=True)):
            return
        needed = max(0 if product is None else product.call.scratch_bytes for product in made)
        places, nbytes = _places(operand.rows, operand.columns, operand.plan.scratch_bytes, needed)
        if len(self.backwards) >= MOST_BACKWARDS:
            self.backwards.clear()
        self.backwards[_backward_key(dy, needs)] = Backward(operand, (made[0], made[1]), places, nbytes)


def _backward_key(dy: Any, needs: tuple[bool, bool]) -> Key:
    return needs, dy.stride(), dy.dtype, dy.data_ptr() & 15


def keep_forward(
    request: Any, recipe: Recipe, values: tuple[Array, Array], arrays: tuple[HybridArray, HybridArray], out: Array,
    bias: Array | None, hollow: list[Any], y: Any,
) -> Step | None:
    """Keep what a call of linear did for the next one of its kind; None where that cannot be kept.

    request  of torch_linear
    values   x and w, which became arrays
    out      over y, to which these were multiplied, with a bias
    """
    device = y.get_device()
    known = request.step
    if known is not None:
        known.streams.add(current_stream(device))
        return known  # type: ignore[no-any-return]
    x, w = (Operand.of(matrix, array, number, request.amax)
            for number, (matrix, array) in enumerate(zip(values, arrays, strict=True)))
    product = Product.of(cuda_gemm.call_of(arrays[0], arrays[1].T, out, bias), y)
    if x is None or w is None or product is None:
        return None
    places, nbytes = _places(
        x.rows, w.rows, x.plan.scratch_bytes, w.plan.scratch_bytes, product.call.scratch_bytes
    )
    draws = any(format.is_stochastic for format in recipe.formats)
    step = Step(
        request.recipe, recipe, draws, device, x, w, product, hollow, places, nbytes, {current_stream(device)}
    )
    if len(_steps) >= MOST_STEPS:
        _steps.clear()
    _steps[request.key] = step
    return step


__all__ = ["Step", "find", "keep_forward", "key_of"]
