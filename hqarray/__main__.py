"""The command line: python -m hqarray report | info | convert | train."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from rich.console import Console
from rich.progress import Progress

from . import info
from .drawing import picture_ending, save
from .indexfile import Index, index_in
from .interop import convert
from .interop.convert_index import convert_index, plan_index
from .operands import default_operands, read_operands
from .processes import WorkerDied
from .report import Report, count_steps, select, study
from .tensorfile import FileError
from .train import RECIPES_OF_THE_STUDY, SIZES, Study, named, not_built
from .train import study as train_study
from .train_plot import has_matplotlib, plot_curves
from .train_text import TextError, read_text

PATIENCE = 2.0
"""Seconds before a progress bar appears."""


class UsageError(ValueError):
    """Something the user gave; one line says what."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0, 1 for a closed pipe, 2 for a mistake in what was given, 130 when stopped."""
    try:
        try:
            options = _parser().parse_args(arguments)
        except SystemExit:
            sys.stdout.flush()  # --version and --help
            raise
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except (FileError, UsageError) as error:
        print(f"hqarray: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        _discard_output()
        print(f"hqarray: {error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _discard_output() -> None:
    # what is still buffered would fail again when Python shuts down
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hqarray", description="Low-precision matrices, in numbers.")
    parser.add_argument("--version", action="version", version=f"hqarray {_version()}")
    commands = parser.add_subparsers(required=True, metavar="command")

    report = commands.add_parser(
        "report", help="what formats and recipes do to a linear layer",
        description="Study formats and recipes on the 2-D float arrays of files; with no file, on two real layers. "
        "Arrays whose names end in x, w and dy are the operands of a layer y = x @ w.T.",
    )
    report.add_argument("files", nargs="*", metavar="FILE",
                        help=".npy, .npz, .safetensors, or the index (folder) of several")
    report.add_argument("--formats", metavar="NAME,...", help="what to study, e.g. 'fp8,mxfp8(rule=floor)'")
    report.add_argument("--json", metavar="FILE", help="write the numbers; - writes them to standard output, no table")
    report.add_argument("--html", metavar="FILE",
                        help="write the tables as one page, with plots if matplotlib is installed; - as for --json")
    _add_jobs(report)
    report.set_defaults(run=_report)

    about = commands.add_parser("info", help="versions, GPU, libcublasLt, and the engine of each pair of formats")
    about.add_argument("--chip", action="append", default=[], metavar="sm_90",
                       help="show the engines of this chip instead of the GPU found; may be repeated")
    about.set_defaults(run=_info)

    change = commands.add_parser(
        "convert", help="quantize the weights of a safetensors file, or change their form",
        description="Quantize the 2-D weights of a safetensors file, one by one; all else is copied. Of weights that "
        "are quantized, parts that are stored as asked for are kept, others made from what is there, decoded.",
    )
    change.add_argument("source", metavar="IN",
                        help=".safetensors, or the index (folder) of several: float or quantized weights")
    change.add_argument("written", metavar="OUT", help="appears when it is complete, and is never IN; of several files "
                        "a new folder")
    change.add_argument("--rowwise", metavar="FORMAT", help="of the part blocked along the last axis, e.g. mxfp8")
    change.add_argument("--columnwise", metavar="FORMAT", help="of the part blocked along the first axis")
    change.add_argument("--match", metavar="GLOB", action="append", default=[],
                        help="convert only weights of such names, e.g. '*.mlp.*'; may be repeated")
    change.add_argument("--style", default="hqarray", metavar="|".join(convert.STYLES), choices=convert.STYLES,
                        help="tensors of the file: hqarray's own, or those of a checkpoint (default: hqarray)")
    change.add_argument("--seed", type=int, default=0, help="of formats that round at random (default: 0)")
    change.add_argument("--force", action="store_true", help="replace OUT where there is one")
    _add_jobs(change)
    change.set_defaults(run=_convert)

    train = commands.add_parser(
        "train", help="train a small language model with each recipe, and compare the losses",
        description="Train a small transformer on Python's help texts, once for each recipe from the same start, with "
        "NumPy or on a GPU, and show how far the losses are above that of bf16.",
    )
    train.add_argument("--recipes", metavar="NAME,...",
                       help=f"recipes or formats beside bf16 (default: {', '.join(RECIPES_OF_THE_STUDY)})")
    train.add_argument("--size", choices=SIZES, default="small", help="of the model and its training (default: small)")
    train.add_argument("--steps", type=int, metavar="N", help="in place of the size's own")
    train.add_argument("--seed", type=int, metavar="N", default=0, help="of initial values, text and rounding")
    train.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="cpu: NumPy (default); gpu: CuPy")
    train.add_argument("--text", metavar="FILE", help="train on the bytes of this file")
    train.add_argument("--json", metavar="FILE", help="write the numbers; - writes them to standard output, no table")
    train.add_argument("--plot", metavar="FILE", help="draw the curves with matplotlib, .png or .svg")
    train.set_defaults(run=_train)
    return parser


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")


def _jobs(options: argparse.Namespace) -> int:
    jobs: int = options.jobs
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: 1 or more processes")
    return jobs


def _version() -> str:
    from . import __version__

    return __version__


def _report(options: argparse.Namespace) -> int:
    # mistakes are found before the work starts
    names = [] if options.formats is None else _names("--formats", options.formats)
    try:
        selection = select(names)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UsageError(str(error)) from error
    _expect_two_places("--json", options.json, "--html", options.html)
    for target in (options.json, options.html):
        _check_writable(target)
    jobs = _jobs(options)
    operands = read_operands(options.files) if options.files else default_operands()
    if not operands.triples and not operands.matrices:
        reasons = f" ({'; '.join(operands.notes[:3])}{' ...' if len(operands.notes) > 3 else ''})"
        raise UsageError(f"no 2-D float array in {', '.join(options.files)}{reasons if operands.notes else ''}")

    with ExitStack() as stack:
        _interrupt_when_terminated(stack)
        bar = _Bar(stack, count_steps(operands, selection))
        try:
            report = study(operands, selection, bar, jobs=jobs, paths=options.files)
        except WorkerDied as error:
            raise UsageError(str(error)) from error
    _write(report, options)
    return 0


def _names(option: str, text: str) -> list[str]:
    """Names separated by commas, which may stand in brackets as well."""
    names = [name.strip() for name in re.split(r",(?![^(]*\))", text)]
    if not all(names):
        raise UsageError(f"{option} {text!r} has an empty name; separate names by single commas")
    return names


def _write(report: Report, options: argparse.Namespace) -> None:
    text = json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n" if options.json else ""
    for target, content in ((options.json, text), (options.html, report.html() if options.html else "")):
        if target == "-":
            sys.stdout.write(content)
        elif target:
            try:
                Path(target).write_text(content, encoding="utf-8")
            except OSError as error:
                raise UsageError(f"{target}: {error.strerror or error}") from error
    if "-" not in (options.json, options.html):
        console = Console(file=sys.stdout, highlight=False)
        console.print(report)


def _expect_two_places(option: str, target: str | None, other_option: str, other: str | None) -> None:
    if target and other and (target == other or os.path.realpath(target) == os.path.realpath(other)):
        place = "standard output" if target == "-" else target
        raise UsageError(
            f"{option} and {other_option} would both be written to {place}; name another file for one of them"
        )


def _check_writable(target: str | None) -> None:
    if target is None or target == "-":
        return
    path = Path(target)
    folder = path.parent
    if path.is_dir():
        reason = "it is a folder; name a file in it"
    elif folder.exists() and not folder.is_dir():
        reason = f"{folder} is no folder"
    elif not folder.exists():
        reason = f"no such folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = f"no permission to write {'it' if path.exists() else f'in {folder}'}"
    else:
        return
    raise UsageError(f"{path}: cannot be written: {reason}")


class _Bar:
    """A step that shows a bar on stderr once the work has taken PATIENCE seconds, on a terminal only."""

    def __init__(self, stack: ExitStack, total: int, what: str = "quantizing") -> None:
        self.stack, self.total, self.done, self.what = stack, total, 0, what
        self.console = Console(stderr=True)
        self.started = time.monotonic()
        self.progress: Progress | None = None

    def __call__(self, amount: int = 1) -> None:
        self.done += amount
        if self.progress is None and self.console.is_terminal and time.monotonic() - self.started > PATIENCE:
            self.progress = self.stack.enter_context(Progress(console=self.console, transient=True))
            self.progress.add_task(self.what, total=self.total)
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=self.done)


