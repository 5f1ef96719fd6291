"""Irreducible losses of streams, or measured by many ranks, which claim work and write parts of one store.

Memory does not grow with the number of rows, apart from labels that the data set itself keeps in memory.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from rholoss import data as batch_data
from rholoss import losses
from rholoss.distributed import Ranks
from rholoss.errors import RholossError
from rholoss.il import files
from rholoss.il.build import made_now, num_rows
from rholoss.il.fingerprint import SAMPLED, check_labels
from rholoss.il.hashing import content_hash, label_codes
from rholoss.il.ids import as_ids, plain_id
from rholoss.il.partial import Partial
from rholoss.il.parts import Merged, Parts, entries_of, new_start
from rholoss.il.points import Loading, Points, check_items, loaded
from rholoss.il.score import evaluating, tell_unusable
from rholoss.il.store import Irreducible
from rholoss.il.views import evenly, ids_at, labels_of, own_randomness, root_of
from rholoss.indexed import fetch, without_ids
from rholoss.progress import Bar, say
from rholoss.streams import Stream

PART_ROWS = 2**18  # at most; what is lost if a rank is killed
UNITS = 64  # at least, if there are as many batches, so that ranks finish at about the same time

# Entries of a job that may differ among ranks (a loss that knows its rank, augmented data). Those of rank 0
# are used.
FIRST_RANKS = ("code", "content")

Chunk = tuple[Any, np.ndarray | None, list[Any]]  # ids, codes of labels, items


class Units(Protocol):
    """Work in units that can be done in any order, by any rank."""

    names: list[str]
    rows: int  # 0 if it is not known

    def read(self, unit: str, skip: int) -> Iterator[Chunk]:
        """The batches of a unit, without the first `skip` rows."""


class Blocks:
    """Rows of a data set in blocks of whole batches; `position` by default is all of them."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        codes: np.ndarray | None = None,
        position: np.ndarray | None = None,
        name: str = "rows",
    ) -> None:
        self.dataset, self.batch_size, self.codes = dataset, batch_size, codes
        self.position: Any = range(len(dataset)) if position is None else position
        self.rows = len(self.position)
        # A function of the data alone: a restart may have another number of ranks.
        batches = -(-self.rows // batch_size)
        self.block = max(1, min(PART_ROWS // batch_size, batches // UNITS)) * batch_size
        self.names = [f"{name}-{i:06}" for i in range(-(-self.rows // self.block))]

    def read(self, unit: str, skip: int) -> Iterator[Chunk]:
        """The batches of a block."""
        start = int(unit.rpartition("-")[2]) * self.block
        stop, view = min(start + self.block, self.rows), without_ids(self.dataset)
        for low in range(start + skip, stop, self.batch_size):
            rows = np.asarray(self.position[low : min(low + self.batch_size, stop)], np.int64)
            items = fetch(view, rows.tolist())
            codes = None if self.codes is None else self.codes[rows]
            yield as_ids(ids_at(self.dataset, rows), "dataset"), codes, items


class Shards:
    """The shards of a stream."""

    def __init__(self, stream: Stream, batch_size: int) -> None:
        self.stream, self.batch_size, self.rows = stream, batch_size, 0
        self.names = [f"shard-{i:06}" for i in range(len(stream.shards))]

    def read(self, unit: str, skip: int) -> Iterator[Chunk]:
        """The batches of a shard."""
        shard = self.stream.shards[int(unit.rpartition("-")[2])]
        keyed = islice(self.stream.items(shard), skip, None)
        while some := list(islice(keyed, self.batch_size)):
            yield as_ids([key for key, _ in some], "key"), None, [item for _, item in some]


class _Work(IterableDataset[Any]):
    """Batches of the units that this process claims; a batch of None behind the last of each.

    In the workers of a loader each of them claims units of its own.
    """

    def __init__(self, units: Units, parts: Parts, collate: Callable[[list[Any]], Any]) -> None:
        self.units, self.parts, self.collate = units, parts, collate

    def __iter__(self) -> Iterator[Any]:
        for unit, number, rows in self.parts.unclaimed(self.units.names):
            for ids, codes, items in self.units.read(unit, rows):
                batch = self.collate(items)
                if isinstance(batch, Mapping):
                    batch = batch_data.without_index(batch)
                yield unit, number, ids, codes, batch
            yield unit, number, [], None, None


def _as_it_is(made: Any) -> Any:
    return made


@dataclass
class _Open:
    """What is measured of a unit and not written yet. Losses stay on the device until then."""

    number: int
    ids: list[Any] = field(default_factory=list)
    codes: list[np.ndarray] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(map(len, self.ids))

    @property
    def keyed(self) -> bool:
        """Whether its ids are string keys."""
        return any(isinstance(ids, list) for ids in self.ids)

    def entries(self) -> np.ndarray:
        loss_n = torch.cat(self.losses).cpu().numpy() if self.losses else np.empty(0, np.float32)
        label_n = np.concatenate(self.codes) if self.codes else None
        if self.keyed:
            return entries_of(list(chain(*self.ids)), loss_n, label_n)
        return entries_of(np.concatenate([np.empty(0, np.int64), *self.ids]), loss_n, label_n)


def measure(
    model: nn.Module,
    units: Units,
    parts: Parts,
    loss: losses.LossFunction,
    loading: Loading,
    bar: Bar,
) -> None:
    """Measure units until none is left to claim."""
    waiting: dict[str, _Open] = {}
    loader = DataLoader(
        _Work(units, parts, loading.collate_fn or default_collate),
        batch_size=None,  # they come as batches
        collate_fn=_as_it_is,
        num_workers=loading.num_workers,
        pin_memory=loading.device.type == "cuda",
        generator=Generator().manual_seed(0),
    )
    started = time.perf_counter()
    with torch.no_grad(), evaluating(model):
        for unit, number, ids, codes, batch in loaded(loader):
            open_ = waiting.setdefault(unit, _Open(number))
            if batch is not None:
                loss_B = loss(model, batch_data.to_device(batch, loading.device))
                open_.losses.append(losses.check_per_example(loss_B, len(ids)).float())
                open_.ids.append(ids)
                open_.codes += [] if codes is None else [codes]
                bar.advance(len(ids))
            if batch is None or open_.rows >= PART_ROWS:
                keyed, last = open_.keyed, batch is None
                entries = open_.entries()  # waits for the device
                took, started = time.perf_counter() - started, time.perf_counter()
                parts.write(unit, open_.number, entries, keyed=keyed, last=last, seconds=took)
                del waiting[unit]
                if not last:
                    waiting[unit] = _Open(open_.number + 1)


@dataclass(frozen=True)
class About:
    """What is known of a data set, without anything in memory that has its length."""

    rows: int | None  # of the data set inside, if the ids are its rows
    codes: np.ndarray | None
    meta: dict[str, Any]


def about_rows(dataset: Any, labels: Any, collate_fn: Callable[[list[Any]], Any] | None) -> About:
    """Labels where there are some, else the content of up to 256 rows."""
    if not len(dataset):
        raise RholossError("`dataset` is empty; pass a data set with at least one row.")
    check_labels(labels, len(dataset))
    some = evenly(len(dataset), SAMPLED)
    ids = as_ids(ids_at(dataset, some), "dataset")
    check_items(Points(dataset, ids, some), "dataset", collate_fn)
    labels = labels_of(dataset) if labels is None else labels
    codes, integers = (None, False) if labels is None else label_codes(labels)
    content = None
    if codes is None:
        view = without_ids(dataset)
        content = [
            [plain_id(id_), content_hash(view[int(row)])]
            for id_, row in zip(ids, some, strict=True)
        ]
    plain = isinstance(ids, np.ndarray) and np.array_equal(ids, _rows_inside(dataset, some))
    rows = len(root_of(dataset)) if plain else None
    meta = {
        "rows": rows,
        "points": len(dataset),
        "digest": content_hash([len(dataset), rows, codes, content, ids]),
        "labels": None if codes is None else "integers" if integers else "hashes",
        "content": content,
    }
    return About(rows, codes, meta)


def _rows_inside(dataset: Any, rows: np.ndarray) -> np.ndarray:
    """Which rows of the data set inside these are."""
    while dataset is not root_of(dataset):
        if isinstance(dataset, Subset):
            rows = np.array([int(dataset.indices[row]) for row in rows], np.int64)
        dataset = dataset.dataset
    return rows


def about_stream(stream: Stream) -> About:
    """A stream is known by the names of its shards; its keys say the rest."""
    digest = content_hash([str(shard) for shard in stream.shards])
    return About(
        None,
        None,
        {"rows": None, "points": None, "digest": digest, "labels": None, "content": None},
    )


def begin(out: Any, job: Mapping[str, Any], batch_size: int, ranks: Ranks) -> tuple[Partial, Parts]:
    """The folder for the parts of this job, the same for all ranks."""
    if out is None:
        raise RholossError(
            "`out` was not given. Several ranks, and streams, need a directory that all of them see: "
            "parts are kept there until they are one store."
        )
    with ranks.together() as told:
        files.check_target(Path(out))
        told.said["same"] = {
            f"the {name} of the job": value
            for name, value in job.items()
            if name not in FIRST_RANKS
        }
    with ranks.together() as told:
        if ranks.rank == 0:
            kept = Partial(out, job, batch_size)
            say(kept.said)
            folder = kept.path
            assert folder is not None
            parts = Parts(folder, new_start())
            parts.open_claims()
            told.said["start"] = parts.claims.name.removeprefix("claims-")
            told.said["job"] = dict(job)
    partial = Partial(out, told.by_rank[0]["job"], batch_size, joins=True)
    assert partial.path is not None
    return partial, Parts(partial.path, told.by_rank[0]["start"])


def merge(
    parts: Parts,
    units: list[Units],
    about: About,
    meta: Callable[[float], Mapping[str, Any]],
    out: Any,
    partial: Partial,
    ranks: Ranks,
    weights: list[dict[str, Any]] | None = None,
) -> Irreducible:
    """One store from the parts, written by the first rank; every rank opens it.

    `meta` is called with the seconds that measuring took.
    """
    with ranks.together():
        if ranks.rank == 0:
            found = [parts.of(name) for unit in units for name in unit.names]
            if not all(complete for _, _, complete in found):
                raise RholossError(
                    "A part of the work is not there, or was damaged while others were measured. Run "
                    "the same command again: only that part is measured."
                )
            merged = Merged(path for paths, _, _ in found for path in paths)
            ids, measured, finite = merged.count()
            tell_unusable(ids - finite, ids, "")
            if about.meta["points"] is None:  # a stream; rows of a data set were looked at before
                _tell_same_keys(merged.total - ids, merged.total)
            rows = ids if merged.keyed else num_rows(merged.highest, ids, about.rows)
            written = {
                "rows": rows,
                "measured": measured,
                "identity": {**about.meta, "points": about.meta["points"] or ids},
                **meta(merged.seconds / ranks.size),
                **made_now(),
            }
            writers = merged.writers(rows, labels=about.codes is not None)
            if weights:
                writers["weights"] = files.weights_writer(weights)
            files.write_store(Path(out), written, writers)
            partial.clear()
    return Irreducible.load(out)


def _tell_same_keys(again: int, total: int) -> None:
    if again:
        warnings.warn(
            f"{again} of {total} items have a key that another item has, too, and of each key one loss is "
            "kept. If they are not the same point twice, give each item a key of its own: of files, for "
            "one, the whole path.",
            stacklevel=5,
        )


def measure_together(
    model: nn.Module,
    units: Units,
    parts: Parts,
    loss: losses.LossFunction,
    loading: Loading,
    ranks: Ranks,
    title: str,
    progress: bool,
) -> None:
    """`measure` on every rank. If one fails, the others do the rest, and then all raise its error."""
    mine = -(-units.rows // ranks.size)
    with (
        ranks.together(),
        own_randomness(loading.device),
        Bar(mine, f"{title}, rank 0 of {ranks.size}", progress and ranks.rank == 0) as bar,
    ):
        measure(model, units, parts, loss, loading, bar)
