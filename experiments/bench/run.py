"""Running cells: what they need is made once, then they train side by side, a line for each as it ends."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import records
from experiments.bench.adapters import OwnPrecision, Unaugmented
from experiments.bench.cell import Cell
from experiments.bench.files import keep, reading
from experiments.bench.irreducible import (
    CROSS_FIT,
    LIVE,
    MIXED_UP,
    Fits,
    Losses,
    Member,
    Recipe,
    parse,
    save_arrays,
)
from experiments.bench.lines import line, named, standing, tell, told
from experiments.bench.pace import Pace
from experiments.bench.problems import Problem, Problems
from experiments.bench.streaming import STREAMS, Loop, prepare_streamed
from experiments.bench.training import Run
from experiments.bench.unfinished import Unfinished, terminable
from experiments.datasets import data_dir
from experiments.models import MODELS
from experiments.processes import UnderWay
from rholoss import LiveIrreducible, WithIndex, coreset
from rholoss.engine import Resident
from rholoss.engine.interrupt import whole_steps
from rholoss.errors import RholossError
from rholoss.progress import Bar

LIVE_RATE = 0.01  # of the target's learning rate, for a live irreducible-loss model
AGAIN = 0.5  # seconds, if all runs that are left wait for another process
TOLD = (RholossError, FileNotFoundError)  # errors that say what to do, and need no traceback
RECOMPILES = 64  # kinds of model, batch size and method that one process may compile


class Bench:
    """Data, irreducible losses and core-sets, made when they are first needed.

    Args:
        root: the data directory.
        folder: where irreducible losses and their models are kept; by default below the data directory.
            Runs that are cut off are kept beside it.
        precision, compile: 'bf16' or 'fp32'; by default bf16 and compiled on a GPU, fp32 elsewhere.
    """

    def __init__(
        self,
        root: Any = None,
        *,
        folder: Path | None = None,
        recipe: Recipe | None = None,
        precision: str | None = None,
        compile: bool | None = None,
    ) -> None:
        self.cuda = torch.cuda.is_available()
        low = self.cuda if precision is None else precision == "bf16"
        self.precision = "bf16" if low else None
        self.compile = self.cuda if compile is None else compile
        if self.compile:
            torch._dynamo.config.cache_size_limit = RECOMPILES
        if self.cuda:
            torch.backends.cudnn.benchmark = True  # shapes never change here
        self.problems = Problems(root, torch.bfloat16 if low else torch.float32)
        self.folder = data_dir(root) / "irreducible-loss-models" if folder is None else folder
        # Not compiled: that takes longer than the few thousand steps of a fit.
        self.fits = Fits(
            MODELS, self.folder, recipe or Recipe(), precision=self.precision, compile=False
        )
        self.unfinished = Unfinished(self.folder.parent / "unfinished-runs", self.precision)
        self._coresets: dict[tuple[str, ...], Resident] = {}

    def problem(self, cell: Cell) -> Problem:
        """What the cell is trained on and judged by."""
        return self.problems.get(cell.dataset, cell.labels, cell.part)

    def start(self, cell: Cell) -> Run | Loop:
        """A run of the cell, on the device or, where data is streamed, in an ordinary loop.

        One that was cut off goes on where it was, unless its data is streamed.
        """
        if cell.dataset in STREAMS:
            return Loop(cell, self.problems.root, self.folder, precision=self.precision)
        run = Run(self, cell)
        self.unfinished.resume(run)
        return run

    def steps_per_epoch(self, cell: Cell) -> int:
        """An epoch is one pass over the candidates; what is left over is dropped."""
        return max(1, len(self.problem(cell).train) // cell.n_B)

    def steps(self, cell: Cell) -> int:
        """All steps of a run; 0 where data is streamed, and not counted before."""
        return 0 if cell.dataset in STREAMS else cell.epochs * self.steps_per_epoch(cell)

    def steps_left(self, cell: Cell) -> int:
        """Those that are still to be taken if an earlier process began the run."""
        return self.steps(cell) - self.unfinished.step(cell)

    def losses(self, cell: Cell) -> Losses | None:
        """The irreducible losses that the cell names."""
        if cell.il == "none":
            return None
        return self.fits.losses(cell.il, self.problem(cell), cell.dataset, cell.labels, cell.part)

    def members(self, cell: Cell) -> tuple[Member, ...]:
        """The models behind the cell's irreducible losses."""
        return self.fits.members(cell.il, self.problem(cell), cell.dataset, cell.labels, cell.part)

    def irreducible(self, cell: Cell) -> Any:
        """A table, a live model, or None, as the trainer takes it."""
        losses = self.losses(cell)
        source = parse(cell.il)[1] if losses is not None else ""
        if source not in LIVE:
            return None if losses is None else losses.table
        model = copy.deepcopy(self.members(cell)[0].model)  # each run has its own
        model = OwnPrecision(model, self.precision == "bf16")
        rate = LIVE_RATE * cell.learning_rate
        options = {"capturable": True, "fused": True} if self.cuda else {}
        adamw = functools.partial(torch.optim.AdamW, lr=rate, **options)
        return LiveIrreducible(model, adamw, batch_norm=LIVE[source])

    def core_set(self, cell: Cell) -> Resident:
        """SVP: the tenth of the training set on which the proxy is least sure."""
        key = (cell.dataset, cell.labels, cell.part, cell.il, f"{cell.n_b} of {cell.n_B}")
        if key not in self._coresets:
            if cell.il == "none" or parse(cell.il)[1] in (CROSS_FIT, MIXED_UP):
                raise RholossError(
                    f"`il` is {cell.il!r}, but 'svp' needs one model: its proxy. Name one with a holdout."
                )
            train = self.problem(cell).train
            path = self.fits.path(f"core-set {' '.join(key)}", ".npz")
            if path is not None and path.exists():
                with reading(path) as file, np.load(file) as found:
                    rows = found["rows"]
            else:
                rows = self._least_sure(cell, train)
                keep(path, functools.partial(save_arrays, rows=rows))
            self._coresets[key] = train.take(torch.as_tensor(rows, device=train.device))
        return self._coresets[key]

    def prepare(self, cell: Cell) -> None:
        """Make what the cell shares with others, so that processes that run them find it."""
        if cell.dataset in STREAMS:
            prepare_streamed(cell, self.problems.root, self.folder)
            return
        self.irreducible(cell)
        if cell.method == "svp":
            self.core_set(cell)

    def _least_sure(self, cell: Cell, train: Resident) -> np.ndarray:
        chosen = coreset(
            OwnPrecision(self.members(cell)[0].model, self.precision == "bf16"),
            WithIndex(Unaugmented(train), list(range(len(train)))),
            keep=cell.n_b / cell.n_B,
            method="entropy",
            progress=False,
        )
        return np.asarray(chosen.ids)


