"""The report: what formats and recipes do to a linear layer's operands and to its three products.

study() computes, Report holds the numbers and shows them as tables, JSON or one HTML page.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from importlib.util import find_spec
from string import Template
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import ops, plots
from .arrays import DIRECTIONS, HybridArray
from .explore import Comparison, FormatError, Tally, measure, tiles
from .formats import FORMATS, Format, as_format
from .gemm import Engine
from .linear import quantize_operand
from .operands import Matrix, Operands, Triple, default_operands, read_operands
from .processes import in_processes
from .recipes import PRODUCTS, RECIPES, ROLES, Product, Recipe, Role, as_recipe
from .tables import TextTable, decibels, for_json, percent

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

Values: TypeAlias = npt.NDArray[Any]
Step: TypeAlias = Callable[[], None]

SEED = 0
"""Of what is rounded at random."""

SYMBOLS: dict[Role, str] = {"input": "x", "weight": "w", "grad_output": "dy"}


# --- what is studied ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """Recipes for layers, formats for matrices that belong to none."""

    recipes: tuple[Recipe, ...]
    formats: tuple[Format, ...]


def select(names: Sequence[str] = ()) -> Selection:
    """Names of recipes and formats; none selects every named recipe but those with delayed scaling, and every other
    quantized format.

    A name means the recipe in RECIPES where there is one, and a format everywhere otherwise. For a matrix without
    a layer it means the format, or each format of the recipe. Raises ValueError for an unknown name, or for delayed
    scaling: here are no earlier steps.
    """
    if names:
        recipes = [as_recipe(name) for name in names]
        for name, recipe in zip(names, recipes, strict=True):
            if recipe.delayed is not None:
                raise ValueError(
                    f"{name} takes amaxes of earlier steps, and a report has one; report the same recipe with measured "
                    f"amaxes ({replace(recipe, delayed=None).name}), or train with {name}: python -m hqarray train"
                )
        formats = [f for name, recipe in zip(names, recipes, strict=True) for f in _formats(name.strip(), recipe)]
    else:
        formats = list(FORMATS.values())
        uniform = (as_recipe(row) for name, row in FORMATS.items() if name not in RECIPES and row.scaling is not None)
        recipes = [*(recipe for recipe in RECIPES.values() if recipe.delayed is None), *uniform]
    return Selection(tuple(dict.fromkeys(recipes)), tuple(dict.fromkeys(formats)))


def _formats(name: str, recipe: Recipe) -> Iterable[Format]:
    return (as_format(name),) if name.partition("(")[0] in FORMATS else recipe.formats


def count_steps(operands: Operands, selection: Selection) -> int:
    """How often study() calls its step."""
    return len(operands.triples) * len(selection.recipes) + len(operands.matrices) * len(selection.formats)


# --- results ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecipeResult:
    """One recipe on one layer.

    sqnr_db  of the (rowwise, columnwise) part of each operand, against its values
    error    |Y - Y64| / |Y64| (Frobenius) of each product; Y64 multiplies the unquantized operands in float64
    nan      share of the elements of each product that are NaN where Y64 is finite
    nbytes   of all six parts, padding included
    engine   what multiplied each product, and why

    sqnr_db and error are NaN where one element is NaN that should be finite, or where there is nothing finite.
    """

    recipe: Recipe
    sqnr_db: dict[Role, tuple[float, float]]
    error: dict[Product, float]
    nan: dict[Product, float]
    nbytes: int
    engine: dict[Product, Engine]


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The recipes on one x / w / dy triple."""

    name: str
    source: str
    shapes: dict[Role, tuple[int, int]]
    dtype: str
    results: tuple[RecipeResult, ...]

    def table(self) -> TextTable:
        """The numbers as text cells; separated after the named recipes."""
        shapes = ", ".join(f"{SYMBOLS[role]} {m} x {n}" for role, (m, n) in self.shapes.items())
        named = sum(result.recipe.name in RECIPES for result in self.results)
        rows = tuple(
            (result.recipe.name, *(_pair(result.sqnr_db[role]) for role in ROLES),
             *(percent(result.error[product]) for product in PRODUCTS), f"{result.nbytes / 1024:.0f}",
             "\n".join(dict.fromkeys(engine.name for engine in result.engine.values())))
            for result in self.results
        )
        head = ("recipe", *(f"{symbol}\ndB" for symbol in SYMBOLS.values()), *(f"{name}\n%" for name in PRODUCTS),
                "\nKiB", "\nengine")
        return TextTable(head, rows, f"{self.name}: {shapes}, {self.dtype}", (named,))

    def svg(self) -> str:
        """The errors of the products as a picture; needs matplotlib."""
        errors = {result.recipe.name: result.error for result in self.results}
        return plots.svg(lambda ax: plots.plot_products(errors, ax=ax), (9, 1.2 + 0.26 * len(errors)))


