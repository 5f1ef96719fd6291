"""Points of a data set and batches of them: what fitting and scoring read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, default_collate

from rholoss import data as batch_data
from rholoss.errors import RholossError
from rholoss.il.hashing import content_hash, numpy_of
from rholoss.il.ids import Ids, as_ids, shown_at
from rholoss.il.views import evenly, rows_inside, seed_all
from rholoss.indexed import check_can_have_ids, fetch, ids_of_rows, without_ids
from rholoss.naming import code_hash, named, without_addresses

FETCHED_TWICE = 8


@dataclass(frozen=True)
class Points:
    """The distinct ids of a data set, in sorted order, and a position at which each of them stands."""

    dataset: Any
    ids: Ids
    position: np.ndarray

    @property
    def view(self) -> Any:
        """The data set, with items that carry no id."""
        return without_ids(self.dataset)

    @property
    def transform(self) -> str | None:
        """What the data set says about its transform."""
        transform = getattr(rows_inside(self.dataset)[0], "transform", None)
        return None if transform is None else named(transform)


@dataclass(frozen=True)
class Loading:
    """How batches are made and where they go."""

    batch_size: int
    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    device: torch.device


class Rows(Dataset[Any]):
    """The rows of a view at these positions."""

    def __init__(self, view: Any, position: np.ndarray) -> None:
        self.view, self.position = view, position

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, place: int) -> Any:
        return self.view[int(self.position[place])]

    def __getitems__(self, places: list[int]) -> list[Any]:
        return fetch(self.view, self.position[places].tolist())


def points_of(dataset: Any, argument: str) -> Points:
    """The points of a data set, or an error if it has none."""
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not sized or isinstance(dataset, IterableDataset):
        raise RholossError(
            f"`{argument}` is a {type(dataset).__name__}, which has no rows to fetch by number; pass a "
            "data set with `__len__` and `__getitem__`, not a loader or a stream."
        )
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise RholossError(
            f"`{argument}` is a {type(dataset).__name__} of {', '.join(map(repr, list(dataset)[:5]))}, which "
            "has no rows to fetch by number; pass a data set of rows, or one of its splits."
        )
    if not len(dataset):
        raise RholossError(f"`{argument}` is empty; pass a data set with at least one row.")
    check_can_have_ids(without_ids(dataset), argument)
    ids = as_ids(ids_of_rows(dataset), argument)
    distinct, position, which = np.unique(np.asarray(ids), return_index=True, return_inverse=True)
    if len(distinct) < len(ids):
        row = rows_inside(dataset)[1]  # one that a view holds twice is one point
        other = np.flatnonzero(row != row[position][which.reshape(-1)])
        if len(other):
            raise RholossError(
                f"{len(other)} rows of `{argument}` have an id that another row has, too: "
                f"{shown_at(ids, other)}. Give each row an id of its own, in "
                "`rholoss.WithIndex(dataset, ids=...)`: of files, for one, the whole path."
            )
    return Points(dataset, distinct.tolist() if isinstance(ids, list) else distinct, position)


def check_items(
    points: Points, argument: str, collate_fn: Callable[[list[Any]], Any] | None = None
) -> str:
    """Fetch some items twice, and raise if they differ: then they are augmented. Returns their hash.

    They are also collated twice.
    """
    view, found, again = points.view, [], []
    for place in evenly(len(points.ids), FETCHED_TWICE):
        id_, position = points.ids[place], int(points.position[place])
        item = view[position]
        hashed = content_hash(item)
        found.append(hashed)
        again.append((copy(item), copy(view[position])))  # a collator may pop entries
        if hashed != content_hash(again[-1][1]):
            raise RholossError(
                f"The item of id {id_} was fetched twice and differs, so it is augmented at random. "
                "Irreducible losses are measured un-augmented: pass a view of the same rows without "
                f"augmentation as `{argument}`."
            )
        own = item.get(batch_data.INDEX, id_) if isinstance(item, Mapping) else id_
        if not np.array_equal(numpy_of(own), id_):
            raise RholossError(
                f"The items of `{argument}` carry an 'index' of their own ({own!r} where the row is "
                f"{id_}). Pass `rholoss.WithIndex(dataset, ids=...)` with those ids, one for each row."
            )
    _check_collated(again, argument, collate_fn)
    return content_hash(found)


def _check_collated(
    twice: list[tuple[Any, Any]], argument: str, collate_fn: Callable[[list[Any]], Any] | None
) -> None:
    try:
        batches = [
            (collate_fn or default_collate)(list(items)) for items in zip(*twice, strict=True)
        ]
    except Exception as error:
        raise RholossError(
            f"The items of `{argument}` cannot be made into a batch ({type(error).__name__}: {error}). Pass "
            "`collate_fn=`, the one that you train with, and leave out what it cannot stack "
            "(`select_columns` of a Hugging Face data set)."
        ) from error
    if content_hash(batches[0]) != content_hash(batches[1]):
        warnings.warn(
            f"The collate function makes another batch of the same items of `{argument}` each time: it masks "
            "or augments at random, so that part of each irreducible loss is chance. Pass a `collate_fn` "
            "that makes the same batch of the same items.",
            stacklevel=4,
        )


def content_of_some(dataset: Any) -> str | None:
    """Hash of some items as they come under a fixed seed; call it inside `own_randomness`.

    None if they differ even so: augmentation with a generator of its own looks like changed data.
    """
    view = without_ids(dataset)
    rows = evenly(len(view), FETCHED_TWICE).tolist()

    def fetched() -> str:
        seed_all(0)
        return content_hash([view[row] for row in rows])

    first = fetched()
    return first if first == fetched() else None


def loader_of(
    view: Any, position: np.ndarray, loading: Loading, shuffle: Generator | None = None
) -> DataLoader[Any]:
    """A loader of these rows, in order or shuffled.

    When shuffled, a last batch of one row is dropped: BatchNorm cannot train on it. Each time that is
    another row.
    """
    alone = len(position) % loading.batch_size == 1 and len(position) > loading.batch_size
    rows = Rows(view, position)
    return DataLoader(
        rows,
        batch_size=loading.batch_size,
        # The order has a generator of its own, so that it is the same for any number of workers.
        sampler=None if shuffle is None else RandomSampler(rows, generator=shuffle),
        generator=Generator().manual_seed(0 if shuffle is None else shuffle.initial_seed()),
        num_workers=loading.num_workers,
        persistent_workers=loading.num_workers > 0 and shuffle is not None,
        collate_fn=loading.collate_fn,
        drop_last=shuffle is not None and alone,
    )


def batches(loader: DataLoader[Any], device: torch.device) -> Iterator[tuple[int, Any]]:
    """The number of rows of each batch, and the batch on the device as the model knows it."""
    left, size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
    for batch in loaded(loader):
        if isinstance(batch, Mapping):
            batch = batch_data.without_index(batch)
        yield min(size, left), batch_data.to_device(batch, device)
        left -= size


def loaded(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a loader, made with the CPU as default device: a loader's own tensors must be there."""
    # Not `torch.get_default_device`, which in torch 2.6 fails once the default was set back to None.
    if torch.empty(0).device.type == "cpu":
        yield from loader
        return
    with torch.device("cpu"):
        iterator, last = iter(loader), object()
    while True:
        with torch.device("cpu"):
            batch = next(iterator, last)
        if batch is last:
            return
        yield batch