def done(*folders: Path) -> dict[str, dict[str, Any]]:
    """Lines of all studies below these folders by the key of their cell; the latest counts."""
    found = records.read(
        *(path for folder in folders for path in sorted(folder.glob("*/runs.jsonl")))
    )
    return {Cell.of(line).key(): line for line in found if "steps_per_epoch" in line}


def missing(cells: Iterable[tuple[str, Cell]], *folders: Path) -> list[tuple[str, Cell]]:
    """The cells without a line below these folders. One of two studies goes to the first."""
    have, fresh = done(*folders), dict[Cell, str]()
    for study, cell in cells:
        if cell.key() not in have:
            fresh.setdefault(cell, study)
    return [(study, cell) for cell, study in fresh.items()]


def run(
    bench: Bench,
    cells: Sequence[tuple[str, Cell]],
    out: Path,
    *,
    side_by_side: int = 6,
    seconds: float = math.inf,
    limit: float = math.inf,
    known: Sequence[Path] = (),
    claim: Callable[[str], bool] = lambda key: True,
    ready: Callable[[Cell], bool] = lambda cell: True,
    progress: bool = True,
) -> int:
    """Run cells, each with the name of its study, several at a time; for `seconds` and `limit` see `Pace`.

    Returns how many were finished. Passed over are cells that have a line below `out` or `known`, cells that
    `claim` refuses, and cells that another command is running. A cell that is not `ready` is tried again
    later. If a run fails the others go on, and its error is raised at the end.
    """
    waiting = missing(cells, out, *known)
    bar = Bar(len(waiting), "runs", enabled=progress)
    with bar, UnderWay(out) as under_way, terminable():
        pace = Pace(seconds, limit)
        session = _Session(bench, out, waiting, side_by_side, pace, claim, ready, under_way, bar)
        try:
            while True:
                later = session.begin()
                if not session.running:
                    if not later:
                        break
                    time.sleep(AGAIN)
                session.advance()
                session.show()
        except BaseException:
            bench.unfinished.put_aside(session.runs)
            raise
    session.failed.tell()
    return session.finished


