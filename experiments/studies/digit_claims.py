"""What the paper claims of its studies on digits and of active learning; it prints no numbers there."""

from __future__ import annotations

from experiments.bench.claims import Claim, Compare
from experiments.bench.numbers import Line, steps_to
from experiments.studies.comparisons import RHO, better, sooner, worse
from experiments.studies.fig9 import ACTIVE

NOISES = ("10 % uniform noise", "Structured noise, a random half")
GREEDY = ("training loss", "gradient norm")
DIGITS, PHOTOGRAPHS = "Digits, MLP with dropout 0.5", "CIFAR-10, small CNN with dropout 0.05"


def in_fewer_steps(group: str, arm: str, accuracy: float) -> Compare:
    def steps(line: Line) -> float | None:
        return steps_to(line, accuracy)

    return Compare(group, arm, steps, "uniform", unit=f" steps to {accuracy:g} %", digits=0)


DIGIT_CLAIMS: list[Claim] = [
    Claim(
        "Figure 6, clean labels: loss, gradient norm and RHO-LOSS reach 95 % in fewer steps than uniform",
        "sooner (a plot)",
        "fig6",
        [in_fewer_steps("Clean labels", arm, 95) for arm in (*GREEDY, RHO)],
    ),
    Claim(
        "Figure 6, uniform and structured noise: loss and gradient norm end below uniform",
        "below (a plot)",
        "fig6",
        [worse(noise, arm) for noise in NOISES for arm in GREEDY],
    ),
    Claim(
        "Figure 6, uniform and structured noise: RHO-LOSS reaches 95 % in fewer steps than uniform",
        "sooner (a plot)",
        "fig6",
        [in_fewer_steps(noise, RHO, 95) for noise in NOISES],
    ),
    Claim(
        "Figure 6, AmbiguousMNIST: loss and gradient norm end below uniform",
        "below (a plot)",
        "fig6_official",
        [worse("AmbiguousMNIST", arm) for arm in GREEDY],
        "AmbiguousMNIST was not at hand",
    ),
    Claim(
        "Figure 9, digits: RHO-LOSS and active learning reach 95 % in fewer steps than uniform",
        "sooner (a plot)",
        "fig9",
        [in_fewer_steps(DIGITS, arm, 95) for arm in (RHO, *ACTIVE)],
    ),
    Claim(
        "Figure 9, CIFAR-10: RHO-LOSS reaches 70 % in fewer steps than uniform and ends higher",
        "sooner (a plot)",
        "fig9",
        [sooner(PHOTOGRAPHS, RHO, 70, 1.0), better(PHOTOGRAPHS, RHO)],
    ),
    Claim(
        "Figure 9, CIFAR-10: active learning does not help (BALD, entropies end no higher than uniform)",
        "no sooner (a plot)",
        "fig9",
        [worse(PHOTOGRAPHS, arm) for arm in ("BALD", "entropy", "conditional entropy")],
    ),
]
