"""Views of a data set: what is inside them, the labels of their rows, their items without ids."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from rholoss.indexed import Indexed, column_of
from rholoss.losses import TARGET_KEYS


def rows_inside(dataset: Any) -> tuple[Any, np.ndarray]:
    """The data set inside all views, and which of its rows each row is."""
    if isinstance(dataset, Indexed):
        return rows_inside(dataset.dataset)
    if isinstance(dataset, Subset):
        root, rows = rows_inside(dataset.dataset)
        return root, rows[np.asarray(dataset.indices, dtype=np.int64)]
    return dataset, np.arange(len(dataset))


def root_of(dataset: Any) -> Any:
    """The data set inside all views."""
    while isinstance(dataset, (Indexed, Subset)):
        dataset = dataset.dataset
    return dataset


def ids_at(dataset: Any, rows: np.ndarray) -> Any:
    """The ids of some rows, without anything in memory that is as long as the data set (`ids_of_rows` is)."""
    if isinstance(dataset, Indexed):
        ids = dataset.ids
        return ids[rows] if isinstance(ids, np.ndarray) else [ids[row] for row in rows]
    if isinstance(dataset, Subset):
        inside = dataset.indices
        return ids_at(dataset.dataset, np.array([int(inside[row]) for row in rows], np.int64))
    return rows


def labels_of(dataset: Any) -> Any:
    """One label for each row, from the outermost view that has some; None if none has."""
    rows: np.ndarray | None = None  # all of them
    while True:
        wrapped = isinstance(dataset, Indexed)
        found = None if wrapped else _own_labels(dataset)
        if found is not None:
            return found if rows is None else _at(found, rows)
        if isinstance(dataset, Subset):
            indices = np.asarray(dataset.indices, dtype=np.int64)
            rows = indices if rows is None else indices[rows]
        elif not wrapped:
            return None
        dataset = dataset.dataset


def _own_labels(dataset: Any) -> Any:
    candidates = [getattr(dataset, name, None) for name in ("targets", "labels")]
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        candidates.append(dataset.tensors[-1])
    columns = getattr(dataset, "column_names", None)  # a Hugging Face data set
    if isinstance(columns, list):
        candidates += [column_of(dataset, key) for key in TARGET_KEYS if key in columns]
    for found in candidates:
        if isinstance(found, (Tensor, np.ndarray, list, tuple)) and len(found) == len(dataset):
            return found
    return None


def _at(labels: Any, rows: np.ndarray) -> Any:
    if isinstance(labels, Tensor):
        return labels[torch.from_numpy(rows)]
    return labels[rows] if isinstance(labels, np.ndarray) else [labels[i] for i in rows]


def evenly(length: int, most: int) -> np.ndarray:
    """At most so many of the places 0 ... length - 1, evenly spaced, the first and the last among them."""
    return np.linspace(0, length - 1, min(length, most)).astype(np.int64)


@contextmanager
def own_randomness(device: torch.device | None = None) -> Iterator[None]:
    """Restore the random state (torch, numpy, Python) afterwards."""
    python, legacy_numpy = random.getstate(), np.random.get_state()
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy_numpy)


def seed_all(seed: int) -> None:
    """Seed torch, numpy and Python; inside `own_randomness`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