@dataclass(frozen=True, slots=True)
class MatrixResult:
    """The formats on one matrix, blocks along its last axis."""

    name: str
    source: str
    comparison: Comparison

    def table(self) -> TextTable:
        table = self.comparison.table()
        return TextTable(table.head, table.rows, f"{self.name}: {table.title}")

    def svg(self) -> str:
        """The formats as plot_tradeoff draws them; needs matplotlib."""
        return plots.svg(lambda ax: plots.plot_tradeoff(self.comparison, ax=ax), (9, 4.5))


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers of a study; print it with rich, or take to_dict() or html()."""

    layers: tuple[LayerResult, ...]
    matrices: tuple[MatrixResult, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that JSON lacks are the strings "inf", "-inf" and "nan"."""
        layers = [
            {
                "name": layer.name, "source": layer.source, "dtype": layer.dtype,
                "shapes": {SYMBOLS[role]: list(shape) for role, shape in layer.shapes.items()},
                "recipes": {result.recipe.name: _result_dict(result) for result in layer.results},
            }
            for layer in self.layers
        ]
        matrices = [{"name": m.name, "source": m.source, **m.comparison.to_dict()} for m in self.matrices]
        return for_json({"layers": layers, "matrices": matrices, "notes": list(self.notes)})  # type: ignore[no-any-return]

    def tables(self) -> list[TextTable]:
        return [*(layer.table() for layer in self.layers), *(matrix.table() for matrix in self.matrices)]

    def legend(self) -> list[str]:
        """What the columns mean, and what was skipped."""
        lines = []
        if self.layers:
            engines = {str(e) for layer in self.layers for result in layer.results for e in result.engine.values()}
            lines += [
                "dB: SQNR of an operand's rowwise/columnwise part (one number where they agree); x input, w weight, "
                "dy gradient of the output.",
                "%: |Y - Y64| / |Y64| of fprop x @ w.T, dgrad dy @ w, wgrad dy.T @ x; Y64: unquantized, float64.",
                *([_NAN_LEGEND] if self._holds_nan() else []),
                "KiB: all six parts, padding included.",
                *(f"engine {engine}." for engine in sorted(engines)),
            ]
        if self.matrices:
            lines += _FORMATS_LEGEND
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def _holds_nan(self) -> bool:
        results = [result for layer in self.layers for result in layer.results]
        values = [v for r in results for v in (*r.error.values(), *(db for pair in r.sqnr_db.values() for db in pair))]
        return any(map(math.isnan, values))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from rich.text import Text

        for table in self.tables():
            yield table
            yield ""
        for line in self.legend():
            yield Text(line)

    def html(self) -> str:
        """A page that needs nothing but itself, for light and dark screens; every text is escaped.

        Where matplotlib is installed there is a picture for each table; else a line says how to get them.
        """
        return _PAGE.substitute(body=self._repr_html_())

    def _repr_html_(self) -> str:
        """What html() shows, as a part of a page."""
        studied: tuple[LayerResult | MatrixResult, ...] = (*self.layers, *self.matrices)
        drawn = find_spec("matplotlib") is not None
        pictures = [_picture(result.name, result.svg()) if drawn else "" for result in studied]
        tables = "\n".join(r.table().html() + picture for r, picture in zip(studied, pictures, strict=True))
        lines = [*self.legend(), *([] if drawn else ['pictures: pip install "hqarray[explore]", and make it again.'])]
        legend = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
        return f"{tables}\n<ul>\n{legend}\n</ul>"


