"""Whether one run reached what another one reached in less time."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rholoss.errors import RholossError
from rholoss.steplog import read_log

# The evaluations of a run, (step, seconds, value) each, and the seconds its irreducible losses cost it.
Run = tuple[Sequence[tuple[int, float, float]], float]


@dataclass(frozen=True)
class Verdict:
    """Whether selection reached what the baseline reached in less time, irreducible losses included.

    A run that never reached the target has None for `seconds` and `steps`; a baseline that did not
    has `baseline_reached` False, and the steps and seconds that it took in all.
    """

    target: float
    seconds: float | None
    steps: int | None
    baseline_seconds: float
    baseline_steps: int
    baseline_reached: bool = True

    @property
    def paid(self) -> bool:
        """It reached the target, and sooner."""
        sooner = self.seconds is not None and self.seconds < self.baseline_seconds
        return sooner or (self.seconds is not None and not self.baseline_reached)

    def __str__(self) -> str:
        took = "took" if self.baseline_reached else "did not reach it in"
        base = f"the baseline {took} {self.baseline_steps} steps, {self.baseline_seconds:.1f} s"
        if self.seconds is None:
            return f"did not pay: never reached {self.target:.4g}; {base}"
        word = "paid" if self.paid else "did not pay"
        return (
            f"{word}: reached {self.target:.4g} after {self.steps} steps, {self.seconds:.1f} s with the "
            f"irreducible losses; {base} ({self.baseline_seconds / max(self.seconds, 1e-9):.2f}x)"
        )


def in_log(log: Any) -> Run:
    """The run in the log at this path."""
    if not isinstance(log, (str, os.PathLike)):
        raise RholossError(
            f"`baseline` is a {type(log).__name__}; pass its ledger (`.ledger`) or the path of its log."
        )
    lines = [line for line in read_log(log) if line["type"] == "mark"]
    marks = [(m["step"], m["seconds"], m["value"]) for m in lines if m["value"] is not None]
    return marks, max((float(m.get("il_seconds", 0.0)) for m in lines), default=0.0)


def compared(own: Run, baseline: Run, target: float | None) -> Verdict:
    """The verdict on a run; `target` None stands for the best value of the baseline."""
    (ours, cost), (theirs, their_cost) = own, baseline
    ours, theirs = ([m for m in marks if math.isfinite(m[2])] for marks in (ours, theirs))
    if not theirs or not ours:
        raise RholossError(
            "A verdict needs figures of merit of both runs: call `select.mark(accuracy)` at each "
            "evaluation."
        )
    goal = max(value for *_, value in theirs) if target is None else target
    first, their_first = (next((m for m in run if m[2] >= goal), None) for run in (ours, theirs))
    their_step, their_seconds, _ = their_first or theirs[-1]
    return Verdict(
        target=goal,
        seconds=None if first is None else first[1] + cost,
        steps=None if first is None else first[0],
        baseline_seconds=their_seconds + their_cost,
        baseline_steps=their_step,
        baseline_reached=their_first is not None,
    )
