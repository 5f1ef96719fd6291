"""The identity of a data set: are these still the points whose irreducible losses were measured?

Ids are rows of the data set inside all views (`WithIndex`, `Subset`), so a view may have fewer rows or
another order than the one that was scored. Required is that the data set inside still has the same number
of rows, and that each id of the view has the label under which it was measured. Labels come from
`targets` or `labels` of the data set, or from the caller as `labels=`: anything that tells rows apart, file
names for instance. Without labels, the content of up to 256 rows is compared instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rholoss.errors import IdentityMismatchError, RholossError
from rholoss.il.hashing import ABSENT, content_hash, feed, label_codes
from rholoss.il.ids import Ids, as_ids, shown, shown_at
from rholoss.il.views import evenly, labels_of, own_randomness, rows_inside
from rholoss.indexed import ids_of_rows, without_ids

SAMPLED = 256  # rows whose content is kept where there are no labels
AGAIN = (
    "Undo the change, or measure the losses again with `rholoss il fit` or `rholoss il score`; if you "
    "know that each loss still belongs to its id, load them with "
)


@dataclass(frozen=True)
class Identity:
    """Ids of the n rows of a view; codes of their labels, or the content of some of them."""

    ids: Ids
    rows: int | None  # of the data set inside; None if the ids are the caller's own
    codes: np.ndarray | None = None  # int32 [n]
    integers: bool = False  # the codes are the labels themselves
    content: Mapping[Any, str] | None = None  # hash by id

    @property
    def digest(self) -> str:
        """Hash of ids and labels (or content), in order."""
        hasher = hashlib.blake2b(digest_size=16)
        feed(hasher, [self.ids, self.rows, self.codes, list((self.content or {}).items())])
        return hasher.hexdigest()

    def as_meta(self) -> dict[str, Any]:
        """What meta.json keeps. The codes are a file of their own."""
        labels = None if self.codes is None else "integers" if self.integers else "hashes"
        content = None if self.content is None else [list(pair) for pair in self.content.items()]
        return {
            "rows": self.rows,
            "points": len(self.ids),
            "digest": self.digest,
            "labels": labels,
            "content": content,
        }


def identify(dataset: Any, labels: Any = None, stored: Mapping[str, Any] | None = None) -> Identity:
    """The identity of a data set, in terms (labels or content) of the `stored` one if there is one."""
    ids = as_ids(ids_of_rows(dataset), "dataset")
    if not len(ids):
        raise RholossError(
            "The data set has no rows, so there is nothing to measure or to compare."
        )
    root, rows = rows_inside(dataset)
    own_rows = isinstance(ids, np.ndarray) and np.array_equal(ids, rows)
    check_labels(labels, len(ids))
    labels = labels_of(dataset) if labels is None else labels
    codes, integers = (None, False) if labels is None else label_codes(labels)
    content = None
    if stored is not None and stored.get("content"):
        content = content_of(dataset, ids, [id_ for id_, _ in stored["content"]])
    elif stored is None and codes is None:
        content = content_of(dataset, ids, strided(ids))
    return Identity(ids, len(root) if own_rows else None, codes, integers, content)


def check_labels(labels: Any, rows: int) -> None:
    """Raise unless there is one label for each row, or none at all."""
    if labels is None or (hasattr(labels, "__len__") and len(labels) == rows):
        return
    seen = f"has {len(labels)} entries" if hasattr(labels, "__len__") else f"is {labels!r}"
    raise RholossError(
        f"`labels` {seen}, but the data set has {rows} rows; give one label for each row of the data set "
        "that you pass, in its order."
    )


def identity_of_rows(ids: Ids, labels: Any) -> Identity:
    """The identity of rows of which only ids and labels are kept, such as rows on a device."""
    codes, integers = label_codes(labels)
    numbered = isinstance(ids, np.ndarray) and np.array_equal(ids, np.arange(len(ids)))
    return Identity(ids, len(ids) if numbered else None, codes, integers)


def strided(ids: Ids) -> list[Any]:
    """Up to 256 of the ids, evenly spaced in sorted order."""
    ordered = np.unique(np.asarray(ids))
    return ordered[evenly(len(ordered), SAMPLED)].tolist()


def content_of(dataset: Any, ids: Ids, wanted: list[Any]) -> dict[Any, str]:
    """Hash of the content of the wanted ids, of those that the data set has."""
    array = np.asarray(ids)
    positions = {array[p].item(): int(p) for p in np.flatnonzero(np.isin(array, wanted))}
    view = without_ids(dataset)
    with own_randomness():  # fetching may draw random numbers
        return {id_: content_hash(view[positions[id_]]) for id_ in wanted if id_ in positions}


def compare_rows(stored: Mapping[str, Any], found: Identity, what: str) -> str | None:
    """Raise if the data sets inside differ in their number of rows; None if one is not known."""
    then = stored.get("rows")
    if then is None or found.rows is None:
        return None
    if then != found.rows:
        raise IdentityMismatchError(
            f"{what} was made for a data set of {then:,} rows, but this one has {found.rows:,}: rows "
            f"were added or removed, so that ids may mean other points. {AGAIN}check='none'."
        )
    return "number"


def check_room(highest: int, found: Identity, what: str) -> None:
    """Raise if there are losses of rows that the data set does not have."""
    if found.rows is not None and highest >= found.rows:
        raise IdentityMismatchError(
            f"{what} has losses of ids up to {highest:,}, but this data set has {found.rows:,} rows: it "
            f"is another one, or rows were removed, so that ids may mean other points. {AGAIN}"
            "check='none'."
        )


def compare(
    stored: Mapping[str, Any], codes_then: np.ndarray | None, found: Identity, what: str
) -> str | None:
    """Raise unless the data set found is the one stored; returns what was compared, if anything.

    `codes_then` are the stored label codes of the ids found, [n], ABSENT where an id was not scored.
    """
    compared = compare_rows(stored, found, what)
    if codes_then is not None:
        _compare_labels(codes_then, found, stored.get("labels") == "integers", what)
        return "labels"
    if stored.get("content") and found.content:
        _compare_content(dict(stored["content"]), found.content, what)
        return "content"
    return compared


def _compare_labels(then: np.ndarray, found: Identity, integers: bool, what: str) -> None:
    if found.codes is None:
        raise IdentityMismatchError(
            f"{what} was made for a data set with labels, but this one has no `targets` or `labels` "
            "to compare. Pass `labels=`, one for each row, or the data set that was scored, or "
            "check='size' to compare the number of rows only."
        )
    differ = np.flatnonzero((then != found.codes) & (then != ABSENT))
    if not len(differ):
        return
    moved = np.array_equal(np.sort(then), np.sort(found.codes))
    change = (
        "The labels are the same in another order: rows were moved."
        if moved
        else "Labels were changed."
    )
    details = f"ids {shown_at(found.ids, differ)}"
    if found.integers and integers:
        some = [f"id {found.ids[i]} had {then[i]}, has {found.codes[i]}" for i in differ[:3]]
        details = "; ".join(some)
    raise IdentityMismatchError(
        f"{what} was made for other labels: {len(differ):,} of {len(then):,} differ ({details}). "
        f"{change} {AGAIN}check='size' (the number of rows only)."
    )


def tell_other_labels(then: np.ndarray, now: np.ndarray, ids: Ids) -> str | None:
    """A warning about points whose labels (whole numbers) have changed since they were measured.

    None if no label has changed, or if classes were merely renamed, merged or split, as a
    `target_transform` does: then labels correspond to each other everywhere, and no row was moved.
    """
    differ = np.flatnonzero((then != now) & (then != ABSENT))
    pairs = np.stack([then, now])[:, then != ABSENT]
    if len(np.unique(pairs, axis=1).T) in (len(np.unique(pairs[0])), len(np.unique(pairs[1]))):
        return None
    some = "; ".join(f"id {shown([ids[i]])} had {then[i]}, has {now[i]}" for i in differ[:3])
    return (
        f"{len(differ):,} of {len(now):,} points have another label than when their irreducible losses were "
        f"measured ({some}). Rows were numbered anew (`shuffle`, `filter` and `select` of a Hugging Face "
        "data set do that) or labels were changed, so that points have the losses of others. Measure the "
        "data as it is now, or give rows ids that stay: `WithIndex(dataset, ids=...)`, a column 'index'. If "
        "you know that each loss still belongs to its id, load them with check='size'."
    )


def _compare_content(then: Mapping[Any, str], now: Mapping[Any, str], what: str) -> None:
    differ = [id_ for id_ in now if now[id_] != then[id_]]
    if differ:
        raise IdentityMismatchError(
            f"{what} was made for other data: of {len(now)} rows that were compared, {len(differ)} "
            f"differ (ids {shown(differ)}). Rows were changed or moved, or this view augments its "
            f"items: then pass the view that was scored. {AGAIN}check='size' (the number of rows only)."
        )
