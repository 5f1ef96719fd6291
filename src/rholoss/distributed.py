"""The same choice on many ranks of torch.distributed; with one process none of this is used.

There are two ways to choose. 'local': each rank chooses among its own candidates, and nothing is
exchanged after the first call. 'global': measurements are gathered, every rank computes the choice that a
single process with all candidates would make, and chosen rows are sent between ranks so that all of them
train on equally many. No rank decides for the others: all compute the same from the same numbers.

Shapes: R ranks, B candidates of all ranks in rank order, k selected by all of them together.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rholoss import data, errors, packing
from rholoss.core import Selection, Stats
from rholoss.errors import RholossError

CHOICES = ("local", "global")
PATIENCE = timedelta(days=7)  # for ranks that are done before others; a rank that dies is noticed


def is_running() -> bool:
    """Whether this process is one of the ranks of a process group."""
    return dist.is_available() and dist.is_initialized()


def place() -> tuple[int, int]:
    """The number of this rank, and of ranks in all; from torchrun's variables if there is no group yet."""
    if is_running():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def join(backend: str | None = None, timeout: timedelta | None = None) -> None:
    """`init_process_group` under torchrun that also works after torchrun has restarted the ranks.

    torchrun's store outlives them: restarted ranks may find the addresses of dead ones in it ("connection
    refused" with torch 2.13). So each start uses names of its own.
    """
    store, rank, ranks = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"start {start}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=ranks,
        timeout=timeout,
    )


def leave() -> None:
    """`destroy_process_group` together with the other ranks, so that each of them ends cleanly.

    Gloo's threads release their work shortly after the last call has returned, and need the interpreter
    for that: a process that is exiting by then aborts (1 run of 80 with torch 2.13). Without a process
    group this does nothing.
    """
    if not is_running():
        return
    dist.barrier()  # the first rank to leave would cut the others off
    time.sleep(0.2)  # time for Gloo's threads
    dist.destroy_process_group()


@dataclass
class Told:
    """What this rank tells the others within a block, and afterwards what each of them told."""

    said: dict[str, Any] = field(default_factory=dict)
    by_rank: list[dict[str, Any]] = field(default_factory=list)
    moves: bool = False  # the choice is made among all candidates, and rows move

    def __enter__(self) -> Told:  # used by itself with one process, which tells nobody
        return self

    def __exit__(self, *error: object) -> None:
        self.by_rank = [self.said]

    @property
    def rows_R(self) -> list[int]:
        """Candidates of each rank."""
        return [said["rows"] for said in self.by_rank]

    @property
    def k(self) -> int:
        """How many rows all ranks together select: the same number for each, at least one."""
        ranks, wanted = len(self.by_rank), sum(said["k"] for said in self.by_rank)
        return wanted // ranks * ranks

    def warn_of_same(self, rank: int) -> None:
        """Warn, on the first rank, if another has exactly its candidates; known at the first call only."""
        first = self.by_rank[0].get("candidates")
        others = [r for r, said in enumerate(self.by_rank) if r and said.get("candidates") == first]
        if rank == 0 and first is not None and others:
            warnings.warn(
                f"Rank {others[0]} has the same candidates as rank 0, so that both choose the same rows. "
                "Deal them out: DataLoader(dataset, batch_sampler=select.batch_sampler(dataset, "
                "batch_size)), or a DistributedSampler.",
                stacklevel=3,
            )


