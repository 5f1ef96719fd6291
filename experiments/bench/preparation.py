"""What several runs share is made by one of the processes, while the others make runs that are ready."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.bench.cell import Cell
from experiments.bench.irreducible import LADDER, fitted
from experiments.processes import file_of


class Preparation:
    """Says whether what a cell needs is there, and makes it unless another process is doing so.

    Args:
        bench: has `prepare(cell)`.
        cells: all that are to be run. What those share that name the same model is made in one go.
        folder: of the claims of this command.
    """

    def __init__(self, bench: Any, cells: Iterable[Cell], folder: Path) -> None:
        self.bench, self.cells, self.folder = bench, list(cells), folder

    def __call__(self, cell: Cell) -> bool:
        """Make what the cell needs; False while another process is making it."""
        shared = shared_by(cell)
        if shared is None:
            return True
        made = file_of(self.folder, ("made", shared))
        if made.exists():
            return True
        with file_of(self.folder, ("making", shared)).open("w") as lock:
            try:  # a process that is killed lets go of it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if not made.exists():
                try:
                    for other in self.cells:
                        if shared_by(other) == shared:
                            self.bench.prepare(other)
                finally:
                    made.touch()  # what failed will fail in each run, and be told
        return True


def shared_by(cell: Cell) -> tuple[str, ...] | None:
    """The model that is fitted for the cell, whatever its age or the labels; None if there is none."""
    if cell.il == "none":
        return None
    name, source = fitted(cell.il)
    return cell.dataset, cell.part, name.partition(" of ")[0].removesuffix(LADDER), source
