"""Irreducible losses by id: looked up at every step, kept in a directory, reused by every later run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rholoss.data import INDEX, IRREDUCIBLE
from rholoss.errors import RholossError, StoreError, UnmeasuredLossError
from rholoss.il import files
from rholoss.il.fingerprint import (
    check_room,
    compare,
    compare_rows,
    identify,
    tell_other_labels,
)
from rholoss.il.guessing import mean_and_guess, with_guess
from rholoss.il.hashing import ABSENT, label_codes
from rholoss.il.ids import Ids, as_ids, hash_keys, shown_at

CHECKS = ("full", "size", "none")
REPR_ROWS = 100_000  # that are looked at for a mean


class Irreducible:
    """Irreducible losses by id: dense integer ids or string keys; NaN means not measured.

    `fit_irreducible`, `score_irreducible`, `Irreducible.from_losses` and `Irreducible.load` make them; there
    is seldom a reason to call the constructor.

    Attributes:
        values: float32 [rows]; row i is id i, or the key with the i-th smallest hash.
        keys: sorted uint64 hashes [rows] of string keys, or None.
        labels: int32 codes [rows] of the labels under which the points were measured, or None.
        meta: what meta.json says: rows, identity, loss, model, split, transform, seconds, created.
    """

    def __init__(
        self,
        values: Tensor,
        *,
        keys: np.ndarray | None = None,
        labels: np.ndarray | None = None,
        meta: Mapping[str, Any] | None = None,
        weights: list[dict[str, Any]] | None = None,
        path: Path | None = None,
    ) -> None:
        self.values, self.keys, self.labels = values, keys, labels
        self.meta = {"rows": len(values), **(meta or {})}
        self.path = path
        self.trusted = False  # whether the caller said that each loss belongs to its id
        self._weights = weights
        self._stored = (values, values._version)  # to see whether the values differ from the files

    @property
    def dense(self) -> Tensor | None:
        """The table by integer id, float32 [rows] on the CPU; None for string keys."""
        return self.values if self.keys is None else None

    @property
    def seconds(self) -> float:
        """The seconds that fitting and scoring took; 0.0 if that is not known."""
        return float(self.meta.get("seconds") or 0.0)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        ids = "integer ids" if self.keys is None else "string keys"
        model = (self.meta.get("model") or {}).get("class", "unknown model")
        mean = with_guess(*mean_and_guess(self, REPR_ROWS))
        kind = self.meta.get("loss")
        rows = files.measured_rows(self.meta)
        return f"Irreducible({rows}, {ids}, {kind} loss of {model}, {mean})"

    def __reduce__(self) -> Any:
        # Worker processes map the files again instead of receiving a copy of the table.
        values, version = self._stored
        if self.path is not None and self.values is values and values._version == version:
            return _open, (self.path, self.meta), {"trusted": self.trusted}
        if self._weights is None and "weights" in self.meta.get("files", {}):
            self.weights()
        options = {"keys": self.keys, "labels": self.labels, "meta": self.meta}
        made = self.values, {**options, "weights": self._weights}
        return _rebuild, made, {"trusted": self.trusted}

    def lookup(self, ids: Any) -> Tensor:
        """The losses of these ids, float32 [n] on the CPU; NaN for an id without a loss.

        Args:
            ids: n whole numbers or strings, as a tensor, array or list.
        """
        row, known = self.rows_of(as_ids(ids))
        row = np.require(row, requirements=["C", "W"])  # contiguous and writable, as torch needs it
        found = self.values.index_select(0, torch.from_numpy(row))
        return found if known is None else found.masked_fill_(torch.from_numpy(~known), torch.nan)

    def check(self, ids: Any) -> None:
        """Raise `UnmeasuredLossError` unless each of these ids has a finite loss.

        Args:
            ids: n whole numbers or strings.
        """
        value_n = self.lookup(ids)
        if bool(value_n.isfinite().all()):
            return
        known = self.rows_of(as_ids(ids))[1]
        raise UnmeasuredLossError(self._unusable(as_ids(ids), value_n.numpy(), known))

    def _unusable(self, ids: Ids, value_n: np.ndarray, known: np.ndarray | None) -> str:
        unknown = np.zeros(len(ids), bool) if known is None else ~known
        kinds = {
            "not measured": np.isnan(value_n) & ~unknown,
            "infinite": np.isinf(value_n),
            "unknown": unknown,
        }
        parts = [
            f"{shown_at(ids, np.flatnonzero(which))} ({why})"
            for why, which in kinds.items()
            if which.any()
        ]
        other = "integers" if self.keys is None else "strings"
        mixed = isinstance(ids, list) != (self.keys is not None)
        where = f" --out {files.beside(self.path)}" if self.path else ""
        return (
            f"{np.count_nonzero(~np.isfinite(value_n))} of {len(ids)} ids have no usable irreducible "
            f"loss: {'; '.join(parts)}. "
            + (f"The stored ids are {other}, those asked for are not. " if mixed else "")
            + f"Measure them with `rholoss il score ...{where}` (or `rholoss.score_irreducible`) on all "
            "points that you train on, or leave these points out of the data set."
        )

    def rows_of(self, ids: Ids) -> tuple[np.ndarray, np.ndarray | None]:
        """The row of each id, and which ids are known at all (None if all are)."""
        if isinstance(ids, list) != (self.keys is not None):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
        if self.keys is not None:
            hashes = hash_keys(list(ids))
            row = np.searchsorted(self.keys, hashes).clip(max=len(self) - 1)
            return row, self.keys[row] == hashes
        index = np.asarray(ids)
        if not len(index) or (index.min() >= 0 and index.max() < len(self)):
            return index, None
        known = (index >= 0) & (index < len(self))
        return np.where(known, index, 0), known

    def weights(self, member: int = 0) -> dict[str, Any]:
        """The state dict of the fitted model, on the CPU: to score more points, or for `LiveIrreducible`.

        Args:
            member: the number of the fold, if several models were fitted.
        """
        if self._weights is None and self.path is not None and "weights" in self.meta["files"]:
            name = files.data_file(self.path, self.meta, "weights")
            self._weights = files.read_weights(name)
        if not self._weights or not 0 <= member < len(self._weights):
            raise StoreError(
                f"There are no weights of member {member}: {len(self._weights or [])} models were kept. "
                "Only `fit_irreducible` keeps them (keep_weights=True)."
            )
        return self._weights[member]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the losses to a directory. An older store there stays whole until this one is complete.

        Args:
            path: the directory; it is made if it does not exist.
        """
        writers = {"loss": files.array_writer(self.values.numpy(), "loss")}
        if self.keys is not None:
            writers["keys"] = files.array_writer(self.keys, "keys")
        if self.labels is not None:
            writers["labels"] = files.array_writer(self.labels, "labels")
        if self._weights or "weights" in self.meta.get("files", {}):
            self.weights()
            writers["weights"] = files.weights_writer(self._weights)
        meta = files.write_store(Path(path), self.meta, writers)
        if self.path is not None and Path(path).resolve() == self.path.resolve():
            self.meta, self._stored = meta, (self.values, self.values._version)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        dataset: Any = None,
        *,
        labels: Any = None,
        check: str = "full",
    ) -> Irreducible:
        """Open a saved store and compare it with the data set.

        The losses are mapped from the file, so opening takes as long for a large store as for a small one.

        Args:
            path: the directory.
            dataset: the training data, as it is or as any view (`WithIndex`, `Subset`); without it
                nothing is compared.
            labels: one label for each row of `dataset`, if it has no `targets` or `labels`.
            check: 'full' compares rows and labels (or content), and checks that each id of `dataset` was
                measured; 'size' compares the number of rows only; 'none' compares nothing.
        """
        if check not in CHECKS:
            raise RholossError(f"`check` is {check!r}; choose one of {', '.join(CHECKS)}.")
        if labels is not None and dataset is None:
            raise RholossError("`labels` was given without `dataset`; pass the data set as well.")
        il = _present(Path(path))
        il.trusted = check != "full"
        if dataset is not None and check != "none":
            known = il.compare(dataset, labels, check) is not None
            if not known and (check == "full" or not il.meta.get("identity")):
                warnings.warn(f"{il.not_compared()} Or pass check='none'.", stacklevel=2)
        return il

    def compare(self, dataset: Any, labels: Any = None, check: str = "full") -> str | None:
        """Raise unless these are the losses of this data set.

        Args:
            dataset: the training data, as it is or as any view.
            labels: one label for each of its rows, if it has no `targets` or `labels`.
            check: 'full' or 'size', as for `load`.

        Returns:
            What was compared: 'labels', 'content', string 'ids' or the 'number' of rows; None if nothing
            could be compared.
        """
        stored = self.meta.get("identity") or {}
        what = f"The store {self.path}" if self.path else "This table of irreducible losses"
        found = identify(dataset, labels, stored if check == "full" else {})
        if self.keys is None and not stored:
            check_room(len(self) - 1, found, what)
        if check == "size":
            return compare_rows(stored, found, what)
        compared = compare(stored, self._label_codes(found.ids), found, what)
        self.check(found.ids)
        return compared or (None if self.keys is None else "ids")

    def not_compared(self) -> str:
        """Why the losses could not be compared with a data set, and what to do."""
        return (
            f"There is nothing to compare: {self.path} does not say for which rows or labels it was made, "
            "so that a data set with other rows under the same ids would go unseen. Make it again with "
            "`Irreducible.from_losses(..., dataset=train)`, `rholoss il fit` or `rholoss il score`."
        )

    def other_labels(self, ids: Any, labels: Any) -> str | None:
        """A message if these ids had other labels when they were measured; None if not, or if unknown.

        Only classes are compared: soft labels, tokens and names are not.

        Args:
            ids: n whole numbers or strings.
            labels: their labels [n].
        """
        classes = (self.meta.get("identity") or {}).get("labels") == "integers"
        one_each = getattr(labels, "ndim", 1) == 1 and len(labels) == len(ids)
        if self.trusted or not classes or not one_each:
            return None
        ids = as_ids(ids)
        then, (codes, integers) = self._label_codes(ids), label_codes(labels)
        return None if then is None or not integers else tell_other_labels(then, codes, ids)

    def _label_codes(self, ids: Ids) -> np.ndarray | None:
        if self.labels is None:
            return None
        row, known = self.rows_of(ids)
        return self.labels[row] if known is None else np.where(known, self.labels[row], ABSENT)

    @classmethod
    def from_losses(
        cls,
        losses: Any,
        ids: Any = None,
        *,
        dataset: Any = None,
        labels: Any = None,
        loss: str = "given",
        seconds: float = 0.0,
        **meta: Any,
    ) -> Irreducible:
        """Make a table from losses that were computed elsewhere.

        Args:
            losses: an array or tensor [n], a dict from id to loss, or a function from an array of ids
                (or a list of keys) to their losses.
            ids: n whole numbers or strings; by default the ids of `dataset`, or else 0, 1, 2, ...
            dataset: the data that the losses belong to; `load` can then notice if it has changed.
            labels: one label for each row of `dataset`, if it has no `targets` or `labels`.
            loss: a name for the kind of loss.
            seconds: how long it took to make them, for the ledger.
            meta: further notes to save, by name: `model`, `split`, `transform`.
        """
        from rholoss.il import build

        known = {"loss": loss, "seconds": seconds, **meta}
        return build.from_losses(losses, ids, dataset=dataset, labels=labels, meta=known)

    @classmethod
    def from_parquet(
        cls,
        path: str | os.PathLike[str],
        *,
        id_column: str = INDEX,
        loss_column: str = IRREDUCIBLE,
        **options: Any,
    ) -> Irreducible:
        """Make a table from a Parquet file with a column of ids and one of losses. Needs pyarrow.

        Args:
            path: the file, or a folder of such files.
            id_column: the name of the column of ids.
            loss_column: the name of the column of losses.
            options: further arguments of `from_losses`, such as `dataset`.
        """
        from rholoss.il import parquet

        ids, losses = parquet.read(path, id_column, loss_column)
        return cls.from_losses(losses, ids, **options)

    def to_parquet(self, path: str | os.PathLike[str], ids: Any = None) -> None:
        """Write the measured ids and their losses to a Parquet file. Needs pyarrow.

        Args:
            path: the file.
            ids: the ids to write; needed for string ids, of which only hashes are stored. By default all.
        """
        from rholoss.il import parquet

        parquet.write(self, path, ids)


def _present(path: Path) -> Irreducible:
    """Open a store, also while another process replaces it."""
    meta = files.read_meta(path)
    while True:
        try:
            return _open(path, meta)
        except (StoreError, OSError, RuntimeError):
            before, meta = meta, files.read_meta(path)
            if meta["files"] == before["files"]:  # it was not replaced
                raise


def _open(path: Path, meta: Mapping[str, Any]) -> Irreducible:
    """Map the files of a store; nothing of them is read."""
    name = files.data_file(path, meta, "loss")
    # Private: a write to the tensor never reaches the file.
    values = torch.from_file(str(name), shared=False, size=meta["rows"], dtype=torch.float32)
    arrays: dict[str, Any] = {
        kind: np.memmap(files.data_file(path, meta, kind), files.DTYPE[kind], "r")
        for kind in ("keys", "labels")
        if kind in meta["files"]
    }
    return Irreducible(values, **arrays, meta=meta, path=path.absolute())


def _rebuild(values: Tensor, options: dict[str, Any]) -> Irreducible:
    return Irreducible(values, **options)