class Ranks:
    """The ranks of one run, as a selector sees them."""

    def __init__(
        self, choice: str = "local", *, alone: bool = False, patience: timedelta | None = None
    ) -> None:
        if choice not in CHOICES:
            raise RholossError(f"`choice` is {choice!r}; choose one of {', '.join(CHOICES)}.")
        self.choice, self.alone = choice, alone  # alone: behave as if there were no other ranks
        self.patience = patience  # how long to wait for a rank; None: as the process group does
        self._gloo: Any = None

    @property
    def size(self) -> int:
        """Number of ranks; 1 where torch.distributed is not in use."""
        return dist.get_world_size() if is_running() and not self.alone else 1

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return dist.get_rank() if is_running() and not self.alone else 0

    @property
    def chooses_together(self) -> bool:
        """Whether the choice is made among the candidates of several ranks."""
        return self.choice == "global" and self.size > 1

    def own_path(self, path: str | os.PathLike[str] | None) -> Path | None:
        """A file name for each rank: run.jsonl, run.rank1.jsonl, ..."""
        rank, _ = place()
        if path is None or rank == 0:
            return None if path is None else Path(path)
        return Path(path).with_suffix(f".rank{rank}{Path(path).suffix}")

    def exchange(self, said: Any) -> list[Any]:
        """What every rank passes, in rank order. For small things: they go through the host."""
        if self.size == 1:
            return [said]
        # Through NCCL the host would wait for the device.
        own = self.patience is not None or "cpu:" not in str(dist.get_backend_config())
        if self._gloo is None and own:
            self._gloo = dist.new_group(backend="gloo", timeout=self.patience)
        heard: list[Any] = [None] * self.size
        dist.all_gather_object(heard, said, group=self._gloo)
        return heard

    def together(self, needed: bool = True) -> AbstractContextManager[Told]:
        """A block after which either every rank goes on, or every rank raises the same error.

        If one rank alone raised an error, the others would wait for it forever.
        """
        return self._one_fate() if needed and self.size > 1 else Told()

    @contextmanager
    def _one_fate(self) -> Iterator[Told]:
        told = Told()
        failed: Exception | None = None
        try:
            yield told
        except Exception as error:
            failed = error
        heard = self.exchange((_as_text(failed), told.said if failed is None else {}))
        if any(text for text, _ in heard):
            kind, message = _one_message([text for text, _ in heard])
            raise kind(message) from failed
        told.by_rank = [said for _, said in heard]
        _check_same([said.get("same", {}) for said in told.by_rank])

    def whole(self, stats: Stats, k: int, told: Told) -> tuple[Stats, int]:
        """What was measured of the candidates of all ranks, in rank order, and how many to select."""
        if not told.moves:
            return stats, k
        columns, rows_R = dict(stats.measured), told.rows_R
        if isinstance(stats.index, Tensor):
            columns[data.INDEX] = stats.index
        own = rows_R[self.rank]
        home = next(iter(columns.values())).device if columns else torch.device("cpu")
        device = _carrier(home)
        packed = packing.pack([value.to(device) for value in columns.values()], own)
        padded = packed.new_zeros(max(rows_R), packed.shape[1])
        padded[:own] = packed
        parts = [torch.empty_like(padded) for _ in rows_R]
        if columns:
            dist.all_gather(parts, padded)
        all_B = torch.cat([part[:rows] for part, rows in zip(parts, rows_R, strict=True)]).to(home)
        found = dict(zip(columns, packing.unpack(all_B, list(columns.values())), strict=True))
        index: Any = found.pop(data.INDEX, None)
        if index is None:
            index = [key for said in told.by_rank for key in said["keys"]]
        return Stats(index, found), told.k

    def share(
        self, batch: Any, selection: Selection, rows: int, told: Told, shared: Sequence[str]
    ) -> tuple[Any, Selection]:
        """The rows that this rank trains on, as many as every other, and which of the selected they are.

        Rows stay where they are as far as possible. Waits for the device: how many rows go where has
        to be known on the host.
        """
        if not told.moves:
            return data.take(batch, selection.position, rows, shared), selection
        rows_R, rank = told.rows_R, self.rank
        position_k = selection.position.cpu().numpy()
        owner_k, trainer_k = assign(position_k, rows_R)
        start = sum(rows_R[:rank])
        sent = np.flatnonzero(owner_k == rank)
        sent = sent[np.argsort(trainer_k[sent], kind="stable")]
        mine = np.flatnonzero(trainer_k == rank)
        mine = mine[np.argsort(owner_k[mine], kind="stable")]
        # Read from the whole batch: in a part of it, a list of rows may look like a list of fields.
        paths = [path for path, _ in packing.row_leaves(batch, shared, rows)]
        leaving = data.take(batch, torch.from_numpy(position_k[sent] - start), rows, shared)
        counts = [np.bincount(trainer_k[sent], minlength=len(rows_R)).tolist()]
        counts += [np.bincount(owner_k[mine], minlength=len(rows_R)).tolist()]
        training = self._move(leaving, len(sent), counts[0], counts[1], paths)
        which = torch.from_numpy(mine).to(selection.position.device)
        weight = selection.weight
        if weight is not None:
            weight = weight[which.to(weight.device)]
        return training, Selection(selection.position[which], weight)

    def _move(
        self, batch: Any, rows: int, going: list[int], coming: list[int], paths: Sequence[data.Path]
    ) -> Any:
        """Send rows, which are sorted by where they go; get as many as come from each rank."""
        at = packing.leaves_at(batch, paths)
        leaves = list(at.values())
        tensors = [torch.as_tensor(leaf) for leaf in leaves if not isinstance(leaf, (list, tuple))]
        found: list[Any] = []
        if tensors:
            device = _carrier(tensors[0].device)
            packed = packing.pack([leaf.to(device) for leaf in tensors], rows)
            got = packed.new_empty(sum(coming), packed.shape[1])
            dist.all_to_all_single(got, packed, coming, going)
            found = packing.unpack(got, tensors)
        listed = [leaf for leaf in leaves if isinstance(leaf, (list, tuple))]
        home = tensors[0].device if tensors else torch.device("cpu")
        lists = iter(self._move_lists(listed, going, home) if listed else [])
        moved, replaced = iter(found), {}
        for path, leaf in at.items():
            if isinstance(leaf, (list, tuple)):
                replaced[path] = type(leaf)(next(lists))
            else:
                replaced[path] = packing.as_leaf(next(moved), leaf)
        return data.tree_map(
            lambda path, leaf: replaced.get(path, leaf), batch, whole=lambda path, _: path in at
        )

    def _move_lists(
        self, listed: Sequence[Any], going: list[int], home: torch.device
    ) -> list[list[Any]]:
        """The same for lists by row, through the host; their entries may be tensors of one row each."""
        ends = np.cumsum([0, *going]).tolist()
        cuts = list(itertools.pairwise(ends))
        parcels = [[list(leaf[low:high]) for leaf in listed] for low, high in cuts]
        parcels = data.to_device(parcels, torch.device("cpu"))
        arrived = [sent[self.rank] for sent in self.exchange(parcels)]
        joined = [list(itertools.chain(*parts)) for parts in zip(*arrived, strict=True)]
        return data.to_device(joined, home)

    def tell(
        self,
        told: Told,
        ids: Any,
        k: int,
        batch: Any,
        shared: Sequence[str],
        same: Mapping[str, Any],
        moves: bool,
    ) -> None:
        """Tell the others what they need to know of these candidates; `same` must agree on all ranks."""
        told.said |= {"rows": len(ids), "k": k, "same": dict(same)}
        told.moves = moves
        if same and len(ids) > 1:  # a data set with fewer rows than ranks repeats a row: no mistake
            keys = sorted(ids.tolist() if isinstance(ids, Tensor) else map(str, ids))
            told.said["candidates"] = zlib.crc32(repr(keys).encode())
        if moves:
            told.said["keys"] = None if isinstance(ids, Tensor) else list(ids)
            told.said["same"]["the shape of a row"] = [
                f"{data.path_name(path)} {packing.row_shape(leaf)}"
                for path, leaf in packing.row_leaves(batch, shared, len(ids))
            ]


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Make each gradient the mean of those of all ranks, as DistributedDataParallel does."""
    if not is_running() or dist.get_world_size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def assign(position_k: np.ndarray, rows_R: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The rank that holds each selected row, and the rank that trains on it: k / R for each rank.

    A rank trains on its own rows first, in the order of selection; what is left over goes to the ranks
    that have too few.
    """
    ranks, quota = len(rows_R), len(position_k) // len(rows_R)
    owner_k = np.searchsorted(np.cumsum(rows_R), position_k, side="right")
    trainer_k = owner_k.copy()
    for rank in range(ranks):
        trainer_k[np.flatnonzero(owner_k == rank)[quota:]] = -1
    free = [quota - np.count_nonzero(trainer_k == rank) for rank in range(ranks)]
    trainer_k[trainer_k == -1] = np.repeat(np.arange(ranks), free)
    return owner_k, trainer_k


