"""Tables on stdout; plain text without colour codes if that is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 100  # of tables that go to a file or a pipe


def console() -> Console:
    """A console on stdout that prints names and paths unchanged."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def show(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    lines: bool = False,
) -> None:
    """Print a table.

    Args:
        columns: the headings; a line break in one makes two lines.
        rows: the cells of each row.
        numbers: the columns to align to the right.
        lines: draw a line between two rows.
    """
    table = Table(box=box.SIMPLE, pad_edge=False, show_lines=lines)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)
