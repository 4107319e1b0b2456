"""The command line: python -m hqarray report | info."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from . import info
from .operands import FileError, default_operands, read_operands
from .report import Report, count_steps, select, study

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

    def __init__(self, stack: ExitStack, total: int) -> None:
        self.stack, self.total, self.done = stack, total, 0
        self.console = Console(stderr=True)
        self.started = time.monotonic()
        self.progress: Progress | None = None

    def __call__(self) -> None:
        self.done += 1
        if self.progress is None and self.console.is_terminal and time.monotonic() - self.started > PATIENCE:
            self.progress = self.stack.enter_context(Progress(console=self.console, transient=True))
            self.progress.add_task("quantizing", total=self.total)
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


if __name__ == "__main__":
    sys.exit(main())
