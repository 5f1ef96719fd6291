"""What the cross-fit of the authors' code, which mixes up its halves, may have done for Figure 2."""

from __future__ import annotations

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import CROSS_FIT, MIXED_UP, rho


def arms(base: Cell) -> dict[str, Cell]:
    return {
        "uniform": base,
        "RHO-LOSS, no holdout": rho(base, CROSS_FIT),
        "RHO-LOSS, no holdout, mixed up": rho(base, MIXED_UP),
    }


SHOW = ("speedup", "epochs", "curves")
STUDY = Study(
    "mixed_up",
    "Figure 2, row 3: irreducible losses whose halves are mixed up, as in the authors' code",
    (
        Group("CIFAR-10", arms(Cell("cifar10")), (80, 85), show=SHOW),
        Group("CIFAR-100", arms(Cell("cifar100")), (40, 50), show=SHOW),
    ),
    seeds=2,
    tier=2,
    note=(
        "Without a holdout set each half of the points is to be scored by the model of the other half. On "
        "half of CIFAR the authors' code takes a point's place in the half for its id, as we read it, so "
        "that every second point has its loss from the model that was trained on it. 'Mixed up' does the "
        "same on purpose."
    ),
)
