"""What runs in the race: arms, and the cells (data, arm, sizes, seed) that one run is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rholoss.schedules import Schedule


@dataclass(frozen=True)
class Arm:
    """A way to train: a method, k candidates for each trained point, and when to stop scoring."""

    name: str
    method: str = "uniform"
    k: int = 1
    switch: float = 1.0  # share of the steps that score
    drop: float = 0.0  # share of highest irreducible loss that is left out afterwards

    @property
    def needs_il(self) -> bool:
        return self.method in ("rho", "negative_il") or self.drop > 0

    def schedule(self, steps: int) -> Schedule:
        if self.method == "uniform":
            return Schedule(stop=0, drop=self.drop)
        stop = math.inf if self.switch >= 1 else math.floor(steps * self.switch + 0.5)
        return Schedule(stop=stop, drop=self.drop)


ARMS = {
    arm.name: arm
    for arm in (
        Arm("uniform"),
        Arm("uniform minus 2 %", drop=0.02),
        Arm("uniform minus 10 %", drop=0.10),
        Arm("loss k=2", "loss", k=2),
        Arm("rho k=10", "rho", k=10),
        Arm("rho k=5", "rho", k=5),
        Arm("annealed k=5", "rho", k=5, switch=0.3, drop=0.02),
        Arm("annealed k=5, 10 %", "rho", k=5, switch=0.3, drop=0.10),
        Arm("annealed k=3, 10 %", "rho", k=3, switch=0.3, drop=0.10),
    )
}


@dataclass(frozen=True)
class Cell:
    """One run. `split` is 'tune' (train on 45,000, judged on the 5,000 others) or 'final' (test set)."""

    labels: str
    arm: str
    n_b: int
    lr: float
    seed: int
    split: str = "tune"
    budget: float = 17.0
    il: str = "inside"  # the budget, or 'reused' from an earlier run

    def key(self) -> str:
        return "|".join(f"{k}={v}" for k, v in asdict(self).items())

    def steps(self, times: dict[str, float], il_seconds: float) -> int:
        """How many steps the budget pays for, at step times (ms) that were measured alone."""
        arm = ARMS[self.arm]
        budget = self.budget - (il_seconds if arm.needs_il and self.il == "inside" else 0.0)
        uniform = times[time_key("uniform", self.n_b, 1)]
        scoring = times[time_key(arm.method, self.n_b, arm.k)]
        share = 0.0 if arm.method == "uniform" else arm.switch
        return max(1, int(1000 * budget / (share * scoring + (1 - share) * uniform)))


def time_key(method: str, n_b: int, k: int) -> str:
    return f"{'uniform' if method == 'uniform' else 'scoring'} {n_b} of {n_b * k}"


def needed_times(cells: list[Cell]) -> list[tuple[str, int, int]]:
    """(method, n_b, k) of the step times that these cells need."""
    needed: dict[str, tuple[str, int, int]] = {}
    for cell in cells:
        arm = ARMS[cell.arm]
        for method, k in (("uniform", 1), (arm.method, arm.k)):
            needed.setdefault(time_key(method, cell.n_b, k), (method, cell.n_b, k))
    return list(needed.values())


def read_key(record: dict[str, Any]) -> str:
    """The key of the cell that a line of results came from."""
    return Cell(**{name: record[name] for name in Cell.__dataclass_fields__}).key()
