"""The studies of the paper, one short file each; `STUDIES` in the order in which they are worth running."""

from experiments.bench.cell import Study
from experiments.studies import (
    batch_norm,
    clothing1m,
    fig2,
    fig3,
    fig6,
    fig8,
    fig9,
    il_strength,
    mixed_up,
    noise,
    real_noise,
    table2,
    table3,
    table4,
)

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        table2.CIFAR10,
        table2.CIFAR100,
        table3.STUDY,
        fig2.STUDY,
        fig3.STUDY,
        table4.STUDY,
        real_noise.STUDY,
        fig8.STUDY,
        fig6.STUDY,
        fig9.STUDY,
        fig9.WEAK_TARGET,
        il_strength.STUDY,
        mixed_up.STUDY,
        batch_norm.STUDY,
        noise.STUDY,
        fig2.ARCHITECTURES,
        fig2.GRID,
        real_noise.MILDER,
        table2.CINIC10,
        table3.CINIC10,
        fig2.CINIC10,
        table4.CINIC10,
        fig8.CINIC10,
        clothing1m.STUDY,
        fig6.OFFICIAL,
    )
}

# Studies that are no lists of runs: each has a command of its own.
COMMANDS = {
    "table1": ("python -m experiments.digits table1", "Table 1: the chain of approximations"),
    "toy_maps": (
        "python -m experiments.toy_maps",
        "What each method picks, on a problem to look at",
    ),
    "language": (
        "python -m experiments.language paper",
        "Table 2's last rows and Figure 5: CoLA and SST-2, and Banking77 with wrong labels",
    ),
    "fair_clock": ("python -m experiments.fair_clock final", "The fair race: equal wall clock"),
}
