"""Columns of padded text that no selected row needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rholoss.losses import IGNORED


def trimmed(batch: Mapping[str, Any], multiple: int = 1) -> dict[str, Any]:
    """The batch without the columns that are padding in all its rows, on either side.

    Integer tensors with the shape of the attention mask are cut to a `multiple` of columns; columns with
    labels that count stay. Nothing is cut if another tensor might have the same columns: boxes [B, L, 4],
    weights of tokens. Waits for the device, as the Trainer does at every step anyway.
    """
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return dict(batch)

    def is_cut(value: Any) -> bool:
        whole = isinstance(value, Tensor) and not value.is_floating_point()
        return whole and value.shape == mask.shape

    rest = [value for value in batch.values() if isinstance(value, Tensor) and not is_cut(value)]
    if any(mask.shape[1] in value.shape[1:] for value in rest):
        return dict(batch)
    labels = batch.get("labels")
    used_L = mask.ne(0).any(0)
    if isinstance(labels, Tensor) and labels.shape == mask.shape:
        used_L = used_L | labels.ne(IGNORED).any(0)
    used = used_L.nonzero().flatten()
    if not len(used):
        return dict(batch)
    first, last = used[[0, -1]].tolist()
    if any("positions" in str(name) for name in batch):
        first = 0  # those of an answer count from the left edge
    width = -(-(last + 1 - first) // multiple) * multiple
    last = min(first + width, len(used_L))
    first = max(0, last - width)
    # Contiguous, as it was: models flatten labels with `view`.
    return {n: v[:, first:last].contiguous() if is_cut(v) else v for n, v in batch.items()}
