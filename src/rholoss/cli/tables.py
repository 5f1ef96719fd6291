"""Tables on stdout; plain text, without colour codes, where that is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 100  # of what is not a terminal: a file, a pipe


def console() -> Console:
    """A console on stdout; names and paths are printed as they are."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def show(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    lines: bool = False,
) -> None:
    """Print a table; columns named in `numbers` are flush right, `lines` part the rows."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_lines=lines)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)
