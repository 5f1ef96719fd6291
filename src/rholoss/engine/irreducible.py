"""Irreducible losses for data on the device: a short fit with a learning rate that falls to zero."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rholoss.engine.capture import says_what_to_reduce
from rholoss.engine.checks import check_data
from rholoss.engine.resident import Resident, check_classes
from rholoss.engine.streamed import Streamed
from rholoss.engine.trainer import Trainer
from rholoss.errors import RholossError
from rholoss.guard import mean_of_finite
from rholoss.il.build import as_losses, table_of
from rholoss.il.fingerprint import identity_of_rows
from rholoss.il.guessing import tell_useless
from rholoss.il.ids import shown
from rholoss.il.points import about_model
from rholoss.il.score import tell_unusable
from rholoss.il.split import folds as fold_of
from rholoss.il.store import Irreducible
from rholoss.il.train import Factory
from rholoss.ladder import Ladder
from rholoss.modes import own_autocast, scoring_mode
from rholoss.scoring import Scorer

CHUNK = 25  # steps that one fold's fit takes before the next fold's
LOOK = 2500  # rows at a time when losses are measured


def one_cycle(peak: float, total_steps: int, warm_up: float = 0.2) -> Callable[[int], float]:
    """A learning rate that rises linearly to `peak`, and then falls linearly to zero.

    Args:
        peak: the highest rate.
        total_steps: the steps of the run. Later steps are refused.
        warm_up: the share of the steps in which the rate rises.

    Returns:
        A function from the number of the step (0, 1, ...) to its rate.
    """
    top = max(1, round(total_steps * warm_up))

    def rate(step: int) -> float:
        if step > total_steps:
            raise RholossError(
                f"`one_cycle` was made for `total_steps`={total_steps}, but is asked for the rate of step "
                f"{step}, when it is over; pass it as many steps as the run has."
            )
        rising = (step + 1) / top
        falling = (total_steps - step) / max(1, total_steps - top)
        return peak * min(rising, falling, 1.0)

    return rate


def losses_of(
    model: nn.Module,
    data: Resident | Streamed,
    *,
    loss: str = "classification",
    batch_size: int = LOOK,
    precision: str | None = None,
) -> Tensor:
    """Measure the loss of each row of a data set, without augmentation and in eval mode.

    Args:
        model: on the device of the data. It is left as it was.
        data: a `Resident` or a `Streamed`.
        loss: the name of a task, such as 'classification' or 'tokens', or a function (model, batch) -> [B].
        batch_size: rows at a time.
        precision: None keeps what is in force; 'bf16' or 'fp16' runs the model under autocast.

    Returns:
        The losses in the order of the rows, float32 [N] on the device.
    """
    scorer = Scorer(loss, precision=precision)
    rows = torch.arange(len(data), device=data.device)
    parts = []
    with torch.no_grad(), scoring_mode(model, batch_norm="eval", dropout=False):
        for part in rows.split(int(batch_size)):
            with own_autocast(data.device, scorer.dtype):
                parts.append(scorer.loss(model, data.batch(part)))
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
    """Fit a model and measure irreducible losses: `fit_irreducible` for data on the device, in seconds.

    The learning rate falls to zero (`one_cycle`), which reaches in `epochs` passes what a constant rate
    reaches in several times as many. After each of the last `evaluations` epochs the points to be scored are
    measured; the losses of the epoch with the lowest mean are returned. The caller's random state is left
    alone.

    Args:
        make_model: a function without arguments that returns a new model; called once for each fit.
        data: what to fit on, a `Resident` or a `Streamed`: the holdout set, or with `folds` the training set.
            It may be augmented.
        score: the points to be scored, which are not augmented: the training set. In place of `folds`.
        folds: fit this many models, 2 or more, each on all of `data` but one part, and score that part with
            it. Needs no holdout data. In place of `score`.
        epochs: passes over the data.
        batch_size: rows of a training step.
        learning_rate: the highest rate of `one_cycle`, for AdamW.
        loss: the name of a task, such as 'classification' or 'tokens'.
        precision: of training and scoring: 'bf16', or None to keep what is in force, usually float32.
        compile: run the fits through `torch.compile`.
        seed: of weights, order and folds.
        evaluations: how many of the last epochs to measure after.

    Returns:
        The irreducible losses by id, for `Trainer(irreducible=...)` and `Selector`.
    """
    return _fit_rungs(
        make_model, data, (), score=score, folds=folds, epochs=epochs, batch_size=batch_size,
        learning_rate=learning_rate, loss=loss, precision=precision, compile=compile, seed=seed,
        evaluations=evaluations,
    )[-1]  # fmt: skip


def fit_ladder(
    make_model: Callable[[], nn.Module],
    data: Resident | Streamed,
    *,
    rungs: Sequence[int] = (1, 3),
    ahead: float = 0.8,
    **options: Any,
) -> Ladder:
    """Fit as `fit_resident` does, and return a `Ladder` that also has the losses after some earlier epochs.

    Args:
        make_model: a function without arguments that returns a new model.
        data: what to fit on: the holdout set, or with `folds` the training set.
        rungs: the epochs after which to keep losses, rising, before the last `evaluations`. A rung whose
            mean loss is not higher than that of a later one is left out.
        ahead: of the `Ladder`: when a run moves on to the next rung.
        options: further arguments of `fit_resident`: `score` or `folds`, and others.
    """
    options = {**(fit_resident.__kwdefaults__ or {}), **options}
    *young, last = _fit_rungs(make_model, data, rungs, **options)
    falling = [last]
    for rung in reversed(young):
        if _mean(rung.values) > _mean(falling[0].values):
            falling.insert(0, rung)
    return Ladder(falling, ahead)


def _fit_rungs(
    make_model: Callable[[], nn.Module],
    data: Resident | Streamed,
    rungs: Sequence[int],
    *,
    score: Resident | Streamed | None,
    folds: int | None,
    seed: int,
    **training: Any,
) -> list[Irreducible]:
    """Tables of irreducible losses: one for each epoch of `rungs`, then the lowest of the last epochs."""
    if (score is None) == (folds is None):
        raise RholossError(
            f"Pass either `score`, the points to be scored, or `folds`, but got {score} and {folds}."
        )
    if score is data:
        warnings.warn(
            "`score` is `data` itself, so that each point is scored by a model that was fitted to it, and "
            "irreducible losses come out too low. Pass holdout data, or `folds=2` in place of `score`.",
            stacklevel=3,
        )
    check_data(data)
    scored = data if score is None else score
    check_data(scored, "score")
    started = time.perf_counter()
    factory = Factory(make_model, data.device)
    make: Callable[..., _Fit] = functools.partial(_Fit, factory.make, rungs=rungs, **training)
    ids = scored.ids.cpu().numpy()
    fits: list[tuple[Tensor, _Fit]] = []  # each with the rows that it scores
    if score is not None:
        fits.append((torch.arange(len(score), device=data.device), make(data, score, seed=seed)))
    else:
        assert folds is not None
        fold = torch.as_tensor(fold_of(data.ids.cpu().numpy(), folds, seed), device=data.device)
        for number in range(folds):
            rows, others = (fold == number).nonzero()[:, 0], (fold != number).nonzero()[:, 0]
            with says_what_to_reduce("`folds`, each of which has a copy of the data"):
                parts = data.take(others), data.take(rows)
            fits.append((rows, make(*parts, seed=seed + number)))
    with _seeded(seed, data.device):  # for dropout, which draws from torch's global state
        # The fits take turns, so that they run side by side: one small model leaves a GPU half idle.
        while not all(fit.finished for _, fit in fits):
            for _, fit in fits:
                fit.advance()
    shape = len(rungs) + 1, len(ids)
    values = torch.full(shape, torch.nan, dtype=torch.float32, device=data.device)
    for rows, fit in fits:
        values[:, rows] = torch.stack(fit.read())
    bad = (~values[-1].isfinite()).nonzero().flatten().cpu().numpy()
    tell_unusable(len(bad), len(ids), f" (ids {shown(ids[bad[:6]].tolist())})")
    about: dict[str, Any] = {
        "loss": fits[0][1].loss,
        "model": about_model(fits[0][1].trainer.model),
        "split": {"kind": "folds" if folds else "holdout", "folds": folds, "seed": int(seed)},
    }
    seconds = [0.0] * len(rungs) + [time.perf_counter() - started]  # one fit made all of them
    identity = identity_of_rows(ids, scored.targets)
    tables = [
        table_of(as_losses(loss_N), ids, identity, {**about, "seconds": spent})
        for loss_N, spent in zip(values.cpu(), seconds, strict=True)
    ]
    tell_useless(tables[-1], stacklevel=4)
    return tables


class _Fit:
    """A fit in progress: one model, trained a few steps at a time on a CUDA stream of its own.

    Arguments are those of `fit_resident`; `score` is what this model scores.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        data: Resident | Streamed,
        score: Resident | Streamed,
        *,
        rungs: Sequence[int],
        seed: int,
        epochs: int,
        batch_size: int,
        learning_rate: float,
        loss: str,
        precision: str | None,
        compile: bool,
        evaluations: int,
    ) -> None:
        if min(epochs, batch_size, evaluations) < 1:
            raise RholossError(
                f"`epochs`, `batch_size` and `evaluations` must be at least 1, but are {epochs}, "
                f"{batch_size} and {evaluations}."
            )
        if list(rungs) != sorted({n for n in rungs if 1 <= n <= epochs - evaluations}):
            raise RholossError(
                f"`rungs` must be epochs in rising order, from 1 to {epochs - evaluations} (the last "
                f"`evaluations`={evaluations} of `epochs`={epochs} are the last rung), but are "
                f"{list(rungs)}; give more `epochs`, or other `rungs`."
            )
        check_classes(score.targets, loss)
        self.loss = loss
        batch_size = min(batch_size, len(data))
        self.per_epoch = len(data) // batch_size
        self.total = epochs * self.per_epoch
        self.first_look = (epochs - evaluations) * self.per_epoch
        with _seeded(seed, data.device):
            model = make_model()
        if data.images:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.trainer = Trainer(
            model, data, total_steps=self.total, method="uniform", candidates=batch_size, keep=1.0,
            learning_rate=one_cycle(learning_rate, self.total), loss=loss, precision=precision,
            compile=compile, seed=seed,
        )  # fmt: skip
        self.trainer.to_reduce = "`batch_size`"
        rows = min(LOOK, 10 * batch_size)
        self.look = functools.partial(
            losses_of, model, score, loss=loss, batch_size=rows, precision=precision
        )
        self.rungs = [epoch * self.per_epoch for epoch in rungs]  # as steps
        self.young: list[Tensor] = []  # the losses at the rungs
        self.found: list[Tensor] = []  # the losses after each of the last epochs
        self.stream = torch.cuda.Stream(data.device) if data.device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(data.device))

    @property
    def finished(self) -> bool:
        return self.trainer.step == self.total

    def advance(self) -> None:
        """Take a few steps, at most to the end of the epoch; then measure the points if it is time to."""
        if self.finished:
            return
        trainer = self.trainer
        left = self.per_epoch - trainer.step % self.per_epoch
        with torch.cuda.stream(self.stream), says_what_to_reduce(trainer.to_reduce):
            trainer.train(min(CHUNK, left))
            if trainer.step in self.rungs:
                self.young.append(self.look())
            if trainer.step % self.per_epoch == 0 and trainer.step > self.first_look:
                self.found.append(self.look())

    def read(self) -> list[Tensor]:
        """The losses at the rungs, then those of the last epochs with the lowest mean."""
        with torch.cuda.stream(self.stream):
            self.trainer.flush()
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return [*self.young, min(self.found, key=_mean)]


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's global random state starts from the seed; afterwards it is the caller's again."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _mean(loss_N: Tensor) -> float:
    """The mean of the finite losses, so that one bad row does not decide; infinity if none is finite."""
    mean = float(mean_of_finite(loss_N))
    return math.inf if math.isnan(mean) else mean
