"""When to begin no more runs: after so long, and before one that would be cut off by a limit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Protocol

SETTLED = 500  # steps after which a run's pace counts: the first ones compile


class Moving(Protocol):
    """A run, as far as its pace goes."""

    started: float
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
        self._a_step = 0.0  # seconds, as seen last; 0 as long as nothing is known

    @property
    def over(self) -> bool:
        """Whether no run begins any more, however short."""
        return time.perf_counter() - self.started > min(self.seconds, self.limit)

    def allows(self, steps: int, running: Iterable[Moving]) -> bool:
        """Whether a run of so many steps would be through in time beside those that are under way."""
        now = time.perf_counter()
        settled = [run for run in running if run.step >= SETTLED]
        if settled:
            self._a_step = max((now - run.started) / run.step for run in settled)
        return now - self.started + steps * self._a_step <= self.limit
