"""Rows of a batch that are sent between ranks: which leaves have rows, and how they become one message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rholoss import data


def row_leaves(batch: Any, shared: Sequence[str], rows: int) -> list[tuple[data.Path, Any]]:
    """The leaves that have a row for each example."""
    found: list[tuple[data.Path, Any]] = []

    def look(path: data.Path, leaf: Any) -> Any:
        by_row = isinstance(leaf, (Tensor, np.ndarray, list, tuple))
        if by_row and getattr(leaf, "ndim", 1) > 0 and not data.is_shared(path, shared):
            found.append((path, leaf))
        return leaf

    data.tree_map(look, batch, whole=data.lists_by_row(rows, shared))
    return found


def leaves_at(batch: Any, paths: Sequence[data.Path]) -> dict[data.Path, Any]:
    """What stands at these paths."""
    found: dict[data.Path, Any] = {}
    data.tree_map(found.__setitem__, batch, whole=lambda path, _: path in paths)
    return {path: found[path] for path in paths}


def row_shape(leaf: Any) -> str:
    """Shape and type of a row, in words."""
    if isinstance(leaf, (list, tuple)):
        return "list"
    return f"{tuple(leaf.shape[1:])} {str(leaf.dtype).removeprefix('torch.')}"


def pack(columns: Sequence[Tensor], rows: int) -> Tensor:
    """The columns side by side, as bytes [rows, width]: one message, whatever their types."""
    wide = [column for column in columns if _width(column)]
    flat = [_plain(column.detach().reshape(rows, _width(column))) for column in wide]
    parts = [column.view(torch.uint8) for column in flat]
    return torch.cat(parts, 1) if parts else torch.empty(rows, 0, dtype=torch.uint8)


def _plain(column: Tensor) -> Tensor:
    """A contiguous copy, also where there are no rows: only such tensors can be viewed as bytes."""
    return column.clone(memory_format=torch.contiguous_format)


def _width(column: Tensor) -> int:
    return math.prod(column.shape[1:])


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Columns with the types and row shapes of `like`."""
    columns, start = [], 0
    for column in like:
        shape = (len(packed), *column.shape[1:])
        width = column.element_size() * _width(column)
        part = _plain(packed[:, start : start + width])
        columns.append(part.view(column.dtype).reshape(shape) if width else column.new_empty(shape))
        start += width
    return columns


def as_leaf(moved: Tensor, leaf: Any) -> Any:
    """Rows that arrived, as the kind and on the device of the leaf that they replace."""
    return moved.to(leaf.device) if isinstance(leaf, Tensor) else moved.numpy()
