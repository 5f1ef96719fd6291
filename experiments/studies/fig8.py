"""Figure 8: how much is selected. n_b stays; n_B changes, and an epoch has |D| / n_B steps."""

from __future__ import annotations

from dataclasses import replace

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import CNN_IL, rho

SIZES = {5: 640, 10: 320, 15: 213, 20: 160, 25: 128, 50: 64}  # n_B for 32 points


def arm(base: Cell, n_B: int) -> Cell:
    """As many steps as 150 epochs at a tenth, and looked at about as often."""
    looks = max(1, round(320 / n_B))  # at 5 % an epoch has half as many steps
    epochs = round(150 * n_B / 320)
    return rho(base, CNN_IL, n_B=n_B * base.n_b // 32, epochs=epochs, looks=looks)


def arms(base: Cell) -> dict[str, Cell]:
    return {
        "uniform": base,
        **{f"{share} % selected": arm(base, n_B) for share, n_B in SIZES.items()},
    }


NOTE = "The paper (a bar plot, no numbers): 10 % is not the best on two of three data sets."
STUDY = Study(
    "fig8",
    "Figure 8: the share that is selected, at equal steps",
    (
        Group("CIFAR-10", arms(Cell("cifar10")), (80, 85), show=("steps", "curves")),
        Group(
            "CIFAR-10 with 10 % wrong labels",
            arms(replace(Cell("cifar10"), labels="noise 10 %")),
            (75, 80),
            show=("steps", "curves", "shares"),
        ),
        Group("CIFAR-100", arms(Cell("cifar100")), (40, 50), show=("steps", "curves")),
    ),
    seeds=1,
    tier=2,
    note=NOTE,
)
CINIC10 = Study(
    "fig8_cinic10",
    "Figure 8: the share that is selected, at equal steps, CINIC-10",
    (
        Group(
            "CINIC-10", arms(Cell("cinic10", n_b=64, n_B=640)), (60, 70), show=("steps", "curves")
        ),
    ),
    seeds=1,
    tier=2,
    note=NOTE,
)
