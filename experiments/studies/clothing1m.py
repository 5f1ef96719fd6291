"""Clothing-1M: Table 2 and Figure 1. For whoever has the data; streamed, with torchvision's networks."""

from __future__ import annotations

from dataclasses import replace

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import all_methods, rho

IL = "imagenet_resnet18_random, noisy holdout"
TARGETS = ("resnet50", "mobilenet_v2", "densenet121", "inception_v3", "googlenet")
BASE = Cell("clothing1m", labels="human", model="imagenet_resnet50", epochs=50)

ARMS = {name: cell for name, cell in all_methods(BASE, IL).items() if name != "SVP"}
PAPER = {
    "uniform": "2 / 30 (70)",
    "RHO-LOSS": "1 / 2 (72)",
    "training loss": "8 / NR (65)",
    "gradient norm": "13 / NR (64)",
    "gradient norm IS": "2 / 9 (70)",
    "negative IL": "NR / NR (48)",
}


def both(model: str) -> dict[str, Cell]:
    base = replace(BASE, model=f"imagenet_{model}", epochs=30)
    return {f"{model}, uniform": base, f"{model}, RHO-LOSS": rho(base, IL)}


STUDY = Study(
    "clothing1m",
    "Clothing-1M: Table 2 and Figure 1",
    (
        Group("Table 2: ResNet-50", ARMS, (60, 69), PAPER, ("epochs", "curves", "classes")),
        Group(
            "Figure 1: five architectures, one irreducible-loss model",
            {name: cell for model in TARGETS for name, cell in both(model).items()},
            (69,),
            show=("epochs", "curves"),
            note="The paper: 18 times fewer steps on average, and 2 points more at the end.",
        ),
    ),
    seeds=2,
    tier=2,
    note=(
        "Needs Clothing-1M, torchvision and its weights. The holdout is 100,000 of the training points, "
        "which stay in training, as in the authors' code; the weights of the irreducible-loss "
        "model are chosen by the loss on 50,000 evenly spaced training points. SVP is left out: it chooses "
        "once, from rows that are at hand, and this data is streamed (the paper: NR / NR (55))."
    ),
)
