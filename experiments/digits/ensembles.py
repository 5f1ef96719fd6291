"""Several MLPs as one batched computation: their weights are stacked, and one product serves them all.

Shapes: M members, B points, C classes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from rholoss import core
from rholoss.engine.capture import Captured

SCORED_AT_ONCE = 5000


class Stack(nn.Module):
    """M MLPs with ReLU between the layers. Member m is the same whatever M is: its seed is (seed, m)."""

    def __init__(self, members: int, widths: Sequence[int], seed: int) -> None:
        super().__init__()
        generators = [core.step_generator(seed, member) for member in range(members)]
        shapes = list(itertools.pairwise(widths))
        self.members = members
        drawn = [[_linear(*shape, generator) for shape in shapes] for generator in generators]
        layers = [[torch.stack(parts) for parts in zip(*layer)] for layer in zip(*drawn)]  # noqa: B905
        self.weights = nn.ParameterList([weight for weight, _ in layers])
        self.biases = nn.ParameterList([bias for _, bias in layers])

    def forward(self, x: Tensor) -> Tensor:
        """Logits [M, B, C] of points [B, in] that all members see, or [M, B, in] of their own."""
        hidden = x.expand(self.members, *x.shape) if x.ndim == 2 else x
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden if number == 0 else hidden.relu(), weight)
        return hidden


def _linear(inside: int, outside: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Weight [in, out] and bias [1, out], drawn as `nn.Linear` draws them."""
    bound = 1 / math.sqrt(inside)
    return tuple(  # type: ignore[return-value]
        torch.empty(rows, outside).uniform_(-bound, bound, generator=generator)
        for rows in (inside, 1)
    )


def member_losses(logits_MBC: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each member, [M, B]; y is [B] or [M, B]."""
    y_MB = y.expand(logits_MBC.shape[:2])
    return F.cross_entropy(logits_MBC.flatten(0, 1), y_MB.flatten(), reduction="none").view_as(y_MB)


def predictive_loss(logits_MBC: Tensor, y: Tensor) -> Tensor:
    """-log of the mean probability that the members give the label: the ensemble's loss, [B]."""
    return math.log(len(logits_MBC)) - (-member_losses(logits_MBC, y)).logsumexp(0)


@torch.no_grad()
def losses(stack: Stack, x: Tensor, y: Tensor) -> Tensor:
    """The ensemble's loss of each point, [N]."""
    parts = zip(x.split(SCORED_AT_ONCE), y.split(SCORED_AT_ONCE), strict=True)
    return torch.cat([predictive_loss(stack(part), label) for part, label in parts])


@torch.no_grad()
def accuracy(stack: Stack, x: Tensor, y: Tensor) -> float:
    """Of the mean probability."""
    parts = [stack(part).softmax(2).mean(0).argmax(1) for part in x.split(SCORED_AT_ONCE)]
    return float((torch.cat(parts) == y).float().mean())


class Fitter:
    """Gradient steps of a stack on rows of one data set; on a GPU a step is one CUDA graph.

    AdamW works on each number apart, so the members learn as if each were alone.
    """

    def __init__(self, stack: Stack, x: Tensor, y: Tensor, batch_size: int, rate: float) -> None:
        self.stack, self.x, self.y, self.size = stack, x, y, batch_size
        on_gpu = x.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            stack.parameters(), lr=rate, fused=True, capturable=on_gpu
        )
        self.rows = torch.zeros(stack.members, batch_size, dtype=torch.long, device=x.device)
        self._step: Callable[[], None] = Captured(self._body, x.device) if on_gpu else self._body

    def _body(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        rows = self.rows
        x = self.x[rows[0]] if self.stack.members == 1 else self.x[rows]
        loss_MB = member_losses(self.stack(x), self.y[rows])
        loss_MB.mean(1).sum().backward()  # the sum keeps the members' gradients apart
        self.optimizer.step()

    def step(self, rows: Tensor) -> None:
        """One step on these rows, [batch_size] for all members or [M, batch_size]."""
        self.rows.copy_(rows.expand_as(self.rows), non_blocking=True)
        self._step()

    def epoch(self, pool: Tensor, generator: Generator) -> None:
        """One pass over these rows, each member in an order of its own; what is left over is dropped."""
        whole = len(pool) // self.size * self.size
        orders = [
            torch.randperm(len(pool), generator=generator)[:whole]
            for _ in range(self.stack.members)
        ]
        for part in pool[torch.stack(orders).to(pool.device)].split(self.size, 1):
            self.step(part)


def fit_lowest(
    stack: Stack,
    train: tuple[Tensor, Tensor],
    judged: tuple[Tensor, Tensor],
    *,
    epochs: int,
    batch_size: int,
    rate: float,
    seed: int,
    keep: str = "lowest",
    on_epoch: Callable[[], None] = lambda: None,
) -> list[int]:
    """Train on `train`; each member keeps the weights of its epoch of lowest loss on `judged`.

    `keep="last"` keeps those of the last epoch and judges nothing. Returns the epoch (from 1) that each
    member kept.
    """
    fitter = Fitter(stack, *train, batch_size, rate)
    pool = torch.arange(len(train[1]), device=train[1].device)
    lowest, kept, best = torch.full((stack.members,), torch.inf), None, [epochs] * stack.members
    for epoch in range(1, epochs + 1):
        fitter.epoch(pool, core.step_generator(seed, epoch))
        on_epoch()
        if keep == "last":
            continue
        loss_M = _mean_losses(stack, *judged).cpu()
        better = loss_M < lowest
        lowest, kept = torch.where(better, loss_M, lowest), _merge(kept, stack, better)
        best = [epoch if new else old for new, old in zip(better.tolist(), best, strict=True)]
    if kept is not None:
        stack.load_state_dict(kept)
    return best


@torch.no_grad()
def _mean_losses(stack: Stack, x: Tensor, y: Tensor) -> Tensor:
    parts = zip(x.split(SCORED_AT_ONCE), y.split(SCORED_AT_ONCE), strict=True)
    return torch.cat([member_losses(stack(part), label) for part, label in parts], 1).mean(1)


def _merge(kept: dict[str, Tensor] | None, stack: Stack, better_M: Tensor) -> dict[str, Tensor]:
    """Of each member the weights as they are now if it is better, else those that were kept."""
    now = copy.deepcopy(stack.state_dict())
    if kept is None:
        return now
    choose = better_M.to(next(iter(now.values())).device)[:, None, None]
    return {name: torch.where(choose, now[name], kept[name]) for name in now}
