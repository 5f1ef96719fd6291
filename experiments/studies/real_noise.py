"""Human label noise (CIFAR-10N). Not in the paper: does it hold where noise is not uniform?"""

from __future__ import annotations

from dataclasses import replace

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import CNN_NOISY_IL, CROSS_FIT, R18_NOISY_IL, rho

SHOW = ("epochs", "curves", "shares", "share_curves", "classes")


def groups(labels: str, targets: tuple[float, ...]) -> tuple[Group, Group]:
    half = Cell("cifar10", labels=labels)
    whole = replace(half, part="whole", epochs=75)  # as many steps as 150 epochs of a half
    return (
        Group(
            f"{labels}: half of CIFAR-10, the other half is the (equally noisy) holdout",
            {
                "uniform": half,
                "RHO-LOSS": rho(half, R18_NOISY_IL),
                "RHO-LOSS, annealed": rho(half, R18_NOISY_IL, schedule="annealed"),
                "RHO-LOSS, small CNN IL": rho(half, CNN_NOISY_IL),
                "training loss": replace(half, method="loss"),
                "negative IL": replace(half, method="negative_il", il=R18_NOISY_IL),
            },
            targets,
            show=SHOW,
        ),
        Group(
            f"{labels}: the whole of CIFAR-10, irreducible losses cross-fitted",
            {
                "uniform": whole,
                "RHO-LOSS": rho(whole, CROSS_FIT),
                "RHO-LOSS, annealed": rho(whole, CROSS_FIT, schedule="annealed"),
            },
            targets,
            show=SHOW,
        ),
    )


NOTE = (
    "Learning rate constant, as in the paper. 'Annealed' is the selection: RHO-LOSS for the first 30 % of "
    "the steps, then uniform without the 5 % of highest irreducible loss."
)
STUDY = Study(
    "real_noise",
    "Human label noise: CIFAR-10N, worst labels (40 % wrong)",
    groups("worse", (65, 70, 75)),
    seeds=3,
    note=NOTE,
)
MILDER = Study(
    "real_noise_milder",
    "Human label noise: CIFAR-10N, aggregated (9 % wrong) and single annotator (17 %)",
    (*groups("aggre", (75, 80, 85)), *groups("random1", (75, 80, 85))),
    seeds=1,
    tier=2,
    note=NOTE,
)
