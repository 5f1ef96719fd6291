"""`rholoss advise`: measure the user's own model, and print what selection must save to pay."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rholoss.advise import Cost, advice, costs
from rholoss.cli import objects, options, tables
from rholoss.cli.errors import when_stopped
from rholoss.errors import RholossError
from rholoss.il.store import Irreducible
from rholoss.timing import Timings, measure, row_bytes
from rholoss.workers.batches import RESCORE
from rholoss.workers.cost import GIGABIT, HANDLING, Prediction, Work, predict, sentences
from rholoss.workers.weights import num_bytes

COLUMNS = (
    "k",
    "keep",
    "candidates",
    "scoring\nms",
    "training\nms",
    "loading\nms",
    "step\nratio",
    "must need\nx fewer steps",
)
WORKER_COLUMNS = ("k", "keep", "step\nms", "step\nratio", "bound by", "scored by\nworkers")


def advise(
    model: Annotated[
        str, typer.Option(metavar="M:MODEL", help="The model you train, or its maker.")
    ],
    data: Annotated[str, typer.Option(metavar="M:TRAIN", help="The data set you train on.")],
    loss: options.Loss = "classification",
    batch: Annotated[int, typer.Option(min=1, help="n_b, the rows that a step trains on.")] = 32,
    device: options.Device = None,
    precision: Annotated[
        str | None, typer.Option(help="Of scoring: bf16, fp16 or fp32; by default as in training.")
    ] = None,
    train_precision: Annotated[
        str | None, typer.Option(help="Of training: bf16, fp16 or fp32 (the default).")
    ] = None,
    batch_norm: Annotated[str, typer.Option(help="While scoring: train, batch or eval.")] = "train",
    chunk: Annotated[
        int | None,
        typer.Option(min=1, help="Score this many candidates at a time, not all at once."),
    ] = None,
    collate: options.Collate = None,
    loader_workers: Annotated[
        int,
        typer.Option(min=0, help="Worker processes of your loader, to estimate how long it waits."),
    ] = 0,
    workers: Annotated[
        int, typer.Option(min=0, help="Scoring workers (ranks that only score) for each trainer.")
    ] = 0,
    link: Annotated[
        float, typer.Option(min=1e-6, help="Gbit/s from the trainer to its workers.")
    ] = 10.0,
    every: Annotated[
        int, typer.Option(min=1, help="Steps between two transfers of the weights to workers.")
    ] = 1,
    il: Annotated[
        Path | None,
        typer.Option("--il", metavar="DIR", help="Irreducible losses, to count their cost."),
    ] = None,
    il_seconds: Annotated[
        float | None, typer.Option(min=0, help="The cost of irreducible losses, in place of --il.")
    ] = None,
    il_runs: Annotated[int, typer.Option(min=1, help="How many runs share that cost.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of uniform training, to spread that cost over.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long to measure, about.")] = 10.0,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure your model on your machine: what does selection cost, and when does it pay?

    Times scoring of k x --batch candidates, a training step (forward, backward, AdamW) on --batch
    rows, and loading, and prints for k = 2, 3, 4, 5, 10 how many times fewer steps than uniform
    training selection must need to come out even. k is 1 / keep. Without --loader-workers loading
    comes on top of each step; with them it runs beside the model. With --workers a second table
    predicts the same with scoring workers on machines like this one (docs/many-processes.md).
    Nothing is written, and the model that you name is not changed.

    \b
    Examples:
      rholoss advise --model mytask:target --data mytask:train
      rholoss advise --model mytask:target --data mytask:train --batch 128 \\
                     --precision bf16 --loader-workers 8 --il il/mytask --steps 20000
      rholoss advise --model mytask:target --data mytask:train --workers 3 --link 25
    """
    if il is not None and il_seconds is not None:
        raise RholossError("--il and --il-seconds were both given; give one of them.")
    cost = Irreducible.load(il).seconds if il is not None else il_seconds or 0.0
    if cost and steps is None:
        raise RholossError(
            f"The irreducible losses cost {cost:.1f} s; pass --steps, how many steps uniform training "
            "takes, to spread that over."
        )
    per_example, where = objects.loss(loss), objects.device(device)
    collate_fn, target = objects.collate(collate), objects.model(model, "--model")
    train = objects.dataset(data, "--data")
    with when_stopped(
        "Nothing was written. Run the command again to measure; --seconds makes it short."
    ):
        timings = measure(
            target,
            train,
            loss=per_example,
            batch=batch,
            device=where,
            precision=precision,
            train_precision=train_precision,
            batch_norm=batch_norm,
            chunk=chunk,
            collate_fn=collate_fn,
            seconds=seconds,
            progress=not quiet,
        )
    table = costs(timings, workers=loader_workers, il_seconds=cost / il_runs, steps=steps)
    said = advice(timings, table, workers=loader_workers)
    scored: list[Prediction] = []
    if workers:
        sizes = num_bytes(target), batch * row_bytes(train, collate_fn)
        works = [_work(row, max(loader_workers, 1), *sizes) for row in table]
        again = [min(1.0, RESCORE / row.k) for row in table]
        scored = [
            predict(work, workers, link=link * GIGABIT, every=every, rescored=share)
            for work, share in zip(works, again, strict=True)
        ]
        said += sentences(works[-1], scored[-1], link * GIGABIT, every)
    if as_json:
        typer.echo(as_text(timings, table, said, scored))
    else:
        _print(timings, table, said, loader_workers, scored)


