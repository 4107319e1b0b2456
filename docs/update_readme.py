"""Write the generated parts of README.md: the format table and the output of commands.

    python docs/update_readme.py          rewrites README.md
    python docs/update_readme.py --check  exit code 1 where a part is out of date

A part lies between `<!-- generated: WHAT -->` and `<!-- end -->`; WHAT is "formats", "recipes", "docs/training.json"
(what `python -m hqarray train --json docs/training.json` wrote) or a command line that begins with "python".
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

import hqarray as hq
from hqarray.formats import block_name
from hqarray.layout import part_layout
from hqarray.recipes import ROLES
from hqarray.train import Study

README = Path(__file__).parent.parent / "README.md"
TRAINING = Path(__file__).parent / "training.json"
PART = re.compile(r"(<!-- generated: (?P<what>.*?) -->\n).*?(<!-- end -->)", re.S)


def format_table() -> str:
    """One row for each short name, from FORMATS alone. Bytes are of a 4096 x 4096 matrix, one direction."""
    lines = [
        "| name | element | largest | block | scale | bytes per element |",
        "|---|---|---|---|---|---|",
    ]
    for name, format in hq.FORMATS.items():
        storage = format.storage
        block = block_name(format.amax_block)
        scale = storage.scale + (", powers of two" if getattr(format.scaling, "pow2", False) else "")
        if storage.global_scale:
            scale += " + one float32" + (" a row" if storage.global_per_row else "")
        if storage.scale == "none":
            block = scale = "-"
        nbytes = part_layout(storage, (4096, 4096)).nbytes / 4096**2
        cells = (f"`{name}`", storage.element.name, f"{storage.element.max:.5g}", block, scale, f"{nbytes:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def recipe_table() -> str:
    """One row for each named recipe; where the two directions differ rowwise/columnwise, derived ones after a >."""
    lines = ["| name | input | weight | gradient of the output | amaxes |", "|---|---|---|---|---|"]
    for name, recipe in hq.RECIPES.items():
        cells = [f"`{name}`"]
        for role in ROLES:
            row, column = (f"`{format.name}`" for format in recipe[role])
            both = f"{row} > {column}" if role in recipe.from_rows else f"{row}/{column}"
            cells.append(row if row == column and role not in recipe.from_rows else both)
        cells.append("measured" if recipe.delayed is None else "earlier steps")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def command_output(command: str) -> str:
    """What a command prints in a terminal of 80 columns, fenced."""
    program, *arguments = shlex.split(command)
    assert program == "python"
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80"}
    )
    lines = (line.rstrip() for line in run.stdout.rstrip().splitlines())
    return "\n".join(["```text", *lines, "```"])


def training_table() -> str:
    """The study that is kept in docs, as the command prints it in a terminal of 80 columns."""
    study = Study.from_dict(json.loads(TRAINING.read_text(encoding="utf-8")))
    console = Console(file=io.StringIO(), width=80, highlight=False)
    with console.capture() as printed:
        console.print(study)
    return "\n".join(["```text", *(line.rstrip() for line in printed.get().rstrip().splitlines()), "```"])


def generated(what: str) -> str:
    tables: dict[str, Callable[[], str]] = {
        "formats": format_table, "recipes": recipe_table, "docs/training.json": training_table
    }
    return tables[what]() if what in tables else command_output(what)


def updated(text: str) -> str:
    """The text with every generated part made anew."""
    return PART.sub(lambda part: f"{part[1]}{generated(part['what'])}\n{part[3]}", text)


def main(arguments: list[str]) -> int:
    old = README.read_text(encoding="utf-8")
    new = updated(old)
    if arguments == ["--check"]:
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
