"""Data that does not fit the device: inputs stay on the host, and each step finds its own brought over.

Targets and ids are small and lie on the device. The inputs of a step are read into pinned memory while
the step before it runs, copied over on a stream of their own, and put where the (captured) step reads them.
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
    """Inputs on the host (in memory or a memory-mapped file), for the same `Trainer` as `Resident`.

    Takes what `Resident` takes, and gives the same batches. `batch` itself reads the rows there and
    then; what a trainer needs is read ahead through a `Window`.
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
        self._where = torch.arange(len(self.inputs), device="cpu")  # of each row, among the inputs
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
        """These inputs on the device, treated as all are."""
        return Resident(inputs, torch.zeros(len(inputs), dtype=torch.long), **self._options)

    def buffer(self, rows: int, **options: Any) -> Tensor:
        """Room for so many inputs as they are on the host."""
        options = {"device": "cpu", **options}
        return torch.empty(rows, *self.inputs.shape[1:], dtype=self._kind, **options)

    def read(self, rows: Tensor, out: Tensor) -> Tensor:
        """Inputs of these rows (on the host) into `out`."""
        places = self._where[rows]
        if isinstance(self.inputs, Tensor):
            return torch.index_select(self.inputs, 0, places, out=out)
        # Not through torch, which would not have a file that is read-only.
        np.take(self.inputs, places.numpy(), axis=0, out=out.numpy(), mode="clip")
        return out

    def draw(self, num: int, generator: Generator) -> Tensor | None:
        """As `Resident.draw`."""
        return self._like.draw(num, generator)

    def batch(self, rows: Tensor, drawn: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Resident.batch`, read now; waits for the device."""
        brought = self._resident(self.read(rows.cpu(), self.buffer(len(rows))))
        x, _ = brought.batch(torch.arange(len(rows), device=self.device), drawn)
        return x, self.targets.index_select(0, rows)

    def take(self, rows: Tensor) -> Streamed:
        """A data set of these rows alone, with their ids; the inputs are shared."""
        taken = copy.copy(self)
        taken.targets, taken.ids = self.targets[rows], self.ids[rows]
        taken._where = self._where[rows.cpu()]
        return taken

    def with_targets(self, targets: Any) -> Streamed:
        """The same inputs with other targets."""
        other = copy.copy(self)
        other.targets = as_many(self.targets, targets)
        return other

    def window(self, size: int) -> Window:
        """Where a trainer finds its next rows, at most `size` at a time."""
        return Window(self, size)


class Window:
    """The inputs of one step at a fixed place on the device, and those of the next on their way.

    `bring` puts the rows of this step in place, `prefetch` starts on the next; both return at once.
    """

    def __init__(self, data: Streamed, size: int) -> None:
        self.data, device = data, data.device
        self.slot = data._resident(torch.zeros_like(data.buffer(size)))
        self._places = torch.arange(size, device=device)
        on_gpu = device.type == "cuda"
        self._stage = data.buffer(size, device=device)
        self._pinned = [data.buffer(size, pin_memory=on_gpu) for _ in range(2)]
        self._side = torch.cuda.Stream(device) if on_gpu else None
        # Per pinned buffer: its last copy is made. Then: the stage is free again.
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._free = torch.cuda.Event() if on_gpu else None
        if self._free is not None:  # not before what had the stage's memory last is done with it
            self._free.record(torch.cuda.current_stream(device))
        self._turn, self._coming = 0, self.data._where[:0]

    def prefetch(self, rows: Tensor | None) -> None:
        """Read rows (on the host) and send them on their way."""
        if rows is None:
            return
        turn, self._turn = self._turn, 1 - self._turn
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()  # two batches ago: long done
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
        """Put rows (on the host) in place: those that were prefetched, or else now."""
        assert rows is not None  # dealt just now
        if not torch.equal(self._coming, rows):
            self.prefetch(rows)
        stage, place = self._stage[: len(rows)], self.slot.inputs[: len(rows)]
        if self._side is not None:
            torch.cuda.current_stream(self.data.device).wait_stream(self._side)
        if self.data.images:  # inside the border that crops reach into
            pad = self.data.augment.pad if self.data.augment else 0
            height, width = self.data.size
            place = place[:, pad : pad + height, pad : pad + width]
            stage = stage.permute(0, 2, 3, 1)
        place.copy_(stage)
        if self._free is not None:
            self._free.record(torch.cuda.current_stream(self.data.device))

    def batch(self, rows: Tensor, drawn: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the rows that were brought."""
        x, _ = self.slot.batch(self._places[: len(rows)], drawn)
        return x, self.data.targets.index_select(0, rows)
