"""Tensor-parallel linear layers: y = x @ w.T with w in pieces, on linear_forward and linear_backward.

    spread     x               w               y               forward                   backward
    "columns"  rows (m_i, k)   rows (n_i, k)   (m, n_i)        gathers x                 reduce-scatters dx
    "rows"     (m, k_i)        (n, k_i)        rows (m_i, n)   reduce-scatters y         gathers dy

So one of each, after one another, take and give rows (Megatron's sequence parallelism), and what is gathered is codes
and scales. Operands are those of one rank, byte for byte; products that are summed over ranks are float32 until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any, Literal

import numpy as np

from hqarray import ops
from hqarray.arrays import DIRECTIONS, HybridArray
from hqarray.formats import ROW, Format
from hqarray.gemm import result_dtype
from hqarray.grouped_parts import on_device
from hqarray.inputs import FLOATS, as_array
from hqarray.layout import Array, namespace
from hqarray.linear import (
    Saved,
    check_amaxes,
    linear_backward,
    linear_forward,
    operand_options,
    quantize_operand,
)
from hqarray.recipes import ROLES, Recipe, Role, as_recipe
from hqarray.shards import shard_alignment

from .distributed import Ranks, as_ranks
from .sharding import Sharding, all_gather, expect_no_cut, quantize_sharded


@dataclass(frozen=True, slots=True)
class Spread:
    """How a linear layer lies on the ranks.

    kind      "columns": each rank has some rows of w and makes some columns of y; "rows": some columns of w, and a
              summand of y
    sizes     (m, n, k)
    tokens    borders of the m rows of x ("columns") or y ("rows")
    features  borders of the n rows of w ("columns") or the k columns of w and x ("rows")
    """

    kind: Literal["columns", "rows"]
    sizes: tuple[int, int, int]
    tokens: tuple[int, ...]
    features: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in ("columns", "rows"):
            raise ValueError(f"Spread: kind={self.kind!r} is 'columns' or 'rows'")
        self.x, self.w, self.y  # noqa: B018  raises where borders cut no matrix of these sizes

    @classmethod
    def even(
        cls, kind: Literal["columns", "rows"], sizes: tuple[int, int, int], ranks: Any,
        recipe: Recipe | Format | str,
    ) -> Spread:
        """Nearly equal pieces on the blocks of a recipe's formats; of few blocks some ranks have none.

        kind   "columns" or "rows"
        sizes  (m, n, k) of the whole: x (m, k), w (n, k), y (m, n)
        ranks  how many there are, or ranks as as_ranks takes them
        """
        recipe, count = as_recipe(recipe), int(ranks) if isinstance(ranks, (int, np.integer)) else as_ranks(ranks).size
        x, w, dy = (shard_alignment(rowwise=recipe[role][0], columnwise=recipe[role][1])
                    for role in ("input", "weight", "grad_output"))
        (m, n, k), is_columns = sizes, kind == "columns"
        tokens, features = (x[0], lcm(w[0], dy[1])) if is_columns else (dy[0], lcm(x[1], w[1]))
        if max(tokens, features) >= ROW:
            raise ValueError(
                f"the recipe {recipe.name} has a scale for each row or column that this layer, spread by {kind}, cuts; "
                f"spread it by {'rows' if is_columns else 'columns'}, or take a format with blocks"
            )
        rows = Sharding.even((m, 1), count, step=tokens)
        return cls(kind, sizes, rows.borders, Sharding.even((n if is_columns else k, 1), count, step=features).borders)

    @property
    def x(self) -> Sharding:
        m, _, k = self.sizes
        return Sharding((m, k), self.tokens, 0) if self.kind == "columns" else Sharding((m, k), self.features, 1)

    @property
    def w(self) -> Sharding:
        _, n, k = self.sizes
        return Sharding((n, k), self.features, 0 if self.kind == "columns" else 1)

    @property
    def y(self) -> Sharding:
        m, n, _ = self.sizes
        return Sharding((m, n), self.features, 1) if self.kind == "columns" else Sharding((m, n), self.tokens, 0)


@dataclass(frozen=True, slots=True, eq=False)
class SavedSpread:
    """What the backward pass reads: columnwise parts, of x all that the rank multiplies, and how the layer lies."""

    linear: Saved
    spread: Spread

    @property
    def nbytes(self) -> int:
        """Bytes held until the backward pass."""
        return self.linear.nbytes


def parallel_forward(
    x: Any, w: Any, recipe: Recipe | Format | str, spread: Spread, ranks: Any, *, out_dtype: Any = None,
    seed: Any = None, amax: Any = None, needs: tuple[bool, bool] = (True, True),
) -> tuple[Array, SavedSpread]:
    """The output of a linear layer that is spread over ranks; all of them call it.

    x, w     this rank's pieces, as the spread has them; or HybridArrays of them with the recipe's parts, as
             quantize_sharded makes them: a weight that is multiplied more than once is quantized once
    recipe, out_dtype, seed, amax, needs  as in linear_forward, the same on all ranks; amaxes are those of the whole x,
             w and dy, and of a DelayedScaling ranks.all_reduce_max(state.current) comes before state.update()
    returns  this rank's piece of y, and what parallel_backward takes

    Raises ValueError on every rank where a piece cuts a block (Spread.even does not), and for pieces that are not the
    spread's.
    """
    ranks = as_ranks(ranks)
    with ranks.agreement("parallel_forward") as said:
        recipe = as_recipe(recipe)
        check_amaxes(recipe, amax)
        x, w = (values if isinstance(values, HybridArray) else as_array(values, name)
                for name, values in (("x", x), ("w", w)))
        _check_pieces({"x": x, "w": w}, spread, ranks)
        _check_blocks(recipe, spread)
        operands: tuple[tuple[Role, Any, bool], ...] = ("input", x, needs[1]), ("weight", w, needs[0])
        for role, values, columns in operands:
            if isinstance(values, HybridArray):
                quantize_operand(values, recipe, role, columns=columns)  # raises where it is in other formats
        dtypes = [ops.nominal_dtype(values.dtype) for values in (x, w)]
        dtype = np.dtype(result_dtype(*dtypes) if out_dtype is None else out_dtype)
        if dtype not in FLOATS[:3]:
            raise TypeError(f"the result is float32, float16 or bfloat16, not {dtype}")
        kinds = [f"{type(values).__name__} {values.dtype}" for values in (x, w)] if ranks.checks else []
        said += recipe.name, kinds, dtype, needs, seed, spread
    hx = _quantize(x, recipe, "input", spread.x, ranks, seed, amax, columns=needs[1])
    hw = _quantize(w, recipe, "weight", spread.w, ranks, seed, amax, columns=needs[0])
    given = {"seed": seed, "amax": amax, "needs": needs}
    if spread.kind == "columns":
        y, saved = linear_forward(all_gather(hx, spread.x, ranks), hw, recipe, out_dtype=out_dtype, **given)
        return y, SavedSpread(saved, spread)
    part, saved = linear_forward(hx, hw, recipe, out_dtype=np.float32, **given)
    return reduce_scatter_rows(part, spread.y, ranks, dtype), SavedSpread(saved, spread)


def parallel_backward(
    dy: Any, saved: SavedSpread, ranks: Any, *, dw: Array | None = None, seed: Any = None
) -> tuple[Array | None, Array | None]:
    """The gradients of a layer that is spread over ranks; all of them call it.

    dy       this rank's piece of the gradient of y
    dw       array of the shape of this rank's w that its gradient is added to; None makes a new one
    seed     as in linear_backward
    returns  this rank's pieces of dx and dw; None for one that is not needed
    """
    ranks, spread, linear = as_ranks(ranks), saved.spread, saved.linear
    if linear.x is None and linear.w is None:
        return None, None
    seed = linear.seed if seed is None else seed
    with ranks.agreement("parallel_backward") as said:
        dy = as_array(dy, "dy")
        _check_pieces({"dy": dy} if dw is None else {"dy": dy, "dw": dw}, spread, ranks)
        said += linear.recipe.name, dy.dtype, linear.x is None, linear.w is None, seed, spread
    hdy = _quantize(dy, linear.recipe, "grad_output", spread.y, ranks, seed, linear.amax, rows=linear.w is not None,
                    columns=linear.x is not None)
    if spread.kind == "rows":
        return linear_backward(all_gather(hdy, spread.y, ranks), linear, dw=dw, seed=seed)
    part, dw = linear_backward(hdy, linear, dw=dw, out_dtype=np.float32, seed=seed)
    if part is None or linear.w is None:
        return None, dw
    return reduce_scatter_rows(part, spread.x, ranks, result_dtype(hdy.dtype, linear.w.dtype)), dw


def reduce_scatter_rows(values: Array, sharding: Sharding, ranks: Any, dtype: Any) -> Array:
    """The sum over ranks of float32 matrices of the whole shape, this rank's rows of it, rounded once to dtype."""
    ranks = as_ranks(ranks)
    with ranks.agreement("reduce_scatter_rows") as said:
        said += values.shape, values.dtype, sharding
    sizes, rest = sharding.sizes, values.shape[1:]
    module, most = namespace(values), max(sizes)
    with on_device(values.device):
        if len(set(sizes)) == 1:
            staged = values.reshape(ranks.size, most, *rest)
        else:  # engines sum equal shares
            staged = module.zeros((ranks.size, most, *rest), np.float32)
            for i, size in enumerate(sizes):
                staged[i, :size] = values[sharding.borders[i] : sharding.borders[i + 1]]
        out = module.empty((most, *rest), np.float32)
        ranks.reduce_scatter(module.ascontiguousarray(staged), out)
        return out[: sizes[ranks.rank]].astype(dtype, copy=False)


