"""Table 1: the chain of approximations from (nearly) exact Bayes to RHO-LOSS.

    0   ensembles of 5 for the target and for the irreducible loss, retrained after each acquisition
    1a  single models
    1b  one gradient step on what was acquired, on data that is there five times
    2   the irreducible-loss model is not updated
    3   the irreducible-loss model is small

All see the same candidates in the same order, and each acquires by its own score. Their scores of the same
1,000 candidates, after equally many gradient steps, are compared by rank with those of Approximation 0.

Shapes: T candidate batches, B candidates, k acquired, M members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from experiments.digits.data import NUM_CLASSES, Points
from experiments.digits.ensembles import Fitter, Stack, accuracy, fit_lowest, losses
from rholoss import core
from rholoss.errors import RholossError

CANDIDATES, KEEP, EPOCHS, RATE = 1000, 0.1, 5, 1e-3
IL_BATCH = 320  # of the authors' IL stage
ENSEMBLE, WIDTH, SMALL_WIDTH = 5, 512, 256


@dataclass(frozen=True)
class Approximation:
    """One link of the chain, and the paper's rank correlation with Approximation 0."""

    name: str
    what: str
    members: int
    retrains: bool  # five epochs after each acquisition, rather than one step
    updates_il: bool
    il_width: int
    paper: float


CHAIN = (
    Approximation("0", "ensembles, retrained", ENSEMBLE, True, True, WIDTH, 1.0),
    Approximation("1a", "non-Bayesian: single models", 1, True, True, WIDTH, 0.75),
    Approximation("1b", "not converged: one step, data five times", 1, False, True, WIDTH, 0.76),
    Approximation("2", "IL model not updated", 1, False, False, WIDTH, 0.63),
    Approximation("3", "small IL model, 256 units", 1, False, False, SMALL_WIDTH, 0.51),
)


