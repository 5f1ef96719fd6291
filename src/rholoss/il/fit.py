"""Fit the irreducible-loss model (or one for each fold) and score each point that is trained on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rholoss import losses
from rholoss.errors import RholossError
from rholoss.il import files, split
from rholoss.il.build import library_version, rows_for
from rholoss.il.fingerprint import identify
from rholoss.il.guessing import tell_useless
from rholoss.il.hashing import content_hash
from rholoss.il.partial import Partial
from rholoss.il.points import (
    Loading,
    Points,
    check_items,
    code_of,
    content_of_some,
    points_of,
    positive,
)
from rholoss.il.score import finish, score_points
from rholoss.il.store import Irreducible
from rholoss.il.train import (
    Factory,
    MakeModel,
    Settings,
    Work,
    adamw,
    fit_member,
    rows_to_visit,
    trained_parameters,
)
from rholoss.il.views import own_randomness
from rholoss.indexed import without_ids
from rholoss.naming import code_hash, named
from rholoss.optimizers import MakeOptimizer, new_optimizer
from rholoss.progress import Bar, say


def fit_irreducible(
    make_model: MakeModel,
    data: Any,
    *,
    score: Any = None,
    folds: int | None = None,
    loss: str | losses.LossFunction = "classification",
    optimizer: MakeOptimizer | None = None,
    epochs: int = 100,
    batch_size: int = 320,
    score_batch_size: int | None = None,
    patience: int | None = 5,
    check_rows: int | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    labels: Any = None,
    out: Any = None,
    keep_weights: bool = True,
    progress: bool = True,
    ranks: bool = False,
) -> Irreducible:
    """Train a (small) model on holdout data and measure the irreducible loss of each training point.

    Of all epochs, the weights with the lowest mean loss on the points to be scored are kept (not those
    with the highest accuracy; no test set is used). With `folds` no holdout data is needed: `data` is cut
    into parts by id, and each point is scored by a model that was not trained on it.

    Args:
        make_model: a function without arguments that returns a new model; called once for each fold,
            with a seed of its own.
        data: what to train the model on, which may be augmented: the holdout set, or with `folds` the
            training set itself.
        score: the points to be scored, without augmentation: the training set, as `WithIndex`,
            `Subset` or as it is. With `folds` a view of the same ids as `data`, by default `data`.
        folds: the number of models for cross-fitting, 2 or more; in place of holdout data.
        loss: the name of a task, such as 'classification', or a function (model, batch) -> [B].
        optimizer: a function from parameters to an optimizer; by default AdamW as in the paper.
        epochs: the most passes over the data.
        batch_size: rows of a training step.
        score_batch_size: rows at a time when scoring; by default `batch_size`. Scoring keeps nothing for
            gradients, so more rows fit; and as each epoch scores, more at a time save time.
        patience: stop after this many epochs without a lower loss; None for never.
        check_rows: compare epochs by the loss on this many of the points, evenly spaced; by default on
            all of them.
        device: where models run; by default a GPU if there is one.
        seed: of weights, order and folds. The caller's random state is left as it was.
        num_workers: worker processes of the loaders.
        collate_fn: the collate function of the loaders.
        labels: one label for each row of `score`, if it has no `targets` or `labels`. A later run compares
            them to notice whether the data has changed.
        out: a directory to save to; None saves nothing. The same call continues an interrupted run: models
            that were fitted and points that were scored are kept. Losses that are in the directory already
            are replaced when the new ones are complete.
        keep_weights: keep the fitted weights too, see `Irreducible.weights`.
        progress: show a progress bar.
        ranks: share folds and points among the ranks of the process group. Call it on every rank, with
            an `out` that all of them can read and write.

    Returns:
        The irreducible losses by id.
    """
    numbers = {
        "epochs": epochs,
        "batch_size": batch_size,
        "score_batch_size": score_batch_size,
        "patience": patience,
        "check_rows": check_rows,
    }
    _check_arguments(make_model, score, folds, seed, numbers)
    seed = int(seed)
    if out is not None:
        files.check_target(Path(out))
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loading = Loading(batch_size, num_workers, collate_fn, where)
    scoring = replace(loading, batch_size=score_batch_size or batch_size)
    per_example, steps = losses.by_name(loss), optimizer or adamw
    settings = Settings(per_example, steps, epochs, patience, check_rows, loading, scoring)
    with own_randomness(where):
        points, members = _plan(data, score, folds, seed)
        content = check_items(points, "score", collate_fn)
        identity = identify(points.dataset, labels)
        rows_for(points.ids, identity)
        factory = Factory(make_model, where)
        work = Work(data, points, members, settings, factory, labels, keep_weights)
        made = [factory(members[0])]  # now, because it shows whether the job is the same
        job = {
            "scored": [identity.digest, content],
            "data": identify(data, stored={}).digest,
            "loss": named(loss),
            "numbers": [folds, seed, numbers],
            **_about_training(made[0], settings),
            "code": code_of(made[0], per_example, collate_fn),
            "content": None if out is None else content_of_some(data),
        }
        about = {
            "loss": named(loss),
            "loss_code": code_hash(loss),
            "transform": points.transform,
        }
        if ranks:
            from rholoss.il import ranks as over_ranks

            job["work"] = "fit over ranks"
            about_fits = functools.partial(_about_fits, members, folds, seed)
            return over_ranks.fit(work, job, about, about_fits, out, progress)
        partial = Partial(out, job, scoring.batch_size)
        say(partial.said)
        fits, value_n = _fit_and_score(work, made, partial, progress)
    weights = [fit.pop("state") for fit in fits]
    about |= _about_fits(members, folds, seed, fits)
    kept = weights if keep_weights else None
    il = finish(value_n, points, identity, about, out=out, partial=partial, weights=kept)
    tell_useless(il)
    return il


def _check_arguments(
    make_model: Any, score: Any, folds: Any, seed: Any, numbers: dict[str, Any]
) -> None:
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise RholossError(
            f"`make_model` is a {type(make_model).__name__}; give a function that makes a new model, as "
            "in `lambda: SmallModel()`. For a model that is fitted already use "
            "`rholoss.score_irreducible`."
        )
    if score is None and folds is None:
        raise RholossError(
            "Neither `score` nor `folds` was given. Pass `score=`, the training set, if `data` is a "
            "holdout set; or `folds=2` if `data` is the training set itself."
        )
    if not isinstance(seed, Integral) or not -(2**63) <= int(seed) < 2**63:
        raise RholossError(f"`seed` is {seed!r}; give a whole number, of 64 bits at most.")
    for name, value in numbers.items():
        if value is not None or name in ("epochs", "batch_size"):
            positive(name, value)


def _plan(data: Any, score: Any, folds: int | None, seed: int) -> tuple[Points, list[split.Member]]:
    points_of(data, "data")
    points = points_of(data if score is None else score, "score")
    if folds is None:
        return points, split.holdout(data, points, seed)
    return points, split.cross_fit(data, points, folds, seed)


def _fit_and_score(
    work: Work, made: list[nn.Module], partial: Partial, progress: bool
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Fit each member, unless an earlier run did that; the losses of all points.

    `made` holds the model of the first member; it is taken out, so that memory holds one at a time.
    """
    points, settings = work.points, work.settings
    fits, value_n = [], np.full(len(points.ids), np.nan, np.float32)
    for number, member in enumerate(work.members):
        model = made.pop() if made else work.factory(member)
        several = len(work.members) > 1
        title = (
            f"model {number + 1} of {len(work.members)}" if several else "irreducible-loss model"
        )
        fit = partial.fitted(member.name)
        if fit is None:
            with Bar(rows_to_visit(member, settings), f"fitting {title}", progress) as bar:
                fit = fit_member(model, without_ids(work.data), points, member, settings, bar)
            partial.keep_fitted(member.name, fit)
        else:
            model.load_state_dict(fit["state"])
        which = member.score
        with Bar(len(which), f"scoring with {title}", progress) as bar:
            value_n[which], fit["scoring_seconds"] = score_points(
                model, points, which, settings.loss, settings.scoring, partial, member.name, bar
            )
        fits.append(fit)
    return fits, value_n


def _about_training(model: nn.Module, settings: Settings) -> dict[str, Any]:
    optimizer = new_optimizer(settings.make_optimizer, trained_parameters(model))
    return {
        "model": content_hash(dict(model.state_dict())),  # structure and initial weights
        "optimizer": f"{type(optimizer).__qualname__} {optimizer.state_dict()['param_groups']}",
        "versions": [library_version(), torch.__version__],
    }


def _about_fits(
    members: list[split.Member], folds: int | None, seed: int, fits: list[dict[str, Any]]
) -> dict[str, Any]:
    models = [fit.pop("model") for fit in fits]
    how = {
        "kind": "holdout" if folds is None else "folds",
        "folds": folds,
        "seed": seed,
        "trained_on": [len(member.train) for member in members],
        "scored": [len(member.score) for member in members],
    }
    seconds = sum(fit["seconds"] + fit["scoring_seconds"] for fit in fits)
    return {"model": {**models[0], "fits": fits}, "split": how, "seconds": seconds}
