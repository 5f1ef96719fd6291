"""Cross-fitting without holdout data: which points each member is trained on and scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from rholoss.errors import RholossError
from rholoss.il.ids import as_ids


def folds(ids: Any, num: int, seed: int = 0) -> np.ndarray:
    """The fold 0 ... num - 1 of each entry, int64 [n]: by id, so that one id is in one fold only.

    The order of the ids and how often one occurs do not matter; fold sizes (in distinct ids) differ
    by at most one.

    >>> folds([10, 20, 30, 10], 2).tolist()
    [0, 0, 1, 0]
    """
    known = as_ids(ids)
    distinct, entry = np.unique(np.asarray(known), return_inverse=True)
    if isinstance(num, bool) or not isinstance(num, int) or num < 2:
        raise RholossError(
            f"`folds` is {num!r}; give a whole number of at least 2, the number of models."
        )
    if num > len(distinct):
        raise RholossError(
            f"`folds` is {num}, but there are only {len(distinct)} distinct ids; give fewer folds or "
            "more data."
        )
    # A generator of its own: the caller's random state stays as it is.
    shuffled = np.random.default_rng(seed).permutation(len(distinct))
    return (shuffled % num)[entry.reshape(-1)]
