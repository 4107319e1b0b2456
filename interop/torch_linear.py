"""Linear layers as autograd functions: y = x @ w.T and its two gradients by hqarray's quantizers and GEMMs.

Work runs on torch's current stream, all memory is torch's, and what the backward pass reads (columnwise parts, as
bytes) is saved with save_for_backward, so that hooks, checkpointing and the release after backward work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch  # noqa: TID253  this module names torch

from hqarray import ops
from hqarray.arrays import HybridArray
from hqarray.formats import Format
from hqarray.gemm import result_dtype
from hqarray.grouped import GroupedArray
from hqarray.grouped_ops import grouped_quantize
from hqarray.layout import Array
from hqarray.linear import STEP, amax_of, check_amaxes
from hqarray.recipes import ROLES, Recipe, Role, as_recipe

from .torch_arrays import NUMPY_DTYPES, TORCH_DTYPES, as_array, emptied, filled, on_torch

FORWARD = "hqarray's linear layers have no forward-mode derivative; use torch.autograd.grad or .backward()"

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def linear(x: Any, w: Any, recipe: Recipe | Format | str, bias: Any = None, *, amax: Any = None) -> Any:
    """A linear layer whose three products are of quantized operands.

    x        (..., k) float tensor on the CPU or CUDA
    w        (n, k), where x is
    recipe   a Recipe, or the name of a recipe or format
    bias     (n,), added in the GEMM
    amax     as in hqarray.linear_forward: three slots of a DelayedScaling, which a recipe with delayed scaling needs,
             or float32 (3,)
    returns  x @ w.T + bias (..., n), of the dtype that hqarray.matmul gives: the common one, float32 where they differ

    Gradients pass the quantizers straight through: dx = dy @ w, dw = dy.T @ x of quantized dy, w and x, as
    hqarray.linear_backward has them, in the dtypes of x and w; a direction is quantized only where it is read. Under
    autocast x, w and bias are taken in its dtype. A recipe that rounds at random draws one seed a call from torch's
    default generator of the device, as dropout does: checkpointing repeats it, and a replayed CUDA graph draws anew.
    torch.compile breaks its graph here, and runs this as it is. Differentiating twice, or inside torch.func's
    transforms (vmap, grad ...), raises NotImplementedError.
    """
    if torch.compiler.is_compiling():
        return _eager_linear(x, w, recipe, bias, amax=amax)
    _expect_no_transform()
    if isinstance(amax, torch.Tensor):
        amax = as_array(amax)
    request = _Request(recipe, amax, *_kept(x, w, recipe, bias, amax))
    if request.step is not None:  # what is checked below was checked when it was made
        return _Linear.apply(x, w, bias, request)
    recipe = as_recipe(recipe)
    x, w, bias = _checked(x, w, bias)
    if w.ndim != 2 or not x.ndim or x.shape[-1] != w.shape[1]:
        raise ValueError(f"linear needs x (..., k) and w (n, k), these are {tuple(x.shape)} and {tuple(w.shape)}")
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        raise ValueError(f"bias must have shape {(w.shape[0],)}, it has {tuple(bias.shape)}")
    check_amaxes(recipe, amax)
    return _Linear.apply(x, w, bias, request)


def grouped_linear(
    x: Any, w: Any, sizes: Any, recipe: Recipe | Format | str, bias: Any = None, *, amax: Any = None
) -> Any:
    """Linear layers of groups of rows, each by its own weight: the experts of a mixture.

    x        (T, k) float tensor, the rows of group after group
    w        (num_groups, n, k), where x is
    sizes    rows of each group, summing to T or less: integers, a tensor of them on the CPU, or beside CUDA tensors an
             int32 or int64 tensor there, which the host then never reads
    recipe   a Recipe, or the name of a recipe or format
    bias     (num_groups, n), added in the GEMM
    amax     as in linear, 3 * num_groups: those of the groups of x, then of w, then of dy
    returns  (T, n): rows of x @ w[i].T + bias[i]; rows of no group are zero, and so are their gradients

    An empty group's weight and bias have a zero gradient. Otherwise as linear.
    """
    if torch.compiler.is_compiling():
        return _eager_grouped_linear(x, w, sizes, recipe, bias, amax=amax)
    _expect_no_transform()
    recipe = as_recipe(recipe)
    x, w, bias = _checked(x, w, bias)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(
            f"grouped_linear needs x (T, k) and w (num_groups, n, k), these are {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if bias is not None and bias.shape != w.shape[:2]:
        raise ValueError(f"bias must have shape {tuple(w.shape[:2])}, it has {tuple(bias.shape)}")
    kept, host = _sizes(sizes, x)
    count = len(host) if kept is None else len(kept)
    if count != w.shape[0]:
        raise ValueError(f"grouped_linear has {count} sizes and {w.shape[0]} weights; give one size for each")
    if isinstance(amax, torch.Tensor):
        amax = as_array(amax)
    check_amaxes(recipe, amax, count)
    return _GroupedLinear.apply(x, w, bias, kept, host, recipe, amax, torch.is_grad_enabled())


# What torch.compile calls without looking inside; unlike torch.compiler.disable, this imports the compiler only then.
_eager_linear = torch._disable_dynamo(linear)
_eager_grouped_linear = torch._disable_dynamo(grouped_linear)


def _expect_no_transform() -> None:
    """Kernels read memory, and torch.func's tensors have none."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "hqarray's linear layers do not run inside torch.func's transforms (vmap, grad, vjp, jvp, jacrev); use "
            "torch.autograd.grad or .backward(), and a batch axis of x or grouped_linear in place of vmap"
        )


