"""What the paper claims of its vision experiments, for the table in `experiments/results/README.md`."""

from __future__ import annotations

from experiments.bench.claims import Claim, Compare
from experiments.studies.batch_norm import NAMES as BATCH_NORM
from experiments.studies.clothing1m import TARGETS as CLOTHING_TARGETS
from experiments.studies.comparisons import (
    NO_CINIC,
    R18,
    RHO,
    SMALL,
    apart,
    behind,
    better,
    cheaper,
    faster,
    faster_where,
    fewer,
    fewer_known,
    il_lost,
    more,
    sooner,
    worse,
)
from experiments.studies.fig2 import GRID, TARGETS
from experiments.studies.table2_claims import TABLE2_CLAIMS

FIG3_NOISE = "Corrupted picks, CIFAR-10 with 10 % wrong labels"
FIG3_NOISE_100 = "Corrupted picks, CIFAR-100 with 10 % wrong labels"
FIG3_RARE = "Low-relevance picks, CIFAR-100 Relevance"
FIG3_KNOWN = "Already-correct picks, CIFAR-10, clean"
FIG7 = "Figure 7: CIFAR-10 with 20 % wrong labels"
TABLE4, TABLE4_100 = "Table 4: CIFAR-10, clean", "Table 4: CIFAR-100, clean"
GREEDY = ("training loss", "gradient norm")
SETTINGS = [arm.removesuffix(f", {RHO}") for arm in GRID.groups[0].arms if arm.endswith(RHO)]
FIG2_ARMS = (R18, SMALL, "RHO-LOSS, no holdout")
NO_CLOTHING = "Clothing-1M was not at hand"
CLOTHING = "Table 2: ResNet-50"
FIG1 = "Figure 1: five architectures, one irreducible-loss model"

