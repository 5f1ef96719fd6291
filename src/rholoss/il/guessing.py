"""How good irreducible losses must be to say anything: better than a guess."""

from __future__ import annotations

from typing import Any

import numpy as np

from rholoss.il.hashing import ABSENT

HARDLY = 0.95  # of the loss of a guess: a model that is no better has learnt next to nothing


def guessing_loss(labels: np.ndarray | None, loss: Any) -> float | None:
    """The mean loss of whoever knows the classes' shares alone: the entropy of the labels, in nats.

    None if there are no labels (codes, some of them absent), each has one of its own, or the loss is not
    that of classification.
    """
    if labels is None or loss != "classification":
        return None
    count = np.unique(labels[labels != ABSENT], return_counts=True)[1]
    if len(count) < 2 or count.max() == 1:
        return None
    share = count / count.sum()
    return float(-(share * np.log(share)).sum())


def told(mean: float, guess: float | None) -> str:
    """The mean loss beside that of a guess; with a word of warning where they are close."""
    if guess is None:
        return f"mean {mean:.4f}"
    said = f"mean {mean:.4f} (a guess by the classes' shares: {guess:.4f})"
    if mean <= HARDLY * guess:
        return said
    return (
        f"{said}. Hardly better than guessing, so these losses are no guide to what can be learnt: fit a "
        "larger model, or longer"
    )
