"""Ids and batches: data sets whose items carry their row number, and batches of any structure.

A batch is a tree of tuples, lists, dicts, named tuples and dataclasses. Its leaves are tensors or
arrays with one row per example, and lists with one entry per example: strings, or what cannot be
stacked (ragged tensors, a dict for each example).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from rholoss.errors import RholossError
from rholoss.sources import as_table

INDEX, IRREDUCIBLE = "index", "irreducible_loss"  # the keys that dict items carry
# Torch selects no rows of the first kinds; their bits are those of the second.
SELECTED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Keyed(NamedTuple):
    """An id with its irreducible loss, joined in the loader (see `WithIrreducible`)."""

    index: Any
    irreducible_loss: Any


def is_record(item: Any) -> bool:
    """A dataclass instance."""
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


def attach(item: Any, index: Any) -> Any:
    """The item with its id (and irreducible loss) in front, or as entries of a dict."""
    if isinstance(item, Mapping):
        if INDEX in item:
            raise RholossError(
                f"The data set's items have a key {INDEX!r} already; rename that column, or pass the "
                "data set itself to the loader if those are its row numbers."
            )
        extra = index._asdict() if isinstance(index, Keyed) else {INDEX: index}
        return {**item, **extra}
    if isinstance(item, tuple) and not hasattr(item, "_fields"):
        return (index, *item)
    return (index, item)


class _View(Dataset[Any]):
    """The items of `dataset`, each with a key attached."""

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
        # What a loader asks for: the whole batch at once, where the data set can do that.
        fetch = getattr(self.dataset, "__getitems__", None)
        items = fetch(positions) if fetch else [self.dataset[position] for position in positions]
        return [attach(*pair) for pair in zip(items, self._keys(positions), strict=True)]

    def __getattr__(self, name: str) -> Any:
        # `targets`, `classes` and the like of the data set inside.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class WithIndex(_View):
    """A data set whose items carry their id: `(x, y)` becomes `(index, x, y)`, a dict gets "index".

    The id is the row of the underlying data set, also through (nested) `Subset`s, so that what was
    measured for an id holds for every view of the data. Ids of another kind, strings for instance,
    are given as `ids`, one for each row of `dataset`. A data set whose items carry ids already (a
    `Subset` of a `WithIndex`) keeps them.
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


