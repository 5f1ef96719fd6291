"""Irreducible losses under a fitted model: each point once, un-augmented, in eval mode, no gradients."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rholoss import data as batch_data
from rholoss import losses
from rholoss.distributed import PATIENCE, Ranks
from rholoss.errors import RholossError
from rholoss.il import files
from rholoss.il.build import check_meta, library_version, rows_for, table_of
from rholoss.il.fingerprint import Identity, identify
from rholoss.il.guessing import tell_useless
from rholoss.il.hashing import content_hash
from rholoss.il.ids import shown_at
from rholoss.il.partial import Partial
from rholoss.il.points import (
    Loading,
    Points,
    about_model,
    batches,
    check_items,
    code_of,
    loader_of,
    points_of,
    positive,
)
from rholoss.il.store import Irreducible
from rholoss.il.views import own_randomness
from rholoss.modes import check_materialised
from rholoss.naming import code_hash, named
from rholoss.progress import Bar, say
from rholoss.streams import Stream


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; afterwards each module is in the mode that it was in."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, trains in flags:
            module.training = trains


def losses_of(
    model: nn.Module, loader: DataLoader[Any], loss: losses.LossFunction, device: torch.device
) -> Iterator[Tensor]:
    """The losses of each batch in turn, float32 on the CPU."""
    for rows, batch in batches(loader, device):
        with torch.no_grad():
            loss_B = losses.check_per_example(loss(model, batch), rows)
        yield loss_B.detach().float().cpu()


def score_points(
    model: nn.Module,
    points: Points,
    which: np.ndarray,
    loss: losses.LossFunction,
    loading: Loading,
    partial: Partial,
    name: str,
    bar: Bar,
) -> tuple[np.ndarray, float]:
    """Losses of the points at these places, and the seconds that it took, earlier runs included."""
    records = partial.records(name)
    done = records["loss"].reshape(-1)[: len(which)]
    parts, seconds = [done], float(records["seconds"].sum())
    bar.advance(len(done))
    if len(done) < len(which):
        first, rest = len(done), points.position[which[len(done) :]]
        started = time.perf_counter()
        with evaluating(model):
            loader = loader_of(points.view, rest, loading)
            for loss_B in losses_of(model, loader, loss, loading.device):
                took, started = time.perf_counter() - started, time.perf_counter()
                partial.append(name, first, loss_B.numpy(), took)
                parts.append(loss_B.numpy())
                first += len(loss_B)
                seconds += took
                bar.advance(len(loss_B), f"loss {float(loss_B.mean()):.4f}")
    return np.concatenate(parts), seconds


def tell_unusable(bad: int, total: int, which: str) -> None:
    """Warn that some points have no finite loss, or raise if none has one."""
    if bad == total:
        raise RholossError(
            "No point has a finite loss under the model. Check the model's weights and the data: a loss "
            "that is NaN or infinite cannot be used for selection."
        )
    if bad:
        warnings.warn(
            f"{bad} of {total} points have no finite loss under the model{which}. Selecting from them "
            "is an error: leave them out of the data, or look at what is wrong with them.",
            stacklevel=4,
        )


def finish(
    value_n: np.ndarray,
    points: Points,
    identity: Identity,
    meta: Mapping[str, Any],
    *,
    out: Any,
    partial: Partial,
    weights: list[dict[str, Any]] | None = None,
) -> Irreducible:
    """The table of all losses. With `out` it is saved, and loaded from there as a memory map."""
    bad = np.flatnonzero(~np.isfinite(value_n))
    tell_unusable(len(bad), len(value_n), f" (ids {shown_at(points.ids, bad)})")
    il = table_of(value_n, points.ids, identity, meta, weights)
    if out is None:
        return il
    il.save(out)
    partial.clear()
    return Irreducible.load(out)


def job_of_scoring(
    model: nn.Module, loss: str | losses.LossFunction, loading: Loading, *functions: Any
) -> dict[str, Any]:
    """What must not have changed for unfinished scoring to go on, besides the data."""
    return {
        "loss": named(loss),
        "model": content_hash(dict(model.state_dict())),
        "code": code_of(model, loss, loading.collate_fn, *functions),
        "batch_size": loading.batch_size,
        "versions": [library_version(), torch.__version__],
    }


def meta_of_scoring(
    model: nn.Module,
    loss: str | losses.LossFunction,
    split: Mapping[str, Any] | None,
    transform: str | None,
    seconds: float,
) -> dict[str, Any]:
    """What meta.json says of losses under a model that was given."""
    return {
        "loss": named(loss),
        "loss_code": code_hash(loss),
        "model": about_model(model),
        "split": {"kind": "given model", **(split or {})},
        "transform": transform,
        "seconds": seconds,
    }


def score_irreducible(
    model: nn.Module,
    dataset: Any,
    *,
    loss: str | losses.LossFunction = "classification",
    labels: Any = None,
    batch_size: int = 320,
    device: str | torch.device | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    out: Any = None,
    seconds: float = 0.0,
    split: Mapping[str, Any] | None = None,
    progress: bool = True,
    ranks: bool = False,
) -> Irreducible:
    """Measure the irreducible losses of a data set with a model that is fitted already.

    Args:
        model: a model that was not trained on these points. It is left as it was.
        dataset: the points, without augmentation; as `WithIndex`, `Subset` or as it is. Or a `Stream`.
        loss: the name of a task, such as 'classification', or a function (model, batch) -> [B].
        labels: one label for each row, if the data set has no `targets` or `labels`. A later run compares
            them to notice whether the data has changed.
        batch_size: points at a time.
        device: where the model runs; by default where it is.
        num_workers: worker processes of the loader.
        collate_fn: the collate function of the loader.
        out: a directory to save to; None saves nothing. The same call continues an interrupted run. Losses
            that are in the directory already are replaced when the new ones are complete.
        seconds: how long the fit took, for the ledger; the time of scoring is added.
        split: a note on what the model was trained on, for meta.json.
        progress: show a progress bar.
        ranks: share the points among the ranks of the process group. Call it on every rank, with an
            `out` that all of them can read and write.

    Returns:
        The irreducible losses by id.
    """
    positive("batch_size", batch_size)
    check_meta({"seconds": seconds, "split": split})
    check_materialised(model, "model")
    home = batch_data.device_of(model)
    where = home if device is None else torch.device(device)
    loading = Loading(batch_size, num_workers, collate_fn, where)
    if ranks or isinstance(dataset, Stream):
        from rholoss.il import ranks as over_ranks

        about = {"seconds": seconds, "split": split}
        with running_on(model, where, home):
            own = Ranks(alone=not ranks, patience=PATIENCE)
            return over_ranks.score(
                model, dataset, loss, labels, loading, out, about, progress, own
            )
    points = points_of(dataset, "dataset")
    if out is not None:
        files.check_target(Path(out))
    with own_randomness(where), running_on(model, where, home):
        content = check_items(points, "dataset", collate_fn)
        identity = identify(dataset, labels)
        rows_for(points.ids, identity)
        job = {"work": "score", "data": [identity.digest, content]}
        job |= job_of_scoring(model, loss, loading)
        partial, everything = Partial(out, job, batch_size), np.arange(len(points.ids))
        say(partial.said)
        with Bar(len(everything), "scoring", progress) as bar:
            value_n, took = score_points(
                model, points, everything, losses.by_name(loss), loading, partial, "model", bar
            )
    meta = meta_of_scoring(model, loss, split, points.transform, seconds + took)
    il = finish(value_n, points, identity, meta, out=out, partial=partial)
    tell_useless(il, "check the model's weights, fit a larger model, or longer")
    return il


@contextmanager
def running_on(model: nn.Module, device: torch.device, home: torch.device) -> Iterator[None]:
    """Move the model to the device and back again."""
    if device == home:  # it may be spread over several devices: leave it
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to(home)
