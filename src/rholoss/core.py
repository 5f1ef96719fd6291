"""Algorithm 1 of RHO-LOSS (Mindermann et al., ICML 2022), written to be read: the specification.

    1  given     irreducible losses IL[i] of a model trained on holdout data
    2  repeat    draw candidates B_t                                      (B = n_B of them)
    3            Loss[i] = L[y_i | x_i; D_t] for i in B_t                 (`measure`)
    4            score[i] = Loss[i] - IL[i]                               (`Method.score`)
    5            b_t = the n_b candidates with the highest score          (`Method.pick`)
    6            take a gradient step on the mean loss of b_t             (`train_step`)

Every method that the paper compares with is another score and another pick. Naive on purpose (eager,
float32, classification): all that is fast is tested to choose the same candidates as `train_step`.

Shapes: B candidates, k selected, K Monte-Carlo draws, C classes. `index` is a row of the data set,
`position` a place in the candidate batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

MONTE_CARLO = frozenset({"entropy", "conditional_entropy"})  # measured over dropout draws


@dataclass(frozen=True)
class Stats:
    """What was measured of the candidates: `stats.loss`, `stats.irreducible_loss` and so on, [B]."""

    index: Any  # ids [B] of the candidates
    measured: Mapping[str, Tensor]  # the quantities by name, those in the `needs` of the method

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["measured"][name]
        except KeyError:
            raise AttributeError(f"`{name}` was not measured: name it in `needs`.") from None


@dataclass(frozen=True)
class Selection:
    """The selected candidates, as a pick returns them."""

    position: Tensor  # their positions [k] in the candidate batch
    weight: Tensor | None = None  # importance weights [k], if they were sampled by importance


@dataclass(frozen=True)
class Method:
    """A way to select: score the candidates by what was measured, and pick k of them by score."""

    name: str  # as reports and messages have it
    score: Callable[[Stats], Tensor]  # what was measured -> scores [B]; higher is better
    pick: Callable[[Tensor, int, Generator], Selection]  # (scores [B], k, randomness) -> Selection
    needs: frozenset[str]  # what to measure: "loss", "irreducible_loss", "entropy", ...


def num_selected(rows: int, keep: float) -> int:
    """n_b for a candidate batch of `rows`: the nearest whole number, at least one."""
    return max(1, math.floor(rows * keep + 0.5))


def step_generator(seed: int, step: int) -> Generator:
    """Randomness of one step: a function of (seed, step), so that a resumed run repeats it."""
    return Generator().manual_seed((int(seed) * 0x9E3779B97F4A7C15 + step) % 2**63)


def draw_seed(generator: Generator) -> int:
    """Seed of one step's dropout draws."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


@contextmanager
def scoring_mode(model: nn.Module, *, dropout: bool) -> Iterator[None]:
    """Eval mode, but BatchNorm (unless frozen) sees the candidates, as the paper does it."""
    whole, flags = model.training, [(module, module.training) for module in model.modules()]
    for module, trains in flags:
        live = isinstance(module, nn.modules.batchnorm._BatchNorm) or dropout
        module.training = live and (trains or not whole)
    try:
        yield
    finally:
        for module, trains in flags:
            module.training = trains


def measure(model: nn.Module, x: Tensor, y: Tensor, draws: int, seed: int) -> dict[str, Tensor]:
    """What the model says of the candidates (line 3). Several draws: dropout on, mean probability."""
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.no_grad(), scoring_mode(model, dropout=draws > 1), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        logits_KBC = torch.stack([model(x).float() for _ in range(draws)])
    probs_KBC = logits_KBC.softmax(2)
    probs_BC = probs_KBC.mean(0)
    losses_KB = torch.stack([F.cross_entropy(z_BC, y, reduction="none") for z_BC in logits_KBC])
    return {
        "loss": losses_KB.mean(0),
        "grad_norm": (probs_BC - F.one_hot(y, probs_BC.shape[1])).norm(dim=1),
        "entropy": torch.special.entr(probs_BC).sum(1),
        "conditional_entropy": torch.special.entr(probs_KBC).sum(2).mean(0),
    }


def choose(method: Method, stats: Stats, k: int, generator: Generator) -> tuple[Selection, Tensor]:
    """Lines 4 and 5. A score that is not finite becomes -inf, so that it is never picked."""
    score_B = method.score(stats)
    score_B = score_B.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    return method.pick(score_B, k, generator), score_B


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor, Tensor],
    method: Method,
    k: int,
    generator: Generator,
    irreducible_loss: Tensor | None = None,
    live: tuple[nn.Module, torch.optim.Optimizer] | None = None,
    draws: int = 10,
) -> tuple[Selection, Tensor]:
    """Lines 3 to 6 for one candidate batch (index, x, y); returns what was selected and its loss.

    The irreducible losses are a table by index, or come from a `live` model and its optimizer: the
    original selection function (Eq. 2), whose model takes a step of its own on the selected points.
    """
    index, x, y = batch
    draws = draws if method.needs & MONTE_CARLO else 1
    measured = {}
    if method.needs - {"irreducible_loss"}:  # uniform and negative IL cost no forward pass
        measured = measure(model, x, y, draws, draw_seed(generator) if draws > 1 else 0)
    if live is not None:
        with torch.no_grad():
            measured["irreducible_loss"] = F.cross_entropy(live[0].eval()(x), y, reduction="none")
    elif irreducible_loss is not None:
        measured["irreducible_loss"] = irreducible_loss[index]
    selection, _ = choose(method, Stats(index, measured), k, generator)
    b, weight_k = selection.position, 1.0 if selection.weight is None else selection.weight
    for network, steps in [live, (model, optimizer)] if live else [(model, optimizer)]:
        steps.zero_grad()
        loss = (weight_k * F.cross_entropy(network(x[b]), y[b], reduction="none")).mean()
        loss.backward()
        steps.step()
    return selection, loss.detach()
