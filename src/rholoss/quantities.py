"""From what a classifier puts out to per-example numbers. Pure; everything in float32.

Shapes: B examples, K Monte-Carlo draws, C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def grad_norm(logits_KBC: Tensor, target_B: Tensor) -> Tensor:
    """||softmax - onehot||, the norm of d cross-entropy / d logits; at most sqrt(2). Returns [B]."""
    probs_BC = logits_KBC.softmax(2).mean(0)
    target_B = target_B.clamp(min=0)  # `one_hot` takes no -100; the scorer masks such rows
    return (probs_BC - F.one_hot(target_B, probs_BC.shape[1])).norm(dim=1)


def entropy(logits_KBC: Tensor, target_B: Tensor) -> Tensor:
    """Entropy of the mean of the drawn distributions: probabilities are averaged, not logits.

    `entr` is 0 at p = 0, where p log p is NaN. Returns [B].
    """
    return torch.special.entr(logits_KBC.softmax(2).mean(0)).sum(1)


def conditional_entropy(logits_KBC: Tensor, target_B: Tensor) -> Tensor:
    """Mean of the entropies of the drawn distributions. Returns [B]."""
    return torch.special.entr(logits_KBC.softmax(2)).sum(2).mean(0)


Quantity = Callable[[Tensor, Tensor], Tensor]

QUANTITIES: dict[str, Quantity] = {
    "grad_norm": grad_norm,
    "entropy": entropy,
    "conditional_entropy": conditional_entropy,
}
