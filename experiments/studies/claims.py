"""What the paper claims of its vision experiments, for the table in `experiments/results/README.md`."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.bench.claims import Claim, Compare
from experiments.bench.numbers import Line, best, epochs_to, final, share, share_below, speedup
from experiments.studies.batch_norm import NAMES as BATCH_NORM
from experiments.studies.clothing1m import TARGETS as CLOTHING_TARGETS
from experiments.studies.fig2 import GRID
from experiments.studies.table2 import ORDER

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


def faster(group: str, arm: str, other: str = "uniform", least: float = 1.0) -> Compare:
    """Speed-up as in Figure 2."""
    return Compare(
        group, arm, speedup, other, plus=least, above=True, paired=True, unit=" x", digits=2
    )


def apart(one: Line, other: Line) -> float:
    return abs(final(one) - final(other))


def il_lost(line: Line) -> float:
    """By how many points the irreducible-loss model is worse at the end than after the first epoch."""
    return line["il_eval"][0][1] - line["il_eval"][-1][1]


@dataclass(frozen=True)
class Table2:
    """What the paper's table says of a data set, in words, and the most of uniform's steps that will do."""

    study: str
    name: str
    clean_at: tuple[float, float]
    noisy_at: tuple[float, float]
    clean: str
    noisy: str
    final: str
    collapse: str
    weak: str
    first: str
    most: float
    why: str = ""

    def claims(self) -> list[Claim]:
        """At most `most` of uniform's steps to the first target; fewer to the second."""
        others = [name for name in ORDER if name != RHO]
        clean, noisy = f"Table 2, {self.name}", f"Table 2, {self.name}, 10 % wrong labels"
        return [
            self._claim(
                f"{clean}: RHO-LOSS reaches {_both(self.clean_at)} in fewer steps than uniform (the first in "
                f"at most {self.most:g} of them)",
                self.clean,
                self._sooner(CLEAN, self.clean_at),
            ),
            self._claim(
                f"{noisy}: RHO-LOSS reaches {_both(self.noisy_at)} in fewer steps than uniform (the first in "
                f"at most {self.most:g} of them)",
                self.noisy,
                self._sooner(NOISY, self.noisy_at),
            ),
            self._claim(
                f"{clean}, clean and noisy: RHO-LOSS reaches {self.clean_at[0]:g} and {self.noisy_at[0]:g} % "
                "in fewer steps than every other method",
                self.first,
                [
                    sooner(group, RHO, at, 1.0, other)
                    for group, at in ((CLEAN, self.clean_at[0]), (NOISY, self.noisy_at[0]))
                    for other in others
                ],
            ),
            self._claim(
                f"{clean}: RHO-LOSS ends higher than uniform, clean and noisy",
                self.final,
                [better(CLEAN, RHO), better(NOISY, RHO)],
            ),
            self._claim(
                f"{noisy}: training loss and gradient norm collapse (20 points below uniform)",
                self.collapse,
                [worse(NOISY, arm, plus=-20) for arm in ("training loss", "gradient norm")],
            ),
            self._claim(
                f"{clean}: negative IL and SVP end below uniform",
                self.weak,
                [worse(CLEAN, "negative IL"), worse(CLEAN, "SVP")],
            ),
        ]

    def _sooner(self, group: str, at: tuple[float, float]) -> list[Compare]:
        return [sooner(group, RHO, at[0], self.most), sooner(group, RHO, at[1], 1.0)]

    def _claim(self, text: str, paper: str, parts: list[Compare]) -> Claim:
        return Claim(text, paper, self.study, parts, self.why)


def _both(at: tuple[float, float]) -> str:
    return f"{at[0]:g} and {at[1]:g} %"


FIG3_NOISE = "Corrupted picks, CIFAR-10 with 10 % wrong labels"
FIG3_RARE = "Low-relevance picks, CIFAR-100 Relevance"
FIG3_KNOWN = "Already-correct picks, CIFAR-10, clean"
FIG7 = "Figure 7: CIFAR-10 with 20 % wrong labels"
SMALL = "RHO-LOSS, small CNN IL"
TABLE4 = "Table 4: CIFAR-10, clean"
NO_CINIC, NO_CLOTHING = "CINIC-10 was not at hand", "Clothing-1M was not at hand"
CLOTHING = "Table 2: ResNet-50"
FIG1 = "Figure 1: five architectures, one irreducible-loss model"

