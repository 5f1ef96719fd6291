"""Wrong labels on purpose, so that one can see which methods fall for them. Numpy only.

Each function draws from a generator of its own: the same seed gives the same labels whatever else is
random in the program. Labels are never changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from rholoss.errors import RholossError

AUTHORS_PAIRS = ((3, 5), (9, 7), (4, 9))  # digits that look alike, as in the authors' code


class NoisyLabels(NamedTuple):
    """Labels with noise, and which rows were drawn for it. Both are [N]."""

    labels: np.ndarray
    corrupted: np.ndarray


def uniform_noise(
    labels: Any,
    num_classes: int,
    p: float = 0.1,
    *,
    seed: int = 0,
    mode: Literal["other", "any"] = "other",
) -> NoisyLabels:
    """Give round(p N) rows, drawn without replacement, a label drawn evenly from the classes.

    Mode "other" draws from the other classes, so each of these rows becomes wrong and `corrupted` is
    {i : new label != old label}. Mode "any" is the authors': the old label may be drawn again, so of
    10 % only 9 % become wrong with 10 classes, and `corrupted` flags all that were drawn.

    >>> noisy = uniform_noise([0, 1, 2, 0, 1, 2, 0, 1, 2, 0], num_classes=3, p=0.2)
    >>> int(noisy.corrupted.sum())
    2
    """
    _check_share(p)
    if mode not in ("other", "any"):
        raise RholossError(
            f"`mode` is {mode!r}; use 'other' (always wrong) or 'any' (the authors')."
        )
    if num_classes < 2:
        raise RholossError(
            f"`num_classes` is {num_classes}, so there is no other label to flip to; give 2 or more."
        )
    old = _checked(labels)
    if len(old) and not (old.min() >= 0 and old.max() < num_classes):
        raise RholossError(
            f"`labels` run from {old.min()} to {old.max()}, outside 0 .. {num_classes - 1}; give "
            f"`num_classes` as {old.max() + 1} or more, and number the classes from 0."
        )
    generator = np.random.default_rng(seed)
    rows = generator.choice(len(old), size=math.floor(len(old) * p + 0.5), replace=False)
    new = old.copy()
    if mode == "any":
        new[rows] = generator.integers(num_classes, size=len(rows))
    else:  # a step of 1 .. C-1 around the circle of classes never ends where it began
        step = generator.integers(1, num_classes, size=len(rows))
        new[rows] = (old[rows].astype(np.int64) + step) % num_classes
    return NoisyLabels(new, _mask(len(old), rows))


def structured_noise(
    labels: Any,
    pairs: Sequence[tuple[int, int]] = AUTHORS_PAIRS,
    p: float = 0.5,
    *,
    choose: Literal["first", "random"] = "first",
    seed: int = 0,
) -> NoisyLabels:
    """For each pair (a, b) turn the label of a share `p` of class a into b; the share is rounded down.

    `choose="first"` takes the first rows of the class in the order of the file, as the authors' code
    does; "random" draws them. All pairs look at the labels as given, so no row is flipped twice.
    """
    _check_share(p)
    if choose not in ("first", "random"):
        raise RholossError(f"`choose` is {choose!r}; use 'first' (file order) or 'random'.")
    old = _checked(labels)
    _check_pairs(pairs, old)
    generator = np.random.default_rng(seed)
    new, chosen = old.copy(), [np.empty(0, dtype=np.int64)]
    for source, target in pairs:
        rows = np.flatnonzero(old == source)
        count = math.floor(len(rows) * p + 1e-9)  # 100 x .29 is 28.999... in floating point
        rows = rows[:count] if choose == "first" else generator.permutation(rows)[:count]
        new[rows] = target
        chosen.append(rows)
    return NoisyLabels(new, _mask(len(old), np.concatenate(chosen)))


def _mask(size: int, rows: np.ndarray) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[rows] = True
    return mask


def _check_share(p: float) -> None:
    if not 0 <= p <= 1:
        raise RholossError(f"`p` is {p}; give the share of labels to change, from 0 to 1.")


def _checked(labels: Any) -> np.ndarray:
    found = np.asarray(labels)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise RholossError(
            f"`labels` is {found.shape} {found.dtype}; give one whole number for each row."
        )
    return found


def _check_pairs(pairs: Sequence[tuple[int, int]], labels: np.ndarray) -> None:
    sources = [source for source, _ in pairs]
    for source, target in pairs:
        if source == target or sources.count(source) > 1:
            raise RholossError(
                f"`pairs` is {tuple(pairs)}: class {source} must go to one other class; name it once."
            )
        if not (labels == source).any():
            raise RholossError(
                f"`pairs` flips class {source}, but none of the {len(labels)} labels is {source}; "
                "leave the pair out or check how the classes are numbered."
            )
        if not 0 <= target <= np.iinfo(labels.dtype).max:
            raise RholossError(
                f"`pairs` flips class {source} to {target}, which labels of type {labels.dtype} "
                "cannot hold; give a class number from 0 that fits."
            )
