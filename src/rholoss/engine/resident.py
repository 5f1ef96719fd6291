"""Data that lies on the device, where rows are gathered by number, augmented and normalised."""

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
    """Augmentation for images: a random crop of the padded image, and a random horizontal flip.

    Args:
        pad: pixels of zeros on each side of the image before the crop, which has the image's own size; 0 for
            no crop. 4 is usual for images of 32 x 32.
        flip: mirror each image with probability 1/2.
    """

    pad: int = 4
    flip: bool = True


@dataclass(frozen=True)
class Examples:
    """Rows of the data as a step uses them: their ids [n], inputs [n, ...] and targets [n]."""

    index: Tensor
    x: Tensor
    y: Tensor

    def take(self, b: Tensor) -> Examples:
        """The rows at these positions."""
        return Examples(self.index[b], self.x[b], self.y[b])

    def whole(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets for a model in float32; inputs of whole numbers (tokens) stay as they are."""
        return self.x.float() if self.x.is_floating_point() else self.x, self.y


class Resident:
    """A data set whose inputs and targets lie on one device.

    Raises before it takes memory that the device does not have; `memory_needed` tells how much it takes.

    Args:
        inputs: array or tensor [N, ...]. Images are [N, C, H, W], uint8 in 0..255 or floats in 0..1.
        targets: array or tensor [N], or [N, ...] for tasks with many labels in a row. Classes are whole
            numbers from 0 on.
        ids: the id of each row, whole numbers from 0 on; by default the row numbers 0, 1, 2, ...
        mean, std: normalise inputs to (input - mean) / std, of pixels in 0..1: a number each, or one for
            each channel. None leaves the inputs as they are.
        augment: a `CropFlip`, for images in training; None for no augmentation.
        device: where the data lies; by default a GPU if there is one.
        dtype: of the inputs that the model gets; float32 by default. Token ids need torch.long.
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
        if not isinstance(inputs, Tensor):  # on the host until the check that the device has room
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
        if self.images:  # channels last and padded once, so that a crop is a plain gather
            pad = augment.pad if augment else 0
            inputs = torch.nn.functional.pad(inputs, (pad, pad, pad, pad)).permute(0, 2, 3, 1)
        self.inputs = inputs.contiguous().to(self.device)
        self.targets, self.ids = targets.to(self.device), ids.to(self.device)
        channels = self.inputs.shape[-1]
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
                f"{mean} and {std}; pass both, or neither for inputs that are normalised already."
            )
        one = 1 if floats else 255  # the value of a pixel of full brightness
        scale = 1 / (one * torch.tensor(std, device=self.device))
        return scale, -torch.tensor(mean, device=self.device) * one * scale

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Tensor) -> Resident:
        """A new data set of these rows only, which keep their ids; the data is copied.

        Args:
            rows: row numbers, a tensor on the device.
        """
        taken = copy.copy(self)
        taken.inputs, taken.targets = self.inputs[rows], self.targets[rows]
        taken.ids = self.ids[rows]
        return taken

    def with_targets(self, targets: Any) -> Resident:
        """A data set with the same inputs and ids and other targets; the inputs are shared.

        Args:
            targets: one for each row, as in the constructor.
        """
        other = copy.copy(self)
        other.targets = as_many(self.targets, targets)
        return other

    def draw(self, num: int, generator: Generator) -> Tensor | None:
        """Draw the random numbers that `batch` needs to augment `num` rows; None without `augment`.

        Args:
            num: the number of rows.
            generator: where the numbers come from.
        """
        if self.augment is None:
            return None
        drawn = torch.rand(3, num, generator=generator, device=generator.device)
        return drawn.to(self.device, non_blocking=True)

    def batch(self, rows: Tensor, drawn: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The inputs and targets of these rows, normalised, and augmented if random numbers are given.

        Args:
            rows: row numbers, a tensor on the device.
            drawn: what `draw` returned for them; None for no augmentation.
        """
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
    """The ids of `num` rows, by default 0, 1, 2, ...; raises if they are no good as places in a table."""
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
    """Targets as a tensor. Classes become int64, as losses need; bytes with many labels in a row stay."""
    targets = torch.as_tensor(targets)
    if targets.is_floating_point() or targets.dtype == torch.bool:
        return targets
    return targets.long() if targets.ndim == 1 or targets.dtype != torch.uint8 else targets


def check_classes(targets: Tensor, loss: str) -> None:
    """Raise if a row has a negative label, or no label that counts.

    For torch a row labelled -100 has the loss 0, and any other negative label is an error. In a row of
    tokens some may be labelled -100, but not all: its loss would be 0, and once other rows are learnt its
    score would be the highest.
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
            f"{int(rows[0])}: there is nothing to learn from them. Leave them out (`data.take(rows)`)."
        )


def as_many(before: Tensor, targets: Any) -> Tensor:
    """New targets in place of those `before`: as many, on the same device."""
    targets = as_targets(targets)
    if len(targets) != len(before):
        raise RholossError(
            f"`targets` has {len(targets)} rows, but the data has {len(before)}; give one for each."
        )
    return targets.to(before.device)


def whole_name(device: str | torch.device) -> torch.device:
    """The device; 'cuda' gets its number, so that it compares equal to the device of a tensor on it."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def memory_needed(inputs: Any, targets: Any, augment: CropFlip | None = None) -> int:
    """The bytes that a `Resident` with these arguments would take on the device."""
    if not isinstance(inputs, Tensor):
        inputs = torch.as_tensor(inputs, device="cpu")
    per_row = inputs[0].numel() if len(inputs) else 0
    if augment is not None and inputs.ndim == 4:
        channels, height, width = inputs.shape[1:]
        per_row = channels * (height + 2 * augment.pad) * (width + 2 * augment.pad)
    target = as_targets(targets[:1])
    of_id = 8
    of_target = target.numel() * target.element_size()
    return len(inputs) * (per_row * inputs.element_size() + of_target + of_id)


def _check_memory(needed: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if needed > 0.8 * free:
        torch.cuda.empty_cache()  # torch keeps the memory of deleted tensors, which is free for us
        free, total = torch.cuda.mem_get_info(device)
    if needed > 0.8 * free:
        raise RholossError(
            f"The data needs {needed / 2**30:.2f} GiB on {device}, but {free / 2**30:.2f} of "
            f"{total / 2**30:.2f} GiB are free, and a step needs some too. Keep it on the host "
            "(`rholoss.engine.Streamed`, or a loader and `Selector`), store it as uint8, or free memory."
        )
