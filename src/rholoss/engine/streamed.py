"""Data that does not fit the device: inputs stay on the host, and those of each step are copied over.

Targets and ids are small and lie on the device. While a step runs, the inputs of the next one are read into
pinned memory and copied to the device on a stream of their own. When the next step begins, they are put in
the place that the (captured) step reads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from rholoss.engine.resident import CropFlip, Resident, as_many, as_targets, checked_ids
from rholoss.errors import RholossError


class Streamed:
    """A data set whose inputs stay on the host, in memory or in a memory-mapped file.

    It gives the same batches as a `Resident` with the same arguments, and the same `Trainer` takes it. A
    trainer reads its rows ahead while the device works; `batch` reads them when it is called.

    Args:
        inputs: array, memory-mapped array or CPU tensor [N, ...]. Images are [N, C, H, W], uint8 in 0..255
            or floats in 0..1.
        targets: array or tensor [N], or [N, ...] for tasks with many labels in a row.
        ids: the id of each row, whole numbers from 0 on; by default the row numbers 0, 1, 2, ...
        mean, std: normalise inputs to (input - mean) / std, of pixels in 0..1: a number each, or one for
            each channel. None leaves the inputs as they are.
        augment: a `CropFlip`, for images in training; None for no augmentation.
        device: where batches go, and where targets and ids lie; by default a GPU if there is one.
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
        if isinstance(inputs, Tensor) and inputs.device.type != "cpu":
            raise RholossError(
                f"`inputs` lie on {inputs.device} already; `Streamed` is for data on the host. Use "
                "`Resident`."
            )
        self.inputs = inputs if isinstance(inputs, Tensor) else np.asanyarray(inputs)
        targets = as_targets(targets)
        ids = checked_ids(ids, len(self.inputs), len(targets))
        self._options: dict[str, Any] = {
            "mean": mean, "std": std, "augment": augment, "device": device, "dtype": dtype
        }  # fmt: skip
        self._where = torch.arange(len(self.inputs), device="cpu")  # places in `inputs`
        sample = self.inputs[:1]
        self._kind = torch.as_tensor(
            sample.copy() if isinstance(sample, np.ndarray) else sample
        ).dtype
        self._like = self._resident(torch.zeros_like(self.buffer(1)))
        self.device, self.images = self._like.device, self._like.images
        self.size, self.augment = self._like.size, augment
        self.targets, self.ids = targets.to(self.device), ids.to(self.device)

    def __len__(self) -> int:
        return len(self.targets)

    def _resident(self, inputs: Tensor) -> Resident:
        """These inputs on the device, to be normalised and augmented with the options of this data."""
        return Resident(inputs, torch.zeros(len(inputs), dtype=torch.long), **self._options)

    def buffer(self, rows: int, **options: Any) -> Tensor:
        """An empty tensor for inputs as they are stored on the host.

        Args:
            rows: the number of inputs.
            options: for `torch.empty`, such as `pin_memory`; by default it is on the CPU.
        """
        options = {"device": "cpu", **options}
        return torch.empty(rows, *self.inputs.shape[1:], dtype=self._kind, **options)

    def read(self, rows: Tensor, out: Tensor) -> Tensor:
        """Read the stored inputs of these rows into `out`, and return it.

        Args:
            rows: row numbers, a tensor on the host.
            out: a tensor as `buffer` returns it, of as many rows.
        """
        places = self._where[rows]
        if isinstance(self.inputs, Tensor):
            return torch.index_select(self.inputs, 0, places, out=out)
        # With numpy: torch makes no tensor of a read-only file.
        np.take(self.inputs, places.numpy(), axis=0, out=out.numpy(), mode="clip")
        return out

    def draw(self, num: int, generator: Generator) -> Tensor | None:
        """Draw the random numbers that `batch` needs to augment `num` rows: as `Resident.draw`."""
        return self._like.draw(num, generator)

    def batch(self, rows: Tensor, drawn: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The inputs and targets of these rows, read now: as `Resident.batch`. Waits for the device."""
        brought = self._resident(self.read(rows.cpu(), self.buffer(len(rows))))
        x, _ = brought.batch(torch.arange(len(rows), device=self.device), drawn)
        return x, self.targets.index_select(0, rows)

    def take(self, rows: Tensor) -> Streamed:
        """A data set of these rows only, which keep their ids; the inputs are shared.

        Args:
            rows: row numbers, a tensor on the device.
        """
        taken = copy.copy(self)
        taken.targets, taken.ids = self.targets[rows], self.ids[rows]
        taken._where = self._where[rows.cpu()]
        return taken

    def with_targets(self, targets: Any) -> Streamed:
        """A data set with the same inputs and ids and other targets; the inputs are shared.

        Args:
            targets: one for each row, as in the constructor.
        """
        other = copy.copy(self)
        other.targets = as_many(self.targets, targets)
        return other

    def window(self, size: int) -> Window:
        """Make the `Window` through which a trainer reads its rows ahead.

        Args:
            size: the most rows of one step.
        """
        return Window(self, size)


class Window:
    """A fixed place on the device with the inputs of this step, while those of the next are copied over.

    `bring` puts the rows of this step in place, and `prefetch` starts to copy the next. Neither waits for the
    device to finish.
    """

    def __init__(self, data: Streamed, size: int) -> None:
        self.data, device = data, data.device
        self.slot = data._resident(torch.zeros_like(data.buffer(size)))
        self._places = torch.arange(size, device=device)
        on_gpu = device.type == "cuda"
        self._stage = data.buffer(size, device=device)
        self._pinned = [data.buffer(size, pin_memory=on_gpu) for _ in range(2)]
        self._side = torch.cuda.Stream(device) if on_gpu else None
        # `_copied`: the last copy out of each pinned buffer is done. `_free`: the stage may be overwritten.
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._free = torch.cuda.Event() if on_gpu else None
        if self._free is not None:  # work queued until now may still use the memory of the stage
            self._free.record(torch.cuda.current_stream(device))
        self._turn, self._coming = 0, self.data._where[:0]

    def prefetch(self, rows: Tensor | None) -> None:
        """Read the rows (numbers on the host) and start to copy them to the device; None does nothing."""
        if rows is None:
            return
        turn, self._turn = self._turn, 1 - self._turn
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()  # hardly ever waits: that copy was two batches ago
        host = self.data.read(rows, self._pinned[turn][: len(rows)])
        self._coming = rows
        if self._side is None or self._free is None or copied is None:
            self._stage[: len(rows)].copy_(host)
            return
        self._side.wait_event(self._free)
        with torch.cuda.stream(self._side):
            self._stage[: len(rows)].copy_(host, non_blocking=True)
            copied.record(self._side)

    def bring(self, rows: Tensor | None) -> None:
        """Put the rows (numbers on the host) in place; they are read now if they were not prefetched."""
        assert rows is not None  # the caller has just made sure that a batch is left
        if not torch.equal(self._coming, rows):
            self.prefetch(rows)
        stage, place = self._stage[: len(rows)], self.slot.inputs[: len(rows)]
        if self._side is not None:
            torch.cuda.current_stream(self.data.device).wait_stream(self._side)
        if self.data.images:  # inside the border of zeros
            pad = self.data.augment.pad if self.data.augment else 0
            height, width = self.data.size
            place = place[:, pad : pad + height, pad : pad + width]
            stage = stage.permute(0, 2, 3, 1)
        place.copy_(stage)
        if self._free is not None:
            self._free.record(torch.cuda.current_stream(self.data.device))

    def batch(self, rows: Tensor, drawn: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The inputs and targets of the rows that `bring` put in place."""
        x, _ = self.slot.batch(self._places[: len(rows)], drawn)
        return x, self.data.targets.index_select(0, rows)
