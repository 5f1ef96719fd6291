"""Figure 9: methods of active learning, which look at the model's doubts and not at the label."""

from __future__ import annotations

from dataclasses import replace

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import CNN_IL, R18_IL, early, ladder, rho
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
        "The digits (`--only dataset=mnist`) took 77 minutes on two cores that others used as well, a "
        "process for each seed; CIFAR-10 four minutes a seed on an H200, six runs side by side (seed 1 of "
        "uniform and RHO-LOSS: an hour on one core of a busy machine, with a fit of irreducible losses of "
        "its own). "
        "The paper prints no numbers; it says that RHO-LOSS is fastest on both, and that active learning "
        "helps on digits and not on CIFAR-10. On CIFAR-10 it is not fastest here; what was tried to find out "
        "why is in [fig9_weak_target](../fig9_weak_target/README.md)."
    ),
)

WEAK = Cell("cifar10", model="small_cnn_dropout", epochs=10)
PLAIN = replace(WEAK, model="small_cnn")
LARGE = replace(WEAK, n_b=64, n_B=640)

WEAK_TARGET = Study(
    "fig9_weak_target",
    "Why RHO-LOSS does not help the small CNN of Figure 9",
    (
        Group(
            "As in Figure 9, 32 of 320",
            {
                "uniform": WEAK,
                "RHO-LOSS, IL of a small CNN": rho(WEAK, CNN_IL),
                "RHO-LOSS, IL of a ResNet-18": rho(WEAK, R18_IL),
                "RHO-LOSS, IL of a small CNN after 12 epochs": rho(WEAK, early(12)),
                "RHO-LOSS, IL of a small CNN after 4 epochs": rho(WEAK, early(4)),
                "RHO-LOSS, ladder (4, 12, lowest)": rho(WEAK, ladder()),
            },
            targets=(30, 40),
            show=("epochs", "curves", "shares"),
        ),
        Group(
            "64 of 640, as in the authors' configurations",
            {"uniform": LARGE, "RHO-LOSS, IL of a small CNN": rho(LARGE, CNN_IL)},
            targets=(30, 40),
            show=("epochs",),
        ),
        Group(
            "No dropout",
            {"uniform": PLAIN, "RHO-LOSS, IL of a small CNN": rho(PLAIN, CNN_IL)},
            targets=(30, 40),
            show=("epochs",),
        ),
    ),
    seeds=3,
    tier=2,
    note=(
        "The first ten epochs, minutes on a CPU, with the same irreducible losses for all seeds. It is "
        "neither the dropout nor the "
        "batch size, nor the GPU (the CPU's float32 gives the same). It is the "
        "irreducible-loss model. Stopped after 4 or 12 epochs "
        "(mean irreducible loss 1.27 and 0.87) it puts RHO-LOSS well ahead of uniform. That of lowest loss, "
        "which the paper takes (0.62), puts it behind, and a ResNet-18 (0.48) further still. A likely "
        "reason, not proved: most points cost a good model next to nothing, so that the score is little "
        "more than the training loss, and what such a model finds easy is partly out of the target's reach; "
        "nearly all that is picked then is what the target has wrong. The ladder (`rholoss.Ladder`) reads "
        "the losses after 4 epochs first, and those after 12 and the lowest when the target comes near. The "
        "two models of lowest loss were fitted on a GPU in bf16, the early ones on the CPU in float32; "
        "[il_strength](../il_strength/README.md) fits all on one device and asks the same for the paper's "
        "ResNet-18."
    ),
)
