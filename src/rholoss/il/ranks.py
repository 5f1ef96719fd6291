"""`fit_irreducible` and `score_irreducible` where the work is spread: over ranks, or over shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from rholoss import losses
from rholoss.data import INDEX
from rholoss.distributed import PATIENCE, Ranks
from rholoss.il import spread
from rholoss.il.build import rows_for
from rholoss.il.guessing import tell_useless
from rholoss.il.ids import as_ids
from rholoss.il.partial import Partial
from rholoss.il.parts import Parts
from rholoss.il.points import Loading, content_of_some, points_of
from rholoss.il.score import job_of_scoring, meta_of_scoring
from rholoss.il.store import Irreducible
from rholoss.il.train import Work, fit_member, rows_to_visit
from rholoss.il.views import own_randomness, root_of
from rholoss.indexed import WithIndex, ids_of_rows, without_ids
from rholoss.naming import named
from rholoss.progress import Bar
from rholoss.streams import Stream


def score(
    model: nn.Module,
    dataset: Any,
    loss: str | losses.LossFunction,
    labels: Any,
    loading: Loading,
    out: Any,
    about: Mapping[str, Any],
    progress: bool,
    ranks: Ranks,
) -> Irreducible:
    """The work of `score_irreducible`, which describes the arguments."""
    units: spread.Units
    reading: tuple[Any, ...] = ()
    with ranks.together(), own_randomness(loading.device):
        if isinstance(dataset, Stream):
            data, transform, content = spread.about_stream(dataset), None, None
            units = spread.Shards(dataset, loading.batch_size)
            reading = dataset.read, dataset.key
        else:
            dataset = _indexed(dataset)
            _check_rows(dataset)
            data = spread.about_rows(dataset, labels, loading.collate_fn)
            units = spread.Blocks(dataset, loading.batch_size, codes=data.codes)
            found = getattr(root_of(dataset), "transform", None)
            transform = None if found is None else named(found)
            content = content_of_some(dataset)
    job = {"work": "score over ranks", "data": data.meta["digest"], "content": content}
    job |= job_of_scoring(model, loss, loading, *reading)
    partial, parts = spread.begin(out, job, loading.batch_size, ranks)
    per_example = losses.by_name(loss)
    spread.measure_together(model, units, parts, per_example, loading, ranks, "scoring", progress)

    def meta(took: float) -> dict[str, Any]:
        seconds = about["seconds"] + took
        return meta_of_scoring(model, loss, about["split"], transform, seconds)

    return spread.merge(parts, [units], data, meta, out, partial, ranks)


def _indexed(dataset: Any) -> Any:
    """The data set; ids that are a column of it (Hugging Face) are read once, and not for each batch."""
    column = INDEX in (getattr(root_of(dataset), "column_names", None) or ())
    return WithIndex(dataset) if column and without_ids(dataset) is dataset else dataset


def _check_rows(dataset: Any) -> None:
    """Raise if there are no rows, or if two of them have the same id (plain row numbers never have)."""
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ids = ids_of_rows(dataset) if sized and without_ids(dataset) is not dataset else None
    ascending = isinstance(ids, np.ndarray) and bool((ids[1:] > ids[:-1]).all())
    if not sized or (ids is not None and not ascending):
        points_of(dataset, "dataset")  # knows what to say
    if ids is not None:
        rows_for(as_ids(ids), None)


def fit(
    work: Work,
    job: Mapping[str, Any],
    about: Mapping[str, Any],
    about_fits: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
    out: Any,
    progress: bool,
) -> Irreducible:
    """Models are fitted side by side, each by one rank; then all ranks score with each of them."""
    ranks, loading = Ranks(patience=PATIENCE), work.settings.scoring
    partial, parts = spread.begin(out, job, loading.batch_size, ranks)
    with ranks.together():
        _fit_unclaimed(work, partial, parts, ranks, progress)
    dataset = _indexed(work.points.dataset)
    with ranks.together():
        data = spread.about_rows(dataset, work.labels, loading.collate_fn)
    units: list[spread.Units] = []
    fits = []
    for member in work.members:
        made = partial.fitted(member.name)
        assert made is not None  # every rank was told if it could not be fitted or kept
        model, title = work.factory(member), f"scoring {member.name}"
        model.load_state_dict(made["state"])
        position = work.points.position[member.score]
        block = spread.Blocks(
            dataset, loading.batch_size, codes=data.codes, position=position, name=member.name
        )
        loss = work.settings.loss
        spread.measure_together(model, block, parts, loss, loading, ranks, title, progress)
        units.append(block)
        fits.append(made)
    weights = [made.pop("state") for made in fits]

    def meta(took: float) -> dict[str, Any]:
        for made in fits:  # how the time was spread over the models is not known
            made["scoring_seconds"] = took / len(fits)
        return {**about, **about_fits(fits)}

    kept = weights if work.keep_weights else None
    il = spread.merge(parts, units, data, meta, out, partial, ranks, kept)
    with ranks.together():
        if ranks.rank == 0:
            tell_useless(il, stacklevel=4)
    return il


def _fit_unclaimed(
    work: Work, partial: Partial, parts: Parts, ranks: Ranks, progress: bool
) -> None:
    """Fit one model after the other that is not fitted yet, and that no other rank has claimed."""
    for number, member in enumerate(work.members):
        if partial.fitted(member.name) is None and parts.claim(f"fit-{member.name}"):
            title = f"fitting model {number + 1} of {len(work.members)}, rank {ranks.rank}"
            model = work.factory(member)
            with Bar(rows_to_visit(member, work.settings), title, progress) as bar:
                data = without_ids(work.data)
                fitted = fit_member(model, data, work.points, member, work.settings, bar)
            partial.keep_fitted(member.name, fitted)