def _carrier(device: torch.device) -> torch.device:
    """The device on which tensors must be for the process group to send them."""
    known = dict(part.split(":") for part in str(dist.get_backend_config()).split(","))
    return device if known.get(device.type, "gloo") != "gloo" else torch.device("cpu")


def _as_text(error: Exception | None) -> tuple[str, str] | None:
    if error is None:
        return None
    known = isinstance(error, RholossError)
    return type(error).__name__, str(error) if known else f"{type(error).__name__}: {error}"


def _one_message(texts: list[tuple[str, str] | None]) -> tuple[type[RholossError], str]:
    """The first failure, in words that are the same on every rank."""
    failed = [rank for rank, text in enumerate(texts) if text]
    name, message = next(text for text in texts if text)
    where = f"rank {failed[0]} of {len(texts)}"
    if len(failed) == len(texts):
        where = f"each of the {len(texts)} ranks"
    kind = getattr(errors, name, RholossError)
    return kind, f"On {where}: {message}"


def _check_same(same_R: list[dict[str, Any]]) -> None:
    for name, first in same_R[0].items():
        for rank, same in enumerate(same_R):
            if same.get(name) != first:
                raise RholossError(
                    f"The ranks differ in {name}: rank 0 has {first!r}, rank {rank} has "
                    f"{same.get(name)!r}. {ADVICE.get(name, ADVICE[''])}"
                )


ADVICE = {
    "": "Start every rank with the same arguments and the same files.",
    "the shape of a row": "Rows move between ranks where the choice is global: pad them to one size, or "
    "use choice='local'.",
}