def _checked(x: Any, w: Any, bias: Any) -> tuple[Any, Any, Any]:
    """The tensors, in autocast's dtype where it is on."""
    given = {"x": x, "w": w} | ({} if bias is None else {"bias": bias})
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}, not a torch.Tensor; torch.as_tensor(...) makes one")
        if hasattr(tensor, "to_local"):  # a DTensor
            raise TypeError(f"{name} is a {type(tensor).__name__}, which lies on several ranks; pass this rank's "
                            f"piece, {name}.to_local(), to a layer over ranks (parallel_linear)")
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {tensor.dtype}; float32, float16, bfloat16 and float64 are read")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}; move one with .to(...)")
    if x.device.type not in ("cpu", "cuda"):
        raise TypeError(f"x is on {x.device}; hqarray computes on the CPU and on CUDA devices")
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        given = {name: tensor.to(dtype) for name, tensor in given.items()}
    return given["x"], given["w"], given.get("bias")


def _sizes(sizes: Any, x: Any) -> tuple[Any, tuple[int, ...]]:
    """Sizes as (tensor on a GPU, ()) or (None, integers)."""
    if not isinstance(sizes, torch.Tensor):
        if not isinstance(sizes, Iterable):
            raise TypeError(f"sizes are integers, one for each group, not {sizes!r}")
        return None, tuple(sizes)
    if sizes.is_floating_point() or sizes.ndim != 1:
        raise TypeError(f"sizes are integers, one for each group, not {sizes.dtype} of shape {tuple(sizes.shape)}")
    if not sizes.is_cuda:
        return None, tuple(sizes.tolist())
    if sizes.device != x.device:
        raise ValueError(f"sizes are on {sizes.device}, x on {x.device}; move one with .to(...)")
    return sizes, ()


def _empty(shape: tuple[int, ...], dtype: Any, device: Any, *, zeros: bool = False) -> tuple[Any, Array]:
    """A new tensor for a GEMM to write, float32 for float64, and the array over it."""
    make = torch.zeros if zeros else torch.empty
    tensor = make(shape, dtype=torch.float32 if dtype == torch.float64 else dtype, device=device)
    return tensor, as_array(tensor)


def _result_type(x: Any, w: Any) -> Any:
    """What hqarray.matmul gives of two dtypes of torch."""
    return x if x == w and x != torch.float64 else TORCH_DTYPES[result_dtype(NUMPY_DTYPES[x], NUMPY_DTYPES[w])]


