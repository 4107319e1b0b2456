"""The command line: python -m hqarray report | info | convert."""

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
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from . import info
from .interop import convert
from .operands import default_operands, read_operands
from .report import Report, count_steps, select, study
from .tensorfile import FileError

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
    report.add_argument("files", nargs="*", metavar="FILE", help=".npy, .npz or .safetensors")
    report.add_argument("--formats", metavar="NAME,...", help="what to study, e.g. 'fp8,mxfp8(rule=floor)'")
    report.add_argument("--json", metavar="FILE", help="write the numbers; - writes them to standard output, no table")
    report.add_argument("--html", metavar="FILE", help="write the tables as one page; - as for --json")
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
    change.add_argument("source", metavar="IN", help=".safetensors: float or quantized weights")
    change.add_argument("written", metavar="OUT", help="appears when it is complete, and is never IN")
    change.add_argument("--rowwise", metavar="FORMAT", help="of the part blocked along the last axis, e.g. mxfp8")
    change.add_argument("--columnwise", metavar="FORMAT", help="of the part blocked along the first axis")
    change.add_argument("--match", metavar="GLOB", action="append", default=[],
                        help="convert only weights of such names, e.g. '*.mlp.*'; may be repeated")
    change.add_argument("--style", default="hqarray", metavar="|".join(convert.STYLES), choices=convert.STYLES,
                        help="tensors of the file: hqarray's own, or those of a checkpoint (default: hqarray)")
    change.add_argument("--seed", type=int, default=0, help="of formats that round at random (default: 0)")
    change.add_argument("--force", action="store_true", help="replace OUT where there is one")
    change.set_defaults(run=_convert)
    return parser


def _version() -> str:
    from . import __version__

    return __version__


def _report(options: argparse.Namespace) -> int:
    # mistakes are found before the work starts
    names = [] if options.formats is None else [n.strip() for n in re.split(r",(?![^(]*\))", options.formats)]
    if options.formats is not None and not all(names):
        raise UsageError(f"--formats {options.formats!r} has an empty name; separate names by single commas")
    try:
        selection = select(names)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UsageError(str(error)) from error
    if options.json and options.json == options.html:
        place = "standard output" if options.json == "-" else options.json
        raise UsageError(f"--json and --html would both be written to {place}; name another file for one of them")
    for target in (options.json, options.html):
        _check_writable(target)
    operands = read_operands(options.files) if options.files else default_operands()
    if not operands.triples and not operands.matrices:
        reasons = f" ({'; '.join(operands.notes[:3])}{' ...' if len(operands.notes) > 3 else ''})"
        raise UsageError(f"no 2-D float array in {', '.join(options.files)}{reasons if operands.notes else ''}")

    with ExitStack() as stack:
        report = study(operands, selection, _Bar(stack, count_steps(operands, selection)))
    _write(report, options)
    return 0


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


def _check_writable(target: str | None) -> None:
    if target is None or target == "-":
        return
    path = Path(target)
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{path}: cannot be written (no such folder, a folder itself, or no permission)")


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
    try:
        target = convert.target(options.rowwise, options.columnwise, options.style, options.match, options.seed)
        convert.refuse_same(options.source, options.written)
        if not options.force and os.path.lexists(options.written):
            raise UsageError(f"{options.written}: there is a file already; --force replaces it")
        if os.path.isdir(options.written):
            raise UsageError(f"{options.written}: is a directory; name a file in it")
        plan = convert.plan(options.source, target)
        if not any(wanted for *_, wanted in plan.jobs):
            raise UsageError(f"{options.source}: {convert.left_out(plan)}")
        with ExitStack() as stack:
            _interrupt_when_terminated(stack)
            bar = _Bar(stack, plan.nbytes, "converting")
            conversion = convert.convert(plan, options.written, replace=options.force, step=bar)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename or options.source}: {error.strerror or error}") from error
    Console(file=sys.stdout, highlight=False).print(conversion)
    return 0


def _interrupt_when_terminated(stack: ExitStack) -> None:
    """SIGTERM ends the work as Ctrl-C does, so that no temporary file is left."""
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        stack.callback(signal.signal, signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
