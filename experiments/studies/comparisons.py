"""Ways to compare arms that the claims are made of."""

from __future__ import annotations

from dataclasses import replace

from experiments.bench.claims import Compare
from experiments.bench.numbers import (
    Line,
    best,
    epochs_to,
    final,
    mean,
    share,
    share_below,
    speedup,
    steps_to,
)

CLEAN, NOISY = "Clean labels", "10 % wrong labels, clean holdout"
RHO, R18, SMALL = "RHO-LOSS", "RHO-LOSS, ResNet-18 IL", "RHO-LOSS, small CNN IL"
NO_CINIC = "CINIC-10 was not at hand"


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


def better(group: str, arm: str, other: str = "uniform") -> Compare:
    return Compare(group, arm, final, other, above=True, unit=" %")


def worse(group: str, arm: str, plus: float = 0.0) -> Compare:
    return Compare(group, arm, final, "uniform", plus=plus, unit=" %")


def fewer(group: str, arm: str, kind: str, other: str = "uniform") -> Compare:
    return Compare(group, arm, picks(kind), other, unit=" %")


def fewer_known(group: str, arm: str) -> Compare:
    """Already-correct picks while the accuracy is below that of the weakest arm, as the paper counts."""

    def percent(line: Line, accuracy: float) -> float | None:
        return share_below(line, "correct", accuracy)

    return Compare(group, arm, percent, "uniform", controlled=True, unit=" %")


def more(group: str, arm: str, kind: str, factor: float = 1.0) -> Compare:
    return Compare(group, arm, picks(kind), "uniform", factor=factor, above=True, unit=" %")


MORE = 1.0 + 1e-9  # a speed-up of just 1 is none


def faster(group: str, arm: str, other: str = "uniform") -> Compare:
    """Speed-up as in Figure 2: over the epochs that uniform has, not over those to its best."""
    return Compare(
        group, arm, speedup, other, plus=MORE, above=True, paired=True, unit=" x", digits=2
    )


def faster_than_in(group: str, beside: str, arm: str) -> Compare:
    """The same, greater than in another group."""
    return replace(faster(group, arm), plus=0.0, beside=beside)


def faster_where(group: str, arm: str, other: str, accuracy: float) -> Compare:
    """The same where the other arm gets to an accuracy; elsewhere it says nothing."""

    def measure(rho: Line, uniform: Line) -> float | None:
        return speedup(rho, uniform) if best(uniform) >= accuracy else None

    return replace(faster(group, arm, other), measure=measure)


def cheaper(group: str, arm: str, accuracy: float, factor: float) -> Compare:
    """Forward passes to an accuracy; a backward pass counts as two, as do the candidates that are scored."""

    def passes(line: Line) -> float | None:
        steps = steps_to(line, accuracy)
        scored = line["n_B"] if line["method"] != "uniform" else 0
        return None if steps is None else steps * (3 * line["n_b"] + scored)

    unit = f" forward passes to {accuracy:g} %"
    return Compare(group, arm, passes, "uniform", factor=factor, unit=unit, digits=0)


def apart(one: Line, other: Line) -> float:
    return abs(final(one) - final(other))


def behind(run: Line, other: Line) -> float:
    """By how many points the irreducible-loss model of a run is less accurate than another run's target."""
    return final(other) - mean(run["il_fit"]["accuracy"])


def il_lost(line: Line) -> float:
    """By how many points the irreducible-loss model is worse at the end than after the first epoch."""
    return line["il_eval"][0][1] - line["il_eval"][-1][1]
