"""Candidate batches that shrink while nothing is scored, so that no row is loaded for nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from rholoss.core import step_generator
from rholoss.dealing import check_dealt_once
from rholoss.errors import RholossError
from rholoss.indexed import ids_of_rows
from rholoss.picks import random_k

EPOCHS = 2**31  # keeps the seeds of orders apart from those of steps; torch reads 32 bits of a seed


def uniform_choice(
    rows: int, k: int, generator: torch.Generator, loss_B: Tensor | None, limit: float
) -> Tensor:
    """Positions of k rows at random; those with an irreducible loss above `limit` come last."""
    if k == rows:
        return torch.arange(rows, device="cpu")  # chosen already, by a sampler, and in this order
    if loss_B is None:
        return random_k(torch.zeros(rows, device="cpu"), k, generator).position
    return random_k(torch.where(loss_B <= limit, 0.0, -torch.inf), k, generator).position


def last_rows(loader: Any) -> int | None:
    """Rows of the last batch that a `DataLoader` gives; None if it does not tell."""
    size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    if not size or getattr(loader, "drop_last", True) or not hasattr(sampler, "__len__"):
        return None
    return len(sampler) % size or size  # type: ignore[arg-type]


class CandidateBatches(Sampler[list[int]]):
    """Batches of positions for a `DataLoader(dataset, batch_sampler=...)`.

    One epoch visits every row once as a candidate, in an order that is a function of (seed, epoch).
    Where the schedule chooses uniformly, the choice is made here, by the same draw that the selector
    would make, and only the chosen rows are loaded.

    The position follows from the selector's step, so a resumed run goes on with the next batch. So does a
    pass after one that was stopped early: it has only the rest of the epoch, with a warning the first
    time. With several ranks each gets its part of a batch of `ranks` x `batch_size` rows.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        step: Callable[[], int] | None = None,
        choose: Callable[[int, Any], Tensor | None] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        ranks: tuple[int, int] = (0, 1),
    ) -> None:
        if step is None or choose is None:  # Lightning makes a new one around a sampler of its own
            raise RholossError(
                "The batches of `select.batch_sampler` were about to be made anew round a "
                f"{type(dataset).__name__}, as Lightning does to deal rows to its ranks; they are dealt "
                "already. Give the Trainer `select.watch(loader)`, which it leaves alone, or pass "
                "use_distributed_sampler=False to it (and give validation loaders a DistributedSampler) or "
                "to Fabric's `setup_dataloaders`. To predict, make a plain loader."
            )
        self.rank, self.ranks = ranks  # number of this one, and of all
        self.ids = ids_of_rows(dataset)
        smallest = batch_size * self.ranks if drop_last else 1
        if batch_size < 1 or len(self.ids) < smallest:
            raise RholossError(
                f"`batch_size` is {batch_size} and the data set has {len(self.ids)} rows, which gives "
                f"no candidate batch with drop_last={drop_last}; pass a data set with at least "
                f"{max(1, smallest)} rows and a batch size of at least 1."
            )
        self.batch_size, self.seed = int(batch_size), int(seed)  # plain, for a state that is saved
        self.shuffle, self.drop_last = shuffle, drop_last
        self._step, self._choose = step, choose
        self._kept: tuple[int, Tensor] | None = None  # an epoch and its order
        self._begun: int | None = None  # the step at which the last pass began
        self._told = False

    def __len__(self) -> int:
        rows, whole = len(self.ids), self.batch_size * self.ranks
        return rows // whole if self.drop_last else -(-rows // whole)

    def about(self) -> dict[str, Any]:
        """What decides which rows a step has; the batch size is that of all ranks together."""
        return {
            "rows": len(self.ids),
            "batch_size": self.batch_size * self.ranks,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }

    def check_ranks(self, rank: int, ranks: int) -> None:
        """Raise if this was made for other ranks than the process group's: all would load the same rows."""
        if (self.rank, self.ranks) != (rank, ranks):
            raise RholossError(
                f"The batch sampler was made for rank {self.rank} of {self.ranks}, but this is rank {rank} "
                f"of {ranks}; make it after the process group, or start the script with torchrun."
            )

    def rows_at(self, step: int) -> int:
        """Number of candidates at a step, of this rank."""
        return len(self._places(step % len(self)))

    def _places(self, batch: int) -> range:
        """Where this rank's part of a batch of all ranks stands in the order."""
        start = batch * self.batch_size * self.ranks
        rows = min(self.batch_size * self.ranks, len(self.ids) - start)
        if rows < self.ranks:  # a rank without a row would keep the others waiting: repeat one
            return range(start + self.rank % rows, start + self.rank % rows + 1)
        each, more = divmod(rows, self.ranks)
        first = start + self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.ids), device="cpu")
        generator = step_generator(self.seed, EPOCHS + epoch)
        return torch.randperm(len(self.ids), generator=generator, device="cpu")

    def __iter__(self) -> Iterator[list[int]]:
        check_dealt_once(self, self.ranks)  # when a loader begins, and not with its first batch
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        step = self._step()
        epoch, done = divmod(step, len(self))
        self._tell_of_a_short_pass(step, done)
        for place in range(done, len(self)):
            yield self.at(epoch * len(self) + place)

    def hand_over(self) -> None:
        """Someone else continues the present pass, so the next one may be short without a warning."""
        self._begun = None

    def _tell_of_a_short_pass(self, step: int, done: int) -> None:
        """Warn of a pass that is shorter than an epoch, unless it is a resumed run's first.

        A training loop that counts passes would take it for an epoch.
        """
        begun, self._begun = self._begun, step
        if self._told or not done or begun is None or not begun < step < begun + len(self):
            return
        self._told = True
        warnings.warn(
            f"This pass over `select.batch_sampler` has {len(self) - done} of {len(self)} batches: an epoch "
            f"ends when `select` was called for each of its batches, and the last pass stopped at {done} of "
            "them. Call `select` for every batch, and do not end passes early (a `break`, Lightning's "
            "`limit_train_batches`, a batch that is left out); or count steps, not passes.",
            stacklevel=3,
        )

    def at(self, step: int) -> list[int]:
        """Positions of the rows of one step's batch."""
        epoch, place = divmod(step, len(self))
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, self._order(epoch))
        places = self._places(place)
        rows = self._kept[1][places.start : places.stop]
        if isinstance(self.ids, list):
            ids: Any = [self.ids[row] for row in rows.tolist()]
        else:
            ids = torch.from_numpy(self.ids[rows.numpy()])
        position = self._choose(step, ids)
        return (rows if position is None else rows[position]).tolist()
