"""How good must the irreducible-loss model be? The paper takes the weights of lowest loss."""

from __future__ import annotations

from dataclasses import replace

from experiments.bench.cell import Cell, Group, Study
from experiments.studies import fig2
from experiments.studies.arms import (
    CNN_IL,
    CNN_NOISY_IL,
    CROSS_FIT,
    early,
    ladder,
    most_accurate,
    rho,
)

EPOCHS = (2, 4, 12)


def arms(base: Cell, fitted: str, source: str) -> dict[str, Cell]:
    stopped = {f"RHO-LOSS, IL after {n} epochs": rho(base, early(n, source=source)) for n in EPOCHS}
    climbing = {"RHO-LOSS, ladder (4, 12, lowest)": rho(base, ladder(source))}
    return {
        "uniform": base,
        **stopped,
        "RHO-LOSS, IL of lowest loss": rho(base, fitted),
        "RHO-LOSS, IL of highest accuracy": rho(base, most_accurate(source)),
        **climbing,
    }


SHOW = ("epochs", "curves", "shares")
CLEAN, HUNDRED = Cell("cifar10"), Cell("cifar100")
STUDY = Study(
    "il_strength",
    "Irreducible-loss models that are stopped early, or weak",
    (
        Group("Clean", arms(CLEAN, CNN_IL, "clean holdout"), (80, 87.5), show=SHOW),
        Group(
            "10 % wrong labels in the holdout too",
            arms(replace(CLEAN, labels="noise 10 %"), CNN_NOISY_IL, "noisy holdout"),
            (75, 85),
            show=SHOW,
        ),
        Group(
            "CIFAR-100, clean",
            fig2.rows(HUNDRED)
            | {"RHO-LOSS, no holdout, annealed": rho(HUNDRED, CROSS_FIT, schedule="annealed")},
            (30, 40, 50),
            show=("epochs", "curves"),
            note=(
                "Test accuracy of the models: 50 and 52 % (ResNet-18, two fits), 43 (small CNN), 30 to 32 "
                "(no holdout: small CNNs, each fitted on half of the points that are trained on)."
            ),
        ),
    ),
    seeds=1,
    tier=2,
    note=(
        "The target is a ResNet-18. CIFAR-10: a small CNN for the irreducible losses, fitted for a while. "
        "With a small CNN as the target, too, a model of four epochs was far better at first than one fitted "
        "to the end ([fig9_weak_target](../fig9_weak_target/README.md)). So it is here, for the first ten "
        "epochs; after that a young model holds the target back, and with wrong labels it cannot tell "
        "them any more. Hence the ladder (`rholoss.Ladder`): the losses after 4 epochs, then those after 12, "
        "then the lowest, each until the target comes near. It is ahead of all of them while the target is "
        "young and level with the lowest afterwards; with wrong labels it ends higher. Not in the paper."
    ),
)