def about_model(model: nn.Module) -> dict[str, Any]:
    """Class and number of parameters."""
    return {
        "class": type(model).__qualname__,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def code_of(model: nn.Module, *functions: Any) -> list[Any]:
    """Hashes of the code of functions, and of a model apart from its weights: its structure and methods."""
    kinds = {type(module) for module in model.modules()}
    methods = {code_hash(method) for kind in kinds for method in _methods(kind)}
    structure = content_hash([without_addresses(model), sorted(map(str, methods))])
    return [structure, *map(_code, functions)]


def _code(thing: Any) -> str | None:
    """A hash of a function's code; of an object also what it holds, if its `repr` does not show that."""
    told = type(thing).__repr__ not in (object.__repr__, nn.Module.__repr__)
    if told or not hasattr(thing, "__dict__"):
        return thing if isinstance(thing, str) else code_hash(thing)
    state = dict(thing.state_dict()) if isinstance(thing, nn.Module) else None
    return content_hash([code_hash(type(thing).__call__), _held(vars(thing)), state])


def _held(value: Any) -> Any:
    """Numbers, strings and arrays; of other objects, which may hold anything (a logger), the type."""
    if isinstance(value, Mapping):
        return {str(key): _held(value[key]) for key in value}
    if isinstance(value, (list, tuple)):
        return [_held(each) for each in value]
    plain = (bool, int, float, str, bytes, type(None), torch.Tensor, np.ndarray, np.generic)
    return value if isinstance(value, plain) else type(value).__qualname__


def _methods(kind: type) -> Iterator[Any]:
    """The functions of a class, its bases included; of torch's own, `forward` alone."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            for found in vars(base).values():
                yield getattr(found, "fget", None) or getattr(found, "__func__", found)
    yield getattr(kind, "forward", None)


def positive(argument: str, value: Any, least: int = 1) -> None:
    """Raise unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RholossError(f"`{argument}` is {value!r}; give a whole number of at least {least}.")
