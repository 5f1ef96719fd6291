"""Irreducible losses must be better than those of guessing, or they say nothing."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from rholoss.il.hashing import ABSENT

if TYPE_CHECKING:
    from rholoss.il.store import Irreducible

HARDLY = 0.95  # times the loss of guessing; a model above that has learnt next to nothing
REMEDY = "fit a larger model, or longer"
SAMPLED = 10_000_000  # rows from which figures are computed; a store may have a billion


def guessing_loss(labels: np.ndarray | None, loss: Any) -> float | None:
    """The mean loss of predicting each class by its share: the entropy of the labels, in nats.

    None if there are no labels, if every point has a different one, or if the loss is not
    'classification'. `labels` are codes, `ABSENT` where a point has none.
    """
    if labels is None or loss != "classification":
        return None
    count = np.unique(labels[labels != ABSENT], return_counts=True)[1]
    if len(count) < 2 or count.max() == 1:
        return None
    share = count / count.sum()
    return float(-(share * np.log(share)).sum())


def strided(values: np.ndarray, most: int = SAMPLED) -> np.ndarray:
    """At most so many of the values, evenly spaced."""
    return values[:: max(1, math.ceil(len(values) / most))]


def mean_and_guess(il: Irreducible, most: int = SAMPLED) -> tuple[float, float | None]:
    """The mean of the finite losses (NaN if there are none), and that of a guess if it is known."""
    values = strided(il.values.numpy(), most)
    finite = values[np.isfinite(values)]
    mean = float(finite.mean(dtype=np.float64)) if len(finite) else math.nan
    labels = None if il.labels is None else strided(il.labels, most)
    return mean, guessing_loss(labels, il.meta.get("loss"))


def hardly_better(mean: float, guess: float | None) -> bool:
    """Whether a model with this mean loss has learnt next to nothing (NaN counts as that)."""
    return guess is not None and not mean <= HARDLY * guess


def with_guess(mean: float, guess: float | None) -> str:
    """The mean loss and that of a guess, in words."""
    known = "" if guess is None else f" (a guess by the classes' shares: {guess:.4f})"
    return f"mean {mean:.4f}{known}"


def assessed(mean: float, guess: float | None, remedy: str = REMEDY) -> str:
    """The mean loss and that of a guess, with a warning if the mean is hardly lower."""
    if not hardly_better(mean, guess):
        return with_guess(mean, guess)
    return (
        f"{with_guess(mean, guess)}. Hardly better than guessing, so these losses are no guide to what can "
        f"be learnt: {remedy}"
    )


def tell_useless(il: Irreducible, remedy: str = REMEDY, stacklevel: int = 3) -> None:
    """Warn if the losses are hardly better than those of a guess."""
    mean, guess = mean_and_guess(il)
    if hardly_better(mean, guess):
        warnings.warn(
            f"Irreducible losses: {assessed(mean, guess, remedy)}.", stacklevel=stacklevel
        )
