"""Figure 8: how much is selected. n_b stays 32; n_B changes, and an epoch has |D| / n_B steps."""

from __future__ import annotations

from dataclasses import replace

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import CNN_IL, rho

SIZES = {5: 640, 10: 320, 15: 213, 20: 160, 25: 128, 50: 64}


def arm(base: Cell, n_B: int) -> Cell:
    """As many steps as 150 epochs at n_B = 320, and looked at about as often."""
    looks = max(
        1, round(320 / n_B)
    )  # n_B = 640 has as many steps to a look as an epoch: half as many
    return rho(base, CNN_IL, n_B=n_B, epochs=round(150 * n_B / 320), looks=looks)


def arms(base: Cell) -> dict[str, Cell]:
    return {
        "uniform": base,
        **{f"{share} % selected": arm(base, n_B) for share, n_B in SIZES.items()},
    }


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
    ),
    seeds=1,
    tier=2,
    note="The paper (a bar plot, no numbers): 10 % is not the best on two of three data sets.",
)
