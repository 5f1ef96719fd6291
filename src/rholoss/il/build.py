"""Tables of irreducible losses, made from ids and losses."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from rholoss.data import ids_of_rows
from rholoss.errors import RholossError
from rholoss.il.fingerprint import Identity, identify
from rholoss.il.hashing import ABSENT, numpy_of
from rholoss.il.ids import Ids, as_ids, check_distinct, hash_keys, shown
from rholoss.il.store import Irreducible

LARGE_TABLE = 2**28  # rows, 1 GiB; a larger table has to be filled to 1 % at least


def from_losses(
    losses: Any, ids: Any, *, dataset: Any, labels: Any, meta: Mapping[str, Any]
) -> Irreducible:
    """The work of `Irreducible.from_losses`, which describes the arguments."""
    if labels is not None and dataset is None:
        raise RholossError("`labels` was given without `dataset`; pass the data set as well.")
    if isinstance(losses, Mapping):
        ids, losses = list(losses), list(losses.values())
    identity = None if dataset is None else identify(dataset, labels)
    if ids is None and dataset is not None:
        ids = ids_of_rows(dataset)
    if callable(losses):
        losses = _call(losses, ids)
    value_n = as_losses(losses)
    known = np.arange(len(value_n)) if ids is None else as_ids(ids)
    if not len(value_n) or len(known) != len(value_n):
        raise RholossError(
            f"`losses` has {len(value_n)} entries for {len(known)} ids; give one loss for each id "
            "(with `ids=` if they are not the rows of the data set), and at least one."
        )
    return table_of(value_n, known, identity, meta)


def _call(function: Callable[[Ids], Any], ids: Any) -> Any:
    if ids is None:
        raise RholossError(
            "`losses` is a function of ids, but there are no ids; pass `ids=` or `dataset=`."
        )
    return function(as_ids(ids))


def as_losses(losses: Any) -> np.ndarray:
    """The losses as float32 [n]."""
    try:
        array = numpy_of(losses)
        if array.ndim == 1 and array.dtype.kind in "fiu":
            return array.astype(np.float32)
        seen = f"{tuple(array.shape)} {array.dtype}"
    except (TypeError, ValueError):
        seen = f"a {type(losses).__name__} of unequal parts"
    raise RholossError(
        f"`losses` must be one number for each id, shape (n,), but is {seen}. Average over all other "
        "dimensions; NaN stands for a loss that was not measured."
    )


def table_of(
    value_n: np.ndarray,
    ids: Ids,
    identity: Identity | None,
    meta: Mapping[str, Any],
    weights: list[dict[str, Any]] | None = None,
) -> Irreducible:
    """A table of the losses of distinct ids, with the labels that the identity knows."""
    check_distinct(ids)
    keys = np.sort(hash_keys(ids)) if isinstance(ids, list) else None
    rows = len(ids) if keys is not None else _rows_for(np.asarray(ids), identity)
    table = np.full(rows, np.nan, np.float32)
    about = {
        "rows": rows,
        "measured": int(np.count_nonzero(~np.isnan(value_n))),
        "identity": None if identity is None else identity.as_meta(),
        **{"loss": "given", "model": None, "split": None, "transform": None, "seconds": 0.0},
        **meta,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "rholoss": library_version(),
        "torch": torch.__version__,
    }
    il = Irreducible(torch.from_numpy(table), keys=keys, meta=about, weights=weights)
    table[il.rows_of(ids)[0]] = value_n
    if identity is not None and identity.codes is not None:
        row, known = il.rows_of(identity.ids)
        inside = slice(None) if known is None else known
        il.labels = np.full(rows, ABSENT, np.int32)
        il.labels[row[inside]] = identity.codes[inside]
    return il


def _rows_for(index: np.ndarray, identity: Identity | None) -> int:
    if index.min() < 0:
        raise RholossError(
            f"`ids` has negative numbers ({shown(index[index < 0])}); give row numbers from 0, or "
            "strings."
        )
    return num_rows(int(index.max()), len(index), None if identity is None else identity.rows)


def num_rows(highest: int, count: int, inside: int | None) -> int:
    """Rows of the table for integer ids: all rows of the data set inside, if that is known."""
    rows = highest + 1
    if rows > LARGE_TABLE and rows > 100 * count:
        raise RholossError(
            f"`ids` go up to {rows - 1:,} for only {count:,} points: a table by row number would "
            "be nearly empty. Give them as strings: `[str(i) for i in ids]`."
        )
    return rows if inside is None else max(rows, inside)


def library_version() -> str:
    """The version of rholoss that is installed."""
    try:
        return importlib.metadata.version("rholoss")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