def _check_pieces(given: dict[str, Any], spread: Spread, ranks: Ranks) -> None:
    """Raises ValueError for an operand that is not this rank's piece of it."""
    for name, values in given.items():
        whole = name.removeprefix("d")
        sharding: Sharding = getattr(spread, whole)
        flat = f"; {name}.reshape(-1, {values.shape[-1]}) is 2-D" if values.ndim > 2 else ""
        sharding.expect(
            values.shape, ranks, name, f"give it {whole}[spread.{whole}.slices(ranks.rank)], where spread = "
            f"Spread.even({spread.kind!r}, (m, n, k), ranks, recipe); this one's (m, n, k) is {spread.sizes}{flat}"
        )


@lru_cache(maxsize=1024)
def _check_blocks(recipe: Recipe, spread: Spread) -> None:
    """Raises ValueError where a piece cuts a block of the recipe; looked up where none does."""
    try:
        for role, sharding in zip(ROLES, (spread.x, spread.w, spread.y), strict=True):
            expect_no_cut(dict(zip(DIRECTIONS, recipe[role], strict=True)), sharding)
    except ValueError as error:
        raise ValueError(
            f"the recipe {recipe.name} does not fit this Spread by {spread.kind}, which Spread.even({spread.kind!r}, "
            f"{spread.sizes}, ranks, {recipe.name!r}) does: {error}"
        ) from error


def _quantize(
    values: Any, recipe: Recipe, role: Role, sharding: Sharding, ranks: Ranks, seed: Any, amax: Any, *,
    rows: bool = True, columns: bool = True,
) -> HybridArray:
    """The parts of an operand's piece that are read, as quantize_operand quantizes the whole."""
    if isinstance(values, HybridArray):
        return values
    return quantize_sharded(values, sharding, ranks, **operand_options(recipe, role, seed, amax, rows, columns))


__all__ = ["SavedSpread", "Spread", "parallel_backward", "parallel_forward", "reduce_scatter_rows"]