def _info(options: argparse.Namespace) -> int:
    try:
        chips = tuple(info.parse_chip(chip) for text in options.chip for chip in text.split(","))
    except ValueError as error:
        raise UsageError(str(error)) from error
    for line in info.info_lines(chips):
        print(line)
    return 0


def _convert(options: argparse.Namespace) -> int:
    jobs = _jobs(options)
    try:
        target = convert.target(options.rowwise, options.columnwise, options.style, options.match, options.seed)
        convert.refuse_same(options.source, options.written)
        index = index_in(options.source)
        with ExitStack() as stack:
            _interrupt_when_terminated(stack)
            conversion = _convert_file(options, target, stack) if index is None else _convert_index(
                index, options, target, jobs, stack)
    except (ValueError, TypeError, NotImplementedError, WorkerDied) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename or options.source}: {error.strerror or error}") from error
    Console(file=sys.stdout, highlight=False).print(conversion)
    return 0


def _convert_file(options: argparse.Namespace, target: convert.Target, stack: ExitStack) -> convert.Conversion:
    if not options.force and os.path.lexists(options.written):
        raise UsageError(f"{options.written}: there is a file already; --force replaces it")
    if os.path.isdir(options.written):
        raise UsageError(f"{options.written}: is a directory; name a file in it")
    plan = convert.plan(options.source, target)
    if not any(wanted for *_, wanted in plan.jobs):
        raise UsageError(f"{options.source}: {convert.left_out(plan)}")
    bar = _Bar(stack, plan.nbytes, "converting")
    return convert.convert(plan, options.written, replace=options.force, step=bar)