def _seeds(recipe: Recipe, device: Any) -> Any:
    """int64 (3,), of x, w and dy, mod 2^64, from one number that torch draws; None where all is rounded to nearest."""
    if not any(format.is_stochastic for format in recipe.formats):
        return None
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=device)
    return seed + torch.arange(len(ROLES), dtype=torch.int64, device=device) * (STEP - (1 << 64))  # as linear.seed_of


def _given(recipe: Recipe, role: Role, seeds: Any, amax: Any, *, rows: bool, columns: bool) -> dict[str, Any]:
    """Keywords of quantize for the parts of an operand that are read; seeds are a tensor."""
    row, column = recipe[role]
    formats = [format for format, read in ((row, rows), (column, columns)) if read]
    given: dict[str, Any] = {"rowwise": row if rows else None, "columnwise": column if columns else None}
    if seeds is not None and any(format.is_stochastic for format in formats):
        number = ROLES.index(role)
        given["seed"] = as_array(seeds)[number : number + 1]
    if amax is not None and any(format.measures_amax for format in formats):
        given["amax"] = amax_of(role, amax)
    return given


# --- one matrix ---------------------------------------------------------------------------------


def _quantized(
    tensor: Any, recipe: Recipe, role: Role, seeds: Any, amax: Any, *, rows: bool = True, columns: bool
) -> HybridArray:
    """An operand, in the directions that are read; rows are made besides where columns come from them."""
    derived = columns and role in recipe.from_rows
    given = _given(recipe, role, seeds, amax, rows=rows or derived, columns=columns)
    if derived:
        given["columnwise_source"] = recipe.source(role)
    return ops.quantize(as_array(tensor), **given)


class _Request(NamedTuple):
    """What linear was asked beside its tensors.

    recipe  as it was given
    needs   whether gradients of x and w will be asked for
    key     of what is kept for calls of this kind; None where nothing is
    step    what is kept: torch_steps.Step
    """

    recipe: Any
    amax: Any
    needs: tuple[bool, bool]
    key: Any
    step: Any


def _kept(x: Any, w: Any, recipe: Any, bias: Any, amax: Any) -> tuple[tuple[bool, bool], Any, Any]:
    """needs, key and step of a _Request."""
    if not (isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor)):
        return (False, False), None, None  # and will be refused
    records = torch.is_grad_enabled()
    needs = (records and x.requires_grad, records and w.requires_grad)
    if not x.is_cuda:
        return needs, None, None
    key = _torch_steps().key_of(x, w, recipe, bias, amax, needs)
    return needs, key, _torch_steps().find(key)


@cache
def _torch_steps() -> Any:
    """It needs CuPy."""
    from hqarray.interop import torch_steps

    return torch_steps


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, bias: Any, request: _Request) -> Any:
        step, amax = request.step, request.amax
        ctx.recipe = recipe = as_recipe(request.recipe) if step is None else step.recipe
        ctx.amax, ctx.step, ctx.shape = amax, step, x.shape
        ctx.types = x.dtype, w.dtype, None if bias is None else bias.dtype
        seeds = _seeds(recipe, x.device) if step is None or step.draws else None
        if step is not None:
            done = step.run(x, w, bias, seeds, amax)
            if done is not None:
                y, memory = done
                ctx.hollow = step.hollow
                ctx.save_for_backward(*memory, seeds)
                return y
        needs_x, needs_w = request.needs
        with on_torch(x.device):
            hx = _quantized(x, recipe, "input", seeds, amax, columns=needs_w)
            hw = _quantized(w, recipe, "weight", seeds, amax, columns=needs_x)
            y, out = _empty((*x.shape[:-1], w.shape[0]), _result_type(x.dtype, w.dtype), x.device)
            added = None if bias is None else as_array(bias)
            ops.matmul(hx, hw.T, out=out, bias=added)
            _save(ctx, (hx.columnwise, hw.columnwise), (seeds,))
            if request.key is not None and not recipe.from_rows:
                ctx.step = _torch_steps().keep_forward(
                    request, recipe, (as_array(x), as_array(w)), (hx, hw), out, added, ctx.hollow, y
                )
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return (*_backward(_linear_gradients, ctx, dy), None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD)


