"""A loader whose waiting times go to a ledger."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from rholoss.ledger import Ledger


class Watched:
    """A loader whose waiting times go to a ledger."""

    def __init__(self, loader: Iterable[Any], ledger: Ledger) -> None:
        self.loader, self.ledger = loader, ledger
        self._told = False

    @property
    def undealt(self) -> bool:
        """Whether there are several ranks, and each runs over all rows since nobody shares them out.

        accelerate and Lightning share out the rows of a loader that they are given, but not of this one.
        """
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks == 1 or getattr(self.loader, "_is_accelerate_prepared", False):
            return False
        batches = type(getattr(self.loader, "batch_sampler", None))
        rows = type(getattr(self.loader, "sampler", None))
        return batches is BatchSampler and rows in (RandomSampler, SequentialSampler)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # `sampler`, `dataset` and the like of the loader inside.
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self.undealt and not self._told:
            self._told = True
            warnings.warn(
                "Each rank runs over all rows of the loader that `select.watch` was given. If the ranks "
                "should share them, give each its part: watch what `accelerator.prepare` or a "
                "DistributedSampler's loader gives, or DataLoader(dataset, "
                "batch_sampler=select.batch_sampler(dataset, batch_size)).",
                stacklevel=2,
            )
        iterator, ledger = iter(self.loader), self.ledger
        while True:
            ledger.start()
            before = ledger.seconds
            try:
                batch = next(iterator)
            except StopIteration:
                return
            ledger.tick()
            ledger.loading_seconds += ledger.seconds - before
            yield batch
