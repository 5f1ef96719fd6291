"""Two ways to draw 10 % wrong labels: the paper's text, and the authors' code, where 9 % become wrong."""

from __future__ import annotations

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import all_methods

SOME = ("uniform", "RHO-LOSS", "training loss")
SHOW = ("epochs", "curves", "shares")


def arms(labels: str) -> dict[str, Cell]:
    every = all_methods(Cell("cifar10", labels=labels))
    return {name: every[name] for name in SOME}


STUDY = Study(
    "noise_conventions",
    "Wrong labels that are always wrong, and wrong labels that may be the true one",
    (
        Group("Another label than the true one", arms("noise 10 %"), (75, 85), show=SHOW),
        Group("Any label, as in the authors' code", arms("noise 10 % any"), (75, 85), show=SHOW),
    ),
    seeds=1,
    tier=2,
)