class WithIrreducible(_View):
    """A `WithIndex` data set whose items also carry their irreducible loss, looked up in the loader.

    For tables that do not fit the device, and for string keys: the look-up then runs in the workers.
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
        loss = self.irreducible.lookup(ids).tolist()
        return [Keyed(*pair) for pair in zip(ids, loss, strict=True)]


def _as_ids(ids: Any) -> Any:
    """Whole numbers as an array, other keys as a list."""
    if not hasattr(ids, "__len__") or isinstance(ids, (set, frozenset, str)):
        raise RholossError(
            f"`ids` is a {type(ids).__name__}; give a list, an array or a tensor, one id for each row."
        )
    if isinstance(ids, Tensor):
        ids = ids.cpu().numpy()
    whole = len(ids) > 0 and isinstance(next(iter(ids)), (int, np.integer))
    array = np.asarray(ids) if whole else np.empty(0)
    return array if array.dtype.kind in "iu" else list(ids)


def _ids_at(ids: Any, positions: Sequence[int]) -> list[Any]:
    found = [ids[position] for position in positions]
    return [int(index) for index in found] if isinstance(ids, np.ndarray) else found


def without_ids(dataset: Any) -> Any:
    """The same rows in the same order, as items that carry no id."""
    if isinstance(dataset, (WithIndex, WithIrreducible)):
        return without_ids(dataset.dataset)
    if type(dataset) is Subset:  # a subclass may change the items
        inner = without_ids(dataset.dataset)
        return dataset if inner is dataset.dataset else Subset(inner, dataset.indices)
    return dataset


def check_can_have_ids(dataset: Any, argument: str = "dataset") -> None:
    """Raise where ids would come twice, or not be told apart."""
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
    """The id of each row: of `WithIndex` its ids, of a `Subset` those of its rows, of a Hugging Face data
    set its column "index", else 0, 1, 2, ..."""
    if isinstance(dataset, (WithIndex, WithIrreducible)):
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
        return _as_ids(dataset[INDEX][:])
    return np.arange(len(dataset))


Path = tuple[Any, ...]  # keys and places from the root; fields start with a dot


def tree_map(
    function: Callable[[Path, Any], Any],
    tree: Any,
    path: Path = (),
    whole: Callable[[Path, Any], bool] | None = None,
) -> Any:
    """Apply `function(path, leaf)` to each leaf; lists and tuples without tensors are leaves.

    So are those of which `whole(path, list)` is true.
    """
    if isinstance(tree, Tensor):  # the usual case first: this runs at every step
        return function(path, tree)
    if isinstance(tree, Mapping):
        mapped = {key: tree_map(function, v, (*path, key), whole) for key, v in tree.items()}
        return _mapping_like(tree, mapped)
    if isinstance(tree, (list, tuple)):
        if not _is_branch(tree) or (whole is not None and whole(path, tree)):
            return function(path, tree)
        parts = [tree_map(function, value, (*path, i), whole) for i, value in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if is_record(tree):
        names = [f.name for f in dataclasses.fields(tree) if f.init]
        fields = {f: tree_map(function, getattr(tree, f), (*path, "." + f), whole) for f in names}
        return dataclasses.replace(tree, **fields)
    return function(path, tree)


def path_name(path: Path) -> str:
    """How a leaf is written in Python: batch[1], batch['image'], batch.image."""
    fields = (str(p) if str(p).startswith(".") else f"[{p!r}]" for p in path)
    return "batch" + "".join(fields)


def is_shared(path: Path, shared: Sequence[str]) -> bool:
    """Whether a leaf belongs to all rows: it is named in `shared`, or what it is a part of is."""
    return bool(shared) and any(path_name(path[: n + 1]) in shared for n in range(len(path)))


def lists_by_row(rows: int, shared: Sequence[str] = ()) -> Callable[[Path, Any], bool]:
    """For `tree_map`: which lists have an entry for each of the examples, and are no list of fields.

    It is a list of `rows` entries that cannot be one of fields, because somewhere in it is a tensor
    without `rows` rows, or nowhere one with them. Where all have, nothing tells the two apart, and
    it is taken for fields: those of a small last batch look like that.
    """

    def whole(path: Path, items: Any) -> bool:
        # The batch itself is never a list of examples: its ids stand beside them.
        if len(items) != rows or not path or hasattr(items, "_fields"):
            return False
        found: set[bool | None] = set()

        def look(path: Path, leaf: Any) -> None:
            # What is named in `shared` is a field, and so is what stands beside it.
            found.add(is_shared(path, shared) or _has_rows(leaf, rows))

        tree_map(look, items, path)
        return False in found or True not in found

    return whole


def _has_rows(leaf: Any, rows: int) -> bool | None:
    """Whether a leaf has a row for each example; None if it belongs to all of them."""
    if leaf is None or isinstance(leaf, (int, float, str, bytes, np.generic)):
        return None
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf.shape[0] == rows if leaf.ndim else None
    return isinstance(leaf, (list, tuple)) and len(leaf) == rows


def _mapping_like(tree: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """A subclass (HF's BatchEncoding, UserDict) again, where its type takes a plain dict."""
    try:
        return type(tree)(mapped)  # type: ignore[call-arg]
    except TypeError:  # a defaultdict, for instance
        return mapped


def _is_branch(items: Sequence[Any]) -> bool:
    return hasattr(items, "_fields") or any(
        isinstance(item, (Tensor, np.ndarray, Mapping, list, tuple)) or is_record(item)
        for item in items
    )


def find_index(batch: Any) -> Any:
    """The ids of a batch: its "index" entry or field, or the first element of a tuple."""
    if isinstance(batch, Mapping):
        found = batch.get(INDEX)
    elif is_record(batch):
        found = getattr(batch, INDEX, None)
    elif hasattr(batch, "_fields"):  # every tuple has a method `index`
        found = batch.index if INDEX in batch._fields else None
    elif isinstance(batch, (list, tuple)) and batch:
        found = batch[0]
    else:
        found = None
    ids = found.index if isinstance(found, Keyed) else found
    whole = isinstance(ids, Tensor) and ids.ndim == 1 and not ids.is_floating_point()
    keys = isinstance(ids, (list, tuple)) and all(isinstance(i, (str, int)) for i in ids)
    if not (whole or keys) or (isinstance(ids, Tensor) and ids.dtype == torch.bool):
        seen = "nothing" if ids is None else f"a {type(ids).__name__}"
        if isinstance(ids, Tensor):
            seen = f"a tensor {tuple(ids.shape)} {ids.dtype}"
        raise RholossError(
            f"No ids were found in the batch ({seen} stands in their place). Wrap the data set "
            "as `rholoss.WithIndex(dataset)`; into the items of a stream, put a stable key as 'index' or "
            "in front; if a collator drops the ids, keep them; or pass `index=`, a function from the "
            "batch to its ids."
        )
    return ids


def carried_irreducible(batch: Any) -> Tensor | None:
    """The irreducible losses that the loader joined to the batch, if it did."""
    if isinstance(batch, Mapping):
        return batch.get(IRREDUCIBLE)
    if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], Keyed):
        return batch[0].irreducible_loss
    return None