@dataclass
class _Session:
    """The runs of one call of `run`: those that wait, and those in progress, which take turns."""

    bench: Bench
    out: Path
    waiting: list[tuple[str, Cell]]
    side_by_side: int
    pace: Pace
    claim: Callable[[str], bool]
    ready: Callable[[Cell], bool]
    under_way: UnderWay
    bar: Bar
    running: list[tuple[str, Run | Loop]] = field(default_factory=list)
    failed: _Failures = field(default_factory=lambda: _Failures())
    finished: int = 0

    @property
    def runs(self) -> list[Run | Loop]:
        return [current for _, current in self.running]

    def begin(self) -> bool:
        """Start runs while there is room; returns whether some were not ready and must be tried again."""
        later = False
        for study, cell in list(self.waiting):
            if self.pace.over or len(self.running) == self.side_by_side:
                break
            with self.failed.kept(study, cell):
                if not self.pace.allows(cell, self.bench.steps_left(cell)):
                    continue  # a shorter one may do
                if not self.ready(cell):
                    later = True
                    continue
                if self.claim(cell.key()) and self._is_free(study, cell):
                    self.running.append((study, self.bench.start(cell)))
            self.waiting.remove((study, cell))
        return later

    def _is_free(self, study: str, cell: Cell) -> bool:
        """Whether no other command is making the run, or has made it since this one looked for its line."""
        if self.under_way.begin(cell.key()):
            return cell.key() not in done(self.out)
        tell(f"{study}: {named(cell)}: left to another command, which is at it", sys.stderr)
        return False

    def advance(self) -> None:
        """Give each run its turn, and write the lines of those that end."""
        before = len(self.running)
        for record in self._turn():
            cell, kept = Cell.of(record), self.failed.kept(record["study"], Cell.of(record))
            # An interrupt must not come between writing the line and deleting the kept state.
            with kept, whole_steps() as let_interrupt_through:
                records.append(self.out / record["study"] / "runs.jsonl", record)
                self.bench.unfinished.forget(cell)
                self.finished += 1
                tell(told(record))
            let_interrupt_through()
        if len(self.running) < before:
            self.under_way.only(current.cell.key() for current in self.runs)
            gc.collect()  # an evaluator is in a reference cycle, and holds memory of the device

    def _turn(self) -> Iterator[dict[str, Any]]:
        """Advance each run once. Runs that end or fail are removed; yields the lines of those that ended."""
        for entry in list(self.running):
            study, current = entry
            with self.failed.kept(study, current.cell):
                current.advance()
            if self.failed.has(study, current.cell):
                self.running.remove(entry)
            elif current.finished:
                self.running.remove(entry)
                yield line(current, study, self.side_by_side)
            else:
                self.bench.unfinished.keep(current)

    def show(self) -> None:
        """Bring the pace and the progress bar up to date."""
        runs = self.runs
        self.pace.look(runs)
        over = self.bar.total - len(self.waiting) - len(runs)
        done_of_each = sum(current.step / current.total_steps for current in runs)
        self.bar.advance(over + done_of_each - self.bar.done, note=standing(runs))


class _Failures:
    """The errors of single runs, kept until the other runs are done.

    They are kept as text: an exception would keep the run, and its memory on the device, alive.
    """

    def __init__(self) -> None:
        self.errors: dict[tuple[str, Cell], str] = {}

    @contextlib.contextmanager
    def kept(self, study: str, cell: Cell) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            text = str(error) or type(error).__name__
            if text not in self.errors.values():
                if isinstance(error, TOLD):
                    tell(f"{study}: {text}", sys.stderr)
                else:
                    traceback.print_exc()
            self.errors[study, cell] = text

    def has(self, study: str, cell: Cell) -> bool:
        return (study, cell) in self.errors

    def tell(self) -> None:
        """Raise an error that has each of their messages once."""
        if not self.errors:
            return
        texts: dict[str, str] = {}  # message -> the first run that has it
        for (study, cell), text in self.errors.items():
            texts.setdefault(text, f"{study}, {cell.key()}")
        raise RholossError(
            f"{len(self.errors)} run(s) failed and have no line; the same command runs them again.\n"
            + "\n".join(f"{where}: {text}" for text, where in texts.items())
        )
