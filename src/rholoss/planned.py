"""Plans in a loop of your own: which rows a pass trains on, from the losses that training has seen."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from rholoss import distributed
from rholoss.core import step_generator
from rholoss.dealing import check_dealt_once
from rholoss.errors import RholossError
from rholoss.indexed import ids_of_rows
from rholoss.memory import Memory, Plan, Situation, check_epoch, check_plan
from rholoss.sampler import EPOCHS


class Planned(DistributedSampler[int]):
    """Rows of one pass after another, for `DataLoader(dataset, sampler=...)`; nothing is scored.

        rows = rho.Planned(train, rho.Remembered(math.log(10)), passes=20)  # train = rho.WithIndex(...)
        loader = DataLoader(train, batch_size=128, sampler=rows, drop_last=True)
        for _ in range(20):
            for index, x, y in loader:
                loss_k = F.cross_entropy(model(x), y, reduction="none")
                rows.remember(index, loss_k).backward()

    A training step knows the loss of each of its rows anyway. `remember` keeps each row's last `depth`
    losses, on the device and without waiting for it, and returns their mean (weighted, if the plan has
    weights) to call `backward` on. When a pass begins, the plan decides which rows it has; their order is a
    function of (seed, pass). A pass of which nothing was remembered is repeated, so looking at the first
    batch uses up none. With several ranks, what they remember is merged before a pass, and each gets an
    equal part of its rows. (This is a `DistributedSampler` so that Lightning does not share rows out again.)

    The plan decides how many rows a pass has, so the last batch may have a single row, on which BatchNorm
    cannot train: hence `drop_last=True`, which leaves out different rows each time.

    Args:
        dataset: the data set that the loader reads; its items carry their ids (`WithIndex`).
        plan: `Remembered`, `InfoBatch`, `RandomShare`, or a function from a `Situation` to an `Epoch`.
        passes: how many there will be, from which the plan knows how far training is.
        seed: of the order of the rows, and of the plan's randomness.
        depth: how many losses of each row to remember.
    """

    def __init__(
        self, dataset: Any, plan: Plan, *, passes: int, seed: int = 0, depth: int = 4
    ) -> None:
        check_plan(plan)
        ids = ids_of_rows(dataset)
        if passes < 1 or not len(ids):
            raise RholossError(
                f"`passes` is {passes} and the data set has {len(ids)} rows; there must be one of each "
                "at least."
            )
        self.plan, self.passes, self.seed = plan, passes, seed
        self.begun = 0  # passes of which something was remembered
        self.memory = Memory(len(ids), torch.device("cpu"), depth)
        self.order: Tensor | None = None  # rows of the present pass, of all ranks
        self.weight: Tensor | None = None  # of each row in this pass
        self.left_out = 0  # how many rows are not in this pass
        self._ranks = distributed.place()[1]
        self._num = len(ids) // self._ranks  # rows of this pass on this rank
        self._done = 0  # how many of these were remembered
        self._size = 0  # how many of them in the last batch
        self._open = False  # whether the present pass is not counted in `begun` yet
        self._unread = 0  # how often this pass came to its end without anything remembered
        counted = isinstance(ids, np.ndarray) and np.array_equal(ids, np.arange(len(ids)))
        self._row_of = None if counted else {key: row for row, key in enumerate(list(ids))}
        if self._row_of is not None and len(self._row_of) < len(ids):
            raise RholossError(
                f"The {len(ids)} rows of the data set have {len(self._row_of)} different ids; give each row "
                "an id of its own, in `rholoss.WithIndex(dataset, ids=...)`."
            )
        listed = ids.tobytes() if isinstance(ids, np.ndarray) else repr(list(ids)).encode()
        self._digest = zlib.crc32(listed)
        self._merged = self.memory.seen.clone()

    def __len__(self) -> int:
        """How many rows the present pass has on this rank; before the first pass, all."""
        return self._num

    @property
    def wrong(self) -> float | None:
        """The share of wrong labels that the plan has found; None if it has found none yet."""
        return self.memory.notes.get("wrong")

    def remember(self, index: Any, loss_k: Tensor) -> Tensor:
        """Remember the losses of a training batch; returns their mean, to call `backward` on.

        Args:
            index: the ids [k] that came with the batch.
            loss_k: the training loss of each row, with its graph (reduction='none').
        """
        row_k = self._rows(index)
        if self.order is None:
            raise RholossError(
                "Losses are to be remembered, but no pass was dealt: the loader does not draw from this "
                "sampler. Pass `sampler=` it to the `DataLoader`, and see that nothing replaces it there."
            )
        if loss_k.shape != row_k.shape:
            raise RholossError(
                f"`loss_k` has shape {tuple(loss_k.shape)}, but must have one loss for each of the "
                f"{len(row_k)} rows of `index`: compute it with reduction='none'."
            )
        self._move(loss_k.device)
        row_k = row_k.to(loss_k.device, non_blocking=True)
        self.memory.record(row_k, loss_k)
        self._count()
        self._done, self._size = self._done + len(row_k), len(row_k)
        return loss_k.mean() if self.weight is None else (loss_k * self.weight[row_k]).mean()

    def __iter__(self) -> Iterator[int]:
        check_dealt_once(self, self._ranks)
        return self._pass()

    def _pass(self) -> Iterator[int]:
        order = self.order
        if order is None or not self._open:
            order = self._begin()
        first = distributed.place()[0] * self._num
        yield from order[first + self._done : first + self._num].tolist()
        if self._done:
            self._count()
            return
        self._unread += 1
        if self._unread == 2:  # once is no mistake: workers run ahead, or somebody had a look
            warnings.warn(
                "A pass came to its end twice, and nothing was remembered of it; it is dealt again until "
                "`remember(index, losses)` is called in the loop.",
                stacklevel=2,
            )

    def _count(self) -> None:
        self.begun, self._open = self.begun + self._open, False

    def _begin(self) -> Tensor:
        """The order of the next pass."""
        if self.begun >= self.passes:
            raise RholossError(
                f"`passes` is {self.passes}, and so many are done: the plan reads from it how far training "
                "is. Make `Planned` with as many passes as there are to be."
            )
        if self._ranks > 1:
            self._put_together()
        memory = self.memory
        seen, recent = memory.seen.cpu(), memory.recent.cpu()
        generator = step_generator(self.seed, EPOCHS + self.begun)
        progress = self.begun / self.passes
        epoch = self.plan(Situation(progress, seen, recent, None, generator, memory.notes))
        check_epoch(epoch, len(seen))
        shuffled = torch.randperm(len(epoch.rows), generator=generator, device="cpu")
        order = epoch.rows[shuffled]
        self._enter(order, epoch.weight, 0)
        return order

    def _enter(self, order: Tensor | None, weight: Tensor | None, done: int) -> None:
        """Be in a pass with this order, after `done` of its rows; without an order, between two passes."""
        rows = len(self.memory.seen)
        dealt = rows if order is None else len(order)
        self.order, self._num, self.left_out = order, dealt // self._ranks, rows - dealt
        self.weight = None if weight is None else weight.to(self.memory.seen.device)
        self._done, self._size, self._open = done, 0, order is not None
        self._unread = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs.

        In the middle of a pass the state has the place up to which losses were remembered, and `begun` does
        not count that pass. With several ranks save between two passes: during one each rank knows only its
        own rows.
        """
        # A loader may drop a last batch that is too small: with less than a batch left, the pass is over.
        rest = self._num - self._done
        under_way = rest >= self._size if self._done else self._open
        return {
            "begun": self.begun - (under_way and not self._open),
            "memory": self.memory.state_dict(),
            "order": self.order if under_way else None,
            "weight": self.weight.cpu() if under_way and self.weight is not None else None,
            "done": self._done if under_way else 0,
            "ranks": self._ranks,
            "ids": self._digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the rest of the pass in which the state was saved, or with the next pass."""
        rows, now = len(state["memory"]["seen"]), len(self.memory.seen)
        if rows != now or state.get("ids", self._digest) != self._digest:
            raise RholossError(
                f"The state is of a data set of {rows} rows; this one has {now}, or other ids: what was "
                "remembered would be that of other rows. Make `Planned` with the data set of the saved run."
            )
        ranks = state.get("ranks", self._ranks)
        if state.get("done", 0) and ranks != self._ranks:
            raise RholossError(
                f"The state was saved in the middle of a pass, with {ranks} rank{'s' * (ranks > 1)}, and now "
                f"there are {self._ranks}: rows of it would be left out. Go on with as many, or from a "
                "state that was saved between two passes."
            )
        self.begun = state["begun"]
        self.memory.load_state_dict(state["memory"])
        self._merged = self.memory.seen.clone()
        self._enter(state.get("order"), state.get("weight"), state.get("done", 0))

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
        """Move the memory to the device of the losses, so that recording does not wait."""
        if self.memory.seen.device != device:
            self.memory.move(device)
            self.weight = None if self.weight is None else self.weight.to(device)

    def _put_together(self) -> None:
        """Merge what the ranks remember: in the last pass each row was trained on by at most one of them."""
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
