"""Figure 9: methods of active learning, which look at the model's doubts and not at the label."""

from __future__ import annotations

from dataclasses import replace

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import CNN_IL, rho
from experiments.studies.fig6 import MLP_IL

ACTIVE = {
    "BALD": "bald",
    "entropy": "entropy",
    "conditional entropy": "conditional_entropy",
    "loss minus conditional entropy": "loss_minus_conditional_entropy",
}


def arms(base: Cell, il: str) -> dict[str, Cell]:
    active = {name: replace(base, method=method) for name, method in ACTIVE.items()}
    return {"uniform": base, "RHO-LOSS": rho(base, il), **active}


STUDY = Study(
    "fig9",
    "Figure 9: active-learning baselines",
    (
        Group(
            "Digits, MLP with dropout 0.5",
            arms(Cell("mnist", model="mlp_dropout", epochs=30, looks=5), MLP_IL),
            targets=(90, 95, 97),
            show=("steps", "curves"),
        ),
        Group(
            "CIFAR-10, small CNN with dropout 0.05",
            arms(Cell("cifar10", model="small_cnn_dropout"), CNN_IL),
            targets=(60, 70, 75),
            show=("epochs", "curves"),
        ),
    ),
    seeds=2,
    note=(
        "Ten Monte-Carlo draws with dropout on; the predictive distribution is the mean of their "
        "probabilities. Loss minus conditional entropy takes the mean of the draws' losses. All arms are "
        "evaluated without dropout. 32 of 320 as in the paper's text (the authors' configurations: 64 of "
        "640); half of MNIST's 60,000 digits, and half of CIFAR-10, are trained on; 30 epochs of the digits. "
        "The paper prints no numbers; it says that RHO-LOSS is fastest on both, and that active learning "
        "helps on digits and not on CIFAR-10."
    ),
)
