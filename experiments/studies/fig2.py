"""Figure 2: the irreducible-loss model may be small, without holdout data, and reused; clean data."""

from __future__ import annotations

from dataclasses import replace

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import CNN_IL, CROSS_FIT, R18_IL, rho

SHOW = ("speedup", "curves")
EPOCHS = 100  # the best of uniform within so many; RHO-LOSS has as many to get there
TARGETS = (
    "vgg11",
    "googlenet",
    "resnet34",
    "resnet50",
    "densenet121",
    "mobilenet_v2",
    "inception_v3",
)


def rows(base: Cell) -> dict[str, Cell]:
    return {
        "uniform": base,
        "RHO-LOSS, ResNet-18 IL": rho(base, R18_IL),
        "RHO-LOSS, small CNN IL": rho(base, CNN_IL),
        "RHO-LOSS, no holdout": rho(base, CROSS_FIT),
    }


def paper(default: str, small: str, none: str) -> dict[str, str]:
    names = [name for name in rows(Cell()) if name != "uniform"]
    return dict(zip(names, (default, small, none), strict=True))


def speedups(title: str, arms: dict[str, Cell], note: str) -> Group:
    """Arms of which only the speed-up is shown."""
    return Group(title, arms, show=("speedup",), note=note)


STUDY = Study(
    "fig2",
    "Figure 2, rows 1 to 3: how small and from what data the irreducible-loss model may be",
    (
        Group(
            "CIFAR-10",
            rows(Cell("cifar10")),
            paper=paper("2.33 2.44 2.27", "2.78 2.86 2.70", "2.22 2.50"),
            show=SHOW,
        ),
        Group(
            "CIFAR-100",
            rows(Cell("cifar100")),
            paper=paper("4.13 3.41", "4.13 3.41", "1.18 2.30 1.94"),
            show=SHOW,
        ),
    ),
    seeds=2,
    note="Row 3 as in the paper: the half that is trained on is itself split into two halves.",
)


def architectures(base: Cell) -> dict[str, Cell]:
    return {
        f"{model}, {name}": cell
        for model in TARGETS
        for name, cell in (
            ("uniform", replace(base, model=model)),
            ("RHO-LOSS", rho(base, CNN_IL, model=model)),
        )
    }


ARCHITECTURES = Study(
    "fig2_architectures",
    "Figure 2, row 4: one small irreducible-loss model for seven target architectures",
    (
        Group(
            "CIFAR-10",
            architectures(Cell("cifar10", epochs=EPOCHS)),
            paper={
                "vgg11, RHO-LOSS": "0.85 / 0",
                "googlenet, RHO-LOSS": "2.4-2.7",
                "resnet34, RHO-LOSS": "2.3-2.4",
                "resnet50, RHO-LOSS": "1.8-2.1",
                "densenet121, RHO-LOSS": "2.1-2.4",
                "mobilenet_v2, RHO-LOSS": "2.0-2.1",
                "inception_v3, RHO-LOSS": "2.0-2.2",
            },
            show=("speedup",),
        ),
        speedups(
            "CIFAR-100", architectures(Cell("cifar100", epochs=EPOCHS)), "The paper: 1.9 to 3.0."
        ),
    ),
    seeds=1,
    tier=2,
)


def grid(base: Cell) -> dict[str, Cell]:
    """27 settings of learning rate, n_B and weight decay; n_b is a tenth of n_B."""
    arms = {}
    for n_B in (160, 320, 960):
        for rate in (1e-4, 1e-3, 1e-2):
            for decay in (1e-3, 1e-2, 1e-1):
                name = f"n_B {n_B}, rate {rate:g}, decay {decay:g}"
                cell = replace(base, n_b=n_B // 10, n_B=n_B, learning_rate=rate, weight_decay=decay)
                arms |= {f"{name}, uniform": cell, f"{name}, RHO-LOSS": rho(cell, CNN_IL)}
    return arms


GRID = Study(
    "fig2_grid",
    "Figure 2, row 5: one small irreducible-loss model for 27 settings of the hyper-parameters",
    (
        speedups(
            "CIFAR-10",
            grid(Cell("cifar10", epochs=EPOCHS)),
            "The paper: 0.97 to 3.45, lowest at rate 0.01 with n_B 960.",
        ),
        speedups("CIFAR-100", grid(Cell("cifar100", epochs=EPOCHS)), "The paper: 0 to 6.2."),
    ),
    seeds=1,
    tier=2,
)
CINIC10 = Study(
    "fig2_cinic10",
    "Figure 2, CINIC-10",
    (
        Group(
            "CINIC-10",
            rows(Cell("cinic10", n_b=64, n_B=640)),
            paper=paper("1.79 1.82", "1.92 1.75 1.61", "1.16 1.02"),
            show=SHOW,
        ),
        speedups(
            "CINIC-10, seven targets",
            architectures(Cell("cinic10", n_b=64, n_B=640, epochs=EPOCHS)),
            "The paper: 1.45 to 2.86.",
        ),
        speedups(
            "CINIC-10, 27 settings",
            grid(Cell("cinic10", epochs=EPOCHS)),
            "The paper: 1.59 to 4.55.",
        ),
    ),
    seeds=2,
    tier=2,
    note=STUDY.note,
)
