"""The training study: one small language model, trained once with each recipe from the same start on the same text.

study() trains, Study holds the losses and shows them as a table with a plot, or as JSON.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .explore import TextTable, host
from .linear import quantize_operand
from .recipes import ROLES, Recipe, as_recipe
from .tables import for_json
from .train_model import Adam, Shape, Transformer
from .train_plot import Curve, text_plot
from .train_text import Text, batches

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

Step: TypeAlias = Callable[[], None]

BASE = "bf16"
"""The recipe that the others are compared with; it is always trained."""

RECIPES_OF_THE_STUDY = (
    BASE, "fp8_current", "fp8_delayed", "mxfp8", "mxfp4", "nvfp4_nearest", "nvfp4", "mxfp8_forward_nvfp4_backward",
)

WARM_UP, REST = 0.1, 0.1
"""Share of the steps in which the learning rate rises, and of the rate that is left at the end of a cosine."""

TAIL = 4
"""The loss of a run is the mean over the last step in so many."""

HELD_OUT_PIECES = 64


@dataclass(frozen=True, slots=True)
class Size:
    """A model and how it is trained; batch counts pieces of `context` bytes."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    rate: float


SIZES: dict[str, Size] = {
    "tiny": Size(32, 1, 2, 16, 8, 60, 1e-2),
    "small": Size(32, 2, 4, 64, 8, 150, 4e-3),
    "medium": Size(256, 4, 8, 128, 32, 1000, 2e-3),
    "large": Size(1024, 8, 16, 256, 32, 2000, 6e-4),
}
"""small is for NumPy, where rounding at random takes three times as long; medium and large are for a GPU."""


