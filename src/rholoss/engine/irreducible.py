"""Cheap irreducible losses for resident data: a short fit with a decayed learning rate, all on the device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rholoss.engine.resident import Resident
from rholoss.engine.streamed import Streamed
from rholoss.engine.trainer import Trainer
from rholoss.errors import RholossError
from rholoss.il.split import folds as fold_of
from rholoss.il.store import Irreducible
from rholoss.losses import TASKS
from rholoss.modes import PRECISIONS, own_autocast, scoring_mode


def one_cycle(peak: float, total_steps: int, warm_up: float = 0.2) -> Callable[[int], float]:
    """A learning rate that rises to `peak` and then falls to zero, both along straight lines."""
    top = max(1, round(total_steps * warm_up))

    def rate(step: int) -> float:
        rising = (step + 1) / top
        falling = (total_steps - step) / max(1, total_steps - top)
        return peak * min(rising, falling, 1.0)

    return rate


def losses_of(
    model: nn.Module,
    data: Resident | Streamed,
    *,
    loss: str = "classification",
    batch_size: int = 2500,
    precision: str | None = None,
) -> Tensor:
    """The loss of each row, un-augmented, in eval mode; [N] on the device."""
    dtype = PRECISIONS[precision] if precision else None
    rows = torch.arange(len(data), device=data.device)
    parts = []
    with torch.no_grad(), scoring_mode(model, batch_norm="eval", dropout=False):
        for part in rows.split(batch_size):
            with own_autocast(data.device, dtype):
                parts.append(TASKS[loss](model, data.batch(part)))
    return torch.cat(parts)


def fit_resident(
    make_model: Callable[[], nn.Module],
    data: Resident | Streamed,
    *,
    score: Resident | Streamed | None = None,
    folds: int | None = None,
    epochs: int = 12,
    batch_size: int = 256,
    learning_rate: float = 4e-3,
    loss: str = "classification",
    precision: str | None = None,
    compile: bool = False,
    seed: int = 0,
    evaluations: int = 3,
) -> Irreducible:
    """As `fit_irreducible`, in seconds, for data on the device.

    A learning rate that falls to zero reaches in `epochs` passes what a constant one reaches in several
    times as many. The loss on the points to be scored is looked at in the last `evaluations` epochs, and
    the lowest counts: each point keeps its loss under those weights.

    Args:
        data: the holdout set (may be augmented), or with `folds` the training set.
        score: the points to be scored; with `folds` they are those of `data`.
    """
    if (score is None) == (folds is None):
        raise RholossError(
            f"Pass either `score`, the points to be scored, or `folds`, but got {score} and {folds}."
        )
    started = time.perf_counter()
    fit = functools.partial(
        _fit_and_score,
        make_model,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        loss=loss,
        precision=precision,
        compile=compile,
        evaluations=evaluations,
    )
    target = data if score is None else score
    values = torch.full((len(target),), torch.nan, device=data.device)
    if folds is None:
        values[:] = fit(data, target, seed=seed)
    else:
        fold = torch.as_tensor(fold_of(data.ids.cpu().numpy(), folds, seed), device=data.device)
        for number in range(folds):
            rows = (fold == number).nonzero().flatten()
            others = (fold != number).nonzero().flatten()
            values[rows] = fit(data.take(others), data.take(rows), seed=seed + number)
    losses = values.cpu()
    split = {"folds": folds, "seed": seed} if folds else None
    return Irreducible.from_losses(
        losses, data.ids.cpu() if score is None else score.ids.cpu(), loss=loss, split=split,
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def _fit_and_score(
    make_model: Callable[[], nn.Module],
    data: Resident | Streamed,
    score: Resident | Streamed,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    loss: str,
    precision: str | None,
    compile: bool,
    evaluations: int,
    seed: int,
) -> Tensor:
    batch_size = min(batch_size, len(data))
    per_epoch = len(data) // batch_size
    total = epochs * per_epoch
    with torch.random.fork_rng([data.device] if data.device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = make_model()
    if data.images:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    trainer = Trainer(
        model, data, total_steps=total, method="uniform", candidates=batch_size, keep=1.0,
        learning_rate=one_cycle(learning_rate, total), loss=loss, precision=precision, compile=compile,
        seed=seed,
    )  # fmt: skip
    best: Tensor | None = None
    for epoch in range(epochs):
        trainer.train(per_epoch)
        if epoch >= epochs - evaluations:
            loss_N = losses_of(trainer.model, score, loss=loss, precision=precision)
            if best is None or loss_N.mean() < best.mean():
                best = loss_N
    trainer.flush()
    assert best is not None
    return best