_NAN_LEGEND = "nan: it holds NaN where the unquantized numbers are finite, or none of those is finite."

_FORMATS_LEGEND = (
    "SQNR dB: 10 log10(sum x^2 / sum (q - x)^2); error %: |q - x| / |x| (Frobenius); max error: largest |q - x|; all "
    "over the elements that are finite and do not become NaN. Blocks run along the last axis.",
    "clipped %: elements beyond the largest magnitude of their block, which saturate. NVFP4's come of its E4M3 scales: "
    "one that is rounded down leaves the largest element of its block up to 1/16 outside.",
    "zeroed %: elements that are not zero and become zero. NaN %: elements that become NaN. B/elem: bytes per element, "
    "scales and padding included.",
)

_PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>hqarray report</title>
<style>
:root { color-scheme: light dark; --text: #1b1f24; --ground: #ffffff; --line: #c9d1d9; --head: #f3f5f7; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --ground: #14171a; --line: #3a4048; --head: #1f242a; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--ground); margin: 2rem auto;
       max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0 0 2rem; display: block; overflow-x: auto;
        font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .4rem 0; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: pre-line; }
tbody th, thead th:first-child { text-align: left; font-weight: 500; white-space: nowrap; }
thead th { background: var(--head); vertical-align: bottom; }
img { display: block; max-width: 100%; background: #ffffff; margin: 0 0 2.5rem; border-radius: 4px; }
</style></head><body>
<h1>hqarray report</h1>
$body
</body></html>
""")


def _picture(name: str, svg: str) -> str:
    # an image, not inline: the ids of two SVGs in one page would be one another's
    data = base64.b64encode(svg.encode()).decode("ascii")
    return f'\n<img src="data:image/svg+xml;base64,{data}" alt="{escape(name)}: the table as a plot">'


def _pair(values: tuple[float, float]) -> str:
    texts = (decibels(value, 1) for value in values)
    return "/".join(dict.fromkeys(texts))


def _result_dict(result: RecipeResult) -> dict[str, Any]:
    return {
        "formats": {SYMBOLS[role]: [format.name for format in result.recipe[role]] for role in ROLES},
        "sqnr_db": {SYMBOLS[role]: dict(zip(DIRECTIONS, result.sqnr_db[role], strict=True)) for role in ROLES},
        "relative_error": result.error,
        "nan": result.nan,
        "bytes": result.nbytes,
        "engine": {product: {"name": e.name, "reason": e.reason} for product, e in result.engine.items()},
    }


# --- the study ----------------------------------------------------------------------------------


def study(
    operands: Operands, selection: Selection, step: Step = lambda: None, *, jobs: int = 1,
    paths: Sequence[str] = (),
) -> Report:
    """Run every recipe on every triple, and every format on every matrix without one.

    step   called after each recipe and each format, count_steps() times; by several processes after each layer
    jobs   processes, each with one layer or matrix in memory at a time
    paths  with jobs: what the operands were read from, which each process maps for itself
    """
    notes = list(operands.notes)
    for matrix in (*(m for t in operands.triples for m in (t.x, t.w, t.dy)), *operands.matrices):
        strange = sum(int((~np.isfinite(matrix.values[tile])).sum()) for tile in tiles(matrix.values.shape))
        if strange:
            elements = "1 element that is" if strange == 1 else f"{strange} elements that are"
            notes.append(f"{matrix.name} holds {elements} NaN or infinite")
    if jobs > 1:
        return Report(*_study_in_processes(operands, selection, step, jobs, tuple(paths)), tuple(notes))
    layers = tuple(_study_triple(triple, selection.recipes, step) for triple in operands.triples)
    matrices = tuple(_study_matrix(matrix, selection.formats, step) for matrix in operands.matrices)
    return Report(layers, matrices, tuple(notes))


def _study_in_processes(
    operands: Operands, selection: Selection, step: Step, jobs: int, paths: tuple[str, ...]
) -> tuple[tuple[LayerResult, ...], tuple[MatrixResult, ...]]:
    work = [(paths, number, selection) for number in range(len(operands.triples) + len(operands.matrices))]
    layers: list[LayerResult] = []
    matrices: list[MatrixResult] = []
    for result in in_processes(_study_one, work, jobs):
        if isinstance(result, LayerResult):
            layers.append(result)
        else:
            matrices.append(result)
        for _ in selection.recipes if isinstance(result, LayerResult) else selection.formats:
            step()
    return tuple(layers), tuple(matrices)


@lru_cache(maxsize=1)
def _operands_of(paths: tuple[str, ...]) -> Operands:
    """Once in each process."""
    return read_operands(paths) if paths else default_operands()


def _study_one(paths: tuple[str, ...], number: int, selection: Selection) -> LayerResult | MatrixResult:
    """A triple, or one of the matrices behind them."""
    operands = _operands_of(paths)
    count = len(operands.triples)
    if number < count:
        return _study_triple(operands.triples[number], selection.recipes, lambda: None)
    return _study_matrix(operands.matrices[number - count], selection.formats, lambda: None)


def _study_matrix(matrix: Matrix, formats: Sequence[Format], step: Step) -> MatrixResult:
    errors: list[FormatError] = []
    for format in formats:
        errors.append(measure(matrix.values, format))
        step()
    comparison = Comparison(matrix.values.shape, matrix.values.dtype.name, tuple(errors))
    return MatrixResult(matrix.name, matrix.source, comparison)


def _study_triple(triple: Triple, recipes: Sequence[Recipe], step: Step) -> LayerResult:
    # float32, not the operands' own dtype: a product rounded to bfloat16 would hide errors below 0.2 %
    values: dict[Role, Values] = {
        "input": triple.x.values, "weight": triple.w.values, "grad_output": triple.dy.values
    }
    x, w, dy = (values[role].astype(np.float64) for role in ROLES)
    with np.errstate(all="ignore"):
        exact: dict[Product, Values] = {"fprop": x @ w.T, "dgrad": dy @ w, "wgrad": dy.T @ x}
    results = []
    for recipe in recipes:
        results.append(_study_recipe(recipe, values, exact))
        step()
    shapes: dict[Role, tuple[int, int]] = {role: values[role].shape for role in ROLES}
    dtypes = dict.fromkeys(values[role].dtype.name for role in ROLES)
    return LayerResult(triple.name, triple.x.source, shapes, "/".join(dtypes), tuple(results))


def _study_recipe(recipe: Recipe, values: dict[Role, Values], exact: dict[Product, Values]) -> RecipeResult:
    with np.errstate(all="ignore"):
        arrays: dict[Role, HybridArray] = {
            role: quantize_operand(values[role].astype(np.float32), recipe, role, seed=SEED) for role in ROLES
        }
        x, w, dy = (arrays[role] for role in ROLES)
        products: dict[Product, tuple[HybridArray, HybridArray]] = {
            "fprop": (x, w.T), "dgrad": (dy, w), "wgrad": (dy.T, x)
        }
        tallies = {product: _tally(exact[product], a @ b) for product, (a, b) in products.items()}
        sqnr = {role: _part_sqnr(values[role], arrays[role]) for role in ROLES}
    engines = {product: ops.engine_for(a, b) for product, (a, b) in products.items()}
    errors = {product: _unless_lost(tally, tally.relative_error) for product, tally in tallies.items()}
    nans = {product: tally.lost / max(tally.count, 1) for product, tally in tallies.items()}
    return RecipeResult(recipe, sqnr, errors, nans, sum(array.nbytes for array in arrays.values()), engines)


def _part_sqnr(values: Values, array: HybridArray) -> tuple[float, float]:
    tallies = (_tally(values, array.dequantize(source=direction)) for direction in DIRECTIONS)
    rows, columns = (_unless_lost(tally, tally.sqnr_db) for tally in tallies)
    return rows, columns


def _unless_lost(tally: Tally, value: float) -> float:
    """The sums leave NaN out; a result that holds NaN where a number belongs is not as good as the rest of it."""
    return math.nan if tally.lost else value


def _tally(values: Values, decoded: Values) -> Tally:
    tally = Tally()
    for tile in tiles((values.shape[0], values.shape[1])):
        tally.add(values[tile], decoded[tile])
    return tally

