"""Batches of any structure: finding their ids, taking rows out of them, moving them to a device.

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

from rholoss.errors import RholossError

INDEX, IRREDUCIBLE = "index", "irreducible_loss"  # the keys that dict items carry
# `index_select` refuses unsigned types: rows are selected from the same bits, read as signed.
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


Path = tuple[Any, ...]  # keys and places from the root; fields start with a dot


def tree_map(
    function: Callable[[Path, Any], Any],
    tree: Any,
    path: Path = (),
    whole: Callable[[Path, Any], bool] | None = None,
) -> Any:
    """Apply `function(path, leaf)` to each leaf of a batch; returns the results in the same structure.

    Lists and tuples that hold no tensors count as leaves, and so do those for which `whole(path, list)`
    is true.
    """
    if isinstance(tree, Tensor):  # the usual case comes first, because this runs at every step
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
    """Whether a leaf belongs to all rows: it, or something that contains it, is named in `shared`."""
    return bool(shared) and any(path_name(path[: n + 1]) in shared for n in range(len(path)))


def lists_by_row(rows: int, shared: Sequence[str] = ()) -> Callable[[Path, Any], bool]:
    """For `tree_map`: whether a list has one entry per example, rather than one per field.

    A list with `rows` entries could be either. If every leaf in it has `rows` rows it is taken for a list
    of fields, as in a small last batch: three fields of three rows each. If some leaf has not, or if there
    is no such leaf at all, its entries must be the examples.
    """

    def whole(path: Path, items: Any) -> bool:
        # The batch itself is never a list of examples, since it also holds their ids.
        if len(items) != rows or not path or hasattr(items, "_fields"):
            return False
        found: set[bool | None] = set()

        def look(path: Path, leaf: Any) -> None:
            # A leaf that is named in `shared` shows that its list is one of fields.
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
    """A mapping of the same type (HF's BatchEncoding, UserDict), if that can be made from a dict."""
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
    """The batch as the model's own code expects it: without ids and joined irreducible losses."""
    if isinstance(batch, Mapping):
        return {k: v for k, v in batch.items() if k not in (INDEX, IRREDUCIBLE)}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return batch[1] if len(batch) == 2 else tuple(batch[1:])
    return batch


def without_irreducible(batch: Any) -> Any:
    """The batch without joined irreducible losses, so that the user gets back the structure they know."""
    if isinstance(batch, Mapping) and IRREDUCIBLE in batch:
        return _mapping_like(batch, {k: v for k, v in batch.items() if k != IRREDUCIBLE})
    if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], Keyed):
        return type(batch)([batch[0].index, *batch[1:]])
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device; copies to a device do not block."""
    ahead = device.type != "cpu"  # a copy to the host must be complete before it is read

    def move(path: Path, leaf: Any) -> Any:
        return leaf.to(device, non_blocking=ahead) if isinstance(leaf, Tensor) else leaf

    return tree_map(move, batch)


def take(
    batch: Any,
    position: Tensor | slice,
    rows: int,
    shared: Sequence[str] = (),
    *,
    strict: bool = True,
) -> Any:
    """The rows of the batch at these positions, in the batch's own structure; a slice copies nothing.

    Tensors and arrays must have `rows` rows. Numbers, None and 0-dimensional tensors belong to all rows,
    and so does what is named in `shared`: these are passed on as they are. Lists with one entry per row
    (see `lists_by_row`) are indexed on the host. Anything else is an error, or with `strict=False` is
    passed on as well.
    """

    def pick(path: Path, leaf: Any) -> Any:
        has_rows = None if is_shared(path, shared) else _has_rows(leaf, rows)
        if has_rows is None or not (has_rows or strict):
            return leaf
        if has_rows:
            return _rows_of(leaf, position)
        shape = tuple(getattr(leaf, "shape", ())) or type(leaf).__name__
        raise RholossError(
            f"{path_name(path)} is {shape}, which has no row for each of the {rows} examples, so rows "
            "cannot be selected from it. If it belongs to all of them, pass "
            f"`shared=({path_name(path)!r},)`; else let the collator stack it, or make a list of it with "
            "an entry for each example."
        )

    return tree_map(pick, batch, whole=lists_by_row(rows, shared))


def _rows_of(leaf: Any, position: Tensor | slice) -> Any:
    if isinstance(position, slice):
        return leaf[position]
    if isinstance(leaf, Tensor):
        at = position.to(leaf.device, non_blocking=leaf.device.type != "cpu")
        if leaf.dtype in SELECTED_AS:
            return leaf.view(SELECTED_AS[leaf.dtype]).index_select(0, at).view(leaf.dtype)
        return leaf.index_select(0, at)
    if isinstance(leaf, np.ndarray):
        return leaf[position.cpu().numpy()]
    return type(leaf)([leaf[i] for i in position.tolist()])


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are (the CPU if it has none)."""
    if not isinstance(model, nn.Module):
        raise RholossError(
            f"`model` is a {type(model).__name__}; pass the torch.nn.Module that is trained. A function "
            "from the model and a batch to losses is the selector's `loss`."
        )
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device