def without_index(batch: Any) -> Any:
    """The batch as the model's own code knows it: without ids and joined irreducible losses."""
    if isinstance(batch, Mapping):
        return {k: v for k, v in batch.items() if k not in (INDEX, IRREDUCIBLE)}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return batch[1] if len(batch) == 2 else tuple(batch[1:])
    return batch


def without_irreducible(batch: Any) -> Any:
    """Take joined irreducible losses out again, so that the user gets the structure they know."""
    if isinstance(batch, Mapping) and IRREDUCIBLE in batch:
        return _mapping_like(batch, {k: v for k, v in batch.items() if k != IRREDUCIBLE})
    if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], Keyed):
        return type(batch)([batch[0].index, *batch[1:]])
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; copies to a device do not block."""
    ahead = device.type != "cpu"  # a copy to the host has to be there before it is read

    def move(path: Path, leaf: Any) -> Any:
        return leaf.to(device, non_blocking=ahead) if isinstance(leaf, Tensor) else leaf

    return tree_map(move, batch)


def take(
    batch: Any, position: Tensor, rows: int, shared: Sequence[str] = (), *, strict: bool = True
) -> Any:
    """The rows of the batch at these positions, in the batch's own structure.

    Tensors and arrays need `rows` rows. Numbers, None and 0-dimensional tensors belong to all rows,
    and so does what is named in `shared`. Lists with an entry per row (see `lists_by_row`) are indexed
    on the host. What has no row for each example is an error, or is passed on as it is if not `strict`.
    """

    def pick(path: Path, leaf: Any) -> Any:
        has_rows = None if is_shared(path, shared) else _has_rows(leaf, rows)
        if has_rows is None or not (has_rows or strict):
            return leaf
        if has_rows and isinstance(leaf, Tensor):
            at = position.to(leaf.device, non_blocking=leaf.device.type != "cpu")
            if leaf.dtype in SELECTED_AS:
                return leaf.view(SELECTED_AS[leaf.dtype]).index_select(0, at).view(leaf.dtype)
            return leaf.index_select(0, at)
        if has_rows and isinstance(leaf, np.ndarray):
            return leaf[position.cpu().numpy()]
        if has_rows:
            return type(leaf)([leaf[i] for i in position.tolist()])
        shape = tuple(getattr(leaf, "shape", ())) or type(leaf).__name__
        raise RholossError(
            f"{path_name(path)} is {shape}, which has no row for each of the {rows} examples, so rows "
            "cannot be selected from it. If it belongs to all of them, pass "
            f"`shared=({path_name(path)!r},)`; else let the collator stack it, or make a list of it with "
            "an entry for each example."
        )

    return tree_map(pick, batch, whole=lists_by_row(rows, shared))


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are (the CPU if it has none)."""
    if not isinstance(model, nn.Module):
        raise RholossError(
            f"`model` is a {type(model).__name__}; pass the torch.nn.Module that is trained. A function "
            "from the model and a batch to losses is the selector's `loss`."
        )
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device
