"""Tables of irreducible losses, made from ids and losses."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from numbers import Real
from typing import Any

import numpy as np
import torch

from rholoss.errors import RholossError
from rholoss.il.fingerprint import Identity, identify
from rholoss.il.hashing import ABSENT, numpy_of
from rholoss.il.ids import Ids, as_ids, check_distinct, check_not_negative, hash_keys
from rholoss.il.store import Irreducible
from rholoss.indexed import ids_of_rows

# Entries of meta.json that the library writes itself.
OWN = ("format", "version", "rows", "measured", "identity", "files", "created", "rholoss", "torch")
LARGE_TABLE = 2**28  # rows, 1 GiB; a larger table has to be filled to 1 % at least


def from_losses(
    losses: Any, ids: Any, *, dataset: Any, labels: Any, meta: Mapping[str, Any]
) -> Irreducible:
    """The work of `Irreducible.from_losses`, which describes the arguments."""
    if labels is not None and dataset is None:
        raise RholossError("`labels` was given without `dataset`; pass the data set as well.")
    check_meta(meta)
    if isinstance(losses, Mapping):
        if ids is not None:
            raise RholossError("`losses` is a dict, which has its ids; pass no `ids`, or no dict.")
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


def check_meta(meta: Mapping[str, Any]) -> None:
    """Raise if meta.json cannot hold these entries: names of its own, or values of the wrong kind."""
    own = [name for name in OWN if name in meta]
    if own:
        raise RholossError(
            f"`{own[0]}` is what a table says of itself in meta.json; give yours another name."
        )
    for name in ("model", "split"):
        if not isinstance(meta.get(name) or {}, Mapping):
            raise RholossError(
                f"`{name}` is {meta[name]!r}; give a dict, as in {name}={{'note': {meta[name]!r}}}."
            )
    seconds = meta["seconds"]
    if not isinstance(seconds, Real) or not 0 <= float(seconds) < math.inf:
        raise RholossError(f"`seconds` is {seconds!r}; give a number of at least 0.")


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
    rows = rows_for(ids, identity)
    table = np.full(rows, np.nan, np.float32)
    about = {
        "rows": rows,
        "measured": int(np.count_nonzero(~np.isnan(value_n))),
        "identity": None if identity is None else identity.as_meta(),
        **{"loss": "given", "model": None, "split": None, "transform": None, "seconds": 0.0},
        **meta,
        **made_now(),
    }
    il = Irreducible(torch.from_numpy(table), keys=keys, meta=about, weights=weights)
    table[il.rows_of(ids)[0]] = value_n
    if identity is not None and identity.codes is not None:
        row, known = il.rows_of(identity.ids)
        inside = slice(None) if known is None else known
        il.labels = np.full(rows, ABSENT, np.int32)
        il.labels[row[inside]] = identity.codes[inside]
    return il


def rows_for(ids: Ids, identity: Identity | None) -> int:
    """How many rows the table of these ids has. Raises if it would be far too large, before any work."""
    if isinstance(ids, list):
        return len(ids)
    check_not_negative(ids)
    return num_rows(int(ids.max()), len(ids), None if identity is None else identity.rows)


def num_rows(highest: int, count: int, inside: int | None) -> int:
    """How many rows the table for integer ids has: at least as many as the data set inside, if known."""
    rows = highest + 1
    if rows > LARGE_TABLE and rows > 100 * count:
        raise RholossError(
            f"`ids` go up to {rows - 1:,} for only {count:,} points: a table by row number would "
            "be nearly empty. Give them as strings: `[str(i) for i in ids]`."
        )
    return rows if inside is None else max(rows, inside)


def made_now() -> dict[str, str]:
    """When and by which versions a table was made, for its meta.json."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "rholoss": library_version(),
        "torch": torch.__version__,
    }


def library_version() -> str:
    """The version of rholoss that is installed."""
    try:
        return importlib.metadata.version("rholoss")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