CLAIMS: list[Claim] = [
    *Table2(
        "table2_cifar10",
        "CIFAR-10",
        clean_at=(80, 87.5),
        noisy_at=(75, 85),
        clean="39 against 79 epochs; 65 against NR",
        noisy="27 against 62; 49 against NR",
        first="39; next is gradient norm IS with 57. 27; next is gradient norm IS with 57",
        final="91, 91; uniform 87, 85",
        collapse="28 and 23, uniform 85",
        weak="60 and 55, uniform 87",
        most=0.6,
    ).claims(),
    *Table2(
        "table2_cifar100",
        "CIFAR-100",
        clean_at=(40, 52.5),
        noisy_at=(40, 47.5),
        clean="48 against 65 epochs; 77 against 133",
        noisy="49 against 79; 65 against 116",
        first="48; next is uniform with 65. 49; next is uniform with 79",
        final="61, 60; uniform 54, 50",
        collapse="4 and 4, uniform 50",
        weak="43 and 18, uniform 54",
        most=0.8,
    ).claims(),
    *Table2(
        "table2_cinic10",
        "CINIC-10",
        clean_at=(70, 77.5),
        noisy_at=(60, 67.5),
        clean="27 against 38 epochs; 38 against 97",
        noisy="13 against 24; 17 against 38",
        first="27; next is gradient norm IS with 34. 13; next is gradient norm IS with 22",
        final="83, 82; uniform 80, 78",
        collapse="16 and 16, uniform 78",
        weak="60 and 39, uniform 80",
        most=0.8,
        why=NO_CINIC,
    ).claims(),
    Claim(
        "Table 2, Clothing-1M: RHO-LOSS reaches 69 % in a tenth of uniform's steps and ends higher",
        "2 against 30 epochs; 72 against 70 %",
        "clothing1m",
        [sooner(CLOTHING, RHO, 69, 0.1), better(CLOTHING, RHO)],
        NO_CLOTHING,
    ),
    Claim(
        "Figure 1, Clothing-1M: RHO-LOSS reaches 69 % in fewer steps on all five architectures",
        "18 times fewer on average",
        "clothing1m",
        [
            sooner(FIG1, f"{model}, RHO-LOSS", 69, 1.0, f"{model}, uniform")
            for model in CLOTHING_TARGETS
        ],
        NO_CLOTHING,
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
        "Table 3, CINIC-10: without holdout data RHO-LOSS reaches 70 % sooner and ends higher",
        "26 against 37 epochs; 82.1 against 80.1 %",
        "table3_cinic10",
        [sooner("CINIC-10", RHO, 70, 0.8), better("CINIC-10", RHO)],
        NO_CINIC,
    ),
    Claim(
        "Figure 2: a small CNN does as well as a ResNet-18 for irreducible losses (within a point)",
        "speed-up 2.8 against 2.3",
        "fig2",
        [Compare("CIFAR-10", SMALL, best, R18, plus=-1.0, above=True, unit=" %")],
    ),
    Claim(
        "Figure 2, rows 1 to 3: RHO-LOSS is faster than uniform with each irreducible-loss model",
        "CIFAR-10: 2.3, 2.8, 2.4 times; CIFAR-100: 3.8, 3.8, 1.8",
        "fig2",
        [
            faster(data, arm)
            for data in ("CIFAR-10", "CIFAR-100")
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
        "Figure 7: updated on what was selected, the irreducible-loss model gets worse (half a point)",
        "it does (a plot)",
        "table4",
        [Compare(FIG7, "original", il_lost, plus=0.5, above=True, unit=" points")],
    ),
    Claim(
        "Table 4: the original is sooner at 60 and 75 %, the approximation ends higher",
        "13 against 18, 24 against 30 epochs; 88 against 90 %",
        "table4",
        [
            sooner(TABLE4, "original", 60, 1.0, "approximated"),
            sooner(TABLE4, "original", 75, 1.0, "approximated"),
            better(TABLE4, "approximated", "original"),
        ],
    ),
    Claim(
        "Figure 8: selecting 5, 15 or 20 % ends higher than selecting 10 %",
        "another share than 10 % is best on 2 of 3 data sets (a plot)",
        "fig8",
        [better("CIFAR-10", f"{num} % selected", "10 % selected") for num in (5, 15, 20)],
    ),
    Claim(
        "Appendix: BatchNorm while scoring affects accuracy a lot (a point between train and eval)",
        "can affect performance a lot",
        "batch_norm",
        [
            Compare(
                group,
                f"RHO-LOSS, {BATCH_NORM['train']}",
                apart,
                f"RHO-LOSS, {BATCH_NORM['eval']}",
                plus=1.0,
                above=True,
                paired=True,
                unit=" points apart",
            )
            for group in ("Clean", "10 % wrong labels")
        ],
    ),
    Claim(
        "Figure 2, row 5: RHO-LOSS is faster at 27 settings of the hyper-parameters",
        "0.97 to 3.45 times",
        "fig2_grid",
        [
            faster("CIFAR-10", arm, arm.replace(RHO, "uniform"))
            for arm in GRID.groups[0].arms
            if arm.endswith(RHO)
        ],
    ),
    Claim(
        "Figure 2, row 4: with one small irreducible-loss model RHO-LOSS is faster on six of seven targets",
        "speed-up 1.8 to 2.7; VGG-11 0.85, 0",
        "fig2_architectures",
        [
            faster("CIFAR-10", f"{model}, RHO-LOSS", f"{model}, uniform")
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
