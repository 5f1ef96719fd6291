"""When to select: a schedule is a pure function of the step number.

All four schedules are one window of steps in which candidates are scored; outside it the choice is uniform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rholoss.errors import RholossError


@dataclass(frozen=True)
class Phase:
    """What happens at one step: score the candidates, or choose uniformly.

    `drop` is the share of the data, that with the highest irreducible loss, which a uniform choice
    passes over.
    """

    score: bool
    drop: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """Score from step `start` up to step `stop`; after that drop the share `drop` of highest IL."""

    start: int = 0
    stop: float = math.inf
    drop: float = 0.0

    def __post_init__(self) -> None:
        for name in ("start", "stop", "drop"):  # plain: `torch.load` reads no numpy's in a state
            if isinstance(value := getattr(self, name), np.generic):
                object.__setattr__(self, name, value.item())
        if not 0 <= self.start <= self.stop:
            raise RholossError(
                f"A schedule must start at step 0 or later and stop after it starts, but starts at "
                f"{self.start} and stops at {self.stop}."
            )
        if self.start % 1 or (self.stop < math.inf and self.stop % 1):
            raise RholossError(
                f"A schedule counts steps, but starts at {self.start} and stops at {self.stop}. If these are "
                "shares of a run, give them times its steps."
            )
        if not 0 <= self.drop < 1:
            raise RholossError(f"`drop` must be in [0, 1), but is {self.drop}; 0 drops nothing.")

    def __call__(self, step: int) -> Phase:
        """The phase of a step."""
        if step < self.start:
            return Phase(score=False)
        return Phase(score=True) if step < self.stop else Phase(score=False, drop=self.drop)


def constant() -> Schedule:
    """Score and select at every step, as the paper does; the default."""
    return Schedule()


def warm_up(steps: int) -> Schedule:
    """Choose uniformly at first, then score and select to the end.

    Args:
        steps: the number of steps that do not score.
    """
    return Schedule(start=steps)


def window(start: int, stop: int) -> Schedule:
    """Score and select from step `start` up to step `stop`; choose uniformly before and after.

    Args:
        start: the first step that scores; steps count from 0.
        stop: the first step that does not score any more.
    """
    return Schedule(start=start, stop=stop)


def annealed(total_steps: int, *, switch: float = 0.3, drop: float = 0.05) -> Schedule:
    """Score and select early; later choose uniformly, without the highest irreducible losses.

    Choosing hard while the learning rate decays costs accuracy, and once the target is ahead of the
    irreducible-loss model, what still looks reducible is mostly wrong labels. The later phase scores
    nothing, so it costs nothing.

    Args:
        total_steps: the number of steps of the whole run.
        switch: the share of them that score, the first ones, in [0, 1].
        drop: the share of the data that is left out afterwards: the points with the highest irreducible
            losses, in [0, 1). Pass 0 if the labels are clean: such points are then hard but right, and worth
            learning.
    """
    if total_steps < 1 or not 0 <= switch <= 1:
        raise RholossError(
            f"`total_steps` must be at least 1 and `switch` in [0, 1], but are {total_steps} and "
            f"{switch}."
        )
    return Schedule(stop=math.floor(total_steps * switch + 0.5), drop=drop)
