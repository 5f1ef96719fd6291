"""Data sets whose items carry their id: what `WithIndex` puts into items, and how views pass it on.

A view is a data set around another one: `WithIndex`, `WithIrreducible` or torch's `Subset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from rholoss.data import INDEX, Keyed, attach
from rholoss.errors import RholossError
from rholoss.sources import as_table


def fetch(dataset: Any, rows: Sequence[int]) -> list[Any]:
    """The items of these rows; all at once where the data set can, which Hugging Face's do much faster."""
    many = getattr(dataset, "__getitems__", None)
    return many(rows) if callable(many) else [dataset[row] for row in rows]


class Indexed(Dataset[Any]):
    """The items of `dataset`, each with its id attached: what `WithIndex` and `WithIrreducible` share."""

    dataset: Any
    ids: Any  # [rows]: an integer array, or a list of other keys

    def _keys(self, positions: Sequence[int]) -> list[Any]:
        raise NotImplementedError

    def __len__(self) -> int:
        if len(self.dataset) != len(self.ids):
            raise RholossError(
                f"The data set had {len(self.ids)} rows when `{type(self).__name__}` was made of it, and has "
                f"{len(self.dataset)} now; make it anew."
            )
        return len(self.ids)

    def __getitem__(self, position: int) -> Any:
        return attach(self.dataset[position], self._keys([position])[0])

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        # What a loader asks for.
        items, keys = fetch(self.dataset, positions), self._keys(positions)
        return [attach(item, key) for item, key in zip(items, keys, strict=True)]

    def __getattr__(self, name: str) -> Any:
        # `targets`, `classes` and the like of the data set inside.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class WithIndex(Indexed):
    """A data set whose items carry their id: `(x, y)` becomes `(index, x, y)`, a dict gets "index".

    Any other item (a list, a named tuple, a tensor) becomes `(index, item)`. The id is the row of the
    underlying data set, also through (nested) `Subset`s, so that what was measured for an id holds for
    every view of the data. A data set whose items carry ids already (a `Subset` of a `WithIndex`) keeps
    them.

    Args:
        dataset: a data set with `__getitem__` and `__len__`; for streams see `Stream`.
        ids: other ids, whole numbers or strings, one for each row of `dataset`; by default row numbers.
    """

    def __init__(self, dataset: Dataset[Any], ids: Sequence[Any] | None = None) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise RholossError(
                f"`dataset` is a {type(dataset).__name__}, which has no row numbers. Read it as "
                "`rholoss.Stream(shards, read, key=...)`, or put a stable key into each item yourself (a "
                "dict item's 'index', or the first of a tuple)."
            )
        check_can_have_ids(dataset)
        self.dataset = without_ids(dataset)
        self.ids = ids_of_rows(dataset) if ids is None else _as_ids(ids)
        if len(self.ids) != len(dataset):
            raise RholossError(
                f"`ids` has {len(self.ids)} entries, but the data set has {len(dataset)} rows; give "
                "one id for each row."
            )

    def _keys(self, positions: Sequence[int]) -> list[Any]:
        return _ids_at(self.ids, positions)


class WithIrreducible(Indexed):
    """A `WithIndex` data set whose items also carry their irreducible loss.

    The losses are looked up by the loader's workers. Use it for tables that do not fit the device, and for
    string ids; the `Selector` then needs no `irreducible`.

    Args:
        dataset: the training set as `WithIndex`.
        irreducible: the losses by id: what `fit_irreducible` or `Irreducible.load` returned, or a tensor.
    """

    def __init__(self, dataset: WithIndex, irreducible: Any) -> None:
        if not isinstance(dataset, WithIndex):
            raise RholossError(
                f"`dataset` is a {type(dataset).__name__}, whose rows have no ids; pass "
                "`rholoss.WithIndex(dataset)`, also of a `Subset`."
            )
        self.dataset, self.ids = dataset.dataset, dataset.ids
        self.irreducible = as_table(irreducible)

    def _keys(self, positions: Sequence[int]) -> list[Any]:
        ids = _ids_at(self.ids, positions)
        losses = self.irreducible.lookup(ids).tolist()
        return [Keyed(id_, loss) for id_, loss in zip(ids, losses, strict=True)]


def _as_ids(ids: Any) -> Any:
    """Whole numbers as an array, other keys as a list."""
    if not hasattr(ids, "__len__") or isinstance(ids, (set, frozenset, str)):
        raise RholossError(
            f"`ids` is a {type(ids).__name__}; give a list, an array or a tensor, one id for each row."
        )
    if isinstance(ids, Tensor):
        ids = ids.cpu().numpy()
    elif hasattr(ids, "__array__"):  # a column of pandas or pyarrow
        ids = np.asarray(ids)
    whole = len(ids) > 0 and isinstance(next(iter(ids)), (int, np.integer))
    array = np.asarray(ids) if whole else np.empty(0)
    return array if array.dtype.kind in "iu" else list(ids)


def _ids_at(ids: Any, positions: Sequence[int]) -> list[Any]:
    found = [ids[position] for position in positions]
    return [int(index) for index in found] if isinstance(ids, np.ndarray) else found


def without_ids(dataset: Any) -> Any:
    """The same rows in the same order, as items that carry no id."""
    if isinstance(dataset, Indexed):
        return without_ids(dataset.dataset)
    if type(dataset) is Subset:  # a subclass may change the items
        inner = without_ids(dataset.dataset)
        return dataset if inner is dataset.dataset else Subset(inner, dataset.indices)
    return dataset


def check_can_have_ids(dataset: Any, argument: str = "dataset") -> None:
    """Raise where items would carry two ids, or different rows the same id."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, WithIrreducible):
        raise RholossError(
            "`dataset` is a `WithIrreducible` or a `Subset` of one, whose items carry their ids already; "
            "pass it to the loader as it is."
        )
    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else []
    if any(without_ids(part) is not part for part in parts):
        raise RholossError(
            f"`{argument}` is a `ConcatDataset` of data sets that carry ids already, each from 0 on; join "
            "them first: `rholoss.WithIndex(ConcatDataset([a, b]))`."
        )


def ids_of_rows(dataset: Any) -> Any:
    """The id of each row of a data set.

    Those that `WithIndex` was given, also through a `Subset`; the column "index" of a Hugging Face data
    set; otherwise the row numbers 0, 1, 2, ...
    """
    if isinstance(dataset, Indexed):
        return dataset.ids
    if isinstance(dataset, Subset):
        inner = ids_of_rows(dataset.dataset)
        if isinstance(inner, np.ndarray):
            return inner[np.asarray(dataset.indices, dtype=np.int64)]
        return [inner[i] for i in dataset.indices]
    if not hasattr(dataset, "__len__"):
        raise RholossError(
            f"`dataset` is a {type(dataset).__name__}, which has no rows to number or to draw; pass a data "
            "set with `__len__`. A stream is read by its loader in its own order."
        )
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and INDEX in columns:
        return _as_ids(column_of(dataset, INDEX))
    return np.arange(len(dataset))


def column_of(dataset: Any, name: str) -> Any:
    """A column of a Hugging Face data set; as it is stored, if a transform makes the items.

    The transform would run on all rows at once, and may rename columns.
    """
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        dataset = dataset.with_format(None)
    return dataset[name][:]
