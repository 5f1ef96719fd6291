"""BatchNorm while scoring: how much the choice matters, of which the paper says that it does a lot."""

from __future__ import annotations

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import CNN_IL, rho

NAMES = {
    "train": "statistics of the candidates, running ones move (the paper)",
    "batch": "statistics of the candidates, running ones kept",
    "eval": "running statistics",
}


def arms(base: Cell) -> dict[str, Cell]:
    modes = {
        f"RHO-LOSS, {text}": rho(base, CNN_IL, batch_norm=mode) for mode, text in NAMES.items()
    }
    return {"uniform": base, **modes}


SHOW = ("epochs", "curves", "shares")
STUDY = Study(
    "batch_norm",
    "BatchNorm while scoring: three modes",
    (
        Group("Clean", arms(Cell("cifar10")), (80, 87.5), show=SHOW),
        Group("10 % wrong labels", arms(Cell("cifar10", labels="noise 10 %")), (75, 85), show=SHOW),
    ),
    seeds=1,
    tier=2,
)