CLAIMS: list[Claim] = [
    *TABLE2_CLAIMS,
    Claim(
        "Table 2, Clothing-1M: RHO-LOSS reaches 69 % in a tenth of uniform's steps and ends higher",
        "2 against 30 epochs; 72 against 70 %",
        "clothing1m",
        [sooner(CLOTHING, RHO, 69, 0.1), better(CLOTHING, RHO)],
        NO_CLOTHING,
    ),
    Claim(
        "Table 2, Clothing-1M: RHO-LOSS reaches 69 % at half of uniform's forward and backward passes, "
        "scoring counted, the irreducible-loss model not",
        "2.7 times fewer FLOPs to uniform's best, the irreducible-loss model counted",
        "clothing1m",
        [cheaper(CLOTHING, RHO, 69, 0.5)],
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
        "Figure 1, Clothing-1M: RHO-LOSS ends higher on all five architectures",
        "2 points on average",
        "clothing1m",
        [better(FIG1, f"{model}, RHO-LOSS", f"{model}, uniform") for model in CLOTHING_TARGETS],
        NO_CLOTHING,
    ),
    Claim(
        "Table 2, Clothing-1M: training loss, gradient norm and negative IL end below uniform",
        "65, 64 and 48, uniform 70",
        "clothing1m",
        [worse(CLOTHING, arm) for arm in (*GREEDY, "negative IL")],
        NO_CLOTHING,
    ),
    Claim(
        "Section 4: irreducible losses of the epoch of lowest loss are better than those of highest accuracy",
        "performs best (no numbers)",
        "il_strength",
        [better("Clean", "RHO-LOSS, IL of lowest loss", "RHO-LOSS, IL of highest accuracy")],
    ),
    Claim(
        "Table 3: without holdout data RHO-LOSS needs at most 0.8 of uniform's steps (to 80 % on CIFAR-10, "
        "50 % on CIFAR-100)",
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
        "Table 3, CINIC-10: without holdout data RHO-LOSS needs at most 0.8 of uniform's steps to 70 % and "
        "ends higher",
        "26 against 37 epochs; 82.1 against 80.1 %",
        "table3_cinic10",
        [sooner("CINIC-10", RHO, 70, 0.8), better("CINIC-10", RHO)],
        NO_CINIC,
    ),
    Claim(
        "Figure 2: with a small CNN for irreducible losses RHO-LOSS is as fast as with a ResNet-18 (at most "
        "1.1 times the steps to 80 % on CIFAR-10, 50 % on CIFAR-100)",
        "speed-up 2.8 against 2.3; 3.8 against 3.8",
        "fig2",
        [sooner("CIFAR-10", SMALL, 80, 1.1, R18), sooner("CIFAR-100", SMALL, 50, 1.1, R18)],
    ),
    Claim(
        "Figure 2: though that small CNN is far less accurate than the target (5 points)",
        "11.5 and 7 points less",
        "fig2",
        [
            Compare(
                data, SMALL, behind, R18, plus=5.0, above=True, paired=True, unit=" points behind"
            )
            for data in ("CIFAR-10", "CIFAR-100")
        ],
    ),
    Claim(
        "Figure 2, rows 1 to 3: RHO-LOSS is faster than uniform with each irreducible-loss model",
        "CIFAR-10: 2.3, 2.8, 2.4 times; CIFAR-100: 3.8, 3.8, 1.8",
        "fig2",
        [faster(data, arm) for data in ("CIFAR-10", "CIFAR-100") for arm in FIG2_ARMS],
    ),
    Claim(
        "Figure 2, rows 1 to 3, CINIC-10: RHO-LOSS is faster than uniform with each irreducible-loss model",
        "1.8, 1.8, 1.1 times",
        "fig2_cinic10",
        [faster("CINIC-10", arm) for arm in FIG2_ARMS],
        NO_CINIC,
    ),
    Claim(
        "Figure 3: RHO-LOSS picks fewer corrupted points than uniform, with both IL models",
        "below 10 % (a plot)",
        "fig3",
        [
            fewer(group, arm, "corrupted")
            for group in (FIG3_NOISE, FIG3_NOISE_100)
            for arm in (R18, SMALL)
        ],
    ),
    Claim(
        "Figure 3: training loss and gradient norm pick far more corrupted points (twice as many)",
        "far above 10 % (a plot)",
        "fig3",
        [
            more(group, arm, "corrupted", 2.0)
            for group in (FIG3_NOISE, FIG3_NOISE_100)
            for arm in GREEDY
        ],
    ),
    Claim(
        "Figure 3: RHO-LOSS picks fewer low-relevance points than uniform; training loss and gradient norm "
        "pick more",
        "slightly below; above (a plot)",
        "fig3",
        [
            *(fewer(FIG3_RARE, arm, "low_relevance") for arm in (R18, SMALL)),
            *(more(FIG3_RARE, arm, "low_relevance") for arm in GREEDY),
        ],
    ),
    Claim(
        "Figure 3: all methods pick fewer already-correct points than uniform (in epochs below the weakest "
        "arm's final accuracy)",
        "all below (a plot)",
        "fig3",
        [fewer_known(FIG3_KNOWN, arm) for arm in (R18, SMALL, *GREEDY)],
    ),
    Claim(
        "Figure 7: the approximated selection function ends higher than the original",
        "88.6 against 86.1 %",
        "table4",
        [better(FIG7, "approximated", "original")],
    ),
    Claim(
        "Figure 7: the approximated selection function is sooner at the best of the original's 100 epochs",
        "80 against 100 epochs",
        "table4",
        [faster(FIG7, "approximated", "original")],
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
        "Table 4, CIFAR-10: the original is sooner at 60 and 75 %",
        "13 against 18, 24 against 30 epochs",
        "table4",
        [sooner(TABLE4, "original", at, 1.0, "approximated") for at in (60, 75)],
    ),
    Claim(
        "Table 4, CIFAR-10: the approximation is sooner at 90 % and ends higher",
        "102 epochs against NR; 90 against 88 %",
        "table4",
        [
            sooner(TABLE4, "approximated", 90, 1.0, "original"),
            better(TABLE4, "approximated", "original"),
        ],
    ),
    Claim(
        "Table 4, CIFAR-100: the original is sooner at 30 %",
        "21 against 35 epochs",
        "table4",
        [sooner(TABLE4_100, "original", 30, 1.0, "approximated")],
    ),
    Claim(
        "Table 4, CIFAR-100: the approximation is sooner at 45 and 60 % and ends higher",
        "58 epochs against NR, 123 against NR; 60 against 43 %",
        "table4",
        [
            *(sooner(TABLE4_100, "approximated", at, 1.0, "original") for at in (45, 60)),
            better(TABLE4_100, "approximated", "original"),
        ],
    ),
    Claim(
        "Table 4, CINIC-10: the approximation is sooner at 65 and 75 % and ends higher",
        "19 against 21 epochs, 32 against NR; 75 against 74 %",
        "table4_cinic10",
        [
            *(sooner("CINIC-10, clean", "approximated", at, 1.0, "original") for at in (65, 75)),
            better("CINIC-10, clean", "approximated", "original"),
        ],
        NO_CINIC,
    ),
    *(
        Claim(
            f"Figure 8, {data}: another share than 10 % is better: 5, 15 or 20 % selected ends higher",
            "on 2 of 3 data sets (a plot)",
            study,
            [better(data, f"{num} % selected", "10 % selected") for num in (5, 15, 20)],
            why,
            spare=2,
        )
        for data, study, why in (
            ("CIFAR-10", "fig8", ""),
            ("CIFAR-100", "fig8", ""),
            ("CINIC-10", "fig8_cinic10", NO_CINIC),
        )
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
    *(
        Claim(
            f"Figure 2, row 5, {data}: RHO-LOSS is faster at nearly all of 27 settings of the "
            "hyper-parameters (25)",
            paper,
            study,
            [faster(group, f"{setting}, {RHO}", f"{setting}, uniform") for setting in SETTINGS],
            why,
            spare=2,
        )
        for data, paper, study, group, why in (
            ("CIFAR-10", "0.97 to 3.45 times", "fig2_grid", "CIFAR-10", ""),
            ("CIFAR-100", "0 to 6.2 times", "fig2_grid", "CIFAR-100", ""),
            ("CINIC-10", "1.59 to 4.55 times", "fig2_cinic10", "CINIC-10, 27 settings", NO_CINIC),
        )
    ),
    *(
        Claim(
            f"Figure 2, row 5, {data}: it is faster at every setting where uniform reaches {at} %",
            "where it is not, uniform is below that",
            "fig2_grid",
            [
                faster_where(data, f"{setting}, {RHO}", f"{setting}, uniform", at)
                for setting in SETTINGS
            ],
        )
        for data, at in (("CIFAR-10", 80), ("CIFAR-100", 30))
    ),
    *(
        Claim(
            f"Figure 2, row 4, {data}: with one small irreducible-loss model RHO-LOSS is faster on six of "
            "seven targets",
            paper,
            study,
            [faster(group, f"{model}, {RHO}", f"{model}, uniform") for model in TARGETS],
            why,
            spare=1,
        )
        for data, paper, study, group, why in (
            ("CIFAR-10", "1.8 to 2.7 times; VGG-11 0.85, 0", "fig2_architectures", "CIFAR-10", ""),
            ("CIFAR-100", "1.9 to 3.0 times (all)", "fig2_architectures", "CIFAR-100", ""),
            (
                "CINIC-10",
                "1.45 to 2.86 times (all)",
                "fig2_cinic10",
                "CINIC-10, seven targets",
                NO_CINIC,
            ),
        )
    ),
]
