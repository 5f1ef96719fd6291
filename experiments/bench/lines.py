"""The line of a run: one JSON object, the same for every kind of run."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol, TextIO

from experiments import processes, records
from experiments.bench.cell import Cell
from rholoss.engine import Evaluation


class Progress(Protocol):
    """What a result line is made from: a run, of whatever kind."""

    cell: Cell
    started: float
    step: int
    total_steps: int
    steps_per_epoch: int
    evals: list[tuple[int, float]]
    il_evals: list[tuple[int, float]]
    last: Evaluation | None
    il_about: dict[str, Any] | None
    ledger: Any
    precision: str | None
    error: str | None
    resumed: int

    def shares(self) -> dict[str, list[float]]:
        """Shares of the picks by epoch."""


def line(run: Progress, study: str, side_by_side: int) -> dict[str, Any]:
    """Seconds are those on the clock: other runs had their turns in them."""
    train = time.perf_counter() - run.started
    il = 0.0 if run.il_about is None else float(run.il_about["seconds"])
    last, about = run.last, records.about("experiments")
    return {
        "study": study,
        **asdict(run.cell),
        "steps": run.step,
        "steps_per_epoch": run.steps_per_epoch,
        "eval": run.evals,
        "il_eval": run.il_evals,
        "test_loss": None if last is None else _number(last.loss, 5),
        "per_class": [] if last is None else [_number(100 * x, 2) for x in last.per_class],
        "seconds": {"il": il, "train": round(train, 2), "total": round(il + train, 2)},
        "side_by_side": side_by_side,
        "resumed": run.resumed,
        "scored": run.ledger.scored,
        "trained": run.ledger.trained,
        "shares": run.shares(),
        "il_fit": run.il_about,
        "precision": run.precision or "fp32",
        "error": run.error,
        **about,
        "command": processes.unshared(about["command"]),
    }


def _number(value: float, digits: int) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def told(line: dict[str, Any]) -> str:
    """One line of text."""
    accuracy = f"{line['eval'][-1][1]:.2f} %" if line["eval"] else line["error"]
    return f"{line['study']}: {named(Cell.of(line))}: {accuracy}"


def named(cell: Cell) -> str:
    """A short name of a run, for people."""
    return f"{cell.dataset}, {cell.labels}, {cell.method} ({cell.il}), seed {cell.seed}"


def tell(text: str, file: TextIO | None = None) -> None:
    """Print a line. If nobody reads them any more (`| head`, a closed terminal), the run goes on."""
    file = file or sys.stdout
    try:
        print(text, file=file, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def standing(runs: Sequence[Progress]) -> str:
    """How far the run that is nearest to its end has come."""
    if not runs:
        return ""
    first = max(runs, key=lambda run: run.step / run.total_steps)
    accuracy = f", {first.evals[-1][1]:.2f} %" if first.evals else ""
    epoch = first.step // first.steps_per_epoch
    cell = first.cell
    return f"{cell.method}, seed {cell.seed}: {epoch} of {cell.epochs} epochs{accuracy}"