def _convert_index(
    path: Path, options: argparse.Namespace, target: convert.Target, jobs: int, stack: ExitStack
) -> convert.Conversion:
    index = Index.open(path)
    plans = plan_index(index, target)
    bar = _Bar(stack, sum(plan.nbytes for plan in plans), "converting")
    return convert_index(index, plans, target, options.written, jobs=jobs, step=bar)


def _train(options: argparse.Namespace) -> int:
    try:
        recipes = named(RECIPES_OF_THE_STUDY if options.recipes is None else _names("--recipes", options.recipes))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UsageError(str(error)) from error
    size = SIZES[options.size]
    if options.steps is not None:
        if options.steps < 1:
            raise UsageError(f"--steps {options.steps}: train for 1 step or more")
        size = replace(size, steps=options.steps)
    if not 0 <= options.seed < 1 << 20:
        raise UsageError(f"--seed {options.seed} is not between 0 and {(1 << 20) - 1}")
    _check_picture(options)
    for target in (options.json, options.plot):
        _check_writable(target)
    module = _array_module(options.device)
    for name, reason in ((name, not_built(recipe, module)) for name, recipe in tuple(recipes.items())):
        if reason and options.recipes is not None:
            raise UsageError(f"{name} cannot be trained on this device: {reason}")
        if reason:
            print(f"hqarray: {name} is left out: {reason}", file=sys.stderr)
            del recipes[name]
    try:
        text = read_text(options.text)
        with ExitStack() as stack:
            bar = _Bar(stack, size.steps * len(recipes), "training")
            result = train_study(text, recipes, size, seed=options.seed, module=module, step=bar)
    except TextError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename or options.text}: {error.strerror or error}") from error
    _write_study(result, options)
    return 0


def _check_picture(options: argparse.Namespace) -> None:
    if options.plot is None:
        return
    try:
        picture_ending(options.plot)
    except ValueError as error:
        raise UsageError(f"--plot: {error}") from error
    _expect_two_places("--json", options.json, "--plot", options.plot)
    if not has_matplotlib():
        raise UsageError('--plot needs matplotlib: pip install matplotlib; the plot in the terminal needs nothing')


def _write_study(result: Study, options: argparse.Namespace) -> None:
    text = json.dumps(result.to_dict(), allow_nan=False) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        if options.json:
            Path(options.json).write_text(text, encoding="utf-8")
        Console(file=sys.stdout, highlight=False).print(result)
    if options.plot:  # last: whatever fails there, numbers and table are out
        sys.stdout.flush()
        what = f"% over {result.runs[0].recipe}"
        try:
            save(lambda ax: plot_curves(result.curves(), what, "step", ax=ax), options.plot, (9, 4.5))
        except OSError as error:
            raise UsageError(f"{options.plot}: {error.strerror or error}") from error


def _array_module(device: str) -> Any:
    """NumPy, or CuPy where there is a GPU for it."""
    if device == "cpu":
        return numpy
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        raise UsageError(f'--device gpu needs CuPy: pip install "hqarray[cuda13]" ({error})') from error
    except Exception as error:  # whatever CUDA raises where there is no driver
        raise UsageError(f"--device gpu: CuPy finds no GPU ({error})") from error
    if not count:
        raise UsageError("--device gpu: CuPy finds no GPU")
    return cupy


def _interrupt_when_terminated(stack: ExitStack) -> None:
    """SIGTERM ends the work as Ctrl-C does, so that no temporary file and no process is left."""
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        stack.callback(signal.signal, signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
