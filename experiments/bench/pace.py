"""When to begin no more runs: after so long, and before one that would be cut off by a limit."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

from experiments.bench.cell import Cell
from rholoss.methods import by_name

SETTLED = 500  # steps after which a run's pace counts: the first ones compile
ENOUGH = 100  # and of so many more it is known


class Moving(Protocol):
    """A run, as far as its pace goes."""

    cell: Cell

    @property
    def step(self) -> int: ...


def kind(cell: Cell) -> Hashable:
    """What decides how long a step takes."""
    # Whether all candidates are forwarded; a core-set is trained on as it is.
    forwards = cell.method != "svp" and by_name(cell.method).needs - {"irreducible_loss"}
    return cell.model, cell.n_b, cell.n_B if forwards else 0


class Pace:
    """Says whether a further run may begin.

    Args:
        seconds: none begins after so long.
        limit: and none that would not be through by then, at the pace that was seen last of runs of its
            kind (the slowest of them; of all, if none was seen). A process that is killed loses all that
            is under way.
    """

    def __init__(self, seconds: float = math.inf, limit: float = math.inf) -> None:
        self.seconds, self.limit, self.started = seconds, limit, time.perf_counter()
        self._settled: WeakKeyDictionary[Moving, tuple[float, int]] = WeakKeyDictionary()
        self._a_step: dict[Hashable, float] = {}  # seconds, as seen last, by kind

    @property
    def over(self) -> bool:
        """Whether no run begins any more, however short."""
        return time.perf_counter() - self.started > min(self.seconds, self.limit)

    def look(self, running: Iterable[Moving]) -> None:
        """See how fast the runs are that are under way, since they were first seen to have settled."""
        now, paces = time.perf_counter(), dict[Hashable, float]()
        for run in running:
            if run.step >= SETTLED:
                since, step = self._settled.setdefault(run, (now, run.step))
                if run.step >= step + ENOUGH:
                    taken, key = (now - since) / (run.step - step), kind(run.cell)
                    paces[key] = max(taken, paces.get(key, 0.0))
        self._a_step |= paces

    def allows(self, cell: Cell, steps: int) -> bool:
        """Whether the run, of so many steps, would be through in time beside those that are under way."""
        slowest = max(self._a_step.values(), default=0.0)
        a_step = self._a_step.get(kind(cell), slowest)
        return time.perf_counter() - self.started + steps * a_step <= self.limit
