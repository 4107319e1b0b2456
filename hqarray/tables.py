"""Tables of text cells: rendered by rich, as HTML or as plain text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text


def decibels(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else {math.inf: "exact", -math.inf: "-inf"}.get(value, "nan")


def percent(share: float) -> str:
    """A share in percent, without the sign: 3.72, <0.01, 0."""
    if share == 0:
        return "0"
    return "<0.01" if share < 5e-5 else f"{100 * share:.2f}"


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells as text, the first column left-aligned: rendered by rich, as HTML or as plain text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    rules: Sequence[int] = field(default=())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        from rich.text import Text

        if self.title:  # not the table's own title, which wraps at the width of the table
            yield Text(self.title, style="bold")
        yield self.at_width(options.max_width)

    def at_width(self, width: int) -> Table:
        """A rich table without the title, no number cut.

        Where it would be too wide, names in the first column are broken; where that is not enough, each row is a
        list of its cells, one a line.
        """
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        widths = [max(map(_width, column)) for column in zip(self.head, *self.rows, strict=True)]
        gap = 2 if sum(widths) + 2 * len(widths) - 2 <= width else 1
        spare = width - sum(widths[1:]) - gap * (len(widths) - 1)
        first = [row[0] if widths[0] <= spare else break_name(row[0], spare) for row in self.rows]
        if max(map(_width, (self.head[0], *first))) > spare:
            return self._lists(width)
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, gap - 1, 0, 0), pad_edge=False)
        for number, name in enumerate(self.head):
            table.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
        for number, (name, row) in enumerate(zip(first, self.rows, strict=True), 1):
            table.add_row(*(Text(cell) for cell in (name, *row[1:])), end_section=number in self.rules)
        return table

    def _lists(self, width: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        spare = width - 1 - max((_width(cell) for row in self.rows for cell in row[1:]), default=0)
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column(overflow="fold")
        table.add_column(justify="right", overflow="fold")
        for row in self.rows:
            table.add_row(Text(break_name(row[0], spare)), "")
            for name, cell in zip(self.head[1:], row[1:], strict=True):
                table.add_row(Text(f"  {' '.join(name.split())}"), Text(cell))
        return table

    def text(self, width: int = 80) -> str:
        from io import StringIO

        from rich.console import Console

        console = Console(file=StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]

    def html(self) -> str:
        """A <table>; everything in it is escaped."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.head)
        body = "".join(
            "<tr>" + f"<th>{escape(row[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
            for row in self.rows
        )
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def break_name(name: str, width: int) -> str:
    """A name on lines of at most width, broken after "_" and the marks between fields, where it has one there."""
    lines = [""]
    for piece in re.findall(r"[^_,(=/]*[_,(=/]|[^_,(=/]+", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _width(cell: str) -> int:
    return max(map(len, cell.split("\n")))
