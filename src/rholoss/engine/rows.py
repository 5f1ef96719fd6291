"""Which rows a pass over the data trains on, and in which order: decided on the host once per pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from rholoss import core
from rholoss.engine.order import Order
from rholoss.engine.resident import Resident
from rholoss.engine.streamed import Streamed
from rholoss.errors import RholossError
from rholoss.memory import Memory, Plan, Situation, check_epoch
from rholoss.sampler import EPOCHS


def memory_of(ids: Tensor) -> Memory:
    """Room for what a plan remembers of the rows with these ids, on their device."""
    again = len(ids) - len(ids.unique())
    if again:
        raise RholossError(
            f"{again} rows of the data have the id of another row, so that what a `plan` remembers of them "
            "would be mixed; give each row an id of its own."
        )
    return Memory(int(ids.max()) + 1, ids.device)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run work of about a millisecond on one thread of the host.

    Split among threads it would take longer: on a busy host, or in a container with fewer cores than torch
    has threads, it ends only when the slowest thread has had its turn, and the device waits for it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Rows:
    """Decides which rows each pass has, and shuffles them.

    In a pass that scores all rows are candidates. In one that does not, the plan decides. Without a plan a
    pass has all rows; once the schedule has stopped, all but the share `drop` with the highest irreducible
    losses.

    Args:
        data: the training set.
        seed: of the order; each pass has a generator of its own, made from the seed and its number.
        irreducible: the irreducible losses, a table by id, if there is one.
        drop: the share of the schedule.
        plan: the trainer's, if it has one.
        memory: what the plan remembers of the rows; given if there is a plan.
        recorded: rows [steps, k] to replay instead, if choices were recorded.
    """

    def __init__(
        self,
        data: Resident | Streamed,
        *,
        seed: int,
        irreducible: Tensor | None,
        drop: float,
        plan: Plan | None,
        memory: Memory | None,
        recorded: Tensor | None,
    ) -> None:
        self.data, self.seed, self.plan, self.memory = data, seed, plan, memory
        self.recorded = recorded
        self.passes = 0  # that were begun
        self.num = len(data)  # rows of the present pass
        self._all = torch.arange(len(data), device="cpu")
        self.drop = drop
        self.use(irreducible)

    def use(self, irreducible: Tensor | None) -> None:
        """Use these irreducible losses, a table by id, for `drop` and for the plan."""
        loss_N = None if irreducible is None else irreducible.index_select(0, self.data.ids).cpu()
        self._irreducible, self._kept = loss_N, self._all
        if self.drop and loss_N is not None:
            # torch.quantile takes at most 2 ** 24 values
            highest = float(np.quantile(loss_N.numpy(), 1 - self.drop))
            self._kept = self._all[loss_N <= highest]

    def deal(
        self, order: Order, *, step: int, progress: float, scores: bool, stopped: bool,
        weight: Tensor | None,
    ) -> None:  # fmt: skip
        """Start a pass: shuffle its rows into `order`, and set `weight`, by id, to the plan's weights."""
        if self.recorded is not None:
            order.deal(self.recorded[step : step + order.capacity].flatten())
            return
        generator = core.step_generator(self.seed, EPOCHS + self.passes)
        self.passes += 1
        rows = self._kept if stopped and not scores else self._all
        with one_thread():
            if self.plan is not None and weight is not None and not scores:
                rows = self._planned(self.plan, progress, generator, weight)
            self.num = len(rows)
            shuffled = torch.randperm(len(rows), generator=generator, device="cpu")
            order.deal(rows[shuffled])

    def _planned(self, plan: Plan, progress: float, generator: Generator, weight: Tensor) -> Tensor:
        assert self.memory is not None
        ids = self.data.ids
        memory = self.memory
        seen, recent = memory.seen[ids].cpu(), memory.recent[ids].cpu()
        known = Situation(progress, seen, recent, self._irreducible, generator, memory.notes)
        epoch = plan(known)
        check_epoch(epoch, len(ids))
        weight[ids] = 1.0 if epoch.weight is None else epoch.weight.to(weight)
        return epoch.rows.cpu()

    def state_dict(self) -> dict[str, Any]:
        """The number of passes begun, and what is remembered."""
        memory = None if self.memory is None else self.memory.state_dict()
        return {"passes": self.passes, "num": self.num, "memory": memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.passes, self.num = state["passes"], state["num"]
        if self.memory is not None:
            self.memory.load_state_dict(state["memory"])
