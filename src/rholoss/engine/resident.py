"""Data that lives on the device: rows are gathered by number, augmented and normalised there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from rholoss.errors import RholossError
from rholoss.il.build import LARGE_TABLE
from rholoss.il.ids import as_ids, shown
from rholoss.losses import IGNORED, TASKS, no_label_counts


@dataclass(frozen=True)
class CropFlip:
    """Random crop after padding by `pad` with zeros, and random horizontal flip."""

    pad: int = 4
    flip: bool = True


@dataclass(frozen=True)
class Examples:
    """Rows of the data as a step uses them: ids [n], inputs [n, ...], targets [n]."""

    index: Tensor
    x: Tensor
    y: Tensor

    def take(self, b: Tensor) -> Examples:
        """Those at these positions."""
        return Examples(self.index[b], self.x[b], self.y[b])

    def whole(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets for a model in float32; numbers of tokens stay what they are."""
        return self.x.float() if self.x.is_floating_point() else self.x, self.y


class Resident:
    """Inputs and targets on one device.

    Args:
        inputs: [N, ...]; images as [N, C, H, W]: uint8 in 0..255, or floats in 0..1.
        targets: [N].
        ids: of the rows, whole numbers; by default 0, 1, 2, ...
        mean, std: of pixels in 0..1, a number or one for each channel; None leaves the inputs as they are.
        augment: a `CropFlip`, for images.
        device: by default a GPU if there is one.
        dtype: of the inputs that come out; float32 by default (tokens: torch.long).
    """

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        *,
        ids: Any = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        augment: CropFlip | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device = whole_name(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if not isinstance(inputs, Tensor):  # on the host, until it is known that they fit
            inputs = torch.as_tensor(inputs, device="cpu")
        targets = as_targets(targets)
        ids = checked_ids(ids, len(inputs), len(targets))
        self.images = inputs.ndim == 4
        if augment is not None and not self.images:
            raise RholossError(
                f"`augment` is for images [N, C, H, W], but `inputs` is {tuple(inputs.shape)}; pass "
                "augment=None."
            )
        self.augment, self.dtype = augment, dtype
        self.bytes = memory_needed(inputs, targets, augment)
        _check_memory(self.bytes, self.device)
        self.size = tuple(inputs.shape[2:])
        if self.images:  # channels last, padded once, so that a crop is a plain gather
            pad = augment.pad if augment else 0
            inputs = torch.nn.functional.pad(inputs, (pad, pad, pad, pad)).permute(0, 2, 3, 1)
        self.inputs = inputs.contiguous().to(self.device)
        self.targets, self.ids = targets.to(self.device), ids.to(self.device)
        channels = self.inputs.shape[-1]  # last, here
        self.scale, self.shift = self._affine(mean, std, channels, inputs.dtype.is_floating_point)
        self.whole = torch.arange(max(self.size or (0,)), device=self.device)

    def _affine(
        self,
        mean: float | Sequence[float] | None,
        std: float | Sequence[float] | None,
        channels: int,
        floats: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        if mean is None and std is None:
            return None, None
        mean, std = ([n] if isinstance(n, (int, float, np.number)) else n for n in (mean, std))
        if mean is None or std is None or not {len(mean), len(std)} <= {1, channels}:
            raise RholossError(
                f"`mean` and `std` must have one value, or one for each of {channels} channels, but are "
                f"{mean} and {std}; pass both, or neither for inputs that are as they should be."
            )
        one = 1 if floats else 255  # what stands for a pixel of 1
        scale = 1 / (one * torch.tensor(std, device=self.device))
        return scale, -torch.tensor(mean, device=self.device) * one * scale

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Tensor) -> Resident:
        """A data set of these rows alone, with their ids."""
        taken = copy.copy(self)
        taken.inputs, taken.targets = self.inputs[rows], self.targets[rows]
        taken.ids = self.ids[rows]
        return taken

    def with_targets(self, targets: Any) -> Resident:
        """The same inputs with other targets; the inputs are shared."""
        other = copy.copy(self)
        other.targets = as_many(self.targets, targets)
        return other

    def draw(self, num: int, generator: Generator) -> Tensor | None:
        """Random numbers for augmenting `num` rows; None if nothing is augmented."""
        if self.augment is None:
            return None
        drawn = torch.rand(3, num, generator=generator, device=generator.device)
        return drawn.to(self.device, non_blocking=True)

    def batch(self, rows: Tensor, drawn: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these rows, augmented by what was drawn for them."""
        x = self._crop(rows, drawn) if self.images else self.inputs.index_select(0, rows)
        if self.scale is not None and self.shift is not None:
            x = x * self.scale + self.shift
        if self.images:
            x = x.permute(0, 3, 1, 2)
        return x.to(self.dtype), self.targets.index_select(0, rows)

    def _crop(self, rows: Tensor, drawn: Tensor | None) -> Tensor:
        if self.augment is None:
            return self.inputs.index_select(0, rows)
        height, width = self.size
        pad, across = self.augment.pad, self.whole[:width]
        if drawn is None:
            return self.inputs.index_select(0, rows)[:, pad : pad + height, pad : pad + width]
        top, left = (drawn[:2] * (2 * pad + 1)).long().clamp(max=2 * pad)
        flip = drawn[2] < (0.5 if self.augment.flip else 0.0)
        columns = torch.where(flip[:, None], width - 1 - across, across) + left[:, None]
        lines = self.whole[:height] + top[:, None]
        return self.inputs[rows[:, None, None], lines[:, :, None], columns[:, None, :]]


def checked_ids(ids: Any, num: int, num_targets: int) -> Tensor:
    """Ids of `num` rows, by default 0, 1, 2, ...; raises unless there can be tables by them."""
    found = np.arange(num) if ids is None else as_ids(ids)
    if not num == num_targets == len(found) or num == 0:
        raise RholossError(
            f"`inputs`, `targets` and `ids` must have as many rows, and at least one, but have "
            f"{num}, {num_targets} and {len(found)}."
        )
    if isinstance(found, list) or found.min() < 0 or found.max() >= max(100 * num, LARGE_TABLE):
        some = found[:3] if isinstance(found, list) else [found.min(), found.max()]
        raise RholossError(
            f"`ids` hold {shown(some)}, but the engine keeps tables by id for its {num} rows: leave `ids` "
            "out, or give row numbers from 0. (`Selector` takes any ids.)"
        )
    return torch.from_numpy(found)


def as_targets(targets: Any) -> Tensor:
    """Targets as a tensor; classes as int64, which losses ask for. Bytes stay if a row has many labels."""
    targets = torch.as_tensor(targets)
    if targets.is_floating_point() or targets.dtype == torch.bool:
        return targets
    return targets.long() if targets.ndim == 1 or targets.dtype != torch.uint8 else targets


def check_classes(targets: Tensor, loss: str) -> None:
    """Raise where a label is no class: torch gives a row labelled -100 the loss 0, and stops at others.

    Tokens may be labelled so, but not all of a row: with nothing asked of it, it would win as soon as
    others are learnt.
    """
    if loss == "classification" and not targets.is_floating_point():
        rows = (targets < 0).flatten().nonzero()
        if len(rows):
            raise RholossError(
                f"`targets` hold {int(targets.min())}, which is no class: {len(rows)} labels are below 0, "
                f"the first in row {int(rows[0])}. Leave rows without a label out (`data.take(rows)`)."
            )
    empty = no_label_counts((targets, targets), TASKS[loss]) if loss in TASKS else None
    if empty is not None and empty.any():
        rows = empty.nonzero()
        raise RholossError(
            f"No label of {len(rows)} rows counts (all are {IGNORED}), the first of which is row "
            f"{int(rows[0])}, so that there is nothing to learn from them. Leave them out "
            "(`data.take(rows)`)."
        )


def as_many(before: Tensor, targets: Any) -> Tensor:
    """Other targets in their place."""
    targets = as_targets(targets)
    if len(targets) != len(before):
        raise RholossError(
            f"`targets` has {len(targets)} rows, but the data has {len(before)}; give one for each."
        )
    return targets.to(before.device)


def whole_name(device: str | torch.device) -> torch.device:
    """'cuda' with its number, so that it equals the device of a tensor that lies there."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def memory_needed(inputs: Any, targets: Any, augment: CropFlip | None = None) -> int:
    """Bytes that a `Resident` of the same arguments takes on the device."""
    if not isinstance(inputs, Tensor):
        inputs = torch.as_tensor(inputs, device="cpu")
    per_row = inputs[0].numel() if len(inputs) else 0
    if augment is not None and inputs.ndim == 4:
        channels, height, width = inputs.shape[1:]
        per_row = channels * (height + 2 * augment.pad) * (width + 2 * augment.pad)
    target = as_targets(targets[:1])
    of_row = (
        per_row * inputs.element_size() + target.numel() * target.element_size() + 8
    )  # and an id
    return len(inputs) * of_row


def _check_memory(needed: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if needed > 0.8 * free:
        torch.cuda.empty_cache()  # torch keeps the memory of tensors that are gone: it can be had
        free, total = torch.cuda.mem_get_info(device)
    if needed > 0.8 * free:
        raise RholossError(
            f"The data needs {needed / 2**30:.2f} GiB on {device}, but {free / 2**30:.2f} of "
            f"{total / 2**30:.2f} GiB are free, and a step needs some too. Keep it on the host "
            "(`rholoss.engine.Streamed`, or a loader and `Selector`), store it as uint8, or free memory."
        )
