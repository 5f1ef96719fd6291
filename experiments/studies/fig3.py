"""Figure 3: which points are picked. Shares over all epochs, every step counted."""

from __future__ import annotations

from dataclasses import replace

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import CNN_IL, R18_IL, rho


def methods(base: Cell) -> dict[str, Cell]:
    return {
        "uniform": base,
        "RHO-LOSS, ResNet-18 IL": rho(base, R18_IL),
        "RHO-LOSS, small CNN IL": rho(base, CNN_IL),
        "training loss": replace(base, method="loss"),
        "gradient norm": replace(base, method="grad_norm"),
    }


SHOW = ("shares", "share_curves")

STUDY = Study(
    "fig3",
    "Figure 3: shares of corrupted, low-relevance and already-correct points among the picks",
    (
        Group(
            "Corrupted picks, CIFAR-10 with 10 % wrong labels",
            methods(Cell("cifar10", labels="noise 10 %")),
            show=SHOW,
        ),
        Group(
            "Low-relevance picks, CIFAR-100 Relevance",
            methods(Cell("cifar100-relevance")),
            show=("epochs", *SHOW, "classes"),
            note=(
                "20 classes whole and 6 % of each of the other 80, in training, holdout and test set. In the "
                "mean of the classes each counts alike, so it is mostly that of the rare ones."
            ),
        ),
        Group("Already-correct picks, CIFAR-10, clean", methods(Cell("cifar10")), show=SHOW),
        Group(
            "Corrupted picks, CIFAR-100 with 10 % wrong labels",
            methods(Cell("cifar100", labels="noise 10 %")),
            show=SHOW,
        ),
    ),
    seeds=2,
    note=(
        "The paper prints no numbers. It says: RHO-LOSS picks fewer corrupted and somewhat fewer "
        "low-relevance points than uniform, loss and gradient norm far more; all methods pick fewer points "
        "that are already classified correctly than uniform. The other methods' shares are on the pages of "
        "Table 2."
    ),
)
