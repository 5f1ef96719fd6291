"""Runs that were cut off continue where they were: their states are saved regularly and at an interrupt."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments import processes, records
from experiments.bench.cell import Cell
from experiments.bench.files import read_tensors
from experiments.bench.lines import named, tell
from experiments.bench.streaming import Loop
from experiments.bench.training import Run
from rholoss.engine.interrupt import whole_steps
from rholoss.errors import RholossError

VERSION = 1
EVERY = 300.0  # seconds between two states of a run: what a kill costs at most


class Unfinished:
    """A folder with the saved states of runs that are not finished.

    A run can only be continued with the same device, precision and version of torch.
    """

    def __init__(self, folder: Path, precision: str | None) -> None:
        self.folder, self.every = folder, EVERY
        self.here = (VERSION, records.device(), torch.__version__, precision)
        self._kept: dict[str, float] = {}  # when each run was last kept, by its key

    def path(self, cell: Cell) -> Path:
        """Where the state of the cell's run lies, if there is one."""
        return processes.file_of(self.folder, (cell.key(), *self.here)).with_suffix(".pt")

    def step(self, cell: Cell) -> int:
        """How far the cell's run has come; 0 where there is nothing to go on with."""
        try:  # one number of some hundred megabytes
            state = torch.load(self.path(cell), weights_only=True, mmap=True, map_location="cpu")
            return int(state["trainer"]["step"])
        except Exception:  # there is none, or what is told when the run begins
            return 0

    def resume(self, run: Run) -> None:
        """Take a run that has just begun to where an earlier process left it."""
        path = self.path(run.cell)
        if not path.exists():
            return
        try:
            run.load_state_dict(read_tensors(path))
        except RholossError as error:  # it was damaged, or is of other irreducible losses, say
            self._tell(run.cell, f"begins anew: {error}")
        else:
            self._tell(run.cell, f"goes on at step {run.step}")

    def keep(self, run: Run | Loop) -> None:
        """Keep the state if that is due: from time to time, not after every turn."""
        now = time.monotonic()
        if now - self._kept.setdefault(run.cell.key(), now) >= self.every:
            self._save(run)

    def put_aside(self, runs: Iterable[Run | Loop]) -> None:
        """Keep the states of all: the process is about to end."""
        kept = sum(self._save(run) for run in runs)
        if kept:
            told = f"{kept} run(s) under way were put aside; the same command goes on with them."
            tell(told, sys.stderr)

    def forget(self, cell: Cell) -> None:
        """Delete the state of a run that has its line now, and what a kill left of one being written."""
        for path in self.folder.glob(f"{self.path(cell).stem}.*"):
            path.unlink(missing_ok=True)

    def _save(self, run: Run | Loop) -> bool:
        if isinstance(run, Loop) or run.step == 0 or run.finished:
            return False
        try:
            # Not in the middle of a step, or the picks would be counted wrongly.
            with (
                whole_steps() as let_interrupt_through,
                records.replacing(self.path(run.cell)) as temporary,
            ):
                torch.save(run.state_dict(), temporary)
            let_interrupt_through()
        except (OSError, RuntimeError, RholossError) as error:  # no room: the run itself goes on
            self._tell(run.cell, f"could not be kept: {error}")
            return False
        finally:
            self._kept[run.cell.key()] = time.monotonic()
        return True

    def _tell(self, cell: Cell, what: str) -> None:
        tell(f"{named(cell)}: {what}", sys.stderr)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """A block in which a request to end interrupts the process after its step; later ones are ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        for end in processes.ENDS:
            signal.signal(end, signal.SIG_IGN)
        signal.raise_signal(signal.SIGINT)

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with processes.on_ends(interrupt):
        if ignored:  # as in a background job of a script, which must still end when it is asked to
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            if ignored:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