def _linear_gradients(ctx: Any, dy: Any) -> tuple[Any, Any, Any]:
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    dx, dw = _products(ctx, dy, needs_x, needs_w) if needs_x or needs_w else (None, None)
    db = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(ctx.types[2]) if needs_bias else None
    return _of_type(dx, ctx.types[0]), _of_type(dw, ctx.types[1]), db


def _products(ctx: Any, dy: Any, needs_x: bool, needs_w: bool) -> Any:
    """Gradients of x and w, each None where it is not needed."""
    step, saved = ctx.step, ctx.saved_tensors  # which checkpointing lets be asked for once
    if step is not None:
        done = step.run_backward(dy, (needs_x, needs_w), saved, ctx.amax)
        if done is not None:
            return done
    dx = dw = first = second = None
    k, n, dtypes = ctx.shape[-1], dy.shape[-1], [ops.nominal_dtype(NUMPY_DTYPES[dtype]) for dtype in ctx.types[:2]]
    with on_torch(dy.device):
        x, w, seeds = _restored(ctx, saved)
        hdy = _quantized(dy, ctx.recipe, "grad_output", seeds, ctx.amax, rows=needs_x, columns=needs_w)
        if needs_x:
            dx, out = _empty(ctx.shape, ctx.types[0], dy.device)
            first = hdy, HybridArray(None, w, dtype=dtypes[1]), out
            ops.matmul(*first[:2], out=out)
        if needs_w:
            dw, out = _empty((n, k), ctx.types[1], dy.device)
            second = hdy.reshape(-1, n).T, HybridArray(None, x, dtype=dtypes[0]), out
            ops.matmul(*second[:2], out=out)
        if step is not None:
            step.keep_backward(dy, (needs_x, needs_w), as_array(dy), hdy, (first, second), (dx, dw), ctx.amax)
    return dx, dw


# --- groups -------------------------------------------------------------------------------------


def _group(
    tensor: Any, sizes: Any, recipe: Recipe, role: Role, seeds: Any, amax: Any, *, rows: bool = True, columns: bool
) -> GroupedArray:
    """The same of many matrices; sizes are an array, integers, or None of stacked ones."""
    derived = columns and role in recipe.from_rows
    values = as_array(tensor)
    group = grouped_quantize(
        values, sizes, **_given(recipe, role, seeds, amax, rows=rows or derived, columns=columns and not derived)
    )
    if not derived:
        return group
    decoded = group.dequantize(dtype=np.float32).reshape(values.shape)  # type: ignore[union-attr]
    other = grouped_quantize(decoded, sizes, **_given(recipe, role, seeds, amax, rows=False, columns=True))
    return GroupedArray(group.rowwise, other.columnwise, group.rows, group.columns, group.dtype)


class _GroupedLinear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Any, w: Any, bias: Any, sizes: Any, host: tuple[int, ...], recipe: Recipe, amax: Any,
        records: bool,
    ) -> Any:
        needs_x, needs_w = (records and needed for needed in ctx.needs_input_grad[:2])
        seeds = _seeds(recipe, x.device)
        with on_torch(x.device):
            given = host if sizes is None else as_array(sizes)
            gx = _group(x, given, recipe, "input", seeds, amax, columns=needs_w)
            gw = _group(w, None, recipe, "weight", seeds, amax, columns=needs_x)
            ctx.covers = sizes is None and sum(host) == x.shape[0]
            shape = (x.shape[0], w.shape[1])
            y, out = _empty(shape, _result_type(x.dtype, w.dtype), x.device, zeros=not ctx.covers)
            ops.matmul(gx, gw.T, out=out, bias=None if bias is None else as_array(bias))
            _save(ctx, (gx.columnwise, gw.columnwise), (seeds, sizes))
        ctx.recipe, ctx.amax, ctx.host, ctx.shapes = recipe, amax, host, (tuple(x.shape), tuple(w.shape))
        ctx.axes = (gx.rows, gx.columns, gx.dtype), (gw.rows, gw.columns, gw.dtype)
        ctx.types = x.dtype, w.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return (*_backward(_grouped_gradients, ctx, dy), None, None, None, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD)


