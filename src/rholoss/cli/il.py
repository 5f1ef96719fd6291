"""`rholoss il fit`, `score` and `check`: make irreducible losses, and compare them with the data."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Annotated

import torch
import typer

from rholoss.cli import objects, options
from rholoss.cli.errors import Commands, when_stopped
from rholoss.cli.ranks import ranks
from rholoss.cli.show import show
from rholoss.cli.weights import load_weights
from rholoss.distributed import is_running
from rholoss.errors import RholossError
from rholoss.il import files
from rholoss.il.fit import fit_irreducible
from rholoss.il.guessing import mean_and_guess, with_guess
from rholoss.il.score import score_irreducible
from rholoss.il.store import Irreducible
from rholoss.progress import clock

AGAIN = "Run the same command again: models that are fitted and points that are scored were kept."

il = typer.Typer(cls=Commands, rich_markup_mode=None)


@il.callback(invoke_without_command=True)
def group(ctx: typer.Context) -> None:
    """Irreducible losses: the loss of each training point under a model of holdout data.

    They are made once, kept in a directory, and reused by every later run. Each loss belongs to an
    id. An id is the row number in the data set inside all views: row 7 of `train` is id 7 also in a
    Subset or after shuffling. Other ids, strings for instance, come with
    `rholoss.WithIndex(train, ids=...)`.

    \b
    Example: mytask.py holds `train` and `holdout` (data sets) and `small` (a model class).
      rholoss il fit --holdout mytask:holdout --score mytask:train \\
                     --model mytask:small --out il/mytask
      rholoss il show il/mytask
      rholoss il check il/mytask --data mytask:train
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@il.command(short_help="Train a small model and measure each training point.")
def fit(
    score: Annotated[
        str,
        typer.Option(
            metavar="M:TRAIN", help="The points to measure: the training set, un-augmented."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(metavar="M:MAKE", help="A class or function that makes a new, small model."),
    ],
    out: options.Out,
    holdout: Annotated[
        str | None,
        typer.Option(
            metavar="M:HOLDOUT", help="The data to fit on; it must have no row of --score."
        ),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            help="In place of --holdout: cut --score into this many parts, 2 or more, and score each "
            "with a model that was trained on the others."
        ),
    ] = None,
    loss: options.Loss = "classification",
    labels: options.Labels = None,
    collate: options.Collate = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the holdout set, at most.")] = 100,
    batch_size: options.BatchSize = 320,
    score_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Rows at a time when scoring; by default --batch-size."),
    ] = None,
    patience: Annotated[
        int, typer.Option(min=0, help="Stop after this many epochs without a lower loss; 0: never.")
    ] = 5,
    check_rows: Annotated[
        int | None,
        typer.Option(
            min=1, help="Compare epochs on this many points of --score, not on all (faster)."
        ),
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3,
    device: options.Device = None,
    seed: Annotated[int, typer.Option(help="Of weights, order and folds.")] = 0,
    workers: options.Workers = 0,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a small model on holdout data and measure the irreducible loss of each training point.

    An epoch here is one pass over the holdout set. Of all epochs, the weights with the lowest loss on
    the points to be measured are kept (not those with the highest accuracy; no test set is used). To
    continue a run that was interrupted, run the same command again.

    Objects are named as module:attribute; modules in the current directory are found. A data set is
    used as it is; a function or class without arguments is called.

    \b
    Examples:
      rholoss il fit --holdout mytask:holdout --score mytask:train \\
                     --model mytask:small --out il/mytask
      rholoss il fit --folds 2 --score mytask:train --model mytask:small --out il/mytask
      torchrun --nproc-per-node 8 -m rholoss il fit --folds 8 ...     eight processes share the work
    """
    if (holdout is None) == (folds is None):
        raise RholossError(
            f"--holdout is {holdout} and --folds is {folds}; give one of them: --holdout M:HOLDOUT if "
            "you have data that is not trained on, else --folds 2."
        )
    if not (math.isfinite(lr) and lr > 0):
        raise RholossError(f"--lr is {lr}; give a number above 0, e.g. 0.001.")
    _check_free(out, overwrite)
    # What is quick to check comes first: a data set may take long to make.
    per_example, where = objects.loss(loss), objects.device(device)
    collate_fn, make = objects.collate(collate), objects.factory(model, "--model")
    points = objects.dataset(score, "--score")
    trained_on = points if holdout is None else objects.dataset(holdout, "--holdout")
    with when_stopped(AGAIN), ranks() as rank:
        made = fit_irreducible(
            make,
            trained_on,
            score=points,
            folds=folds,
            loss=per_example,
            optimizer=functools.partial(torch.optim.AdamW, lr=lr),
            epochs=epochs,
            batch_size=batch_size,
            score_batch_size=score_batch_size,
            patience=patience or None,
            check_rows=check_rows,
            device=where,
            seed=seed,
            num_workers=workers,
            collate_fn=collate_fn,
            labels=objects.labels(labels),
            out=out,
            progress=not quiet,
            ranks=is_running(),
        )
    if rank == 0:
        _report(made, out)


@il.command(short_help="Measure with a model that is fitted already.")
def score(
    model: Annotated[
        str, typer.Option(metavar="M:MODEL", help="The fitted model, or a function that makes one.")
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="M:TRAIN", help="The points to measure, un-augmented; a data set or a Stream."
        ),
    ],
    out: options.Out,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Weights for the model: a .safetensors file, a file of torch.save, or what `il fit` "
            "wrote. Code in the file is not run.",
        ),
    ] = None,
    loss: options.Loss = "classification",
    labels: options.Labels = None,
    collate: options.Collate = None,
    batch_size: options.BatchSize = 320,
    device: options.Device = None,
    workers: options.Workers = 0,
    seconds: Annotated[
        float, typer.Option(help="The seconds that training the model took, for the ledger.")
    ] = 0.0,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure irreducible losses with a model that is fitted already.

    The model must not have been trained on these points: their losses would be too low. Each point
    is measured once, in eval mode.

    \b
    Example:
      rholoss il score --model mytask:small --weights small.safetensors \\
                       --data mytask:train --out il/mytask
      torchrun --nproc-per-node 8 -m rholoss il score ...     eight processes share the work
    """
    _check_free(out, overwrite)
    where = objects.device(device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    per_example, collate_fn = objects.loss(loss), objects.collate(collate)
    made = objects.model(model, "--model")
    if weights is not None:
        load_weights(made, weights)
    points = objects.dataset(data, "--data", stream=True)
    with when_stopped(AGAIN), ranks() as rank:
        measured = score_irreducible(
            made,
            points,
            loss=per_example,
            labels=objects.labels(labels),
            batch_size=batch_size,
            device=where,
            num_workers=workers,
            collate_fn=collate_fn,
            out=out,
            seconds=seconds,
            progress=not quiet,
            ranks=is_running(),
        )
    if rank == 0:
        _report(measured, out)


@il.command(short_help="Do the losses belong to this data set?")
def check(
    store: options.Store,
    data: Annotated[str, typer.Option(metavar="M:TRAIN", help="The data set to train on.")],
    labels: options.Labels = None,
    how: Annotated[
        str,
        typer.Option(
            "--check", help="full: rows, labels (or content), ids; size: number of rows only."
        ),
    ] = "full",
) -> None:
    """Compare stored losses with a data set: exit code 0 if they belong together, else 2.

    If a label has changed, or a row was moved or removed, points would get the losses of others. The
    exit code is also 2 if the directory does not say for which data the losses were made.

    \b
    Example:
      rholoss il check il/mytask --data mytask:train
    """
    if how not in ("full", "size"):
        raise RholossError(f"--check is {how!r}; choose full or size.")
    points = objects.dataset(data, "--data")
    given, found = objects.labels(labels), Irreducible.load(store)
    compared = found.compare(points, given, how)
    if compared is None:
        way_out = " Or leave out --check size." if how == "size" else ""
        raise RholossError(found.not_compared() + way_out)
    what = "number of rows" if compared == "number" else compared
    typer.echo(f"{store} belongs to {data}: {len(points):,} rows, {what} compared.")


il.command(short_help="What is in a directory of losses.")(show)


def _check_free(out: Path, overwrite: bool) -> None:
    """Raise if complete losses would be replaced. Unfinished work is not: it is continued."""
    if overwrite or not (out / files.META).exists():
        return
    old = files.read_meta(out)
    raise RholossError(
        f"--out {out} holds irreducible losses already ({files.measured_rows(old)}, made "
        f"{old.get('created', 'at an unknown time')}). Give another directory, for instance "
        f"{files.beside(out)}, or add --overwrite to replace them."
    )


def _report(made: Irreducible, out: Path) -> None:
    measured, mean = int((~made.values.isnan()).sum()), with_guess(*mean_and_guess(made))
    typer.echo(
        f"{out}: {measured:,} irreducible losses, made in {clock(made.seconds)}: {mean}.\n"
        f"Look at them: rholoss il show {out}\n"
        f'Use them:     il = rholoss.Irreducible.load("{out}", train)\n'
        f'              select = rholoss.Selector("rho", irreducible=il, keep=0.1)'
    )
