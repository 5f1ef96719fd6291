"""Table 3: no holdout data. Two small CNNs, each scores the half of the whole set that it did not see."""

from __future__ import annotations

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import CROSS_FIT, rho


def group(title: str, base: Cell, targets: tuple[float, float], uniform: str, chosen: str) -> Group:
    arms = {"uniform": base, "RHO-LOSS": rho(base, CROSS_FIT)}
    paper = {"uniform": uniform, "RHO-LOSS": chosen}
    return Group(title, arms, targets, paper, ("epochs", "curves", "classes"))


STUDY = Study(
    "table3",
    "Table 3: epochs to a target accuracy without holdout data, on the whole training set",
    (
        group(
            "CIFAR-10", Cell("cifar10", part="whole"), (80, 90), "39 / 177 (90.8)", "17 / 47 (92.2)"
        ),
        group(
            "CIFAR-100",
            Cell("cifar100", part="whole"),
            (50, 65),
            "47 / 142 (67.8)",
            "22 / 87 (68.1)",
        ),
    ),
    seeds=2,
    note="The paper's runs were longer than these 150 epochs: its uniform reaches 90 % at 177.",
)
CINIC10 = Study(
    "table3_cinic10",
    "Table 3: epochs to a target accuracy without holdout data, CINIC-10",
    (
        group(
            "CINIC-10",
            Cell("cinic10", n_b=64, n_B=640),
            (70, 80),
            "37 / 146 (80.1)",
            "26 / 70 (82.1)",
        ),
    ),
    seeds=2,
    tier=2,
    note=(
        "All 90,000 training images, split in two; those that CINIC-10 has for validation are not used. The "
        "paper's uniform needs as many epochs as in its Table 2 (37 and 38), where on CIFAR, whose training "
        "set is halved there, it needs half as many."
    ),
)
