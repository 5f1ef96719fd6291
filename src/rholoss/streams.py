"""Data sets that are read shard by shard and have no row numbers: items with stable keys."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as loader_worker

from rholoss import data
from rholoss.core import step_generator
from rholoss.dealing import check_dealt_once
from rholoss.distributed import place
from rholoss.errors import RholossError
from rholoss.sources import as_table, raise_unmeasured

LOOKED_UP = 64  # items whose irreducible losses are looked up at a time


class Stream(IterableDataset[Any]):
    """Items of shards, each with a stable key: for IterableDatasets, WebDataset and streaming data sets.

        stream = Stream(urls, read, key="__key__", irreducible=il)
        for batch in DataLoader(stream, batch_size=320): ...

    `(x, y)` becomes `(key, x, y)`, a dict gets "index" in place of its key. Each rank and each worker
    of a loader reads shards of its own. Keys and their order within a shard must be the same in every run:
    irreducible losses are looked up by key, and a resumed run skips the rows that it has had.

    Args:
        shards: names of the shards: paths, URLs, numbers. At least one for each rank.
        read: a function from a shard to its items.
        key: the name of the entry of a dict item that is its key, or a function from an item to its key.
            Keys are strings or whole numbers, different for each item of the data set.
        irreducible: losses by key; each item then carries its own, looked up in the loader. None: none.
        shuffle: draw a new order of the shards in each epoch.
        seed: of that order.
        repeat: begin again at the end, for runs that are counted in steps. With several ranks this
            keeps any of them from ending before the others.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        *,
        key: str | Callable[[Any], Any],
        irreducible: Any = None,
        shuffle: bool = False,
        seed: int = 0,
        repeat: bool = False,
    ) -> None:
        if isinstance(shards, str) or not isinstance(shards, Iterable):
            raise RholossError(
                f"`shards` is {shards!r}; give a list of shards. Names with a wildcard are listed by "
                "`sorted(glob.glob(...))`."
            )
        self.shards, self.read, self.key = list(shards), read, key
        self.irreducible = None if irreducible is None else as_table(irreducible)
        self.shuffle, self.seed = shuffle, seed
        self.repeat = repeat
        self.rank, self.ranks = place()
        # The present epoch; the batches that are done, their size, and the epoch that they belong to. In
        # shared memory, because persistent workers of a loader must see what is set after they started.
        self._place = torch.tensor([0, 0, 1, 0], device="cpu").share_memory_()
        if len(self.shards) < self.ranks:
            raise RholossError(
                f"`shards` has {len(self.shards)} entries for {self.ranks} ranks, so that some of them "
                "would have nothing to read; cut the data into more shards."
            )

    @property
    def epoch(self) -> int:
        """The number of the epoch, which decides the order of the next pass; set it before the pass."""
        return int(self._place[0])

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._place[0] = epoch

    def set_epoch(self, epoch: int) -> None:
        """Set `epoch`; the loaders of frameworks call this when a pass begins.

        Args:
            epoch: the number of the epoch, from 0.
        """
        self.epoch = epoch

    def resume(self, batches: int, batch_size: int) -> None:
        """Skip the batches that this rank has had, so that an interrupted run continues.

        Their rows are read again, but not yielded. Without `repeat` batches are counted within the present
        `epoch`, which must be set first; later epochs start at their beginning.

        Args:
            batches: how many: `select.step`, if every batch was selected from.
            batch_size: of the loader.
        """
        self._place[1:] = torch.tensor([batches, batch_size, self.epoch], device="cpu")

    def items(self, shard: Any) -> Iterator[tuple[Any, Any]]:
        """The key and the item of each row of a shard; a key that is an entry of the item is taken out.

        Args:
            shard: one of `shards`.
        """
        for item in _dealt_already(self.read, shard):
            key = self._key_of(item, shard)
            if not callable(self.key):  # it returns as "index"; left here, the model would get it
                item = {name: value for name, value in item.items() if name != self.key}
            yield key, item

    def _key_of(self, item: Any, shard: Any) -> Any:
        if callable(self.key):
            found = self.key(item)
        else:
            found = item.get(self.key) if isinstance(item, Mapping) else None
        if isinstance(found, (torch.Tensor, np.generic)) and found.ndim == 0:
            found = found.item()
        if isinstance(found, bool) or not isinstance(found, (str, int)):
            raise RholossError(
                f"An item of shard {shard!r} has the key {found!r}, but `key` must give a string or a "
                "whole number. Name the entry of dict items that holds it, or pass a function from an "
                "item to its key."
            )
        return found

    def __iter__(self) -> Iterator[Any]:
        check_dealt_once(self, self.ranks)  # when a loader begins, and not with its first batch
        return self._attached()

    def _attached(self) -> Iterator[Any]:
        keyed = self._behind(self._keyed(), self._rows_done())
        if self.irreducible is None:
            for key, item in keyed:
                yield data.attach(item, key)
            return
        while some := list(itertools.islice(keyed, LOOKED_UP)):
            keys = [key for key, _ in some]
            loss_n = self.irreducible.lookup(keys)
            raise_unmeasured(keys, loss_n)
            for (key, item), loss in zip(some, loss_n.tolist(), strict=True):
                yield data.attach(item, data.Keyed(key, loss))

    def _behind(self, keyed: Iterator[Any], rows: int) -> Iterator[Any]:
        """Skip the first rows, which were in batches that are done; the last of these may have been short."""
        _, done, batch_size, _ = self._place.tolist()
        found = sum(1 for _ in itertools.islice(keyed, rows))
        if found <= rows - batch_size:
            raise RholossError(
                f"`resume` was told of {done} batches of {batch_size} rows, but this reader "
                f"has {found} rows in an epoch: set `epoch`, and give the batches of that epoch alone; "
                "or pass repeat=True, with which batches are counted through all epochs."
            )
        return keyed

    def _keyed(self) -> Iterator[tuple[Any, Any]]:
        reader, readers = self._reader()
        for epoch in itertools.count(self.epoch):
            order = list(range(len(self.shards)))
            if self.shuffle:
                generator = step_generator(self.seed, epoch)
                drawn = torch.randperm(len(self.shards), generator=generator, device="cpu")
                order = drawn.tolist()
            own = order[reader::readers]
            for place_ in own:
                yield from self.items(self.shards[place_])
            if not self.repeat or not own:
                return

    def _reader(self) -> tuple[int, int]:
        """The number of this process among all that read, and their number."""
        turn, turns = self._turn()
        return self.rank * turns + turn, self.ranks * turns

    def _turn(self) -> tuple[int, int]:
        """The turn of this process among the workers of a loader, and how many there are.

        A loader takes one batch of each worker in turn. A resumed loader starts with its first worker
        again, which must then have the turn at which the run stopped.
        """
        worker = get_worker_info()
        if worker is None:
            return 0, 1
        return (worker.id + self._batches_done) % worker.num_workers, worker.num_workers

    @property
    def _batches_done(self) -> int:
        epoch, done, _, resumed = self._place.tolist()
        return done if epoch == resumed else 0

    def _rows_done(self) -> int:
        """Rows that this reader gave to the batches that are done."""
        turn, turns = self._turn()
        done = self._batches_done
        if done and turns > 1 and (not self.repeat or len(self.shards) < self.ranks * turns):
            raise RholossError(
                f"A stream that ends cannot go on in its middle with {turns} workers, which end at "
                "different times. Pass repeat=True (and at least one shard for each worker), or use "
                "num_workers=1."
            )
        return -(-(done - turn) // turns) * int(self._place[2])


def _dealt_already(read: Callable[[Any], Iterable[Any]], shard: Any) -> Iterator[Any]:
    """All items of a shard.

    Streams of Hugging Face look for workers of a loader, to share rows out among them. Shards have been
    shared out already, so here they must find none.
    """
    with _no_workers():
        items = iter(read(shard))
    while True:
        with _no_workers():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


@contextlib.contextmanager
def _no_workers() -> Iterator[None]:
    """Code in this block sees no workers of a loader, as if it were the only reader."""
    before, loader_worker._worker_info = loader_worker._worker_info, None
    try:
        yield
    finally:
        loader_worker._worker_info = before