def _work(row: Cost, loader_workers: int, weights: int, rows: int) -> Work:
    """What a step with scoring workers has to do; `weights` and `rows` are sizes in bytes."""
    loading = row.loading / loader_workers
    return Work(row.training, row.scoring, loading, weights, rows, handling=HANDLING)


def as_text(
    timings: Timings, table: Sequence[Cost], said: Sequence[str], scored: Sequence[Prediction] = ()
) -> str:
    """The result as JSON. A break-even that is infinite (selection can never pay) becomes null.

    Args:
        timings: what was measured.
        table: the costs for each k.
        said: the advice, as sentences.
        scored: the predictions with scoring workers, if there are any.
    """
    rows = [asdict(row) for row in table]
    for row in rows:
        row["break_even"] = None if math.isinf(row["break_even"]) else row["break_even"]
    found = {**asdict(timings), "table": rows, "advice": list(said)}
    if scored:
        found["with_workers"] = [asdict(prediction) for prediction in scored]
    return json.dumps(found, indent=1)


def _print(
    timings: Timings,
    table: Sequence[Cost],
    said: Sequence[str],
    workers: int,
    scored: Sequence[Prediction],
) -> None:
    waits = "on top of each step" if workers == 0 else f"beside the model, {workers} workers"
    flops = timings.flops_per_example
    forward = f", {flops / 1e6:.4g} MFLOPs forward a point" if flops else ""
    typer.echo(
        f"{timings.parameters:,} parameters{forward}, on {timings.device}; medians of "
        f"{timings.rounds} timings\n"
        f"uniform step: {timings.batch} rows, training {timings.training * 1e3:.2f} ms, loading "
        f"{timings.loading[1] * 1e3:.2f} ms ({waits})"
    )
    tables.show(COLUMNS, [_cells(row) for row in table], numbers=COLUMNS)
    if scored:
        typer.echo(f"with {scored[0].workers} scoring workers:")
        pairs = zip(table, scored, strict=True)
        numbers = [name for name in WORKER_COLUMNS if name != "bound by"]
        tables.show(WORKER_COLUMNS, [_worker_cells(*pair) for pair in pairs], numbers=numbers)
    for sentence in said:
        typer.echo(f"- {sentence}")


def _cells(row: Cost) -> tuple[str, ...]:
    """The cells of a row under `COLUMNS`."""
    return (
        str(row.k),
        f"{1 / row.k:.2f}",
        str(row.candidates),
        f"{row.scoring * 1e3:.2f}",
        f"{row.training * 1e3:.2f}",
        f"{row.loading * 1e3:.2f}",
        f"{row.ratio:.2f}x",
        "cannot pay" if math.isinf(row.break_even) else f"{row.break_even:.2f}x",
    )


def _worker_cells(row: Cost, found: Prediction) -> tuple[str, ...]:
    """The cells of a row under `WORKER_COLUMNS`."""
    return (
        str(row.k),
        f"{1 / row.k:.2f}",
        f"{found.seconds * 1e3:.2f}",
        f"{found.seconds / row.uniform_step:.2f}x",
        found.bound,
        f"{found.by_workers:.0%}",
    )