def _grouped_gradients(ctx: Any, dy: Any) -> tuple[Any, Any, Any]:
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    dx = dw = db = None
    with on_torch(dy.device):
        x, w, seeds, kept = _restored(ctx, ctx.saved_tensors)
        if needs_x or needs_w:
            sizes = ctx.host if kept is None else as_array(kept)
            gdy = _group(dy, sizes, ctx.recipe, "grad_output", seeds, ctx.amax, rows=needs_x, columns=needs_w)
        if needs_x:
            dx, out = _empty(ctx.shapes[0], ctx.types[0], dy.device, zeros=not ctx.covers)
            ops.matmul(gdy, GroupedArray(None, w, *ctx.axes[1]), out=out)
        if needs_w:
            dw, out = _empty(ctx.shapes[1], ctx.types[1], dy.device)
            ops.matmul(gdy.T, GroupedArray(None, x, *ctx.axes[0]), out=out)
    if needs_bias:
        db = _sums(dy, kept, ctx.host).to(ctx.types[2])
    return _of_type(dx, ctx.types[0]), _of_type(dw, ctx.types[1]), db


def _sums(values: Any, sizes: Any, host: tuple[int, ...]) -> Any:
    """Sums over each group's rows, float32 (num_groups, n).

    With sizes on a device by index_add_, whose order torch.use_deterministic_algorithms fixes.
    """
    if sizes is None:
        rest = values.shape[0] - sum(host)
        groups = values.split([*host, rest])[:-1]
        sums = values.new_zeros((len(host), values.shape[1]), dtype=torch.float32)
        for total, group in zip(sums, groups, strict=True):
            torch.sum(group, 0, dtype=torch.float32, out=total)
        return sums
    ends = sizes.clamp(min=0).cumsum(0)
    group_of = torch.searchsorted(ends, torch.arange(values.shape[0], device=ends.device), right=True)
    sums = values.new_zeros((len(sizes) + 1, values.shape[1]), dtype=torch.float32)  # the last: rows of no group
    return sums.index_add_(0, group_of, values.to(torch.float32))[:-1]


# --- both ---------------------------------------------------------------------------------------


def _save(ctx: Any, parts: Sequence[Any], tensors: tuple[Any, ...]) -> None:
    """Parts, or None, as bytes that autograd keeps; tensors, or None, as they are."""
    held = [(None, None) if part is None else emptied(part) for part in parts]
    ctx.hollow = [hollow for hollow, _ in held]
    ctx.save_for_backward(*(memory for _, memory in held), *tensors)


def _restored(ctx: Any, tensors: Sequence[Any]) -> list[Any]:
    """What _save was given, of what autograd has kept."""
    count = len(ctx.hollow)
    parts = [None if hollow is None else filled(hollow, tensor)
             for hollow, tensor in zip(ctx.hollow, tensors[:count], strict=True)]
    return [*parts, *tensors[count:]]


def _of_type(gradient: Any, dtype: Any) -> Any:
    return gradient if gradient is None or gradient.dtype == dtype else gradient.to(dtype)


def _backward(gradients: Any, ctx: Any, dy: Any) -> Any:
    """The gradients; where they would be differentiated again (create_graph), ones that refuse it."""
    if torch._C._functorch.is_batchedtensor(dy) or torch._C._functorch.is_legacy_batchedtensor(dy):
        raise NotImplementedError(
            "hqarray's linear layers take one gradient of the output at a time: leave out is_grads_batched=True (of "
            "torch.autograd.functional.jacobian vectorize=True)"
        )
    if not torch.is_grad_enabled():
        return gradients(ctx, dy)
    return _Once.apply(dy, torch.empty(0, requires_grad=True), gradients, ctx)


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """Gradients that depend on what they were computed from, and cannot be differentiated by it."""

    @staticmethod
    def forward(ctx: Any, dy: Any, marker: Any, gradients: Any, first: Any) -> Any:
        return gradients(first, dy)

    @staticmethod
    def backward(ctx: Any, *ddy: Any) -> Any:
        raise NotImplementedError(
            "hqarray's linear layers cannot be differentiated twice: a quantizer passes gradients straight through and "
            "has no second derivative; leave out create_graph=True, or use torch.nn.functional.linear there"
        )


__all__ = ["grouped_linear", "linear"]
