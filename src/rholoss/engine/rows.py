"""Which rows a pass over the data trains on, and in which order; decided by the host once a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from rholoss import core
from rholoss.core import Method
from rholoss.engine.order import Order
from rholoss.engine.resident import Resident
from rholoss.engine.streamed import Streamed
from rholoss.errors import RholossError
from rholoss.il.live import LiveIrreducible
from rholoss.memory import Memory, Plan, Situation, check_epoch
from rholoss.sampler import EPOCHS
from rholoss.sources import Source, Table, TableSource, raise_unmeasured


def irreducible_table(
    method: Method, source: Source | None, ids: Tensor, drop: float
) -> Tensor | None:
    """Irreducible losses by id on the device, checked for every row once and for all."""
    if "irreducible_loss" not in method.needs and not drop:
        return None
    if not isinstance(source, TableSource):
        if isinstance(source, LiveIrreducible) and not drop:
            return None
        who = f"The method {method.name!r}" if not drop else f"A schedule with `drop`={drop}"
        raise RholossError(
            f"{who} needs irreducible losses; pass `irreducible=` what "
            "`fit_irreducible` returned (or a `LiveIrreducible`, if the schedule drops nothing)."
        )
    return by_id(source.table, ids)


def by_id(table: Table, ids: Tensor) -> Tensor:
    """The losses of these ids as a tensor by id, where the ids are; NaN between them."""
    loss_N = table.lookup(ids.cpu())
    raise_unmeasured(ids.cpu(), loss_N)
    whole = torch.full((int(ids.max()) + 1,), torch.nan, dtype=torch.float32, device="cpu")
    whole[ids.cpu()] = loss_N
    return whole.to(ids.device)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Work of a millisecond on the host, while the device waits for it.

    Shared out among threads it takes longer: on a busy host, or where a container has fewer cores than
    torch has threads, the work is over when the last of them has had its turn.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Rows:
    """Deals the rows of each pass.

    A pass that scores takes all rows as candidates. One that does not takes what the plan says, or, once
    the schedule has stopped, the rows without the share `drop` of highest irreducible loss, or all.
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
        self.recorded = recorded  # rows of each step, if choices are replayed
        self.passes = 0
        self.num = len(data)  # rows of the pass that was dealt last
        self._all = torch.arange(len(data), device="cpu")
        self.drop = drop
        self.use(irreducible)

    def use(self, irreducible: Tensor | None) -> None:
        """Leave out and plan by these irreducible losses, a table by id."""
        loss_N = None if irreducible is None else irreducible.index_select(0, self.data.ids).cpu()
        self._irreducible, self._kept = loss_N, self._all
        if self.drop and loss_N is not None:
            # numpy's: torch's takes 2 ** 24 rows at most
            highest = float(np.quantile(loss_N.numpy(), 1 - self.drop))
            self._kept = self._all[loss_N <= highest]

    def deal(
        self, order: Order, *, step: int, progress: float, scores: bool, stopped: bool,
        weight: Tensor | None,
    ) -> None:  # fmt: skip
        """Start a pass; `weight`, by id, is set to what the plan says."""
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
        """How many passes were dealt, and what is remembered."""
        memory = None if self.memory is None else self.memory.state_dict()
        return {"passes": self.passes, "num": self.num, "memory": memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.passes, self.num = state["passes"], state["num"]
        if self.memory is not None:
            self.memory.load_state_dict(state["memory"])
