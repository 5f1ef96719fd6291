"""Which model is trained on which rows and scores which: with a holdout set, or with folds."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from rholoss.errors import RholossError
from rholoss.il.hashing import content_hash
from rholoss.il.ids import as_ids, shown
from rholoss.il.points import Points
from rholoss.il.views import evenly, rows_inside
from rholoss.indexed import ids_of_rows

COMPARED = 8  # rows, to tell whether a data set was made twice


@dataclass(frozen=True)
class Member:
    """One model: the rows of the data that it is trained on, the places of the points it scores."""

    name: str
    train: np.ndarray
    score: np.ndarray
    seed: int


def folds(ids: Any, num: int, seed: int = 0) -> np.ndarray:
    """The fold 0 ... num - 1 of each entry, int64 [n]: by id, so that one id is in one fold only.

    The order of the ids and how often one occurs do not matter; fold sizes (in distinct ids) differ
    by at most one.

    >>> folds([10, 20, 30, 10], 2).tolist()
    [0, 0, 1, 0]
    """
    distinct, entry = np.unique(np.asarray(as_ids(ids)), return_inverse=True)
    if isinstance(num, bool) or not isinstance(num, int) or num < 2:
        raise RholossError(
            f"`folds` is {num!r}; give a whole number of at least 2, the number of models."
        )
    if num > len(distinct):
        raise RholossError(
            f"`folds` is {num}, but there are only {len(distinct)} distinct ids; give fewer folds or "
            "more data."
        )
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise RholossError(f"`seed` is {seed!r}; give a whole number of at least 0.")
    # A generator of its own: the caller's random state stays as it is.
    shuffled = np.random.default_rng(seed).permutation(len(distinct))
    return (shuffled % num)[entry.reshape(-1)]


def cross_fit(data: Any, points: Points, num: int, seed: int) -> list[Member]:
    """For each fold a model that is trained on all other folds and scores this one."""
    ids, wanted = np.asarray(as_ids(ids_of_rows(data), "data")), np.asarray(points.ids)
    fold_of_row = folds(ids, num, seed)
    distinct, first = np.unique(ids, return_index=True)
    same_kind = ids.dtype.kind == wanted.dtype.kind
    strange = np.flatnonzero(~np.isin(wanted, distinct)) if same_kind else np.arange(len(wanted))
    if len(strange):
        some = shown(wanted[strange].tolist())
        raise RholossError(
            f"`score` has {len(strange)} ids that `data` does not have ({some}). "
            "With `folds`, `score` is a view of the same rows as `data`, without augmentation."
        )
    fold_of_point = fold_of_row[first[np.searchsorted(distinct, wanted)]]
    members = [
        Member(
            f"fold-{fold}",
            np.flatnonzero(fold_of_row != fold),
            np.flatnonzero(fold_of_point == fold),
            seed + fold,
        )
        for fold in range(num)
    ]
    return [member for member in members if len(member.score)]  # `score` may have a few points only


def holdout(data: Any, points: Points, seed: int) -> list[Member]:
    """One model that is trained on all of the holdout data and scores all points."""
    root, rows = rows_inside(data)
    root_scored, rows_scored = rows_inside(points.dataset)
    # The paper's Clothing-1M run shares points on purpose, so this is no error.
    same = root is root_scored or _look_the_same(root, root_scored)
    shared = len(np.intersect1d(rows, rows_scored)) if same else 0
    if shared:
        seem = "are" if root is root_scored else "seem to be (the same files, or items)"
        warnings.warn(
            f"{shared} of the {len(points.ids)} points to be scored {seem} also in the holdout data that "
            "the model is trained on, so their irreducible losses come out too low. Take them out of "
            "one of the two, or cross-fit with `folds=2`.",
            stacklevel=4,
        )
    return [Member("model", np.arange(len(data)), np.arange(len(points.ids)), seed)]


def _look_the_same(one: Any, other: Any) -> bool:
    """Whether two data set objects have the same content: the same files, or the same items.

    Labels are not enough: two data sets of one size that are sorted by class may have the same ones.
    """
    if type(one) is not type(other) or len(one) != len(other):
        return False
    files = [getattr(each, "samples", None) for each in (one, other)]
    if all(isinstance(each, list) for each in files):  # `ImageFolder`s, which may be augmented
        return files[0] == files[1]
    rows = evenly(len(one), COMPARED).tolist()
    first, second = ([content_hash(each[row]) for row in rows] for each in (one, other))
    return first == second and len(set(first)) == len(first)  # equal items would prove nothing
