"""Scores: pure functions of what was measured, one equation each. A score never sees a model.

Each takes `Stats` and returns [B]; the highest are wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rholoss.core import Stats


def reducible_loss(stats: Stats) -> Tensor:
    """Training loss minus irreducible holdout loss, Eq. 3 of the paper (RHO-LOSS)."""
    return stats.loss - stats.irreducible_loss


def training_loss(stats: Stats) -> Tensor:
    """The loss itself: what is not yet learnt, and what never can be."""
    return stats.loss


def gradient_norm(stats: Stats) -> Tensor:
    """Norm of the loss gradient at the logits, ||softmax - onehot||: bounds the whole gradient's."""
    return stats.grad_norm


def negative_irreducible_loss(stats: Stats) -> Tensor:
    """What a model of the holdout set finds easy."""
    return -stats.irreducible_loss


def entropy(stats: Stats) -> Tensor:
    """Entropy of the mean predictive distribution, H[E p]."""
    return stats.entropy


def conditional_entropy(stats: Stats) -> Tensor:
    """Mean entropy of the drawn predictive distributions, E H[p]."""
    return stats.conditional_entropy


def bald(stats: Stats) -> Tensor:
    """Mutual information of label and parameters, H[E p] - E H[p]."""
    return stats.entropy - stats.conditional_entropy


def loss_minus_conditional_entropy(stats: Stats) -> Tensor:
    """Training loss minus the entropy that the model itself expects."""
    return stats.loss - stats.conditional_entropy


def nothing(stats: Stats) -> Tensor:
    """All candidates alike."""
    return torch.zeros(len(stats.index), device=getattr(stats.index, "device", "cpu"))
