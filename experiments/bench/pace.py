"""When to begin no more runs: after so long, and before one that would be cut off by a limit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from experiments.bench.cell import Cell
from experiments.bench.irreducible import LIVE
from rholoss.core import MONTE_CARLO
from rholoss.methods import by_name

SETTLED = 500  # steps after which a run's pace counts: the first ones compile
ENOUGH = 100  # and of so many more it is known
DRAWS = 10  # of Monte-Carlo dropout, as the trainer has them by default


class Moving(Protocol):
    """The part of a run that its pace is computed from."""

    cell: Cell
    resumed: int

    @property
    def step(self) -> int: ...


class Kind(NamedTuple):
    """What decides how long a step takes: the model, the rows that it trains on and those it scores."""

    model: str
    trained: int
    scored: int
    live: str  # an irreducible-loss model that does the same once more

    @property
    def work(self) -> int:
        """Rows forwarded in a step; to train on a row counts three times."""
        return (3 * self.trained + self.scored) * (2 if self.live else 1)


def kind(cell: Cell) -> Kind:
    """That of a cell. A core-set is trained on as it is."""
    needs = frozenset() if cell.method == "svp" else by_name(cell.method).needs
    forwards = DRAWS if needs & MONTE_CARLO else int(bool(needs - {"irreducible_loss"}))
    live = cell.il if cell.il.partition(", ")[2] in LIVE else ""
    return Kind(cell.model, cell.n_b, cell.n_B * forwards, live)


class Pace:
    """Says whether another run may begin.

    Args:
        seconds: no run begins after so long.
        limit: no run begins that would not be done by then. How long it takes is judged by the slowest of
            the latest runs of its kind; if there was none, by those of other kinds, scaled by the work of a
            step. (A run that is killed before its end is continued by the next process.)
    """

    def __init__(self, seconds: float = math.inf, limit: float = math.inf) -> None:
        self.seconds, self.limit, self.started = seconds, limit, time.perf_counter()
        self._began: WeakKeyDictionary[Moving, int] = WeakKeyDictionary()
        self._settled: WeakKeyDictionary[Moving, tuple[float, int]] = WeakKeyDictionary()
        self._a_step: dict[Kind, float] = {}  # seconds, as seen last

    @property
    def over(self) -> bool:
        """Whether no run begins any more, however short."""
        return time.perf_counter() - self.started > min(self.seconds, self.limit)

    def look(self, running: Iterable[Moving]) -> None:
        """Note how fast the present runs are, counted from when each of them had settled."""
        now, paces = time.perf_counter(), dict[Kind, float]()
        for run in running:
            # One that was cut off and goes on compiles again.
            began = self._began.setdefault(run, run.step if run.resumed else 0)
            if run.step >= began + SETTLED:
                since, step = self._settled.setdefault(run, (now, run.step))
                if run.step >= step + ENOUGH:
                    taken, key = (now - since) / (run.step - step), kind(run.cell)
                    paces[key] = max(taken, paces.get(key, 0.0))
        self._a_step |= paces

    def allows(self, cell: Cell, steps: int) -> bool:
        """Whether the run, of so many steps, would be through in time beside those that are under way."""
        mine = kind(cell)
        others = (taken * max(1, mine.work / seen.work) for seen, taken in self._a_step.items())
        a_step = self._a_step.get(mine, max(others, default=0.0))
        return time.perf_counter() - self.started + steps * a_step <= self.limit
