"""When to begin no more runs: after so long, and before one that would be cut off by a limit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

SETTLED = 500  # steps after which a run's pace counts: the first ones compile
ENOUGH = 100  # and of so many more it is known


class Moving(Protocol):
    """A run, as far as its pace goes."""

    step: int


class Pace:
    """Says whether a further run may begin.

    Args:
        seconds: none begins after so long.
        limit: and none that would not be through by then, at the pace of the slowest beside it. A process
            that is killed loses all that is under way.
    """

    def __init__(self, seconds: float = math.inf, limit: float = math.inf) -> None:
        self.seconds, self.limit, self.started = seconds, limit, time.perf_counter()
        self._settled: WeakKeyDictionary[Moving, tuple[float, int]] = WeakKeyDictionary()
        self._a_step = 0.0  # seconds, as seen last; 0 as long as nothing is known

    @property
    def over(self) -> bool:
        """Whether no run begins any more, however short."""
        return time.perf_counter() - self.started > min(self.seconds, self.limit)

    def look(self, running: Iterable[Moving]) -> None:
        """See how fast the runs are that are under way, since they were first seen to have settled."""
        now, paces = time.perf_counter(), []
        for run in running:
            if run.step >= SETTLED:
                since, step = self._settled.setdefault(run, (now, run.step))
                if run.step >= step + ENOUGH:
                    paces.append((now - since) / (run.step - step))
        if paces:
            self._a_step = max(paces)

    def allows(self, steps: int) -> bool:
        """Whether a run of so many steps would be through in time beside those that are under way."""
        return time.perf_counter() - self.started + steps * self._a_step <= self.limit
