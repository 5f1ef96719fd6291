"""Plans in a loop of your own: which rows a pass trains on, from the losses that training has seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from rholoss import distributed
from rholoss.core import step_generator
from rholoss.data import ids_of_rows
from rholoss.errors import RholossError
from rholoss.memory import Memory, Plan, Situation, check_epoch
from rholoss.sampler import EPOCHS


class Planned(Sampler[int]):
    """Rows of one pass after another, for `DataLoader(dataset, sampler=...)`; nothing is scored.

        rows = rho.Planned(train, rho.Remembered(math.log(10)), passes=20)  # train = rho.WithIndex(...)
        loader = DataLoader(train, batch_size=128, sampler=rows)
        for _ in range(20):
            for index, x, y in loader:
                loss_k = F.cross_entropy(model(x), y, reduction="none")
                rows.remember(index, loss_k).backward()

    A training step knows the loss of each of its rows anyway. `remember` keeps the last `depth` of each, on
    the device and without waiting for it, and gives back their mean (weighted, if the plan has weights) to
    call `backward` on. When a pass begins, the plan decides on its rows; the order is a function of (seed,
    pass). Of several ranks each gets its part, and what all of them remember is put together first; a part
    has the same number of rows on each rank.

    Args:
        dataset: what the loader reads, with the ids that its items carry (`WithIndex`).
        plan: e.g. `Remembered`, or a function of your own.
        passes: how many there will be, from which the plan knows how far training is.
        depth: losses that are remembered of each row.
    """

    def __init__(
        self, dataset: Any, plan: Plan, *, passes: int, seed: int = 0, depth: int = 4
    ) -> None:
        ids = ids_of_rows(dataset)
        if passes < 1 or not len(ids):
            raise RholossError(
                f"`passes` is {passes} and the data set has {len(ids)} rows; there must be one of each "
                "at least."
            )
        self.plan, self.passes, self.seed = plan, passes, seed
        self.begun = 0  # passes
        self.memory = Memory(len(ids), torch.device("cpu"), depth)
        self.weight: Tensor | None = None  # of each row in this pass
        self.left_out = 0  # rows that this pass does without
        self._ranks = distributed.place()[1]
        self._num = len(ids) // self._ranks  # rows of this pass on this rank
        counted = isinstance(ids, np.ndarray) and np.array_equal(ids, np.arange(len(ids)))
        self._row_of = None if counted else {key: row for row, key in enumerate(list(ids))}
        self._merged = self.memory.seen.clone()

    def __len__(self) -> int:
        """Rows of the pass that was begun last, on this rank; all of them before the first."""
        return self._num

    @property
    def wrong(self) -> float | None:
        """Share of wrong labels that the plan has found; None as long as it has not, or none to speak of."""
        return self.memory.notes.get("wrong")

    def remember(self, index: Any, loss_k: Tensor) -> Tensor:
        """Keep the losses of these rows, as training sees them; returns their mean for `backward`."""
        row_k = self._rows(index)
        if loss_k.shape != row_k.shape:
            raise RholossError(
                f"`loss_k` has shape {tuple(loss_k.shape)}, but must have one loss for each of the "
                f"{len(row_k)} rows of `index`: compute it with reduction='none'."
            )
        self._move(loss_k.device)
        row_k = row_k.to(loss_k.device, non_blocking=True)
        self.memory.record(row_k, loss_k)
        return loss_k.mean() if self.weight is None else (loss_k * self.weight[row_k]).mean()

    def __iter__(self) -> Iterator[int]:
        if self._ranks > 1:
            self._put_together()
        seen, recent = self.memory.seen.cpu(), self.memory.recent.cpu()
        generator = step_generator(self.seed, EPOCHS + self.begun)
        progress, notes = self.begun / self.passes, self.memory.notes
        epoch = self.plan(Situation(progress, seen, recent, None, generator, notes))
        check_epoch(epoch, len(seen))
        order = epoch.rows[torch.randperm(len(epoch.rows), generator=generator)]
        rank = distributed.place()[0]
        self._num, self.left_out = len(order) // self._ranks, len(seen) - len(order)
        self.weight = None if epoch.weight is None else epoch.weight.to(self.memory.seen.device)
        self.begun += 1
        yield from order[rank * self._num : (rank + 1) * self._num].tolist()

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on. Take it between two passes."""
        return {"begun": self.begun, "memory": self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the next pass."""
        self.begun = state["begun"]
        self.memory.load_state_dict(state["memory"])
        self._merged = self.memory.seen.clone()

    def _rows(self, index: Any) -> Tensor:
        if self._row_of is None:
            return torch.as_tensor(index)
        keys = index.tolist() if hasattr(index, "tolist") else list(index)
        unknown = [key for key in keys if key not in self._row_of]
        if unknown:
            raise RholossError(
                f"`index` has {unknown[0]!r}, which is no id of the data set; pass the ids that came with "
                "the batch."
            )
        return torch.tensor([self._row_of[key] for key in keys])

    def _move(self, device: torch.device) -> None:
        """Memory is where the losses are, so that nobody waits."""
        if self.memory.seen.device != device:
            self.memory.seen = self.memory.seen.to(device)
            self.memory.recent = self.memory.recent.to(device)
            self.weight = None if self.weight is None else self.weight.to(device)

    def _put_together(self) -> None:
        """Each row was trained on by at most one rank since the last time; what that one knows, all know."""
        if not distributed.is_running():
            raise RholossError(
                f"There are {self._ranks} ranks, but no process group: call "
                "`torch.distributed.init_process_group` (or `rholoss.distributed.join`) before the first "
                "pass."
            )
        seen, recent = self.memory.seen, self.memory.recent
        mine = seen > self._merged.to(seen.device)
        told = torch.where(mine[:, None], recent, 0.0)
        changed = mine.to(torch.int32)
        dist.all_reduce(told)
        dist.all_reduce(changed)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        recent.copy_(torch.where(changed[:, None] > 0, told, recent))
        self._merged = seen.clone()
