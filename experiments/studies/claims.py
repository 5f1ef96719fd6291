"""What the paper claims of its vision experiments, for the table in `experiments/results/README.md`."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.bench.claims import Claim, Compare
from experiments.bench.numbers import Line, best, epochs_to, final, share, share_below

CLEAN, NOISY = "Clean labels", "10 % wrong labels, clean holdout"
RHO, R18 = "RHO-LOSS", "RHO-LOSS, ResNet-18 IL"


def to(accuracy: float):
    def epochs(line: Line) -> float | None:
        return epochs_to(line, accuracy)

    return epochs


def picks(kind: str):
    def percent(line: Line) -> float | None:
        return share(line, kind)

    return percent


def sooner(group: str, arm: str, accuracy: float, factor: float, other: str = "uniform") -> Compare:
    unit = f" epochs to {accuracy:g} %"
    return Compare(group, arm, to(accuracy), other, factor=factor, unit=unit, digits=0)


def better(group: str, arm: str, other: str = "uniform", plus: float = 0.0) -> Compare:
    return Compare(group, arm, final, other, plus=plus, above=True, unit=" %")


def worse(group: str, arm: str, other: str = "uniform", plus: float = 0.0) -> Compare:
    return Compare(group, arm, final, other, plus=plus, unit=" %")


def fewer(group: str, arm: str, kind: str, factor: float = 1.0, other: str = "uniform") -> Compare:
    return Compare(group, arm, picks(kind), other, factor=factor, unit=" %")


def fewer_known(group: str, arm: str) -> Compare:
    """Already-correct picks while the accuracy is below that of the weakest arm, as the paper counts."""

    def percent(line: Line, accuracy: float) -> float | None:
        return share_below(line, "correct", accuracy)

    return Compare(group, arm, percent, "uniform", controlled=True, unit=" %")


def more(group: str, arm: str, kind: str, factor: float = 1.0) -> Compare:
    return Compare(group, arm, picks(kind), "uniform", factor=factor, above=True, unit=" %")


def table2(
    study: str, name: str, at: Sequence[float], clean: str, noisy: str, final_: str
) -> list[Claim]:
    """At most 0.8 of uniform's epochs, where the paper's ratios are 0.4 to 0.75."""
    return [
        Claim(
            f"Table 2, {name}: RHO-LOSS reaches {at[0]:g} % in fewer steps than uniform",
            clean,
            study,
            [sooner(CLEAN, RHO, at[0], 0.8)],
        ),
        Claim(
            f"Table 2, {name}, 10 % wrong labels: RHO-LOSS reaches {at[1]:g} % in fewer steps",
            noisy,
            study,
            [sooner(NOISY, RHO, at[1], 0.8)],
        ),
        Claim(
            f"Table 2, {name}: RHO-LOSS ends higher than uniform, clean and noisy",
            final_,
            study,
            [better(CLEAN, RHO), better(NOISY, RHO)],
        ),
        Claim(
            f"Table 2, {name}, 10 % wrong labels: training loss and gradient norm collapse (20 points below)",
            "28 and 23, uniform 85" if name == "CIFAR-10" else "4 and 4, uniform 50",
            study,
            [worse(NOISY, arm, plus=-20) for arm in ("training loss", "gradient norm")],
        ),
        Claim(
            f"Table 2, {name}: negative IL and SVP end below uniform",
            "60 and 55, uniform 87" if name == "CIFAR-10" else "43 and 18, uniform 54",
            study,
            [worse(CLEAN, "negative IL"), worse(CLEAN, "SVP")],
        ),
    ]


FIG3_NOISE = "Corrupted picks, CIFAR-10 with 10 % wrong labels"
FIG3_RARE = "Low-relevance picks, CIFAR-100 Relevance"
FIG3_KNOWN = "Already-correct picks, CIFAR-10, clean"
FIG7 = "Figure 7: CIFAR-10 with 20 % wrong labels"
SMALL = "RHO-LOSS, small CNN IL"

CLAIMS: list[Claim] = [
    *table2(
        "table2_cifar10",
        "CIFAR-10",
        (80, 75),
        "39 against 79 epochs",
        "27 against 62",
        "91, 91; 87, 85",
    ),
    *table2(
        "table2_cifar100",
        "CIFAR-100",
        (40, 40),
        "48 against 65 epochs",
        "49 against 79",
        "61, 60; 54, 50",
    ),
    Claim(
        "Table 3: without holdout data RHO-LOSS is faster too (80 % on CIFAR-10, 50 % on CIFAR-100)",
        "17 against 39; 22 against 47 epochs",
        "table3",
        [sooner("CIFAR-10", RHO, 80, 0.8), sooner("CIFAR-100", RHO, 50, 0.8)],
    ),
    Claim(
        "Table 3: without holdout data RHO-LOSS ends higher",
        "92.2 against 90.8; 68.1 against 67.8 %",
        "table3",
        [better("CIFAR-10", RHO), better("CIFAR-100", RHO)],
    ),
    Claim(
        "Figure 2: a small CNN does as well as a ResNet-18 for irreducible losses (within a point)",
        "speed-up 2.8 against 2.3",
        "fig2",
        [Compare("CIFAR-10", SMALL, best, R18, plus=-1.0, above=True, unit=" %")],
    ),
    Claim(
        "Figure 2: RHO-LOSS ends higher than uniform with each of the three irreducible-loss models",
        "speed-ups 2.3, 2.8, 2.4",
        "fig2",
        [
            Compare("CIFAR-10", arm, final, "uniform", above=True, unit=" %")
            for arm in (R18, SMALL, "RHO-LOSS, no holdout")
        ],
    ),
    Claim(
        "Figure 3: RHO-LOSS picks fewer corrupted points than uniform, with both IL models",
        "below 10 % (a plot)",
        "fig3",
        [fewer(FIG3_NOISE, R18, "corrupted"), fewer(FIG3_NOISE, SMALL, "corrupted")],
    ),
    Claim(
        "Figure 3: training loss and gradient norm pick far more corrupted points (twice as many)",
        "far above 10 % (a plot)",
        "fig3",
        [more(FIG3_NOISE, arm, "corrupted", 2.0) for arm in ("training loss", "gradient norm")],
    ),
    Claim(
        "Figure 3: RHO-LOSS picks fewer low-relevance points than uniform, training loss more",
        "slightly below; above (a plot)",
        "fig3",
        [fewer(FIG3_RARE, R18, "low_relevance"), more(FIG3_RARE, "training loss", "low_relevance")],
    ),
    Claim(
        "Figure 3: all methods pick fewer already-correct points than uniform",
        "all below (a plot)",
        "fig3",
        [fewer_known(FIG3_KNOWN, arm) for arm in (R18, SMALL, "training loss", "gradient norm")],
    ),
    Claim(
        "Figure 7: the approximated selection function ends higher than the original",
        "88.6 against 86.1 %",
        "table4",
        [better(FIG7, "approximated", "original")],
    ),
    Claim(
        "Figure 7: it picks fewer corrupted points than the original",
        "fewer (a plot)",
        "table4",
        [fewer(FIG7, "approximated", "corrupted", other="original")],
    ),
    Claim(
        "Figure 2, row 4: one small irreducible-loss model serves seven architectures (ends higher)",
        "speed-up 1.8 to 2.7; VGG-11 0.85, 0",
        "fig2_architectures",
        [
            better("CIFAR-10", f"{model}, RHO-LOSS", f"{model}, uniform")
            for model in (
                "googlenet",
                "resnet34",
                "resnet50",
                "densenet121",
                "mobilenet_v2",
                "inception_v3",
            )
        ],
    ),
]
