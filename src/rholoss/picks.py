"""Picks: from scores [B] to positions [k]. A pick never sees an example.

A score of -inf means "never": such a candidate is taken only when there are too few others. All
randomness comes from the generator that is passed in; ties go to the earlier position. Nothing
here waits for the device: no `.item()`, no data-dependent shape, no `multinomial` (which checks its
input on the host).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from rholoss.core import Selection
from rholoss.errors import RholossError


def _uniform(score_B: Tensor, num: int, generator: Generator) -> Tensor:
    """`num` numbers in (0, 1), drawn where the generator lives, brought to where the scores are."""
    # float32 whatever the default is: frameworks set that to 16 bits, in which many draws would be equal.
    drawn = torch.rand(num, generator=generator, device=generator.device, dtype=torch.float32)
    # A copy to the host must block, or its numbers would be read before they have arrived.
    return drawn.clamp_(min=1e-7).to(score_B.device, non_blocking=score_B.device.type != "cpu")


def _highest(key_B: Tensor, k: int) -> Tensor:
    return key_B.sort(descending=True, stable=True).indices[:k]


def _draw(prob_B: Tensor, k: int, generator: Generator) -> Tensor:
    """k positions with replacement, by inverting the cumulative distribution."""
    cumulative_B = prob_B.double().cumsum(0)
    # Times the total, so that rounding never leads past the last candidate with probability > 0.
    point_k = _uniform(prob_B, k, generator).double() * cumulative_B[-1]
    return torch.searchsorted(cumulative_B, point_k).clamp_(max=len(prob_B) - 1)


def top_k(score_B: Tensor, k: int, generator: Generator) -> Selection:
    """The k highest scores, best first. Negative scores are picked too if they are the highest."""
    return Selection(_highest(score_B, k))


def random_k(score_B: Tensor, k: int, generator: Generator) -> Selection:
    """k candidates at random, without replacement."""
    key_B = _uniform(score_B, len(score_B), generator)
    return Selection(_highest(torch.where(score_B == -torch.inf, key_B - 1, key_B), k))


@dataclass(frozen=True)
class ImportanceSample:
    """Draw k with replacement in proportion to the score, and weight by 1 / (B p): unbiased.

    The mean of weight x loss over the draw has the mean loss of all candidates as its expectation
    (Katharopoulos & Fleuret, 2018). Scores must not be negative; zero scores are never drawn unless
    all are zero, in which case all are alike.
    """

    replacement: ClassVar[bool] = True

    def __call__(self, score_B: Tensor, k: int, generator: Generator) -> Selection:
        """Draw positions and their weights."""
        valid_B = (score_B > -torch.inf).to(score_B.dtype)
        mass_B = torch.where(valid_B > 0, score_B, 0.0).clamp(min=0.0)
        mass_B = torch.where(mass_B.sum() > 0, mass_B, valid_B)
        prob_B = mass_B / mass_B.sum()
        position = _draw(prob_B, k, generator)
        return Selection(position, 1.0 / (valid_B.sum() * prob_B[position]))


@dataclass(frozen=True)
class SoftmaxSample:
    """Boltzmann sampling: draw k in proportion to exp(score / temperature).

    Without replacement by default (Gumbel top-k); with replacement as in the authors' code.
    """

    temperature: float = 1.0
    replacement: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise RholossError(
                f"`temperature` must be above 0 and finite, but is {self.temperature}; for the hard "
                "choice use the method without Boltzmann sampling, for a random one 'uniform'."
            )

    def __call__(self, score_B: Tensor, k: int, generator: Generator) -> Selection:
        """Draw positions."""
        if self.replacement:
            # Less the highest before the division, which a low temperature would let overflow.
            logit_B = (score_B - score_B.max()) / self.temperature
            return Selection(_draw(logit_B.softmax(0), k, generator))
        gumbel_B = -torch.log(-torch.log(_uniform(score_B, len(score_B), generator)))
        return Selection(_highest(score_B + self.temperature * gumbel_B, k))