@dataclass(frozen=True, slots=True)
class Run:
    """One recipe's training.

    losses    of each step, in nats a byte, on the pieces that all recipes see in this order
    held_out  the loss at the end on text that was not trained on
    seconds   of the steps alone
    """

    recipe: str
    losses: tuple[float, ...]
    held_out: float
    seconds: float

    @property
    def loss(self) -> float:
        """Mean over the end of the run."""
        return float(np.mean(self.losses[-max(1, len(self.losses) // TAIL):]))


@dataclass(frozen=True, slots=True)
class Study:
    """Runs of several recipes, the one they are compared with first."""

    runs: tuple[Run, ...]
    size: Size
    seed: int
    text: str
    digest: str
    parameters: int
    machine: str

    def gap(self, run: Run) -> float:
        """Loss over that of the base, less 1: both saw the same text, whose noise cancels. NaN where both are 0."""
        return float(_over(run.loss, self.runs[0].loss))

    def curves(self) -> list[Curve]:
        """How far each run but the first is above the first, in percent of it, by step; smoothed."""
        base, *others = self.runs
        below = _smooth(base.losses)
        return [Curve(run.recipe, 100 * _over(_smooth(run.losses), below)) for run in others]

    def table(self) -> TextTable:
        rows = tuple(
            (run.recipe, f"{run.loss:.4f}", "" if run is self.runs[0] else f"{100 * self.gap(run):+.2f}",
             f"{run.held_out:.4f}", f"{run.seconds:.1f}")
            for run in self.runs
        )
        size = self.size
        title = (
            f"{self.parameters} parameters ({size.layers} layers of {size.width}), {len(self.runs[0].losses)} steps of "
            f"{size.batch} x {size.context} bytes of {self.text}, {self.machine}"
        )
        head = ("recipe", "loss\nnats", f"over {self.runs[0].recipe}\n%", "held out\nnats", "\ns")
        return TextTable(head, rows, title)

    def legend(self) -> list[str]:
        tail = max(1, len(self.runs[0].losses) // TAIL)
        return [
            f"loss: cross entropy a byte, mean of the last {tail} steps; every recipe starts from the same values and "
            f"sees the same text.",
            "held out: on text that was not trained on, after the last step; s: seconds of training.",
            "This is one seed; at small sizes another one changes the differences by 1 % and more: repeat with --seed.",
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from rich.text import Text as Line

        yield self.table()
        yield ""
        for line in self.legend():
            yield Line(line)
        for line in text_plot(self.curves(), options.max_width, f"% over {self.runs[0].recipe}", "steps"):
            yield Line(line, no_wrap=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that it lacks are the strings "inf", "-inf" and "nan"."""
        runs = {
            run.recipe: {
                "loss": round(run.loss, 6), "gap": round(self.gap(run), 6), "held_out": round(run.held_out, 6),
                "seconds": round(run.seconds, 2), "losses": [round(loss, 6) for loss in run.losses],
            }
            for run in self.runs
        }
        return for_json({  # type: ignore[no-any-return]
            "size": asdict(self.size), "seed": self.seed, "text": self.text, "digest": self.digest,
            "parameters": self.parameters, "machine": self.machine, "runs": runs,
        })

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Study:
        """What to_dict gave."""
        runs = tuple(
            Run(name, tuple(float(loss) for loss in run["losses"]), float(run["held_out"]), float(run["seconds"]))
            for name, run in values["runs"].items()
        )
        return cls(runs, Size(**values["size"]), values["seed"], values["text"], values["digest"],
                   values["parameters"], values["machine"])


def _over(values: npt.ArrayLike, base: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Each value over its base, less 1; what IEEE 754 says where a base is 0, as the loss of a text known by heart."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: npt.NDArray[np.float64] = np.divide(values, base) - 1
    return ratio


def _smooth(losses: Sequence[float]) -> npt.NDArray[np.float64]:
    """Mean over a window of a twentieth of the steps, shorter at the ends."""
    values = np.asarray(losses, np.float64)
    half = max(1, len(values) // 40)
    sums = np.concatenate([[0], np.cumsum(values)])
    first = np.maximum(np.arange(len(values)) - half, 0)
    last = np.minimum(np.arange(len(values)) + half + 1, len(values))
    means: npt.NDArray[np.float64] = (sums[last] - sums[first]) / (last - first)
    return means


def named(recipes: Sequence[str | Recipe]) -> dict[str, Recipe]:
    """Recipes by name, the base first. Raises ValueError for an unknown name."""
    chosen = [as_recipe(recipe) for recipe in (BASE, *recipes)]
    return {recipe.name: recipe for recipe in chosen}


def not_built(recipe: Recipe, module: Any) -> str:
    """Why a recipe's operands cannot be quantized there; empty where they can."""
    amax = module.ones(len(ROLES), np.float32) if recipe.delayed is not None else None
    try:
        for role in ROLES:
            quantize_operand(module.ones((16, 16), np.float32), recipe, role, seed=0, amax=amax)
    except NotImplementedError as error:
        return str(error)
    return ""


def study(
    text: Text, recipes: dict[str, Recipe], size: Size, *, seed: int = 0, module: Any = np, step: Step = lambda: None
) -> Study:
    """Train a model with each recipe.

    text     what is learnt
    recipes  by name; the others are compared with the first
    module   numpy, or cupy to train on its current GPU
    step     called after each step of each recipe
    """
    runs = []
    for name, recipe in recipes.items():
        runs.append(_train(name, recipe, text, size, seed, module, step))
    shape = _shape(text, size)
    count = sum(math.prod(s) for s in shape.parameters().values())
    return Study(tuple(runs), size, seed, text.name, text.digest, count, _machine(module))


def _shape(text: Text, size: Size) -> Shape:
    return Shape(text.vocabulary, size.context, size.width, size.layers, size.heads)


def _train(name: str, recipe: Recipe, text: Text, size: Size, seed: int, module: Any, step: Step) -> Run:
    model = Transformer(_shape(text, size), recipe, seed, module)
    optimizer = Adam(model.parameters.flat)
    pieces = module.asarray(batches(text.train, size.steps, size.batch, size.context + 1, seed).astype(np.int32))
    held_out = module.asarray(
        batches(text.held_out, 1, HELD_OUT_PIECES, size.context + 1, seed)[0].astype(np.int32)
    )
    losses = module.zeros(size.steps, np.float32)
    started = time.perf_counter()
    for number in range(size.steps):
        losses[number] = model.loss_and_gradients(pieces[number])  # stays on the device: nothing waits for it
        optimizer.step(model.gradients.flat, _rate(size, number))
        step()
    values = tuple(map(float, host(losses)))  # waits for the last step
    seconds = time.perf_counter() - started
    return Run(name, values, float(model.loss(held_out)), seconds)


def _rate(size: Size, number: int) -> float:
    done = number / size.steps
    cosine = REST + (1 - REST) * (1 + math.cos(math.pi * done)) / 2
    return size.rate * cosine * min(1.0, (number + 1) / max(1.0, WARM_UP * size.steps))


def _machine(module: Any) -> str:
    if module is np:
        return f"NumPy {np.__version__}, {platform.machine()}"
    device = module.cuda.runtime.getDeviceProperties(module.cuda.Device().id)
    return f"CuPy {module.__version__}, {device['name'].decode()}"


__all__ = ["RECIPES_OF_THE_STUDY", "SIZES", "Run", "Size", "Study", "named", "not_built", "study"]