@dataclass(frozen=True)
class Setting:
    """How the study is read where the paper leaves it open.

    Args:
        reading: what 0 and 1a are retrained on. 'A': the points just acquired. 'B': the target on all
            that it has acquired, the IL model on these and the holdout set. 'between': the target as in
            B, the IL model as in A, which a CPU can do.
        il_rate: learning rate of the IL model once it is updated, as a share of the target's.
        repeats: 'in place' shows each candidate batch five times in a row to 1b-3; 'shuffled' deals
            the fivefold data anew and only compares on the batches of Approximation 0.
        hidden: hidden layers; three in the authors' code, two in one place of the paper.
        il_epochs, il_keep: of the fit on the holdout set; the 'last' epoch ("to convergence"), or the one
            of 'lowest' loss on D, which its wrong labels make an early one.
        split, noisy_holdout: see `data.split_digits`; whether the holdout labels are noisy too.
    """

    reading: str = "A"
    il_rate: float = 1.0
    repeats: str = "in place"
    hidden: int = 3
    il_epochs: int = 10
    il_keep: str = "last"
    split: str = "id"
    noisy_holdout: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("reading", ("A", "between", "B")),
            ("repeats", ("in place", "shuffled")),
            ("il_keep", ("lowest", "last")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise RholossError(f"`{name}` is {value!r}; choose one of {', '.join(allowed)}.")

    def widths(self, width: int) -> list[int]:
        return [784, *[width] * self.hidden, NUM_CLASSES]


@dataclass
class IrreducibleModels:
    """The IL ensemble as fitted on the holdout set, and the small IL model; never changed."""

    ensemble: Stack
    small: Stack
    epochs: dict[str, list[int]]

    def copy(self, approximation: Approximation, setting: Setting, seed: int) -> Stack:
        """The model(s) that an approximation starts with: a single one is the ensemble's first."""
        source = self.small if approximation.il_width == SMALL_WIDTH else self.ensemble
        stack = Stack(approximation.members, setting.widths(approximation.il_width), seed)
        stack = stack.to(source.weights[0].device)
        state = {name: value[: stack.members] for name, value in source.state_dict().items()}
        stack.load_state_dict(state)
        return stack


def fit_irreducible_models(
    holdout: Points,
    train: Points,
    setting: Setting,
    seed: int,
    on_epoch: Callable[[], None] = lambda: None,
) -> IrreducibleModels:
    """Both, trained on the holdout set from seeds of their own."""
    stacks, kept = [], {}
    for number, (members, width) in enumerate(((ENSEMBLE, WIDTH), (1, SMALL_WIDTH))):
        stack = Stack(members, setting.widths(width), 100 + 10 * seed + number).to(train.x.device)
        kept[str(width)] = fit_lowest(
            stack, (holdout.x, holdout.y), (train.x, train.y), epochs=setting.il_epochs,
            batch_size=IL_BATCH, rate=RATE, seed=100 + 10 * seed + number, keep=setting.il_keep,
            on_epoch=on_epoch,
        )  # fmt: skip
        stacks.append(stack)
    return IrreducibleModels(*stacks, kept)


@dataclass
class Followed:
    """What one approximation did: scores [T, B] of the compared candidates, and the rows it acquired."""

    score: list[Tensor] = field(default_factory=list)
    acquired: list[Tensor] = field(default_factory=list)  # [k] of each acquisition
    test_accuracy: float = 0.0
    il_accuracy: float = 0.0


def candidate_batches(num_rows: int, seed: int) -> Tensor:
    """The rows of the first epoch, [T, B]; what is left over is dropped."""
    order = torch.randperm(num_rows, generator=core.step_generator(seed, 0))
    num = num_rows // CANDIDATES
    return order[: num * CANDIDATES].view(num, CANDIDATES)


def shuffled_repeats(num_rows: int, steps: int, seed: int) -> Tensor:
    """Batches of data that is there five times, dealt anew, [steps, B]."""
    generator = core.step_generator(seed, 1)
    order = torch.randperm(num_rows * EPOCHS, generator=generator) % num_rows
    return order[: steps * CANDIDATES].view(steps, CANDIDATES)


def follow(
    approximation: Approximation,
    setting: Setting,
    train: Points,
    holdout: Points,
    test: Points,
    il_models: IrreducibleModels,
    seed: int,
) -> Followed:
    """Run one approximation over the first epoch."""
    device = train.x.device
    target = Stack(approximation.members, setting.widths(WIDTH), seed).to(device)
    il = il_models.copy(approximation, setting, seed)
    learner = _Learner(approximation, setting, target, il, train, holdout, seed)
    batches = candidate_batches(len(train), seed).to(device)
    out = Followed()
    for rows, offered in _steps(approximation, setting, batches, len(train), seed):
        if rows is not None:  # compared here
            out.score.append(learner.score(rows).cpu())
        score_B = out.score[-1].to(device) if offered is rows else learner.score(offered)
        b = score_B.sort(descending=True, stable=True).indices[: learner.k]
        learner.learn(offered[b])
        out.acquired.append(offered[b].cpu())
    out.test_accuracy = accuracy(target, test.x, test.y)
    out.il_accuracy = accuracy(il, test.x, test.y)
    return out


def _steps(
    approximation: Approximation, setting: Setting, batches: Tensor, num_rows: int, seed: int
) -> Iterator[tuple[Tensor | None, Tensor]]:
    """(rows whose scores are compared, if any, and rows that are offered) for each acquisition."""
    if approximation.retrains:
        yield from ((rows, rows) for rows in batches)
        return
    steps = len(batches) * EPOCHS
    dealt = shuffled_repeats(num_rows, steps, seed).to(batches.device)
    for step in range(steps):
        rows = batches[step // EPOCHS]
        offered = rows if setting.repeats == "in place" else dealt[step]
        yield (rows if step % EPOCHS == 0 else None), offered


class _Learner:
    """A target and an IL model that score candidates and learn from what was acquired."""

    def __init__(
        self,
        approximation: Approximation,
        setting: Setting,
        target: Stack,
        il: Stack,
        train: Points,
        holdout: Points,
        seed: int,
    ) -> None:
        self.approximation, self.reading, self.seed = approximation, setting.reading, seed
        self.train, self.target, self.il = train, target, il
        self.k = core.num_selected(CANDIDATES, KEEP)
        self.fit = Fitter(target, train.x, train.y, self.k, RATE)
        rate = RATE * setting.il_rate
        if approximation.retrains and self.reading == "B":
            # Rows of D first, so that they keep their numbers.
            x, y = torch.cat([train.x, holdout.x]), torch.cat([train.y, holdout.y])
            self.fit_il = Fitter(il, x, y, IL_BATCH, rate)
            self.holdout_rows = torch.arange(len(train), len(y), device=y.device)
        else:
            self.fit_il = Fitter(il, train.x, train.y, self.k, rate)
        self.acquired: list[Tensor] = []

    def score(self, rows: Tensor) -> Tensor:
        """L[y|x; D_t] - L[y|x; D_ho, D_t] (Eq. 2), [B]."""
        x, y = self.train.x[rows], self.train.y[rows]
        return losses(self.target, x, y) - losses(self.il, x, y)

    def learn(self, rows: Tensor) -> None:
        """Learn from the acquired rows, [k]."""
        self.acquired.append(rows)
        retrains, pool = self.approximation.retrains, torch.cat(self.acquired)
        for epoch in range(EPOCHS if retrains else 1):
            generator = core.step_generator(self.seed, 1000 * len(self.acquired) + epoch)
            if retrains and self.reading != "A":
                self.fit.epoch(pool, generator)
            else:
                self.fit.step(rows)
            if retrains and self.reading == "B":
                self.fit_il.epoch(torch.cat([self.holdout_rows, pool]), generator)
            elif self.approximation.updates_il:
                self.fit_il.step(rows)


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; those of equal values are averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation, with average ranks for ties."""
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def overlap(a: np.ndarray, b: np.ndarray, k: int) -> float:
    """Share of the k highest of one that are among the k highest of the other."""
    top = [set(np.argsort(-values, kind="stable")[:k].tolist()) for values in (a, b)]
    return len(top[0] & top[1]) / k
