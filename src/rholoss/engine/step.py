"""One step on the device: candidates, scores, choice, gradient. No host in between.

Everything a step reads and writes is a tensor that stays in place, so that the step can be captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from rholoss import core
from rholoss.core import Method, Stats
from rholoss.engine.order import Order
from rholoss.engine.resident import Resident
from rholoss.losses import Task
from rholoss.modes import kept_random_state, own_autocast, scoring_mode
from rholoss.scoring import Scorer


@dataclass
class Counters:
    """What a step leaves behind for the host to read at the next flush. All on the device.

    `window` steps of chosen ids, their scores and the loss; candidates passed over because their score
    was not finite; steps with too few finite scores; steps whose loss was not finite.
    """

    index: Tensor  # [window, k]
    score: Tensor  # [window, k]
    loss: Tensor  # [window]
    row: Tensor  # [1], next row of the window
    not_finite: Tensor
    short: Tensor
    broken: Tensor

    @classmethod
    def empty(cls, window: int, k: int, device: torch.device) -> Counters:
        """All zero."""
        return cls(
            torch.zeros(window, k, dtype=torch.long, device=device),
            torch.zeros(window, k, device=device),
            torch.zeros(window, device=device),
            torch.zeros(1, dtype=torch.long, device=device),
            *(torch.zeros((), dtype=torch.long, device=device) for _ in range(3)),
        )

    def record(self, index: Tensor, score: Tensor | None, loss: Tensor) -> None:
        """Note one step."""
        self.index.index_copy_(0, self.row, index[None])
        if score is not None:
            self.score.index_copy_(0, self.row, score[None].float())
        self.loss.index_copy_(0, self.row, loss.detach()[None])
        self.broken += ~loss.detach().isfinite()
        self.row += 1

    def guard(self, score_B: Tensor, enough: int) -> None:
        """Count scores that cannot be used."""
        num_bad = (score_B == -torch.inf).sum()
        self.not_finite += num_bad
        self.short += num_bad > len(score_B) - enough


# The parts that are compiled: functions of their arguments alone, so that all trainers of a process
# share one compilation.


@functools.cache
def compiled(part: Callable[..., Any]) -> Callable[..., Any]:
    """The part, compiled for fixed shapes."""
    return torch.compile(part, dynamic=False)


def gather(data: Resident, rows: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
    """Inputs and targets of these rows."""
    return data.batch(rows, drawn)


def train_losses(
    model: nn.Module, task: Task, x: Tensor, y: Tensor, dtype: torch.dtype | None
) -> Tensor:
    """Loss of each row, with a graph of gradients."""
    with own_autocast(x.device, dtype):
        return task(model, (x, y))


def score_candidates(
    model: nn.Module,
    scorer: Scorer,
    x: Tensor,
    y: Tensor,
    needs: frozenset[str],
    draws: int,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Quantities of each row, as the model is now."""
    with own_autocast(x.device, dtype):
        return scorer.forward(model, (x, y), len(y), needs, draws)


class DeviceStep:
    """The bodies of the steps, over a model, its optimizer, resident data and a method."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Resident,
        method: Method,
        scorer: Scorer,
        candidates: int,
        k: int,
        *,
        generator: Callable[[], Generator],
        irreducible: Tensor | None,
        live: Any = None,
        compile: bool,
        lr: Tensor,
        lr_T: Tensor,
        counters: Counters,
    ) -> None:
        assert isinstance(scorer.loss, Task)
        self.model, self.optimizer, self.data, self.method = model, optimizer, data, method
        self.scorer, self.task, self.k, self.generator = scorer, scorer.loss, k, generator
        self.irreducible, self.live = irreducible, live
        self.dtype, self.lr, self.lr_T, self.counters = scorer.dtype, lr, lr_T, counters
        self.number = torch.zeros(1, dtype=torch.long, device=data.device)  # of the step
        self.order = Order(len(data), candidates, data.device)
        self.uniform_order = Order(len(data), k, data.device)
        self.draws = scorer.draws if method.needs & core.MONTE_CARLO else 1
        self.needs = method.needs - {"irreducible_loss"}
        self.runs_model = bool(self.needs)
        wrap: Callable[..., Any] = compiled if compile else lambda part: part
        self._gather, self._losses, self._scores = (
            wrap(gather),
            wrap(train_losses),
            wrap(score_candidates),
        )

    def measure(
        self, model: nn.Module, x: Tensor, y: Tensor, generator: Generator
    ) -> dict[str, Tensor]:
        """Quantities of the candidates, without a graph of gradients."""
        if not self.runs_model:
            return {}
        dropout = self.scorer.dropout or self.draws > 1
        mode = scoring_mode(model, batch_norm=self.scorer.batch_norm, dropout=dropout)
        randomness: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if dropout and self.data.device.type == "cpu":  # in a CUDA graph the state is the graph's
            randomness = kept_random_state(self.data.device, core.draw_seed(generator))
        with torch.no_grad(), mode, randomness:
            return self._scores(model, self.scorer, x, y, self.needs, self.draws, self.dtype)

    def take(self, order: Order, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, inputs and targets of the next batch of an order."""
        rows = order.next()
        x, y = self._gather(self.data, rows, self.data.draw(len(rows), generator))
        return self.data.ids.index_select(0, rows), x, y

    def choose(
        self, model: nn.Module, index: Tensor, x: Tensor, y: Tensor, generator: Generator
    ) -> tuple[core.Selection, Tensor]:
        """Score the candidates with a model and choose k of them."""
        measured = self.measure(model, x, y, generator)
        if "irreducible_loss" in self.method.needs:
            if self.live is not None:
                candidates = (x.float(), y)
                measured["irreducible_loss"] = self.live.losses(index, candidates, self.data.device)
            else:
                assert self.irreducible is not None
                measured["irreducible_loss"] = self.irreducible.index_select(0, index)
        selection, score_B = core.choose(self.method, Stats(index, measured), self.k, generator)
        if self.method.needs:
            replacing = getattr(self.method.pick, "replacement", False)
            self.counters.guard(score_B, 1 if replacing else self.k)
        return selection, score_B

    def learn(self, x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        """A gradient step at the rate of this step; returns the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss_k = self._losses(self.model, self.task, x, y, self.dtype)
        loss = loss_k.mean() if weight is None else (loss_k * weight).mean()
        loss.backward()
        self._set_rate()
        self.optimizer.step()
        self.number += 1
        return loss

    def _set_rate(self) -> None:
        if self.data.device.type == "cuda":
            self.lr.copy_(self.lr_T.index_select(0, self.number)[0])
            return
        for group in self.optimizer.param_groups:  # a number is exact
            group["lr"] = self.lr_T[self.number].item()

    # The bodies.

    def uniform(self) -> None:
        """Train on the next n_b rows as they come."""
        index, x, y = self.take(self.uniform_order, self.generator())
        loss = self.learn(x, y, None)
        self.counters.record(index, None, loss)

    def select(self) -> None:
        """Lines 2 to 6 of Algorithm 1."""
        generator = self.generator()
        index, x, y = self.take(self.order, generator)
        selection, score_B = self.choose(self.model, index, x, y, generator)
        b = selection.position
        if self.live is not None:
            self.live.update((x[b].float(), y[b]), selection.weight)
        loss = self.learn(x[b], y[b], selection.weight)
        self.counters.record(index[b], score_B[b], loss)
