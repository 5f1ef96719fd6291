"""Cheap irreducible losses for resident data: a short fit with a decayed learning rate, all on the device."""

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

CHUNK = 25  # steps of one fit before the next has its turn
LOOK = 2500  # rows that are forwarded at a time for their losses


def one_cycle(peak: float, total_steps: int, warm_up: float = 0.2) -> Callable[[int], float]:
    """A learning rate that rises to `peak` and then falls to zero, both along straight lines."""
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
    """The loss of each row, un-augmented, in eval mode; [N] on the device."""
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
    """As `fit_irreducible`, in seconds, for data on the device.

    A learning rate that falls to zero reaches in `epochs` passes what a constant one reaches in several
    times as many. The loss on the points to be scored is looked at in the last `evaluations` epochs, and
    the lowest counts: each point keeps its loss under those weights.

    Args:
        data: the holdout set (may be augmented), or with `folds` the training set.
        score: the points to be scored; with `folds` they are those of `data`.
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
    """As `fit_resident`, with its options; the losses after some of the epochs are kept as well.

    Args:
        rungs: these epochs; one whose mean loss is no higher than that of a later one is left out.
        ahead: of the `Ladder`.
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
    """Irreducible losses after the epochs of `rungs`, and the lowest of the last ones."""
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
    fits: list[tuple[Tensor, _Fit]] = []  # with the rows that each scores
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
    with _seeded(seed, data.device):  # of dropout, which draws from torch's own state
        # Side by side: one small model leaves a GPU half idle.
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
    seconds = [0.0] * len(rungs) + [time.perf_counter() - started]  # of one fit
    identity = identity_of_rows(ids, scored.targets)
    tables = [
        table_of(as_losses(loss_N), ids, identity, {**about, "seconds": spent})
        for loss_N, spent in zip(values.cpu(), seconds, strict=True)
    ]
    tell_useless(tables[-1], stacklevel=4)
    return tables


class _Fit:
    """One model on its way, on a stream of its own."""

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
        self.rungs = [epoch * self.per_epoch for epoch in rungs]
        self.young: list[Tensor] = []  # losses at these steps
        self.found: list[Tensor] = []
        self.stream = torch.cuda.Stream(data.device) if data.device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(data.device))

    @property
    def finished(self) -> bool:
        return self.trainer.step == self.total

    def advance(self) -> None:
        """Some steps of an epoch; after one of the last epochs, a look at the points to be scored."""
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
        """The losses of the rungs, and those of the look whose mean was lowest."""
        with torch.cuda.stream(self.stream):
            self.trainer.flush()
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return [*self.young, min(self.found, key=_mean)]


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's own random state starts from the seed, and is the caller's again afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _mean(loss_N: Tensor) -> float:
    """The mean of the finite losses: one row without one must not decide between looks."""
    mean = float(mean_of_finite(loss_N))
    return math.inf if math.isnan(mean) else mean
